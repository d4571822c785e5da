// SPDX-License-Identifier: GPL-2.0
/*
 * Opens an event on the device for each perf event of either interface, and
 * closes it later. The perf event may count or sample.
 */
#include <linux/capability.h>
#include <linux/perf_event.h>
#include <linux/slab.h>

#include "compat.h"
#include "perf_core_private.h"
#include "vpmu.h"
#include "vpmu_attr.h"
#include "vpmu_event.h"
#include "vpmu_file.h"
#include "vpmu_ring.h"
#include "vpmu_view.h"

/* Lets notices find an event by its id on the device. */
static int event_publish(struct vpmu_event *own)
{
	struct vpmu_device *dev = own->dev;

	if (own->file)
		return xa_err(xa_store_irq(&dev->lookup.files, own->id, own->file, GFP_KERNEL));
	if (own->sampler && !own->event->parent)
		return xa_err(xa_store_irq(&dev->lookup.sampled, own->id, own, GFP_KERNEL));
	return 0;
}

/**
 * vpmu_event_unpublish() - keep notices from finding an event by its device id
 * @own: the event
 */
void vpmu_event_unpublish(struct vpmu_event *own)
{
	struct vpmu_device *dev = own->dev;

	if (!own->id)
		return;
	if (own->file)
		xa_erase_irq(&dev->lookup.files, own->id);
	if (own->sampler && !own->event->parent)
		xa_erase_irq(&dev->lookup.sampled, own->id);
}

static void event_withdraw(struct vpmu_event *own)
{
	struct vpmu_device *dev = own->dev;

	vpmu_event_unpublish(own);
	/*
	 * Another CPU may still be handling a notice for the event, with this
	 * lock held. Wait until it has finished.
	 */
	spin_lock_irq(&dev->lookup.lock);
	if (own->file)
		list_del(&own->family);
	spin_unlock_irq(&dev->lookup.lock);
}

/*
 * Charges an event that was opened without CAP_PERFMON, unless it is charged
 * already. The event stays charged while it is open on the device.
 */
static int event_charge(struct vpmu_event *own)
{
	int err;

	if (!own->unprivileged || own->charged)
		return 0;
	err = vpmu_permission_charge(own->dev);
	own->charged = !err;
	return err;
}

static void event_uncharge(struct vpmu_event *own)
{
	if (own->charged)
		vpmu_permission_uncharge(own->dev);
	own->charged = false;
}

static void event_closed(struct vpmu_control_request *request)
{
	struct vpmu_control_close *close = container_of(request, struct vpmu_control_close,
							request);

	struct vpmu_event *own = container_of(close, struct vpmu_event, close);

	vpmu_sampling_free(own);
	kfree(own);
}

/*
 * Releases the resources of @own; with @close, also closes the event on the
 * device.
 */
static void event_free(struct vpmu_event *own, bool close)
{
	struct vpmu_device *dev = own->dev;

	event_uncharge(own);
	if (own->file)
		vpmu_file_put(own->file);
	if (own->tracks)
		vpmu_task_put();
	/* The sampler belongs to the parent, which outlives this event. */
	if (own->event->parent)
		own->sampler = NULL;
	if (close) {
		own->close.request.answered = event_closed;
		vpmu_control_close_later(dev, &own->close, own->id);
	} else {
		vpmu_sampling_free(own);
		kfree(own);
	}
	vpmu_device_put(dev);
}

static void event_destroy(struct perf_event *event)
{
	struct vpmu_event *own = event->pmu_private;
	bool close = own->id;

	vpmu_sampling_close(own);
	vpmu_life_remove(own);
	event_withdraw(own);
	/*
	 * perf core destroys inherited events before their parent, and the
	 * device executes requests in order. So when it closes a leader, the
	 * events inherited from the leader are already closed.
	 */
	if (close && own->file && !event->parent && READ_ONCE(own->file->group.close_waits))
		close = vpmu_control_close(own->dev, own->id);
	if (own->view)
		vpmu_view_close(own->view);
	if (own->file && event->parent)
		vpmu_output_gone(own->file);
	event_free(own, close);
}

/*
 * Fills in the request for an event of /dev/vpmu: the fields of its samples and
 * packets, its leader and its parent.
 */
static void event_request_file(struct perf_event *event, struct vpmu_file *file,
			       struct vpmu_open_request *request)
{
	const __le32 acts = cpu_to_le32(VPMU_OPEN_AUX_PAUSE | VPMU_OPEN_AUX_RESUME);
	u64 leader = vpmu_group_leader_id(file, event->hw.target);
	struct vpmu_event *parent;

	*request = file->spec.request;
	request->leader = cpu_to_le64(leader);
	if (!event->parent)
		return;
	/* A task that did not inherit the leader has no trace to pause. */
	if (!leader)
		request->flags &= ~acts;
	parent = event->parent->pmu_private;
	request->parent = cpu_to_le64(parent->id);
	request->period = cpu_to_le64(READ_ONCE(file->spec.period));
	/*
	 * The same engine makes the samples of an event and of all events that
	 * inherit it.
	 */
	request->engine = cpu_to_le32(file->spec.engine);
}

/* The engine that the program asks for */
static u32 event_engine(const struct perf_event *event)
{
	return (event->attr.config1 & VPMU_CONFIG1_ENGINE) >> VPMU_CONFIG1_ENGINE_SHIFT;
}

/* Fills in the sample fields of a request for perf core's event. */
static void event_request_sampling(const struct perf_event *event, const struct vpmu_event *own,
				   struct vpmu_open_request *request)
{
	const struct vpmu_event *parent;

	vpmu_sampling_request(own, request);
	if (!event->parent) {
		request->engine = cpu_to_le32(event_engine(event));
		return;
	}
	parent = event->parent->pmu_private;
	request->parent = cpu_to_le64(parent->id);
	request->engine = cpu_to_le32(parent->engine);
}

/**
 * vpmu_event_request() - fill in the request that opens an event
 * @own: the event
 * @request: filled in
 *
 * Return: 0 or a negative errno.
 */
int vpmu_event_request(struct vpmu_event *own, struct vpmu_open_request *request)
{
	struct perf_event *event = own->event;
	u64 config = event->hw.config;
	struct vpmu_vcpu *vcpu;

	*request = (struct vpmu_open_request) {};
	if (own->file)
		event_request_file(event, own->file, request);
	if (own->sampler)
		event_request_sampling(event, own, request);
	if (event->attr.config1 & VPMU_CONFIG1_ENABLE_ON_STARTER)
		request->flags |= cpu_to_le32(VPMU_OPEN_PAUSED);
	if (!own->file)
		request->leader = cpu_to_le64(vpmu_sampling_leader(event));
	request->kind = cpu_to_le32(config >> VPMU_CONFIG_KIND_SHIFT);
	request->config = cpu_to_le64(config & (VPMU_CONFIG(1, 0) - 1));
	if (own->task) {
		request->context = cpu_to_le32(VPMU_CONTEXT_TASK);
		request->flags |= cpu_to_le32(VPMU_OPEN_ENABLED);
	} else {
		vcpu = *per_cpu_ptr(own->dev->cpu_vcpu, event->cpu);
		if (!vcpu)
			return -ENODEV;
		request->context = cpu_to_le32(vcpu->index);
	}
	return vpmu_attr_request_exclude(own, request);
}

/*
 * Logs that an event was refused because of one of the operator's limits. For
 * ENOSPC, perf(1) points to lines of the log that contain "perf".
 */
static void event_say_full(struct vpmu_device *dev, const char *limit, const char *option)
{
	vpmu_warn_ratelimited(dev,
			      "perf event refused: the limit on %s is reached; ask the VM's operator for a higher %s\n",
			      limit, option);
}

/* Opens the event on the device for @event. */
static int event_open(struct perf_event *event, struct vpmu_event *own)
{
	struct vpmu_open_request request;
	struct vpmu_device *dev = own->dev;
	struct vpmu_opened opened;
	int err;

	err = vpmu_event_request(own, &request);
	if (err)
		return err;
	err = event_charge(own);
	if (err) {
		event_say_full(dev, "events without CAP_PERFMON", "--max-events");
		return err;
	}
	err = vpmu_control_open(dev, &request, &opened);
	if (err == -ENOSPC)
		event_say_full(dev, "events", "--max-events");
	if (err)
		goto uncharge;
	own->id = opened.id;
	own->resets = opened.resets;
	own->engine = opened.engine;
	if (own->file && !event->parent)
		own->file->spec.engine = own->engine;
	/*
	 * Publish the event before its ring is mapped: the device writes to a
	 * mapped ring immediately, and its notices must find the event.
	 */
	err = event_publish(own);
	if (!err && own->sampler)
		err = vpmu_sampling_map(own);
	if (!err)
		return 0;
	if (err == -ENOSPC)
		event_say_full(dev, "pages of rings", "--max-pages");
	vpmu_event_unpublish(own);
	if (vpmu_event_is_stale(own))
		err = -ENODEV;
	/*
	 * If the close fails, the device may still write to the ring, so leak
	 * the ring.
	 */
	if (vpmu_control_close(dev, own->id))
		own->sampler = NULL;
	own->id = 0;
uncharge:
	event_uncharge(own);
	return err;
}

/**
 * vpmu_event_reopen() - open an event again after a reset; its count in perf
 *                       core does not change
 * @own: the event, which is stopped
 *
 * Return: 0 or a negative errno.
 */
int vpmu_event_reopen(struct vpmu_event *own)
{
	struct vpmu_file *file = own->file;
	int err;

	vpmu_event_unpublish(own);
	own->id = 0;
	own->count = 0;
	own->enabled_ns = 0;
	own->running_ns = 0;
	own->lost = 0;
	own->prompt = false;
	own->started = false;
	own->stopping = false;
	err = event_open(own->event, own);
	if (!err && file && !own->event->parent)
		file->id = own->id;
	return err;
}

/*
 * An inherited event has the privileges of its parent, which another task may
 * have opened.
 */
static bool event_is_unprivileged(const struct perf_event *event)
{
	const struct vpmu_event *parent;

	if (!event->parent)
		return !perfmon_capable();
	parent = event->parent->pmu_private;
	return parent->unprivileged;
}

static struct vpmu_event *event_alloc(struct vpmu_device *dev, struct perf_event *event)
{
	struct vpmu_event *own = kzalloc(sizeof(*own), GFP_KERNEL);

	if (!own)
		return NULL;
	own->dev = dev;
	own->event = event;
	own->task = perf_core_is_of_task(event);
	own->unprivileged = event_is_unprivileged(event);
	INIT_LIST_HEAD(&own->family);
	own->file = vpmu_file_of(event);
	if (own->file) {
		vpmu_file_get(own->file);
	} else if (is_sampling_event(event) && vpmu_sampling_alloc(own)) {
		kfree(own);
		return NULL;
	}
	vpmu_device_get(dev);
	return own;
}

/* Whether a reset has ended the event that @event is inherited from. */
static bool event_parent_has_ended(const struct perf_event *event)
{
	const struct vpmu_event *parent = event->parent->pmu_private;

	return !READ_ONCE(parent->id);
}

static int event_prepare(struct perf_event *event, struct vpmu_event *own)
{
	struct vpmu_device *dev = own->dev;
	int err;

	/* Pairs with the barrier in device_leave(). */
	smp_mb__after_atomic();
	if (READ_ONCE(dev->life.lost))
		return READ_ONCE(dev->life.lost);
	/*
	 * An inherited event uses its parent's references: the parent outlives
	 * it.
	 */
	if (event->parent)
		return event_parent_has_ended(event) ? -EIO : 0;
	if (own->task) {
		err = perf_core_anchor_task(event->hw.target);
		if (err)
			return err;
	}
	/*
	 * If the device has no task pages, open the event anyway: its samples
	 * then do not name tasks.
	 */
	if (own->sampler) {
		err = vpmu_task_get(dev);
		own->tracks = !err;
		return err == -EOPNOTSUPP ? 0 : err;
	}
	return 0;
}

/*
 * Called when the event that a new task inherits could not be opened on the
 * device. Pins the contexts of the event's family. To perf core, the new task's
 * context is equal to the contexts of the family's other tasks. Without the
 * pins, perf core would swap the contexts at a switch between these tasks, and
 * so give the new task the open event of another task. Does nothing if a reset
 * has ended the parent.
 */
static void event_miss(struct vpmu_event *missing, int err)
{
	struct perf_event *child, *parent = missing->event->parent;
	struct vpmu_event *own = parent->pmu_private;
	struct vpmu_device *dev = own->dev;

	if (event_parent_has_ended(missing->event))
		return;
	perf_core_lock_family(parent);
	WRITE_ONCE(own->incomplete, true);
	local_irq_disable();
	vpmu_event_anchor(own);
	perf_core_for_each_child(child, parent)
		vpmu_event_anchor(child->pmu_private);
	local_irq_enable();
	perf_core_unlock_family(parent);
	vpmu_warn_ratelimited(dev, "an inherited event is not counted in a new task (%d)\n", err);
}

/**
 * vpmu_event_create() - set up a perf event, and open it on the device
 * @dev: the device
 * @event: the event, opened or inherited; its PMU has already checked the attr
 *
 * Return: 0 or a negative errno.
 */
int vpmu_event_create(struct vpmu_device *dev, struct perf_event *event)
{
	struct perf_event_attr *attr = &event->attr;
	struct vpmu_event *own;
	int err;

	if (has_branch_stack(event) || attr->exclude_host || attr->exclude_idle)
		return -EOPNOTSUPP;
	if (attr->config1 & ~(u64)(VPMU_CONFIG1_ENABLE_ON_STARTER | VPMU_CONFIG1_ENGINE) ||
	    attr->config2 || event_engine(event) > VPMU_ENGINE_BATCHED)
		return -EINVAL;
	if (event->cpu >= 0 && !cpu_possible(event->cpu))
		return -ENODEV;

	own = event_alloc(dev, event);
	if (!own)
		return -ENOMEM;
	err = event_prepare(event, own);
	if (!err)
		err = event_open(event, own);
	if (err && !event->parent)
		goto free;
	/*
	 * For an inherited event, an error would make the fork fail. Instead,
	 * the event is created but never counts, and its running time stays
	 * zero.
	 */
	if (err)
		event_miss(own, err);

	/*
	 * perf core sets this flag for events of perf_event_open(2) but, before
	 * 6.2, not for in-kernel events. Without the flag, perf core would not
	 * add in-kernel events beside a program's exclusive event.
	 */
	if (event->pmu == &dev->counting.pmu)
		event->event_caps |= PERF_EV_CAP_SOFTWARE;
	event->hw.state = PERF_HES_STOPPED | PERF_HES_UPTODATE;
	event->pmu_private = own;
	if (own->file) {
		spin_lock_irq(&dev->lookup.lock);
		list_add(&own->family, &own->file->family);
		spin_unlock_irq(&dev->lookup.lock);
		if (event->parent)
			vpmu_link_inherit(own);
	}
	if (own->file && !event->parent) {
		own->file->event = event;
		own->file->id = own->id;
		own->file->label = own->id;
		own->file->place.cpu = event->cpu;
		own->file->place.task = event->hw.target;
	}
	event->destroy = event_destroy;
	vpmu_life_add(own);
	return 0;
free:
	event_free(own, false);
	return err;
}

// SPDX-License-Identifier: GPL-2.0
/*
 * Views: events of perf core that read persistent events.
 *
 * A persistent event belongs to the device, which counts and samples with or
 * without a reader. perf core has views of it: events opened with the type of
 * the persistent PMU, and perf events that were made persistent. A view reads
 * the persistent event's whole count, including what was counted before the
 * view was opened. Disabling a view does not disable the persistent event.
 *
 * A view's ring belongs to perf core. While the view's ring is mapped, the
 * samples in the persistent event's ring are replayed to it. Samples that were
 * taken before the mapping come first. As with a ring that several programs
 * map, each sample goes to only one reader.
 */
#include <linux/capability.h>
#include <linux/device.h>
#include <linux/module.h>
#include <linux/perf_event.h>
#include <linux/slab.h>
#include <linux/smp.h>
#include <linux/sysfs.h>

#include "perf_core_private.h"
#include "vpmu.h"
#include "vpmu_arch.h"
#include "vpmu_event.h"
#include "vpmu_file.h"
#include "vpmu_persistent.h"
#include "vpmu_ring.h"

/*
 * Fields that perf core takes from the replayed sample. perf core itself fills
 * in the other fields.
 */
#define SAMPLE_PASSED	(PERF_SAMPLE_IP | PERF_SAMPLE_TID | PERF_SAMPLE_TIME | PERF_SAMPLE_ADDR | \
			 PERF_SAMPLE_CALLCHAIN | PERF_SAMPLE_REGS_INTR)

/**
 * vpmu_view_alloc() - allocate a view that does not read a persistent event yet
 * @event: perf core's event
 *
 * Return: the view, to be freed with vpmu_view_close(); or NULL.
 */
struct vpmu_view *vpmu_view_alloc(struct perf_event *event)
{
	struct vpmu_view *view = kzalloc(sizeof(*view), GFP_KERNEL);

	if (!view)
		return NULL;
	INIT_LIST_HEAD(&view->entry);
	view->event = event;
	return view;
}

/*
 * Whether the records in an event's ring have all fields that a view needs.
 * @wanted is the view's sample_type.
 */
static bool view_fits(const struct vpmu_file *file, u64 wanted)
{
	u64 type = le64_to_cpu(file->spec.request.sample_type);

	if (type & ~(u64)VPMU_REPLAYED || (type | wanted) & VPMU_SAMPLE_PROMPT)
		return false;
	if (type & PERF_SAMPLE_REGS_INTR &&
	    le64_to_cpu(file->spec.request.regs_intr) != VPMU_ARCH_REGS)
		return false;
	/*
	 * In frequency mode the period changes, so the records must contain it.
	 */
	if (wanted & PERF_SAMPLE_PERIOD && !(type & PERF_SAMPLE_PERIOD) && file->spec.freq)
		return false;
	return !(wanted & SAMPLE_PASSED & ~type);
}

/*
 * Whether a view can consume the samples in a ring: new records must not
 * overwrite old ones, and only one event may write to the ring.
 */
static bool view_ring_fits(const struct vpmu_ring *ring)
{
	return ring && ring->count > 1 && !ring->overwrites && !ring->ended &&
	       list_is_singular(&ring->writers);
}

static void view_map(struct vpmu_view *view, struct vpmu_file *file)
{
	struct vpmu_ring *ring = file->output.ring;
	struct vpmu_records *records = &ring->records;

	vpmu_ring_mapped(file);
	records->type = le64_to_cpu(file->spec.request.sample_type);
	records->period = file->spec.period;
	records->shared = true;
	records->pages = ring->pages;
	records->window = ring->window ? vpmu_window_address(file->dev, ring->pfn) : NULL;
	records->size = (ring->count - 1) * PAGE_SIZE;
	view->ring = ring;
	view->file = file;
}

/**
 * vpmu_view_join() - let a view read a persistent event's count
 * @view: the view
 * @file: the event's file, from vpmu_persistent_get()
 */
void vpmu_view_join(struct vpmu_view *view, struct vpmu_file *file)
{
	view->file = file;
}

/**
 * vpmu_view_open() - let a view read a persistent event, and replay its samples
 * @view: the view
 * @file: the event's file, from vpmu_persistent_get(); on success, the view takes
 *        it over
 *
 * Return: 0; or -EOPNOTSUPP if the view samples, but the event has no ring
 * whose samples can be replayed to the view.
 */
int vpmu_view_open(struct vpmu_view *view, struct vpmu_file *file)
{
	struct perf_event *event = view->event;
	int err = 0;

	mutex_lock(&file->dev->output_lock);
	if (!is_sampling_event(event))
		view->file = file;
	else if (view_ring_fits(file->output.ring) && view_fits(file, event->attr.sample_type))
		view_map(view, file);
	else
		err = -EOPNOTSUPP;
	mutex_unlock(&file->dev->output_lock);
	return err;
}

/**
 * vpmu_view_close() - free a view, and let its event end
 * @view: the view, which is not active
 */
void vpmu_view_close(struct vpmu_view *view)
{
	struct vpmu_file *file = view->file;

	if (view->ring) {
		mutex_lock(&file->dev->output_lock);
		vpmu_ring_unmapped(file);
		mutex_unlock(&file->dev->output_lock);
	}
	if (file)
		vpmu_persistent_put(file);
	kfree(view);
}

/*
 * Sets the view's count and times to those of the event, which also counted before
 * the view was opened. The context's lock is held.
 */
static void view_update(struct vpmu_vcpu *vcpu, struct vpmu_view *view)
{
	struct vpmu_reply reply;

	if (vpmu_vcpu_command(vcpu, VPMU_COMMAND_READ, view->file->id, 0, &reply))
		return;
	local64_set(&view->event->count, le64_to_cpu(reply.value));
	perf_core_set_times(view->event, le64_to_cpu(reply.time_enabled),
			    le64_to_cpu(reply.time_running));
}

/**
 * vpmu_view_replay() - replay a persistent event's samples to a view
 * @vcpu: this CPU's queue; interrupts are off
 * @view: the view, which is active on this CPU
 * @left: number of records to replay at most; decremented for each
 *
 * Return: true if records are left for another call.
 */
bool vpmu_view_replay(struct vpmu_vcpu *vcpu, struct vpmu_view *view, unsigned int *left)
{
	/*
	 * A view without a ring of its own would consume the samples but write
	 * no records.
	 */
	if (!view->ring || !perf_core_buffer(view->event))
		return false;
	return vpmu_replay(vcpu, view->event, &view->ring->records, &view->ended, left);
}

/**
 * vpmu_view_start() - start a view
 * @vcpu: this CPU's queue; interrupts are off
 * @view: the view
 */
void vpmu_view_start(struct vpmu_vcpu *vcpu, struct vpmu_view *view)
{
	view_update(vcpu, view);
	view->ended = false;
	if (!view->ring)
		return;
	list_move_tail(&view->entry, &vcpu->views);
	vpmu_sampling_arm(vcpu);
}

/**
 * vpmu_view_stop() - stop a view
 * @vcpu: this CPU's queue; interrupts are off
 * @view: the view
 */
void vpmu_view_stop(struct vpmu_vcpu *vcpu, struct vpmu_view *view)
{
	unsigned int left = VPMU_REPLAY_PIECE;

	view_update(vcpu, view);
	/* If more records are left, they remain in the persistent event's ring. */
	vpmu_view_replay(vcpu, view, &left);
	list_del_init(&view->entry);
}

/**
 * vpmu_view_read() - struct pmu::read
 * @view: the view, on its CPU; interrupts are off
 */
void vpmu_view_read(struct vpmu_view *view)
{
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(view->file->dev);

	/* The call may be nested; see vpmu_vcpu.c. Then keep the last count. */
	if (!vpmu_vcpu_may_read() || !vcpu || view->event->hw.state & PERF_HES_STOPPED)
		return;
	view_update(vcpu, view);
	if (view->ring)
		irq_work_queue(&vcpu->replay_kick);
}

/**
 * struct view_call - a piece of records to replay to a view
 * @view: the view
 * @more: records are left
 */
struct view_call {
	struct vpmu_view *view;
	bool more;
};

static void view_show_here(void *info)
{
	struct view_call *call = info;
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(call->view->file->dev);
	unsigned int left = VPMU_REPLAY_PIECE;

	call->more = vcpu && !list_empty(&call->view->entry) &&
		     vpmu_view_replay(vcpu, call->view, &left);
}

/**
 * vpmu_view_show() - replay all of a persistent event's samples to a view
 * @view: the view; the caller ensures that perf core's event is not destroyed
 */
void vpmu_view_show(struct vpmu_view *view)
{
	struct view_call call = { .view = view };
	/* New records must not keep the loop running forever. */
	size_t pieces = view->ring ? view->ring->count * (PAGE_SIZE / sizeof(u64)) : 0;

	while (pieces--) {
		if (smp_call_function_single(view->event->cpu, view_show_here, &call, 1) ||
		    !call.more)
			break;
		cond_resched();
	}
}

/* The lock of the event's context, if it has one, keeps perf core from scheduling. */
static void view_take_locked(struct vpmu_view *view)
{
	struct perf_event *event = view->event;
	struct vpmu_event *own = event->pmu_private;
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(own->dev);

	own->id = 0;
	own->started = false;
	own->limit_hit = true;
	own->granted = 0;
	/* The view takes over the reference. */
	own->file = NULL;
	if (own->sampler)
		vpmu_sampling_forget(own);
	own->view = view;
	if (vcpu && event->state == PERF_EVENT_STATE_ACTIVE &&
	    !(event->hw.state & PERF_HES_STOPPED))
		vpmu_view_start(vcpu, view);
}

/*
 * Runs with interrupts off, on the event's CPU or, if that CPU is offline, on
 * any other CPU. A new event has no context yet, and is not scheduled yet.
 */
static void view_take(void *info)
{
	struct vpmu_view *view = info;
	struct perf_event_context *ctx = perf_core_context(view->event);

	if (!ctx) {
		view_take_locked(view);
		return;
	}
	perf_core_lock(ctx);
	view_take_locked(view);
	perf_core_unlock(ctx);
}

/**
 * vpmu_view_take() - turn perf core's event into a view of a persistent event
 * @view: the view, which is open; its event is CPU-wide, and alone in its group
 *
 * The event keeps counting on the device, and its enabled and running times in
 * perf core continue.
 */
void vpmu_view_take(struct vpmu_view *view)
{
	struct vpmu_event *own = view->event->pmu_private;
	struct vpmu_device *dev = own->dev;

	mutex_lock(&dev->life.lock);
	/* Notices still find a file. */
	if (!own->file)
		vpmu_event_unpublish(own);
	if (smp_call_function_single(view->event->cpu, view_take, view, 1)) {
		local_irq_disable();
		view_take(view);
		local_irq_enable();
	}
	/* From now on, vpmu_virtio.c finds the event in lookup.files. */
	list_del_init(&own->entry);
	mutex_unlock(&dev->life.lock);
}

/*
 * /sys/bus/event_source/devices/persistent: lists the current persistent
 * events, and lets perf_event_open(2) open them; see below.
 */

PMU_FORMAT_ATTR(id, "config:0-63");

static struct attribute *format_attrs[] = {
	&format_attr_id.attr,
	NULL,
};

static const struct attribute_group format_group = {
	.name = "format",
	.attrs = format_attrs,
};

/* Empty: vpmu_persistent_show() adds files while the PMU is registered */
static struct attribute *events_attrs[] = {
	NULL,
};

static const struct attribute_group events_group = {
	.name = "events",
	.attrs = events_attrs,
};

static const struct attribute_group *persistent_groups[] = {
	&format_group,
	&events_group,
	NULL,
};

static ssize_t event_show(struct device *device, struct device_attribute *attr, char *buf)
{
	const struct vpmu_file *file = container_of(attr, struct vpmu_file, persist.attr);

	return sysfs_emit(buf, "id=0x%llx\n", file->id);
}

/**
 * vpmu_persistent_show() - list an event in sysfs
 * @file: the file of a persistent event, with its name
 */
void vpmu_persistent_show(struct vpmu_file *file)
{
	struct vpmu_device *dev = file->dev;
	int err;

	if (file->persist.shown)
		return;
	sysfs_attr_init(&file->persist.attr.attr);
	file->persist.attr.attr.name = file->persist.name;
	file->persist.attr.attr.mode = 0444;
	file->persist.attr.show = event_show;
	err = sysfs_add_file_to_group(&dev->persistent.pmu.dev->kobj, &file->persist.attr.attr,
				      events_group.name);
	file->persist.shown = !err;
	if (err)
		vpmu_warn(dev, "persistent event %llu is not in sysfs (%d)\n", file->id,
			  err);
}

/**
 * vpmu_persistent_hide() - remove an event from sysfs, and wait for its readers
 * @file: the event's file
 */
void vpmu_persistent_hide(struct vpmu_file *file)
{
	if (!file->persist.shown)
		return;
	sysfs_remove_file_from_group(&file->dev->persistent.pmu.dev->kobj, &file->persist.attr.attr,
				     events_group.name);
	file->persist.shown = false;
}

static struct vpmu_vcpu *view_vcpu(const struct perf_event *event)
{
	const struct vpmu_view *view = event->pmu_private;

	return vpmu_vcpu_local(view->file->dev);
}

static void view_read(struct perf_event *event)
{
	vpmu_view_read(event->pmu_private);
}

static void view_start(struct perf_event *event, int flags)
{
	struct vpmu_vcpu *vcpu = view_vcpu(event);

	if (!vcpu || !(event->hw.state & PERF_HES_STOPPED))
		return;
	event->hw.state = 0;
	vpmu_view_start(vcpu, event->pmu_private);
}

static void view_stop(struct perf_event *event, int flags)
{
	struct vpmu_vcpu *vcpu = view_vcpu(event);

	if (!vcpu || event->hw.state & PERF_HES_STOPPED || vpmu_stop_is_throttle(flags))
		return;
	event->hw.state = PERF_HES_STOPPED | PERF_HES_UPTODATE;
	vpmu_view_stop(vcpu, event->pmu_private);
}

static int view_add(struct perf_event *event, int flags)
{
	event->hw.state = PERF_HES_STOPPED | PERF_HES_UPTODATE;
	if (flags & PERF_EF_START)
		view_start(event, flags);
	return 0;
}

static void view_del(struct perf_event *event, int flags)
{
	view_stop(event, PERF_EF_UPDATE);
}

static void view_event_mapped(struct perf_event *event, struct mm_struct *mm)
{
	vpmu_view_show(event->pmu_private);
}

static void view_destroy(struct perf_event *event)
{
	vpmu_view_close(event->pmu_private);
}

static int view_event_init(struct perf_event *event)
{
	struct vpmu_device *dev = container_of(event->pmu, struct vpmu_device, persistent.pmu);
	struct perf_event_attr *attr = &event->attr;
	struct vpmu_file *file;
	struct vpmu_view *view;
	int err;

	if (attr->type != event->pmu->type)
		return -ENOENT;
	if (attr->precise_ip || has_branch_stack(event))
		return -EOPNOTSUPP;
	err = vpmu_attr_check_replay(event);
	if (err)
		return err;
	if (event->cpu < 0 || perf_core_is_of_task(event))
		return -EINVAL;
	if (attr->config1 || attr->config2 || attr->exclude_user || attr->exclude_kernel ||
	    attr->exclude_host || attr->exclude_idle)
		return -EINVAL;
	if (!perfmon_capable())
		return -EPERM;
	file = vpmu_persistent_get(dev, attr->config);
	if (IS_ERR(file))
		return PTR_ERR(file);
	err = -EINVAL;
	if (file->place.cpu != event->cpu)
		goto put;
	err = -ENOMEM;
	view = vpmu_view_alloc(event);
	if (!view)
		goto put;
	err = vpmu_view_open(view, file);
	if (err) {
		vpmu_view_close(view);
		goto put;
	}
	/*
	 * The persistent event has its own period: perf core must not adapt it.
	 */
	attr->freq = 0;
	event->pmu_private = view;
	event->destroy = view_destroy;
	return 0;
put:
	vpmu_persistent_put(file);
	return err;
}

/**
 * vpmu_persistent_pmu_register() - register the PMU of persistent events
 * @dev: the device
 *
 * Return: 0 or a negative errno.
 */
int vpmu_persistent_pmu_register(struct vpmu_device *dev)
{
	int err;

	dev->persistent.pmu = (struct pmu) {
		.module		= THIS_MODULE,
		.attr_groups	= persistent_groups,
		/*
		 * Views are CPU events: with perf_invalid_context, perf core
		 * refuses events of tasks.
		 */
		.task_ctx_nr	= perf_invalid_context,
		.event_init	= view_event_init,
		.event_mapped	= view_event_mapped,
		.add		= view_add,
		.del		= view_del,
		.start		= view_start,
		.stop		= view_stop,
		.read		= view_read,
	};
	err = perf_pmu_register(&dev->persistent.pmu, "persistent", -1);
	if (!err)
		dev->info.persistent_type = dev->persistent.pmu.type;
	return err;
}

/**
 * vpmu_persistent_pmu_unregister() - unregister the PMU, after all views are
 *                                    closed
 * @dev: the device
 */
void vpmu_persistent_pmu_unregister(struct vpmu_device *dev)
{
	perf_pmu_unregister(&dev->persistent.pmu);
}

// SPDX-License-Identifier: GPL-2.0
/*
 * The perf core door: a struct pmu whose counters live in the device.
 *
 * A per-CPU event is switched (ENABLE, DISABLE) on its vCPU. A per-task event is
 * opened enabled and scheduled in and out (IN, OUT) where its task runs.
 */
#include <linux/module.h>
#include <linux/perf_event.h>
#include <linux/slab.h>

#include "compat.h"
#include "vpmu.h"

static struct vpmu_device *to_vpmu(struct pmu *pmu)
{
	return container_of(pmu, struct vpmu_device, pmu);
}

static void vpmu_pmu_enable(struct pmu *pmu)
{
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(to_vpmu(pmu));

	if (!vcpu)
		return;
	vcpu->bracket = false;
	vpmu_vcpu_flush(vcpu);
}

static void vpmu_pmu_disable(struct pmu *pmu)
{
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(to_vpmu(pmu));

	if (vcpu)
		vcpu->bracket = true;
}

static void vpmu_pmu_start_txn(struct pmu *pmu, unsigned int flags)
{
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(to_vpmu(pmu));

	if (vcpu && flags == PERF_PMU_TXN_READ)
		vcpu->reading = true;
}

static int vpmu_pmu_commit_txn(struct pmu *pmu)
{
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(to_vpmu(pmu));

	if (vcpu && vcpu->reading) {
		vcpu->reading = false;
		vpmu_vcpu_flush(vcpu);
	}
	return 0;
}

static void vpmu_pmu_cancel_txn(struct pmu *pmu)
{
	vpmu_pmu_commit_txn(pmu);
}

static void vpmu_pmu_start(struct perf_event *event, int flags)
{
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(to_vpmu(event->pmu));

	if (!vcpu || !(event->hw.state & PERF_HES_STOPPED))
		return;
	event->hw.state = 0;
	/* One that was expected, and so started already, has brought the others. */
	if (vpmu_event_start(vcpu, event) && !VPMU_CONTEXT_IS_BRACKETED)
		vpmu_context_enter(vcpu, event);
}

static void vpmu_pmu_stop(struct perf_event *event, int flags)
{
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(to_vpmu(event->pmu));

	if (!vcpu || event->hw.state & PERF_HES_STOPPED)
		return;
	event->hw.state = PERF_HES_STOPPED | PERF_HES_UPTODATE;
	if (vpmu_event_stop(vcpu, event) && !VPMU_CONTEXT_IS_BRACKETED)
		vpmu_context_leave(vcpu, event);
}

/*
 * Whether the device names a task in the event's records: the one that it came in
 * with, until it goes out. Between two tasks that inherited the same events perf
 * core swaps their contexts instead, by which nothing goes out or comes in. A
 * pinned context is not swapped.
 */
static bool pmu_names_task(const struct vpmu_event *own)
{
	return own->task && own->file && own->file->tracks;
}

static int vpmu_pmu_add(struct perf_event *event, int flags)
{
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(to_vpmu(event->pmu));
	struct vpmu_event *own = event->pmu_private;

	/*
	 * An event that cannot count must not seem to run: perf shows it as
	 * enabled but not running.
	 */
	if (!vcpu || vcpu->broken || !own->id)
		return -ENODEV;
	/* perf core holds the context's lock, which protects the count. */
	if (pmu_names_task(own))
		event->ctx->pin_count++;
	event->hw.state = PERF_HES_STOPPED | PERF_HES_UPTODATE;
	if (flags & PERF_EF_START)
		vpmu_pmu_start(event, flags);
	return 0;
}

static void vpmu_pmu_del(struct perf_event *event, int flags)
{
	struct vpmu_event *own = event->pmu_private;

	if (pmu_names_task(own))
		event->ctx->pin_count--;
	vpmu_pmu_stop(event, PERF_EF_UPDATE);
	/* The last time that a task's event is heard of; later than the context's lock is held. */
	if (own->task && own->file && !event->parent && current->flags & PF_EXITING)
		irq_work_queue(&own->file->gone);
}

static void vpmu_pmu_read(struct perf_event *event)
{
	struct vpmu_vcpu *vcpu;

	/* A queue's lock must not be taken from an NMI; the last count stands then. */
	if (in_nmi() || event->hw.state & PERF_HES_STOPPED)
		return;
	vcpu = vpmu_vcpu_local(to_vpmu(event->pmu));
	if (!vcpu)
		return;
	vpmu_vcpu_append(vcpu, event, VPMU_COMMAND_READ);
	if (!vcpu->reading)
		vpmu_vcpu_flush(vcpu);
}

static void vpmu_pmu_destroy(struct perf_event *event)
{
	struct vpmu_device *dev = to_vpmu(event->pmu);
	struct vpmu_event *own = event->pmu_private;

	if (own->file) {
		spin_lock_irq(&dev->notice_lock);
		list_del(&own->family);
		spin_unlock_irq(&dev->notice_lock);
	}
	if (own->id) {
		if (own->file)
			xa_erase_irq(&dev->files, own->id);
		vpmu_control_close(dev, own->id);
	}
	if (own->file && event->parent)
		vpmu_output_gone(own->file);
	if (own->file)
		vpmu_file_put(own->file);
	kfree(own);
	vpmu_device_put(dev);
}

/* What a file asks for beyond counting. */
static void pmu_request_file(struct perf_event *event, struct vpmu_file *file,
			     struct vpmu_open_request *request)
{
	const __le32 acts = cpu_to_le32(VPMU_OPEN_AUX_PAUSE | VPMU_OPEN_AUX_RESUME);
	u64 leader = vpmu_group_leader_id(file, event->hw.target);
	struct vpmu_event *parent;

	*request = file->wanted;
	request->leader = cpu_to_le64(leader);
	if (!event->parent)
		return;
	/* A task that did not inherit the trace has none to pause. */
	if (!leader)
		request->flags &= ~acts;
	parent = event->parent->pmu_private;
	request->parent = cpu_to_le64(parent->id);
	request->period = cpu_to_le64(READ_ONCE(file->period));
	/* A family's samples come from one engine. */
	request->engine = cpu_to_le32(file->engine);
}

/* Opens the device's event behind @event. */
static int pmu_open(struct vpmu_device *dev, struct perf_event *event, struct vpmu_event *own)
{
	struct vpmu_open_request request = {};
	u64 config = event->attr.config;
	u32 engine, flags;
	int err;

	if (own->file)
		pmu_request_file(event, own->file, &request);
	flags = le32_to_cpu(request.flags);
	request.kind = cpu_to_le32(config >> VPMU_CONFIG_KIND_SHIFT);
	request.config = cpu_to_le64(config & (VPMU_CONFIG(1, 0) - 1));
	if (own->task) {
		request.context = cpu_to_le32(VPMU_CONTEXT_TASK);
		flags |= VPMU_OPEN_ENABLED;
	} else {
		struct vpmu_vcpu *vcpu = *per_cpu_ptr(dev->cpu_vcpu, event->cpu);

		if (!vcpu)
			return -ENODEV;
		request.context = cpu_to_le32(vcpu->index);
	}
	if (event->attr.exclude_user)
		flags |= VPMU_OPEN_EXCLUDE_USER;
	if (event->attr.exclude_kernel)
		flags |= VPMU_OPEN_EXCLUDE_KERNEL;
	request.flags = cpu_to_le32(flags);

	err = vpmu_control_open(dev, &request, &own->id, &engine);
	if (err || !own->file)
		return err;
	if (!event->parent)
		own->file->engine = engine;
	err = xa_err(xa_store_irq(&dev->files, own->id, own->file, GFP_KERNEL));
	if (err) {
		vpmu_control_close(dev, own->id);
		own->id = 0;
	}
	return err;
}

static int vpmu_pmu_event_init(struct perf_event *event)
{
	struct vpmu_device *dev = to_vpmu(event->pmu);
	struct perf_event_attr *attr = &event->attr;
	struct vpmu_event *own;
	int err;

	if (attr->type != event->pmu->type)
		return -ENOENT;
	/* Here they have nowhere to write to. */
	if (vpmu_config_is_trace(attr->config) && event->overflow_handler != vpmu_file_overflow)
		return -ENOENT;
	/* perf core exports no way to write samples; /dev/vpmu is the door for them. */
	if (is_sampling_event(event) || has_branch_stack(event))
		return -EOPNOTSUPP;
	if (attr->exclude_host || attr->exclude_idle)
		return -EOPNOTSUPP;
	if (attr->config1 || attr->config2)
		return -EINVAL;
	if (event->cpu >= 0 && !cpu_possible(event->cpu))
		return -ENODEV;

	own = kzalloc(sizeof(*own), GFP_KERNEL);
	if (!own)
		return -ENOMEM;
	own->dev = dev;
	own->event = event;
	own->task = event->attach_state & PERF_ATTACH_TASK;
	event->hw.state = PERF_HES_STOPPED | PERF_HES_UPTODATE;
	if (event->overflow_handler == vpmu_file_overflow) {
		own->file = event->overflow_handler_context;
		vpmu_file_get(own->file);
	}
	vpmu_device_get(dev);
	/* Pairs with the barrier in device_drain(). */
	smp_mb__after_atomic();
	err = -ENODEV;
	if (READ_ONCE(dev->gone))
		goto fail;
	if (own->task && !event->parent) {
		err = vpmu_anchor_task_context(event->hw.target);
		if (err)
			goto fail;
	}

	err = pmu_open(dev, event, own);
	if (err && !event->parent)
		goto fail;
	/*
	 * An error here would make the fork fail that inherits the event. It is
	 * kept and never runs instead, which its times show.
	 */
	if (err)
		dev_warn_ratelimited(&dev->vdev->dev,
				     "an inherited event is not counted in a new task (%d)\n", err);

	event->pmu_private = own;
	if (own->file) {
		spin_lock_irq(&dev->notice_lock);
		list_add(&own->family, &own->file->family);
		if (!event->parent)
			WRITE_ONCE(own->file->event, event);
		spin_unlock_irq(&dev->notice_lock);
	}
	event->destroy = vpmu_pmu_destroy;
	return 0;
fail:
	if (own->file)
		vpmu_file_put(own->file);
	kfree(own);
	vpmu_device_put(dev);
	return err;
}

/**
 * vpmu_pmu_register() - make the device a PMU
 * @dev: the device
 *
 * Return: 0 or a negative errno.
 */
int vpmu_pmu_register(struct vpmu_device *dev)
{
	int err;

	err = vpmu_sysfs_init(dev);
	if (err)
		return err;
	dev->pmu = (struct pmu) {
		.module		= THIS_MODULE,
		.attr_groups	= dev->attr_groups,
		/* The hardware context takes one PMU, and a CPU's own goes first. */
		.task_ctx_nr	= perf_sw_context,
		.capabilities	= PERF_PMU_CAP_NO_INTERRUPT,
		.pmu_enable	= vpmu_pmu_enable,
		.pmu_disable	= vpmu_pmu_disable,
		.event_init	= vpmu_pmu_event_init,
		.add		= vpmu_pmu_add,
		.del		= vpmu_pmu_del,
		.start		= vpmu_pmu_start,
		.stop		= vpmu_pmu_stop,
		.read		= vpmu_pmu_read,
		.start_txn	= vpmu_pmu_start_txn,
		.commit_txn	= vpmu_pmu_commit_txn,
		.cancel_txn	= vpmu_pmu_cancel_txn,
	};
	err = perf_pmu_register(&dev->pmu, "vpmu", -1);
	if (err) {
		vpmu_sysfs_exit(dev);
		return err;
	}
	dev->info.pmu_type = dev->pmu.type;
	return 0;
}

/**
 * vpmu_pmu_unregister() - the device is a PMU no more; no event may be left
 * @dev: the device
 */
void vpmu_pmu_unregister(struct vpmu_device *dev)
{
	perf_pmu_unregister(&dev->pmu);
	vpmu_sysfs_exit(dev);
}

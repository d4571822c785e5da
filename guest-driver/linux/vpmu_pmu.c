// SPDX-License-Identifier: GPL-2.0
/*
 * The PMU vpmu: a struct pmu whose counters the device provides.
 *
 * A CPU event is enabled and disabled on its vCPU. A task event is enabled when
 * it is opened. The commands IN and OUT then schedule it in and out on the vCPU
 * where its task runs.
 */
#include <linux/cpumask.h>
#include <linux/err.h>
#include <linux/module.h>
#include <linux/perf_event.h>

#include "compat.h"
#include "perf_core_private.h"
#include "vpmu.h"
#include "vpmu_arch.h"
#include "vpmu_attr.h"
#include "vpmu_event.h"
#include "vpmu_file.h"
#include "vpmu_view.h"

static struct vpmu_device *to_vpmu(const struct pmu *pmu)
{
	return container_of(pmu, struct vpmu_device, counting.pmu);
}

static void vpmu_pmu_enable(struct pmu *pmu)
{
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(to_vpmu(pmu));

	if (!vcpu)
		return;
	vcpu->pmu_disabled = false;
	vcpu->group_read = NULL;
	if (!vcpu->awaits)
		vpmu_vcpu_flush(vcpu);
	vpmu_sampling_settle(vcpu);
}

static void vpmu_pmu_disable(struct pmu *pmu)
{
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(to_vpmu(pmu));

	if (!vcpu)
		return;
	vcpu->pmu_disabled = true;
	vcpu->awaits = false;
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

static void pmu_start(struct vpmu_vcpu *vcpu, struct perf_event *event)
{
	struct vpmu_event *own = event->pmu_private;

	if (!(event->hw.state & PERF_HES_STOPPED))
		return;
	event->hw.state = 0;
	if (own->view)
		vpmu_view_start(vcpu, own->view);
	else if (!event->attr.exclude_host)
		vpmu_event_start(vcpu, event);
}

static void vpmu_pmu_start(struct perf_event *event, int flags)
{
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(to_vpmu(event->pmu));

	if (vcpu)
		pmu_start(vcpu, event);
}

/* Returns true if a command was needed. */
static bool pmu_stop(struct vpmu_vcpu *vcpu, struct perf_event *event)
{
	struct vpmu_event *own = event->pmu_private;

	if (event->hw.state & PERF_HES_STOPPED)
		return false;
	event->hw.state = PERF_HES_STOPPED | PERF_HES_UPTODATE;
	if (own->view) {
		vpmu_view_stop(vcpu, own->view);
		return false;
	}
	return vpmu_event_stop(vcpu, event);
}

static void vpmu_pmu_stop(struct perf_event *event, int flags)
{
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(to_vpmu(event->pmu));

	if (!vcpu || vpmu_stop_is_throttle(flags))
		return;
	pmu_stop(vcpu, event);
	if (!vcpu->pmu_disabled)
		vpmu_sampling_settle(vcpu);
}

static int vpmu_pmu_add(struct perf_event *event, int flags)
{
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(to_vpmu(event->pmu));

	/*
	 * Add lost events, too: if an event cannot be added, perf core does not
	 * add the events after it.
	 */
	if (!vcpu)
		return -ENODEV;
	vpmu_event_pin(event);
	event->hw.state = PERF_HES_STOPPED | PERF_HES_UPTODATE;
	if (flags & PERF_EF_START)
		pmu_start(vcpu, event);
	vcpu->awaits = vpmu_context_awaits(event);
	return 0;
}

static void vpmu_pmu_del(struct perf_event *event, int flags)
{
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(to_vpmu(event->pmu));
	struct vpmu_event *own = event->pmu_private;

	vpmu_event_unpin(event);
	if (vcpu && pmu_stop(vcpu, event))
		vpmu_context_part(vcpu, event);
	vpmu_event_idle(event, true);
	if (own->task && own->sampler && current->flags & PF_EXITING)
		vpmu_sampling_exit_task(event);
	/*
	 * For an event of an exiting task, this is the last call, so wake the
	 * event's pollers, in an irq_work that runs after the context is
	 * unlocked.
	 */
	if (own->task && own->file && !event->parent && current->flags & PF_EXITING)
		irq_work_queue(&own->file->waiters.gone);
}

static void vpmu_pmu_event_mapped(struct perf_event *event, struct mm_struct *mm)
{
	struct vpmu_event *own = event->pmu_private;

	if (own->view)
		vpmu_view_show(own->view);
	else if (own->sampler)
		vpmu_sampling_grow(own);
}

/*
 * Whether perf core offers events of @type to every PMU if there is no CPU PMU.
 */
static bool type_is_generic(u32 type)
{
	return type == PERF_TYPE_HARDWARE || type == PERF_TYPE_HW_CACHE || type == PERF_TYPE_RAW;
}

/*
 * Sets perf_event::hw.config, which perf core leaves to the PMU's driver, to
 * the event's config in the PMU vpmu.
 */
static int pmu_config(struct perf_event *event)
{
	const struct vpmu_device *dev = to_vpmu(event->pmu);
	u32 type = event->attr.type;

	if (type != event->pmu->type && !(dev->generic && type_is_generic(type)))
		return -ENOENT;
	return vpmu_attr_config(dev, &event->attr, &event->hw.config);
}

static int pmu_event_init(struct perf_event *event)
{
	int err = pmu_config(event);

	if (err)
		return err;
	/* The host writes a trace to an AUX area, which must be its own. */
	if (vpmu_config_is_trace(event->hw.config) && !vpmu_file_of(event)) {
		vpmu_info_ratelimited(to_vpmu(event->pmu),
				      "perf cannot read traces: use vperf exits, or open them through /dev/vpmu\n");
		return -EOPNOTSUPP;
	}
	/*
	 * Fail as a CPU PMU without precise samples does: perf then retries
	 * with a lower precise_ip.
	 */
	if (event->attr.precise_ip)
		return -EOPNOTSUPP;
	/*
	 * The event counts only guests of this guest. If there can be none, its
	 * count is zero, and it is never started on the device. The device
	 * cannot tell such guests from this one.
	 */
	if (event->attr.exclude_host && vpmu_arch_can_nest())
		return -EOPNOTSUPP;
	if (is_sampling_event(event) && !vpmu_file_of(event)) {
		err = vpmu_attr_check_replay(event);
		if (err)
			return err;
	}
	return vpmu_event_create(to_vpmu(event->pmu), event);
}

static int vpmu_pmu_event_init(struct perf_event *event)
{
	int err = pmu_event_init(event);

	/*
	 * Without this module, no PMU would take an event of perf's own types.
	 * Programs then fall back, for example from cycles to a clock, which
	 * they do not after EOPNOTSUPP.
	 */
	if (err == -EOPNOTSUPP && type_is_generic(event->attr.type))
		err = -ENOENT;
	return err;
}

/*
 * Whether the guest has a CPU PMU of its own, which then counts perf's generic
 * events.
 */
static bool cpu_pmu_exists(void)
{
	struct perf_event_attr attr = {
		.type = PERF_TYPE_RAW,
		.size = sizeof(attr),
		.disabled = 1,
	};
	struct perf_event *event;

	event = perf_event_create_kernel_counter(&attr, cpumask_first(cpu_online_mask), NULL, NULL,
						 NULL);
	if (IS_ERR(event))
		return PTR_ERR(event) != -ENOENT;
	perf_event_release_kernel(event);
	return true;
}

/**
 * vpmu_pmu_register() - register the PMU vpmu
 * @dev: the device
 *
 * Return: 0 or a negative errno.
 */
int vpmu_pmu_register(struct vpmu_device *dev)
{
	int err;

	dev->generic = !cpu_pmu_exists();
	err = vpmu_sysfs_init(dev, &dev->counting.sysfs);
	if (err)
		return err;
	dev->counting.pmu = (struct pmu) {
		.module		= THIS_MODULE,
		.attr_groups	= dev->counting.sysfs.groups,
		/*
		 * Not perf_hw_context: only one PMU can use that context, and
		 * it must remain free for the CPU's own PMU.
		 */
		.task_ctx_nr	= perf_sw_context,
		.pmu_enable	= vpmu_pmu_enable,
		.pmu_disable	= vpmu_pmu_disable,
		.event_init	= vpmu_pmu_event_init,
		.event_mapped	= vpmu_pmu_event_mapped,
		.add		= vpmu_pmu_add,
		.del		= vpmu_pmu_del,
		.start		= vpmu_pmu_start,
		.stop		= vpmu_pmu_stop,
		.read		= vpmu_event_read,
		.start_txn	= vpmu_pmu_start_txn,
		.commit_txn	= vpmu_pmu_commit_txn,
		.cancel_txn	= vpmu_pmu_cancel_txn,
	};
	err = perf_pmu_register(&dev->counting.pmu, "vpmu", -1);
	if (err) {
		vpmu_sysfs_exit(&dev->counting.sysfs);
		return err;
	}
	dev->info.pmu_type = dev->counting.pmu.type;
	return 0;
}

/**
 * vpmu_pmu_unregister() - unregister the PMU, after all events are closed
 * @dev: the device
 */
void vpmu_pmu_unregister(struct vpmu_device *dev)
{
	perf_pmu_unregister(&dev->counting.pmu);
	vpmu_sysfs_exit(&dev->counting.sysfs);
}

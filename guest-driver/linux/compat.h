/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Where kernels differ: the only place that asks for a kernel version.
 */
#ifndef _VPMU_COMPAT_H
#define _VPMU_COMPAT_H

#include <linux/err.h>
#include <linux/filter.h>
#include <linux/hrtimer.h>
#include <linux/irq_work.h>
#include <linux/limits.h>
#include <linux/mm.h>
#include <linux/perf_event.h>
#include <linux/sched.h>
#include <linux/sched/user.h>
#include <linux/slab.h>
#include <linux/version.h>
#include <linux/virtio_config.h>

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 3, 0)
static inline void vpmu_vm_flags_set(struct vm_area_struct *vma, vm_flags_t flags)
{
	vma->vm_flags |= flags;
}

static inline void vpmu_vm_flags_clear(struct vm_area_struct *vma, vm_flags_t flags)
{
	vma->vm_flags &= ~flags;
}
#else
#define vpmu_vm_flags_set	vm_flags_set
#define vpmu_vm_flags_clear	vm_flags_clear
#endif

/**
 * vpmu_user_locked() - what of a user's pages is charged to perf's rings
 * @user: the user
 *
 * Return: the count, the one that perf core uses.
 */
static inline atomic_long_t *vpmu_user_locked(struct user_struct *user)
{
#ifdef VPMU_USER_HAS_PERF_MLOCK
	return &user->perf_mlock;
#else
	return &user->locked_vm;
#endif
}

/**
 * vpmu_paranoid_refuses_all() - whether perf_event_paranoid refuses every event
 * @level: the level
 *
 * perf_paranoid_any() of Debian's kernels, which is inline and compares a variable that is
 * not exported. Upstream has no such level.
 *
 * Return: true if CAP_PERFMON is needed for any event.
 */
static inline bool vpmu_paranoid_refuses_all(int level)
{
#ifdef VPMU_PERF_HAS_PARANOID_ANY
	return level > 2;
#else
	return level == INT_MAX;
#endif
}

/**
 * vpmu_perf_allow_kernel() - perf's own check of events that do not exclude the kernel
 *
 * Return: 0, or the negative errno of perf or of an LSM; 0 where it is not exported.
 */
static inline int vpmu_perf_allow_kernel(void)
{
#ifdef VPMU_PERF_HAS_ALLOW_KERNEL
	return perf_allow_kernel();
#else
	return 0;
#endif
}

/* struct perf_event_attr: aux_start_paused, aux_pause and aux_resume. */
#define VPMU_AUX_START_PAUSED	BIT(0)
#define VPMU_AUX_PAUSE		BIT(1)
#define VPMU_AUX_RESUME		BIT(2)
#ifdef VPMU_ATTR_HAS_AUX_ACTION
#define vpmu_aux_action	aux_action
#else
#define vpmu_aux_action	__reserved_3
#endif

/**
 * vpmu_find_vqs() - set up virtqueues
 * @vdev: the device
 * @count: how many
 * @vqs: filled in
 * @callbacks: one per queue, NULL for a queue that is never waited for
 * @names: one per queue
 *
 * Return: 0 or a negative errno.
 */
static inline int vpmu_find_vqs(struct virtio_device *vdev, unsigned int count,
				struct virtqueue **vqs, vq_callback_t **callbacks,
				const char **names)
{
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 11, 0)
	return virtio_find_vqs(vdev, count, vqs, callbacks, names, NULL);
#else
	struct virtqueue_info *info;
	unsigned int i;
	int err;

	info = kcalloc(count, sizeof(*info), GFP_KERNEL);
	if (!info)
		return -ENOMEM;
	for (i = 0; i < count; i++) {
		info[i].name = names[i];
		info[i].callback = callbacks[i];
	}
	err = virtio_find_vqs(vdev, count, vqs, info, NULL);
	kfree(info);
	return err;
#endif
}

/**
 * vpmu_anchor_task_context() - make sure that a task's software context is not ours
 * @task: whose
 *
 * Before 6.2 a task's perf context remembers for good the PMU of the event that
 * made it. Were that the vpmu, the context would outlive the module. So a
 * software event, which is gone again at once, makes it first.
 *
 * Return: 0 or a negative errno.
 */
static inline int vpmu_anchor_task_context(struct task_struct *task)
{
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 2, 0)
	struct perf_event_attr attr = {
		.type = PERF_TYPE_SOFTWARE,
		.size = sizeof(attr),
		.config = PERF_COUNT_SW_DUMMY,
		.disabled = 1,
	};
	struct perf_event *event;

	if (READ_ONCE(task->perf_event_ctxp[perf_sw_context]))
		return 0;

	event = perf_event_create_kernel_counter(&attr, -1, task, NULL, NULL);
	if (IS_ERR(event))
		return PTR_ERR(event);
	perf_event_release_kernel(event);
#endif
	return 0;
}

/**
 * vpmu_task_context() - the context that a task's events of ours are in
 * @task: the current one, or one that comes here with interrupts off: its context stays
 *
 * Return: the context, or NULL if it has none.
 */
static inline struct perf_event_context *vpmu_task_context(struct task_struct *task)
{
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 2, 0)
	return READ_ONCE(task->perf_event_ctxp[perf_sw_context]);
#else
	return READ_ONCE(task->perf_event_ctxp);
#endif
}

/**
 * vpmu_aux_disable() - have an event disabled that has no room in its AUX area
 * @event: the event, on this CPU; interrupts are off
 *
 * perf core does this by itself where it has PERF_AUX_FLAG_TRUNCATED, but until 6.16
 * marked the event with the CPU's number, by which on the first CPU it was not marked
 * at all, and later queued what looks at the mark no more.
 */
static inline void vpmu_aux_disable(struct perf_event *event)
{
	event->pending_disable = 1;
#ifdef VPMU_EVENT_HAS_DISABLE_IRQ
	irq_work_queue(&event->pending_disable_irq);
#endif
}

/**
 * vpmu_sample_chain() - give a sample its call chain
 * @data: the sample
 * @chain: the chain, in use until the sample is written
 */
static inline void vpmu_sample_chain(struct perf_sample_data *data,
				     struct perf_callchain_entry *chain)
{
	data->callchain = chain;
	data->sample_flags |= PERF_SAMPLE_CALLCHAIN;
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 3, 0)
	data->dyn_size += (1 + chain->nr) * sizeof(u64);
#endif
}

/**
 * vpmu_bpf_passes() - run the BPF program of an event
 * @event: the event
 * @data: its sample
 * @regs: the registers of the sample
 *
 * Before 6.10 such a program is the event's overflow handler.
 *
 * Return: false if there is one, and it wants no record.
 */
static inline bool vpmu_bpf_passes(struct perf_event *event, struct perf_sample_data *data,
				   struct pt_regs *regs)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 10, 0) && defined(CONFIG_BPF_SYSCALL)
	struct bpf_perf_event_data_kern context = {
		.regs = perf_arch_bpf_user_pt_regs(regs),
		.data = data,
		.event = event,
	};
	struct bpf_prog *program;
	u32 passes = 1;

	rcu_read_lock();
	program = READ_ONCE(event->prog);
	if (program && program->type == BPF_PROG_TYPE_PERF_EVENT)
		passes = bpf_prog_run(program, &context);
	rcu_read_unlock();
	return passes;
#else
	return true;
#endif
}

/**
 * vpmu_overflow() - hand an overflow to perf core
 * @event: the event
 * @data: its sample
 * @regs: the registers of the sample
 *
 * perf_event_overflow() ends with this call, but is not exported.
 *
 * Return: false if the event's BPF program wants no record.
 */
static inline bool vpmu_overflow(struct perf_event *event, struct perf_sample_data *data,
				 struct pt_regs *regs)
{
	perf_overflow_handler_t handler = READ_ONCE(event->overflow_handler);

	if (!vpmu_bpf_passes(event, data, regs))
		return false;
	handler(event, data, regs);
	return true;
}

/**
 * vpmu_hrtimer_setup() - prepare a timer
 * @timer: the timer
 * @function: called when it expires
 * @mode: HRTIMER_MODE_*
 */
static inline void vpmu_hrtimer_setup(struct hrtimer *timer,
				      enum hrtimer_restart (*function)(struct hrtimer *),
				      enum hrtimer_mode mode)
{
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 13, 0)
	hrtimer_init(timer, CLOCK_MONOTONIC, mode);
	timer->function = function;
#else
	hrtimer_setup(timer, function, CLOCK_MONOTONIC, mode);
#endif
}

/*
 * From 6.2 on perf core disables the PMU round the whole of a context's scheduling.
 * Before, it does so round each event by itself where the PMU shares its contexts
 * with others, as those of perf_sw_context do; see vpmu_context.c.
 */
#define VPMU_CONTEXT_IS_BRACKETED	(LINUX_VERSION_CODE >= KERNEL_VERSION(6, 2, 0))

/**
 * vpmu_class_leaves() - whether an event goes out with all others of its class
 * @event: that goes
 * @other: it, or an active event of its context
 *
 * core.c has these bits of perf_event_context::is_active to itself: it clears those that
 * leave before the first event does. From 6.2 on what leaves may be that of one PMU alone.
 *
 * Return: true if @other goes within the same hold of the context's lock.
 */
static inline bool vpmu_class_leaves(const struct perf_event *event, const struct perf_event *other)
{
	const int flexible = 0x1, pinned = 0x2;

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 2, 0)
	if (other->pmu_ctx != event->pmu_ctx)
		return false;
#endif
	return !(other->ctx->is_active & (other->group_leader->attr.pinned ? pinned : flexible));
}

#endif /* _VPMU_COMPAT_H */

/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Differences between kernel versions. No other file checks the kernel version.
 */
#ifndef _VPMU_COMPAT_H
#define _VPMU_COMPAT_H

#include <linux/limits.h>
#include <linux/mm.h>
#include <linux/perf_event.h>
#include <linux/rcupdate.h>
#include <linux/sched.h>
#include <linux/sched/coredump.h>
#include <linux/sched/mm.h>
#include <linux/sched/user.h>
#include <linux/slab.h>
#include <linux/version.h>
#include <linux/virtio_config.h>
#ifdef VPMU_TASK_HAS_EXEC_STATE
#include <linux/sched/exec_state.h>
#endif

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
 * vpmu_user_locked() - get a user's count of pages locked for perf rings
 * @user: the user
 *
 * Return: the counter; perf core charges its own rings to the same counter.
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
 * vpmu_task_is_dumpable() - whether a task allows its owner to trace it
 * @task: the task; the caller has read its credentials before
 *
 * Reads what ptrace_may_access() reads. A task that changes its credentials
 * first becomes undumpable, so the order of the reads matters.
 *
 * Return: true if @task is dumpable.
 */
static inline bool vpmu_task_is_dumpable(struct task_struct *task)
{
	bool dumpable;
#ifdef VPMU_TASK_HAS_EXEC_STATE
	smp_rmb(); /* pairs with smp_wmb() in commit_creds() */
	rcu_read_lock();
	dumpable = READ_ONCE(rcu_dereference(task->exec_state)->dumpable) == TASK_DUMPABLE_OWNER;
	rcu_read_unlock();
#else
	struct mm_struct *mm = get_task_mm(task);

	if (!mm)
		return false;
	dumpable = get_dumpable(mm) == SUID_DUMP_USER;
	mmput(mm);
#endif
	return dumpable;
}

/**
 * vpmu_paranoid_refuses_all() - whether every event needs CAP_PERFMON
 * @level: the level of perf_event_paranoid; INT_MAX if it is unknown
 *
 * At levels above 2, every event needs CAP_PERFMON on Debian's kernels, which
 * check this with perf_paranoid_any(). A module cannot call that function: it
 * is inline, and reads a variable that is not exported. Upstream kernels treat
 * these levels like 2.
 *
 * Return: true if every event needs CAP_PERFMON, or if @level is INT_MAX.
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
 * vpmu_perf_allow_kernel() - check whether the caller may count kernel mode
 *
 * Calls perf_allow_kernel() if the kernel exports it, and checks nothing
 * otherwise.
 *
 * Return: 0 if the caller may count kernel mode, or if nothing was checked;
 * otherwise the negative errno from perf or an LSM.
 */
static inline int vpmu_perf_allow_kernel(void)
{
#ifdef VPMU_PERF_HAS_ALLOW_KERNEL
	return perf_allow_kernel();
#else
	return 0;
#endif
}

/* Bits of aux_action in struct perf_event_attr */
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
 * @count: number of virtqueues
 * @vqs: filled in
 * @callbacks: one per queue, NULL for a queue without interrupts
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
 * vpmu_sample_chain() - set the call chain of a sample
 * @data: the sample
 * @chain: the chain, which must stay valid until the sample is written
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

/*
 * From 6.2 on, a task has one perf context for all PMUs. perf core disables a
 * PMU once, schedules all the context's events of that PMU, and enables it
 * again.
 *
 * Before 6.2, a task has one context for each class of PMUs, for example
 * perf_sw_context. If several PMUs share a context, perf core disables and
 * enables the event's PMU separately for each event; see vpmu_context.c.
 */
#define VPMU_PERF_ONE_CONTEXT		(LINUX_VERSION_CODE >= KERNEL_VERSION(6, 2, 0))
#define VPMU_CONTEXT_IS_BRACKETED	VPMU_PERF_ONE_CONTEXT

/* Before 6.10, a BPF program replaces the overflow handler of its event. */
#define VPMU_PERF_BPF_IS_APART		(LINUX_VERSION_CODE >= KERNEL_VERSION(6, 10, 0))

#endif /* _VPMU_COMPAT_H */

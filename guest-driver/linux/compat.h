/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Differences between kernel versions. No other file checks the kernel version.
 */
#ifndef _VPMU_COMPAT_H
#define _VPMU_COMPAT_H

#include <linux/mm.h>
#include <linux/perf_event.h>
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
 * enables the event's PMU separately for each event; see vpmu_pmu.c.
 */
#define VPMU_PERF_ONE_CONTEXT		(LINUX_VERSION_CODE >= KERNEL_VERSION(6, 2, 0))
#define VPMU_CONTEXT_IS_BRACKETED	VPMU_PERF_ONE_CONTEXT

/* Before 6.10, a BPF program replaces the overflow handler of its event. */
#define VPMU_PERF_BPF_IS_APART		(LINUX_VERSION_CODE >= KERNEL_VERSION(6, 10, 0))

#endif /* _VPMU_COMPAT_H */

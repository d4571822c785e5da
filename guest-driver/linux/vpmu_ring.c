// SPDX-License-Identifier: GPL-2.0
/*
 * Rings: pages that the host writes and programs map.
 *
 * The first map of an event makes them, the last unmap takes them away, whichever of
 * the events that write there it came through; between the two the host writes by
 * itself and this driver takes no part.
 */
#include <linux/capability.h>
#include <linux/cpumask.h>
#include <linux/cred.h>
#include <linux/fs.h>
#include <linux/log2.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/sched/mm.h>
#include <linux/sched/user.h>
#include <linux/slab.h>

#include "compat.h"
#include "vpmu.h"

/* perf's kernel.perf_event_mlock_kb is out of a module's reach; this is its default. */
static unsigned int mlock_kb = 512 + PAGE_SIZE / 1024;
module_param(mlock_kb, uint, 0644);
MODULE_PARM_DESC(mlock_kb,
		 "KiB of rings per user and online CPU that RLIMIT_MEMLOCK does not count, shared with perf's own (default: as kernel.perf_event_mlock_kb)");

/*
 * Charges a ring's pages as perf does: to the user as long as its allowance lasts,
 * the rest to the address space.
 */
static int ring_charge(struct vpmu_ring *ring)
{
	unsigned long limit = rlimit(RLIMIT_MEMLOCK) >> PAGE_SHIFT;
	unsigned long allowed, locked;
	struct user_struct *user = current_user();
	struct mm_struct *mm = current->mm;

	allowed = (unsigned long)READ_ONCE(mlock_kb) / (PAGE_SIZE / 1024) * num_online_cpus();
	/* The allowance may have been more when they were locked. */
	locked = min_t(unsigned long, atomic_long_read(vpmu_user_locked(user)), allowed);
	locked += ring->count;
	ring->extra = locked > allowed ? locked - allowed : 0;
	if (atomic64_read(&mm->pinned_vm) + ring->extra > limit && !capable(CAP_IPC_LOCK))
		return -EPERM;

	ring->user = get_uid(user);
	atomic_long_add(ring->count - ring->extra, vpmu_user_locked(user));
	mmgrab(mm);
	ring->mm = mm;
	atomic64_add(ring->extra, &mm->pinned_vm);
	return 0;
}

static void ring_uncharge(struct vpmu_ring *ring)
{
	atomic_long_sub(ring->count - ring->extra, vpmu_user_locked(ring->user));
	free_uid(ring->user);
	atomic64_sub(ring->extra, &ring->mm->pinned_vm);
	mmdrop(ring->mm);
}

static void ring_free(struct vpmu_ring *ring)
{
	u32 i;

	for (i = 0; i < ring->count && ring->pages[i]; i++)
		put_page(ring->pages[i]);
	ring_uncharge(ring);
	kvfree(ring);
}

static struct vpmu_ring *ring_alloc(u32 count)
{
	struct vpmu_ring *ring;
	int err;
	u32 i;

	ring = kvzalloc(struct_size(ring, pages, count), GFP_KERNEL);
	if (!ring)
		return ERR_PTR(-ENOMEM);
	INIT_LIST_HEAD(&ring->writers);
	ring->count = count;
	err = ring_charge(ring);
	if (err) {
		kvfree(ring);
		return ERR_PTR(err);
	}
	for (i = 0; i < count; i++) {
		ring->pages[i] = alloc_page(GFP_KERNEL_ACCOUNT | __GFP_ZERO);
		if (!ring->pages[i]) {
			ring_free(ring);
			return ERR_PTR(-ENOMEM);
		}
	}
	return ring;
}

/* Takes the pages back from the device; those that it may still write to are lost. */
static void ring_destroy(struct vpmu_device *dev, struct vpmu_ring *ring)
{
	int err = vpmu_control_unmap(dev, ring->id);

	vpmu_output_abandon(dev, ring);
	if (!err)
		ring_free(ring);
	else
		dev_err(&dev->vdev->dev,
			"the device keeps the ring of event %llu (%d): %u pages are lost\n",
			ring->id, err, ring->count);
}

static void ring_vm_open(struct vm_area_struct *vma)
{
	struct vpmu_file *file = vma->vm_file->private_data;

	mutex_lock(&file->dev->output_lock);
	file->maps++;
	file->ring->mapped++;
	mutex_unlock(&file->dev->output_lock);
}

static void ring_vm_close(struct vm_area_struct *vma)
{
	struct vpmu_file *file = vma->vm_file->private_data;
	struct vpmu_ring *ring;

	mutex_lock(&file->dev->output_lock);
	/* What has maps keeps its ring. */
	ring = file->ring;
	file->maps--;
	if (!--ring->mapped)
		ring_destroy(file->dev, ring);
	else if (!file->maps)
		vpmu_output_unmapped(file);
	mutex_unlock(&file->dev->output_lock);
}

/* A part of a ring is none. */
static int ring_vm_may_split(struct vm_area_struct *vma, unsigned long addr)
{
	return -EINVAL;
}

static const struct vm_operations_struct ring_vm_ops = {
	.open = ring_vm_open,
	.close = ring_vm_close,
	.may_split = ring_vm_may_split,
};

static int ring_insert(struct vpmu_ring *ring, struct vm_area_struct *vma)
{
	unsigned long left = ring->count;

	return vm_insert_pages(vma, vma->vm_start, ring->pages, &left);
}

/* The first map of an event that writes to no other's ring. */
static int ring_create(struct vpmu_file *file, struct vm_area_struct *vma, u32 count)
{
	struct vpmu_ring *ring;
	int err;

	ring = ring_alloc(count);
	if (IS_ERR(ring))
		return PTR_ERR(ring);
	ring->id = vpmu_file_id(file);
	/* From the map on the device writes there, and its notices must not be lost. */
	vpmu_output_attach(file, ring);
	err = vpmu_control_map(file->dev, ring->id, ring->pages, count,
			       vma->vm_flags & VM_WRITE ? VPMU_MAP_WRITABLE : 0);
	if (err) {
		vpmu_output_abandon(file->dev, ring);
		ring_free(ring);
		return err;
	}
	err = ring_insert(ring, vma);
	if (err)
		ring_destroy(file->dev, ring);
	return err;
}

/**
 * vpmu_ring_mmap() - map an event's ring, as mmap(2) of a perf event does
 * @filp: from VPMU_IOC_OPEN
 * @vma: shared, from offset zero, of 1 or 1 + 2^n pages, as many as the ring has if
 *       there is one; if the first is writable, the reader moves data_tail, else the
 *       ring overwrites
 *
 * Unlike perf's own, an event that tasks inherit has a ring too: the device
 * writes to it from every vCPU.
 *
 * Return: 0 or a negative errno.
 */
int vpmu_ring_mmap(struct file *filp, struct vm_area_struct *vma)
{
	struct vpmu_file *file = filp->private_data;
	unsigned long count = vma_pages(vma);
	int err;

	if (!(vma->vm_flags & VM_SHARED) || vma->vm_pgoff)
		return -EINVAL;
	if (count > 1 && !is_power_of_2(count - 1))
		return -EINVAL;
	if (count - 1 > file->dev->info.max_ring_pages)
		return -EINVAL;

	mutex_lock(&file->dev->output_lock);
	if (!file->ring)
		err = ring_create(file, vma, count);
	else if (file->ring->count != count)
		err = -EINVAL;
	else
		err = ring_insert(file->ring, vma);
	if (!err) {
		file->maps++;
		file->ring->mapped++;
	}
	mutex_unlock(&file->dev->output_lock);
	if (err)
		return err;

	vpmu_vm_flags_set(vma, VM_DONTCOPY | VM_DONTEXPAND | VM_DONTDUMP);
	if (!(vma->vm_flags & VM_WRITE))
		vpmu_vm_flags_clear(vma, VM_MAYWRITE);
	vma->vm_ops = &ring_vm_ops;
	return 0;
}

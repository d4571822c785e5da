// SPDX-License-Identifier: GPL-2.0
/*
 * The ring of an event: pages that the host writes and the program maps.
 *
 * The first map makes them, the last unmap takes them away; between the two the
 * host writes there by itself and this driver takes no part.
 */
#include <linux/capability.h>
#include <linux/fs.h>
#include <linux/log2.h>
#include <linux/mm.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>

#include "compat.h"
#include "vpmu.h"

/**
 * struct vpmu_ring - the pages of one event
 * @mapped: how many maps there are
 * @mm: on whose account the pages are
 * @count: how many pages
 * @pages: the metadata page, then the data pages
 */
struct vpmu_ring {
	unsigned int mapped;
	struct mm_struct *mm;
	u32 count;
	struct page *pages[];
};

static void ring_free(struct vpmu_ring *ring)
{
	u32 i;

	for (i = 0; i < ring->count && ring->pages[i]; i++)
		put_page(ring->pages[i]);
	atomic64_sub(ring->count, &ring->mm->pinned_vm);
	mmdrop(ring->mm);
	kvfree(ring);
}

static struct vpmu_ring *ring_alloc(u32 count)
{
	struct mm_struct *mm = current->mm;
	struct vpmu_ring *ring;
	u32 i;

	ring = kvzalloc(struct_size(ring, pages, count), GFP_KERNEL);
	if (!ring)
		return ERR_PTR(-ENOMEM);
	mmgrab(mm);
	ring->mm = mm;
	ring->count = count;
	if (atomic64_add_return(count, &mm->pinned_vm) > rlimit(RLIMIT_MEMLOCK) >> PAGE_SHIFT &&
	    !capable(CAP_IPC_LOCK)) {
		ring_free(ring);
		return ERR_PTR(-EPERM);
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
static void ring_detach(struct vpmu_file *file, struct vpmu_ring *ring)
{
	struct vpmu_event *own = file->event->pmu_private;
	int err = vpmu_control_unmap(file->dev, own->id);

	if (!err)
		ring_free(ring);
	else
		dev_err(&file->dev->vdev->dev,
			"the device keeps the ring of event %llu (%d): %u pages are lost\n",
			own->id, err, ring->count);
}

static void ring_vm_open(struct vm_area_struct *vma)
{
	struct vpmu_file *file = vma->vm_file->private_data;

	mutex_lock(&file->ring_lock);
	file->ring->mapped++;
	mutex_unlock(&file->ring_lock);
}

static void ring_vm_close(struct vm_area_struct *vma)
{
	struct vpmu_file *file = vma->vm_file->private_data;

	mutex_lock(&file->ring_lock);
	if (!--file->ring->mapped) {
		ring_detach(file, file->ring);
		file->ring = NULL;
	}
	mutex_unlock(&file->ring_lock);
}

static const struct vm_operations_struct ring_vm_ops = {
	.open = ring_vm_open,
	.close = ring_vm_close,
};

static int ring_insert(struct vpmu_ring *ring, struct vm_area_struct *vma)
{
	unsigned long left = ring->count;

	return vm_insert_pages(vma, vma->vm_start, ring->pages, &left);
}

/* The first map of an event. */
static int ring_create(struct vpmu_file *file, struct vm_area_struct *vma, u32 count)
{
	struct vpmu_event *own = file->event->pmu_private;
	struct vpmu_ring *ring;
	int err;

	ring = ring_alloc(count);
	if (IS_ERR(ring))
		return PTR_ERR(ring);
	/* From the map on the device writes there, and its notices must not be lost. */
	atomic_set(&file->poll, 0);
	err = vpmu_control_map(file->dev, own->id, ring->pages, count,
			       vma->vm_flags & VM_WRITE ? VPMU_MAP_WRITABLE : 0);
	if (err) {
		ring_free(ring);
		return err;
	}
	err = ring_insert(ring, vma);
	if (err) {
		ring_detach(file, ring);
		return err;
	}
	file->ring = ring;
	return 0;
}

/**
 * vpmu_ring_mmap() - map an event's ring, as mmap(2) of a perf event does
 * @filp: from VPMU_IOC_OPEN
 * @vma: shared, from offset zero, of 1 or 1 + 2^n pages; if writable, the reader
 *       moves data_tail, else the ring overwrites
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
	int err = 0;

	if (!(vma->vm_flags & VM_SHARED) || vma->vm_pgoff)
		return -EINVAL;
	if (count > 1 && !is_power_of_2(count - 1))
		return -EINVAL;
	if (count - 1 > file->dev->info.max_ring_pages)
		return -EINVAL;

	mutex_lock(&file->ring_lock);
	if (!file->ring)
		err = ring_create(file, vma, count);
	else if (file->ring->count != count)
		err = -EINVAL;
	else
		err = ring_insert(file->ring, vma);
	if (!err)
		file->ring->mapped++;
	mutex_unlock(&file->ring_lock);
	if (err)
		return err;

	vpmu_vm_flags_set(vma, VM_DONTCOPY | VM_DONTEXPAND | VM_DONTDUMP);
	if (!(vma->vm_flags & VM_WRITE))
		vpmu_vm_flags_clear(vma, VM_MAYWRITE);
	vma->vm_ops = &ring_vm_ops;
	return 0;
}

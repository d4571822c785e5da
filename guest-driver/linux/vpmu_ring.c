// SPDX-License-Identifier: GPL-2.0
/*
 * Rings: pages that the host writes and programs map.
 *
 * The first mmap(2) of an event allocates its ring. The ring is freed when its
 * last mapping, through any of the events that write to it, is gone. Until
 * then, the host writes records without involving this driver.
 */
#include <linux/fs.h>
#include <linux/log2.h>
#include <linux/mm.h>
#include <linux/slab.h>

#include "compat.h"
#include "vpmu.h"
#include "vpmu_file.h"
#include "vpmu_ring.h"

/**
 * vpmu_ring_free() - free a ring that the device does not write to
 * @ring: the ring, without mappings
 */
void vpmu_ring_free(struct vpmu_ring *ring)
{
	u32 i;

	if (!ring->window) {
		for (i = 0; i < ring->count && ring->pages[i]; i++)
			put_page(ring->pages[i]);
		if (ring->charge.owner)
			vpmu_uncharge(&ring->charge);
	}
	kvfree(ring);
}

static void ring_init(struct vpmu_ring *ring, u32 count)
{
	INIT_LIST_HEAD(&ring->writers);
	INIT_LIST_HEAD(&ring->pollers);
	INIT_LIST_HEAD(&ring->woken);
	vpmu_records_init(&ring->records);
	ring->count = count;
}

static struct vpmu_ring *ring_alloc_window(u32 count)
{
	struct vpmu_ring *ring = kvzalloc(struct_size(ring, pages, 0), GFP_KERNEL);

	if (!ring)
		return ERR_PTR(-ENOMEM);
	ring_init(ring, count);
	ring->window = true;
	ring->kept = true;
	return ring;
}

static struct vpmu_ring *ring_alloc(u32 count)
{
	struct vpmu_ring *ring;
	int err;
	u32 i;

	ring = kvzalloc(struct_size(ring, pages, count), GFP_KERNEL);
	if (!ring)
		return ERR_PTR(-ENOMEM);
	ring_init(ring, count);
	err = vpmu_charge(&ring->charge, count);
	if (err) {
		kvfree(ring);
		return ERR_PTR(err);
	}
	for (i = 0; i < count; i++) {
		ring->pages[i] = alloc_page(GFP_KERNEL_ACCOUNT | __GFP_ZERO);
		if (!ring->pages[i]) {
			vpmu_ring_free(ring);
			return ERR_PTR(-ENOMEM);
		}
	}
	return ring;
}

/**
 * vpmu_ring_alloc_shared() - make a ring from pages that also have other users
 * @pages: the pages; the ring takes a reference on each
 * @count: number of pages
 *
 * Return: the ring, or NULL.
 */
struct vpmu_ring *vpmu_ring_alloc_shared(struct page *const *pages, u32 count)
{
	struct vpmu_ring *ring = kvzalloc(struct_size(ring, pages, count), GFP_KERNEL);
	u32 i;

	if (!ring)
		return NULL;
	ring_init(ring, count);
	for (i = 0; i < count; i++) {
		get_page(pages[i]);
		ring->pages[i] = pages[i];
	}
	return ring;
}

/**
 * vpmu_ring_attach() - give a file a ring that is already mapped on the device
 * @file: the file of a persistent event; it has no ring yet
 * @ring: the ring, which the file then owns
 */
void vpmu_ring_attach(struct vpmu_file *file, struct vpmu_ring *ring)
{
	ring->id = file->id;
	ring->kept = true;
	mutex_lock(&file->dev->output_lock);
	vpmu_output_attach(file, ring);
	mutex_unlock(&file->dev->output_lock);
}

/*
 * Takes a ring's pages back from the device, and frees the ring. Leaks the
 * pages if the device may still write to them.
 */
static void ring_destroy(struct vpmu_device *dev, struct vpmu_ring *ring)
{
	int err = 0;

	if (ring->aux)
		vpmu_aux_destroy(dev, ring);
	if (!ring->ended)
		err = vpmu_control_unmap(dev, ring->id);
	vpmu_output_abandon(dev, ring);
	if (!err)
		vpmu_ring_free(ring);
	else
		vpmu_err(dev, "the device keeps the ring of event %llu (%d): %u pages are lost\n",
			 ring->id, err, ring->count);
}

/**
 * vpmu_ring_mapped() - count a new mapping of an event's ring or of its AUX
 *                      area
 * @file: the event's file; the device's output_lock is held
 */
void vpmu_ring_mapped(struct vpmu_file *file)
{
	file->output.maps++;
	file->output.ring->mapped++;
}

/**
 * vpmu_ring_unmapped() - drop a mapping of an event's ring, and free the ring
 *                        if it was the last mapping
 * @file: the event's file; the device's output_lock is held
 */
void vpmu_ring_unmapped(struct vpmu_file *file)
{
	/*
	 * Not NULL: an event keeps its ring while the ring is mapped through
	 * it.
	 */
	struct vpmu_ring *ring = file->output.ring;

	file->output.maps--;
	if (!--ring->mapped && !ring->kept)
		ring_destroy(file->dev, ring);
	else if (!file->output.maps)
		vpmu_output_unmapped(file);
}

static void ring_vm_open(struct vm_area_struct *vma)
{
	struct vpmu_file *file = vma->vm_file->private_data;

	mutex_lock(&file->dev->output_lock);
	vpmu_ring_mapped(file);
	mutex_unlock(&file->dev->output_lock);
}

static void ring_vm_close(struct vm_area_struct *vma)
{
	struct vpmu_file *file = vma->vm_file->private_data;

	mutex_lock(&file->dev->output_lock);
	vpmu_ring_unmapped(file);
	mutex_unlock(&file->dev->output_lock);
}

/* A ring is always mapped whole. */
static int ring_vm_may_split(struct vm_area_struct *vma, unsigned long addr)
{
	return -EINVAL;
}

static const struct vm_operations_struct ring_vm_ops = {
	.open = ring_vm_open,
	.close = ring_vm_close,
	.may_split = ring_vm_may_split,
};

/*
 * Inserts a page of the window into a mapping. This is not done in mmap(2),
 * because vpmu_window_revoke() does not find a mapping that mmap(2) is still
 * setting up.
 */
static vm_fault_t ring_vm_fault(struct vm_fault *vmf)
{
	struct vpmu_file *file = vmf->vma->vm_file->private_data;
	vm_fault_t ret;

	mutex_lock(&file->dev->output_lock);
	/*
	 * Not NULL: an event keeps its ring while the ring is mapped through
	 * it.
	 */
	ret = vpmu_window_fault(file->output.ring, vmf);
	mutex_unlock(&file->dev->output_lock);
	return ret;
}

static const struct vm_operations_struct window_vm_ops = {
	.open = ring_vm_open,
	.close = ring_vm_close,
	.may_split = ring_vm_may_split,
	.fault = ring_vm_fault,
};

static int ring_insert(struct vpmu_ring *ring, struct vm_area_struct *vma)
{
	unsigned long left = ring->count;

	if (ring->window) {
		vpmu_vm_flags_set(vma, VM_PFNMAP);
		return 0;
	}
	return vm_insert_pages(vma, vma->vm_start, ring->pages, &left);
}

/*
 * Maps a ring on the device. For a ring in the window, the device chooses the
 * pages.
 */
static int ring_give(struct vpmu_device *dev, struct vpmu_ring *ring, u32 flags)
{
	u32 page;
	int err;

	if (!ring->window)
		return vpmu_control_map(dev, ring->id, ring->pages, ring->count, flags);
	err = vpmu_control_map_window(dev, ring->id, ring->count, flags, &page);
	if (err)
		return err;
	ring->pfn = vpmu_window_place(dev, page, ring->count);
	if (ring->pfn)
		return 0;
	vpmu_control_unmap(dev, ring->id);
	return -EPROTO;
}

/*
 * Whether a new ring is placed in the window, where it outlives this driver. A
 * trace's ring is not: a trace ends with its AUX area, which is in the guest's
 * memory, so it cannot outlive the driver.
 */
static bool ring_outlives(const struct vpmu_file *file)
{
	return file->persist.active && !file->spec.trace && file->dev->window.pages;
}

/* Allocates an event's own ring, for its first mapping. */
static int ring_create(struct vpmu_file *file, struct vm_area_struct *vma, u32 count)
{
	struct vpmu_ring *ring;
	int err;

	ring = ring_outlives(file) ? ring_alloc_window(count) : ring_alloc(count);
	if (IS_ERR(ring))
		return PTR_ERR(ring);
	ring->id = file->id;
	ring->kept = file->persist.active;
	ring->overwrites = !(vma->vm_flags & VM_WRITE);
	/*
	 * Attach the ring before mapping it on the device: the device writes to
	 * a mapped ring immediately, and the device's notices must find the
	 * ring.
	 */
	vpmu_output_attach(file, ring);
	err = ring_give(file->dev, ring, vma->vm_flags & VM_WRITE ? VPMU_MAP_WRITABLE : 0);
	if (err) {
		vpmu_output_abandon(file->dev, ring);
		vpmu_ring_free(ring);
		return err;
	}
	err = ring_insert(ring, vma);
	if (err)
		ring_destroy(file->dev, ring);
	return err;
}

/**
 * vpmu_ring_adopt() - give an event's new file the ring that the event already
 *                     has in the window
 * @file: the event's new file
 * @event: its entry in the device's list
 *
 * Return: 0, also if the event has no ring in the window; or a negative errno.
 */
int vpmu_ring_adopt(struct vpmu_file *file, const struct vpmu_persistent_event *event)
{
	struct vpmu_device *dev = file->dev;
	u32 count = le32_to_cpu(event->pages);
	struct vpmu_ring *ring;

	/*
	 * A ring outside the window does not outlive a reset, and cannot be
	 * attached.
	 */
	if (!count || !(le32_to_cpu(event->map) & VPMU_MAP_WINDOW))
		return 0;
	ring = ring_alloc_window(count);
	if (IS_ERR(ring))
		return PTR_ERR(ring);
	ring->id = file->id;
	ring->overwrites = !(le32_to_cpu(event->map) & VPMU_MAP_WRITABLE);
	ring->pfn = vpmu_window_place(dev, le32_to_cpu(event->window_page), count);
	if (!ring->pfn) {
		vpmu_ring_free(ring);
		return -EPROTO;
	}
	mutex_lock(&dev->output_lock);
	vpmu_output_attach(file, ring);
	mutex_unlock(&dev->output_lock);
	return 0;
}

/**
 * vpmu_ring_forget() - free the driver's data for a ring that the device keeps
 * @file: the event's file, without mappings
 *
 * Return: false if the ring must stay, because it is in the guest's memory or
 * is still mapped.
 */
bool vpmu_ring_forget(struct vpmu_file *file)
{
	struct vpmu_device *dev = file->dev;
	struct vpmu_ring *ring;
	bool goes = true;

	mutex_lock(&dev->output_lock);
	ring = file->output.ring;
	if (ring)
		goes = ring->window && !ring->mapped;
	if (ring && goes) {
		vpmu_output_abandon(dev, ring);
		vpmu_ring_free(ring);
	}
	mutex_unlock(&dev->output_lock);
	return goes;
}

/**
 * vpmu_ring_ended() - take back the ring of an event that the host or a reset
 *                     has ended
 * @file: the event's file
 *
 * A ring in the guest's memory can still be read.
 */
void vpmu_ring_ended(struct vpmu_file *file)
{
	struct vpmu_device *dev = file->dev;
	struct vpmu_ring *ring;
	int err;

	mutex_lock(&dev->output_lock);
	file->ended = true;
	file->persist.active = false;
	ring = file->output.ring;
	if (ring && ring->id == file->id) {
		ring->kept = false;
		if (ring->aux)
			vpmu_control_unmap_aux(dev, ring->id);
		err = vpmu_control_unmap(dev, ring->id);
		/* The device may have removed the ring with the event. */
		ring->ended = !err || err == -ENOENT || err == -EINVAL;
		if (ring->window)
			vpmu_window_revoke(dev, ring);
	}
	mutex_unlock(&dev->output_lock);
}

/**
 * vpmu_ring_close() - detach a closed event from its ring; the ring stays while
 *                     it is mapped through other events
 * @file: the event's file
 */
void vpmu_ring_close(struct vpmu_file *file)
{
	struct vpmu_device *dev = file->dev;
	struct vpmu_ring *ring;

	/*
	 * This check needs no lock: a closed event that has no ring cannot get
	 * one later.
	 */
	if (!READ_ONCE(file->output.ring))
		return;
	mutex_lock(&dev->output_lock);
	ring = file->output.ring;
	if (ring && ring->id == file->id) {
		ring->kept = false;
		/* A persistent event's ring may no longer have a mapping. */
		if (!ring->mapped)
			ring_destroy(dev, ring);
	}
	vpmu_output_attach(file, NULL);
	mutex_unlock(&dev->output_lock);
}

/**
 * vpmu_ring_vma() - set the flags and operations of a mapping
 * @vma: the mapping
 * @ops: its operations
 */
void vpmu_ring_vma(struct vm_area_struct *vma, const struct vm_operations_struct *ops)
{
	vpmu_vm_flags_set(vma, VM_DONTCOPY | VM_DONTEXPAND | VM_DONTDUMP);
	if (!(vma->vm_flags & VM_WRITE))
		vpmu_vm_flags_clear(vma, VM_MAYWRITE);
	vma->vm_ops = ops;
}

/**
 * vpmu_ring_mmap() - map an event's ring, as mmap(2) of a perf event does
 * @filp: from VPMU_IOC_OPEN
 * @vma: a shared mapping. At offset zero, it maps the ring: it must have 1 or
 *       1 + 2^n pages, or, if the event already has a ring, as many pages as
 *       the ring. If the first mapping is writable, the reader moves data_tail,
 *       else new records overwrite old ones. At any other offset, it maps the
 *       AUX area: see vpmu_aux_mmap()
 *
 * Unlike in perf, an event with inheritance can also have a ring: the device
 * writes to the ring from every vCPU. The ring of a persistent event stays even
 * without mappings.
 *
 * Return: 0 or a negative errno.
 */
int vpmu_ring_mmap(struct file *filp, struct vm_area_struct *vma)
{
	struct vpmu_file *file = filp->private_data;
	unsigned long count = vma_pages(vma);
	bool window;
	int err;

	if (!(vma->vm_flags & VM_SHARED))
		return -EINVAL;
	if (vma->vm_pgoff)
		return vpmu_aux_mmap(file, vma);
	if (count > 1 && !is_power_of_2(count - 1))
		return -EINVAL;
	if (count - 1 > file->dev->info.max_ring_pages)
		return -EINVAL;

	mutex_lock(&file->dev->output_lock);
	if (file->failure)
		err = file->failure;
	else if (file->ended)
		err = -ENOENT;
	else if (file->persist.operator && vma->vm_flags & VM_WRITE)
		err = -EPERM;
	else if (!file->output.ring)
		err = ring_create(file, vma, count);
	else if (file->output.ring->count != count)
		err = -EINVAL;
	else
		err = ring_insert(file->output.ring, vma);
	if (!err)
		vpmu_ring_mapped(file);
	window = !err && file->output.ring->window;
	mutex_unlock(&file->dev->output_lock);
	if (!err)
		vpmu_ring_vma(vma, window ? &window_vm_ops : &ring_vm_ops);
	return err;
}

// SPDX-License-Identifier: GPL-2.0
/*
 * Rings: pages that the host writes and programs map.
 *
 * The first mmap(2) of an event allocates its ring. The ring is freed when its
 * last mapping, through any of the events that write to it, is gone. Until
 * then, the host writes records without involving this driver.
 */
#include <linux/anon_inodes.h>
#include <linux/capability.h>
#include <linux/cpumask.h>
#include <linux/cred.h>
#include <linux/err.h>
#include <linux/fcntl.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/io.h>
#include <linux/log2.h>
#include <linux/minmax.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/perf_event.h>
#include <linux/poll.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/virtio_config.h>

#include "compat.h"
#include "perf_core_private.h"
#include "vpmu.h"
#include "vpmu_event.h"
#include "vpmu_file.h"
#include "vpmu_ring.h"

static int vpmu_aux_mmap(struct vpmu_file *file, struct vm_area_struct *vma);
static void vpmu_aux_destroy(struct vpmu_device *dev, struct vpmu_ring *ring);

/*
 * Accounting of mapped pages, as in perf: pages up to the user's allowance are
 * charged to the user, and further pages to the address space.
 */

/*
 * A module cannot read kernel.perf_event_mlock_kb; this is the sysctl's
 * default.
 */
static unsigned int mlock_kb = 512 + PAGE_SIZE / 1024;
module_param(mlock_kb, uint, 0644);
MODULE_PARM_DESC(mlock_kb,
		 "Allowance of each user for rings and AUX areas, in KiB per online CPU, before RLIMIT_MEMLOCK applies; perf's own rings use the same allowance (default: 512 KiB and one page, as in the kernel)");

/**
 * vpmu_charge() - charge pages to the caller
 * @charge: filled in, for vpmu_uncharge()
 * @count: number of pages
 *
 * Return: 0, or -EPERM if the pages exceed RLIMIT_MEMLOCK and the caller does
 * not have CAP_IPC_LOCK.
 */
static int vpmu_charge(struct vpmu_charge *charge, unsigned long count)
{
	unsigned long limit = rlimit(RLIMIT_MEMLOCK) >> PAGE_SHIFT;
	unsigned long allowed, locked, extra;
	const struct cred *owner = current_cred();
	struct mm_struct *mm = current->mm;

	allowed = (unsigned long)READ_ONCE(mlock_kb) / (PAGE_SIZE / 1024) * num_online_cpus();
	/*
	 * The number of locked pages can exceed the allowance, if the allowance
	 * was larger when they were locked.
	 */
	locked = min_t(unsigned long, atomic_long_read(vpmu_user_locked(owner->user)), allowed);
	locked += count;
	extra = locked > allowed ? locked - allowed : 0;
	if (atomic64_read(&mm->pinned_vm) + extra > limit && !capable(CAP_IPC_LOCK))
		return -EPERM;

	charge->count = count;
	charge->extra = extra;
	charge->owner = get_cred(owner);
	atomic_long_add(count - extra, vpmu_user_locked(owner->user));
	mmgrab(mm);
	charge->mm = mm;
	atomic64_add(extra, &mm->pinned_vm);
	return 0;
}

/**
 * vpmu_uncharge() - undo vpmu_charge()
 * @charge: from vpmu_charge()
 */
static void vpmu_uncharge(struct vpmu_charge *charge)
{
	atomic_long_sub(charge->count - charge->extra, vpmu_user_locked(charge->owner->user));
	put_cred(charge->owner);
	atomic64_sub(charge->extra, &charge->mm->pinned_vm);
	mmdrop(charge->mm);
}

/*
 * The window: host memory for rings that outlive this driver.
 *
 * The device chooses the pages of a ring. They are not guest RAM, so this
 * driver does not allocate, charge or reference-count them; programs map them
 * directly.
 */

/**
 * vpmu_window_init() - map the window
 * @dev: the device
 *
 * Return: 0, also for a device without a window; or a negative errno.
 */
int vpmu_window_init(struct vpmu_device *dev)
{
	struct virtio_shm_region region;

	if (!vpmu_has_feature(dev, VPMU_F_WINDOW))
		return 0;
	if (!virtio_get_shm_region(dev->vdev, &region, VPMU_SHM_WINDOW) ||
	    region.addr % VPMU_PAGE_SIZE || !(region.len / VPMU_PAGE_SIZE)) {
		vpmu_err(dev, "the device offers a window without its memory region\n");
		return -ENXIO;
	}
	/*
	 * perf core's views read the window through this mapping. On x86, it
	 * also makes the kernel map the pages write-back for programs. Without
	 * it, the kernel would map them uncached. Write-back is correct,
	 * because the window is ordinary host memory.
	 */
	dev->window.base = memremap(region.addr, region.len, MEMREMAP_WB);
	if (!dev->window.base)
		return -ENOMEM;
	dev->window.pfn = PHYS_PFN(region.addr);
	dev->window.pages = min_t(u64, region.len / VPMU_PAGE_SIZE, U32_MAX);
	return 0;
}

/**
 * vpmu_window_exit() - unmap the window
 * @dev: the device; all its rings in the window are freed
 */
void vpmu_window_exit(struct vpmu_device *dev)
{
	if (dev->window.base)
		memunmap(dev->window.base);
}

/**
 * vpmu_window_place() - find the page frames of a ring
 * @dev: the device
 * @page: number of the ring's first page in the window
 * @count: number of pages
 *
 * Return: the page frame number of the first page; 0 if the ring is not within
 * the window.
 */
static unsigned long vpmu_window_place(const struct vpmu_device *dev, u32 page, u32 count)
{
	if (page >= dev->window.pages || count > dev->window.pages - page)
		return 0;
	return dev->window.pfn + page;
}

/**
 * vpmu_window_address() - find the address of a ring
 * @dev: the device
 * @pfn: the frame of its first page
 *
 * Return: the address of that page.
 */
void *vpmu_window_address(const struct vpmu_device *dev, unsigned long pfn)
{
	return dev->window.base + PFN_PHYS(pfn - dev->window.pfn);
}

/**
 * vpmu_window_fault() - map a page of a ring when a program accesses it
 * @ring: the ring, in the window; the device's output_lock is held
 * @vmf: the fault
 *
 * Return: VM_FAULT_*.
 */
static vm_fault_t vpmu_window_fault(const struct vpmu_ring *ring, struct vm_fault *vmf)
{
	if (!ring->pfn || vmf->pgoff >= ring->count)
		return VM_FAULT_SIGBUS;
	return vmf_insert_pfn(vmf->vma, vmf->address, ring->pfn + vmf->pgoff);
}

/**
 * vpmu_window_revoke() - unmap all pages of a ring that has ended
 * @dev: the device; its output_lock is held
 * @ring: the ring, in the window
 *
 * The device may then use the pages for another ring. A later access through a
 * mapping of the ended ring raises SIGBUS, like an access beyond the end of a
 * file.
 */
static void vpmu_window_revoke(struct vpmu_device *dev, struct vpmu_ring *ring)
{
	struct vpmu_file *file;

	lockdep_assert_held(&dev->output_lock);
	vpmu_records_end(&ring->records);
	ring->pfn = 0;
	/*
	 * @ring->writers has every file through which the ring is mapped: an
	 * event remains a writer of its ring while the ring is mapped through
	 * the event's file.
	 */
	list_for_each_entry(file, &ring->writers, output.entry)
		unmap_mapping_range(&file->output.mapping, 0, 0, 1);
}

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
	struct vpmu_file *file = vpmu_file_from(vma->vm_file);

	mutex_lock(&file->dev->output_lock);
	vpmu_ring_mapped(file);
	mutex_unlock(&file->dev->output_lock);
}

static void ring_vm_close(struct vm_area_struct *vma)
{
	struct vpmu_file *file = vpmu_file_from(vma->vm_file);

	mutex_lock(&file->dev->output_lock);
	vpmu_ring_unmapped(file);
	mutex_unlock(&file->dev->output_lock);
}

/* A ring or an area is always mapped whole. */
static int whole_vm_may_split(struct vm_area_struct *vma, unsigned long addr)
{
	return -EINVAL;
}

static const struct vm_operations_struct ring_vm_ops = {
	.open = ring_vm_open,
	.close = ring_vm_close,
	.may_split = whole_vm_may_split,
};

/*
 * Inserts a page of the window into a mapping. This is not done in mmap(2),
 * because vpmu_window_revoke() does not find a mapping that mmap(2) is still
 * setting up.
 */
static vm_fault_t ring_vm_fault(struct vm_fault *vmf)
{
	struct vpmu_file *file = vpmu_file_from(vmf->vma->vm_file);
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
	.may_split = whole_vm_may_split,
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
static void vpmu_ring_vma(struct vm_area_struct *vma, const struct vm_operations_struct *ops)
{
	vpmu_vm_flags_set(vma, VM_DONTCOPY | VM_DONTEXPAND | VM_DONTDUMP);
	if (!(vma->vm_flags & VM_WRITE))
		vpmu_vm_flags_clear(vma, VM_MAYWRITE);
	vma->vm_ops = ops;
}

/**
 * vpmu_ring_mmap() - map an event's ring, as mmap(2) of a perf event does
 * @filp: a ring descriptor
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
static int vpmu_ring_mmap(struct file *filp, struct vm_area_struct *vma)
{
	struct vpmu_file *file = vpmu_file_from(filp);
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

/*
 * AUX areas: pages beside a ring. The host writes traces to them.
 *
 * A program writes the area's offset and size to the ring's first page, and
 * maps the area at that offset, as for a perf event. Each mapping of an area
 * also counts as a mapping of the ring, so the ring outlives the area. Between
 * the first mmap(2) and the last munmap(2), the host and the program use the
 * area without this driver.
 */

/*
 * Order of the longest run of contiguous pages to allocate. The host copies run
 * by run, and runs of 2 MiB are long enough for that.
 */
#define AUX_ORDER_MAX	9

static void aux_free(struct vpmu_aux *aux)
{
	u32 i;

	for (i = 0; i < aux->count && aux->pages[i]; i++)
		put_page(aux->pages[i]);
	vpmu_uncharge(&aux->charge);
	kvfree(aux);
}

/*
 * Allocates zeroed pages, in contiguous runs that are as long as the allocator
 * can provide without retrying.
 */
static int aux_fill(struct vpmu_aux *aux)
{
	const gfp_t gfp = GFP_KERNEL_ACCOUNT | __GFP_ZERO;
	unsigned int order = AUX_ORDER_MAX;
	struct page *page;
	u32 filled = 0, i;

	while (filled < aux->count) {
		order = min_t(unsigned int, order, ilog2(aux->count - filled));
		page = alloc_pages(order ? gfp | __GFP_NOWARN | __GFP_NORETRY : gfp, order);
		if (!page && !order)
			return -ENOMEM;
		if (!page) {
			order--;
			continue;
		}
		split_page(page, order);
		for (i = 0; i < 1U << order; i++)
			aux->pages[filled++] = page + i;
	}
	return 0;
}

/**
 * vpmu_aux_destroy() - take the pages back from the device, and free them
 * @dev: the device; its output_lock is held
 * @ring: the ring beside the area
 *
 * If the device may still write to the pages, they are leaked.
 */
static void vpmu_aux_destroy(struct vpmu_device *dev, struct vpmu_ring *ring)
{
	int err = 0;

	if (!ring->ended)
		err = vpmu_control_unmap_aux(dev, ring->id);
	if (!err)
		aux_free(ring->aux);
	else
		vpmu_err(dev, "the device keeps the AUX area of event %llu (%d): %u pages are lost\n",
			 ring->id, err, ring->aux->count);
	ring->aux = NULL;
}

static void aux_vm_open(struct vm_area_struct *vma)
{
	struct vpmu_file *file = vpmu_file_from(vma->vm_file);

	mutex_lock(&file->dev->output_lock);
	file->output.ring->aux->mapped++;
	vpmu_ring_mapped(file);
	mutex_unlock(&file->dev->output_lock);
}

static void aux_vm_close(struct vm_area_struct *vma)
{
	struct vpmu_file *file = vpmu_file_from(vma->vm_file);

	mutex_lock(&file->dev->output_lock);
	if (!--file->output.ring->aux->mapped && !file->output.ring->kept)
		vpmu_aux_destroy(file->dev, file->output.ring);
	vpmu_ring_unmapped(file);
	mutex_unlock(&file->dev->output_lock);
}

static const struct vm_operations_struct aux_vm_ops = {
	.open = aux_vm_open,
	.close = aux_vm_close,
	.may_split = whole_vm_may_split,
};

/*
 * Whether a mapping has the offset and size that the ring's first page states.
 * If the area is mapped already, they must also match the existing mapping. The
 * program can write to the page at any time, so read each field only once.
 */
static bool aux_fits(const struct vpmu_ring *ring, struct vm_area_struct *vma)
{
	const struct perf_event_mmap_page *page = page_address(ring->pages[0]);
	u64 offset = READ_ONCE(page->aux_offset);
	u64 size = READ_ONCE(page->aux_size);
	unsigned long count = vma_pages(vma);

	if (offset < (u64)ring->count << PAGE_SHIFT)
		return false;
	if (offset != (u64)vma->vm_pgoff << PAGE_SHIFT || size != (u64)count << PAGE_SHIFT)
		return false;
	if (ring->aux && (ring->aux->pgoff != vma->vm_pgoff || ring->aux->count != count))
		return false;
	return is_power_of_2(count);
}

static struct vpmu_aux *aux_alloc(struct vpmu_file *file, struct vm_area_struct *vma)
{
	unsigned long count = vma_pages(vma);
	struct vpmu_charge charge;
	struct vpmu_aux *aux;
	int err;

	/*
	 * Check in perf's order, so that a call with several errors gets perf's
	 * errno.
	 */
	err = vpmu_charge(&charge, count);
	if (err)
		return ERR_PTR(err);
	err = -EOPNOTSUPP;
	if (!file->spec.trace)
		goto uncharge;
	err = -ENOMEM;
	if (count > file->dev->info.max_aux_pages)
		goto uncharge;
	aux = kvzalloc(struct_size(aux, pages, count), GFP_KERNEL);
	if (!aux)
		goto uncharge;
	aux->charge = charge;
	aux->pgoff = vma->vm_pgoff;
	aux->count = count;
	err = aux_fill(aux);
	if (!err)
		return aux;
	aux_free(aux);
	return ERR_PTR(err);

uncharge:
	vpmu_uncharge(&charge);
	return ERR_PTR(err);
}

static int aux_insert(const struct vpmu_aux *aux, struct vm_area_struct *vma)
{
	unsigned long left = aux->count;

	return vm_insert_pages(vma, vma->vm_start, (struct page **)aux->pages, &left);
}

/* Allocates an area for its first mapping. */
static int aux_create(struct vpmu_file *file, struct vm_area_struct *vma)
{
	struct vpmu_ring *ring = file->output.ring;
	struct vpmu_aux *aux;
	int err;

	aux = aux_alloc(file, vma);
	if (IS_ERR(aux))
		return PTR_ERR(aux);
	err = vpmu_control_map_aux(file->dev, ring->id, aux->pages, aux->count,
				   vma->vm_flags & VM_WRITE ? VPMU_MAP_WRITABLE : 0);
	if (err) {
		aux_free(aux);
		/*
		 * -ENOENT: the trace through which the ring was mapped has been
		 * closed.
		 */
		return err == -ENOENT ? -EOPNOTSUPP : err;
	}
	ring->aux = aux;
	err = aux_insert(aux, vma);
	if (err)
		vpmu_aux_destroy(file->dev, ring);
	return err;
}

/**
 * vpmu_aux_mmap() - map the AUX area of an event's ring, like mmap(2) of a perf
 *                   event
 * @file: an event that writes to a ring
 * @vma: a shared mapping, with the offset and size that the ring's first page
 *       states. If the first mapping is writable, the reader moves aux_tail. If
 *       it is read-only, the device overwrites old data
 *
 * Return: 0 or a negative errno.
 */
static int vpmu_aux_mmap(struct vpmu_file *file, struct vm_area_struct *vma)
{
	struct vpmu_ring *ring;
	int err = -EINVAL;

	mutex_lock(&file->dev->output_lock);
	ring = file->output.ring;
	if (file->failure)
		err = file->failure;
	else if (file->ended)
		err = -ENOENT;
	else if (ring && !ring->window && aux_fits(ring, vma))
		err = ring->aux ? aux_insert(ring->aux, vma) : aux_create(file, vma);
	if (!err) {
		ring->aux->mapped++;
		vpmu_ring_mapped(file);
	}
	mutex_unlock(&file->dev->output_lock);
	if (!err)
		vpmu_ring_vma(vma, &aux_vm_ops);
	return err;
}

/*
 * Ring descriptors: mmap(2), poll(2), signals and calls for records that the host
 * writes.
 */

static const struct file_operations vpmu_file_fops;

static void file_gone(struct irq_work *work)
{
	vpmu_output_gone(container_of(work, struct vpmu_file, waiters.gone));
}

static void file_limit(struct work_struct *work)
{
	struct vpmu_file *file = container_of(work, struct vpmu_file, waiters.limit);
	struct perf_event *event = READ_ONCE(file->event);
	bool spent = true;

	mutex_lock(&file->waiters.refresh);
	if (event)
		spent = vpmu_event_spent(event);
	mutex_unlock(&file->waiters.refresh);
	vpmu_output_limit(file, spent);
}

/**
 * vpmu_file_alloc() - allocate a file
 * @dev: the device
 *
 * Return: the file, with one reference, or NULL.
 */
struct vpmu_file *vpmu_file_alloc(struct vpmu_device *dev)
{
	struct vpmu_file *file = kzalloc(sizeof(*file), GFP_KERNEL);

	if (!file)
		return NULL;
	kref_init(&file->ref);
	INIT_LIST_HEAD(&file->output.entry);
	INIT_LIST_HEAD(&file->output.poller);
	INIT_LIST_HEAD(&file->waiters.entry);
	INIT_LIST_HEAD(&file->persist.entry);
	address_space_init_once(&file->output.mapping);
	file->output.mapping.a_ops = &empty_aops;
	init_waitqueue_head(&file->waiters.queue);
	init_irq_work(&file->waiters.gone, file_gone);
	INIT_WORK(&file->waiters.limit, file_limit);
	mutex_init(&file->waiters.refresh);
	vpmu_device_get(dev);
	file->dev = dev;
	return file;
}

/**
 * vpmu_file_get() - get a reference on a file
 * @file: the file
 */
void vpmu_file_get(struct vpmu_file *file)
{
	kref_get(&file->ref);
}

static void file_free(struct kref *ref)
{
	struct vpmu_file *file = container_of(ref, struct vpmu_file, ref);
	struct vpmu_device *dev = file->dev;

	irq_work_sync(&file->waiters.gone);
	vpmu_output_forget(file);
	if (file->tracks)
		vpmu_task_put();
	kfree_rcu(file, rcu);
	vpmu_device_put(dev);
}

/**
 * vpmu_file_put() - drop a reference on a file
 * @file: the file
 */
void vpmu_file_put(struct vpmu_file *file)
{
	kref_put(&file->ref, file_free);
}

static int file_release(struct inode *inode, struct file *filp)
{
	struct vpmu_descriptor *descriptor = filp->private_data;

	vpmu_file_put(descriptor->file);
	fput(descriptor->perf);
	kfree(descriptor);
	return 0;
}

static bool file_has_children(struct perf_event *event)
{
	bool has;

	perf_core_lock_family(event);
	has = perf_core_has_children(event);
	perf_core_unlock_family(event);
	return has;
}

static __poll_t file_poll(struct file *filp, poll_table *wait)
{
	struct vpmu_file *file = vpmu_file_from(filp);

	poll_wait(filp, &file->waiters.queue, wait);
	if (READ_ONCE(file->error))
		return EPOLLHUP | EPOLLERR;
	/* The event of a task is never persistent, so the file keeps its event. */
	if (file->place.task && perf_core_task_ended(file->event) &&
	    !file_has_children(file->event))
		return EPOLLHUP;
	return vpmu_output_poll(file, &filp->f_pos);
}

static int file_fasync(int fd, struct file *filp, int on)
{
	struct vpmu_file *file = vpmu_file_from(filp);
	struct inode *inode = file_inode(filp);
	int ret;

	inode_lock(inode);
	/*
	 * Without signals, the notices of a ring name any event that writes to
	 * it. An event without records has no notices, and refuses the request.
	 */
	if (on && !file->waiters.fasync)
		vpmu_control_signal(file->dev, file->id, true);
	ret = fasync_helper(fd, filp, on, &file->waiters.fasync);
	if (!on && ret > 0 && !file->waiters.fasync)
		vpmu_control_signal(file->dev, file->id, false);
	inode_unlock(inode);
	return ret < 0 ? ret : 0;
}

static long file_wakeup(struct vpmu_file *file, const struct vpmu_wakeup __user *arg)
{
	struct vpmu_wakeup wakeup;

	if (copy_from_user(&wakeup, arg, sizeof(wakeup)))
		return -EFAULT;
	return vpmu_output_interval(file, &wakeup);
}

static long file_set_output(struct vpmu_file *file, unsigned long fd)
{
	struct file *target;
	long err = -EBADF;

	if (fd == -1UL)
		return vpmu_output_redirect(file, NULL);
	target = fget(fd);
	if (!target)
		return -EBADF;
	if (target->f_op == &vpmu_file_fops)
		err = vpmu_output_redirect(file, vpmu_file_from(target));
	fput(target);
	return err;
}

/* A reset of the count, also in the records and pages that the host writes */
static long file_reset(struct vpmu_file *file)
{
	struct perf_event *event = READ_ONCE(file->event);

	return event ? vpmu_call_family(event, VPMU_COMMAND_RESET) :
		       vpmu_direct_command(file, VPMU_COMMAND_RESET, 0);
}

static long file_refresh(struct vpmu_file *file, int overflows)
{
	struct perf_event *event = READ_ONCE(file->event);
	int err;

	if (overflows < 0)
		return -EINVAL;
	if (event) {
		mutex_lock(&file->waiters.refresh);
		err = vpmu_event_refresh(event, overflows);
		mutex_unlock(&file->waiters.refresh);
		return err;
	}
	/*
	 * As in perf, an argument of zero enables the event for its remaining
	 * overflows, or without a limit if none remain.
	 */
	if (!overflows)
		return vpmu_direct_command(file, VPMU_COMMAND_ENABLE, 0);
	return vpmu_direct_command(file, VPMU_COMMAND_REFRESH, overflows);
}

static long file_period(struct vpmu_file *file, const u64 __user *arg)
{
	u64 period;

	if (copy_from_user(&period, arg, sizeof(period)))
		return -EFAULT;
	return vpmu_direct_command(file, VPMU_COMMAND_PERIOD, period);
}

/* Calls that change a persistent event, which perf core does not schedule. */
static long file_ioctl_direct(struct vpmu_file *file, unsigned int cmd, unsigned long arg)
{
	switch (cmd) {
	case PERF_EVENT_IOC_ENABLE:
		return vpmu_direct_command(file, VPMU_COMMAND_ENABLE, 0);
	case PERF_EVENT_IOC_DISABLE:
		return vpmu_direct_command(file, VPMU_COMMAND_DISABLE, 0);
	case PERF_EVENT_IOC_PERIOD:
		return file_period(file, (void __user *)arg);
	default:
		return -ENOTTY;
	}
}

static long file_ioctl(struct file *filp, unsigned int cmd, unsigned long arg)
{
	struct vpmu_file *file = vpmu_file_from(filp);
	int failure = READ_ONCE(file->failure);

	if (cmd == PERF_EVENT_IOC_ID)
		return put_user(file->id, (u64 __user *)arg);
	if (failure)
		return failure;
	switch (cmd) {
	case PERF_EVENT_IOC_SET_OUTPUT:
		return file_set_output(file, arg);
	case PERF_EVENT_IOC_PAUSE_OUTPUT:
		return vpmu_output_pause(file, arg);
	case PERF_EVENT_IOC_RESET:
		return arg ? -EINVAL : file_reset(file);
	case PERF_EVENT_IOC_REFRESH:
		return file_refresh(file, arg);
	case VPMU_IOC_WAKEUP:
		return file_wakeup(file, (void __user *)arg);
	case VPMU_IOC_FLUSH:
		return arg ? -EINVAL : vpmu_flush(file);
	default:
		return file->direct ? file_ioctl_direct(file, cmd, arg) : -ENOTTY;
	}
}

static const struct file_operations vpmu_file_fops = {
	.owner		= THIS_MODULE,
	.release	= file_release,
	.poll		= file_poll,
	.unlocked_ioctl	= file_ioctl,
	.compat_ioctl	= compat_ptr_ioctl,
	.mmap		= vpmu_ring_mmap,
	.fasync		= file_fasync,
};

/* Creates the struct file; it takes over both references of @descriptor. */
static struct file *file_open(struct vpmu_descriptor *descriptor)
{
	struct vpmu_file *file = descriptor->file;
	struct file *filp;

	filp = anon_inode_getfile("[vpmu_ring]", &vpmu_file_fops, descriptor, O_RDWR);
	if (IS_ERR(filp))
		return filp;
	/*
	 * A ring descriptor has no read position. Instead, f_pos holds the last
	 * wakeup that poll() has reported.
	 */
	stream_open(file_inode(filp), filp);
	/*
	 * All descriptors of the event share one address_space, through which
	 * vpmu_window_revoke() finds all mappings.
	 */
	file->output.mapping.host = file_inode(filp);
	filp->f_mapping = &file->output.mapping;
	return filp;
}

/**
 * vpmu_file_descriptor() - make a ring descriptor
 * @file: the event
 * @perf: the file of the perf event that keeps @file
 *
 * Return: the descriptor, or a negative errno.
 */
int vpmu_file_descriptor(struct vpmu_file *file, struct file *perf)
{
	struct vpmu_descriptor *descriptor;
	struct file *filp;
	int fd;

	fd = get_unused_fd_flags(O_CLOEXEC);
	if (fd < 0)
		return fd;
	filp = ERR_PTR(-ENOMEM);
	descriptor = kmalloc(sizeof(*descriptor), GFP_KERNEL);
	if (descriptor) {
		descriptor->file = file;
		descriptor->perf = perf;
		filp = file_open(descriptor);
	}
	if (IS_ERR(filp)) {
		kfree(descriptor);
		put_unused_fd(fd);
		return PTR_ERR(filp);
	}
	vpmu_file_get(file);
	get_file(perf);
	fd_install(fd, filp);
	return fd;
}

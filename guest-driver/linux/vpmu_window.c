// SPDX-License-Identifier: GPL-2.0
/*
 * The window: host memory for rings that outlive this driver.
 *
 * The device chooses the pages of a ring. They are not guest RAM, so this
 * driver does not allocate, charge or reference-count them; programs map them
 * directly.
 */
#include <linux/fs.h>
#include <linux/io.h>
#include <linux/minmax.h>
#include <linux/mm.h>
#include <linux/virtio_config.h>

#include "vpmu.h"
#include "vpmu_file.h"
#include "vpmu_ring.h"

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
unsigned long vpmu_window_place(const struct vpmu_device *dev, u32 page, u32 count)
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
vm_fault_t vpmu_window_fault(const struct vpmu_ring *ring, struct vm_fault *vmf)
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
void vpmu_window_revoke(struct vpmu_device *dev, struct vpmu_ring *ring)
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

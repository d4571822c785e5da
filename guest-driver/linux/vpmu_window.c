// SPDX-License-Identifier: GPL-2.0
/*
 * The window: memory of the host's in which rings lie that outlive this driver.
 *
 * The device picks the pages. They are no memory of the guest's, so there is nothing to
 * allocate, to charge or to count references of; programs map them as they are.
 */
#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/virtio_config.h>

#include "vpmu.h"

/**
 * vpmu_window_init() - find the window
 * @dev: the device
 *
 * Return: 0, also for a device that has none; or -ENXIO.
 */
int vpmu_window_init(struct vpmu_device *dev)
{
	struct virtio_shm_region region;

	if (!virtio_has_feature(dev->vdev, VPMU_F_WINDOW))
		return 0;
	if (!virtio_get_shm_region(dev->vdev, &region, VPMU_SHM_WINDOW) ||
	    region.addr % VPMU_PAGE_SIZE || !(region.len / VPMU_PAGE_SIZE)) {
		dev_err(&dev->vdev->dev, "the window is offered but not there\n");
		return -ENXIO;
	}
	dev->window_pfn = PHYS_PFN(region.addr);
	dev->window_pages = min_t(u64, region.len / VPMU_PAGE_SIZE, U32_MAX);
	return 0;
}

/**
 * vpmu_window_place() - where a ring lies
 * @dev: the device
 * @page: the number of its first page in the window, as the device says
 * @count: of its pages
 *
 * Return: the frame of its first page; 0 if that is not within the window.
 */
unsigned long vpmu_window_place(const struct vpmu_device *dev, u32 page, u32 count)
{
	if (page >= dev->window_pages || count > dev->window_pages - page)
		return 0;
	return dev->window_pfn + page;
}

/**
 * vpmu_window_insert() - put a ring's pages into a map
 * @ring: of the window
 * @vma: as long as the ring
 *
 * It is the host's ordinary memory, and cached as such.
 *
 * Return: 0 or a negative errno.
 */
int vpmu_window_insert(const struct vpmu_ring *ring, struct vm_area_struct *vma)
{
	return remap_pfn_range(vma, vma->vm_start, ring->pfn, (unsigned long)ring->count << PAGE_SHIFT,
			       vma->vm_page_prot);
}

/**
 * vpmu_window_revoke() - take the pages out of all maps of a ring that has ended
 * @dev: the device; its output_lock is held
 * @ring: of the window
 *
 * The device may give them to another ring. Who touches such a map gets SIGBUS, as
 * behind the end of a file.
 */
void vpmu_window_revoke(struct vpmu_device *dev, struct vpmu_ring *ring)
{
	struct vpmu_file *file;

	lockdep_assert_held(&dev->output_lock);
	/* What has maps keeps its ring. */
	list_for_each_entry(file, &ring->writers, writer)
		unmap_mapping_range(&file->mapping, 0, 0, 1);
}

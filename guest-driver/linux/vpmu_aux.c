// SPDX-License-Identifier: GPL-2.0
/*
 * AUX areas of /dev/vpmu: pages beside a ring. The host writes traces to them.
 *
 * A program writes the area's offset and size to the ring's first page, and
 * maps the area at that offset, as for a perf event. Each mapping of an area
 * also counts as a mapping of the ring, so the ring outlives the area. Between
 * the first mmap(2) and the last munmap(2), the host and the program use the
 * area without this driver.
 */
#include <linux/fs.h>
#include <linux/log2.h>
#include <linux/mm.h>
#include <linux/perf_event.h>
#include <linux/slab.h>

#include "vpmu.h"
#include "vpmu_file.h"
#include "vpmu_ring.h"

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
void vpmu_aux_destroy(struct vpmu_device *dev, struct vpmu_ring *ring)
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
	struct vpmu_file *file = vma->vm_file->private_data;

	mutex_lock(&file->dev->output_lock);
	file->output.ring->aux->mapped++;
	vpmu_ring_mapped(file);
	mutex_unlock(&file->dev->output_lock);
}

static void aux_vm_close(struct vm_area_struct *vma)
{
	struct vpmu_file *file = vma->vm_file->private_data;

	mutex_lock(&file->dev->output_lock);
	if (!--file->output.ring->aux->mapped && !file->output.ring->kept)
		vpmu_aux_destroy(file->dev, file->output.ring);
	vpmu_ring_unmapped(file);
	mutex_unlock(&file->dev->output_lock);
}

/* An area is always mapped whole. */
static int aux_vm_may_split(struct vm_area_struct *vma, unsigned long addr)
{
	return -EINVAL;
}

static const struct vm_operations_struct aux_vm_ops = {
	.open = aux_vm_open,
	.close = aux_vm_close,
	.may_split = aux_vm_may_split,
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
int vpmu_aux_mmap(struct vpmu_file *file, struct vm_area_struct *vma)
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

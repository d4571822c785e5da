/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The memory that events of /dev/vpmu write to: rings, the AUX areas beside
 * them, and the accounting of their pages.
 */
#ifndef _VPMU_RING_H
#define _VPMU_RING_H

#include <linux/fs.h>
#include <linux/list.h>
#include <linux/mm.h>
#include <linux/poll.h>
#include <linux/types.h>

#include "vpmu_replay.h"

struct cred;
struct mm_struct;
struct vpmu_device;
struct vpmu_file;
struct vpmu_notice;
struct vpmu_persistent_event;
struct vpmu_wakeup;

/**
 * struct vpmu_charge - whom pages are charged to
 * @owner: the credentials of the user that is charged, up to the limit that the
 *         parameter mlock_kb sets. They hold the reference on the user, because
 *         a module cannot drop one on kernels without free_uid(), such as
 *         Debian's 6.1.0-49 to 6.1.0-52
 * @mm: the address space that is charged for the pages above that limit
 * @extra: number of pages that @mm is charged for
 * @count: number of pages in total, charged to @owner or to @mm
 */
struct vpmu_charge {
	const struct cred *owner;
	struct mm_struct *mm;
	unsigned long extra;
	unsigned long count;
};

/**
 * struct vpmu_aux - an AUX area beside a ring; the host writes traces to it
 * @mapped: number of mappings, through any event
 * @pgoff: the area's mmap(2) offset in pages, after the ring
 * @charge: whom the pages are charged to
 * @count: number of pages
 * @pages: the pages
 */
struct vpmu_aux {
	unsigned int mapped;
	unsigned long pgoff;
	struct vpmu_charge charge;
	u32 count;
	struct page *pages[];
};

/**
 * struct vpmu_ring - pages that the host writes and programs map
 * @mapped: number of mappings, through any event, including the mappings of
 *          @aux
 * @id: the device's id of the event through which the ring was first mapped
 * @writers: the files whose events write to the ring
 * @pollers: those of @writers that programs have polled since the last wakeup
 * @woken: in vpmu_vcpu::woken while there are @pollers to wake
 * @wakeup: value of vpmu_lookup::wakeups at the ring's last wakeup
 * @kept: the ring stays even without mappings, because its event is persistent
 * @window: the ring is in the window, starting at @pfn
 * @overwrites: no reader moves the tail, so new records overwrite old ones
 * @ended: the device no longer writes to the ring
 * @pfn: the first page frame in the window; 0 once the device may use the pages
 *       for another ring
 * @aux: the AUX area while it is mapped, or NULL
 * @records: the state of replays to views
 * @charge: whom the pages are charged to
 * @count: number of pages
 * @pages: the metadata page, then the data pages; empty with @window
 *
 * vpmu_device::output_lock protects the ring, except for @pollers, @woken and
 * @wakeup, which vpmu_device::lookup.lock protects; @writers are changed with
 * both held.
 */
struct vpmu_ring {
	unsigned int mapped;
	u64 id;
	struct list_head writers;
	struct list_head pollers;
	struct list_head woken;
	loff_t wakeup;
	bool kept;
	bool window;
	bool overwrites;
	bool ended;
	unsigned long pfn;
	struct vpmu_aux *aux;
	struct vpmu_records records;
	struct vpmu_charge charge;
	u32 count;
	struct page *pages[];
};

/* vpmu_ring.c */
void vpmu_ring_mapped(struct vpmu_file *file);
void vpmu_ring_unmapped(struct vpmu_file *file);
int vpmu_ring_adopt(struct vpmu_file *file, const struct vpmu_persistent_event *event);
struct vpmu_ring *vpmu_ring_alloc_shared(struct page *const *pages, u32 count);
void vpmu_ring_free(struct vpmu_ring *ring);
void vpmu_ring_attach(struct vpmu_file *file, struct vpmu_ring *ring);
bool vpmu_ring_forget(struct vpmu_file *file);
void vpmu_ring_ended(struct vpmu_file *file);
void vpmu_ring_close(struct vpmu_file *file);
void vpmu_ring_vma(struct vm_area_struct *vma, const struct vm_operations_struct *ops);
int vpmu_ring_mmap(struct file *filp, struct vm_area_struct *vma);

/* vpmu_aux.c */
int vpmu_aux_mmap(struct vpmu_file *file, struct vm_area_struct *vma);
void vpmu_aux_destroy(struct vpmu_device *dev, struct vpmu_ring *ring);

/* vpmu_charge.c */
int vpmu_charge(struct vpmu_charge *charge, unsigned long count);
void vpmu_uncharge(struct vpmu_charge *charge);

/* vpmu_window.c */
int vpmu_window_init(struct vpmu_device *dev);
void vpmu_window_exit(struct vpmu_device *dev);
unsigned long vpmu_window_place(const struct vpmu_device *dev, u32 page, u32 count);
void *vpmu_window_address(const struct vpmu_device *dev, unsigned long pfn);
vm_fault_t vpmu_window_fault(const struct vpmu_ring *ring, struct vm_fault *vmf);
void vpmu_window_revoke(struct vpmu_device *dev, struct vpmu_ring *ring);

/* vpmu_output.c */
void vpmu_output_attach(struct vpmu_file *file, struct vpmu_ring *ring);
void vpmu_output_unmapped(struct vpmu_file *file);
void vpmu_output_abandon(struct vpmu_device *dev, struct vpmu_ring *ring);
int vpmu_output_redirect(struct vpmu_file *file, struct vpmu_file *target);
int vpmu_output_pause(struct vpmu_file *file, bool paused);
int vpmu_output_interval(struct vpmu_file *file, const struct vpmu_wakeup *wakeup);
void vpmu_output_ended(struct vpmu_file *file);
__poll_t vpmu_output_poll(struct vpmu_file *file, loff_t *told);
void vpmu_output_gone(struct vpmu_file *file);
void vpmu_output_forget(struct vpmu_file *file);
void vpmu_output_notice(struct vpmu_device *dev, const struct vpmu_notice *notice);

#endif /* _VPMU_RING_H */

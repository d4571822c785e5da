/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The memory that the host writes for events: rings, the AUX areas beside them,
 * and the accounting of their pages.
 */
#ifndef _VPMU_RING_H
#define _VPMU_RING_H

#include <linux/fs.h>
#include <linux/list.h>
#include <linux/mm.h>
#include <linux/mm_types.h>
#include <linux/perf_event.h>
#include <linux/poll.h>
#include <linux/spinlock.h>
#include <linux/types.h>

struct cred;
struct mm_struct;
struct vpmu_device;
struct vpmu_file;
struct vpmu_notice;
struct vpmu_persistent_event;
struct vpmu_vcpu;
struct vpmu_wakeup;

/**
 * struct vpmu_records - a ring that the device writes, and that replays read
 * @lock: held by the CPU that replays. A replay takes it with a trylock;
 *        vpmu_records_end() waits for it
 * @type: PERF_SAMPLE_* fields of the samples, a subset of VPMU_REPLAYED
 * @period: the period of samples without PERF_SAMPLE_PERIOD
 * @prompt: records are replayed when they are written. Their time is that of the
 *          replay, as for the kernel's own events
 * @shared: programs and other perf events also read the ring; PERF_RECORD_LOST
 *          in the ring is the only source for the number of lost samples
 * @size: size of the data in bytes; zero once the device may reuse the pages
 * @pages: the metadata page, then the data pages; not used with @window
 * @window: the address of the metadata page, which the data pages directly
 *          follow; NULL for a ring that is not in the window
 */
struct vpmu_records {
	raw_spinlock_t lock;
	u64 type;
	u64 period;
	bool prompt;
	bool shared;
	u64 size;
	struct page *const *pages;
	void *window;
};

/*
 * Samples can be replayed if they have only these fields. PERF_SAMPLE_REGS_INTR
 * must have exactly the registers in VPMU_ARCH_REGS.
 */
#define VPMU_REPLAYED \
	(PERF_SAMPLE_IDENTIFIER | PERF_SAMPLE_IP | PERF_SAMPLE_TID | PERF_SAMPLE_TIME | \
	 PERF_SAMPLE_ADDR | PERF_SAMPLE_ID | PERF_SAMPLE_STREAM_ID | PERF_SAMPLE_CPU | \
	 PERF_SAMPLE_PERIOD | PERF_SAMPLE_READ | PERF_SAMPLE_CALLCHAIN | PERF_SAMPLE_REGS_INTR)

/*
 * If an event's sample_type has one of these fields, each sample is replayed
 * immediately, because perf core reads the user registers and stack, and the
 * counts of other PMUs, at the replay.
 */
#define VPMU_SAMPLE_PROMPT \
	(PERF_SAMPLE_STACK_USER | PERF_SAMPLE_REGS_USER | PERF_SAMPLE_READ)

/* Maximum number of records per replay, because a replay keeps interrupts off */
#define VPMU_REPLAY_PIECE	64

bool vpmu_replay(struct vpmu_vcpu *vcpu, struct perf_event *event, struct vpmu_records *records,
		 bool *ended, unsigned int *left);
bool vpmu_replay_counts(const struct vpmu_vcpu *vcpu, const struct perf_event *event);
void vpmu_records_init(struct vpmu_records *records);
void vpmu_records_end(struct vpmu_records *records);

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
int vpmu_window_init(struct vpmu_device *dev);
void vpmu_window_exit(struct vpmu_device *dev);
void *vpmu_window_address(const struct vpmu_device *dev, unsigned long pfn);

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
void vpmu_output_limit(struct vpmu_file *file, bool spent);
void vpmu_output_notice(struct vpmu_device *dev, const struct vpmu_notice *notice);

#endif /* _VPMU_RING_H */

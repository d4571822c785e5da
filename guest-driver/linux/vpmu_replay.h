/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Replays of the device's records to perf core.
 */
#ifndef _VPMU_REPLAY_H
#define _VPMU_REPLAY_H

#include <linux/mm_types.h>
#include <linux/perf_event.h>
#include <linux/spinlock.h>
#include <linux/types.h>

struct vpmu_vcpu;

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
bool vpmu_records_are_empty(const struct vpmu_records *records);
void vpmu_records_drop(struct vpmu_records *records);
void vpmu_records_end(struct vpmu_records *records);
int vpmu_replay_init(struct vpmu_vcpu *vcpu);
void vpmu_replay_exit(struct vpmu_vcpu *vcpu);

#endif /* _VPMU_REPLAY_H */

/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Replays: records of the device become records of perf core.
 */
#ifndef _VPMU_REPLAY_H
#define _VPMU_REPLAY_H

#include <linux/mm_types.h>
#include <linux/perf_event.h>
#include <linux/spinlock.h>
#include <linux/types.h>

struct vpmu_vcpu;

/**
 * struct vpmu_records - a ring that the device writes, as a replay reads it
 * @lock: held by the CPU that replays; replays only try it, vpmu_records_end()
 *        waits for it
 * @type: PERF_SAMPLE_* of the samples, out of VPMU_REPLAYED
 * @period: the period of samples without PERF_SAMPLE_PERIOD
 * @shared: programs and other perf events read the ring, too, and losses are
 *          known only from its records
 * @size: bytes of data; zero once the device may reuse the pages
 * @pages: the metadata page, then the data; NULL with @window
 * @window: the address of the metadata page, which the data follow
 */
struct vpmu_records {
	raw_spinlock_t lock;
	u64 type;
	u64 period;
	bool shared;
	u64 size;
	struct page *const *pages;
	void *window;
};

/*
 * Fields of samples that can be replayed; PERF_SAMPLE_REGS_INTR with
 * VPMU_ARCH_REGS only.
 */
#define VPMU_REPLAYED \
	(PERF_SAMPLE_IDENTIFIER | PERF_SAMPLE_IP | PERF_SAMPLE_TID | PERF_SAMPLE_TIME | \
	 PERF_SAMPLE_ADDR | PERF_SAMPLE_ID | PERF_SAMPLE_STREAM_ID | PERF_SAMPLE_CPU | \
	 PERF_SAMPLE_PERIOD | PERF_SAMPLE_READ | PERF_SAMPLE_CALLCHAIN | PERF_SAMPLE_REGS_INTR)

/*
 * Fields for which each sample is replayed at once: perf core reads the user's
 * registers and stack, and counts of other PMUs, at the replay.
 */
#define VPMU_SAMPLE_PROMPT \
	(PERF_SAMPLE_STACK_USER | PERF_SAMPLE_REGS_USER | PERF_SAMPLE_READ)

/* Limit on pages per replay, which has interrupts off */
#define VPMU_REPLAY_PAGES	16

bool vpmu_replay(struct vpmu_vcpu *vcpu, struct perf_event *event, struct vpmu_records *records,
		 bool *ended);
bool vpmu_replay_counts(const struct vpmu_vcpu *vcpu, const struct perf_event *event);
void vpmu_records_init(struct vpmu_records *records);
void vpmu_records_end(struct vpmu_records *records);
int vpmu_replay_init(struct vpmu_vcpu *vcpu);
void vpmu_replay_exit(struct vpmu_vcpu *vcpu);

#endif /* _VPMU_REPLAY_H */

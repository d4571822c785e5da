/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What a trace of perf core's and its AUX area know of each other.
 */
#ifndef _VPMU_TRACE_H
#define _VPMU_TRACE_H

#include <linux/list.h>
#include <linux/perf_event.h>

struct vpmu_device;
struct vpmu_event;

/**
 * struct vpmu_area - pages of perf core's that the device may write to
 * @dev: of which device
 * @owner: the event that they were mapped with, NULL once it is closed
 * @pages: their addresses
 * @count: how many
 * @overwrite: nobody moves the tail
 * @kept: the device may not have let go of them
 */
struct vpmu_area {
	struct vpmu_device *dev;
	struct vpmu_event *owner;
	void **pages;
	u32 count;
	bool overwrite;
	bool kept;
};

/**
 * struct vpmu_trace - an event's part in it
 * @own: the event
 * @area: that it was mapped with, if any
 * @buffer: perf core's ring beside @area, to tell whether the event still writes there
 * @handle: perf core's, within a turn
 * @active: in the vCPU's traces, within a turn
 * @cpu: where the turn is, -1 between two
 * @noticed: the device wants this turn to end
 * @head: where the turn began
 * @room: bytes that there were
 * @lost: bytes that the turn before has lost
 * @period: as the device has it
 */
struct vpmu_trace {
	struct vpmu_event *own;
	struct vpmu_area *area;
	const void *buffer;
	struct perf_output_handle handle;
	struct list_head active;
	int cpu;
	bool noticed;
	u64 head;
	u64 room;
	u64 lost;
	u64 period;
};

/* vpmu_area.c */
void *vpmu_area_setup(struct perf_event *event, void **pages, int count, bool overwrite);
void vpmu_area_free(void *aux);

#endif /* _VPMU_TRACE_H */

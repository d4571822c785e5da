/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Traces through perf core, and their AUX areas.
 */
#ifndef _VPMU_TRACE_H
#define _VPMU_TRACE_H

#include <linux/list.h>
#include <linux/perf_event.h>

struct vpmu_device;
struct vpmu_event;

/**
 * struct vpmu_area - pages of perf core's that the device may write to
 * @dev: the device
 * @owner: the event that they were mapped with; NULL once that is closed
 * @pages: their addresses
 * @count: how many
 * @overwrite: new packets overwrite old ones: no reader moves the tail
 * @kept: the device may still write to them
 *
 * vpmu_device::output_lock protects @owner and @kept.
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
 * struct vpmu_trace - a trace's part of an event
 * @own: the event
 * @area: the area that it was mapped with, or NULL
 * @buffer: perf core's ring beside @area; shows whether the event still writes there
 * @handle: perf core's handle, within a turn
 * @active: in vpmu_vcpu::traces, within a turn
 * @cpu: the CPU of the turn, -1 between two turns
 * @noticed: this turn is to end, for a notice of the device or for a flush
 * @head: where the turn began
 * @room: bytes of room at its beginning
 * @lost: bytes that the last turn lost
 * @period: the device's period
 *
 * vpmu_device::output_lock protects @area and @buffer; the rest belongs to the CPU of the turn.
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

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
 * struct vpmu_area - the pages of perf core's AUX area, for the device
 * @dev: the device
 * @owner: the event that they were mapped with; NULL once it is closed
 * @pages: the addresses of the pages
 * @count: number of pages
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
 * struct vpmu_trace - a trace's part of an event; vpmu_trace.c explains turns
 * @own: the event
 * @area: the area that it was mapped with, or NULL
 * @buffer: perf core's ring beside @area, to check whether the event still
 *          writes there
 * @handle: perf core's handle, during a turn
 * @active: in vpmu_vcpu::traces, during a turn
 * @cpu: the CPU of the turn, -1 between two turns
 * @noticed: this turn is to end, for a notice of the device or for a flush
 * @head: the head at the beginning of the turn
 * @room: bytes of room at the beginning of the turn
 * @lost: bytes that the last turn lost
 * @period: the period that the device uses
 *
 * vpmu_device::output_lock protects changes of @area and @buffer. Only the CPU of
 * the turn uses the others, but any CPU reads @cpu and sets @noticed.
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

/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Trace events of perf core, and the AUX areas that they write to.
 */
#ifndef _VPMU_TRACE_H
#define _VPMU_TRACE_H

#include <linux/list.h>
#include <linux/perf_event.h>

struct vpmu_device;
struct vpmu_event;

/**
 * struct vpmu_area - an AUX area of perf core that the device writes to
 * @dev: the device
 * @owner: the event through which the area was mapped; NULL once the event is
 *         closed
 * @pages: the addresses of the pages
 * @count: number of pages
 * @overwrite: no reader moves the tail, so new packets overwrite old ones
 * @kept: the device did not release the pages, and may still write to them
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
 * struct vpmu_trace - the state of a trace; vpmu_trace.c explains spans
 * @own: the trace's event
 * @area: the AUX area that was mapped through the event, or NULL
 * @buffer: the ring of perf core that @area belongs to; if the event's records
 *          now go to another ring, the event must not write to @area
 * @handle: perf core's handle, during a span
 * @active: entry in vpmu_vcpu::traces, during a span
 * @cpu: the CPU of the span, -1 between two spans
 * @noticed: the span must end, because of a notice from the device or a flush
 * @head: the area's head at the beginning of the span
 * @room: bytes that were free at the beginning of the span
 * @lost: number of bytes that were lost in the last span
 * @period: the sample period that was last sent to the device
 *
 * vpmu_device::output_lock protects changes of @area and @buffer. Only the CPU
 * of the span uses the other fields, except that any CPU may read @cpu and set
 * @noticed.
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

/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Persistent events as perf core sees them.
 */
#ifndef _VPMU_VIEW_H
#define _VPMU_VIEW_H

#include <linux/list.h>
#include <linux/types.h>

struct perf_event;
struct vpmu_file;
struct vpmu_ring;
struct vpmu_vcpu;

/**
 * struct vpmu_view - an event of perf core that reads a persistent event
 * @file: the persistent event's, of which this is a handle
 * @event: perf core's
 * @ring: the ring of @file, mapped by this; NULL: it has none whose samples can be replayed
 * @ended: the limit of PERF_EVENT_IOC_REFRESH is used up
 * @entry: in vpmu_vcpu::views while it is active
 */
struct vpmu_view {
	struct vpmu_file *file;
	struct perf_event *event;
	struct vpmu_ring *ring;
	bool ended;
	struct list_head entry;
};

struct vpmu_view *vpmu_view_alloc(struct perf_event *event);
int vpmu_view_open(struct vpmu_view *view, struct vpmu_file *file);
void vpmu_view_close(struct vpmu_view *view);
void vpmu_view_take(struct vpmu_view *view);
void vpmu_view_start(struct vpmu_vcpu *vcpu, struct vpmu_view *view);
void vpmu_view_stop(struct vpmu_vcpu *vcpu, struct vpmu_view *view);
void vpmu_view_read(struct vpmu_view *view);
void vpmu_view_replay(struct vpmu_vcpu *vcpu, struct vpmu_view *view);
void vpmu_view_show(struct vpmu_view *view);

#endif /* _VPMU_VIEW_H */

/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Views: perf core's events that read persistent events.
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
 * @file: the persistent event; the view is one of its handles
 * @event: perf core's event
 * @ring: the ring of @file; the view counts as one of the ring's mappings. NULL
 *        if there is no ring whose samples can be replayed to the view
 * @ended: the limit of PERF_EVENT_IOC_REFRESH is used up
 * @entry: entry in vpmu_vcpu::views while the view is active
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
bool vpmu_view_replay(struct vpmu_vcpu *vcpu, struct vpmu_view *view, unsigned int *left);
void vpmu_view_show(struct vpmu_view *view);

#endif /* _VPMU_VIEW_H */

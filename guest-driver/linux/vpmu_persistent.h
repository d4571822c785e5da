/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Persistent events: they outlive their descriptors, and some outlive the
 * driver.
 */
#ifndef _VPMU_PERSISTENT_H
#define _VPMU_PERSISTENT_H

#include <linux/list.h>
#include <linux/types.h>

struct perf_event;
struct vpmu_device;
struct vpmu_file;
struct vpmu_persistent;
struct vpmu_persistent_event;
struct vpmu_ring;
struct vpmu_vcpu;
struct vpmu_view;

/**
 * struct vpmu_view - an event of perf core that reads a persistent event
 * @file: the persistent event
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
void vpmu_view_join(struct vpmu_view *view, struct vpmu_file *file);
int vpmu_view_open(struct vpmu_view *view, struct vpmu_file *file);
void vpmu_view_close(struct vpmu_view *view);
void vpmu_view_take(struct vpmu_view *view);
void vpmu_view_start(struct vpmu_vcpu *vcpu, struct vpmu_view *view);
void vpmu_view_stop(struct vpmu_vcpu *vcpu, struct vpmu_view *view);
void vpmu_view_read(struct vpmu_view *view);
bool vpmu_view_replay(struct vpmu_vcpu *vcpu, struct vpmu_view *view, unsigned int *left);
void vpmu_view_show(struct vpmu_view *view);

/* vpmu_persistent.c */
void vpmu_persistent_notice(struct vpmu_device *dev);
void vpmu_persistent_init(struct vpmu_device *dev);
void vpmu_persistent_exit(struct vpmu_device *dev);
int vpmu_persistent_resume(struct vpmu_device *dev);
int vpmu_persistent_register(struct vpmu_device *dev);
void vpmu_persistent_close(struct vpmu_device *dev);
void vpmu_persistent_unregister(struct vpmu_device *dev);
struct vpmu_file *vpmu_persistent_get(struct vpmu_device *dev, u64 id);
void vpmu_persistent_put(struct vpmu_file *file);
int vpmu_persistent_detach(struct perf_event *event, const char *name);
int vpmu_persistent_detach_view(struct vpmu_view *view, const char *name);
int vpmu_persistent_attach(struct vpmu_file *file);
long vpmu_persistent_list(struct vpmu_device *dev, struct vpmu_persistent __user *arg);

/* vpmu_view.c */
int vpmu_persistent_pmu_register(struct vpmu_device *dev);
void vpmu_persistent_pmu_unregister(struct vpmu_device *dev);
void vpmu_persistent_show(struct vpmu_file *file);
void vpmu_persistent_hide(struct vpmu_file *file);

#endif /* _VPMU_PERSISTENT_H */

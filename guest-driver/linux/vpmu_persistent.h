/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Persistent events: they outlive their descriptors, and some outlive the
 * driver.
 */
#ifndef _VPMU_PERSISTENT_H
#define _VPMU_PERSISTENT_H

#include <linux/types.h>

struct perf_event;
struct perf_event_attr;
struct vpmu_device;
struct vpmu_file;
struct vpmu_open;
struct vpmu_persistent;
struct vpmu_persistent_event;

/* vpmu_persistent_set.c */
struct vpmu_file *vpmu_persistent_adopt(struct vpmu_device *dev,
					const struct vpmu_persistent_event *event);
struct vpmu_file *vpmu_persistent_find(struct vpmu_device *dev, u64 id);
void vpmu_persistent_add(struct vpmu_file *file);
void vpmu_persistent_remove(struct vpmu_file *file);
int vpmu_persistent_refresh(struct vpmu_device *dev);
void vpmu_persistent_notice(struct vpmu_device *dev);
void vpmu_persistent_init(struct vpmu_device *dev);
void vpmu_persistent_exit(struct vpmu_device *dev);
int vpmu_persistent_resume(struct vpmu_device *dev);
int vpmu_persistent_register(struct vpmu_device *dev);
void vpmu_persistent_close(struct vpmu_device *dev);
void vpmu_persistent_unregister(struct vpmu_device *dev);

/* vpmu_persistent.c */
struct vpmu_file *vpmu_persistent_get(struct vpmu_device *dev, u64 id);
void vpmu_persistent_put(struct vpmu_file *file);
struct vpmu_file *vpmu_persistent_open(struct vpmu_device *dev, const struct vpmu_open *args,
				       const struct perf_event_attr *attr);
int vpmu_persistent_detach(struct vpmu_file *file, const char *name);
int vpmu_persistent_detach_perf(struct perf_event *event, const char *name);
int vpmu_persistent_attach(struct vpmu_file *file);

/* vpmu_persistent_list.c */
long vpmu_persistent_list(struct vpmu_device *dev, struct vpmu_persistent __user *arg);

/* vpmu_persistent_pmu.c */
int vpmu_persistent_pmu_register(struct vpmu_device *dev);
void vpmu_persistent_pmu_unregister(struct vpmu_device *dev);
void vpmu_persistent_show(struct vpmu_file *file);
void vpmu_persistent_hide(struct vpmu_file *file);

#endif /* _VPMU_PERSISTENT_H */

/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Translation of attributes, from both interfaces, to requests to the device.
 */
#ifndef _VPMU_ATTR_H
#define _VPMU_ATTR_H

#include <linux/types.h>

struct perf_event;
struct perf_event_attr;
struct vpmu_device;
struct vpmu_event;
struct vpmu_open_request;

int vpmu_attr_copy(struct perf_event_attr *attr, struct perf_event_attr __user *user);
int vpmu_attr_check(const struct perf_event_attr *attr, u32 max_rate, bool trace);
int vpmu_attr_check_replay(const struct perf_event *event);
bool vpmu_attr_has_registers(const struct perf_event_attr *attr, bool trace);
bool vpmu_attr_is_trace(const struct vpmu_device *dev, const struct perf_event_attr *attr);
int vpmu_attr_config(const struct vpmu_device *dev, const struct perf_event_attr *attr,
		     u64 *config);
u32 vpmu_attr_type(const struct vpmu_device *dev, const struct vpmu_open_request *request,
		   u64 *config);
void vpmu_attr_request(const struct perf_event_attr *attr, bool trace,
		       struct vpmu_open_request *request);
u64 vpmu_attr_replayed(const struct perf_event_attr *attr);
void vpmu_attr_request_replay(const struct perf_event_attr *attr,
			      struct vpmu_open_request *request);
int vpmu_attr_request_exclude(const struct vpmu_event *own, struct vpmu_open_request *request);
bool vpmu_attr_needs_task(const struct vpmu_open_request *request, bool trace);
bool vpmu_attr_opens_registers(const struct vpmu_open_request *request, u64 config);
void vpmu_attr_from_request(const struct vpmu_device *dev,
			    const struct vpmu_open_request *request,
			    struct perf_event_attr *attr);

#endif /* _VPMU_ATTR_H */

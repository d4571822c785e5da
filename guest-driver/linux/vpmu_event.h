/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The driver's data for perf events, and the functions that schedule them.
 */
#ifndef _VPMU_EVENT_H
#define _VPMU_EVENT_H

#include <linux/list.h>
#include <linux/perf_event.h>
#include <linux/types.h>

#include "vpmu.h"

struct perf_event;
struct perf_event_attr;
struct vpmu_device;
struct vpmu_file;
struct vpmu_open_request;
struct vpmu_reply;
struct vpmu_ring;
struct vpmu_sampler;
struct vpmu_vcpu;
struct vpmu_view;

/* The effect of an event's overflow on another event. */
enum vpmu_role {
	VPMU_STARTER,
	VPMU_STOPPER,
	VPMU_ROLES,
};

/**
 * struct vpmu_links - links of a task's event with events that start or stop it,
 *                     and with events that it starts or stops
 * @actor: for each role: the event that starts, or stops, this event; or NULL
 * @entry: for each role: entry in the actor's @targets
 * @targets: for each role: the events that this event starts, or stops
 * @anchored: the event has been linked, so perf core must not swap the contexts
 *            of its tasks
 *
 * vpmu_device::link_lock protects all members; @anchored is also read without
 * the lock. Unused in inherited events and events of a CPU.
 */
struct vpmu_links {
	struct vpmu_event *actor[VPMU_ROLES];
	struct list_head entry[VPMU_ROLES];
	struct list_head targets[VPMU_ROLES];
	bool anchored;
};

#define VPMU_OWED_ALL	U64_MAX

/**
 * struct vpmu_event - the driver's data for a perf event
 *                     (perf_event::pmu_private)
 * @dev: the device
 * @event: the perf event
 * @id: the event's id on the device; zero if the event is not open there: it
 *      could not be opened for a new task, was lost, or became persistent
 * @task: the event belongs to a task, so it is started and stopped by IN and
 *        OUT, not by ENABLE and DISABLE
 * @started: its command to start counting was queued or sent
 * @cpu: the CPU where it was last started
 * @granted: with @file: number of overflows that the driver has granted to the
 *           device for PERF_EVENT_IOC_REFRESH, and that were not used up
 * @limit_hit: it must not start, because its limit of overflows is used up, or
 *             it is persistent
 * @spent: the device has disabled it, because its limit was used up
 * @stopping: its command to stop was queued, after a READ that will show
 *            whether its limit of overflows is used up
 * @count: the count in the device's last answer
 * @enabled_ns: the enabled time in the device's last answer
 * @running_ns: the running time in the device's last answer
 * @lost: the number of overflows without a record, in the device's last answer
 * @ran_ns: total running time on the device; unlike @running_ns, it continues
 *          when the event is reopened
 * @unpaid_ns: time that must still be subtracted from perf core's running time,
 *             because the device did not count the event during that time;
 *             VPMU_OWED_ALL: subtract all running time, past and future, because
 *             the device does not have the event
 * @file: where the host writes its records; NULL for an event whose samples are
 *        replayed to perf core, and for one that has become a view
 * @heirs: the events that inherit it; vpmu_device::lookup.lock protects it
 * @heir: for an inherited event: entry in @heirs of the event that was opened
 * @links: its starter and stopper, and its targets
 * @linked: it has been made a starter, a stopper or a target
 * @incomplete: an event that inherits it could not be opened on the device
 * @pinned: it has pinned its context, so that perf core does not swap the
 *          context
 * @flushed: the result of its last VPMU_COMMAND_FLUSH
 * @sampler: for a sampling event without @file: the ring to replay, which
 *           belongs to the parent if there is one
 * @sampling: entry in vpmu_vcpu::sampling or ::stopped
 * @prompt: VPMU_COMMAND_PROMPT has made its samples prompt
 * @period: the period that the device uses
 * @freq: @period is a frequency
 * @ended: its samples are dropped until it is next started, because the limit of
 *         PERF_EVENT_IOC_REFRESH is used up
 * @resets: vpmu_control_queue::resets when the device opened it
 * @engine: the engine that makes its samples, VPMU_ENGINE_*
 * @view: the view that @event became when it was made persistent, or NULL
 * @tracks: it holds a reference from vpmu_task_get()
 * @unprivileged: it was opened without CAP_PERFMON, or inherited from such an
 *                event
 * @charged: it is charged to the share of programs without CAP_PERFMON
 * @entry: entry in vpmu_life::events
 * @close: the request that closes it on the device
 *
 * The lock of the event's context protects the members that change when the
 * event is scheduled or counted.
 */
struct vpmu_event {
	struct vpmu_device *dev;
	struct perf_event *event;
	u64 id;
	bool task;
	bool started;
	int cpu;
	u32 granted;
	bool limit_hit;
	bool spent;
	bool stopping;
	u64 count;
	u64 enabled_ns;
	u64 running_ns;
	u64 lost;
	u64 ran_ns;
	u64 unpaid_ns;
	struct vpmu_file *file;
	struct list_head heirs;
	struct list_head heir;
	struct vpmu_links links;
	bool linked;
	bool incomplete;
	bool pinned;
	int flushed;
	struct vpmu_sampler *sampler;
	struct list_head sampling;
	bool prompt;
	u64 period;
	bool freq;
	bool ended;
	u32 resets;
	u32 engine;
	struct vpmu_view *view;
	bool tracks;
	bool unprivileged;
	bool charged;
	struct list_head entry;
	struct vpmu_control_close close;
};

/**
 * vpmu_stop_is_throttle() - whether perf core calls pmu->stop() to throttle
 * @flags: the flags of pmu->stop()
 *
 * When an event of another PMU overflows too often, perf core stops all events
 * of its group (before 6.16, only that event). It may do so in any context, even
 * in an NMI, and does not disable the PMUs of the other events, so no command
 * can be sent. An event of this driver counts on instead; perf core's later call
 * of pmu->start() then has no effect. For other purposes, perf core sets
 * PERF_EF_UPDATE.
 *
 * Return: true if the call must be ignored.
 */
static inline bool vpmu_stop_is_throttle(int flags)
{
	return !(flags & PERF_EF_UPDATE);
}

/* vpmu_event.c */
int vpmu_event_create(struct vpmu_device *dev, struct perf_event *event);
int vpmu_event_reopen(struct vpmu_event *own);
void vpmu_event_unpublish(struct vpmu_event *own);
int vpmu_event_request(struct vpmu_event *own, struct vpmu_open_request *request);
void vpmu_event_pin(struct perf_event *event);
void vpmu_event_unpin(struct perf_event *event);
void vpmu_event_anchor(struct vpmu_event *own);
void vpmu_event_lose(struct vpmu_event *own);
int vpmu_event_spent_here(struct perf_event *event);
bool vpmu_event_spent(struct perf_event *event);
int vpmu_event_refresh(struct perf_event *event, u32 overflows);
void vpmu_event_idle(struct perf_event *event, bool stops);
void vpmu_event_read(struct perf_event *event);
void vpmu_event_start(struct vpmu_vcpu *vcpu, struct perf_event *event);
bool vpmu_event_stop(struct vpmu_vcpu *vcpu, struct perf_event *event);
void vpmu_event_answer(struct perf_event *event, u32 op, const struct vpmu_reply *reply);
int vpmu_call_switch(struct perf_event *event);
int vpmu_call_family(struct perf_event *event, u32 op);

/* vpmu_virtio.c */
bool vpmu_event_is_stale(const struct vpmu_event *own);
void vpmu_life_add(struct vpmu_event *own);
void vpmu_life_remove(struct vpmu_event *own);

/* vpmu_link.c */
void vpmu_link_init(struct vpmu_links *links);
int vpmu_link_ids(struct vpmu_device *dev, u64 id, u64 target, enum vpmu_role role);
int vpmu_link_set(struct vpmu_event *own, struct vpmu_event *target, enum vpmu_role role);
void vpmu_link_inherit(struct vpmu_event *own);
void vpmu_link_close(struct vpmu_event *own);

/* vpmu_sampling.c */
int vpmu_sampling_alloc(struct vpmu_event *own);
void vpmu_sampling_free(struct vpmu_event *own);
void vpmu_sampling_request(const struct vpmu_event *own, struct vpmu_open_request *request);
int vpmu_sampling_map(struct vpmu_event *own);
void vpmu_sampling_grow(struct vpmu_event *own);
void vpmu_sampling_start(struct vpmu_vcpu *vcpu, struct vpmu_event *own);
void vpmu_sampling_stop(struct vpmu_event *own);
void vpmu_sampling_forget(struct vpmu_event *own);
void vpmu_sampling_settle(struct vpmu_vcpu *vcpu);
void vpmu_sampling_arm(struct vpmu_vcpu *vcpu);
void vpmu_sampling_flush(struct vpmu_event *own);
void vpmu_sampling_close(struct vpmu_event *own);
void vpmu_sampling_exit_task(const struct perf_event *event);
void vpmu_sampling_read(struct vpmu_event *own);
struct vpmu_ring *vpmu_sampling_ring(const struct vpmu_event *own);

u32 vpmu_attr_engine(const struct perf_event_attr *attr);
int vpmu_attr_check(const struct perf_event_attr *attr, bool trace);
int vpmu_attr_check_ring(const struct perf_event_attr *attr);
int vpmu_attr_check_replay(const struct perf_event *event);
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

#endif /* _VPMU_EVENT_H */

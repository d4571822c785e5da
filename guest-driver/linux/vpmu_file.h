/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Events of /dev/vpmu: what is behind a descriptor, and who acts on it.
 */
#ifndef _VPMU_FILE_H
#define _VPMU_FILE_H

#include <linux/atomic.h>
#include <linux/device.h>
#include <linux/fs.h>
#include <linux/irq_work.h>
#include <linux/kref.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/perf_event.h>
#include <linux/types.h>
#include <linux/wait.h>

#include "vpmu_abi.h"
#include "vpmu_uapi.h"

struct task_struct;
struct vpmu_device;
struct vpmu_event;
struct vpmu_ring;

/**
 * struct vpmu_totals - what an event and those that inherit it have counted
 * @value: the count
 * @enabled: time enabled, by the device's account
 * @running: time running, likewise
 * @lost: overflows without a record
 * @missed: time in which perf core wanted to count and could not
 * @behind: @missed grows as this is read
 */
struct vpmu_totals {
	u64 value;
	u64 enabled;
	u64 running;
	u64 lost;
	u64 missed;
	bool behind;
};

/* How one event acts on another when it overflows. */
enum vpmu_role {
	VPMU_STARTER,
	VPMU_STOPPER,
	VPMU_ROLES,
};

/**
 * struct vpmu_links - what starts and stops an event, and what it starts and stops
 * @actor: by role; NULL: nobody
 * @entry: in the @targets of that
 * @targets: the files that it acts on, by role
 * @anchored: it has been linked; its tasks' contexts are not swapped
 */
struct vpmu_links {
	struct vpmu_file *actor[VPMU_ROLES];
	struct list_head entry[VPMU_ROLES];
	struct list_head targets[VPMU_ROLES];
	bool anchored;
};

/**
 * struct vpmu_file - an event opened through /dev/vpmu
 * @dev: of which device
 * @ref: held by each fd, by each event, children included, by each sibling and by the list
 *       of persistent events
 * @rcu: notices look it up without a lock
 * @event: the event opened; its children point to it. NULL with @direct; of events of a
 *         CPU looked at with their group held
 * @id: the device's, of @event
 * @label: the id that programs know it by: the first that it had
 * @failure: how what is asked of it fails, a negative errno; 0 while the device has it
 * @cpu: of @event, -1 for any
 * @task: of @event, for nothing but comparing; NULL for all on @cpu
 * @waitq: whoever polls
 * @fasync: whoever wants a signal
 * @type: perf_event_attr::type as opened
 * @config: as for perf_event_attr::config of our PMU
 * @wanted: what the device is asked for besides: sampling and its output
 * @engine: who makes the samples, VPMU_ENGINE_*
 * @period: a sample every so many, or so many a second with @freq; zero for none
 * @freq: @period is a frequency
 * @read_format: what read(2) gives
 * @trace: it writes to an AUX area, and no samples
 * @inherits: perf_event_attr::inherit as opened
 * @enabled: PERF_EVENT_IOC_ENABLE or _DISABLE; perf core's own switch stays on,
 *           because it exports none that reaches inherited events
 * @on_exec: but for this event, until the task's exec; see vpmu_group_switch()
 * @limited: PERF_EVENT_IOC_REFRESH has been used
 * @tracks: holds a reference on vpmu_task
 * @error: the event is in VPMU_STATE_ERROR
 * @closed: the fd is; nothing is done to the event for others any more
 * @enabled_ns: time enabled of all its events, by the device's account
 * @running_ns: time running, likewise
 * @lost: overflows of all its events without a record
 * @family: its vpmu_events, children included
 * @leader: NULL if it is one, is alone, or its leader was closed; see
 *          vpmu_group_leader()
 * @group_lock: of a leader: protects what follows in it and in its siblings
 * @siblings: how many it leads
 * @members: they, in the order opened
 * @member: in the leader's @members
 * @totals: of the group's last reading
 * @links: what starts and stops it; link_lock protects all but a look at @anchored
 * @ring: that its records go to, if any: its own or that of another
 * @maps: how many there are of @ring through this fd
 * @writer: in the ring's writers
 * @gone: wakes whoever polls when the task or an inheriting one ends
 * @mapping: all maps through it, of its ring and its area
 * @handles: fds and perf core's views; with vpmu_device::persistent_lock
 * @views: how many perf core has of it; with vpmu_device::notice_lock
 * @direct: persistent or has been: no perf event is behind it
 * @persistent: it outlives its handles; written with vpmu_device::output_lock, too
 * @operator: the host's own
 * @ended: by the host
 * @persist: in vpmu_device::persistent
 * @seen: the last turn in which the device had it
 * @name: under which sysfs lists it
 * @entry: there
 * @shown: it is there
 */
struct vpmu_file {
	struct vpmu_device *dev;
	struct kref ref;
	struct rcu_head rcu;
	struct perf_event *event;
	u64 id;
	u64 label;
	int failure;
	int cpu;
	const struct task_struct *task;
	wait_queue_head_t waitq;
	struct fasync_struct *fasync;
	u32 type;
	u64 config;
	struct vpmu_open_request wanted;
	u32 engine;
	u64 period;
	bool freq;
	u64 read_format;
	bool trace;
	bool inherits;
	bool enabled;
	bool on_exec;
	bool limited;
	bool tracks;
	bool error;
	bool closed;
	atomic64_t enabled_ns;
	atomic64_t running_ns;
	atomic64_t lost;
	struct list_head family;

	struct vpmu_file *leader;
	struct mutex group_lock; /* the group of a leader */
	unsigned int siblings;
	struct list_head members;
	struct list_head member;
	struct vpmu_totals totals;

	struct vpmu_links links;

	struct vpmu_ring *ring;
	unsigned int maps;
	struct list_head writer;
	struct irq_work gone;

	struct address_space mapping;
	unsigned int handles;
	unsigned int views;
	bool direct;
	bool persistent;
	bool operator;
	bool ended;
	struct list_head persist;
	u64 seen;
	char name[VPMU_PERSISTENT_NAME + 1];
	struct device_attribute entry;
	bool shown;
};

/* vpmu_open.c */
int vpmu_open(struct vpmu_device *dev, struct vpmu_open *args);

/* vpmu_file.c */
extern const struct file_operations vpmu_file_fops;
void vpmu_file_overflow(struct perf_event *event, struct perf_sample_data *data,
			struct pt_regs *regs);
struct vpmu_file *vpmu_file_of(const struct perf_event *event);
struct vpmu_file *vpmu_file_alloc(struct vpmu_device *dev);
void vpmu_file_get(struct vpmu_file *file);
void vpmu_file_put(struct vpmu_file *file);
struct file *vpmu_file_open(struct vpmu_file *file);
void vpmu_file_close(struct vpmu_file *file);
bool vpmu_file_shares_context(const struct vpmu_file *file, const struct vpmu_file *other);
struct file *vpmu_file_fget(int fd);

static inline struct vpmu_file *vpmu_group_next(struct vpmu_file *file, struct vpmu_file *leader)
{
	struct list_head *next = file == leader ? leader->members.next : file->member.next;

	return next == &leader->members ? NULL : list_entry(next, struct vpmu_file, member);
}

/* The leader first; its group_lock is held. */
#define vpmu_group_for_each(file, leader) \
	for ((file) = (leader); (file); (file) = vpmu_group_next(file, leader))

/* vpmu_group.c */
struct vpmu_file *vpmu_group_leader(struct vpmu_file *file);
struct vpmu_file *vpmu_group_lock(struct vpmu_file *file);
void vpmu_group_unlock(struct vpmu_file *leader);
int vpmu_group_admits(struct vpmu_file *leader, const struct vpmu_file *file,
		      const struct perf_event_attr *attr, int cpu, struct task_struct *task);
int vpmu_group_join(struct vpmu_file *file);
void vpmu_group_leave(struct vpmu_file *file);
bool vpmu_group_allows(const struct perf_event *event);
u64 vpmu_group_leader_id(struct vpmu_file *file, const struct task_struct *task);
int vpmu_group_switch(struct vpmu_file *file, bool whole, bool enable);
int vpmu_group_reset(struct vpmu_file *file, bool whole);
int vpmu_group_refresh(struct vpmu_file *file, u32 overflows);
int vpmu_group_period(struct vpmu_file *file, u64 period);

/* vpmu_call.c */
int vpmu_call_group(struct vpmu_file *leader, struct vpmu_file *only, u32 op);
int vpmu_call_event(struct perf_event *event, u32 op, u64 value);

/* vpmu_direct.c */
struct perf_event *vpmu_direct_take(struct vpmu_file *file);
void vpmu_direct_close(struct vpmu_file *file);
int vpmu_direct_call(struct vpmu_file *file, u32 op, u64 value);
int vpmu_direct_group(struct vpmu_file *file, u32 op);

/* vpmu_read.c */
ssize_t vpmu_read(struct vpmu_file *file, u64 **values, size_t room);

/* vpmu_link.c */
void vpmu_link_init(struct vpmu_links *links);
int vpmu_link_set(struct vpmu_file *file, struct vpmu_file *target, enum vpmu_role role);
void vpmu_link_inherit(struct vpmu_event *own);
void vpmu_link_close(struct vpmu_file *file);
int vpmu_link_ids(struct vpmu_device *dev, u64 id, u64 target, enum vpmu_role role);

/* vpmu_perf.c */
int vpmu_perf_call(struct vpmu_device *dev, const void __user *arg);

/* vpmu_flush.c */
int vpmu_flush(struct vpmu_file *file, bool whole);
int vpmu_flush_all(struct vpmu_device *dev);

#endif /* _VPMU_FILE_H */

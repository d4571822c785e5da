/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Events of /dev/vpmu: the object behind a descriptor, and the operations on
 * it.
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

/* The effect of an event's overflow on another event. */
enum vpmu_role {
	VPMU_STARTER,
	VPMU_STOPPER,
	VPMU_ROLES,
};

/**
 * struct vpmu_links - links of an event with events that start or stop it, and
 *                     with events that it starts or stops
 * @actor: for each role: the event that starts, or stops, this event; or NULL
 * @entry: for each role: entry in the actor's @targets
 * @targets: for each role: the events that this event starts, or stops
 * @anchored: the event has been linked, so perf core must not swap the contexts
 *            of its tasks
 *
 * vpmu_device::link_lock protects all members; @anchored is also read without
 * the lock.
 */
struct vpmu_links {
	struct vpmu_file *actor[VPMU_ROLES];
	struct list_head entry[VPMU_ROLES];
	struct list_head targets[VPMU_ROLES];
	bool anchored;
};

/**
 * struct vpmu_place - where an event counts
 * @cpu: the CPU, or -1 for any
 * @task: the task; NULL for all tasks on @cpu. The pointer is only compared,
 *        never dereferenced
 *
 * Set when the event is opened. For a persistent event, @cpu is -1 while the
 * CPU is unknown; it is set later, with vpmu_device::persistent.lock held.
 */
struct vpmu_place {
	int cpu;
	const struct task_struct *task;
};

/**
 * struct vpmu_spec - the properties with which an event was opened
 * @type: perf_event_attr::type
 * @config: type and config, translated to the config of the vpmu PMU
 * @request: the request to open the event on the device; at least its fields
 *           for samples, packets and output are filled in
 * @engine: the engine that makes the samples, VPMU_ENGINE_*
 * @period: counts between samples, or samples per second with @freq; zero: the
 *          event does not sample
 * @freq: @period is a frequency
 * @read_format: perf_event_attr::read_format
 * @trace: the event writes packets to an AUX area, and has no samples
 * @inherit: perf_event_attr::inherit; false for an event that is made
 *           persistent
 *
 * Set when the event is opened. The group's lock protects changes of @period
 * and @inherit.
 */
struct vpmu_spec {
	u32 type;
	u64 config;
	struct vpmu_open_request request;
	u32 engine;
	u64 period;
	bool freq;
	u64 read_format;
	bool trace;
	bool inherit;
};

/**
 * struct vpmu_switch - whether a program has enabled an event
 * @enabled: set by PERF_EVENT_IOC_ENABLE and cleared by _DISABLE. perf core's
 *           event stays enabled, because perf core exports no function that
 *           also disables inherited events
 * @on_exec: the event was opened with enable_on_exec: until the task's exec,
 *           the state of perf core's event decides whether the event counts;
 *           see group_switch_file()
 * @limited: PERF_EVENT_IOC_REFRESH has been used
 *
 * The group's lock protects changes.
 */
struct vpmu_switch {
	bool enabled;
	bool on_exec;
	bool limited;
};

/**
 * struct vpmu_totals - the last reading of an event, summed up over the event
 *                      and the events that inherit it
 * @value: the count
 * @enabled: enabled time, as the device counts it
 * @running: running time, as the device counts it
 * @lost: overflows without a record
 * @missed: time in which the event was enabled, but perf core did not schedule
 *          it
 * @behind: @missed does not include the time since perf core last changed the
 *          event's state
 */
struct vpmu_totals {
	u64 value;
	u64 enabled;
	u64 running;
	u64 lost;
	u64 missed;
	bool behind;
};

/**
 * struct vpmu_tally - times and losses of an event, summed up over the event
 *                     and the events that inherit it
 * @enabled_ns: enabled time, as the device counts it
 * @running_ns: running time, as the device counts it
 * @lost: overflows without a record
 * @totals: the last reading; the group's lock protects it
 */
struct vpmu_tally {
	atomic64_t enabled_ns;
	atomic64_t running_ns;
	atomic64_t lost;
	struct vpmu_totals totals;
};

/**
 * struct vpmu_group - a file's membership in a group
 * @leader: the leader's file; NULL for a leader, for an event in no group, and
 *          after the leader was closed; see vpmu_group_leader()
 * @lock: the lock of a leader's file protects the leader's @siblings and
 *        @members, the siblings' @entry, and the events of all files in the
 *        group
 * @siblings: number of files that a leader has in @members
 * @members: for a leader: its siblings, in the order in which they were opened
 * @entry: for a sibling: entry in the leader's @members
 * @close_waits: for a closed leader: the device must close the leader's event
 *               before the file's close returns, see vpmu_group_leave()
 */
struct vpmu_group {
	struct vpmu_file *leader;
	struct mutex lock; /* the group of a leader */
	unsigned int siblings;
	struct list_head members;
	struct list_head entry;
	bool close_waits;
};

/**
 * struct vpmu_output - where the records of an event go
 * @ring: the event's own ring, or the ring of another event; or NULL
 * @maps: number of mappings of @ring through this file
 * @entry: in vpmu_ring::writers
 * @poller: in vpmu_ring::pollers while a program has polled the file since it
 *          was last woken; only vpmu_device::lookup.lock protects it
 * @mapping: all mappings through this file, of the ring and of its AUX area
 *
 * vpmu_device::output_lock protects all other members. @ring and @entry are
 * changed with vpmu_device::lookup.lock held as well, because notices read them.
 */
struct vpmu_output {
	struct vpmu_ring *ring;
	unsigned int maps;
	struct list_head entry;
	struct list_head poller;
	struct address_space mapping;
};

/**
 * struct vpmu_waiters - programs that wait for an event
 * @queue: pollers
 * @fasync: owners that get a signal
 * @gone: wakes @queue when a task that the event counts has ended
 * @entry: in vpmu_vcpu::signalled while there are signals to send
 * @in: number of POLL_IN signals to send
 * @hup: number of POLL_HUP signals to send, after those of @in
 * @err: a POLL_ERR signal must be sent, and the pollers woken
 *
 * vpmu_device::lookup.lock protects @entry, @in, @hup and @err.
 */
struct vpmu_waiters {
	wait_queue_head_t queue;
	struct fasync_struct *fasync;
	struct irq_work gone;
	struct list_head entry;
	u32 in;
	u32 hup;
	bool err;
};

/**
 * struct vpmu_persistence - how an event outlives its descriptors
 * @handles: number of open files and of perf core's views
 * @views: number of views among @handles; vpmu_device::lookup.lock protects it
 * @active: the event outlives its handles; to change this, the driver also
 *          holds vpmu_device::output_lock
 * @operator: the host's operator owns the event
 * @entry: entry in vpmu_device::persistent.files
 * @generation: vpmu_persistent_set::generation when the event was last found in
 *              the device's list
 * @name: the event's name in sysfs
 * @attr: the event's file in sysfs
 * @shown: @attr is in sysfs
 *
 * vpmu_device::persistent.lock protects everything except @views.
 */
struct vpmu_persistence {
	unsigned int handles;
	unsigned int views;
	bool active;
	bool operator;
	struct list_head entry;
	u64 generation;
	char name[VPMU_PERSISTENT_NAME + 1];
	struct device_attribute attr;
	bool shown;
};

/**
 * struct vpmu_backend - operations on a file's event, which depend on whether
 *                       perf core schedules the event or the driver enables it
 *                       on the device without perf core
 * @group: see vpmu_call_group()
 * @refresh: enable the event for a number of overflows, for
 *           PERF_EVENT_IOC_REFRESH; the group is locked
 * @period: set the period or frequency, for PERF_EVENT_IOC_PERIOD; the group is
 *          locked
 * @has_error: whether the event is in the error state, in addition to
 *             vpmu_file::error; the group is locked
 * @close: end the event of a file without open descriptors
 */
struct vpmu_backend {
	int (*group)(struct vpmu_file *leader, struct vpmu_file *only, u32 op);
	int (*refresh)(struct vpmu_file *file, u32 overflows);
	int (*period)(struct vpmu_file *file, u64 period);
	bool (*has_error)(const struct vpmu_file *file);
	void (*close)(struct vpmu_file *file);
};

/**
 * struct vpmu_file - an event of /dev/vpmu
 * @dev: the device
 * @ref: references, held by each handle, by each vpmu_event of the file
 *       (including inherited events), by each sibling, and by the list of
 *       persistent events
 * @rcu: frees the file after a grace period, because notices and siblings look
 *       up the file without a reference
 * @backend: vpmu_perf_backend, or vpmu_direct_backend for an event that is or
 *           was persistent; changed with the group locked
 * @event: the perf event that was opened, the parent of the inherited events;
 *         NULL with vpmu_direct_backend. For events of a CPU, the group's lock
 *         protects this pointer
 * @family: the file's vpmu_events, including inherited events;
 *          vpmu_device::lookup.lock protects it
 * @id: the event's id on the device
 * @label: the id that programs see: the first value of @id. If the event is
 *         reopened on the device, @id changes but @label does not
 * @failure: the negative errno that calls on the event return; 0 while the
 *           event exists on the device
 * @error: the event is in VPMU_STATE_ERROR, or lost
 * @ended: the host or a reset has ended the event
 * @closed: the last handle is closed, so notices for the file are ignored
 * @tracks: the file holds a reference from vpmu_task_get()
 * @place: where the event counts
 * @spec: the properties with which the event was opened
 * @control: whether a program has enabled the event
 * @tally: counts and times of the event
 * @group: the file's membership in a group
 * @links: the events that start and stop this event, and its targets
 * @output: where the event's records go
 * @waiters: programs that wait for the event
 * @persist: how the event outlives its descriptors
 */
struct vpmu_file {
	struct vpmu_device *dev;
	struct kref ref;
	struct rcu_head rcu;
	const struct vpmu_backend *backend;
	struct perf_event *event;
	struct list_head family;
	u64 id;
	u64 label;
	int failure;
	bool error;
	bool ended;
	bool closed;
	bool tracks;
	struct vpmu_place place;
	struct vpmu_spec spec;
	struct vpmu_switch control;
	struct vpmu_tally tally;
	struct vpmu_group group;
	struct vpmu_links links;
	struct vpmu_output output;
	struct vpmu_waiters waiters;
	struct vpmu_persistence persist;
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
	struct list_head *head = &leader->group.members;
	struct list_head *next = file == leader ? head->next : file->group.entry.next;

	return next == head ? NULL : list_entry(next, struct vpmu_file, group.entry);
}

/* Visits the leader first. The group's lock is held. */
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

/* vpmu_backend_perf.c */
extern const struct vpmu_backend vpmu_perf_backend;
int vpmu_call_event(struct perf_event *event, u32 op, u64 value);

/**
 * vpmu_call_group() - send a command for all events of a group
 * @leader: the leader, whose group is locked, so its files stay open
 * @only: the only file whose event, and the events inherited from it, get the
 *        command; NULL for all files of the group
 * @op: VPMU_COMMAND_RESET; VPMU_COMMAND_FLUSH; VPMU_COMMAND_READ, which sets
 *      vpmu_tally::totals of these files; or zero, which starts the active
 *      events for which vpmu_group_allows() is true, and stops the others
 *
 * All events of the group that count the same task get the command at the same
 * instant.
 *
 * Return: 0 or the first negative errno. After an error for one event, the
 * command is still sent for the other events.
 */
static inline int vpmu_call_group(struct vpmu_file *leader, struct vpmu_file *only, u32 op)
{
	lockdep_assert_held(&leader->group.lock);
	return leader->backend->group(leader, only, op);
}

/* vpmu_backend_direct.c */
extern const struct vpmu_backend vpmu_direct_backend;
struct perf_event *vpmu_direct_take(struct vpmu_file *file);

static inline bool vpmu_file_is_direct(const struct vpmu_file *file)
{
	return READ_ONCE(file->backend) == &vpmu_direct_backend;
}

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

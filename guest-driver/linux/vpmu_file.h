/* SPDX-License-Identifier: GPL-2.0 */
/*
 * struct vpmu_file: what an event has for records that the host writes, and for
 * its life as a persistent event; and the operations on it.
 */
#ifndef _VPMU_FILE_H
#define _VPMU_FILE_H

#include <linux/device.h>
#include <linux/fs.h>
#include <linux/irq_work.h>
#include <linux/kref.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/perf_event.h>
#include <linux/types.h>
#include <linux/wait.h>
#include <linux/workqueue.h>

#include "vpmu_abi.h"
#include "vpmu_uapi.h"

struct task_struct;
struct vpmu_device;
struct vpmu_event;
struct vpmu_ring;

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
 * @config: type and config, translated to the config of the vpmu PMU
 * @request: the request to open the event on the device; at least its fields
 *           for samples, packets and output are filled in
 * @period: counts between samples, or samples per second with @freq; zero: the
 *          event does not sample
 * @freq: @period is a frequency
 * @trace: the event writes packets to an AUX area, and has no samples
 *
 * Set when the event is opened.
 */
struct vpmu_spec {
	u64 config;
	struct vpmu_open_request request;
	u64 period;
	bool freq;
	bool trace;
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
 * @limit: disables the event in perf core after the last overflow that
 *         PERF_EVENT_IOC_REFRESH allows, if the event is not active where it was
 * @refresh: held by @limit, and while the limit of overflows changes; no other lock is taken
 *           outside it
 * @limits: number of POLL_HUP signals that wait until perf core has disabled the
 *          event
 * @entry: in vpmu_vcpu::signalled while there are signals to send
 * @in: number of POLL_IN signals to send
 * @hup: number of POLL_HUP signals to send, after those of @in
 * @err: a POLL_ERR signal must be sent, and the pollers woken
 *
 * vpmu_device::lookup.lock protects @limits, @entry, @in, @hup and @err.
 */
struct vpmu_waiters {
	wait_queue_head_t queue;
	struct fasync_struct *fasync;
	struct irq_work gone;
	struct work_struct limit;
	struct mutex refresh; /* the limit of overflows */
	u32 limits;
	struct list_head entry;
	u32 in;
	u32 hup;
	bool err;
};

/**
 * struct vpmu_persistence - how an event outlives its descriptors
 * @views: number of perf core's events that read the event; to change it, the
 *         driver also holds vpmu_device::lookup.lock
 * @active: the event outlives its views; to change this, the driver also
 *          holds vpmu_device::output_lock
 * @operator: the host's operator owns the event
 * @entry: entry in vpmu_device::persistent.files
 * @generation: vpmu_persistent_set::generation when the event was last found in
 *              the device's list
 * @name: the event's name in sysfs
 * @attr: the event's file in sysfs
 * @shown: @attr is in sysfs
 *
 * vpmu_device::persistent.lock protects all members.
 */
struct vpmu_persistence {
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
 * struct vpmu_file - an event whose records the host writes to a ring, or that
 *                    is or was persistent
 * @dev: the device
 * @ref: references, held by each vpmu_event of the file (including inherited
 *       events), by each view and each ring descriptor, and by the list of
 *       persistent events
 * @rcu: frees the file after a grace period, because notices look up the file
 *       without a reference
 * @event: the perf event that was opened, the parent of the inherited events;
 *         NULL for a direct event. To change it, the driver holds
 *         vpmu_device::lookup.lock
 * @direct: the event is or was persistent: the device counts it without a perf
 *          event; see vpmu_persistent.c
 * @id: the event's id on the device
 * @failure: the negative errno that calls on the event return; 0 while the
 *           event exists on the device
 * @error: the event is in VPMU_STATE_ERROR, or lost
 * @ended: the host or a reset has ended the event
 * @closed: the event is being destroyed, so notices for the file are ignored
 * @tracks: the file holds a reference from vpmu_task_get()
 * @place: where the event counts
 * @spec: the properties with which the event was opened
 * @output: where the event's records go
 * @waiters: programs that wait for the event
 * @persist: how the event outlives its descriptors
 */
struct vpmu_file {
	struct vpmu_device *dev;
	struct kref ref;
	struct rcu_head rcu;
	struct perf_event *event;
	bool direct;
	u64 id;
	int failure;
	bool error;
	bool ended;
	bool closed;
	bool tracks;
	struct vpmu_place place;
	struct vpmu_spec spec;
	struct vpmu_output output;
	struct vpmu_waiters waiters;
	struct vpmu_persistence persist;
};

/**
 * struct vpmu_descriptor - a ring descriptor: file::private_data
 * @file: the event
 * @perf: the file of perf_event_open(2) that the descriptor was made from. The
 *        reference on it keeps the event open
 */
struct vpmu_descriptor {
	struct vpmu_file *file;
	struct file *perf;
};

/* Returns the event of a ring descriptor. */
static inline struct vpmu_file *vpmu_file_from(const struct file *filp)
{
	const struct vpmu_descriptor *descriptor = filp->private_data;

	return descriptor->file;
}

/* vpmu_ring.c */
struct vpmu_file *vpmu_file_alloc(struct vpmu_device *dev);
void vpmu_file_get(struct vpmu_file *file);
void vpmu_file_put(struct vpmu_file *file);
int vpmu_file_descriptor(struct vpmu_file *file, struct file *perf);

/* vpmu_persistent.c */
int vpmu_direct_command(struct vpmu_file *file, u32 op, u64 value);

/* vpmu_output.c */
int vpmu_flush(struct vpmu_file *file);
int vpmu_flush_all(struct vpmu_device *dev);

#endif /* _VPMU_FILE_H */

/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What the parts of the driver know of each other.
 *
 *   vpmu_virtio   the device: probe, queues, notices
 *   vpmu_control  sleeping requests          vpmu_vcpu  commands, interrupts off
 *   vpmu_pmu      door one: perf core        vpmu_sysfs its format and events
 *   vpmu_event    an event's state, count and times
 *   vpmu_context  scheduling before 6.2
 *   vpmu_call     commands from outside perf core's scheduling
 *   vpmu_cdev     door two: /dev/vpmu        vpmu_open  from perf_event_attr to fd
 *   vpmu_file     what such an fd does       vpmu_ring  its pages
 *   vpmu_task     tells the device who runs
 */
#ifndef _VPMU_H
#define _VPMU_H

#include <linux/atomic.h>
#include <linux/irq_work.h>
#include <linux/kref.h>
#include <linux/miscdevice.h>
#include <linux/mutex.h>
#include <linux/perf_event.h>
#include <linux/spinlock.h>
#include <linux/virtio.h>
#include <linux/wait.h>
#include <linux/xarray.h>

#include "vpmu_abi.h"

struct file;
struct vm_area_struct;

/* Commands that one kick carries at most; more are sent in several. */
#define VPMU_BATCH	64
/* Notices that the device can leave before the driver has taken any. */
#define VPMU_NOTICES	64

/**
 * struct vpmu_vcpu - one vCPU queue
 * @dev: of which device
 * @vq: answered before the kicking instruction retires
 * @index: the vCPU's
 * @lock: protects what follows; interrupts are off wherever it is held
 * @broken: the device broke that promise and may still own the buffers
 * @bracket: perf core has disabled the PMU: commands only gather
 * @reading: perf core reads a group: likewise
 * @pending: commands gathered
 * @events: whose they are
 * @commands: VPMU_BATCH gathered ones, and one slot for direct commands
 * @replies: as many answers
 * @alarm: tells the log where printing is possible
 */
struct vpmu_vcpu {
	struct vpmu_device *dev;
	struct virtqueue *vq;
	u32 index;
	raw_spinlock_t lock;
	bool broken;
	bool bracket;
	bool reading;
	unsigned int pending;
	struct perf_event *events[VPMU_BATCH];
	struct vpmu_command *commands;
	struct vpmu_reply *replies;
	struct irq_work alarm;
};

/**
 * struct vpmu_device - the device
 * @vdev: as virtio sees it
 * @info: the configuration space and the PMU's type, as programs see it
 * @catalogue: what can be counted, @info.catalogue_len entries
 * @control: the control queue
 * @control_lock: one request at a time
 * @control_done: completed by the control queue's interrupt
 * @event_vq: the event queue
 * @notices: VPMU_NOTICES buffers, posted on @event_vq
 * @vcpus: @info.vcpus queues
 * @cpu_vcpu: each CPU's queue, NULL while unknown
 * @node: in the CPU hotplug state
 * @doorbell: a 32-bit write here is a mark; NULL without the feature
 * @pmu: as perf core sees it
 * @event_attrs: what stands in sysfs events/
 * @attr_groups: sysfs groups of @pmu
 * @misc: /dev/vpmu
 * @files: from event id to struct vpmu_file, children's ids included
 * @gone: being removed; nothing more is opened
 * @users: open events and open files of /dev/vpmu
 * @idle: woken when @users falls to zero
 */
struct vpmu_device {
	struct virtio_device *vdev;
	struct vpmu_info info;
	struct vpmu_catalogue_entry *catalogue;
	struct virtqueue *control;
	struct mutex control_lock;
	struct completion control_done;
	struct virtqueue *event_vq;
	struct vpmu_notice *notices;
	struct vpmu_vcpu *vcpus;
	struct vpmu_vcpu * __percpu *cpu_vcpu;
	struct hlist_node node;
	void __iomem *doorbell;
	struct pmu pmu;
	struct attribute_group *event_attrs;
	const struct attribute_group *attr_groups[3];
	struct miscdevice misc;
	struct xarray files;
	bool gone;
	atomic_t users;
	wait_queue_head_t idle;
};

/**
 * struct vpmu_event - our part of a perf event (perf_event::pmu_private)
 * @dev: of which device
 * @id: the device's; zero for an inherited event that the device had no room for
 * @task: it is scheduled in and out (IN, OUT), not switched (ENABLE, DISABLE)
 * @started: the device has been told that it counts
 * @stray: it should not have; what it counted meanwhile is not perf's
 * @count: as the device last told
 * @enabled_ns: time enabled, as the device last told
 * @running_ns: time running, likewise
 * @owed: nanoseconds not counted that perf core's running time still has to lose;
 *        U64_MAX once the device has lost the event: all
 * @file: the door that it came through, NULL for perf core's
 */
struct vpmu_event {
	struct vpmu_device *dev;
	u64 id;
	bool task;
	bool started;
	bool stray;
	u64 count;
	u64 enabled_ns;
	u64 running_ns;
	u64 owed;
	struct vpmu_file *file;
};

struct vpmu_ring;

/**
 * struct vpmu_file - an event opened through /dev/vpmu
 * @dev: of which device
 * @ref: held by the fd and by each event, children included
 * @rcu: notices look it up without a lock
 * @event: the event opened; its children point to it
 * @config: as for perf_event_attr::config of our PMU
 * @period: a sample every so many, zero for none
 * @sample_type: what a sample holds
 * @read_format: what read(2) gives
 * @wakeup: how often pollers are woken
 * @watermark: @wakeup is in bytes
 * @enabled: PERF_EVENT_IOC_ENABLE or _DISABLE; perf core's own switch stays on,
 *           because it exports none that reaches inherited events
 * @on_exec: but for this event it is off until the task's exec
 * @enabled_ns: time enabled of all its events, by the device's account
 * @running_ns: time running, likewise
 * @tracks: holds a reference on vpmu_task
 * @poll: EPOLLIN since the last poll(2)
 * @error: the event is in VPMU_STATE_ERROR
 * @ring_lock: protects @ring
 * @ring: while mapped
 */
struct vpmu_file {
	struct vpmu_device *dev;
	struct kref ref;
	struct rcu_head rcu;
	struct perf_event *event;
	u64 config;
	u64 period;
	u64 sample_type;
	u64 read_format;
	u32 wakeup;
	bool watermark;
	bool enabled;
	bool on_exec;
	atomic64_t enabled_ns;
	atomic64_t running_ns;
	bool tracks;
	atomic_t poll;
	bool error;
	struct mutex ring_lock;
	struct vpmu_ring *ring;
};

/* vpmu_virtio.c */
void vpmu_device_get(struct vpmu_device *dev);
void vpmu_device_put(struct vpmu_device *dev);

/* vpmu_control.c */
void vpmu_control_callback(struct virtqueue *vq);
int vpmu_control_open(struct vpmu_device *dev, const struct vpmu_open_request *wanted, u64 *id);
int vpmu_control_close(struct vpmu_device *dev, u64 id);
int vpmu_control_map(struct vpmu_device *dev, u64 id, struct page **pages, u32 count, u32 flags);
int vpmu_control_unmap(struct vpmu_device *dev, u64 id);
int vpmu_control_task_page(struct vpmu_device *dev, u32 vcpu, phys_addr_t address);
int vpmu_control_catalogue(struct vpmu_device *dev);

/* vpmu_vcpu.c */
int vpmu_vcpu_init(struct vpmu_vcpu *vcpu, struct vpmu_device *dev, u32 index);
void vpmu_vcpu_exit(struct vpmu_vcpu *vcpu);
int vpmu_vcpu_discover(struct vpmu_device *dev);
struct vpmu_vcpu *vpmu_vcpu_local(struct vpmu_device *dev);
void vpmu_vcpu_append(struct vpmu_vcpu *vcpu, struct perf_event *event, u32 op);
void vpmu_vcpu_flush(struct vpmu_vcpu *vcpu);
int vpmu_vcpu_command(struct vpmu_vcpu *vcpu, u32 op, u64 event, u64 value,
		      struct vpmu_reply *reply);

/* vpmu_pmu.c */
int vpmu_pmu_register(struct vpmu_device *dev);
void vpmu_pmu_unregister(struct vpmu_device *dev);

/* vpmu_event.c */
bool vpmu_event_start(struct vpmu_vcpu *vcpu, struct perf_event *event);
bool vpmu_event_stop(struct vpmu_vcpu *vcpu, struct perf_event *event);
void vpmu_event_answer(struct perf_event *event, u32 op, const struct vpmu_reply *reply);

/* vpmu_context.c */
void vpmu_context_enter(struct vpmu_vcpu *vcpu, struct perf_event *event);
void vpmu_context_leave(struct vpmu_vcpu *vcpu, struct perf_event *event);

/* vpmu_call.c */
int vpmu_call_switch(struct perf_event *event, bool enable);
int vpmu_call_reset(struct perf_event *event);
int vpmu_call_settle(struct perf_event *event);
int vpmu_call_period(struct perf_event *event, u64 period);

/* vpmu_sysfs.c */
int vpmu_sysfs_init(struct vpmu_device *dev);
void vpmu_sysfs_exit(struct vpmu_device *dev);

/* vpmu_cdev.c */
int vpmu_cdev_register(struct vpmu_device *dev);
void vpmu_cdev_unregister(struct vpmu_device *dev);

/* vpmu_open.c */
int vpmu_open(struct vpmu_device *dev, struct vpmu_open *args);

/* vpmu_file.c */
extern const struct file_operations vpmu_file_fops;
void vpmu_file_overflow(struct perf_event *event, struct perf_sample_data *data,
			struct pt_regs *regs);
void vpmu_file_get(struct vpmu_file *file);
void vpmu_file_put(struct vpmu_file *file);
void vpmu_file_notice(struct vpmu_device *dev, const struct vpmu_notice *notice);

/* vpmu_ring.c */
int vpmu_ring_mmap(struct file *filp, struct vm_area_struct *vma);

/* vpmu_task.c */
int vpmu_task_init(struct vpmu_device *dev);
void vpmu_task_exit(struct vpmu_device *dev);
int vpmu_task_get(struct vpmu_device *dev);
void vpmu_task_put(struct vpmu_device *dev);
void vpmu_task_online(struct vpmu_device *dev, unsigned int cpu);

#endif /* _VPMU_H */

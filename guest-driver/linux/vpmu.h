/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The device, its parts with their locks, and the order of all locks.
 *
 * vpmu_event.h declares the driver's data for perf events, vpmu_file.h that of
 * events whose records the host writes, vpmu_ring.h the memory that it writes to,
 * and vpmu_persistent.h persistent events. The README lists the files.
 */
#ifndef _VPMU_H
#define _VPMU_H

#include <linux/atomic.h>
#include <linux/device.h>
#include <linux/interrupt.h>
#include <linux/irq_work.h>
#include <linux/list.h>
#include <linux/math64.h>
#include <linux/miscdevice.h>
#include <linux/mutex.h>
#include <linux/notifier.h>
#include <linux/perf_event.h>
#include <linux/printk.h>
#include <linux/seqlock.h>
#include <linux/smp.h>
#include <linux/spinlock.h>
#include <linux/timer.h>
#include <linux/types.h>
#include <linux/virtio.h>
#include <linux/wait.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>

#include "vpmu_abi.h"

struct file;
struct page;
struct tracepoint;
struct vpmu_replay;

/* Maximum number of gathered commands that one kick sends. */
#define VPMU_BATCH	256
/*
 * Maximum number of events in a group. One kick can read all of them.
 */
#define VPMU_GROUP	64
/* Maximum number of commands that vpmu_vcpu_commands() sends with one kick. */
#define VPMU_DIRECT	3
/* Number of buffers for the device's notices. */
#define VPMU_NOTICES	64

/**
 * struct vpmu_vcpu - a vCPU queue
 * @dev: the device
 * @vq: the virtqueue; the device answers a kick before the kicking instruction
 *      retires
 * @index: the number of the vCPU
 * @lock: protects @vq, @broken, @closed, @pending, @events, @commands and
 *        @replies; interrupts are off wherever it is held
 * @broken: the device did not answer immediately; it owns the buffers until it
 *          is reset
 * @closed: the queue does not exist: it is not created yet, it was deleted, or
 *          the machine sleeps
 * @pmu_disabled: perf core has disabled the PMU, so commands are gathered
 * @awaits: perf core is sure to add another event of the same context next, so
 *          the gathered commands wait for it; see vpmu_pmu.c
 * @reading: commands are gathered for a group, for example while perf core
 *           reads the group
 * @group_read: the last group leader that was scheduled out without its
 *              siblings since perf core disabled the PMU, or NULL; the siblings
 *              were read at that time, see vpmu_pmu.c
 * @pending: number of gathered commands
 * @events: the event of each gathered command
 * @commands: VPMU_BATCH slots for gathered commands, then VPMU_DIRECT slots for
 *            commands that vpmu_vcpu_commands() sends immediately
 * @replies: the answers, each in the slot of its command
 * @error_work: logs that the queue is broken, and gives the device up; a work
 *              item, because the scheduler's locks may be held when the queue
 *              breaks
 * @sampling: perf core's sampling events that are active on this CPU, or were
 *            stopped here with samples left; see vpmu_sampling.c
 * @prompt: some events in @sampling are prompt, or were since it was last empty
 * @stopped: sampling events that were just stopped
 * @views: views of persistent events that are active on this CPU
 * @replay: the state of a replay
 * @replay_timer: replays samples periodically while there are events in
 *                @sampling or @views
 * @replay_kick: replays samples once interrupts are on
 * @woken: rings whose pollers this CPU must wake
 * @signalled: files whose owners this CPU must signal
 * @soft: wakes and signals programs, and replays samples, in a softirq
 * @soft_call: schedules @soft on this CPU
 *
 * vpmu_lookup::lock protects @woken and @signalled. The other members that
 * @lock does not protect are used only on the queue's CPU, with interrupts off.
 */
struct vpmu_vcpu {
	struct vpmu_device *dev;
	struct virtqueue *vq;
	u32 index;
	raw_spinlock_t lock;
	bool broken;
	bool closed;
	bool pmu_disabled;
	bool awaits;
	bool reading;
	const struct perf_event *group_read;
	unsigned int pending;
	struct perf_event *events[VPMU_BATCH];
	struct vpmu_command *commands;
	struct vpmu_reply *replies;
	struct irq_work error_work;
	struct list_head sampling;
	bool prompt;
	struct list_head stopped;
	struct list_head views;
	struct vpmu_replay *replay;
	struct timer_list replay_timer;
	struct irq_work replay_kick;
	struct list_head woken;
	struct list_head signalled;
	struct tasklet_struct soft;
	call_single_data_t soft_call;
};

/**
 * struct vpmu_sysfs - attribute groups of a PMU
 * @events: the files in events/
 * @groups: all groups
 */
struct vpmu_sysfs {
	struct attribute_group *events;
	const struct attribute_group *groups[3];
};

/**
 * struct vpmu_pmu - a PMU for perf core, with events of the catalogue
 * @pmu: the PMU as perf core sees it; its type is 0 while it is not registered
 * @sysfs: the PMU's attributes
 */
struct vpmu_pmu {
	struct pmu pmu;
	struct vpmu_sysfs sysfs;
};

/**
 * struct vpmu_control_queue - the control queue
 * @vq: the queue, NULL while there are no queues
 * @lock: protects the queue; taken with interrupts off
 * @closed: the negative errno that requests return while the queue does not
 *          exist; 0 while it exists
 * @resets: how often the queue was closed after a reset of the device
 * @sent: requests in the queue
 * @waiting: requests that wait for a free slot in the queue, oldest first
 */
struct vpmu_control_queue {
	struct virtqueue *vq;
	spinlock_t lock; /* the control queue and its lists */
	int closed;
	u32 resets;
	struct list_head sent;
	struct list_head waiting;
};

/**
 * struct vpmu_event_queue - the event queue
 * @vq: the queue
 * @lock: held by the CPU that handles notices; taken with interrupts off
 * @work: handles the notices that an interrupt has left
 * @closed: the queue does not exist
 * @buffers: VPMU_NOTICES buffers, posted on @vq
 */
struct vpmu_event_queue {
	struct virtqueue *vq;
	spinlock_t lock; /* the event queue */
	struct work_struct work;
	bool closed;
	struct vpmu_notice *buffers;
};

/**
 * struct vpmu_doorbell - a register; each 32-bit write to it places a mark
 * @address: the kernel's mapping of the register; NULL without the feature
 * @page: the physical address of the page that programs map; zero if programs
 *        cannot map it, because the doorbell does not fill whole pages
 */
struct vpmu_doorbell {
	void __iomem *address;
	phys_addr_t page;
};

/**
 * struct vpmu_window - host memory for rings that outlive this driver
 * @base: the kernel's mapping of the window; NULL without the feature
 * @pfn: the first page frame
 * @pages: number of pages; 0 without the feature
 */
struct vpmu_window {
	void *base;
	unsigned long pfn;
	u32 pages;
};

/**
 * struct vpmu_persistent_set - persistent events
 * @pmu: the PMU named "persistent": it lists the events in sysfs, and
 *       perf_event_open(2) with its type opens views of them
 * @lock: protects the members below, and vpmu_file::persist; sleeps
 * @files: the files of the persistent events; the list holds a reference on
 *         each
 * @generation: number of times that @files was compared with the device's list
 * @has_new: the last comparison found an event that is not in @files
 * @closed: @files is empty, because the device's list was not read yet, or
 *          because the device was given up or is being removed
 * @work: compares @files with the device's list again
 */
struct vpmu_persistent_set {
	struct pmu pmu;
	struct mutex lock; /* the list of persistent events */
	struct list_head files;
	u64 generation;
	bool has_new;
	bool closed;
	struct work_struct work;
};

/**
 * struct vpmu_lookup - events by id, used to find a notice's event
 * @lock: held while a notice's event is looked up and the notice is handled;
 *        keeps that event alive, and protects the fields that notices use:
 *        vpmu_event::heirs, vpmu_file::event, vpmu_file::output.ring,
 *        vpmu_ring::writers, vpmu_event::sampler, and the lists of programs to
 *        wake and to signal; taken with interrupts off
 * @files: struct vpmu_file by id, also by the ids of inherited events
 * @sampled: struct vpmu_event of perf core's sampling events that have their
 *           own ring
 * @wakeups: number of wakeups of all rings
 */
struct vpmu_lookup {
	spinlock_t lock; /* events that notices find */
	struct xarray files;
	struct xarray sampled;
	loff_t wakeups;
};

/**
 * struct vpmu_life - the state of the device, its perf events and its users
 * @lost: the negative errno that all requests return: -EIO for a device that
 *        was given up, -ENODEV for a removed device; 0 for a device in use
 * @asleep: the machine sleeps: no event is started or read
 * @lock: protects @events, and keeps its events alive; sleeps
 * @events: the vpmu_events of perf events, in the order of creation, so an
 *          event comes after its parent and its leader
 * @give_up: ends the use of a device that does not answer
 * @users: number of users: open events, open files of /dev/vpmu, AUX areas of
 *         perf core, and pending calls to other CPUs
 * @idle: woken when @users falls to zero
 */
struct vpmu_life {
	int lost;
	bool asleep;
	struct mutex lock; /* the list of events */
	struct list_head events;
	struct work_struct give_up;
	atomic_t users;
	wait_queue_head_t idle;
};

/* Length of the name of a virtio device, with the final zero byte */
#define VPMU_NAME_LEN	32

/*
 * Messages about a device. They name the virtio device as dev_err() does, but
 * the virtio device may be gone.
 */
#define vpmu_err(dev, fmt, ...) \
	pr_err("virtio_pmu %s: " fmt, (dev)->name, ##__VA_ARGS__)
#define vpmu_warn(dev, fmt, ...) \
	pr_warn("virtio_pmu %s: " fmt, (dev)->name, ##__VA_ARGS__)
#define vpmu_warn_ratelimited(dev, fmt, ...) \
	pr_warn_ratelimited("virtio_pmu %s: " fmt, (dev)->name, ##__VA_ARGS__)
#define vpmu_info_ratelimited(dev, fmt, ...) \
	pr_info_ratelimited("virtio_pmu %s: " fmt, (dev)->name, ##__VA_ARGS__)

/**
 * struct vpmu_device - the device
 * @vdev: the virtio device; NULL after the device was removed. The driver keeps
 *        no reference on it: the transport's module may be unloaded
 * @name: the name of the virtio device, for messages
 * @features: the device's own feature bits that both sides have accepted
 * @info: the configuration space and the types of the PMUs, as programs see
 *        them
 * @info_lock: protects @info after the probe; a reader of one field needs no
 *             lock
 * @reread: reads the configuration space again after a restore of the machine
 * @catalogue: the events that can be counted, @info.catalogue_len entries
 * @refused: bitmap of the VPMU_REFUSED_* reasons that have been logged
 * @vcpus: @info.vcpus queues
 * @cpu_vcpu: the queue of each CPU, NULL while unknown
 * @hotplug: the device's entry in the list of the CPU hotplug state
 * @control: the control queue
 * @notices: the event queue
 * @doorbell: the doorbell
 * @window: the window
 * @counting: the PMU vpmu
 * @generic: @counting handles perf's generic hardware events, because the guest
 *           has no CPU PMU
 * @persistent: persistent events, and the PMU persistent
 * @misc: /dev/vpmu
 * @unprivileged: number of open events charged to the share of programs without
 *                CAP_PERFMON
 * @lookup: events by id
 * @output_lock: protects rings, their mappings and the events that write to
 *               them: vpmu_file::output and struct vpmu_ring; sleeps
 * @link_lock: protects vpmu_event::links; sleeps
 * @life: the state of the device, its perf events and its users
 *
 * Lock order: each entry is a chain, outermost lock first. A lock in braces is
 * the kernel's.
 *
 *   persistent.lock, {ctx->mutex}, {child_mutex}
 *   persistent.lock (waits for the work), vpmu_waiters::refresh, {ctx->mutex}
 *   persistent.lock or {mmap_lock}, output_lock, lookup.lock
 *   persistent.lock or {ctx->mutex}, life.lock, output_lock, lookup.lock
 *   {ctx->mutex}, link_lock, lookup.lock
 *   notices.lock, lookup.lock, {ctx->lock}, vpmu_vcpu::lock
 *   life.lock, {ctx->lock}
 *   control.lock and info_lock: no other lock is taken inside them
 *   {ctx->lock}, vpmu_records::lock (trylock)
 *   {rq->lock}, {ctx->lock}, {lock of the timer base}, for replay_timer
 *   output_lock, vpmu_records::lock
 *   persistent.lock or {ctx->mutex}, users_lock of vpmu_vcpu.c
 *
 * In the last chain, {ctx->mutex} belongs to a task that exits. An event
 * that the task inherited can hold the last reference on the parent event; perf
 * core then destroys the parent event with that mutex held.
 *
 * vpmu_vcpu.c explains the order of its locks, users_lock and tell_lock.
 *
 * A task may hold any of the sleeping locks while it waits for the answer to a
 * request. So, to end the events, the driver first calls vpmu_life_close()
 * without holding any of these locks. That call ends all requests.
 */
struct vpmu_device {
	struct virtio_device *vdev;
	char name[VPMU_NAME_LEN];
	u64 features;
	struct vpmu_info info;
	seqlock_t info_lock;
	struct work_struct reread;
	struct vpmu_catalogue_entry *catalogue;
	unsigned long refused;
	struct vpmu_vcpu *vcpus;
	struct vpmu_vcpu * __percpu *cpu_vcpu;
	struct hlist_node hotplug;
	struct vpmu_control_queue control;
	struct vpmu_event_queue notices;
	struct vpmu_doorbell doorbell;
	struct vpmu_window window;
	struct vpmu_pmu counting;
	bool generic;
	struct vpmu_persistent_set persistent;
	struct miscdevice misc;
	atomic_t unprivileged;
	struct vpmu_lookup lookup;
	struct mutex output_lock; /* rings and their writers */
	struct mutex link_lock; /* starters and stoppers */
	struct vpmu_life life;
};

/* Returns a consistent copy of the configuration. */
static inline struct vpmu_info vpmu_info_of(const struct vpmu_device *dev)
{
	struct vpmu_info info;
	unsigned int seq;

	do {
		seq = read_seqbegin(&dev->info_lock);
		info = dev->info;
	} while (read_seqretry(&dev->info_lock, seq));
	return info;
}

/* Converts a time of the TSC to the clock in the device's records. */
static inline u64 vpmu_info_clock(const struct vpmu_info *info, u64 cycles)
{
	return info->time_zero + mul_u64_u32_shr(cycles, info->time_mult, info->time_shift);
}

/*
 * Whether @config, of the PMU vpmu, selects a trace: an event that writes to an
 * AUX area.
 */
static inline bool vpmu_config_is_trace(u64 config)
{
	u64 kind = config >> VPMU_CONFIG_KIND_SHIFT;

	return kind >= VPMU_KIND_EXIT_TRACE && kind <= VPMU_KIND_VMM_TRACE;
}

/*
 * Whether @config selects a trace whose packets may contain registers, which
 * can leak kernel secrets.
 */
static inline bool vpmu_config_has_registers(u64 config)
{
	return vpmu_config_is_trace(config) &&
	       config >> VPMU_CONFIG_KIND_SHIFT != VPMU_KIND_EXIT_TRACE;
}

static inline bool vpmu_has_feature(const struct vpmu_device *dev, unsigned int bit)
{
	return dev->features & BIT_ULL(bit);
}

/* vpmu_virtio.c */
bool vpmu_notices_take(struct vpmu_device *dev);
void vpmu_device_get(struct vpmu_device *dev);
void vpmu_device_put(struct vpmu_device *dev);
void vpmu_device_give_up(struct vpmu_device *dev);
void vpmu_device_refused(struct vpmu_device *dev, u32 why);
bool vpmu_life_is_gone(const struct vpmu_device *dev);

/**
 * struct vpmu_control_request - a request on the control queue
 * @entry: links the request into vpmu_control_queue::sent or ::waiting
 * @out: the request, from kmalloc
 * @out_len: size of @out in bytes
 * @in: buffer for the reply, from kmalloc
 * @in_len: size of @in in bytes
 * @ret: on completion: the reply's length in bytes, or a negative errno
 * @resets: vpmu_control_queue::resets when the request was posted
 * @reset: on completion: the device was reset before it answered
 * @answered: called on completion, with interrupts on or off; may free the
 *            request and its buffers
 */
struct vpmu_control_request {
	struct list_head entry;
	void *out;
	size_t out_len;
	void *in;
	size_t in_len;
	int ret;
	u32 resets;
	bool reset;
	void (*answered)(struct vpmu_control_request *request);
};

/**
 * struct vpmu_opened - an event that the device has opened
 * @id: the event's id
 * @resets: vpmu_control_queue::resets when the event was opened
 * @engine: the engine of its samples, VPMU_ENGINE_*
 */
struct vpmu_opened {
	u64 id;
	u32 resets;
	u32 engine;
};

/**
 * struct vpmu_control_close - a request to close an event, in memory from
 *                             kmalloc
 * @request: the request
 * @header: its content
 * @reply: the reply, which is ignored
 */
struct vpmu_control_close {
	struct vpmu_control_request request;
	struct vpmu_control_header header;
	struct vpmu_control_reply reply;
};

/* vpmu_control.c */
void vpmu_control_callback(struct virtqueue *vq);
void vpmu_control_open_queue(struct vpmu_device *dev);
void vpmu_control_close_queue(struct vpmu_device *dev, int err);
int vpmu_control_call(struct vpmu_device *dev, u32 op, u64 id, const void *request, size_t len,
		      u32 *value);
int vpmu_control_open(struct vpmu_device *dev, const struct vpmu_open_request *wanted,
		      struct vpmu_opened *opened);
int vpmu_control_close(struct vpmu_device *dev, u64 id);
void vpmu_control_close_later(struct vpmu_device *dev, struct vpmu_control_close *close, u64 id);
int vpmu_control_map(struct vpmu_device *dev, u64 id, struct page **pages, u32 count, u32 flags);
int vpmu_control_unmap(struct vpmu_device *dev, u64 id);
int vpmu_control_map_aux(struct vpmu_device *dev, u64 id, struct page **pages, u32 count,
			 u32 flags);
int vpmu_control_unmap_aux(struct vpmu_device *dev, u64 id);
int vpmu_control_redirect(struct vpmu_device *dev, u64 id, u64 target);
int vpmu_control_pause(struct vpmu_device *dev, u64 id, bool paused);
int vpmu_control_signal(struct vpmu_device *dev, u64 id, bool own);
int vpmu_control_wakeup(struct vpmu_device *dev, u64 id, const struct vpmu_wakeup *wakeup);
int vpmu_control_task_page(struct vpmu_device *dev, u32 vcpu, phys_addr_t address);
int vpmu_control_features(struct vpmu_device *dev, u64 features);
int vpmu_control_catalogue(struct vpmu_device *dev);

int vpmu_control_detach(struct vpmu_device *dev, u64 id, const char *name);
int vpmu_control_attach(struct vpmu_device *dev, u64 id);
int vpmu_control_map_window(struct vpmu_device *dev, u64 id, u32 count, u32 flags, u32 *page);
int vpmu_control_persistent(struct vpmu_device *dev, u64 after,
			    struct vpmu_persistent_event *events, u32 count);

/* vpmu_vcpu.c */
int vpmu_vcpu_init(struct vpmu_vcpu *vcpu, struct vpmu_device *dev, u32 index);
void vpmu_vcpu_exit(struct vpmu_vcpu *vcpu);
void vpmu_vcpu_open(struct vpmu_vcpu *vcpu, struct virtqueue *vq);
void vpmu_vcpu_close(struct vpmu_vcpu *vcpu);
bool vpmu_vcpu_is_closed(struct vpmu_vcpu *vcpu);
int vpmu_vcpu_discover(struct vpmu_device *dev);
int vpmu_vcpu_cpu(struct vpmu_device *dev, u32 index);
struct vpmu_vcpu *vpmu_vcpu_local(struct vpmu_device *dev);
bool vpmu_vcpu_may_read(void);
void vpmu_vcpu_serve(struct vpmu_vcpu *vcpu);
void vpmu_vcpu_call(struct vpmu_device *dev, int cpu);
void vpmu_vcpu_append(struct vpmu_vcpu *vcpu, struct perf_event *event, u32 op, u64 value);
void vpmu_vcpu_flush(struct vpmu_vcpu *vcpu);
int vpmu_vcpu_command(struct vpmu_vcpu *vcpu, u32 op, u64 event, u64 value,
		      struct vpmu_reply *reply);
int vpmu_task_init(struct vpmu_device *dev);
void vpmu_task_exit(struct vpmu_device *dev);
int vpmu_task_get(struct vpmu_device *dev);
void vpmu_task_put(void);
void vpmu_task_online(struct vpmu_device *dev, unsigned int cpu);
void vpmu_task_forgotten(struct vpmu_device *dev);
int vpmu_task_resume(struct vpmu_device *dev);
bool vpmu_task_is_switching(void);
void vpmu_task_switched(void);
u64 vpmu_task_place(const struct vpmu_device *dev, u32 tid, u64 time, bool user, bool late);

/* vpmu_pmu.c */
int vpmu_pmu_register(struct vpmu_device *dev);
void vpmu_pmu_unregister(struct vpmu_device *dev);

/* vpmu_sampling.c */
int vpmu_sampling_init(struct vpmu_vcpu *vcpu);
void vpmu_sampling_exit(struct vpmu_vcpu *vcpu);
bool vpmu_sampling_notice(struct vpmu_device *dev, u64 id);
void vpmu_sampling_run(struct vpmu_vcpu *vcpu);
void vpmu_sampling_prompt(struct vpmu_vcpu *vcpu);
void vpmu_sampling_switch(struct vpmu_device *dev, bool idle);

/* vpmu_output.c */
bool vpmu_output_deliver(struct vpmu_vcpu *vcpu);

/* vpmu_cdev.c */
int vpmu_cdev_register(struct vpmu_device *dev);
void vpmu_cdev_unregister(struct vpmu_device *dev);

#endif /* _VPMU_H */

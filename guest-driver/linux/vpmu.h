/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What the parts of the driver know of each other.
 *
 *   vpmu_virtio   the device: probe, queues, notices
 *   vpmu_life     what becomes of open events when the device goes, or the machine sleeps
 *   vpmu_control  sleeping requests          vpmu_vcpu  commands, interrupts off
 *   vpmu_pmu      door one: perf core        vpmu_sysfs its format and events
 *   vpmu_trace    door one's traces          vpmu_area  their AUX areas
 *   vpmu_sampling door one's samples         vpmu_replay records become perf core's
 *   vpmu_create   events of either door
 *   vpmu_event    an event's state, count and times
 *   vpmu_context  scheduling before 6.2      vpmu_switch one kick for two tasks
 *   vpmu_call     commands from outside perf core's scheduling
 *   vpmu_cdev     door two: /dev/vpmu        vpmu_open  from its arguments to fd
 *   vpmu_attr     attributes of both doors   vpmu_file  what such an fd does
 *   vpmu_permission  who may open which event
 *   vpmu_group    which events act as one    vpmu_ring  pages and their maps
 *   vpmu_read     what read(2) gives
 *   vpmu_output   which ring an event writes to, and who is woken
 *   vpmu_window   rings in the host's memory
 *   vpmu_persistent, _set, _list, _pmu  events that outlive their descriptors, and us
 *   vpmu_view     such events as perf core sees them
 *   vpmu_direct   what such events do, which are none of perf core's
 *   vpmu_link     which events start and stop which
 *   vpmu_perf     what /dev/vpmu does to events of perf_event_open(2)
 *   vpmu_flush    what was produced stands where programs look
 *   vpmu_aux      AUX areas of rings         vpmu_charge  who pays for pages
 *   vpmu_task     tells the device who runs
 *
 * Here is the device itself. vpmu_event.h has events of either door, vpmu_file.h those of
 * door two, vpmu_ring.h where these write to, vpmu_persistent.h which outlive us.
 */
#ifndef _VPMU_H
#define _VPMU_H

#include <linux/atomic.h>
#include <linux/device.h>
#include <linux/hrtimer.h>
#include <linux/irq_work.h>
#include <linux/list.h>
#include <linux/miscdevice.h>
#include <linux/mutex.h>
#include <linux/notifier.h>
#include <linux/perf_event.h>
#include <linux/smp.h>
#include <linux/spinlock.h>
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

/* Commands that one kick carries at most; more are sent in several. */
#define VPMU_BATCH	256
/* Events of a group, at most: all of it is read with one kick. */
#define VPMU_GROUP	64
/* Commands that are sent at once with one kick, at most. */
#define VPMU_DIRECT	3
/* Notices that the device can leave before the driver has taken any. */
#define VPMU_NOTICES	64

/**
 * struct vpmu_vcpu - one vCPU queue
 * @dev: of which device
 * @vq: answered before the kicking instruction retires
 * @index: the vCPU's
 * @lock: protects what follows; interrupts are off wherever it is held
 * @broken: the device broke that promise and owns the buffers until it is reset
 * @closed: there is no queue: none yet, none any more, or none while the machine sleeps
 * @bracket: perf core has disabled the PMU: commands only gather
 * @reading: perf core reads a group: likewise
 * @group_read: the leader whose group was read as it went in this bracket
 * @pending: commands gathered
 * @events: whose they are
 * @commands: VPMU_BATCH gathered ones, and VPMU_DIRECT slots for direct commands
 * @replies: as many answers
 * @alarm: tells the log where printing is possible
 * @traces: perf core's that write on this CPU, which alone looks at them here
 * @service: brings vpmu_trace_service() there
 * @sampling: perf core's events that sample and are active on this CPU, which alone looks at them
 * @stopped: those that have just been stopped, whose last samples are to be replayed
 * @views: views of persistent events that are active on this CPU, likewise
 * @replay: what samples are replayed with
 * @replay_call: brings a replay to this CPU
 * @replay_timer: replays now and then while there are events in @sampling or @views
 */
struct vpmu_vcpu {
	struct vpmu_device *dev;
	struct virtqueue *vq;
	u32 index;
	raw_spinlock_t lock;
	bool broken;
	bool closed;
	bool bracket;
	bool reading;
	const struct perf_event *group_read;
	unsigned int pending;
	struct perf_event *events[VPMU_BATCH];
	struct vpmu_command *commands;
	struct vpmu_reply *replies;
	struct irq_work alarm;
	struct list_head traces;
	call_single_data_t service;
	struct list_head sampling;
	struct list_head stopped;
	struct list_head views;
	struct vpmu_replay *replay;
	call_single_data_t replay_call;
	struct hrtimer replay_timer;
};

/**
 * struct vpmu_sysfs - attribute groups of a PMU
 * @events: what stands in events/
 * @groups: all of them
 */
struct vpmu_sysfs {
	struct attribute_group *events;
	const struct attribute_group *groups[3];
};

/**
 * struct vpmu_device - the device
 * @vdev: as virtio sees it
 * @features: the device's own feature bits that both sides have accepted
 * @info: the configuration space and the PMU's type, as programs see it
 * @catalogue: what can be counted, @info.catalogue_len entries
 * @control: the control queue, NULL while there are no queues
 * @control_lock: protects the control queue and the next three; taken with interrupts off
 * @control_closed: how requests fail, a negative errno; 0 while there is a queue for them
 * @control_sent: requests in the queue
 * @control_waiting: requests that found no room in the queue, the oldest first
 * @event_vq: the event queue
 * @event_lock: whose notices are taken by one at a time; taken with interrupts off
 * @event_closed: there is no event queue; with @event_lock
 * @notices: VPMU_NOTICES buffers, posted on @event_vq
 * @vcpus: @info.vcpus queues
 * @cpu_vcpu: each CPU's queue, NULL while unknown
 * @node: in the CPU hotplug state
 * @doorbell: a 32-bit write here is a mark; NULL without the feature
 * @doorbell_page: where programs map it from; zero if it has no page to itself
 * @pmu: as perf core sees it
 * @generic: it takes perf's generic hardware events, because no CPU PMU does
 * @sysfs: of @pmu
 * @trace_pmu: as perf core sees what writes to AUX areas; its type is 0 without the feature
 * @trace_sysfs: of @trace_pmu
 * @window: the window, NULL without the feature
 * @window_pfn: its first page
 * @window_pages: how many it has, 0 without
 * @persistent_pmu: persistent events, as sysfs lists them and perf core sees them
 * @persistent_lock: which events are persistent, and whose handles there are; sleeps, and
 *                   is taken before all others here
 * @persistent: the files of persistent events, one reference each
 * @persistent_turn: how often it was compared with the device's
 * @persistent_news: that found one that is not in it
 * @persistent_closed: there is no list yet, or no longer
 * @persistent_work: compares it again
 * @misc: /dev/vpmu
 * @paranoid: open file of the sysctl kernel.perf_event_paranoid, or NULL
 * @unprivileged: events open that were charged by vpmu_permission_charge()
 * @files: from event id to struct vpmu_file, children's ids included
 * @traces: from event id to struct vpmu_event of perf core's traces
 * @sampled: likewise of perf core's sampling events with a ring of their own
 * @output_lock: rings, their maps and who writes to them; sleeps
 * @link_lock: which events start and stop which; sleeps
 * @notice_lock: what notices look at: vpmu_file::ring and ::family,
 *               vpmu_ring::writers, what @traces and @sampled lead to; taken with interrupts off
 * @wakeups: of rings so far; with @notice_lock
 * @lost: nothing is opened or asked any more: -EIO of a device that was given up,
 *        -ENODEV of one that went; 0 otherwise
 * @down: the machine sleeps: nothing is started, and nobody is asked what it counted
 * @events_lock: protects @events, and keeps those in it; sleeps
 * @events: all that perf core knows of, in the order in which they were made
 * @give_up: ends the use of a device that does not answer
 * @reboot: ends it before another kernel comes
 * @transports: what it was bound to, as long as users of that time may be left
 * @users: open events, open files of /dev/vpmu, and calls of vpmu_trace_service()
 * @idle: woken when @users falls to zero
 */
struct vpmu_device {
	struct virtio_device *vdev;
	u64 features;
	struct vpmu_info info;
	struct vpmu_catalogue_entry *catalogue;
	struct virtqueue *control;
	spinlock_t control_lock; /* the control queue and its lists */
	int control_closed;
	struct list_head control_sent;
	struct list_head control_waiting;
	struct virtqueue *event_vq;
	spinlock_t event_lock; /* the event queue */
	bool event_closed;
	struct vpmu_notice *notices;
	struct vpmu_vcpu *vcpus;
	struct vpmu_vcpu * __percpu *cpu_vcpu;
	struct hlist_node node;
	void __iomem *doorbell;
	phys_addr_t doorbell_page;
	struct pmu pmu;
	bool generic;
	struct vpmu_sysfs sysfs;
	struct pmu trace_pmu;
	struct vpmu_sysfs trace_sysfs;
	void *window;
	unsigned long window_pfn;
	u32 window_pages;
	struct pmu persistent_pmu;
	struct mutex persistent_lock; /* the list of persistent events */
	struct list_head persistent;
	u64 persistent_turn;
	bool persistent_news;
	bool persistent_closed;
	struct work_struct persistent_work;
	struct miscdevice misc;
	struct file *paranoid;
	atomic_t unprivileged;
	struct xarray files;
	struct xarray traces;
	struct xarray sampled;
	struct mutex output_lock; /* who writes to which ring */
	struct mutex link_lock; /* starters and stoppers */
	spinlock_t notice_lock; /* wakeups that are due */
	loff_t wakeups;
	int lost;
	bool down;
	unsigned long refused; /* reasons that the log has */
	struct mutex events_lock; /* which events there are */
	struct list_head events;
	struct work_struct give_up;
	struct notifier_block reboot;
	struct list_head transports;
	atomic_t users;
	wait_queue_head_t idle;
};

/* Whether perf_event_attr::config of our PMU means an event that writes to an AUX area. */
static inline bool vpmu_config_is_trace(u64 config)
{
	u64 kind = config >> VPMU_CONFIG_KIND_SHIFT;

	return kind >= VPMU_KIND_EXIT_TRACE && kind <= VPMU_KIND_VMM_TRACE;
}

/* Whether @config is a trace whose packets contain registers, which may leak kernel secrets. */
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

/* vpmu_life.c */
void vpmu_life_close(struct vpmu_device *dev, int err);
void vpmu_life_end(struct vpmu_device *dev, int err);
void vpmu_life_pause(struct vpmu_device *dev);
void vpmu_life_resume(struct vpmu_device *dev);

/**
 * struct vpmu_control_request - a request on the control queue
 * @entry: where it waits
 * @out: what is asked, from kmalloc
 * @out_len: bytes of it
 * @in: the answer, from kmalloc
 * @in_len: room there
 * @ret: once it is answered: bytes of the answer, or a negative errno
 * @answered: called then, with interrupts off; may free all of this
 */
struct vpmu_control_request {
	struct list_head entry;
	void *out;
	size_t out_len;
	void *in;
	size_t in_len;
	int ret;
	void (*answered)(struct vpmu_control_request *request);
};

/**
 * struct vpmu_control_close - a request to close an event, in memory from kmalloc
 * @request: the request
 * @header: what it asks
 * @reply: the answer, which nobody looks at
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
void vpmu_control_post(struct vpmu_device *dev, struct vpmu_control_request *request);
int vpmu_control_send(struct vpmu_device *dev, void *request, size_t request_len, void *reply,
		      size_t reply_len);
int vpmu_control_call(struct vpmu_device *dev, void *request, size_t len, u32 *value);
int vpmu_control_event(struct vpmu_device *dev, u32 op, u64 id);
int vpmu_control_open(struct vpmu_device *dev, const struct vpmu_open_request *wanted, u64 *id,
		      u32 *engine);
int vpmu_control_close(struct vpmu_device *dev, u64 id);
void vpmu_control_close_later(struct vpmu_device *dev, struct vpmu_control_close *close, u64 id);
int vpmu_control_map(struct vpmu_device *dev, u64 id, struct page **pages, u32 count, u32 flags);
int vpmu_control_unmap(struct vpmu_device *dev, u64 id);
int vpmu_control_map_aux(struct vpmu_device *dev, u64 id, struct page **pages, u32 count,
			 u32 flags);
int vpmu_control_unmap_aux(struct vpmu_device *dev, u64 id);
int vpmu_control_redirect(struct vpmu_device *dev, u64 id, u64 target);
int vpmu_control_pause(struct vpmu_device *dev, u64 id, bool paused);
int vpmu_control_wakeup(struct vpmu_device *dev, u64 id, const struct vpmu_wakeup *wakeup);
int vpmu_control_task_page(struct vpmu_device *dev, u32 vcpu, phys_addr_t address);
int vpmu_control_features(struct vpmu_device *dev, u64 features);
int vpmu_control_catalogue(struct vpmu_device *dev);

/* vpmu_control_persistent.c */
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
int vpmu_vcpu_discover(struct vpmu_device *dev);
int vpmu_vcpu_cpu(struct vpmu_device *dev, u32 index);
struct vpmu_vcpu *vpmu_vcpu_local(struct vpmu_device *dev);
void vpmu_vcpu_append(struct vpmu_vcpu *vcpu, struct perf_event *event, u32 op, u64 value);
void vpmu_vcpu_flush(struct vpmu_vcpu *vcpu);
int vpmu_vcpu_commands(struct vpmu_vcpu *vcpu, const struct vpmu_command *commands,
		       struct vpmu_reply *replies, unsigned int count);
int vpmu_vcpu_command(struct vpmu_vcpu *vcpu, u32 op, u64 event, u64 value,
		      struct vpmu_reply *reply);

/* vpmu_pmu.c */
int vpmu_pmu_register(struct vpmu_device *dev);
void vpmu_pmu_unregister(struct vpmu_device *dev);

/* vpmu_sampling.c */
int vpmu_sampling_init(struct vpmu_vcpu *vcpu);
void vpmu_sampling_exit(struct vpmu_vcpu *vcpu);
bool vpmu_sampling_notice(struct vpmu_device *dev, u64 id);

/* vpmu_trace.c */
int vpmu_trace_register(struct vpmu_device *dev);
void vpmu_trace_unregister(struct vpmu_device *dev);
void vpmu_trace_service(void *vcpu);
void vpmu_trace_notice(struct vpmu_device *dev, u64 id);

/* vpmu_sysfs.c */
int vpmu_sysfs_init(struct vpmu_device *dev, struct vpmu_sysfs *sysfs, bool traces);
void vpmu_sysfs_exit(struct vpmu_sysfs *sysfs);

/* vpmu_permission.c */
void vpmu_permission_init(struct vpmu_device *dev);
void vpmu_permission_exit(struct vpmu_device *dev);
int vpmu_permission_open(struct vpmu_device *dev, const struct perf_event_attr *attr,
			 struct task_struct *task);
int vpmu_permission_charge(struct vpmu_device *dev);
void vpmu_permission_uncharge(struct vpmu_device *dev);

/* vpmu_cdev.c */
int vpmu_cdev_register(struct vpmu_device *dev);
void vpmu_cdev_unregister(struct vpmu_device *dev);

/* vpmu_switch.c */
struct tracepoint *vpmu_switch_init(void);
int vpmu_switch_get(void);
void vpmu_switch_put(void);

/* vpmu_task.c */
int vpmu_task_init(struct vpmu_device *dev, struct tracepoint *tracepoint);
void vpmu_task_exit(struct vpmu_device *dev);
int vpmu_task_get(struct vpmu_device *dev);
void vpmu_task_put(struct vpmu_device *dev);
void vpmu_task_online(struct vpmu_device *dev, unsigned int cpu);
void vpmu_task_forgotten(struct vpmu_device *dev);
int vpmu_task_resume(struct vpmu_device *dev);

#endif /* _VPMU_H */

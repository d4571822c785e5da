/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What the parts of the driver know of each other.
 *
 *   vpmu_virtio   the device: probe, queues, notices
 *   vpmu_control  sleeping requests          vpmu_vcpu  commands, interrupts off
 *   vpmu_pmu      door one: perf core        vpmu_sysfs its format and events
 *   vpmu_trace    door one's traces          vpmu_area  their AUX areas
 *   vpmu_create   events of either door
 *   vpmu_event    an event's state, count and times
 *   vpmu_context  scheduling before 6.2
 *   vpmu_call     commands from outside perf core's scheduling
 *   vpmu_cdev     door two: /dev/vpmu        vpmu_open  from its arguments to fd
 *   vpmu_attr     what an attr may say       vpmu_file  what such an fd does
 *   vpmu_group    which events act as one    vpmu_ring  pages and their maps
 *   vpmu_read     what read(2) gives
 *   vpmu_output   which ring an event writes to, and who is woken
 *   vpmu_window   rings in the host's memory
 *   vpmu_persistent, _set, _list, _pmu  events that outlive their descriptors, and us
 *   vpmu_direct   what such events do, which are none of perf core's
 *   vpmu_request  the device's words in perf's
 *   vpmu_link     which events start and stop which
 *   vpmu_flush    what was produced stands where programs look
 *   vpmu_aux      AUX areas of rings         vpmu_charge  who pays for pages
 *   vpmu_task     tells the device who runs
 */
#ifndef _VPMU_H
#define _VPMU_H

#include <linux/atomic.h>
#include <linux/device.h>
#include <linux/fs.h>
#include <linux/irq_work.h>
#include <linux/kref.h>
#include <linux/list.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/mutex.h>
#include <linux/perf_event.h>
#include <linux/poll.h>
#include <linux/smp.h>
#include <linux/spinlock.h>
#include <linux/virtio.h>
#include <linux/wait.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>

#include "vpmu_abi.h"

struct task_struct;
struct user_struct;
struct vm_area_struct;

/* Commands that one kick carries at most; more are sent in several. */
#define VPMU_BATCH	64
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
 * @broken: the device broke that promise and may still own the buffers
 * @bracket: perf core has disabled the PMU: commands only gather
 * @reading: perf core reads a group: likewise
 * @pending: commands gathered
 * @events: whose they are
 * @commands: VPMU_BATCH gathered ones, and VPMU_DIRECT slots for direct commands
 * @replies: as many answers
 * @alarm: tells the log where printing is possible
 * @traces: perf core's that write on this CPU, which alone looks at them here
 * @service: brings vpmu_trace_service() there
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
	struct list_head traces;
	call_single_data_t service;
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
 * @info: the configuration space and the PMU's type, as programs see it
 * @catalogue: what can be counted, @info.catalogue_len entries
 * @control: the control queue
 * @control_lock: one request at a time
 * @control_done: completed by the control queue's interrupt
 * @event_vq: the event queue
 * @event_lock: whose notices are taken by one at a time; taken with interrupts off
 * @notices: VPMU_NOTICES buffers, posted on @event_vq
 * @vcpus: @info.vcpus queues
 * @cpu_vcpu: each CPU's queue, NULL while unknown
 * @node: in the CPU hotplug state
 * @doorbell: a 32-bit write here is a mark; NULL without the feature
 * @doorbell_page: where programs map it from; zero if it has no page to itself
 * @pmu: as perf core sees it
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
 * @files: from event id to struct vpmu_file, children's ids included
 * @traces: from event id to struct vpmu_event of perf core's traces
 * @output_lock: rings, their maps and who writes to them; sleeps
 * @link_lock: which events start and stop which; sleeps
 * @notice_lock: what notices look at: vpmu_file::ring and ::family,
 *               vpmu_ring::writers, what @traces leads to; taken with interrupts off
 * @wakeups: of rings so far; with @notice_lock
 * @gone: being removed; nothing more is opened
 * @users: open events, open files of /dev/vpmu, and calls of vpmu_trace_service()
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
	spinlock_t event_lock;
	struct vpmu_notice *notices;
	struct vpmu_vcpu *vcpus;
	struct vpmu_vcpu * __percpu *cpu_vcpu;
	struct hlist_node node;
	void __iomem *doorbell;
	phys_addr_t doorbell_page;
	struct pmu pmu;
	struct vpmu_sysfs sysfs;
	struct pmu trace_pmu;
	struct vpmu_sysfs trace_sysfs;
	void *window;
	unsigned long window_pfn;
	u32 window_pages;
	struct pmu persistent_pmu;
	struct mutex persistent_lock;
	struct list_head persistent;
	u64 persistent_turn;
	bool persistent_news;
	bool persistent_closed;
	struct work_struct persistent_work;
	struct miscdevice misc;
	struct xarray files;
	struct xarray traces;
	struct mutex output_lock;
	struct mutex link_lock;
	spinlock_t notice_lock;
	loff_t wakeups;
	bool gone;
	atomic_t users;
	wait_queue_head_t idle;
};

/**
 * struct vpmu_event - our part of a perf event (perf_event::pmu_private)
 * @dev: of which device
 * @event: perf's part
 * @id: the device's; zero for an inherited event that the device had no room for
 * @task: it is scheduled in and out (IN, OUT), not switched (ENABLE, DISABLE)
 * @started: the device has been told that it counts
 * @stray: it should not have; what it counted meanwhile is not perf's
 * @spent: its refreshes are used up, by which the device has it off
 * @parting: it is being stopped, and a READ goes before to learn whether it is spent
 * @count: as the device last told
 * @enabled_ns: time enabled, as the device last told
 * @running_ns: time running, likewise
 * @lost: overflows without a record, likewise
 * @owed: nanoseconds not counted that perf core's running time still has to lose;
 *        U64_MAX once the device has lost the event: all
 * @file: the door that it came through, NULL for perf core's
 * @family: in @file->family
 * @turn: the last call that has reached it, see vpmu_call_group()
 * @pinned: it keeps perf core from swapping its context
 * @flushed: how its last VPMU_COMMAND_FLUSH went
 * @trace: of perf core's traces: what it writes to
 * @tracks: of these: holds a reference on vpmu_task
 */
struct vpmu_event {
	struct vpmu_device *dev;
	struct perf_event *event;
	u64 id;
	bool task;
	bool started;
	bool stray;
	bool spent;
	bool parting;
	u64 count;
	u64 enabled_ns;
	u64 running_ns;
	u64 lost;
	u64 owed;
	struct vpmu_file *file;
	struct list_head family;
	u64 turn;
	bool pinned;
	int flushed;
	struct vpmu_trace *trace;
	bool tracks;
};

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

struct vpmu_ring;
struct vpmu_trace;

/**
 * struct vpmu_charge - on whose account pages are
 * @user: the user, up to the module's mlock_kb
 * @mm: has the rest of them
 * @extra: so many
 * @count: all of them
 */
struct vpmu_charge {
	struct user_struct *user;
	struct mm_struct *mm;
	unsigned long extra;
	unsigned long count;
};

/**
 * struct vpmu_aux - pages beside a ring that the host writes traces to
 * @mapped: how many maps there are, through whichever event
 * @pgoff: where, behind the ring
 * @charge: on whose account they are
 * @count: how many
 * @pages: they
 */
struct vpmu_aux {
	unsigned int mapped;
	unsigned long pgoff;
	struct vpmu_charge charge;
	u32 count;
	struct page *pages[];
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
	struct mutex group_lock;
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

/**
 * struct vpmu_ring - pages that the host writes and programs map
 * @mapped: how many maps there are, of @aux too, through whichever event
 * @id: of the event that it was first mapped with, for the device
 * @writers: the files whose records go there
 * @wakeup: which of vpmu_device::wakeups was its last
 * @kept: it stays without maps, for its event is persistent
 * @window: it lies in the window, from @pfn on
 * @ended: the device has it no more
 * @pfn: of its first page there; 0 once the device may give it to others
 * @aux: the AUX area, while anybody maps it
 * @charge: on whose account the pages are
 * @count: how many pages
 * @pages: the metadata page, then the data pages; none of the window
 */
struct vpmu_ring {
	unsigned int mapped;
	u64 id;
	struct list_head writers;
	loff_t wakeup;
	bool kept;
	bool window;
	bool ended;
	unsigned long pfn;
	struct vpmu_aux *aux;
	struct vpmu_charge charge;
	u32 count;
	struct page *pages[];
};

/* vpmu_virtio.c */
bool vpmu_notices_take(struct vpmu_device *dev);
void vpmu_device_get(struct vpmu_device *dev);
void vpmu_device_put(struct vpmu_device *dev);

/* vpmu_control.c */
void vpmu_control_callback(struct virtqueue *vq);
int vpmu_control_send(struct vpmu_device *dev, void *request, size_t request_len, void *reply,
		      size_t reply_len);
int vpmu_control_call(struct vpmu_device *dev, void *request, size_t len, u32 *value);
int vpmu_control_event(struct vpmu_device *dev, u32 op, u64 id);
int vpmu_control_open(struct vpmu_device *dev, const struct vpmu_open_request *wanted, u64 *id,
		      u32 *engine);
int vpmu_control_close(struct vpmu_device *dev, u64 id);
int vpmu_control_map(struct vpmu_device *dev, u64 id, struct page **pages, u32 count, u32 flags);
int vpmu_control_unmap(struct vpmu_device *dev, u64 id);
int vpmu_control_map_aux(struct vpmu_device *dev, u64 id, struct page **pages, u32 count,
			 u32 flags);
int vpmu_control_unmap_aux(struct vpmu_device *dev, u64 id);
int vpmu_control_redirect(struct vpmu_device *dev, u64 id, u64 target);
int vpmu_control_pause(struct vpmu_device *dev, u64 id, bool paused);
int vpmu_control_task_page(struct vpmu_device *dev, u32 vcpu, phys_addr_t address);
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
int vpmu_vcpu_discover(struct vpmu_device *dev);
int vpmu_vcpu_cpu(struct vpmu_device *dev, u32 index);
struct vpmu_vcpu *vpmu_vcpu_local(struct vpmu_device *dev);
void vpmu_vcpu_append(struct vpmu_vcpu *vcpu, struct perf_event *event, u32 op);
void vpmu_vcpu_flush(struct vpmu_vcpu *vcpu);
int vpmu_vcpu_commands(struct vpmu_vcpu *vcpu, const struct vpmu_command *commands,
		       struct vpmu_reply *replies, unsigned int count);
int vpmu_vcpu_command(struct vpmu_vcpu *vcpu, u32 op, u64 event, u64 value,
		      struct vpmu_reply *reply);

/* vpmu_pmu.c */
int vpmu_pmu_register(struct vpmu_device *dev);
void vpmu_pmu_unregister(struct vpmu_device *dev);

/* vpmu_trace.c */
int vpmu_trace_register(struct vpmu_device *dev);
void vpmu_trace_unregister(struct vpmu_device *dev);
struct vpmu_trace *vpmu_trace_alloc(struct vpmu_event *own);
void vpmu_trace_service(void *vcpu);
void vpmu_trace_notice(struct vpmu_device *dev, u64 id);

/* vpmu_area.c */
void vpmu_area_close(struct vpmu_event *own);

/* vpmu_create.c */
int vpmu_event_create(struct vpmu_device *dev, struct perf_event *event);

/* vpmu_event.c */
void vpmu_event_pin(struct perf_event *event);
void vpmu_event_unpin(struct perf_event *event);
void vpmu_event_anchor(struct vpmu_event *own);
void vpmu_event_read(struct perf_event *event);
bool vpmu_event_start(struct vpmu_vcpu *vcpu, struct perf_event *event);
bool vpmu_event_stop(struct vpmu_vcpu *vcpu, struct perf_event *event);
void vpmu_event_answer(struct perf_event *event, u32 op, const struct vpmu_reply *reply);

/* vpmu_context.c */
void vpmu_context_enter(struct vpmu_vcpu *vcpu, struct perf_event *event);
void vpmu_context_leave(struct vpmu_vcpu *vcpu, struct perf_event *event);

/* vpmu_call.c */
int vpmu_call_group(struct vpmu_file *leader, struct vpmu_file *only, u32 op);
int vpmu_call_event(struct perf_event *event, u32 op, u64 value);

/* vpmu_sysfs.c */
int vpmu_sysfs_init(struct vpmu_device *dev, struct vpmu_sysfs *sysfs, bool traces);
void vpmu_sysfs_exit(struct vpmu_sysfs *sysfs);

/* vpmu_cdev.c */
int vpmu_cdev_register(struct vpmu_device *dev);
void vpmu_cdev_unregister(struct vpmu_device *dev);

/* vpmu_attr.c */
int vpmu_attr_copy(struct perf_event_attr *attr, struct perf_event_attr __user *user);
int vpmu_attr_check(const struct perf_event_attr *attr, u32 max_rate, bool trace);
bool vpmu_attr_tells_kernel(const struct perf_event_attr *attr, bool trace);
void vpmu_attr_request(const struct perf_event_attr *attr, bool trace,
		       struct vpmu_open_request *request);

/* vpmu_request.c */
u32 vpmu_request_type(const struct vpmu_device *dev, const struct vpmu_open_request *request,
		      u64 *config);
bool vpmu_request_names_tasks(const struct vpmu_open_request *request, bool trace);
bool vpmu_request_tells_registers(const struct vpmu_open_request *request, u64 config);
void vpmu_request_attr(const struct vpmu_device *dev, const struct vpmu_open_request *request,
		       struct perf_event_attr *attr);

/* Whether perf_event_attr::config of our PMU means an event that writes to an AUX area. */
static inline bool vpmu_config_is_trace(u64 config)
{
	u64 kind = config >> VPMU_CONFIG_KIND_SHIFT;

	return kind >= VPMU_KIND_EXIT_TRACE && kind <= VPMU_KIND_HOST_TRACE;
}

/* Of these, whether its packets hold registers, by which what the kernel keeps secret. */
static inline bool vpmu_config_tells_registers(u64 config)
{
	return vpmu_config_is_trace(config) &&
	       config >> VPMU_CONFIG_KIND_SHIFT != VPMU_KIND_EXIT_TRACE;
}

/* vpmu_open.c */
int vpmu_open(struct vpmu_device *dev, struct vpmu_open *args);

/* vpmu_file.c */
extern const struct file_operations vpmu_file_fops;
void vpmu_file_overflow(struct perf_event *event, struct perf_sample_data *data,
			struct pt_regs *regs);
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

/* vpmu_direct.c */
struct perf_event *vpmu_direct_take(struct vpmu_file *file);
void vpmu_direct_close(struct vpmu_file *file);
int vpmu_direct_call(struct vpmu_file *file, u32 op, u64 value);
int vpmu_direct_group(struct vpmu_file *file, u32 op);

/* vpmu_persistent_set.c */
struct vpmu_file *vpmu_persistent_find(struct vpmu_device *dev, u64 id);
void vpmu_persistent_add(struct vpmu_file *file);
void vpmu_persistent_remove(struct vpmu_file *file);
int vpmu_persistent_refresh(struct vpmu_device *dev);
void vpmu_persistent_notice(struct vpmu_device *dev);
void vpmu_persistent_init(struct vpmu_device *dev);
void vpmu_persistent_exit(struct vpmu_device *dev);
int vpmu_persistent_register(struct vpmu_device *dev);
void vpmu_persistent_close(struct vpmu_device *dev);
void vpmu_persistent_unregister(struct vpmu_device *dev);

/* vpmu_persistent.c */
struct vpmu_file *vpmu_persistent_get(struct vpmu_device *dev, u64 id);
void vpmu_persistent_put(struct vpmu_file *file);
struct vpmu_file *vpmu_persistent_open(struct vpmu_device *dev, const struct vpmu_open *args,
				       const struct perf_event_attr *attr);
int vpmu_persistent_detach(struct vpmu_file *file, const char *name);
int vpmu_persistent_attach(struct vpmu_file *file);

/* vpmu_persistent_list.c */
long vpmu_persistent_list(struct vpmu_device *dev, struct vpmu_persistent __user *arg);

/* vpmu_persistent_pmu.c */
int vpmu_persistent_pmu_register(struct vpmu_device *dev);
void vpmu_persistent_pmu_unregister(struct vpmu_device *dev);
void vpmu_persistent_show(struct vpmu_file *file);
void vpmu_persistent_hide(struct vpmu_file *file);

/* vpmu_window.c */
int vpmu_window_init(struct vpmu_device *dev);
void vpmu_window_exit(struct vpmu_device *dev);
unsigned long vpmu_window_place(const struct vpmu_device *dev, u32 page, u32 count);
vm_fault_t vpmu_window_fault(const struct vpmu_ring *ring, struct vm_fault *vmf);
void vpmu_window_revoke(struct vpmu_device *dev, struct vpmu_ring *ring);

/* vpmu_read.c */
ssize_t vpmu_read(struct vpmu_file *file, u64 **values, size_t room);

/* vpmu_output.c */
void vpmu_output_attach(struct vpmu_file *file, struct vpmu_ring *ring);
void vpmu_output_unmapped(struct vpmu_file *file);
void vpmu_output_abandon(struct vpmu_device *dev, struct vpmu_ring *ring);
int vpmu_output_redirect(struct vpmu_file *file, struct vpmu_file *target);
int vpmu_output_pause(struct vpmu_file *file, bool paused);
void vpmu_output_ended(struct vpmu_file *file);
__poll_t vpmu_output_poll(struct vpmu_file *file, loff_t *told);
void vpmu_output_gone(struct vpmu_file *file);
void vpmu_output_notice(struct vpmu_device *dev, const struct vpmu_notice *notice);

/* vpmu_link.c */
void vpmu_link_init(struct vpmu_links *links);
int vpmu_link_set(struct vpmu_file *file, struct vpmu_file *target, enum vpmu_role role);
void vpmu_link_inherit(struct vpmu_event *own);
void vpmu_link_close(struct vpmu_file *file);

/* vpmu_flush.c */
int vpmu_flush(struct vpmu_file *file, bool whole);
int vpmu_flush_all(struct vpmu_device *dev);

/* vpmu_charge.c */
int vpmu_charge(struct vpmu_charge *charge, unsigned long count);
void vpmu_uncharge(struct vpmu_charge *charge);

/* vpmu_aux.c */
int vpmu_aux_mmap(struct vpmu_file *file, struct vm_area_struct *vma);
void vpmu_aux_destroy(struct vpmu_device *dev, struct vpmu_ring *ring);

/* vpmu_ring.c */
void vpmu_ring_mapped(struct vpmu_file *file);
void vpmu_ring_unmapped(struct vpmu_file *file);
int vpmu_ring_adopt(struct vpmu_file *file, const struct vpmu_persistent_event *event);
bool vpmu_ring_forget(struct vpmu_file *file);
void vpmu_ring_ended(struct vpmu_file *file);
void vpmu_ring_close(struct vpmu_file *file);
void vpmu_ring_vma(struct vm_area_struct *vma, const struct vm_operations_struct *ops);
int vpmu_ring_mmap(struct file *filp, struct vm_area_struct *vma);

/* vpmu_task.c */
int vpmu_task_init(struct vpmu_device *dev);
void vpmu_task_exit(struct vpmu_device *dev);
int vpmu_task_get(struct vpmu_device *dev);
void vpmu_task_put(struct vpmu_device *dev);
void vpmu_task_online(struct vpmu_device *dev, unsigned int cpu);

#endif /* _VPMU_H */

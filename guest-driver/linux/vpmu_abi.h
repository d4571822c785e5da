/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/*
 * The interface between the virtio PMU and its driver: sizes, offsets and
 * values.
 *
 * The C counterpart of the Rust crate vpmu/abi, which is the source of truth; a
 * test compares the two field by field. vpmu/SPEC.md defines what the fields
 * mean. All integers are little-endian; reserved fields are zero. Definitions
 * that programs also use (event kinds, the catalogue) are in vpmu_uapi.h.
 */
#ifndef _VPMU_ABI_H
#define _VPMU_ABI_H

#include <linux/types.h>

#include "vpmu_uapi.h"

#define VPMU_DEVICE_ID		63	/* not assigned by the virtio specification */
#define VPMU_PAGE_SIZE		4096
#define VPMU_VERSION		4	/* vpmu_config::version */

/* Feature bits */
#define VPMU_F_RING		0	/* writes samples into rings in guest memory */
#define VPMU_F_TASK_PAGE	1	/* reads each vCPU's running task from a page */
#define VPMU_F_DOORBELL		2	/* shared memory region VPMU_SHM_DOORBELL exists */
#define VPMU_F_AUX		3	/* writes traces into AUX areas in guest memory */
#define VPMU_F_WINDOW		4	/* shared memory region VPMU_SHM_WINDOW exists */
#define VPMU_F_PERSISTENT	5	/* events can be made persistent and listed */
#define VPMU_F_LINKS		6	/* events can start and stop each other */
#define VPMU_F_FLUSH		7	/* events can be flushed */
#define VPMU_F_END		24	/* end of the device-specific bits */

/* Virtqueues */
#define VPMU_QUEUE_CONTROL	0
#define VPMU_QUEUE_EVENT	1
#define VPMU_QUEUE_VCPU		2	/* vCPU n has VPMU_QUEUE_VCPU + n */

/* Shared memory regions */
#define VPMU_SHM_DOORBELL	0	/* a 32-bit write to offset 0 places a mark */
#define VPMU_SHM_WINDOW		1	/* the VMM's memory for rings that outlive a reset */

/**
 * struct vpmu_config - the device's configuration space
 * @version: VPMU_VERSION
 * @vcpus: number of vCPUs; each has a vCPU queue
 * @max_events: maximum number of open events in this VM
 * @max_ring_pages: maximum number of data pages of one ring, a power of two
 * @catalogue_len: number of entries in the catalogue
 * @count_mode: VPMU_COUNT_*
 * @time_zero: added to the scaled TSC, in nanoseconds
 * @time_mult: record time = @time_zero + ((tsc * @time_mult) >> @time_shift),
 *             with a 128-bit product
 * @time_shift: see @time_mult
 * @refused_hardware: the reason why the catalogue has no hardware events,
 *                    VPMU_REFUSED_*; VPMU_REFUSED_NOT if the catalogue has
 *                    hardware events
 * @refused_software: the same for the host's software events
 * @tsc_khz: guest TSC frequency
 * @max_sample_rate: maximum samples per second of one event
 * @max_aux_pages: maximum number of pages of one AUX area, a power of two
 * @max_persistent: maximum number of the guest's persistent events
 * @features: the offered device-specific feature bits
 */
struct vpmu_config {
	__le32 version;
	__le32 vcpus;
	__le32 max_events;
	__le32 max_ring_pages;
	__le32 catalogue_len;
	__le32 count_mode;
	__le64 time_zero;
	__le32 time_mult;
	__le16 time_shift;
	__u8 refused_hardware;
	__u8 refused_software;
	__le32 tsc_khz;
	__le32 max_sample_rate;
	__le32 max_aux_pages;
	__le32 max_persistent;
	__le64 features;
};

/* Reasons why the host refuses events */
#define VPMU_REFUSED_NOT		0	/* the host did not refuse */
#define VPMU_REFUSED_IN_USE		1	/* another user has the counters exclusively */
#define VPMU_REFUSED_PERMISSION		2	/* the VMM lacks a permission */
#define VPMU_REFUSED_DESCRIPTORS	3	/* the VMM has no free descriptor */
#define VPMU_REFUSED_ABSENT		4	/* the host has no such event, or no PMU */
#define VPMU_REFUSED_POLICY		5	/* the operator has disabled such events */
#define VPMU_REFUSED_OTHER		6
#define VPMU_REFUSED_SEVERAL_PMUS	7	/* the VMM's CPUs may have different core PMUs */
#define VPMU_REFUSED_MEDIATED		8	/* a hardware event blocks VMs with mediated PMUs */

/*
 * Values of vpmu_control_header::op. The comment beside each value names the
 * structs of the request and the reply.
 */
#define VPMU_CONTROL_OPEN	1	/* vpmu_open_request, vpmu_open_reply */
#define VPMU_CONTROL_CLOSE	2	/* header only, vpmu_control_reply */
#define VPMU_CONTROL_MAP	3	/* vpmu_map_request + pages, vpmu_control_reply */
#define VPMU_CONTROL_UNMAP	4	/* header only, vpmu_control_reply */
#define VPMU_CONTROL_CATALOGUE	5	/* vpmu_catalogue_request, vpmu_control_reply + entries */
#define VPMU_CONTROL_TASK_PAGE	6	/* vpmu_task_page_request, vpmu_control_reply */
#define VPMU_CONTROL_REDIRECT	7	/* vpmu_redirect_request, vpmu_control_reply */
#define VPMU_CONTROL_PAUSE	8	/* vpmu_pause_request, vpmu_control_reply */
#define VPMU_CONTROL_MAP_AUX	9	/* vpmu_map_request + pages, vpmu_control_reply */
#define VPMU_CONTROL_UNMAP_AUX	10	/* header only, vpmu_control_reply */
#define VPMU_CONTROL_DETACH	11	/* vpmu_detach_request, vpmu_control_reply */
#define VPMU_CONTROL_ATTACH	12	/* header only, vpmu_control_reply */
#define VPMU_CONTROL_PERSISTENT	13	/* vpmu_persistent_request, vpmu_control_reply + events */
#define VPMU_CONTROL_LINK	14	/* vpmu_link_request, vpmu_control_reply */
#define VPMU_CONTROL_WAKEUP	15	/* vpmu_wakeup_request, vpmu_control_reply */
#define VPMU_CONTROL_FEATURES	16	/* vpmu_features_request, vpmu_control_reply */
#define VPMU_CONTROL_SIGNAL	17	/* vpmu_signal_request, vpmu_control_reply */

/**
 * struct vpmu_control_header - the start of every control request
 * @op: VPMU_CONTROL_*
 * @reserved: zero
 * @event: the event's id; zero if the operation does not concern an event
 */
struct vpmu_control_header {
	__le32 op;
	__le32 reserved;
	__le64 event;
};

/**
 * struct vpmu_control_reply - the reply, or the start of the reply, to every
 *                             request except VPMU_CONTROL_OPEN
 * @status: 0 or a positive Linux errno
 * @value: for the catalogue and the list of persistent events: the number of
 *         entries that follow; for VPMU_CONTROL_MAP with VPMU_MAP_WINDOW: the
 *         number of the ring's first page in the window; else zero
 */
struct vpmu_control_reply {
	__le32 status;
	__le32 value;
};

/*
 * Value of vpmu_open_request::context for an event that follows a task: the
 * driver schedules the event with commands on the vCPU queues.
 */
#define VPMU_CONTEXT_TASK	0xffffffffU

/* vpmu_open_request::flags */
#define VPMU_OPEN_ENABLED		(1U << 0)
#define VPMU_OPEN_EXCLUDE_USER		(1U << 1)
#define VPMU_OPEN_EXCLUDE_KERNEL	(1U << 2)
#define VPMU_OPEN_WATERMARK		(1U << 3)	/* wakeup is in bytes */

#define VPMU_OPEN_FREQ			(1U << 4)	/* period is in samples a second */
#define VPMU_OPEN_SAMPLE_ID_ALL		(1U << 5)
#define VPMU_OPEN_BACKWARD		(1U << 6)	/* its ring is written backwards */
#define VPMU_OPEN_PINNED		(1U << 7)	/* fails if not always counted */
#define VPMU_OPEN_INHERIT_STAT		(1U << 8)	/* PERF_RECORD_READ at close */
#define VPMU_OPEN_EXCLUDE_CHAIN_KERNEL	(1U << 9)
#define VPMU_OPEN_EXCLUDE_CHAIN_USER	(1U << 10)
#define VPMU_OPEN_AUX_START_PAUSED	(1U << 11)	/* a trace that starts paused */
#define VPMU_OPEN_AUX_PAUSE		(1U << 12)	/* an overflow pauses the leader's trace */
#define VPMU_OPEN_AUX_RESUME		(1U << 13)	/* an overflow resumes the leader's trace */
#define VPMU_OPEN_PAUSED		(1U << 14)	/* paused until its starter overflows */
#define VPMU_OPEN_PERSISTENT		(1U << 15)	/* persistent from the start */
#define VPMU_OPEN_EXCLUDE_HOST		(1U << 16)	/* exclude the host's work */

/*
 * Bits of vpmu_open_request::sample_type that can be set: IP, TID, TIME, ADDR,
 * READ, CALLCHAIN, ID, CPU, PERIOD, STREAM_ID, REGS_USER, STACK_USER,
 * IDENTIFIER, REGS_INTR
 */
#define VPMU_SAMPLE_ALLOWED	0x533ffU
/*
 * Bits of vpmu_open_request::read_format that can be set: TOTAL_TIME_ENABLED,
 * TOTAL_TIME_RUNNING, ID, GROUP, LOST
 */
#define VPMU_READ_ALLOWED	0x1fU
/* Maximum number of addresses in a call chain */
#define VPMU_MAX_STACK		1024
/* The same if a request has no maximum */
#define VPMU_DEFAULT_STACK	127

/**
 * struct vpmu_open_request - VPMU_CONTROL_OPEN
 * @header: its field event is zero
 * @kind: VPMU_KIND_*
 * @context: a vCPU index or VPMU_CONTEXT_TASK
 * @config: selects an event of @kind
 * @period: events between samples, or samples per second with VPMU_OPEN_FREQ;
 *          zero: the event only counts
 * @sample_type: perf's PERF_SAMPLE_*, a subset of VPMU_SAMPLE_ALLOWED
 * @flags: VPMU_OPEN_*
 * @wakeup: records between wakeups, or bytes with VPMU_OPEN_WATERMARK; zero: a
 *          wakeup at every full page
 * @engine: VPMU_ENGINE_*
 * @max_stack: maximum number of addresses in a call chain; zero:
 *             VPMU_DEFAULT_STACK
 * @parent: zero, or the id of the event that this event is inherited from; this
 *          event's records go to the parent's ring, and contain the parent's id
 *          in their ID field
 * @leader: zero, or the id of the leader of the event's group
 * @read_format: perf's PERF_FORMAT_*, a subset of VPMU_READ_ALLOWED, for
 *               PERF_SAMPLE_READ and PERF_RECORD_READ
 * @regs_user: mask of the registers in PERF_SAMPLE_REGS_USER
 * @regs_intr: mask of the registers in PERF_SAMPLE_REGS_INTR
 * @stack_user: size of the stack in PERF_SAMPLE_STACK_USER, in bytes
 * @aux_watermark: for a trace: AUX bytes between wakeups; zero: half of the AUX
 *                 area
 */
struct vpmu_open_request {
	struct vpmu_control_header header;
	__le32 kind;
	__le32 context;
	__le64 config;
	__le64 period;
	__le64 sample_type;
	__le32 flags;
	__le32 wakeup;
	__le32 engine;
	__le32 max_stack;
	__le64 parent;
	__le64 leader;
	__le64 read_format;
	__le64 regs_user;
	__le64 regs_intr;
	__le32 stack_user;
	__le32 aux_watermark;
};

/**
 * struct vpmu_open_reply - the reply to VPMU_CONTROL_OPEN
 * @status: 0 or a positive Linux errno
 * @engine: if @status is zero: the engine that makes the samples, or
 *          VPMU_ENGINE_ANY for an event without a period; a trace with
 *          VPMU_EXIT_ALL has VPMU_ENGINE_BATCHED. Otherwise: the reason why the
 *          host refused the event, VPMU_REFUSED_*, or VPMU_REFUSED_NOT if the
 *          device refused it
 * @id: the event's id: never zero, and not reused while the VM lives
 */
struct vpmu_open_reply {
	__le32 status;
	__le32 engine;
	__le64 id;
};

/*
 * Bits of vpmu_map_request::flags.
 *
 * The reader moves data_tail or aux_tail, and the device keeps data that the
 * reader has not read. Without this flag, new data overwrites the oldest data.
 */
#define VPMU_MAP_WRITABLE	(1U << 0)
/*
 * For an AUX area of an event without a ring: the driver maintains the area's
 * head and tail, and grants space to the trace with VPMU_COMMAND_AUX_BEGIN.
 */
#define VPMU_MAP_DRIVER_OWNED		(1U << 1)
/*
 * For a persistent event's ring: the device places the ring in the window, so
 * no page addresses follow the request.
 */
#define VPMU_MAP_WINDOW		(1U << 2)

/**
 * struct vpmu_map_request - VPMU_CONTROL_MAP, VPMU_CONTROL_MAP_AUX; followed by
 *                           @pages 64-bit page addresses
 * @header: names the event
 * @pages: number of pages: for a ring 1 or 1 + 2^n, for an AUX area 2^n
 * @flags: VPMU_MAP_*
 */
struct vpmu_map_request {
	struct vpmu_control_header header;
	__le32 pages;
	__le32 flags;
};

/**
 * struct vpmu_redirect_request - VPMU_CONTROL_REDIRECT
 * @header: names the event whose records are redirected
 * @target: the event whose ring receives the records; zero ends the redirection
 */
struct vpmu_redirect_request {
	struct vpmu_control_header header;
	__le64 target;
};

/**
 * struct vpmu_pause_request - VPMU_CONTROL_PAUSE
 * @header: names an event that writes to the ring
 * @paused: 1 to pause the ring, 0 to resume it; overflows are lost while it is
 *          paused
 * @reserved: zero
 */
struct vpmu_pause_request {
	struct vpmu_control_header header;
	__le32 paused;
	__le32 reserved;
};

/* vpmu_link_request::role: the effect of an overflow on the target */
#define VPMU_LINK_STARTER	1
#define VPMU_LINK_STOPPER	2

/**
 * struct vpmu_link_request - VPMU_CONTROL_LINK
 * @header: names the event whose overflows start or stop @target
 * @target: the event to start or stop
 * @role: VPMU_LINK_*
 * @reserved: zero
 */
struct vpmu_link_request {
	struct vpmu_control_header header;
	__le64 target;
	__le32 role;
	__le32 reserved;
};

/**
 * struct vpmu_wakeup_request - VPMU_CONTROL_WAKEUP
 * @header: names the event
 * @every: the wakeup interval in @unit, 1 to 2^32 - 1
 * @unit: VPMU_WAKEUP_*
 * @reserved: zero
 */
struct vpmu_wakeup_request {
	struct vpmu_control_header header;
	__le64 every;
	__le32 unit;
	__le32 reserved;
};

/**
 * struct vpmu_signal_request - VPMU_CONTROL_SIGNAL
 * @header: names the event
 * @own: 1: the wakeups of the event's family are reported in notices that name
 *       this family; 0: they share the notices of the ring
 * @reserved: zero
 */
struct vpmu_signal_request {
	struct vpmu_control_header header;
	__le32 own;
	__le32 reserved;
};

/**
 * struct vpmu_detach_request - VPMU_CONTROL_DETACH
 * @header: names the event
 * @name: lower-case letters, digits, "-" and "_", starting with a letter,
 *        padded with zeros; if all bytes are zero, the event keeps its name; an
 *        event without a name is then named "event" followed by its id
 */
struct vpmu_detach_request {
	struct vpmu_control_header header;
	char name[VPMU_PERSISTENT_NAME];
};

/**
 * struct vpmu_persistent_request - VPMU_CONTROL_PERSISTENT
 * @header: its field event is zero
 * @after: list only events with a higher id
 * @count: maximum number of events to list
 * @reserved: zero
 */
struct vpmu_persistent_request {
	struct vpmu_control_header header;
	__le64 after;
	__le32 count;
	__le32 reserved;
};

/**
 * struct vpmu_persistent_event - the current state of a persistent event
 * @id: the event's id
 * @open: a request that would open an identical event, with the event's current
 *        VPMU_OPEN_ENABLED, period, wakeup and engine
 * @pages: number of pages of the event's ring, including the metadata page;
 *         zero if it has no ring
 * @map: VPMU_MAP_* flags of the ring
 * @window_page: with VPMU_MAP_WINDOW: the number of the ring's first page in
 *               the window
 * @flags: VPMU_PERSISTENT_*
 * @name: as for vpmu_detach_request::name
 */
struct vpmu_persistent_event {
	__le64 id;
	struct vpmu_open_request open;
	__le32 pages;
	__le32 map;
	__le32 window_page;
	__le32 flags;
	char name[VPMU_PERSISTENT_NAME];
};

/**
 * struct vpmu_catalogue_request - VPMU_CONTROL_CATALOGUE
 * @header: its field event is zero
 * @first: first entry to read
 * @count: maximum number of entries to read
 */
struct vpmu_catalogue_request {
	struct vpmu_control_header header;
	__le32 first;
	__le32 count;
};

/**
 * struct vpmu_features_request - VPMU_CONTROL_FEATURES
 * @header: its field event is zero
 * @features: bits of vpmu_config::features to accept in addition to the
 *            negotiated ones
 */
struct vpmu_features_request {
	struct vpmu_control_header header;
	__le64 features;
};

/**
 * struct vpmu_task_page_request - VPMU_CONTROL_TASK_PAGE
 * @header: its field event is zero
 * @vcpu: the vCPU that the page is for
 * @reserved: zero
 * @address: guest-physical address, page-aligned; zero removes the page
 */
struct vpmu_task_page_request {
	struct vpmu_control_header header;
	__le32 vcpu;
	__le32 reserved;
	__le64 address;
};

/* Entries of vpmu_task_page::history */
#define VPMU_TASK_HISTORY	254

/**
 * struct vpmu_task_switch - a switch to a task
 * @pid: process id
 * @tid: thread id
 * @since: guest TSC at the switch
 */
struct vpmu_task_switch {
	__le32 pid;
	__le32 tid;
	__le64 since;
};

/**
 * struct vpmu_task_page - the running and previous tasks of a vCPU
 * @pid: process id; written with @tid as one aligned 64-bit word
 * @tid: thread id
 * @user_regs: guest-virtual address of the task's struct pt_regs; zero for a
 *             task without user registers
 * @switches: number of switches written to @history; the driver stores it with
 *            release semantics, after it has written the entry
 * @reserved: zero
 * @history: a ring of switches: switch n, counted from 0, is in entry
 *           n % VPMU_TASK_HISTORY
 */
struct vpmu_task_page {
	__le32 pid;
	__le32 tid;
	__le64 user_regs;
	__le64 switches;
	__le64 reserved;
	struct vpmu_task_switch history[VPMU_TASK_HISTORY];
};

/* vpmu_command::op */
#define VPMU_COMMAND_VCPU	1	/* identify the vCPU: the reply's value is its index */
#define VPMU_COMMAND_ENABLE	2	/* leave "off"; the count continues */
#define VPMU_COMMAND_DISABLE	3	/* enter "off" */
#define VPMU_COMMAND_IN		4	/* a task event's task starts to run on this vCPU */
#define VPMU_COMMAND_OUT	5	/* the task stops running on this vCPU */
#define VPMU_COMMAND_READ	6	/* only reply; write a pending PERF_RECORD_LOST */
#define VPMU_COMMAND_RESET	7	/* set the count to zero; keep the times */
#define VPMU_COMMAND_PERIOD	8	/* set the period or frequency, from now on */
#define VPMU_COMMAND_REFRESH	9	/* enable for @value overflows, then enter "off" */
#define VPMU_COMMAND_AUX_BEGIN	10	/* write @room bytes of the AUX area, starting at @value */
#define VPMU_COMMAND_AUX_END	11	/* withdraw the room; reply with head and lost bytes */
#define VPMU_COMMAND_FLUSH	12	/* write pending data; event 0: see vpmu_command::event */
#define VPMU_COMMAND_PROMPT	13	/* @value 1: each sample wakes at once; 0: no longer */

/**
 * struct vpmu_command - one command on a vCPU queue
 * @op: VPMU_COMMAND_*
 * @reserved: zero
 * @event: the event's id; zero for VPMU_COMMAND_VCPU, and for a
 *         VPMU_COMMAND_FLUSH that flushes all persistent events of this vCPU
 * @value: the new period for VPMU_COMMAND_PERIOD, the number of overflows to
 *         allow for VPMU_COMMAND_REFRESH, the head for VPMU_COMMAND_AUX_BEGIN,
 *         1 or 0 for VPMU_COMMAND_PROMPT, else zero
 * @room: for VPMU_COMMAND_AUX_BEGIN: bytes that the trace may write; else zero
 */
struct vpmu_command {
	__le32 op;
	__le32 reserved;
	__le64 event;
	__le64 value;
	__le64 room;
};

/* vpmu_reply::state */
#define VPMU_STATE_ERROR	(-2)	/* no longer counted; the count is final */
#define VPMU_STATE_OFF		(-1)	/* disabled */
#define VPMU_STATE_INACTIVE	0	/* enabled; context not running */
#define VPMU_STATE_ACTIVE	1	/* counting */

/**
 * struct vpmu_reply - the reply to a command: the event's state after the
 *                     command
 * @status: 0 or a positive Linux errno
 * @state: VPMU_STATE_*, two's complement
 * @value: the count; for VPMU_COMMAND_VCPU the vCPU's index, for
 *         VPMU_COMMAND_AUX_END the head that the trace has reached
 * @time_enabled: nanoseconds for which the event was enabled while its context
 *                ran
 * @time_running: nanoseconds of @time_enabled during which the event was
 *                actually counted
 * @lost: overflows without a record; for a trace, lost bytes
 */
struct vpmu_reply {
	__le32 status;
	__le32 state;
	__le64 value;
	__le64 time_enabled;
	__le64 time_running;
	__le64 lost;
};

/* vpmu_notice::kind */
#define VPMU_NOTICE_WAKEUP	1	/* the event's ring or AUX area needs a wakeup */
#define VPMU_NOTICE_ERROR	2	/* the event is in VPMU_STATE_ERROR */
#define VPMU_NOTICE_LIMIT	3	/* the overflows of VPMU_COMMAND_REFRESH are used up */
#define VPMU_NOTICE_AUX		4	/* a trace in a driver-owned area needs AUX_END */
#define VPMU_NOTICE_PERSISTENT	5	/* the host started, ended or renamed persistent events */

/* Maximum number of wakeups in one notice */
#define VPMU_NOTICE_COUNT	256

/**
 * struct vpmu_notice - a notice from the device, on the event queue
 * @kind: VPMU_NOTICE_*
 * @value: for VPMU_NOTICE_WAKEUP and VPMU_NOTICE_LIMIT: the number of wakeups
 *         or used-up limits that this notice reports, 1 to VPMU_NOTICE_COUNT;
 *         for VPMU_NOTICE_ERROR: the reason why the host refused the event's
 *         counter, VPMU_REFUSED_*, or VPMU_REFUSED_NOT if the host revoked an
 *         open counter; else zero
 * @event: the event; for VPMU_NOTICE_WAKEUP: the parent of one of the families
 *         that write to the ring or AUX area
 */
struct vpmu_notice {
	__le32 kind;
	__le32 value;
	__le64 event;
};

#endif /* _VPMU_ABI_H */

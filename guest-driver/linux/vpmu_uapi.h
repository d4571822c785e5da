/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note OR Apache-2.0 OR MIT */
/*
 * /dev/vpmu: what events of the paravirtual PMU have beyond perf's interface.
 *
 * Programs open events with perf_event_open(2): see VPMU_CONFIG and
 * VPMU_CONFIG1_*. If an event has VPMU_CONFIG1_RING, the host writes its records
 * directly to pages of the program. VPMU_IOC_RING returns the ring descriptor
 * through which the program maps these pages and waits for records.
 */
#ifndef _UAPI_VPMU_H
#define _UAPI_VPMU_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* struct vpmu_info::count_mode, for hardware events */
#define VPMU_COUNT_GUEST	0	/* only while the guest runs */
#define VPMU_COUNT_VCPU		1	/* also while the host works for the vCPU */

/**
 * struct vpmu_info - properties of the device
 * @version: version of the device interface
 * @vcpus: number of vCPUs on which the device can count events
 * @max_events: maximum number of open events
 * @max_ring_pages: maximum number of data pages of one ring
 * @catalogue_len: number of catalogue entries
 * @count_mode: VPMU_COUNT_*
 * @time_zero: see @time_mult
 * @time_mult: record time = time_zero + ((tsc * time_mult) >> time_shift)
 * @time_shift: see @time_mult
 * @pmu_type: perf_event_attr::type of the vpmu PMU
 * @tsc_khz: guest TSC frequency
 * @max_sample_rate: maximum samples per second of one event
 * @max_aux_pages: maximum number of pages of one AUX area
 * @max_persistent: maximum number of the guest's persistent events
 * @persistent_type: perf_event_attr::type of the persistent PMU
 */
struct vpmu_info {
	__u32 version;
	__u32 vcpus;
	__u32 max_events;
	__u32 max_ring_pages;
	__u32 catalogue_len;
	__u32 count_mode;
	__u64 time_zero;
	__u32 time_mult;
	__u32 time_shift;
	__u32 pmu_type;
	__u32 tsc_khz;
	__u32 max_sample_rate;
	__u32 max_aux_pages;
	__u32 max_persistent;
	__u32 persistent_type;
};

/* The sampling engine: VPMU_CONFIG1_ENGINE and struct vpmu_event_state::engine */
#define VPMU_ENGINE_ANY		0	/* the device chooses; or the event has no samples */
#define VPMU_ENGINE_EXIT	1	/* each overflow makes the vCPU exit: exact on any host */
#define VPMU_ENGINE_BATCHED	2	/* the host samples: no exit per sample */

/**
 * struct vpmu_event_state - the device's view of an open event
 * @id: the event's id on the device, which records that the host writes contain
 * @engine: the engine of its samples, VPMU_ENGINE_*
 * @reserved: zero
 */
struct vpmu_event_state {
	__u64 id;
	__u32 engine;
	__u32 reserved;
};

/* Size in bytes of a persistent event's name; the last byte is always NUL */
#define VPMU_PERSISTENT_NAME	40
/* Size in bytes of struct perf_event_attr, as of Linux 6.1 */
#define VPMU_ATTR_SIZE		128

/**
 * struct vpmu_detach - make an event persistent
 * @id: output: the event's id; to open the event again, set config to it
 * @name: at most 39 lower-case letters, digits, "-" and "_", starting with a
 *        letter. If all bytes are zero, an event that has a name keeps it, and
 *        any other event gets the name "event" followed by its id
 */
struct vpmu_detach {
	__u64 id;
	char name[VPMU_PERSISTENT_NAME];
};

/**
 * struct vpmu_persistent - list persistent events
 * @after: list only events with a higher id
 * @count: maximum number of events to list
 * @reserved: zero
 * @entries: address of an array of struct vpmu_persistent_entry
 */
struct vpmu_persistent {
	__u64 after;
	__u32 count;
	__u32 reserved;
	__u64 entries;
};

/**
 * struct vpmu_persistent_entry - the current state of a persistent event
 * @id: the event's id; to open the event again, set config to it
 * @name: its name in sysfs
 * @cpu: the event's CPU; to open the event again, pass this CPU. All ones while
 *       the CPU is unknown
 * @pages: number of pages that a mapping of its ring must have, including the
 *         metadata page; zero if it has no ring yet
 * @engine: its sampling engine, VPMU_ENGINE_*
 * @flags: VPMU_PERSISTENT_*
 * @attr: its struct perf_event_attr, of VPMU_ATTR_SIZE bytes; the fields
 *        disabled and sample_period have their current values
 */
struct vpmu_persistent_entry {
	__u64 id;
	char name[VPMU_PERSISTENT_NAME];
	__u32 cpu;
	__u32 pages;
	__u32 engine;
	__u32 flags;
	__u8 attr[VPMU_ATTR_SIZE];
};

/* struct vpmu_persistent_entry::flags */
#define VPMU_PERSISTENT_OPERATOR	(1U << 0)	/* host-owned: read, flush, map read-only */
#define VPMU_PERSISTENT_WINDOW		(1U << 1)	/* its ring outlives a reset of the guest */
#define VPMU_PERSISTENT_OVERWRITE	(1U << 2)	/* its ring is mapped read-only */

/* struct vpmu_wakeup::unit */
#define VPMU_WAKEUP_RECORDS	1
#define VPMU_WAKEUP_BYTES	2	/* of records */

/**
 * struct vpmu_wakeup - the wakeup interval of an event
 * @every: the interval in @unit, 1 to 2^32 - 1; the call starts a new interval
 * @unit: VPMU_WAKEUP_*
 * @reserved: zero
 */
struct vpmu_wakeup {
	__u64 every;
	__u32 unit;
	__u32 reserved;
};

/**
 * struct vpmu_perf - a call on a file descriptor of perf_event_open(2)
 * @fd: a descriptor of an event of this device's PMUs
 * @call: VPMU_IOC_EVENT, _FLUSH, _DETACH, _ATTACH, _SET_STARTER or _SET_STOPPER
 * @arg: the argument of @call: zero, an address, or the target's descriptor,
 *       which is also from perf_event_open(2)
 */
struct vpmu_perf {
	__s32 fd;
	__u32 call;
	__u64 arg;
};

/**
 * struct vpmu_catalogue - read catalogue entries
 * @first: first entry to read
 * @count: maximum number of entries to read
 * @entries: address of an array of struct vpmu_catalogue_entry (256 bytes each)
 */
struct vpmu_catalogue {
	__u32 first;
	__u32 count;
	__u64 entries;
};

/**
 * struct vpmu_catalogue_entry - one event that this host can count
 * @kind: VPMU_KIND_*; see VPMU_CONFIG
 * @flags: VPMU_CATALOGUE_*
 * @config: selects an event of @kind
 * @name: name of the event, as "vperf -e" accepts it
 * @unit: unit of the count
 * @source: description of the host's counter for the event
 * @counts: description of the counted events
 */
struct vpmu_catalogue_entry {
	__u32 kind;
	__u32 flags;
	__u64 config;
	char name[40];
	char unit[16];
	char source[56];
	char counts[128];
};

/* struct vpmu_catalogue_entry::kind */
#define VPMU_KIND_HARDWARE	6	/* config: PERF_COUNT_HW_* */
#define VPMU_KIND_SOFTWARE	1	/* events of the vCPU thread; config: PERF_COUNT_SW_* */
#define VPMU_KIND_HW_CACHE	3	/* config: as for PERF_TYPE_HW_CACHE */
#define VPMU_KIND_RAW		4	/* raw hardware events, where the operator allows them */
#define VPMU_KIND_TSC		0x100	/* guest TSC ticks; config 0 */
#define VPMU_KIND_EXITS		0x101	/* VM exits; config: VPMU_EXIT_* */
#define VPMU_KIND_HALTS		0x102	/* times that the vCPU halted; config 0 */
#define VPMU_KIND_GUEST_TIME	0x103	/* ns the vCPU thread ran inside KVM_RUN; config 0 */
#define VPMU_KIND_MARK		0x104	/* marks; config: their value, or VPMU_MARK_ANY */
#define VPMU_KIND_EXIT_TRACE	0x105	/* AUX: exits; config: VPMU_EXIT_* */
#define VPMU_KIND_SAMPLE_TRACE	0x106	/* AUX: samples; config: VPMU_PACE_* */
#define VPMU_KIND_HOST_TRACE	0x107	/* AUX: the trace of the host's own PMU; refused */
#define VPMU_KIND_VMM_TRACE	0x108	/* AUX: a trace of the VMM; config: the producer */

/*
 * config of VPMU_KIND_MARK: counts marks of any value. PERF_SAMPLE_ADDR of a
 * sample is the value of the mark.
 */
#define VPMU_MARK_ANY		(1ULL << 32)

/* config of VPMU_KIND_SAMPLE_TRACE: the unit of the period */
#define VPMU_PACE_CPU_CLOCK	0	/* ns of the host's clock on the vCPU thread */
#define VPMU_PACE_EXITS		1	/* exits that reached the VMM */
#define VPMU_PACE_CYCLES	2
#define VPMU_PACE_INSTRUCTIONS	3

/* config of VPMU_KIND_EXITS and VPMU_KIND_EXIT_TRACE */
#define VPMU_EXIT_ALL		0	/* every exit, also those that the host kernel handles */
#define VPMU_EXIT_USER		1	/* every exit that reached the VMM */
#define VPMU_EXIT_IO		2	/* port I/O that reached the VMM */
#define VPMU_EXIT_MMIO		3	/* memory-mapped I/O that reached the VMM */
#define VPMU_EXIT_HLT		4	/* HLT that reached the VMM */
#define VPMU_EXIT_SIGNAL	5	/* a signal to the vCPU thread */
#define VPMU_EXIT_OTHER		6	/* any other exit that reached the VMM */

/* struct vpmu_catalogue_entry::flags */
#define VPMU_CATALOGUE_SAMPLES		(1U << 0)	/* can sample */
#define VPMU_CATALOGUE_GUEST_ONLY	(1U << 1)	/* host work is excluded */
#define VPMU_CATALOGUE_ANY_CONFIG	(1U << 2)	/* any config value is valid */
#define VPMU_CATALOGUE_EXCLUDES		(1U << 3)	/* honours exclude_user, exclude_kernel */
#define VPMU_CATALOGUE_AUX		(1U << 4)	/* writes packets to an AUX area */
/* Bits 16-23: VPMU_FORMAT_* */
#define VPMU_CATALOGUE_FORMAT_SHIFT	16

/*
 * Packets in an AUX area, each at a multiple of VPMU_PACKET_ALIGN bytes from
 * the start of the area. All integers are little-endian.
 */
#define VPMU_PACKET_ALIGN	64

/* Formats of a trace */
#define VPMU_FORMAT_EXITS	1	/* vpmu_exit_packet, vpmu_sync_packet */
#define VPMU_FORMAT_SAMPLES	2	/* vpmu_sample_packet, vpmu_sync_packet */
#define VPMU_FORMAT_VMM		128	/* first format of VPMU_KIND_VMM_TRACE */

/* First byte of a packet */
#define VPMU_PACKET_PADDING	0	/* VPMU_PACKET_ALIGN bytes without meaning */
#define VPMU_PACKET_EXIT	1
#define VPMU_PACKET_SAMPLE	2
#define VPMU_PACKET_SYNC	3

#define VPMU_SYNC_MAGIC		0x434e5953554d5056ULL	/* "VPMUSYNC" */

/* vpmu_sync_packet::flags */
#define VPMU_SYNC_START		(1U << 0)	/* the trace begins, or was off just before */
#define VPMU_SYNC_LOSS		(1U << 1)	/* packets right before this one were lost */
#define VPMU_SYNC_RESUME	(1U << 2)	/* the trace was paused before this packet */
#define VPMU_SYNC_PAGE		(1U << 3)	/* a page of the area begins */

/**
 * struct vpmu_sync_packet - a position where a reader can start to decode the
 *                           trace
 * @kind: VPMU_PACKET_SYNC
 * @flags: VPMU_SYNC_*
 * @format: VPMU_FORMAT_*
 * @vcpu: vCPU of the packets that follow
 * @magic: VPMU_SYNC_MAGIC
 * @event: id of the trace's event
 * @time: guest time in nanoseconds
 * @tsc: the guest's TSC at that time
 * @sequence: number of the next packet
 * @lost: bytes of the trace lost so far
 * @config: the event's config
 */
struct vpmu_sync_packet {
	__u8 kind;
	__u8 flags;
	__le16 format;
	__le32 vcpu;
	__le64 magic;
	__le64 event;
	__le64 time;
	__le64 tsc;
	__le64 sequence;
	__le64 lost;
	__le64 config;
};

/* vpmu_exit_packet::flags, vpmu_sample_packet::flags */
#define VPMU_PACKET_USER	(1U << 0)	/* the vCPU was in guest user mode */
#define VPMU_PACKET_IP		(1U << 1)	/* address and mode are known */
#define VPMU_PACKET_CUT		(1U << 2)	/* @outside is incomplete */
#define VPMU_PACKET_HARDWARE	(1U << 3)	/* @reason is the hardware's number */
#define VPMU_PACKET_REGS	(1U << 4)	/* @regs are known */
#define VPMU_PACKET_COLLISION	(1U << 5)	/* represents several overflows */

/*
 * vpmu_exit_packet::detail for port I/O and memory-mapped I/O. Bits 0-7 are the
 * size of an access in bytes.
 */
#define VPMU_DETAIL_WRITE	(1U << 8)
#define VPMU_DETAIL_COUNT_SHIFT	32	/* of port I/O: number of accesses */

/**
 * struct vpmu_exit_packet - one exit of a vCPU
 * @kind: VPMU_PACKET_EXIT
 * @flags: VPMU_PACKET_*
 * @reason: VPMU_EXIT_*, or the hardware's number
 * @vcpu: the vCPU
 * @time: guest time at the exit, nanoseconds
 * @ip: linear address of the instruction at the exit
 * @outside: nanoseconds until guest re-entry
 * @qualification: port or guest-physical address; with VPMU_PACKET_HARDWARE see
 *                 vpmu/SPEC.md
 * @detail: VPMU_DETAIL_*; with VPMU_PACKET_HARDWARE see vpmu/SPEC.md
 * @pid: the running process
 * @tid: the running thread
 * @sequence: number of the packet in its trace; lost packets are numbered, too
 */
struct vpmu_exit_packet {
	__u8 kind;
	__u8 flags;
	__le16 reason;
	__le32 vcpu;
	__le64 time;
	__le64 ip;
	__le64 outside;
	__le64 qualification;
	__le64 detail;
	__le32 pid;
	__le32 tid;
	__le64 sequence;
};

/**
 * struct vpmu_sample_packet - one sample with registers
 * @kind: VPMU_PACKET_SAMPLE
 * @flags: VPMU_PACKET_*
 * @reserved: zero
 * @vcpu: the vCPU
 * @time: guest time, nanoseconds
 * @ip: linear address of the next instruction
 * @period: units (see VPMU_PACE_*) counted since the previous sample
 * @pid: the running process
 * @tid: the running thread
 * @sequence: number of the packet in its trace; lost packets are numbered, too
 * @reserved_1: zero
 * @regs: on x86-64 in the order of perf's register numbers; on aarch64 x0 to
 *        x8, x19 to x29, lr, sp, pc, pstate
 */
struct vpmu_sample_packet {
	__u8 kind;
	__u8 flags;
	__le16 reserved;
	__le32 vcpu;
	__le64 time;
	__le64 ip;
	__le64 period;
	__le32 pid;
	__le32 tid;
	__le64 sequence;
	__le64 reserved_1[2];
	__le64 regs[24];
};

/*
 * perf_event_attr::config of the vpmu PMU: bits 48-63 are the kind, bits 0-47
 * select an event of that kind.
 */
#define VPMU_CONFIG_KIND_SHIFT	48
#define VPMU_CONFIG(kind, event) \
	(((__u64)(kind) << VPMU_CONFIG_KIND_SHIFT) | (event))

/*
 * perf_event_attr::config1 of the vpmu PMU. Options that stock perf can use are
 * terms in sysfs, with these names in lower case.
 */
/* enable_on_starter: the event is paused until its starter overflows */
#define VPMU_CONFIG1_ENABLE_ON_STARTER	(1U << 0)
/* engine: the engine that makes the samples, VPMU_ENGINE_* */
#define VPMU_CONFIG1_ENGINE_SHIFT	1
#define VPMU_CONFIG1_ENGINE		(3U << VPMU_CONFIG1_ENGINE_SHIFT)
/* The host writes the event's records to a ring: see VPMU_IOC_RING */
#define VPMU_CONFIG1_RING		(1U << 3)
/* persistent: the event outlives its descriptors, as after VPMU_IOC_DETACH */
#define VPMU_CONFIG1_PERSISTENT		(1U << 4)
/* The trace is paused until a member of its group resumes it */
#define VPMU_CONFIG1_AUX_START_PAUSED	(1U << 5)
/* An overflow pauses, or resumes, the trace that leads the group */
#define VPMU_CONFIG1_AUX_PAUSE		(1U << 6)
#define VPMU_CONFIG1_AUX_RESUME		(1U << 7)

#define VPMU_IOC_MAGIC		0xb6

#define VPMU_IOC_INFO		_IOR(VPMU_IOC_MAGIC, 0, struct vpmu_info)
/*
 * On /dev/vpmu: returns a ring descriptor, which is closed on exec. The argument
 * is the descriptor of an event that was opened with VPMU_CONFIG1_RING, or with
 * the type of the persistent PMU. The ring descriptor keeps the event open. It
 * supports mmap(2) of the ring and of an AUX area, poll(2), O_ASYNC,
 * PERF_EVENT_IOC_ID, _SET_OUTPUT (to another ring descriptor), _PAUSE_OUTPUT,
 * VPMU_IOC_WAKEUP and VPMU_IOC_FLUSH. PERF_EVENT_IOC_RESET also resets the counts
 * in the ring's records and pages, and PERF_EVENT_IOC_REFRESH is exact, also while
 * the event is active. If the event is persistent, PERF_EVENT_IOC_ENABLE, _DISABLE
 * and _PERIOD change the event itself; on the descriptor from perf_event_open(2),
 * they change only what it shows.
 */
#define VPMU_IOC_RING		_IO(VPMU_IOC_MAGIC, 1)
/* Returns the number of entries written. */
#define VPMU_IOC_CATALOGUE	_IOW(VPMU_IOC_MAGIC, 2, struct vpmu_catalogue)
/* Places a mark on the caller's CPU; the argument is the mark's value. */
#define VPMU_IOC_MARK		_IO(VPMU_IOC_MAGIC, 3)

/* By VPMU_IOC_PERF: describes the event. */
#define VPMU_IOC_EVENT		_IOR(VPMU_IOC_MAGIC, 4, struct vpmu_event_state)

/*
 * On /dev/vpmu: lists persistent events; returns the number of entries written.
 */
#define VPMU_IOC_PERSISTENT	_IOW(VPMU_IOC_MAGIC, 5, struct vpmu_persistent)
/*
 * Writes pending samples and traces to the mapped pages and wakes pollers
 * before it returns. On a ring descriptor, or by VPMU_IOC_PERF: flushes the event
 * and the events that inherit it. On /dev/vpmu: flushes all persistent events.
 */
#define VPMU_IOC_FLUSH		_IO(VPMU_IOC_MAGIC, 6)

/*
 * By VPMU_IOC_PERF: makes the event persistent; it outlives its descriptors.
 */
#define VPMU_IOC_DETACH		_IOWR(VPMU_IOC_MAGIC, 7, struct vpmu_detach)
/*
 * By VPMU_IOC_PERF: makes the event non-persistent, so that it ends when its last
 * descriptor is closed and its last mapping is gone.
 */
#define VPMU_IOC_ATTACH		_IO(VPMU_IOC_MAGIC, 8)
/*
 * By VPMU_IOC_PERF: makes overflows of this event start or stop another event,
 * the target. The argument is the target's descriptor.
 */
#define VPMU_IOC_SET_STARTER	_IO(VPMU_IOC_MAGIC, 9)
#define VPMU_IOC_SET_STOPPER	_IO(VPMU_IOC_MAGIC, 10)

/*
 * On /dev/vpmu: makes a call for an event, because perf core does not pass
 * ioctls to a PMU. See struct vpmu_perf.
 */
#define VPMU_IOC_PERF		_IOW(VPMU_IOC_MAGIC, 11, struct vpmu_perf)

/*
 * On a ring descriptor: sets the wakeup interval of the event and of the events
 * that inherit it.
 */
#define VPMU_IOC_WAKEUP		_IOW(VPMU_IOC_MAGIC, 12, struct vpmu_wakeup)

/*
 * mmap(2) of /dev/vpmu, shared and writable, maps one page at offset 0. A
 * 32-bit store to the beginning of the page places a mark. The stored number is
 * the value of the mark. This is like VPMU_IOC_MARK, but without a system call.
 * Loads return no data. Without CAP_SYS_RAWIO, mmap(2) fails with EPERM.
 */

#endif /* _UAPI_VPMU_H */

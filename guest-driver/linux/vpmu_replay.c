// SPDX-License-Identifier: GPL-2.0
/*
 * Replays the device's records to perf core.
 *
 * Only perf core can write to the rings of perf_event_open(2): it exports no
 * function for that. A replay calls the event's overflow handler for each
 * sample in a ring of the device, with the sample's registers, time, task and
 * call chain. perf core then makes its own record.
 *
 * In perf core, the function that calls the handler also throttles the event,
 * sends signals and decrements the limit of PERF_EVENT_IOC_REFRESH, but that
 * function is not exported. So the device throttles the event, and this file
 * sends the signals and decrements the limit.
 */
#include <linux/bits.h>
#include <linux/mm.h>
#include <linux/perf_event.h>
#include <linux/pid.h>
#include <linux/pid_namespace.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/string.h>

#include <asm/ptrace.h>

#include "compat.h"
#include "perf_core_private.h"
#include "vpmu.h"
#include "vpmu_arch.h"
#include "vpmu_event.h"
#include "vpmu_replay.h"

/*
 * Markers of a call chain: one for the kernel's addresses, one for the user's
 */
#define CHAIN_MARKERS	2
#define CHAIN_LEN	(VPMU_MAX_STACK + CHAIN_MARKERS)

/*
 * Words of the longest record: header, nine one-word fields, READ, CALLCHAIN,
 * REGS_INTR
 */
#define RECORD_WORDS	(1 + 9 + 1 + 2 * VPMU_GROUP + 1 + CHAIN_LEN + 1 + VPMU_ARCH_REGS_COUNT)

/* Number of attempts to read two clocks at the same time */
#define CLOCK_PAIRS	3

/**
 * struct vpmu_replay - a CPU's state for replays; used with interrupts off
 * @busy: a replay is in progress
 * @event: the event that the records are replayed to
 * @records: the ring
 * @ended: the limit of PERF_EVENT_IOC_REFRESH is used up
 * @left: number of records that may still be replayed
 * @stop: a signal must be sent before the next record of the event
 * @dev: the device, whose clock the records use
 * @offset: difference between the event's clock and the device's clock
 * @paired: @offset is set
 * @record: a copy of the record
 * @next: the next word of @record to read
 * @end: the end of the record's last word
 * @bad: the record is shorter than its fields
 * @tid: the task of the sample
 * @counts: the counts of the event's group in the sample, as (value, id) pairs
 * @members: number of events in @counts
 * @chain: the call chain, laid out as struct perf_callchain_entry
 * @regs: the registers
 * @data: the other fields, for perf core
 */
struct vpmu_replay {
	bool busy;
	struct perf_event *event;
	struct vpmu_records *records;
	bool *ended;
	unsigned int *left;
	bool stop;
	const struct vpmu_device *dev;
	u64 offset;
	bool paired;
	u64 record[RECORD_WORDS];
	const u64 *next;
	const u64 *end;
	bool bad;
	u32 tid;
	const u64 *counts;
	unsigned int members;
	struct {
		u64 nr;
		u64 ip[CHAIN_LEN];
	} chain;
	struct pt_regs regs;
	struct perf_sample_data data;
};

/* Page @number of a ring; page 0 is the metadata page. */
static void *records_page(const struct vpmu_records *records, size_t number)
{
	if (records->window)
		return records->window + number * PAGE_SIZE;
	return page_address(records->pages[number]);
}

/* Copies from position @from of a ring, which wraps at its end. */
static void records_copy(const struct vpmu_records *records, u64 from, void *to, size_t len)
{
	while (len) {
		size_t offset = from & (records->size - 1);
		size_t part = min(len, PAGE_SIZE - offset % PAGE_SIZE);
		void *page = records_page(records, 1 + offset / PAGE_SIZE);

		memcpy(to, page + offset % PAGE_SIZE, part);
		to += part;
		from += part;
		len -= part;
	}
}

/*
 * Finds how far the event's clock is ahead of the device's clock, which is read
 * directly before and after. The vCPU can be stopped between two readings: of
 * several attempts, the shortest counts.
 */
static void replay_pair_clocks(struct vpmu_replay *replay)
{
	const struct vpmu_info info = vpmu_info_of(replay->dev);
	u64 before, now, gap, shortest = U64_MAX;
	unsigned int i;

	for (i = 0; i < CLOCK_PAIRS; i++) {
		before = get_cycles();
		now = perf_core_event_clock(replay->event);
		gap = get_cycles() - before;
		if (gap >= shortest)
			continue;
		shortest = gap;
		replay->offset = now - vpmu_info_clock(&info, before + gap / 2);
	}
	replay->paired = true;
}

/*
 * Returns the id of a task in the PID namespace of an event's records; @nr is
 * the task's id in the initial namespace.
 */
static u32 replay_pid(const struct perf_event *event, u32 nr)
{
	struct pid_namespace *ns = perf_core_namespace(event);
	struct pid *pid;

	if (ns == &init_pid_ns || !nr)
		return nr;
	rcu_read_lock();
	pid = find_pid_ns(nr, &init_pid_ns);
	nr = pid ? pid_nr_ns(pid, ns) : -1;
	rcu_read_unlock();
	return nr;
}

/*
 * Whether perf core can no longer read the user registers or user stack of the
 * sample's task, because that task is not current, or no longer has an address
 * space.
 */
static bool replay_is_late(struct vpmu_replay *replay)
{
	const struct perf_event_attr *attr = &replay->event->attr;
	bool stack = attr->sample_type & PERF_SAMPLE_STACK_USER && attr->sample_stack_user;

	if (!stack && !(attr->sample_type & PERF_SAMPLE_REGS_USER))
		return false;
	if (user_mode(&replay->regs) && !stack)
		return false;
	if (task_pid_nr(current) != replay->tid)
		return true;
	/*
	 * When a task exits, the kernel unmaps its stack before perf core stops
	 * its events.
	 */
	return user_mode(&replay->regs) && !current->mm;
}

/* Returns the next @count words of the record; NULL if fewer are left. */
static const u64 *replay_words(struct vpmu_replay *replay, u64 count)
{
	const u64 *words = replay->next;

	if (replay->bad || count > replay->end - words) {
		replay->bad = true;
		return NULL;
	}
	replay->next += count;
	return words;
}

/*
 * Reads the record's next field, or returns zero if the ring's samples do not
 * have the field.
 */
static u64 replay_field(struct vpmu_replay *replay, u64 field)
{
	const u64 *word;

	if (!(replay->records->type & field))
		return 0;
	word = replay_words(replay, 1);
	return word ? *word : 0;
}

static void replay_task(struct vpmu_replay *replay, u64 word)
{
	struct perf_sample_data *data = &replay->data;

	if (!(replay->records->type & PERF_SAMPLE_TID))
		return;
	replay->tid = upper_32_bits(word);
	data->tid_entry.pid = replay_pid(replay->event, lower_32_bits(word));
	data->tid_entry.tid = replay_pid(replay->event, replay->tid);
	data->sample_flags |= PERF_SAMPLE_TID;
}

static void replay_time(struct vpmu_replay *replay, u64 time, bool user)
{
	struct perf_sample_data *data = &replay->data;

	if (!(replay->records->type & PERF_SAMPLE_TIME))
		return;
	if (!replay->paired)
		replay_pair_clocks(replay);
	time = vpmu_task_place(replay->dev, replay->tid, time, user, replay->records->prompt);
	data->time = time + replay->offset;
	data->sample_flags |= PERF_SAMPLE_TIME;
}

/* Parses PERF_SAMPLE_READ with PERF_FORMAT_GROUP and PERF_FORMAT_ID. */
static void replay_read(struct vpmu_replay *replay)
{
	u64 members = replay_field(replay, PERF_SAMPLE_READ);

	if (members > VPMU_GROUP)
		replay->bad = true;
	replay->counts = replay_words(replay, 2 * members);
	replay->members = replay->counts && !replay->records->shared ? members : 0;
}

static void replay_chain(struct vpmu_replay *replay)
{
	u64 nr = replay_field(replay, PERF_SAMPLE_CALLCHAIN);
	const u64 *words = replay_words(replay, nr);

	if (!(replay->records->type & PERF_SAMPLE_CALLCHAIN) || !words || nr > CHAIN_LEN)
		return;
	replay->chain.nr = nr;
	memcpy(replay->chain.ip, words, nr * sizeof(*words));
	vpmu_sample_chain(&replay->data, (struct perf_callchain_entry *)&replay->chain);
}

/*
 * Parses the sample in replay->record, of @len words. Returns false if the
 * record is shorter than the sample's fields.
 */
static bool replay_parse(struct vpmu_replay *replay, size_t len)
{
	const struct perf_event_header *header = (const void *)replay->record;
	bool user = (header->misc & PERF_RECORD_MISC_CPUMODE_MASK) == PERF_RECORD_MISC_USER;
	u64 ip, tid, time, addr, period;
	const u64 *regs = NULL;

	replay->next = replay->record + 1;
	replay->end = replay->record + len;
	replay->bad = false;
	replay_field(replay, PERF_SAMPLE_IDENTIFIER);
	ip = replay_field(replay, PERF_SAMPLE_IP);
	tid = replay_field(replay, PERF_SAMPLE_TID);
	time = replay_field(replay, PERF_SAMPLE_TIME);
	addr = replay_field(replay, PERF_SAMPLE_ADDR);
	replay_field(replay, PERF_SAMPLE_ID);
	replay_field(replay, PERF_SAMPLE_STREAM_ID);
	replay_field(replay, PERF_SAMPLE_CPU);
	period = replay_field(replay, PERF_SAMPLE_PERIOD);

	perf_sample_data_init(&replay->data, addr, period ?: replay->records->period);
	replay_task(replay, tid);
	replay_time(replay, time, user);
	replay_read(replay);
	replay_chain(replay);
	if (replay_field(replay, PERF_SAMPLE_REGS_INTR))
		regs = replay_words(replay, VPMU_ARCH_REGS_COUNT);
	if (regs)
		vpmu_arch_regs(&replay->regs, regs, user);
	else
		vpmu_arch_no_regs(&replay->regs, ip, user);
	return !replay->bad;
}

/*
 * Whether the sample was taken in a mode, user or kernel, that the event
 * excludes. For some events, the device cannot exclude a mode.
 */
static bool replay_is_excluded(struct vpmu_replay *replay)
{
	const struct perf_event_attr *attr = &replay->event->attr;

	return user_mode(&replay->regs) ? attr->exclude_user : attr->exclude_kernel;
}

/*
 * Finds the count of @event in the sample; returns false if the sample does not
 * contain it.
 */
static bool replay_count(const struct vpmu_replay *replay, const struct perf_event *event,
			 u64 *count)
{
	const struct vpmu_event *own = event->pmu_private;
	unsigned int i;

	for (i = 0; i < replay->members; i++) {
		if (replay->counts[2 * i + 1] != own->id)
			continue;
		*count = replay->counts[2 * i];
		return true;
	}
	return false;
}

/*
 * With @back, sets an event's count back to its value at the time of the
 * sample; without it, restores the current count.
 */
static void replay_turn(const struct vpmu_replay *replay, struct perf_event *event, bool back)
{
	const struct vpmu_event *own = event->pmu_private;
	u64 then, since;

	if (!replay_count(replay, event, &then))
		return;
	since = own->count - then;
	local64_add(back ? -since : since, &event->count);
}

/*
 * Calls replay_turn() for the events whose counts perf core puts into the
 * record.
 */
static void replay_turn_group(const struct vpmu_replay *replay, bool back)
{
	struct perf_event *event = replay->event, *leader = event->group_leader, *sibling;

	if (!replay->members)
		return;
	if (leader->pmu == event->pmu)
		replay_turn(replay, leader, back);
	for_each_sibling_event(sibling, leader)
		if (sibling->pmu == event->pmu)
			replay_turn(replay, sibling, back);
}

static void replay_sample(struct vpmu_replay *replay, size_t len)
{
	struct perf_event *event = replay->event;
	bool passes;

	if (!replay_parse(replay, len) || replay_is_late(replay)) {
		perf_core_add_lost(event, 1);
		return;
	}
	if (*replay->ended || replay_is_excluded(replay))
		return;
	replay_turn_group(replay, true);
	passes = perf_core_overflow(event, &replay->data, &replay->regs);
	replay_turn_group(replay, false);
	/*
	 * The owner gets a signal for each overflow, from an irq_work of perf
	 * core: it must run before the next record.
	 */
	if (passes && perf_core_signal(event, replay->ended))
		replay->stop = true;
}

/* Replays the record of @size bytes at position @from. */
static void replay_record(struct vpmu_replay *replay, u32 type, u64 from, u16 size)
{
	struct perf_event *event = replay->event;

	if (size > sizeof(replay->record)) {
		if (type == PERF_RECORD_SAMPLE)
			perf_core_add_lost(event, 1);
		return;
	}
	records_copy(replay->records, from, replay->record, size);
	if (type == PERF_RECORD_SAMPLE)
		replay_sample(replay, size / sizeof(u64));
	/*
	 * The body of PERF_RECORD_LOST is an id and the number of lost records.
	 */
	else if (type == PERF_RECORD_LOST && replay->records->shared && size >= 3 * sizeof(u64))
		perf_core_add_lost(event, replay->record[2]);
}

/*
 * Replays records from @tail up to @head, or up to a limit; returns the
 * position after the last replayed record.
 */
static u64 replay_some(struct vpmu_replay *replay, u64 tail, u64 head)
{
	struct perf_event_header header;

	while (tail != head && *replay->left && !replay->stop) {
		/*
		 * Programs can write to the header at any time, so use a copy.
		 */
		records_copy(replay->records, tail, &header, sizeof(header));
		/*
		 * If the size is invalid, the next record cannot be found, so
		 * skip all records up to the head. A program or the device may
		 * write an invalid size; this costs only samples of this guest.
		 */
		if (header.size < sizeof(header) || header.size % sizeof(u64) ||
		    header.size > head - tail)
			return head;
		--*replay->left;
		replay_record(replay, header.type, tail, header.size);
		tail += header.size;
	}
	return tail;
}

/* Replays records of the ring, up to a limit; returns true if some are left. */
static bool replay_records(struct vpmu_replay *replay)
{
	const struct vpmu_records *records = replay->records;
	struct perf_event_mmap_page *metadata;
	u64 head, tail;

	if (!records->size)
		return false;
	metadata = records_page(records, 0);
	tail = READ_ONCE(metadata->data_tail);
	/*
	 * Pairs with the device's store of the head: all records before the
	 * head are complete.
	 */
	head = smp_load_acquire(&metadata->data_head);
	if (head == tail)
		return false;
	/*
	 * Programs that map the ring also write the tail, so it may be invalid.
	 */
	if (head - tail > records->size || tail % sizeof(u64))
		tail = head;
	else
		tail = replay_some(replay, tail, head);
	/*
	 * Pairs with the device's load of the tail: all records before the tail
	 * have been read, and may be overwritten.
	 */
	smp_store_release(&metadata->data_tail, tail);
	return tail != head;
}

/**
 * vpmu_replay() - replay samples to an event
 * @vcpu: this CPU's queue; interrupts are off
 * @event: the event, which is active on this CPU
 * @records: the ring; nothing is replayed while another CPU replays this ring,
 *           or while this CPU already replays any ring
 * @ended: set when the limit of PERF_EVENT_IOC_REFRESH is used up; later
 *         samples are dropped
 * @left: number of records to replay at most; decremented for each
 *
 * Return: true if records are left for another call, for example because a
 * signal must be sent before the event's next record.
 */
bool vpmu_replay(struct vpmu_vcpu *vcpu, struct perf_event *event, struct vpmu_records *records,
		 bool *ended, unsigned int *left)
{
	struct vpmu_replay *replay = vcpu->replay;
	bool more;

	lockdep_assert_irqs_disabled();
	if (vpmu_records_are_empty(records))
		return false;
	if (!*left || replay->busy || perf_core_signal_is_pending(event) ||
	    !raw_spin_trylock(&records->lock))
		return true;
	replay->busy = true;
	replay->event = event;
	replay->records = records;
	replay->ended = ended;
	replay->left = left;
	replay->stop = false;
	replay->members = 0;
	replay->dev = vcpu->dev;
	replay->paired = false;
	more = replay_records(replay);
	replay->busy = false;
	raw_spin_unlock(&records->lock);
	return more;
}

/**
 * vpmu_replay_counts() - whether perf core is reading an event's count for a
 *                        replayed record
 * @vcpu: this CPU's queue; interrupts are off
 * @event: the event, of the PMU vpmu
 *
 * Return: true if the event's count is currently set back to its value at the
 * time of the sample.
 */
bool vpmu_replay_counts(const struct vpmu_vcpu *vcpu, const struct perf_event *event)
{
	const struct vpmu_replay *replay = vcpu->replay;
	u64 count;

	return replay->busy && replay_count(replay, event, &count);
}

/**
 * vpmu_records_init() - prepare a ring for replays
 * @records: the ring, zeroed, without pages
 */
void vpmu_records_init(struct vpmu_records *records)
{
	raw_spin_lock_init(&records->lock);
}

/**
 * vpmu_records_are_empty() - whether a ring has nothing to replay
 * @records: the ring; interrupts are off
 *
 * Return: true if all records have been read, or if the ring has ended.
 */
bool vpmu_records_are_empty(const struct vpmu_records *records)
{
	const struct perf_event_mmap_page *metadata;

	if (!READ_ONCE(records->size))
		return true;
	metadata = records_page(records, 0);
	return READ_ONCE(metadata->data_head) == READ_ONCE(metadata->data_tail);
}

/**
 * vpmu_records_drop() - skip all records that a ring has now
 * @records: the ring, which no CPU replays; interrupts are off
 */
void vpmu_records_drop(struct vpmu_records *records)
{
	struct perf_event_mmap_page *metadata = records_page(records, 0);

	/* Pairs with the device's load of the tail, as after a replay. */
	smp_store_release(&metadata->data_tail, READ_ONCE(metadata->data_head));
}

/**
 * vpmu_records_end() - end the replays of a ring before its pages are freed
 * @records: the ring; on return, no CPU accesses it
 */
void vpmu_records_end(struct vpmu_records *records)
{
	unsigned long flags;

	raw_spin_lock_irqsave(&records->lock, flags);
	WRITE_ONCE(records->size, 0);
	raw_spin_unlock_irqrestore(&records->lock, flags);
}

/**
 * vpmu_replay_init() - allocate the state for replays on a queue's CPU
 * @vcpu: the queue
 *
 * Return: 0 or -ENOMEM; call vpmu_replay_exit() in both cases.
 */
int vpmu_replay_init(struct vpmu_vcpu *vcpu)
{
	vcpu->replay = kvzalloc(sizeof(*vcpu->replay), GFP_KERNEL);
	return vcpu->replay ? 0 : -ENOMEM;
}

/**
 * vpmu_replay_exit() - free the state for replays, once all events are closed
 * @vcpu: the queue
 */
void vpmu_replay_exit(struct vpmu_vcpu *vcpu)
{
	kvfree(vcpu->replay);
}

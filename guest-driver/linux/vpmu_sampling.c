// SPDX-License-Identifier: GPL-2.0
/*
 * Samples that are replayed to perf core.
 *
 * The device writes an event's samples to a ring that the driver allocates, and
 * the driver replays them to perf core.
 *
 * Records are replayed in pieces of at most VPMU_REPLAY_PIECE records, on the
 * CPU where the event is active. Interrupts are off during a piece, and on
 * between two pieces. Replays start:
 *
 * - with each tick of a CPU that is not idle, and every IDLE_TICKS of an idle
 *   CPU. The records are in the ring already, so this costs no exit;
 * - when the device sends a notice, because the ring has crossed its watermark.
 *   The watermark is one record (the samples are prompt) if perf core reads
 *   part of a sample at the replay, such as the user stack, or if a program
 *   gets a signal or runs a BPF program at each overflow;
 * - when the event is stopped. But while the scheduler switches tasks, it holds
 *   the runqueue's lock, so at most one piece is replayed: perf core does not
 *   call the PMU when a program disables an event that is not active, and
 *   reads its ring. An event of a CPU, or of a task on one CPU, then stays on
 *   the list of this CPU until the next tick has replayed the rest. An event of
 *   a task on any CPU cannot stay: the task may run on another CPU next, and
 *   perf core's ring must be written by one CPU at a time. The rest of its
 *   records is replayed when its task runs again.
 */
#include <asm/ptrace.h>
#include <linux/bits.h>
#include <linux/cpumask.h>
#include <linux/interrupt.h>
#include <linux/irq_work.h>
#include <linux/jiffies.h>
#include <linux/minmax.h>
#include <linux/mm.h>
#include <linux/percpu.h>
#include <linux/perf_event.h>
#include <linux/pid.h>
#include <linux/pid_namespace.h>
#include <linux/sched.h>
#include <linux/sched/clock.h>
#include <linux/slab.h>
#include <linux/smp.h>
#include <linux/string.h>
#include <linux/timer.h>

#include "compat.h"
#include "perf_core_private.h"
#include "vpmu.h"
#include "vpmu_arch.h"
#include "vpmu_event.h"
#include "vpmu_persistent.h"
#include "vpmu_ring.h"

static bool vpmu_records_are_empty(const struct vpmu_records *records);

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
static bool vpmu_records_are_empty(const struct vpmu_records *records)
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
static void vpmu_records_drop(struct vpmu_records *records)
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
static int vpmu_replay_init(struct vpmu_vcpu *vcpu)
{
	vcpu->replay = kvzalloc(sizeof(*vcpu->replay), GFP_KERNEL);
	return vcpu->replay ? 0 : -ENOMEM;
}

/**
 * vpmu_replay_exit() - free the state for replays, once all events are closed
 * @vcpu: the queue
 */
static void vpmu_replay_exit(struct vpmu_vcpu *vcpu)
{
	kvfree(vcpu->replay);
}

/*
 * Number of data pages of a ring. They hold about 1300 samples without call
 * chains, or 7 samples with the longest call chains. The ring of a task's event
 * has fewer until a program maps the event: a process can have thousands of
 * threads, and perf(1) maps one event per CPU, and redirects the others to it.
 */
#define RING_PAGES	16
#define RING_PAGES_UNUSED	4

/* Jiffies between two replays on an idle CPU that has nothing to replay */
#define IDLE_TICKS	(HZ / 10)

/*
 * Number of pieces that one call of vpmu_sampling_run() replays. Other softirqs, or
 * tasks, then go first.
 */
#define RUN_PIECES	32

/* Number of a call chain's addresses that the watermark allows for */
#define CHAIN_TYPICAL	16

/* The longest time to replay the records of an event that is stopped */
#define STOP_NS		(500 * NSEC_PER_USEC)

/**
 * struct vpmu_sampler - the ring of an event and of the events that inherit it
 * @records: the ring, as replays read it
 * @prompt: the watermark is always one record
 * @grown: the ring of a task's event has all its pages, or is given them
 * @members: on each CPU: number of events of the family in vpmu_vcpu::sampling
 * @cpus: the CPUs where @members is not zero
 * @count: number of @pages
 * @pages: the metadata page, then the data pages
 */
struct vpmu_sampler {
	struct vpmu_records records;
	bool prompt;
	atomic_t grown;
	unsigned int __percpu *members;
	cpumask_var_t cpus;
	unsigned int count;
	struct page *pages[1 + RING_PAGES];
};

/* Whether @own has its own ring. An inherited event uses its parent's ring. */
static bool sampler_is_of(const struct vpmu_event *own)
{
	return !own->event->parent;
}

static void sampler_free(struct vpmu_sampler *sampler)
{
	while (sampler->count)
		__free_page(sampler->pages[--sampler->count]);
	free_cpumask_var(sampler->cpus);
	free_percpu(sampler->members);
	kfree(sampler);
}

/* Allocates pages up to @count. Returns 0 or -ENOMEM, then with some of them. */
static int sampler_fill(struct vpmu_sampler *sampler, unsigned int count)
{
	struct page *page;

	while (sampler->count < count) {
		page = alloc_page(GFP_KERNEL_ACCOUNT | __GFP_ZERO);
		if (!page)
			return -ENOMEM;
		sampler->pages[sampler->count++] = page;
	}
	return 0;
}

/* Replays of the ring see the new size, or have ended. */
static void sampler_resize(struct vpmu_sampler *sampler, unsigned int data_pages)
{
	unsigned long flags;

	raw_spin_lock_irqsave(&sampler->records.lock, flags);
	sampler->records.size = data_pages * PAGE_SIZE;
	raw_spin_unlock_irqrestore(&sampler->records.lock, flags);
}

static struct vpmu_sampler *sampler_alloc(const struct perf_event_attr *attr, bool task)
{
	unsigned int data_pages = task ? RING_PAGES_UNUSED : RING_PAGES;
	struct vpmu_sampler *sampler = kzalloc(sizeof(*sampler), GFP_KERNEL);

	if (!sampler)
		return NULL;
	vpmu_records_init(&sampler->records);
	sampler->records.pages = sampler->pages;
	sampler->records.size = data_pages * PAGE_SIZE;
	sampler->records.type = vpmu_attr_replayed(attr);
	sampler->prompt = attr->sample_type & VPMU_SAMPLE_PROMPT;
	sampler->members = alloc_percpu(unsigned int);
	if (zalloc_cpumask_var(&sampler->cpus, GFP_KERNEL) && sampler->members &&
	    !sampler_fill(sampler, 1 + data_pages))
		return sampler;
	sampler_free(sampler);
	return NULL;
}

/* Returns the size of about one piece of the event's records, in bytes. */
static u32 sampling_piece_size(const struct vpmu_event *own)
{
	u64 type = own->sampler->records.type;
	u32 words;

	words = 1 + hweight64(type);
	if (type & PERF_SAMPLE_CALLCHAIN)
		words += CHAIN_TYPICAL;
	if (type & PERF_SAMPLE_REGS_INTR)
		words += VPMU_ARCH_REGS_COUNT;
	return min_t(u32, VPMU_REPLAY_PIECE * words * sizeof(u64),
		     RING_PAGES_UNUSED * PAGE_SIZE / 2);
}

/*
 * Whether the device sends a notice for each record. Perf core's records are
 * smaller than the device's, so the driver cannot tell which of them crosses a
 * watermark in bytes. If that is one of the first records of a piece, replay
 * each; a later one is noticed after the piece, or with the next tick.
 *
 * Also if the event takes at most one sample a tick: another task may get this
 * CPU before the tick, or the host may take it away, and readers of several
 * rings would then find the sample out of order.
 */
static bool sampling_is_prompt(const struct vpmu_event *own)
{
	const struct perf_event_attr *attr = &own->event->attr;

	return own->sampler->prompt || (own->freq && own->period <= HZ) ||
	       (attr->watermark && attr->wakeup_watermark &&
		attr->wakeup_watermark < sampling_piece_size(own));
}

/**
 * vpmu_sampling_alloc() - allocate an event's sampler
 * @own: the new event
 *
 * For an event with a frequency, the device adapts the period. perf core would
 * also adapt it, and to do so, would stop and start the event at each tick. To
 * prevent that, this function clears attr.freq, as the kernel does for
 * cpu-clock and task-clock.
 *
 * Return: 0 or -ENOMEM.
 */
int vpmu_sampling_alloc(struct vpmu_event *own)
{
	struct perf_event *event = own->event;
	const struct vpmu_event *parent;

	INIT_LIST_HEAD(&own->sampling);
	if (event->parent) {
		parent = event->parent->pmu_private;
		own->sampler = parent->sampler;
		own->freq = parent->freq;
		own->period = event->attr.sample_period;
		return 0;
	}
	own->sampler = sampler_alloc(&event->attr, own->task);
	if (!own->sampler)
		return -ENOMEM;
	own->freq = event->attr.freq;
	own->period = event->attr.sample_period;
	own->sampler->records.prompt = sampling_is_prompt(own);
	event->attr.freq = 0;
	return 0;
}

/**
 * vpmu_sampling_free() - free an event's sampler
 * @own: the event; vpmu_event::sampler is already NULL if the sampler belongs
 *       to the parent. The device no longer writes to the ring
 *
 * Can be called with interrupts off.
 */
void vpmu_sampling_free(struct vpmu_event *own)
{
	if (own->sampler)
		sampler_free(own->sampler);
	own->sampler = NULL;
}

/**
 * vpmu_sampling_request() - fill in the sample fields of a request to open an
 *                           event
 * @own: the event
 * @request: the request
 */
void vpmu_sampling_request(const struct vpmu_event *own, struct vpmu_open_request *request)
{
	const struct perf_event_attr *attr = &own->event->attr;
	u32 flags = 0;

	vpmu_attr_request_replay(attr, request);
	request->period = cpu_to_le64(own->period);
	if (own->freq)
		flags |= VPMU_OPEN_FREQ;
	if (own->sampler->records.prompt) {
		request->wakeup = cpu_to_le32(1);
	} else if (!attr->watermark && attr->wakeup_events) {
		request->wakeup = cpu_to_le32(min_t(u32, attr->wakeup_events, VPMU_REPLAY_PIECE));
	} else {
		request->wakeup = cpu_to_le32(sampling_piece_size(own));
		flags |= VPMU_OPEN_WATERMARK;
	}
	request->flags |= cpu_to_le32(flags);
}

/**
 * vpmu_sampling_map() - let the device write to an event's ring
 * @own: the event, open on the device
 *
 * The device writes to the ring until it has closed the event.
 *
 * Return: 0, also if the event writes to its parent's ring; or a negative
 * errno.
 */
int vpmu_sampling_map(struct vpmu_event *own)
{
	struct vpmu_sampler *sampler = own->sampler;

	if (!sampler_is_of(own))
		return 0;
	/*
	 * After a reset, the device starts with an empty ring: clear its head
	 * and tail.
	 */
	clear_page(page_address(sampler->pages[0]));
	return vpmu_control_map(own->dev, own->id, sampler->pages, sampler->count,
				VPMU_MAP_WRITABLE);
}

/**
 * vpmu_sampling_grow() - give the ring of a task's event all its pages
 * @own: the event, which a program has mapped; sleeps
 *
 * Does nothing if the event was already enabled: its samples would be lost
 * while the device has no ring. If memory is short, the ring remains small.
 */
void vpmu_sampling_grow(struct vpmu_event *own)
{
	struct vpmu_sampler *sampler = own->sampler;
	int err;

	if (!own->task || !own->id || READ_ONCE(own->event->state) != PERF_EVENT_STATE_OFF ||
	    atomic_xchg(&sampler->grown, 1))
		return;
	if (vpmu_control_unmap(own->dev, own->id))
		return;
	err = sampler_fill(sampler, ARRAY_SIZE(sampler->pages));
	if (!err) {
		sampler_resize(sampler, RING_PAGES);
		err = vpmu_sampling_map(own);
	}
	if (err) {
		sampler_resize(sampler, RING_PAGES_UNUSED);
		while (sampler->count > 1 + RING_PAGES_UNUSED)
			__free_page(sampler->pages[--sampler->count]);
		err = vpmu_sampling_map(own);
	}
	if (err)
		vpmu_event_lose(own);
}

/**
 * vpmu_sampling_ring() - make a struct vpmu_ring that keeps the pages of an
 *                        event's sampler when the event ends
 * @own: the event
 *
 * Return: the ring, for vpmu_ring_free(); or NULL.
 */
struct vpmu_ring *vpmu_sampling_ring(const struct vpmu_event *own)
{
	return vpmu_ring_alloc_shared(own->sampler->pages, own->sampler->count);
}

/*
 * Adds an event to the events whose samples this CPU replays, or moves it to
 * their end.
 */
static void sampling_enlist(struct vpmu_vcpu *vcpu, struct vpmu_event *own)
{
	struct vpmu_sampler *sampler = own->sampler;

	if (list_empty(&own->sampling) && this_cpu_inc_return(*sampler->members) == 1)
		cpumask_set_cpu(smp_processor_id(), sampler->cpus);
	list_move_tail(&own->sampling, &vcpu->sampling);
	vcpu->prompt |= sampler->records.prompt;
}

/*
 * Removes an event from the list of @cpu, which is this CPU or offline. Returns
 * with nothing done if the event is on no list.
 */
static void sampling_delist(struct vpmu_event *own, int cpu)
{
	struct vpmu_sampler *sampler = own->sampler;

	if (list_empty(&own->sampling))
		return;
	list_del_init(&own->sampling);
	if (!--*per_cpu_ptr(sampler->members, cpu))
		cpumask_clear_cpu(cpu, sampler->cpus);
}

/* Replays up to *@left records. Returns true if records are left. */
static bool sampling_replay(struct vpmu_vcpu *vcpu, struct vpmu_event *own, unsigned int *left)
{
	return vpmu_replay(vcpu, own->event, &own->sampler->records, &own->ended, left);
}

/*
 * Tells the device whether a program needs each of the event's samples at once.
 * The program can begin or cease to need that at any time, without a call of
 * the PMU; see perf_core_reports_each().
 */
static void sampling_adapt(struct vpmu_vcpu *vcpu, struct vpmu_event *own)
{
	bool prompt = perf_core_reports_each(own->event);

	if (own->sampler->prompt || own->prompt == prompt)
		return;
	own->prompt = prompt;
	vpmu_vcpu_append(vcpu, own->event, VPMU_COMMAND_PROMPT, prompt);
}

/* The same, for an event that is active and keeps counting. */
static void sampling_adapt_active(struct vpmu_vcpu *vcpu, struct vpmu_event *own)
{
	struct perf_event_context *ctx = perf_core_context(own->event);

	if (!own->started || !own->id || own->prompt == perf_core_reports_each(own->event))
		return;
	perf_core_lock(ctx);
	sampling_adapt(vcpu, own);
	perf_core_unlock(ctx);
}

/**
 * vpmu_sampling_arm() - let the next tick replay samples
 * @vcpu: this CPU's queue; interrupts are off
 */
void vpmu_sampling_arm(struct vpmu_vcpu *vcpu)
{
	struct timer_list *timer = &vcpu->replay_timer;

	if (!timer_pending(timer) || time_after(timer->expires, jiffies + 1))
		mod_timer(timer, jiffies + 1);
}

/**
 * vpmu_sampling_prompt() - replay the prompt samples of this CPU's events
 * @vcpu: this CPU's queue; interrupts are off
 *
 * The notice of a sample does so, too, but can be late: another CPU may take it,
 * or a thread may run the softirq.
 */
void vpmu_sampling_prompt(struct vpmu_vcpu *vcpu)
{
	unsigned int left = VPMU_REPLAY_PIECE;
	struct vpmu_event *own;

	if (!vcpu->prompt)
		return;
	list_for_each_entry(own, &vcpu->sampling, sampling)
		if (own->sampler->records.prompt)
			sampling_replay(vcpu, own, &left);
}

/**
 * vpmu_sampling_switch() - prepare for a switch to another task
 * @dev: the device
 * @idle: the old task is the idle task, so replays with each tick start again
 *
 * Called by the scheduler before the switch, with the runqueue's lock held.
 * Prompt samples are replayed while their task is still the current one.
 */
void vpmu_sampling_switch(struct vpmu_device *dev, bool idle)
{
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(dev);

	if (!vcpu)
		return;
	if (idle && !(list_empty(&vcpu->sampling) && list_empty(&vcpu->views)))
		vpmu_sampling_arm(vcpu);
	vpmu_sampling_prompt(vcpu);
}

/**
 * vpmu_sampling_start() - add an event to the events that this CPU replays
 * @vcpu: this CPU's queue; interrupts are off
 * @own: the event, which is about to be started; its context is locked
 */
void vpmu_sampling_start(struct vpmu_vcpu *vcpu, struct vpmu_event *own)
{
	/* Drop the samples from before this start. */
	if (own->ended)
		vpmu_records_drop(&own->sampler->records);
	/*
	 * If the event's limit was used up, but the event left its CPU before
	 * perf core disabled it, have perf core disable it now.
	 */
	if (!perf_core_disable_again(own->event))
		own->ended = false;
	/* The event may still be listed, here or in vcpu->stopped. */
	sampling_enlist(vcpu, own);
	sampling_adapt(vcpu, own);
	vpmu_sampling_arm(vcpu);
}

/**
 * vpmu_sampling_stop() - note that an event was stopped
 * @own: the event, on the CPU where it was active; interrupts are off
 *
 * The caller holds a queue's lock, so the event's last samples are not replayed
 * here, but later, by vpmu_sampling_settle().
 */
void vpmu_sampling_stop(struct vpmu_event *own)
{
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(own->dev);

	list_move_tail(&own->sampling, &vcpu->stopped);
}

/**
 * vpmu_sampling_forget() - drop an event from the events that this CPU replays
 * @own: the event, on its CPU; interrupts are off
 */
void vpmu_sampling_forget(struct vpmu_event *own)
{
	sampling_delist(own, smp_processor_id());
}

/*
 * Replays the last samples of a stopped event whose CPU can change, until
 * @until.
 */
static void sampling_finish(struct vpmu_vcpu *vcpu, struct vpmu_event *own, u64 until)
{
	unsigned int left;

	do {
		left = VPMU_REPLAY_PIECE;
		/* With @left not zero, another replay or a signal is in the way. */
		if (!sampling_replay(vcpu, own, &left) || left)
			break;
	} while (local_clock() < until);
}

/**
 * vpmu_sampling_settle() - handle the last samples of events that were stopped
 * @vcpu: this CPU's queue; the contexts of the events are locked
 */
void vpmu_sampling_settle(struct vpmu_vcpu *vcpu)
{
	bool switching = vpmu_task_is_switching(), stays, kick = false;
	unsigned int left = VPMU_REPLAY_PIECE;
	struct vpmu_event *own, *next;
	u64 until;

	if (list_empty(&vcpu->stopped))
		return;
	until = local_clock() + STOP_NS;
	list_for_each_entry_safe(own, next, &vcpu->stopped, sampling) {
		stays = own->event->cpu >= 0;
		if (stays || switching)
			stays &= sampling_replay(vcpu, own, &left);
		else
			sampling_finish(vcpu, own, until);
		if (stays)
			sampling_enlist(vcpu, own);
		else
			vpmu_sampling_forget(own);
		kick |= stays && !switching;
	}
	if (kick)
		irq_work_queue(&vcpu->replay_kick);
}

/**
 * vpmu_sampling_exit_task() - replay the samples that events of an exiting task
 *                             have left on other CPUs
 * @event: an event of the task; its context is locked
 *
 * The task's parent may read the rings before the next tick of those CPUs.
 */
void vpmu_sampling_exit_task(const struct perf_event *event)
{
	struct perf_event *other;

	perf_core_for_each_event(other, perf_core_context(event)) {
		struct vpmu_event *own = other->pmu_private;

		if (other->pmu == event->pmu && own->sampler && other->cpu >= 0 &&
		    other->cpu != smp_processor_id() && !list_empty_careful(&own->sampling))
			vpmu_vcpu_call(own->dev, other->cpu);
	}
}

/**
 * vpmu_sampling_read() - replay the samples of an event that is being read, as
 *                        soon as interrupts are on
 * @own: the event, on its CPU; interrupts are off
 */
void vpmu_sampling_read(struct vpmu_event *own)
{
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(own->dev);

	if (vcpu && !vpmu_records_are_empty(&own->sampler->records))
		irq_work_queue(&vcpu->replay_kick);
}

/*
 * Replays one piece of the records of this CPU's events; interrupts are off.
 * Sets *@found if there were any. Returns true if records are left.
 */
static bool sampling_piece(struct vpmu_vcpu *vcpu, bool *found)
{
	unsigned int left = VPMU_REPLAY_PIECE;
	struct vpmu_event *own, *next;
	struct vpmu_view *view;
	bool more = false;

	list_for_each_entry_safe(own, next, &vcpu->sampling, sampling) {
		sampling_adapt_active(vcpu, own);
		if (sampling_replay(vcpu, own, &left))
			more = true;
		else if (!own->started)
			vpmu_sampling_forget(own);
		if (left)
			continue;
		/* The other events go first in the next piece. */
		if (!list_empty(&own->sampling))
			sampling_enlist(vcpu, own);
		*found = true;
		return true;
	}
	list_for_each_entry(view, &vcpu->views, entry)
		more |= vpmu_view_replay(vcpu, view, &left);
	*found |= left != VPMU_REPLAY_PIECE;
	return more;
}

/**
 * vpmu_sampling_run() - replay the records of this CPU's events, and let a
 *                       later tick do it again
 * @vcpu: the queue; called in a softirq
 */
void vpmu_sampling_run(struct vpmu_vcpu *vcpu)
{
	struct timer_list *timer = &vcpu->replay_timer;
	unsigned int pieces = RUN_PIECES;
	bool found = false, more, any;

	/* If the queue's CPU went offline, no event is active there. */
	if (vpmu_vcpu_local(vcpu->dev) != vcpu)
		return;
	do {
		local_irq_disable();
		vpmu_task_switched();
		more = sampling_piece(vcpu, &found);
		local_irq_enable();
	} while (more && --pieces);
	if (more)
		vpmu_vcpu_serve(vcpu);
	local_irq_disable();
	if (list_empty(&vcpu->sampling))
		vcpu->prompt = false;
	any = !list_empty(&vcpu->sampling) || !list_empty(&vcpu->views);
	if (any && !timer_pending(timer))
		mod_timer(timer, jiffies + (found || !is_idle_task(current) ? 1 : IDLE_TICKS));
	local_irq_enable();
}

static void sampling_timer(struct timer_list *timer)
{
	struct vpmu_vcpu *vcpu = container_of(timer, struct vpmu_vcpu, replay_timer);
	struct vpmu_device *dev = vcpu->dev;
	int cpu;

	if (vpmu_vcpu_local(dev) == vcpu) {
		vpmu_sampling_run(vcpu);
		return;
	}
	/*
	 * The timer moved here when its CPU went offline. The CPU may be back,
	 * and rely on the timer. Without users there are no events.
	 */
	if (!atomic_inc_not_zero(&dev->life.users))
		return;
	local_irq_disable();
	for_each_online_cpu(cpu)
		if (*per_cpu_ptr(dev->cpu_vcpu, cpu) == vcpu)
			vpmu_vcpu_call(dev, cpu);
	local_irq_enable();
	vpmu_device_put(dev);
}

static void sampling_kick(struct irq_work *work)
{
	vpmu_vcpu_serve(container_of(work, struct vpmu_vcpu, replay_kick));
}

/**
 * vpmu_sampling_notice() - handle a ring that has crossed its watermark
 * @dev: the device
 * @id: id of the event that the ring belongs to
 *
 * Called from the device's interrupt, on any CPU. Has the ring's samples
 * replayed on the CPUs where events of the ring's family are listed.
 *
 * Return: false if the event does not sample through perf core.
 */
bool vpmu_sampling_notice(struct vpmu_device *dev, u64 id)
{
	struct vpmu_event *own;
	unsigned long flags;
	int cpu;

	spin_lock_irqsave(&dev->lookup.lock, flags);
	own = xa_load(&dev->lookup.sampled, id);
	if (own)
		for_each_cpu(cpu, own->sampler->cpus)
			vpmu_vcpu_call(dev, cpu);
	spin_unlock_irqrestore(&dev->lookup.lock, flags);
	return own;
}

/**
 * struct sampling_call - a piece to replay on another CPU
 * @dev: the device
 * @own: the event whose records are replayed; NULL for all events of the CPU
 * @more: records are left
 */
struct sampling_call {
	struct vpmu_device *dev;
	struct vpmu_event *own;
	bool more;
};

static void sampling_call_here(void *info)
{
	struct sampling_call *call = info;
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(call->dev);
	unsigned int left = VPMU_REPLAY_PIECE;
	bool found;

	if (!vcpu)
		call->more = false;
	else if (call->own)
		call->more = sampling_replay(vcpu, call->own, &left);
	else
		call->more = sampling_piece(vcpu, &found);
}

/*
 * Replays records on @cpu until none are left, at most as many as two rings can
 * hold.
 */
static void sampling_call_on(int cpu, struct sampling_call *call)
{
	unsigned int pieces = 2 * RING_PAGES * PAGE_SIZE / (VPMU_REPLAY_PIECE * 2 * sizeof(u64));

	do {
		if (smp_call_function_single(cpu, sampling_call_here, call, 1))
			return;
		cond_resched();
	} while (call->more && --pieces);
}

/**
 * vpmu_sampling_flush() - replay the samples that an event's family has taken so
 *                         far
 * @own: the event that was opened; the caller keeps it open
 */
void vpmu_sampling_flush(struct vpmu_event *own)
{
	struct sampling_call call = { .dev = own->dev };
	int cpu;

	for_each_cpu(cpu, own->sampler->cpus)
		sampling_call_on(cpu, &call);
}

static void sampling_forget_here(void *own)
{
	vpmu_sampling_forget(own);
}

static void sampling_delist_on(struct vpmu_event *own, int cpu)
{
	struct vpmu_device *dev = own->dev;

	/* Two callers must not change the list of an offline CPU at once. */
	mutex_lock(&dev->life.lock);
	if (smp_call_function_single(cpu, sampling_forget_here, own, 1)) {
		local_irq_disable();
		sampling_delist(own, cpu);
		local_irq_enable();
	}
	mutex_unlock(&dev->life.lock);
}

/**
 * vpmu_sampling_close() - take an event off the list of its CPU
 * @own: the event, which perf core is destroying. If it is inherited, its last
 *       samples are replayed first. Sleeps
 */
void vpmu_sampling_close(struct vpmu_event *own)
{
	struct sampling_call call = { .dev = own->dev, .own = own };
	int cpu = own->event->cpu;

	if (!own->sampler)
		return;
	/* Only an event that stays on its CPU is listed while it is stopped. */
	if (!list_empty_careful(&own->sampling)) {
		if (own->event->parent)
			sampling_call_on(cpu, &call);
		sampling_delist_on(own, cpu);
	}
	perf_core_sync_irq(own->event);
}

/**
 * vpmu_sampling_init() - prepare a queue's state for sampling
 * @vcpu: the queue
 *
 * Return: 0 or -ENOMEM; call vpmu_sampling_exit() in both cases.
 */
int vpmu_sampling_init(struct vpmu_vcpu *vcpu)
{
	INIT_LIST_HEAD(&vcpu->sampling);
	INIT_LIST_HEAD(&vcpu->stopped);
	INIT_LIST_HEAD(&vcpu->views);
	init_irq_work(&vcpu->replay_kick, sampling_kick);
	timer_setup(&vcpu->replay_timer, sampling_timer, TIMER_PINNED);
	return vpmu_replay_init(vcpu);
}

/**
 * vpmu_sampling_exit() - free a queue's state for sampling, after all events
 *                        are closed
 * @vcpu: the queue
 */
void vpmu_sampling_exit(struct vpmu_vcpu *vcpu)
{
	irq_work_sync(&vcpu->replay_kick);
	timer_delete_sync(&vcpu->replay_timer);
	vpmu_replay_exit(vcpu);
}

// SPDX-License-Identifier: GPL-2.0
/*
 * Samples through the perf core door.
 *
 * Only perf core writes to the rings of perf_event_open(2), and it exports no function
 * that does. So the device writes samples to a ring of the driver's, and the driver
 * replays them: it calls the event's overflow handler for each record, with registers,
 * time, task and call chain of the sample. Perf core then makes its own record.
 *
 * Records are replayed where the event is active, with interrupts off: at the ring's
 * watermark, which one device interrupt reports for many samples; when the event goes
 * off its CPU; when it is read; and every REPLAY_NS. An event whose samples hold
 * something that is read at the replay, such as the user's stack, has a watermark of
 * one record.
 *
 * Perf core wraps the handler in functions that it does not export. In their place the
 * device throttles, and this file handles the limit of PERF_EVENT_IOC_REFRESH and signals.
 */
#include <linux/bits.h>
#include <linux/cpumask.h>
#include <linux/hrtimer.h>
#include <linux/ktime.h>
#include <linux/math64.h>
#include <linux/mm.h>
#include <linux/percpu.h>
#include <linux/perf_event.h>
#include <linux/pid.h>
#include <linux/pid_namespace.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/smp.h>
#include <linux/string.h>

#include <asm/perf_regs.h>
#include <asm/ptrace.h>
#include <asm/segment.h>

#include "compat.h"
#include "vpmu.h"
#include "vpmu_event.h"

/* Data pages of a ring: some 800 samples without call chains, 50 with the longest. */
#define RING_PAGES	16
#define RING_SIZE	(RING_PAGES * PAGE_SIZE)

/* No sample of an event in use waits longer. */
#define REPLAY_NS	(100 * NSEC_PER_MSEC)

/* General registers by perf's numbers; the device has no segment registers but CS and SS. */
#define REGS	(GENMASK_ULL(PERF_REG_X86_SS, PERF_REG_X86_AX) | \
		 GENMASK_ULL(PERF_REG_X86_R15, PERF_REG_X86_R8))
#define REGS_COUNT	20

/* Markers of a call chain beside its addresses: one of the kernel's part, one of the user's. */
#define CHAIN_MARKERS	2
#define CHAIN_LEN	(VPMU_MAX_STACK + CHAIN_MARKERS)

/* Header, IP, TID, TIME, ADDR, PERIOD, READ, CALLCHAIN, REGS_INTR. */
#define RECORD_WORDS	(6 + 1 + 2 * VPMU_GROUP + 1 + CHAIN_LEN + 1 + REGS_COUNT)

/* Fields that the device reports and that are passed on; perf core makes the others. */
#define SAMPLE_TYPE	(PERF_SAMPLE_IP | PERF_SAMPLE_TID | PERF_SAMPLE_TIME | \
			 PERF_SAMPLE_ADDR | PERF_SAMPLE_PERIOD)

/* Fields that perf core reads from the current task or CPU, which need not be the sample's. */
#define SAMPLE_REFUSED	(PERF_SAMPLE_PHYS_ADDR | PERF_SAMPLE_DATA_PAGE_SIZE | \
			 PERF_SAMPLE_CODE_PAGE_SIZE | PERF_SAMPLE_CGROUP | PERF_SAMPLE_AUX | \
			 PERF_SAMPLE_BRANCH_STACK)

/* Fields that are right only right after the sample. */
#define SAMPLE_PROMPT	(PERF_SAMPLE_STACK_USER | PERF_SAMPLE_REGS_USER | PERF_SAMPLE_READ)

/**
 * struct vpmu_sampler - the ring of an event and of those that inherit it
 * @type: PERF_SAMPLE_* that the device writes
 * @prompt: the watermark is one record
 * @lock: held by a CPU that replays; only tried
 * @tail: where it is
 * @pages: the metadata page, then the data
 */
struct vpmu_sampler {
	u64 type;
	bool prompt;
	raw_spinlock_t lock;
	u64 tail;
	struct page *pages[1 + RING_PAGES];
};

/**
 * struct vpmu_replay - what a CPU replays records with; interrupts are off in use
 * @busy: it is in use
 * @record: the record
 * @counts: of it, the counts of the event's group: values and ids in turn
 * @members: how many events the counts are of
 * @chain: its call chain, laid out as struct perf_callchain_entry
 * @regs: its registers
 * @data: its other fields, for perf core
 */
struct vpmu_replay {
	bool busy;
	u64 record[RECORD_WORDS];
	const u64 *counts;
	unsigned int members;
	struct {
		u64 nr;
		u64 ip[CHAIN_LEN];
	} chain;
	struct pt_regs regs;
	struct perf_sample_data data;
};

static struct perf_event_mmap_page *sampler_metadata(struct vpmu_sampler *sampler)
{
	return page_address(sampler->pages[0]);
}

/* Whether @own's ring is its own, not that of the event that it inherits. */
static bool sampler_is_of(const struct vpmu_event *own)
{
	return !own->event->parent;
}

/**
 * vpmu_sampling_check() - refuse what a replay could not do
 * @event: being opened, a sampling event
 *
 * Return: 0 or -EOPNOTSUPP.
 */
int vpmu_sampling_check(const struct perf_event *event)
{
	const struct perf_event_attr *attr = &event->attr;

	if (attr->sample_type & SAMPLE_REFUSED || attr->aux_output || attr->aux_sample_size)
		return -EOPNOTSUPP;
	/* The device has no such samples of events that have a parent. */
	if (attr->inherit && attr->sample_type & PERF_SAMPLE_READ)
		return -EOPNOTSUPP;
	/* The signal must come before the program's next instruction. */
	if (attr->sigtrap)
		return -EOPNOTSUPP;
	/* Vector registers are not the device's to read. */
	if (attr->sample_type & (PERF_SAMPLE_REGS_USER | PERF_SAMPLE_REGS_INTR) &&
	    (attr->sample_regs_user | attr->sample_regs_intr) & PERF_REG_EXTENDED_MASK)
		return -EOPNOTSUPP;
	return 0;
}

static void sampler_free(struct vpmu_sampler *sampler)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(sampler->pages) && sampler->pages[i]; i++)
		__free_page(sampler->pages[i]);
	kfree(sampler);
}

static struct vpmu_sampler *sampler_alloc(const struct perf_event_attr *attr)
{
	const u64 regs = PERF_SAMPLE_REGS_USER | PERF_SAMPLE_STACK_USER | PERF_SAMPLE_REGS_INTR;
	struct vpmu_sampler *sampler = kzalloc(sizeof(*sampler), GFP_KERNEL);
	unsigned int i;

	if (!sampler)
		return NULL;
	raw_spin_lock_init(&sampler->lock);
	sampler->type = SAMPLE_TYPE | (attr->sample_type & PERF_SAMPLE_CALLCHAIN);
	if (attr->sample_type & regs)
		sampler->type |= PERF_SAMPLE_REGS_INTR;
	sampler->type |= attr->sample_type & PERF_SAMPLE_READ;
	sampler->prompt = attr->sample_type & SAMPLE_PROMPT;
	for (i = 0; i < ARRAY_SIZE(sampler->pages); i++) {
		sampler->pages[i] = alloc_page(GFP_KERNEL_ACCOUNT | __GFP_ZERO);
		if (!sampler->pages[i]) {
			sampler_free(sampler);
			return NULL;
		}
	}
	return sampler;
}

/**
 * vpmu_sampling_alloc() - give an event its sampler
 * @own: the event, which is being made
 *
 * The device adapts the period of a frequency. Perf core would do so, too, and stop and
 * start the event at each tick: it sees a period instead, as it does of the kernel's clocks.
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
	own->sampler = sampler_alloc(&event->attr);
	if (!own->sampler)
		return -ENOMEM;
	own->freq = event->attr.freq;
	own->period = event->attr.sample_period;
	event->attr.freq = 0;
	return 0;
}

/**
 * vpmu_sampling_free() - free an event's sampler, unless it is that of a parent
 * @own: the event; the device writes there no more
 *
 * Called with interrupts off or on.
 */
void vpmu_sampling_free(struct vpmu_event *own)
{
	if (own->sampler)
		sampler_free(own->sampler);
	own->sampler = NULL;
}

/**
 * vpmu_sampling_request() - ask the device for samples
 * @own: the event
 * @request: the fields of samples are filled in
 */
void vpmu_sampling_request(const struct vpmu_event *own, struct vpmu_open_request *request)
{
	const struct perf_event_attr *attr = &own->event->attr;
	const struct vpmu_sampler *sampler = own->sampler;
	u32 flags = 0;

	request->period = cpu_to_le64(own->period);
	request->sample_type = cpu_to_le64(sampler->type);
	if (own->freq)
		flags |= VPMU_OPEN_FREQ;
	if (sampler->prompt) {
		request->wakeup = cpu_to_le32(1);
	} else {
		request->wakeup = cpu_to_le32(RING_SIZE / 2);
		flags |= VPMU_OPEN_WATERMARK;
	}
	if (sampler->type & PERF_SAMPLE_READ)
		request->read_format = cpu_to_le64(PERF_FORMAT_ID | PERF_FORMAT_GROUP);
	if (sampler->type & PERF_SAMPLE_CALLCHAIN)
		request->max_stack = cpu_to_le32(min_t(u32, attr->sample_max_stack,
						       VPMU_MAX_STACK));
	if (sampler->type & PERF_SAMPLE_REGS_INTR)
		request->regs_intr = cpu_to_le64(REGS);
	if (attr->exclude_callchain_kernel)
		flags |= VPMU_OPEN_EXCLUDE_CHAIN_KERNEL;
	if (attr->exclude_callchain_user)
		flags |= VPMU_OPEN_EXCLUDE_CHAIN_USER;
	request->flags |= cpu_to_le32(flags);
}

/**
 * vpmu_sampling_leader() - the group that samples have the counts of
 * @event: perf core's, being opened; inherited ones have no such samples
 *
 * Return: the device's id of the leader; zero for an event without, or whose leader does
 * not sample with counts.
 */
u64 vpmu_sampling_leader(const struct perf_event *event)
{
	const struct perf_event *leader = event->group_leader;
	const struct vpmu_event *own;

	if (leader == event || leader->pmu != event->pmu || event->parent)
		return 0;
	own = leader->pmu_private;
	return own->sampler && own->sampler->type & PERF_SAMPLE_READ ? own->id : 0;
}

/**
 * vpmu_sampling_map() - let the device write to an event's ring
 * @own: the event, open on the device
 *
 * The ring ends when the device has closed the event.
 *
 * Return: 0, also for an event that writes to its parent's; or a negative errno.
 */
int vpmu_sampling_map(struct vpmu_event *own)
{
	struct vpmu_sampler *sampler = own->sampler;

	if (!sampler_is_of(own))
		return 0;
	/* After a reset the device begins anew. */
	clear_page(sampler_metadata(sampler));
	sampler->tail = 0;
	return vpmu_control_map(own->dev, own->id, sampler->pages, ARRAY_SIZE(sampler->pages),
				VPMU_MAP_WRITABLE);
}

/* Copies from position @from of a ring, which wraps at its end. */
static void ring_copy(const struct vpmu_sampler *sampler, u64 from, void *to, size_t len)
{
	while (len) {
		size_t offset = from % RING_SIZE;
		size_t part = min(len, PAGE_SIZE - offset % PAGE_SIZE);
		struct page *page = sampler->pages[1 + offset / PAGE_SIZE];

		memcpy(to, page_address(page) + offset % PAGE_SIZE, part);
		to += part;
		from += part;
		len -= part;
	}
}

/* The moment, by the clock of the device's records. */
static u64 device_clock(const struct vpmu_device *dev)
{
	return dev->info.time_zero +
	       mul_u64_u32_shr(get_cycles(), dev->info.time_mult, dev->info.time_shift);
}

/* As perf core numbers a task in the records of an event; @nr is of the first namespace. */
static u32 replay_pid(const struct perf_event *event, u32 nr)
{
	struct pid *pid;

	if (event->parent)
		event = event->parent;
	if (event->ns == &init_pid_ns || !nr)
		return nr;
	rcu_read_lock();
	pid = find_pid_ns(nr, &init_pid_ns);
	nr = pid ? pid_nr_ns(pid, event->ns) : -1;
	rcu_read_unlock();
	return nr;
}

/* From the values of REGS, lowest number first. */
static void replay_regs(struct pt_regs *regs, const u64 *values)
{
	*regs = (struct pt_regs) {
		.ax = values[0],
		.bx = values[1],
		.cx = values[2],
		.dx = values[3],
		.si = values[4],
		.di = values[5],
		.bp = values[6],
		.sp = values[7],
		.ip = values[8],
		.flags = values[9],
		.cs = values[10],
		.ss = values[11],
		.r8 = values[12],
		.r9 = values[13],
		.r10 = values[14],
		.r11 = values[15],
		.r12 = values[16],
		.r13 = values[17],
		.r14 = values[18],
		.r15 = values[19],
		.orig_ax = -1,
	};
}

/* Registers of a sample that has its address and mode alone. */
static void replay_no_regs(struct pt_regs *regs, u64 ip, bool user)
{
	*regs = (struct pt_regs) {
		.ip = ip,
		.cs = user ? __USER_CS : __KERNEL_CS,
		.ss = user ? __USER_DS : __KERNEL_DS,
		.orig_ax = -1,
	};
}

/* Whether perf core would read from the current task what belongs to the sample's. */
static bool replay_is_late(const struct perf_event *event, struct pt_regs *regs, u32 tid)
{
	u64 type = event->attr.sample_type;

	if (!(type & (PERF_SAMPLE_STACK_USER | PERF_SAMPLE_REGS_USER)))
		return false;
	if (user_mode(regs) && !(type & PERF_SAMPLE_STACK_USER))
		return false;
	return task_pid_nr(current) != tid;
}

/* Reads the fields of the sample of @len words in replay->record; returns false for a bad one. */
static bool replay_parse(struct vpmu_event *own, struct vpmu_replay *replay, size_t len)
{
	const struct perf_event_header *header = (const void *)replay->record;
	const u64 *word = replay->record + 1, *end = replay->record + len;
	bool user = (header->misc & PERF_RECORD_MISC_CPUMODE_MASK) == PERF_RECORD_MISC_USER;
	const struct vpmu_sampler *sampler = own->sampler;
	struct perf_sample_data *data = &replay->data;
	struct perf_event *event = own->event;
	u64 ip, tid, time, addr, now, age;

	if (end - word < 5)
		return false;
	ip = *word++;
	tid = *word++;
	time = *word++;
	addr = *word++;
	perf_sample_data_init(data, addr, *word++);

	data->tid_entry.pid = replay_pid(event, lower_32_bits(tid));
	data->tid_entry.tid = replay_pid(event, upper_32_bits(tid));
	now = device_clock(own->dev);
	age = now > time ? now - time : 0;
	data->time = event->clock() - age;
	data->sample_flags |= PERF_SAMPLE_TID | PERF_SAMPLE_TIME;

	replay->members = 0;
	if (sampler->type & PERF_SAMPLE_READ) {
		if (word == end || *word > VPMU_GROUP || 2 * *word >= end - word)
			return false;
		replay->members = *word++;
		replay->counts = word;
		word += 2 * replay->members;
	}
	if (sampler->type & PERF_SAMPLE_CALLCHAIN) {
		if (word == end || *word > CHAIN_LEN || *word >= end - word)
			return false;
		replay->chain.nr = *word++;
		memcpy(replay->chain.ip, word, replay->chain.nr * sizeof(*word));
		word += replay->chain.nr;
		vpmu_sample_chain(data, (struct perf_callchain_entry *)&replay->chain);
	}
	if (sampler->type & PERF_SAMPLE_REGS_INTR && end - word > REGS_COUNT && *word)
		replay_regs(&replay->regs, word + 1);
	else
		replay_no_regs(&replay->regs, ip, user);
	return true;
}

/* Sends signals and counts down the limit of REFRESH, as perf core does after a handler. */
static void replay_account(struct perf_event *event)
{
	struct fasync_struct **fasync = &(event->parent ?: event)->fasync;
	struct vpmu_event *own = event->pmu_private;

	event->pending_kill = POLL_IN;
	if (atomic_read(&event->event_limit) && atomic_dec_and_test(&event->event_limit)) {
		event->pending_kill = POLL_HUP;
		own->ended = true;
		vpmu_aux_disable(event);
	} else if (!READ_ONCE(*fasync)) {
		return;
	}
	event->pending_wakeup = 1;
	irq_work_queue(&event->pending_irq);
}

/* Of an event that the device cannot keep out of a mode. */
static bool replay_is_excluded(const struct perf_event *event, struct pt_regs *regs)
{
	return user_mode(regs) ? event->attr.exclude_user : event->attr.exclude_kernel;
}

/* The count that the device has of an event, and that the sample has; false without one. */
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

/* Turns an event's count back to what it was at the sample, or forward again. */
static void replay_turn(const struct vpmu_replay *replay, struct perf_event *event, bool back)
{
	const struct vpmu_event *own = event->pmu_private;
	u64 then, since;

	if (!replay_count(replay, event, &then))
		return;
	since = own->count - then;
	local64_add(back ? -since : since, &event->count);
}

/* Does so for the group of an event: perf core reads it as it writes its record. */
static void replay_turn_group(const struct vpmu_replay *replay, struct perf_event *event,
			      bool back)
{
	struct perf_event *leader = event->group_leader, *sibling;

	if (!replay->members)
		return;
	if (leader->pmu == event->pmu)
		replay_turn(replay, leader, back);
	for_each_sibling_event(sibling, leader)
		if (sibling->pmu == event->pmu)
			replay_turn(replay, sibling, back);
}

static void replay_sample(struct vpmu_event *own, struct vpmu_replay *replay, size_t len)
{
	struct perf_event *event = own->event;
	u32 tid = upper_32_bits(replay->record[2]);
	bool passes;

	if (!replay_parse(own, replay, len) || replay_is_late(event, &replay->regs, tid)) {
		atomic64_inc(&event->lost_samples);
		return;
	}
	if (own->ended || replay_is_excluded(event, &replay->regs))
		return;
	replay_turn_group(replay, event, true);
	passes = vpmu_overflow(event, &replay->data, &replay->regs);
	replay_turn_group(replay, event, false);
	if (passes)
		replay_account(event);
}

/* Replays what lies in the ring up to @head, and shows that there is room. */
static void replay_records(struct vpmu_event *own, struct vpmu_replay *replay, u64 head)
{
	struct vpmu_sampler *sampler = own->sampler;
	struct perf_event_header header;

	while (sampler->tail != head) {
		u64 left = head - sampler->tail;

		if (left < sizeof(header))
			break;
		ring_copy(sampler, sampler->tail, &header, sizeof(header));
		/* A device that lies costs its own guest samples. */
		if (header.size < sizeof(header) || header.size % sizeof(u64) || header.size > left)
			break;
		if (header.type == PERF_RECORD_SAMPLE && header.size <= sizeof(replay->record)) {
			ring_copy(sampler, sampler->tail, replay->record, header.size);
			replay_sample(own, replay, header.size / sizeof(u64));
		}
		sampler->tail += header.size;
	}
	sampler->tail = head;
	/* Pairs with the device's load of the tail: the records have been read. */
	smp_store_release(&sampler_metadata(sampler)->data_tail, head);
}

/* Replays an event's ring here, unless another CPU is at it, or this one. */
static void replay_event(struct vpmu_event *own, struct vpmu_replay *replay)
{
	struct vpmu_sampler *sampler = own->sampler;
	struct perf_event_mmap_page *metadata = sampler_metadata(sampler);
	u64 head;

	lockdep_assert_irqs_disabled();
	if (replay->busy || !raw_spin_trylock(&sampler->lock))
		return;
	replay->busy = true;
	/* Pairs with the device's store of the head: the records are written. */
	head = smp_load_acquire(&metadata->data_head);
	if (head != sampler->tail)
		replay_records(own, replay, head);
	replay->busy = false;
	raw_spin_unlock(&sampler->lock);
}

/* Replays the rings of all events that are active here. */
static void replay_all(struct vpmu_vcpu *vcpu)
{
	struct vpmu_event *own;

	list_for_each_entry(own, &vcpu->sampling, sampling)
		replay_event(own, vcpu->replay);
}

/**
 * vpmu_sampling_start() - an event becomes active
 * @vcpu: this CPU's queue; interrupts are off
 * @own: the event
 */
void vpmu_sampling_start(struct vpmu_vcpu *vcpu, struct vpmu_event *own)
{
	struct perf_event *event = own->event;

	/*
	 * The limit was found to be used up as the event left its CPU: what disables it then
	 * waits until it is back.
	 */
	if (event->pending_disable) {
		vpmu_aux_disable(event);
		irq_work_queue(&event->pending_irq);
	} else {
		own->ended = false;
	}
	/* One that is stopped and started at once may not have been settled. */
	list_move(&own->sampling, &vcpu->sampling);
	if (!own->sampler->prompt && !hrtimer_is_queued(&vcpu->replay_timer))
		hrtimer_start(&vcpu->replay_timer, ns_to_ktime(REPLAY_NS),
			      HRTIMER_MODE_REL_PINNED_HARD);
}

/**
 * vpmu_sampling_stop() - the device has stopped an event
 * @own: the event, on the CPU where it was active; interrupts are off
 *
 * Its last samples are replayed by vpmu_sampling_settle(): a queue's lock is held here.
 */
void vpmu_sampling_stop(struct vpmu_event *own)
{
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(own->dev);

	list_move_tail(&own->sampling, &vcpu->stopped);
}

/**
 * vpmu_sampling_forget() - an event that was started early is not active after all
 * @own: the event, on the CPU where it would be; interrupts are off
 */
void vpmu_sampling_forget(struct vpmu_event *own)
{
	list_del_init(&own->sampling);
}

/**
 * vpmu_sampling_settle() - replay the last samples of events that were stopped
 * @vcpu: this CPU's queue; the contexts of the events are locked
 */
void vpmu_sampling_settle(struct vpmu_vcpu *vcpu)
{
	struct vpmu_event *own, *next;

	list_for_each_entry_safe(own, next, &vcpu->stopped, sampling) {
		list_del_init(&own->sampling);
		replay_event(own, vcpu->replay);
	}
}

/**
 * vpmu_sampling_replays() - whether perf core reads an event for a record that is replayed
 * @vcpu: this CPU's queue; interrupts are off
 * @event: the event
 *
 * Return: true if its count is the one of the sample's moment.
 */
bool vpmu_sampling_replays(const struct vpmu_vcpu *vcpu, const struct perf_event *event)
{
	const struct vpmu_replay *replay = vcpu->replay;
	u64 count;

	return replay->busy && replay_count(replay, event, &count);
}

/**
 * vpmu_sampling_read() - replay the samples that came before a reading
 * @own: the event read, on its CPU; interrupts are off
 */
void vpmu_sampling_read(struct vpmu_event *own)
{
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(own->dev);

	if (vcpu)
		replay_event(own, vcpu->replay);
}

/* On the CPU of a queue; interrupts are off. */
static void sampling_service(void *data)
{
	struct vpmu_vcpu *vcpu = data;

	replay_all(vcpu);
	vpmu_device_put(vcpu->dev);
}

static enum hrtimer_restart sampling_timer(struct hrtimer *timer)
{
	struct vpmu_vcpu *vcpu = container_of(timer, struct vpmu_vcpu, replay_timer);

	/* The CPU that it was started on may be away: no event is active there. */
	if (vpmu_vcpu_local(vcpu->dev) != vcpu || list_empty(&vcpu->sampling))
		return HRTIMER_NORESTART;
	replay_all(vcpu);
	hrtimer_forward_now(timer, ns_to_ktime(REPLAY_NS));
	return HRTIMER_RESTART;
}

/* Has the samples of a CPU's events replayed there; an event or a notice keeps the device. */
static void sampling_call(struct vpmu_device *dev, int cpu)
{
	struct vpmu_vcpu *vcpu = *per_cpu_ptr(dev->cpu_vcpu, cpu);

	if (!vcpu)
		return;
	/* The call uses the device until it is over, by which it does not outlive it. */
	vpmu_device_get(dev);
	if (smp_call_function_single_async(cpu, &vcpu->replay_call))
		vpmu_device_put(dev);
}

/**
 * vpmu_sampling_notice() - a ring has crossed its watermark
 * @dev: the device
 * @id: of the event that it was mapped with
 *
 * Called from the device's interrupt, on any CPU. Where a call is on its way already, it
 * replays these samples, too; an event that leaves its CPU has its samples replayed then.
 *
 * Return: false if the event does not sample through perf core.
 */
bool vpmu_sampling_notice(struct vpmu_device *dev, u64 id)
{
	const struct perf_event *event;
	struct vpmu_event *own;
	bool everywhere = false;
	unsigned long flags;
	int cpu = -1;

	spin_lock_irqsave(&dev->notice_lock, flags);
	own = xa_load(&dev->sampled, id);
	if (own) {
		event = own->event;
		everywhere = event->cpu < 0 && event->attr.inherit;
		cpu = event->cpu < 0 ? READ_ONCE(event->oncpu) : event->cpu;
		/* Until the lock is released there is the event, another user. */
		vpmu_device_get(dev);
	}
	spin_unlock_irqrestore(&dev->notice_lock, flags);
	if (!own)
		return false;
	if (everywhere)
		for_each_online_cpu(cpu)
			sampling_call(dev, cpu);
	else if (cpu >= 0)
		sampling_call(dev, cpu);
	vpmu_device_put(dev);
	return true;
}

/**
 * vpmu_sampling_init() - prepare a queue's part
 * @vcpu: the queue
 *
 * Return: 0 or -ENOMEM; vpmu_sampling_exit() undoes either.
 */
int vpmu_sampling_init(struct vpmu_vcpu *vcpu)
{
	INIT_LIST_HEAD(&vcpu->sampling);
	INIT_LIST_HEAD(&vcpu->stopped);
	INIT_CSD(&vcpu->replay_call, sampling_service, vcpu);
	vpmu_hrtimer_setup(&vcpu->replay_timer, sampling_timer, HRTIMER_MODE_REL_PINNED_HARD);
	vcpu->replay = kzalloc(sizeof(*vcpu->replay), GFP_KERNEL);
	return vcpu->replay ? 0 : -ENOMEM;
}

/**
 * vpmu_sampling_exit() - free it; no event is left
 * @vcpu: the queue
 */
void vpmu_sampling_exit(struct vpmu_vcpu *vcpu)
{
	hrtimer_cancel(&vcpu->replay_timer);
	kfree(vcpu->replay);
}

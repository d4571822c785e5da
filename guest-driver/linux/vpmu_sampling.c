// SPDX-License-Identifier: GPL-2.0
/*
 * Samples of events opened with perf_event_open(2).
 *
 * The device writes an event's samples to a ring that the driver allocates, and
 * the driver replays them to perf core: see vpmu_replay.c.
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
#include <linux/bits.h>
#include <linux/cpumask.h>
#include <linux/interrupt.h>
#include <linux/irq_work.h>
#include <linux/jiffies.h>
#include <linux/minmax.h>
#include <linux/mm.h>
#include <linux/percpu.h>
#include <linux/perf_event.h>
#include <linux/sched.h>
#include <linux/sched/clock.h>
#include <linux/slab.h>
#include <linux/smp.h>
#include <linux/timer.h>

#include "compat.h"
#include "perf_core_private.h"
#include "vpmu.h"
#include "vpmu_arch.h"
#include "vpmu_attr.h"
#include "vpmu_event.h"
#include "vpmu_replay.h"
#include "vpmu_ring.h"
#include "vpmu_view.h"

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
 * vpmu_sampling_leader() - find the leader whose samples contain an event's
 *                          count
 * @event: perf core's event, which is being opened
 *
 * Return: the leader's id on the device; zero if @event has no leader or is
 * inherited, or if the leader's samples contain no counts.
 */
u64 vpmu_sampling_leader(const struct perf_event *event)
{
	const struct perf_event *leader = event->group_leader;
	const struct vpmu_event *own;

	if (leader == event || leader->pmu != event->pmu || event->parent)
		return 0;
	own = leader->pmu_private;
	return own->sampler && own->sampler->records.type & PERF_SAMPLE_READ ? own->id : 0;
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

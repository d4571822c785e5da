// SPDX-License-Identifier: GPL-2.0
/*
 * Samples of events opened with perf_event_open(2).
 *
 * The device writes an event's samples to a ring that the driver allocates, and
 * the driver replays them to perf core: see vpmu_replay.c.
 *
 * Records are replayed on the CPU where the event is active, with interrupts
 * off. The driver replays them when the ring crosses its watermark, when the
 * event is scheduled out, when it is read, and every REPLAY_NS. With the
 * watermark, one device interrupt is enough for many samples. But if perf core
 * must read part of a sample at the replay, such as the user stack, the
 * watermark is one record.
 */
#include <linux/bits.h>
#include <linux/cpumask.h>
#include <linux/hrtimer.h>
#include <linux/ktime.h>
#include <linux/mm.h>
#include <linux/percpu.h>
#include <linux/perf_event.h>
#include <linux/slab.h>
#include <linux/smp.h>

#include "compat.h"
#include "perf_core_private.h"
#include "vpmu.h"
#include "vpmu_attr.h"
#include "vpmu_event.h"
#include "vpmu_replay.h"
#include "vpmu_ring.h"
#include "vpmu_view.h"

/*
 * Number of data pages of a ring. They hold about 1300 samples without call
 * chains, or 60 samples with the longest call chains.
 */
#define RING_PAGES	16
#define RING_SIZE	(RING_PAGES * PAGE_SIZE)

/* The longest time that a sample of an active event may wait for its replay */
#define REPLAY_NS	(100 * NSEC_PER_MSEC)

/**
 * struct vpmu_sampler - the ring of an event and of the events that inherit it
 * @records: the ring, as replays read it
 * @prompt: the watermark is one record, so each sample is replayed immediately
 * @pages: the metadata page, then the data pages
 */
struct vpmu_sampler {
	struct vpmu_records records;
	bool prompt;
	struct page *pages[1 + RING_PAGES];
};

/* Whether @own has its own ring. An inherited event uses its parent's ring. */
static bool sampler_is_of(const struct vpmu_event *own)
{
	return !own->event->parent;
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
	struct vpmu_sampler *sampler = kzalloc(sizeof(*sampler), GFP_KERNEL);
	unsigned int i;

	if (!sampler)
		return NULL;
	vpmu_records_init(&sampler->records);
	sampler->records.pages = sampler->pages;
	sampler->records.size = RING_SIZE;
	sampler->records.type = vpmu_attr_replayed(attr);
	sampler->prompt = attr->sample_type & VPMU_SAMPLE_PROMPT;
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
	own->sampler = sampler_alloc(&event->attr);
	if (!own->sampler)
		return -ENOMEM;
	own->freq = event->attr.freq;
	own->period = event->attr.sample_period;
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
	u32 flags = 0;

	vpmu_attr_request_replay(&own->event->attr, request);
	request->period = cpu_to_le64(own->period);
	if (own->freq)
		flags |= VPMU_OPEN_FREQ;
	if (own->sampler->prompt) {
		request->wakeup = cpu_to_le32(1);
	} else {
		request->wakeup = cpu_to_le32(RING_SIZE / 2);
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
	return vpmu_control_map(own->dev, own->id, sampler->pages, ARRAY_SIZE(sampler->pages),
				VPMU_MAP_WRITABLE);
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
	return vpmu_ring_alloc_shared(own->sampler->pages, ARRAY_SIZE(own->sampler->pages));
}

static void replay_event(struct vpmu_vcpu *vcpu, struct vpmu_event *own)
{
	/* One replay covers the whole ring: no second call is needed. */
	vpmu_replay(vcpu, own->event, &own->sampler->records, &own->ended);
}

/* Replays the rings of all events that are active here. */
static void replay_all(struct vpmu_vcpu *vcpu)
{
	struct vpmu_event *own;
	struct vpmu_view *view;

	list_for_each_entry(own, &vcpu->sampling, sampling)
		replay_event(vcpu, own);
	list_for_each_entry(view, &vcpu->views, entry)
		vpmu_view_replay(vcpu, view);
}

/**
 * vpmu_sampling_arm() - start the timer that replays samples every REPLAY_NS,
 *                       while this CPU has events to replay
 * @vcpu: this CPU's queue; interrupts are off
 */
void vpmu_sampling_arm(struct vpmu_vcpu *vcpu)
{
	if (!hrtimer_is_queued(&vcpu->replay_timer))
		hrtimer_start(&vcpu->replay_timer, ns_to_ktime(REPLAY_NS),
			      HRTIMER_MODE_REL_PINNED_HARD);
}

/**
 * vpmu_sampling_start() - add an event to the events that this CPU replays
 * @vcpu: this CPU's queue; interrupts are off
 * @own: the event
 */
void vpmu_sampling_start(struct vpmu_vcpu *vcpu, struct vpmu_event *own)
{
	/* Drop the samples from before this start. */
	if (own->ended)
		replay_event(vcpu, own);
	/*
	 * If the event's limit was used up, but the event left its CPU before
	 * perf core disabled it, have perf core disable it now.
	 */
	if (!perf_core_disable_again(own->event))
		own->ended = false;
	/*
	 * If the event's last samples have not been replayed yet, the event is
	 * still in vcpu->stopped: move it from there.
	 */
	list_move(&own->sampling, &vcpu->sampling);
	if (!own->sampler->prompt)
		vpmu_sampling_arm(vcpu);
}

/**
 * vpmu_sampling_stop() - remove an event from the events that this CPU replays
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
 * vpmu_sampling_settle() - replay the last samples of events that were stopped
 * @vcpu: this CPU's queue; the contexts of the events are locked
 */
void vpmu_sampling_settle(struct vpmu_vcpu *vcpu)
{
	struct vpmu_event *own, *next;

	list_for_each_entry_safe(own, next, &vcpu->stopped, sampling) {
		list_del_init(&own->sampling);
		replay_event(vcpu, own);
	}
}

/**
 * vpmu_sampling_read() - replay the samples of an event that is being read
 * @own: the event, on its CPU; interrupts are off
 */
void vpmu_sampling_read(struct vpmu_event *own)
{
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(own->dev);

	if (vcpu)
		replay_event(vcpu, own);
}

/* Runs on the CPU of the queue with interrupts off. */
static void sampling_service(void *data)
{
	struct vpmu_vcpu *vcpu = data;

	replay_all(vcpu);
	vpmu_device_put(vcpu->dev);
}

static enum hrtimer_restart sampling_timer(struct hrtimer *timer)
{
	struct vpmu_vcpu *vcpu = container_of(timer, struct vpmu_vcpu, replay_timer);

	/* If the queue's CPU went offline, no event is active there. */
	if (vpmu_vcpu_local(vcpu->dev) != vcpu ||
	    (list_empty(&vcpu->sampling) && list_empty(&vcpu->views)))
		return HRTIMER_NORESTART;
	replay_all(vcpu);
	hrtimer_forward_now(timer, ns_to_ktime(REPLAY_NS));
	return HRTIMER_RESTART;
}

/**
 * vpmu_sampling_call() - replay the rings of a CPU's events on that CPU
 * @dev: the device; the caller holds a reference
 * @cpu: the CPU
 */
void vpmu_sampling_call(struct vpmu_device *dev, int cpu)
{
	struct vpmu_vcpu *vcpu = *per_cpu_ptr(dev->cpu_vcpu, cpu);

	if (!vcpu)
		return;
	/* The call holds a reference on the device. */
	vpmu_device_get(dev);
	if (smp_call_function_single_async(cpu, &vcpu->replay_call))
		vpmu_device_put(dev);
}

/**
 * vpmu_sampling_notice() - handle a ring that has crossed its watermark
 * @dev: the device
 * @id: id of the event that the ring belongs to
 *
 * Called from the device's interrupt, on any CPU. To replay the ring's samples,
 * sends a call to the CPU where the event is active, or to all CPUs if tasks
 * may have inherited the event. If a call to a CPU is already pending, that
 * call also replays these samples. If the event is not active, the samples were
 * replayed when the event left its CPU.
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

	spin_lock_irqsave(&dev->lookup.lock, flags);
	own = xa_load(&dev->lookup.sampled, id);
	if (own) {
		event = own->event;
		everywhere = event->cpu < 0 && event->attr.inherit;
		cpu = event->cpu < 0 ? perf_core_cpu(event) : event->cpu;
		/*
		 * While lookup.lock is held, the event's reference keeps the
		 * device alive. Get another reference, for use after the
		 * unlock.
		 */
		vpmu_device_get(dev);
	}
	spin_unlock_irqrestore(&dev->lookup.lock, flags);
	if (!own)
		return false;
	if (everywhere)
		for_each_online_cpu(cpu)
			vpmu_sampling_call(dev, cpu);
	else if (cpu >= 0)
		vpmu_sampling_call(dev, cpu);
	vpmu_device_put(dev);
	return true;
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
	INIT_CSD(&vcpu->replay_call, sampling_service, vcpu);
	vpmu_hrtimer_setup(&vcpu->replay_timer, sampling_timer, HRTIMER_MODE_REL_PINNED_HARD);
	return vpmu_replay_init(vcpu);
}

/**
 * vpmu_sampling_exit() - free a queue's state for sampling, after all events
 *                        are closed
 * @vcpu: the queue
 */
void vpmu_sampling_exit(struct vpmu_vcpu *vcpu)
{
	hrtimer_cancel(&vcpu->replay_timer);
	vpmu_replay_exit(vcpu);
}

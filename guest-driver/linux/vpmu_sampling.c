// SPDX-License-Identifier: GPL-2.0
/*
 * Samples through the perf core door.
 *
 * The device writes the samples of an event to a ring of the driver's, and the driver
 * replays them to perf core: see vpmu_replay.c.
 *
 * Records are replayed where the event is active, with interrupts off: at the ring's
 * watermark, which one device interrupt reports for many samples; when the event goes
 * off its CPU; when it is read; and every REPLAY_NS. An event whose samples hold
 * something that is read at the replay, such as the user's stack, has a watermark of
 * one record.
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

/* Data pages of a ring: some 800 samples without call chains, 50 with the longest. */
#define RING_PAGES	16
#define RING_SIZE	(RING_PAGES * PAGE_SIZE)

/* Limit on the delay of a sample of an active event. */
#define REPLAY_NS	(100 * NSEC_PER_MSEC)

/**
 * struct vpmu_sampler - the ring of an event and of those that inherit it
 * @records: as they are replayed
 * @prompt: the watermark is one record
 * @pages: the metadata page, then the data
 */
struct vpmu_sampler {
	struct vpmu_records records;
	bool prompt;
	struct page *pages[1 + RING_PAGES];
};

/* Whether @own's ring is its own, not that of the event that it inherits. */
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
 * @own: the event; the device does not write there any more
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
 * vpmu_sampling_leader() - find the leader of the group whose counts samples have
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
	return own->sampler && own->sampler->records.type & PERF_SAMPLE_READ ? own->id : 0;
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
	clear_page(page_address(sampler->pages[0]));
	return vpmu_control_map(own->dev, own->id, sampler->pages, ARRAY_SIZE(sampler->pages),
				VPMU_MAP_WRITABLE);
}

/**
 * vpmu_sampling_ring() - make a ring of an event's pages that outlives the event
 * @own: the event
 *
 * Return: a ring of the same pages, for vpmu_ring_free(); or NULL.
 */
struct vpmu_ring *vpmu_sampling_ring(const struct vpmu_event *own)
{
	return vpmu_ring_alloc_shared(own->sampler->pages, ARRAY_SIZE(own->sampler->pages));
}

static void replay_event(struct vpmu_vcpu *vcpu, struct vpmu_event *own)
{
	/* Its ring is no longer than what is replayed at a time. */
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
 * vpmu_sampling_arm() - replay every REPLAY_NS while there are events to replay to
 * @vcpu: this CPU's queue; interrupts are off
 */
void vpmu_sampling_arm(struct vpmu_vcpu *vcpu)
{
	if (!hrtimer_is_queued(&vcpu->replay_timer))
		hrtimer_start(&vcpu->replay_timer, ns_to_ktime(REPLAY_NS),
			      HRTIMER_MODE_REL_PINNED_HARD);
}

/**
 * vpmu_sampling_start() - add an event to those that are replayed here
 * @vcpu: this CPU's queue; interrupts are off
 * @own: the event
 */
void vpmu_sampling_start(struct vpmu_vcpu *vcpu, struct vpmu_event *own)
{
	/*
	 * The limit was found to be used up as the event left its CPU: what disables it then
	 * waits until it is back.
	 */
	if (!perf_core_disable_again(own->event))
		own->ended = false;
	/* One that is stopped and started at once may not have been settled. */
	list_move(&own->sampling, &vcpu->sampling);
	if (!own->sampler->prompt)
		vpmu_sampling_arm(vcpu);
}

/**
 * vpmu_sampling_stop() - take an event from those that are replayed here
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
 * vpmu_sampling_forget() - forget an event that was started early, and is not active
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
		replay_event(vcpu, own);
	}
}

/**
 * vpmu_sampling_read() - replay the samples that came before a reading
 * @own: the event read, on its CPU; interrupts are off
 */
void vpmu_sampling_read(struct vpmu_event *own)
{
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(own->dev);

	if (vcpu)
		replay_event(vcpu, own);
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
	if (vpmu_vcpu_local(vcpu->dev) != vcpu ||
	    (list_empty(&vcpu->sampling) && list_empty(&vcpu->views)))
		return HRTIMER_NORESTART;
	replay_all(vcpu);
	hrtimer_forward_now(timer, ns_to_ktime(REPLAY_NS));
	return HRTIMER_RESTART;
}

/**
 * vpmu_sampling_call() - have the rings of a CPU's events replayed there
 * @dev: the device, which an event or a notice keeps
 * @cpu: the CPU
 */
void vpmu_sampling_call(struct vpmu_device *dev, int cpu)
{
	struct vpmu_vcpu *vcpu = *per_cpu_ptr(dev->cpu_vcpu, cpu);

	if (!vcpu)
		return;
	/* The call is a user of the device, which so outlives it. */
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

	spin_lock_irqsave(&dev->lookup.lock, flags);
	own = xa_load(&dev->lookup.sampled, id);
	if (own) {
		event = own->event;
		everywhere = event->cpu < 0 && event->attr.inherit;
		cpu = event->cpu < 0 ? perf_core_cpu(event) : event->cpu;
		/* Until the lock is released there is the event, another user. */
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
 * vpmu_sampling_init() - prepare a queue's state
 * @vcpu: the queue
 *
 * Return: 0 or -ENOMEM; vpmu_sampling_exit() undoes either.
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
 * vpmu_sampling_exit() - free a queue's state; all events are closed
 * @vcpu: the queue
 */
void vpmu_sampling_exit(struct vpmu_vcpu *vcpu)
{
	hrtimer_cancel(&vcpu->replay_timer);
	vpmu_replay_exit(vcpu);
}

// SPDX-License-Identifier: GPL-2.0
/*
 * One kick per direction when a context is scheduled, on kernels before 6.2.
 *
 * There perf core brackets each event by itself, so nothing tells the first event
 * of a context that more follow, nor the last that it is the last. But all of them
 * move within one hold of the context's lock. So the first to come takes along
 * those that are expected to come, and the first to go takes along all.
 *
 * The expectation can be wrong, as when perf core finds no place for an event. Such
 * a stray counts on the device and must not count for perf: it is stopped with the
 * next event of the context that goes, before the context can move to another CPU,
 * and what it counted is dropped.
 */
#include <linux/perf_event.h>
#include <linux/smp.h>

#include "compat.h"
#include "vpmu.h"
#include "vpmu_event.h"

static bool context_expects(const struct perf_event *event, const struct perf_event *other)
{
	const struct vpmu_event *own;

	if (other == event || other->pmu != event->pmu)
		return false;
	own = other->pmu_private;
	return own->id && !own->started &&
	       other->state == PERF_EVENT_STATE_INACTIVE &&
	       other->group_leader->state >= PERF_EVENT_STATE_INACTIVE &&
	       (other->cpu == -1 || other->cpu == smp_processor_id());
}

/**
 * vpmu_context_enter() - an event comes; start those that will follow
 * @vcpu: this CPU's queue, within perf core's bracket of the event
 * @event: that comes; its context's lock is held
 */
void vpmu_context_enter(struct vpmu_vcpu *vcpu, struct perf_event *event)
{
	struct perf_event *other;

	list_for_each_entry(other, &event->ctx->event_list, event_entry)
		if (context_expects(event, other))
			vpmu_event_start(vcpu, other);
}

/**
 * vpmu_context_leave() - an event goes; stop those that go with it, and strays
 * @vcpu: this CPU's queue, within perf core's bracket of the event
 * @event: that goes; its context's lock is held
 */
void vpmu_context_leave(struct vpmu_vcpu *vcpu, struct perf_event *event)
{
	struct perf_event *other;

	list_for_each_entry(other, &event->ctx->event_list, event_entry) {
		struct vpmu_event *own = other->pmu_private;

		if (other->pmu != event->pmu || other == event || !own->started)
			continue;
		if (other->state != PERF_EVENT_STATE_ACTIVE) {
			own->stray = true;
			vpmu_event_stop(vcpu, other);
		} else if (vpmu_class_leaves(other)) {
			/* Stopped already when its turn comes, it adds no kick. */
			other->hw.state = PERF_HES_STOPPED | PERF_HES_UPTODATE;
			vpmu_event_stop(vcpu, other);
		}
	}
}

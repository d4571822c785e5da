// SPDX-License-Identifier: GPL-2.0
/*
 * One kick per direction when a context is scheduled.
 *
 * After pmu->del(), perf core marks an event as off its CPU, and a reader on another CPU then
 * uses the count without the context's lock. So the device must answer for an event before del
 * returns. The context stays locked while all its events are scheduled out. So the
 * first event also sends the commands for the other events, which later find
 * their answers.
 *
 * Before 6.2, perf core disables the PMU for each event separately, so the first event of a
 * context does not know whether others follow. The first event scheduled in starts those that
 * are expected to follow.
 *
 * The expectation can be wrong, for example if perf core finds no room for an event. Such an
 * unexpected event counts on the device but must not count for perf. It is stopped with the
 * context's next event that is scheduled out, before the context can move to another CPU, and
 * the count from that time is dropped.
 */
#include <linux/perf_event.h>
#include <linux/smp.h>

#include "compat.h"
#include "perf_core_private.h"
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
 * vpmu_context_enter() - start the events that are expected to follow an event
 * @vcpu: this CPU's queue; its PMU is disabled for the event
 * @event: the event, which is started; its context's lock is held
 */
void vpmu_context_enter(struct vpmu_vcpu *vcpu, struct perf_event *event)
{
	struct perf_event *other;

	perf_core_for_each_event(other, perf_core_context(event))
		if (context_expects(event, other))
			vpmu_event_start(vcpu, other);
}

/* Whether @other, which is active, is scheduled out before the context is unlocked. */
static bool context_loses(const struct perf_event *event, const struct perf_event *other)
{
	return vpmu_switch_is_from(perf_core_context(event)) ||
	       perf_core_class_leaves(event, other);
}

/**
 * vpmu_context_leave() - stop the events that leave with an event
 * @vcpu: this CPU's queue; its PMU is disabled for the event
 * @event: the event, which is stopped; its context's lock is held
 *
 * Stops unexpected events, too.
 */
void vpmu_context_leave(struct vpmu_vcpu *vcpu, struct perf_event *event)
{
	struct perf_event *other;

	perf_core_for_each_event(other, perf_core_context(event)) {
		struct vpmu_event *own = other->pmu_private;

		if (other->pmu != event->pmu || other == event || !own->started)
			continue;
		if (other->state != PERF_EVENT_STATE_ACTIVE) {
			own->unexpected = true;
			own->coming = false;
			vpmu_event_stop(vcpu, other);
		} else if (context_loses(event, other)) {
			/* When perf core takes @other out later, it is already stopped: no kick. */
			other->hw.state = PERF_HES_STOPPED | PERF_HES_UPTODATE;
			vpmu_event_stop(vcpu, other);
		}
	}
}

/*
 * If a leader is scheduled out alone, its siblings may follow or not: read them
 * with the same kick, in case they do.
 */
static void context_read_group(struct vpmu_vcpu *vcpu, struct perf_event *event)
{
	struct perf_event *sibling;

	if (event->group_leader != event)
		return;
	vcpu->group_read = event;
	for_each_sibling_event(sibling, event) {
		const struct vpmu_event *own = sibling->pmu_private;

		if (sibling->pmu == event->pmu && own->started)
			vpmu_vcpu_append(vcpu, sibling, VPMU_COMMAND_READ, 0);
	}
}

/*
 * Whether the answer for @event may wait until the PMU is enabled. It may for an
 * event that was read when its leader was scheduled out. It may also for a CPU
 * event: perf core keeps the PMU disabled from taking CPU events out until it adds
 * them again, also at switches to tasks with pinned events and between cgroups.
 * To get the answer before that would cost another exit.
 */
static bool context_waits(const struct vpmu_vcpu *vcpu, const struct perf_event *event)
{
	const struct vpmu_event *own = event->pmu_private;

	if (!VPMU_CONTEXT_IS_BRACKETED)
		return false;
	if (context_loses(event, event))
		return !own->task;
	return vcpu->group_read == event->group_leader;
}

/**
 * vpmu_context_part() - get the count of a stopped event that is scheduled out
 * @vcpu: this CPU's queue; its PMU is disabled
 * @event: the event; its context's lock is held
 */
void vpmu_context_part(struct vpmu_vcpu *vcpu, struct perf_event *event)
{
	if (context_waits(vcpu, event))
		return;
	if (!VPMU_CONTEXT_IS_BRACKETED || context_loses(event, event))
		vpmu_context_leave(vcpu, event);
	else
		context_read_group(vcpu, event);
	vpmu_switch_flush(vcpu);
}

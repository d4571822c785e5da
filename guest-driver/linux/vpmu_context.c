// SPDX-License-Identifier: GPL-2.0
/*
 * Sends one kick for all events of a context that are scheduled in together,
 * and one kick for all events that are scheduled out together.
 *
 * After pmu->del(), perf core marks an event as off its CPU, and a reader on
 * another CPU then uses the count without the context's lock. So the device
 * must have answered the command that stops the event before pmu->del()
 * returns. To save exits, the driver sends the stop commands of all events when
 * perf core stops the first one, and waits for all answers before pmu->del() of
 * any event returns. Nobody can see that the other events stop early, because
 * the context stays locked until all its events are scheduled out.
 *
 * Before 6.2, perf core disables and enables the PMU for each event separately.
 * So when perf core has added an event, the driver gathers the event's command
 * if perf core is sure to add another event before it unlocks the context. The
 * last of these events sends all commands. If perf core cannot add a group
 * after all, it schedules out the members that it has already added, and this
 * also sends what was gathered.
 */
#include <linux/perf_event.h>

#include "compat.h"
#include "perf_core_private.h"
#include "vpmu.h"
#include "vpmu_event.h"

/*
 * Whether perf core is sure to add the whole group of @leader, of the PMU vpmu,
 * when it schedules in the group's context on this CPU.
 *
 * perf core filters groups by their leader. If an event cannot be added, perf
 * core does not try to add those that follow in the group. So perf core is sure
 * to add a group only if all its events are of the PMU vpmu, which can add
 * every event.
 */
static bool context_adds(struct perf_event *leader)
{
	struct perf_event *sibling;

	if (!perf_core_has_room(leader) || !perf_core_admits(leader))
		return false;
	for_each_sibling_event(sibling, leader)
		if (sibling->pmu != leader->pmu)
			return false;
	return true;
}

/*
 * Whether perf core adds @other after @event, which it has just added, or
 * schedules out @event again. An inactive event of the same group comes later
 * in the group.
 */
static bool context_follows(const struct perf_event *event, const struct perf_event *other)
{
	struct perf_event *leader = other->group_leader;

	if (other->pmu != event->pmu || other->state != PERF_EVENT_STATE_INACTIVE)
		return false;
	if (leader == event->group_leader)
		return true;
	return leader->pmu == event->pmu && leader->state == PERF_EVENT_STATE_INACTIVE &&
	       context_adds(leader);
}

/**
 * vpmu_context_awaits() - whether the command that starts an event can wait for
 *                         the commands of other events
 * @event: the event, which perf core is adding; its context's lock is held
 *
 * Return: true if perf core adds another event, or schedules @event out, before
 * it unlocks the context.
 */
bool vpmu_context_awaits(const struct perf_event *event)
{
	const struct perf_event *other;

	if (VPMU_CONTEXT_IS_BRACKETED)
		return false;
	perf_core_for_each_event(other, perf_core_context(event))
		if (context_follows(event, other))
			return true;
	return false;
}

/*
 * Stops the events that are scheduled out together with @event, which has been
 * stopped.
 */
static void context_leave(struct vpmu_vcpu *vcpu, struct perf_event *event)
{
	struct perf_event *other;

	perf_core_for_each_event(other, perf_core_context(event)) {
		const struct vpmu_event *own = other->pmu_private;

		if (other->pmu != event->pmu || other == event || !own->started ||
		    !perf_core_class_leaves(event, other))
			continue;
		/*
		 * With this state set, pmu->stop() sends no command when perf
		 * core later calls it for @other.
		 */
		other->hw.state = PERF_HES_STOPPED | PERF_HES_UPTODATE;
		vpmu_event_stop(vcpu, other);
	}
}

/*
 * When perf core schedules out a leader alone, it may schedule out the siblings
 * next. Read the siblings with the leader's kick, so that they then need no
 * kick of their own.
 */
static void context_read_group(struct vpmu_vcpu *vcpu, struct perf_event *event)
{
	struct perf_event *sibling;

	if (event->group_leader != event)
		return;
	vcpu->group_read = event;
	for_each_sibling_event(sibling, event) {
		const struct vpmu_event *own = sibling->pmu_private;

		if (sibling->pmu == event->pmu && own->started &&
		    sibling->state == PERF_EVENT_STATE_ACTIVE)
			vpmu_vcpu_append(vcpu, sibling, VPMU_COMMAND_READ, 0);
	}
}

/*
 * Whether the command that stops @event can wait until perf core enables the
 * PMU. Sending the command earlier would cost another exit. It can wait if:
 *
 * - the event was read when its leader was scheduled out; or
 * - perf core schedules out all CPU events of a class, pinned or flexible: perf
 *   core then keeps the PMU disabled until it has added these events again,
 *   also when it switches to a task with pinned events, or between cgroups.
 */
static bool context_waits(const struct vpmu_vcpu *vcpu, const struct perf_event *event)
{
	const struct vpmu_event *own = event->pmu_private;

	if (!VPMU_CONTEXT_IS_BRACKETED)
		return false;
	if (perf_core_class_leaves(event, event))
		return !own->task;
	return vcpu->group_read == event->group_leader;
}

/**
 * vpmu_context_part() - get the count of a stopped event that is being
 *                       scheduled out, unless this can wait until the PMU is
 *                       enabled
 * @vcpu: this CPU's queue; its PMU is disabled
 * @event: the event; its context's lock is held
 */
void vpmu_context_part(struct vpmu_vcpu *vcpu, struct perf_event *event)
{
	if (context_waits(vcpu, event))
		return;
	if (!VPMU_CONTEXT_IS_BRACKETED || perf_core_class_leaves(event, event))
		context_leave(vcpu, event);
	else
		context_read_group(vcpu, event);
	vpmu_vcpu_flush(vcpu);
}

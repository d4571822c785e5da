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
 * Before 6.2, perf core disables the PMU for each event separately. So when
 * perf core adds the first event of a context, the driver does not know whether
 * other events follow. Together with the first event, it starts the events that
 * it expects to follow: those of the same group, and those of groups that perf
 * core is sure to add.
 *
 * But if an event of the same group cannot be added, perf core does not add
 * those that follow it. An event that was started but not added is called
 * unexpected: it counts on the device but must not count for perf. perf core
 * schedules out the rest of the group before it unlocks the context. The driver
 * then stops the unexpected event, and drops what it has counted and sampled
 * since its start.
 */
#include <linux/perf_event.h>

#include "compat.h"
#include "perf_core_private.h"
#include "vpmu.h"
#include "vpmu_event.h"

/**
 * vpmu_context_adds() - whether perf core is sure to add an event's group when
 *                       it schedules in the group's context on this CPU
 * @leader: the group's leader, of the PMU vpmu; its context is locked
 *
 * perf core filters groups by their leader. If an event cannot be added, perf
 * core does not try to add those that follow in the group. So perf core is sure
 * to add a group only if all its events are of the PMU vpmu, which can add
 * every event.
 *
 * Return: true if the leader is enabled, and perf core will add the group.
 */
bool vpmu_context_adds(struct perf_event *leader)
{
	struct perf_event *sibling;

	if (leader->state < PERF_EVENT_STATE_INACTIVE || !perf_core_has_room(leader) ||
	    !perf_core_admits(leader))
		return false;
	for_each_sibling_event(sibling, leader)
		if (sibling->pmu != leader->pmu)
			return false;
	return true;
}

static bool context_expects(const struct perf_event *event, const struct perf_event *other)
{
	struct perf_event *leader = other->group_leader;
	const struct vpmu_event *own;

	if (other == event || other->pmu != event->pmu)
		return false;
	own = other->pmu_private;
	return own->id && !own->started &&
	       other->state == PERF_EVENT_STATE_INACTIVE &&
	       (leader == event->group_leader ||
		(leader->pmu == event->pmu && vpmu_context_adds(leader)));
}

/**
 * vpmu_context_enter() - start the events that perf core is expected to add
 *                        after an event
 * @vcpu: this CPU's queue; its PMU is disabled for the event
 * @event: the event, which has been started; its context's lock is held
 */
void vpmu_context_enter(struct vpmu_vcpu *vcpu, struct perf_event *event)
{
	struct perf_event *other;

	perf_core_for_each_event(other, perf_core_context(event))
		if (context_expects(event, other))
			vpmu_event_start(vcpu, other);
}

/*
 * Whether @other, which is active, is scheduled out before the context is
 * unlocked.
 */
static bool context_loses(const struct perf_event *event, const struct perf_event *other)
{
	return vpmu_switch_is_from(perf_core_context(event)) ||
	       perf_core_class_leaves(event, other);
}

/**
 * vpmu_context_leave() - stop the events that are scheduled out together with
 *                        an event
 * @vcpu: this CPU's queue; its PMU is disabled for the event
 * @event: the event, which has been stopped; its context's lock is held
 *
 * Also stops unexpected events: those that were started but that perf core has
 * not added.
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
			vpmu_switch_arrived(own);
			vpmu_event_stop(vcpu, other);
		} else if (context_loses(event, other)) {
			/*
			 * With this state set, pmu->stop() sends no command
			 * when perf core later calls it for @other.
			 */
			other->hw.state = PERF_HES_STOPPED | PERF_HES_UPTODATE;
			vpmu_event_stop(vcpu, other);
		}
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
	if (context_loses(event, event))
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
	if (!VPMU_CONTEXT_IS_BRACKETED || context_loses(event, event))
		vpmu_context_leave(vcpu, event);
	else
		context_read_group(vcpu, event);
	vpmu_switch_flush(vcpu);
}

// SPDX-License-Identifier: GPL-2.0
/*
 * One event between perf core and the device: what goes out, and what comes back.
 *
 * The device keeps the count; the driver adds the growth to perf's.
 */
#include <linux/overflow.h>
#include <linux/perf_event.h>
#include <linux/preempt.h>

#include "perf_core_private.h"
#include "vpmu.h"
#include "vpmu_event.h"
#include "vpmu_file.h"
#include "vpmu_replay.h"
#include "vpmu_view.h"

/* struct vpmu_event::unpaid_ns: all running time there is and will be. */
#define OWED_ALL	U64_MAX

/* PERF_EVENT_IOC_PERIOD stops and starts an event that is active. */
static void event_start_sampling(struct vpmu_vcpu *vcpu, struct perf_event *event,
				 struct vpmu_event *own)
{
	vpmu_sampling_start(vcpu, own);
	if (own->period == event->attr.sample_period)
		return;
	own->period = event->attr.sample_period;
	vpmu_vcpu_append(vcpu, event, VPMU_COMMAND_PERIOD, own->period);
}

/**
 * vpmu_event_start() - start counting an event, unless its file has it off
 * @vcpu: this CPU's queue
 * @event: the event; its context's lock is held
 *
 * Return: true if that needed a command.
 */
bool vpmu_event_start(struct vpmu_vcpu *vcpu, struct perf_event *event)
{
	struct vpmu_event *own = event->pmu_private;

	/* Stopped while the PMU is disabled: only the answer says whether it may be started. */
	if (own->stopping)
		vpmu_vcpu_flush(vcpu);
	if (own->started || own->limit_hit || !own->id || READ_ONCE(own->dev->life.asleep) ||
	    !vpmu_group_allows(event))
		return false;
	own->started = true;
	if (own->sampler)
		event_start_sampling(vcpu, event, own);
	vpmu_vcpu_append(vcpu, event, own->task ? VPMU_COMMAND_IN : VPMU_COMMAND_ENABLE, 0);
	return true;
}

/**
 * vpmu_event_stop() - stop counting an event
 * @vcpu: this CPU's queue
 * @event: the event; its context's lock is held
 *
 * Return: true if that needed a command.
 */
bool vpmu_event_stop(struct vpmu_vcpu *vcpu, struct perf_event *event)
{
	struct vpmu_event *own = event->pmu_private;

	if (!own->started)
		return false;
	own->started = false;
	/* The answer to OUT tells whether the limit is hit; that to DISABLE is "off" anyway. */
	if (!own->task && own->file && own->file->control.limited) {
		own->stopping = true;
		vpmu_vcpu_append(vcpu, event, VPMU_COMMAND_READ, 0);
	}
	vpmu_vcpu_append(vcpu, event, own->task ? VPMU_COMMAND_OUT : VPMU_COMMAND_DISABLE, 0);
	return true;
}

static bool is_stop(u32 op)
{
	return op == VPMU_COMMAND_OUT || op == VPMU_COMMAND_DISABLE;
}

/*
 * Takes time in which the host did not count off perf core's running time, so
 * that contention on the host shows as it would on hardware. What perf core has
 * not added up yet can only be taken where it would do so right afterwards, as
 * behind pmu->del(): it is added up here, because a reader elsewhere must not find
 * less than none. The rest waits for the next answer. Perf core's clock of an event
 * starts before the device's, so all is taken of one that @never ran.
 */
static void event_settle(struct perf_event *event, struct vpmu_event *own, u32 op,
			 bool never)
{
	u64 room, taken, fresh = 0;

	if (is_stop(op) && event->state == PERF_EVENT_STATE_ACTIVE)
		fresh = perf_core_add_up(event);
	room = perf_core_running(event) + fresh;
	taken = never ? room : min(own->unpaid_ns, room);
	perf_core_set_running(event, room - taken);
	if (own->unpaid_ns != OWED_ALL)
		own->unpaid_ns -= min(own->unpaid_ns, taken);
}

/* Of @time more the event did not count. */
static void event_owe(struct vpmu_event *own, u64 time)
{
	if (check_add_overflow(own->unpaid_ns, time, &own->unpaid_ns))
		own->unpaid_ns = OWED_ALL;
}

/* Adds what is new in the device's answer to perf's event, or to the file's tally. */
static void event_credit(struct perf_event *event, struct vpmu_event *own, u32 op,
			 u64 count, u64 enabled, u64 running)
{
	/* After a reset there is nothing that the device has and perf has not. */
	if (op == VPMU_COMMAND_RESET)
		local64_set(&event->count, 0);
	else
		local64_add(count, &event->count);
	if (own->file) {
		atomic64_add(enabled, &own->file->tally.enabled_ns);
		atomic64_add(running, &own->file->tally.running_ns);
		return;
	}
	if (enabled > running)
		event_owe(own, enabled - running);
	if (own->unpaid_ns)
		event_settle(event, own, op, !running && !own->running_ns &&
			     !local64_read(&event->count));
	perf_event_update_userpage(event);
}

/**
 * vpmu_event_idle() - take the running time off an event that the device does not have
 * @event: the event; its context's lock is held
 * @stops: perf core takes it out now
 *
 * perf core tries no other event of the context behind one that cannot be added: so one
 * that the device has not is added like any, and its running time taken off.
 */
void vpmu_event_idle(struct perf_event *event, bool stops)
{
	struct vpmu_event *own = event->pmu_private;

	if (own->id || own->view)
		return;
	own->unpaid_ns = OWED_ALL;
	event_settle(event, own, stops ? VPMU_COMMAND_OUT : VPMU_COMMAND_READ, false);
}

/*
 * The device has lost the event, and nobody can tell since when the count falls
 * short. A file's reader gets the end of file. perf core has no such state
 * that could be set from here: there the event has never run, and perf shows it as
 * not counted, or its inherited part as missing, instead of a count too small.
 */
static void event_lost(struct perf_event *event, struct vpmu_event *own, u32 op)
{
	/* Nobody may be woken here: the scheduler's locks can be held. */
	if (own->file) {
		WRITE_ONCE(own->file->error, true);
		return;
	}
	own->unpaid_ns = OWED_ALL;
	event_settle(event, own, op, false);
	perf_event_update_userpage(event);
}

/*
 * Whether an answer says that the device has the event off because it has used up
 * its refreshes: it is not us who have it off then. A task's event never is off
 * otherwise, for it is switched by IN and OUT.
 */
static bool event_is_spent(const struct vpmu_event *own, u32 op, s32 state)
{
	if (state != VPMU_STATE_OFF || !own->file || !own->file->control.limited)
		return false;
	return own->task || (op == VPMU_COMMAND_READ && (own->started || own->stopping));
}

/*
 * Whether the device names a task in the event's output: the one that it came in
 * with, until it goes out. Between two tasks that inherited the same events perf
 * core swaps their contexts instead, by which nothing goes out or comes in. A
 * pinned context is not swapped.
 */
static bool event_names_task(const struct vpmu_event *own)
{
	return own->trace || own->sampler || (own->file && own->file->tracks);
}

/*
 * Nor is one that is started and stopped: whether it is, is its task's alone. Nor one of
 * a family that the device has not all of: a task without would get one of a task with.
 */
static bool event_is_anchored(const struct vpmu_event *own)
{
	const struct perf_event *parent = own->event->parent;
	const struct vpmu_event *first = parent ? parent->pmu_private : own;

	return READ_ONCE(first->incomplete) ||
	       (own->file && READ_ONCE(own->file->links.anchored));
}

/**
 * vpmu_event_pin() - pin the context of an event that comes in
 * @event: the event; perf core holds the context's lock, which protects the count
 */
void vpmu_event_pin(struct perf_event *event)
{
	struct vpmu_event *own = event->pmu_private;

	if (!own->task || own->pinned || !(event_names_task(own) || event_is_anchored(own)))
		return;
	own->pinned = true;
	perf_core_pin(event);
}

/**
 * vpmu_event_anchor() - pin the context of an event that is anchored, if the event is in
 * @own: the event, which stays meanwhile; interrupts are off
 */
void vpmu_event_anchor(struct vpmu_event *own)
{
	struct perf_event_context *ctx = perf_core_context(own->event);

	/* One that is being made, or comes later, finds its file anchored. */
	if (!ctx)
		return;
	perf_core_lock(ctx);
	if (own->event->state == PERF_EVENT_STATE_ACTIVE)
		vpmu_event_pin(own->event);
	perf_core_unlock(ctx);
}

/**
 * vpmu_event_unpin() - unpin the context of an event that goes out
 * @event: the event; its context is locked
 */
void vpmu_event_unpin(struct perf_event *event)
{
	struct vpmu_event *own = event->pmu_private;

	if (!own->pinned)
		return;
	own->pinned = false;
	perf_core_unpin(event);
}

static void event_forget(struct vpmu_event *own)
{
	event_lost(own->event, own, 0);
	WRITE_ONCE(own->id, 0);
}

/**
 * vpmu_event_lose() - the device has lost an event, or was reset
 * @own: the event, which stays meanwhile
 */
void vpmu_event_lose(struct vpmu_event *own)
{
	struct perf_event_context *ctx = perf_core_context(own->event);

	vpmu_event_unpublish(own);
	/* An event that is being made has no context yet, and nobody else looks at it. */
	if (!ctx) {
		event_forget(own);
		return;
	}
	perf_core_lock_irq(ctx);
	event_forget(own);
	perf_core_unlock_irq(ctx);
}

/**
 * vpmu_event_read() - struct pmu::read
 * @event: the event
 */
void vpmu_event_read(struct perf_event *event)
{
	struct vpmu_event *own = event->pmu_private;
	struct vpmu_vcpu *vcpu;

	/* A queue's lock must not be taken from an NMI; the last count stays then. */
	if (in_nmi() || event->hw.state & PERF_HES_STOPPED || READ_ONCE(own->dev->life.asleep))
		return;
	if (own->view) {
		vpmu_view_read(own->view);
		return;
	}
	vcpu = vpmu_vcpu_local(own->dev);
	if (!vcpu || vpmu_replay_counts(vcpu, event))
		return;
	if (!own->id) {
		vpmu_event_idle(event, false);
		return;
	}
	vpmu_vcpu_append(vcpu, event, VPMU_COMMAND_READ, 0);
	if (vcpu->reading)
		return;
	vpmu_vcpu_flush(vcpu);
	if (own->sampler)
		vpmu_sampling_read(own);
}

/* A flush that fails changes nothing, and a period that is refused leaves the one before. */
static bool event_survives(u32 op)
{
	return op == VPMU_COMMAND_FLUSH || op == VPMU_COMMAND_PERIOD;
}

/**
 * vpmu_event_answer() - handle the device's answer to a command
 * @event: for this event
 * @op: to this command
 * @reply: with this, or NULL when the queue failed
 *
 * Called with interrupts off, on the CPU that sent the command, while perf core
 * keeps the event from being scheduled elsewhere.
 */
void vpmu_event_answer(struct perf_event *event, u32 op, const struct vpmu_reply *reply)
{
	struct vpmu_event *own = event->pmu_private;
	u64 count, enabled, running, lost;
	s32 state;
	int err;

	err = reply ? -(int)le32_to_cpu(reply->status) : -EIO;
	if (op == VPMU_COMMAND_FLUSH)
		own->flushed = err;
	/* It may have been started again while the PMU is disabled. */
	if (own->sampler && is_stop(op) && !own->started)
		vpmu_sampling_stop(own);
	if (err) {
		if (err == -EIO || !event_survives(op))
			event_lost(event, own, op);
		return;
	}
	state = le32_to_cpu(reply->state);
	if (state == VPMU_STATE_ERROR)
		event_lost(event, own, op);
	if (event_is_spent(own, op, state))
		own->limit_hit = true;

	count = le64_to_cpu(reply->value);
	enabled = le64_to_cpu(reply->time_enabled);
	running = le64_to_cpu(reply->time_running);
	if (!own->unexpected)
		event_credit(event, own, op, count - own->count, enabled - own->enabled_ns,
			     running - own->running_ns);
	own->count = count;
	own->enabled_ns = enabled;
	own->running_ns = running;
	lost = le64_to_cpu(reply->lost);
	if (own->file)
		atomic64_add(lost - own->lost, &own->file->tally.lost);
	else
		perf_core_add_lost(event, lost - own->lost);
	own->lost = lost;
	if (is_stop(op)) {
		own->unexpected = false;
		own->stopping = false;
	}
}

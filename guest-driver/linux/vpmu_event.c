// SPDX-License-Identifier: GPL-2.0
/*
 * Sends commands for an event to the device, and handles the answers.
 *
 * The device keeps the count; the driver adds each increase to perf's count.
 */
#include <linux/overflow.h>
#include <linux/perf_event.h>
#include <linux/smp.h>

#include "perf_core_private.h"
#include "vpmu.h"
#include "vpmu_event.h"
#include "vpmu_file.h"
#include "vpmu_replay.h"
#include "vpmu_view.h"

/* Value of vpmu_event::unpaid_ns: subtract all running time, past and future */
#define OWED_ALL	U64_MAX

/*
 * Lets this CPU replay the event's samples. Also sends the period if it has
 * changed: for PERF_EVENT_IOC_PERIOD, perf core changes attr.sample_period and
 * restarts the event if it is active.
 */
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
 * vpmu_event_start() - start counting an event
 * @vcpu: this CPU's queue
 * @event: the event; its context's lock is held
 *
 * Does nothing if the event is already started or must not count. It must not
 * count if its limit of overflows (PERF_EVENT_IOC_REFRESH) is used up, if it is
 * not open on the device, if its file or its leader's file is disabled, or if
 * the machine sleeps.
 */
void vpmu_event_start(struct vpmu_vcpu *vcpu, struct perf_event *event)
{
	struct vpmu_event *own = event->pmu_private;

	/*
	 * The event was stopped while the PMU was disabled, so its READ may
	 * still be queued. Send the READ now: only its answer shows whether the
	 * event's limit is used up. If it is, the event must not start again.
	 */
	if (own->stopping)
		vpmu_vcpu_flush(vcpu);
	if (own->started || own->limit_hit || !own->id || READ_ONCE(own->dev->life.asleep) ||
	    !vpmu_group_allows(event))
		return;
	own->started = true;
	own->cpu = smp_processor_id();
	if (own->sampler)
		event_start_sampling(vcpu, event, own);
	vpmu_vcpu_append(vcpu, event, own->task ? VPMU_COMMAND_IN : VPMU_COMMAND_ENABLE, 0);
}

/**
 * vpmu_event_stop() - stop counting an event
 * @vcpu: this CPU's queue
 * @event: the event; its context's lock is held
 *
 * Return: true if a command was needed.
 */
bool vpmu_event_stop(struct vpmu_vcpu *vcpu, struct perf_event *event)
{
	struct vpmu_event *own = event->pmu_private;

	if (!own->started)
		return false;
	/* DISABLE would also stop the siblings of a closed leader. */
	if (!own->task && own->file && READ_ONCE(own->file->group.close_waits))
		return false;
	own->started = false;
	/*
	 * The state in the answer to OUT shows whether the limit of overflows
	 * is used up. The answer to DISABLE always has the state OFF, so send a
	 * READ before it.
	 */
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
 * Subtracts, from perf core's running time, the time in which the host did not
 * count the event. perf then shows contention on the host in the same way as
 * contention for hardware counters.
 *
 * The running time does not yet include the time since perf core last updated
 * it. This function can use that time only if perf core is about to add it, as
 * after pmu->del(). It then adds the time itself before it subtracts, so that a
 * reader on another CPU never sees a negative running time. If the running time
 * is too short to subtract everything, the rest is subtracted at the next
 * answer.
 *
 * perf core's running time never matches the device's exactly: when an event
 * starts and when it is read, perf core reads its own clock before the device
 * reads the device's clock. So if the device never ran the event, all running
 * time is subtracted. Otherwise, at least the time for which the device ran the
 * event remains.
 */
static void event_settle(struct perf_event *event, struct vpmu_event *own, u32 op)
{
	bool swapped = own->task && event->attr.inherit && event->attr.inherit_stat;
	bool never = !own->ran_ns && !local64_read(&event->count);
	u64 room, kept, taken, fresh = 0;

	if (is_stop(op) && event->state == PERF_EVENT_STATE_ACTIVE)
		fresh = perf_core_add_up(event);
	room = perf_core_running(event) + fresh;
	/*
	 * With inherit_stat, a swap of contexts also swaps perf core's times,
	 * but not ran_ns, which then belongs to another task.
	 */
	kept = swapped ? 0 : min(room, own->ran_ns);
	taken = never || own->unpaid_ns == OWED_ALL ? room : min(own->unpaid_ns, room - kept);
	perf_core_set_running(event, room - taken);
	if (own->unpaid_ns != OWED_ALL)
		own->unpaid_ns -= min(own->unpaid_ns, taken);
}

/* Adds @time to the running time to be subtracted. */
static void event_owe(struct vpmu_event *own, u64 time)
{
	if (check_add_overflow(own->unpaid_ns, time, &own->unpaid_ns))
		own->unpaid_ns = OWED_ALL;
}

/*
 * Adds the count and the times since the device's last answer to the event and
 * to the file's tally.
 */
static void event_credit(struct perf_event *event, struct vpmu_event *own, u32 op,
			 u64 count, u64 enabled, u64 running)
{
	/* RESET sets both the device's count and perf's count to zero. */
	if (op == VPMU_COMMAND_RESET)
		local64_set(&event->count, 0);
	else
		local64_add(count, &event->count);
	if (own->file) {
		atomic64_add(enabled, &own->file->tally.enabled_ns);
		atomic64_add(running, &own->file->tally.running_ns);
		return;
	}
	own->ran_ns += running;
	if (enabled > running)
		event_owe(own, enabled - running);
	if (own->unpaid_ns)
		event_settle(event, own, op);
	perf_event_update_userpage(event);
}

/**
 * vpmu_event_idle() - set the running time back to zero, for an event that is
 *                     not open on the device
 * @event: the event; its context's lock is held
 * @stops: perf core is scheduling the event out
 *
 * If pmu->add() fails for an event, perf core does not add the context's other
 * events. So pmu->add() succeeds even for an event that is not open on the
 * device, and the event's running time is subtracted later.
 */
void vpmu_event_idle(struct perf_event *event, bool stops)
{
	struct vpmu_event *own = event->pmu_private;

	if (own->id || own->view)
		return;
	own->unpaid_ns = OWED_ALL;
	event_settle(event, own, stops ? VPMU_COMMAND_OUT : VPMU_COMMAND_READ);
}

/*
 * Marks an event as lost. The device has lost it at an unknown time, so the
 * count may be too small. For an event of /dev/vpmu, read(2) then returns end
 * of file. A module cannot put an event of perf core into the error state, so
 * all its running time is subtracted instead, as if it had never run. perf then
 * shows the event as not counted, or, if it was inherited, a running time below
 * the enabled time, because one task's running time is missing.
 */
static void event_lost(struct perf_event *event, struct vpmu_event *own, u32 op)
{
	/* Do not wake up readers: the scheduler's locks may be held. */
	if (own->file) {
		WRITE_ONCE(own->file->error, true);
		return;
	}
	own->unpaid_ns = OWED_ALL;
	event_settle(event, own, op);
	perf_event_update_userpage(event);
}

/*
 * Whether an answer shows that the device disabled the event because its limit
 * of overflows is used up, rather than because the driver told it to. For a
 * task event, any state OFF shows that: the driver starts and stops it with IN
 * and OUT, which do not change the state to OFF. For a CPU event, DISABLE
 * changes the state to OFF, too, so only a READ before DISABLE shows it.
 */
static bool event_is_spent(const struct vpmu_event *own, u32 op, s32 state)
{
	if (state != VPMU_STATE_OFF || !own->file || !own->file->control.limited)
		return false;
	return own->task || (op == VPMU_COMMAND_READ && (own->started || own->stopping));
}

/*
 * Whether the event's records or packets name a task. They name the task for
 * which the event was scheduled in. At a switch between two tasks that
 * inherited the same events, perf core swaps their contexts instead of
 * scheduling events out and in. After such a swap, the output would name the
 * wrong task. perf core does not swap a pinned context.
 */
static bool event_names_task(const struct vpmu_event *own)
{
	return own->sampler || (own->file && own->file->tracks);
}

/*
 * Whether perf core must not move the event to another task by swapping
 * contexts. This applies to a linked event, because its started or stopped
 * state belongs to one task. It also applies if some events of the family are
 * not open on the device, because a swap could give their tasks the open events
 * of other tasks.
 */
static bool event_is_anchored(const struct vpmu_event *own)
{
	const struct perf_event *parent = own->event->parent;
	const struct vpmu_event *first = parent ? parent->pmu_private : own;

	return READ_ONCE(first->incomplete) ||
	       (own->file && READ_ONCE(own->file->links.anchored));
}

/**
 * vpmu_event_pin() - pin the context of an event that is scheduled in, if the
 *                    event must not move to another task
 * @event: the event; the context's lock, which protects the number of pins, is
 *         held
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
 * vpmu_event_anchor() - pin the context of an anchored event, if the event is
 *                       scheduled in
 * @own: the event, kept alive by the caller; interrupts are off
 */
void vpmu_event_anchor(struct vpmu_event *own)
{
	struct perf_event_context *ctx = perf_core_context(own->event);

	/*
	 * If the event has no context yet or is inactive, its context is pinned
	 * when the event is scheduled in.
	 */
	if (!ctx)
		return;
	perf_core_lock(ctx);
	if (own->event->state == PERF_EVENT_STATE_ACTIVE)
		vpmu_event_pin(own->event);
	perf_core_unlock(ctx);
}

/**
 * vpmu_event_unpin() - unpin the context of an event that is scheduled out
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
 * vpmu_event_lose() - give up an event that the device has lost or a reset has
 *                     ended
 * @own: the event; the caller keeps it alive
 */
void vpmu_event_lose(struct vpmu_event *own)
{
	struct perf_event_context *ctx = perf_core_context(own->event);

	vpmu_event_unpublish(own);
	/* A new event has no context yet, and is not shared yet. */
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

	/* The call may be nested; see vpmu_vcpu.c. Then keep the last count. */
	if (!vpmu_vcpu_may_read() || event->hw.state & PERF_HES_STOPPED ||
	    READ_ONCE(own->dev->life.asleep))
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

/*
 * Whether an event continues if the device refuses command @op for it. A failed
 * flush changes nothing. If the device refuses a new period, the event keeps its
 * old period; if it refuses prompt samples, they come later.
 */
static bool event_survives(u32 op)
{
	return op == VPMU_COMMAND_FLUSH || op == VPMU_COMMAND_PERIOD || op == VPMU_COMMAND_PROMPT;
}

/**
 * vpmu_event_answer() - handle the device's answer to a command
 * @event: the event of the command
 * @op: the command
 * @reply: the answer, or NULL if the queue failed
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
	/*
	 * If the event was started again while the PMU was disabled, its
	 * samples must still be replayed.
	 */
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
	if (is_stop(op))
		own->stopping = false;
}

// SPDX-License-Identifier: GPL-2.0
/*
 * Events: opens an event on the device for each perf event, sends commands for it,
 * handles the answers, and closes it.
 *
 * The device keeps the count; the driver adds each increase to perf's count.
 */
#include <linux/capability.h>
#include <linux/math.h>
#include <linux/minmax.h>
#include <linux/module.h>
#include <linux/overflow.h>
#include <linux/perf_event.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/smp.h>

#include "compat.h"
#include "perf_core_private.h"
#include "vpmu.h"
#include "vpmu_event.h"
#include "vpmu_file.h"
#include "vpmu_persistent.h"
#include "vpmu_ring.h"

static int vpmu_call_event(struct perf_event *event, u32 op, u64 value);

static unsigned int unprivileged_percent = 75;
module_param(unprivileged_percent, uint, 0644);
MODULE_PARM_DESC(unprivileged_percent,
		 "Percent of the device's events that programs without CAP_PERFMON can have open in total (default: 75)");

/*
 * Sends the period if it has changed: for PERF_EVENT_IOC_PERIOD, perf core changes
 * attr.sample_period and restarts the event if it is active.
 */
static void event_send_period(struct vpmu_vcpu *vcpu, struct perf_event *event,
			      struct vpmu_event *own)
{
	if (own->period == event->attr.sample_period)
		return;
	own->period = event->attr.sample_period;
	vpmu_vcpu_append(vcpu, event, VPMU_COMMAND_PERIOD, own->period);
}

/*
 * Grants the device the overflows that PERF_EVENT_IOC_REFRESH has allowed since the
 * last grant. The command also enables an event that was disabled at its last
 * overflow. Returns false if there is nothing to grant; for a trace there never is,
 * because only samples overflow.
 */
static bool event_grant(struct vpmu_vcpu *vcpu, struct perf_event *event, struct vpmu_event *own)
{
	u32 more;

	if (!own->file || own->file->spec.trace)
		return false;
	more = perf_core_limit(event) - own->granted;
	if (!more)
		return false;
	own->granted += more;
	own->spent = false;
	vpmu_vcpu_append(vcpu, event, VPMU_COMMAND_REFRESH, more);
	return true;
}

/* Sends the command that starts an event. */
static void event_send_start(struct vpmu_vcpu *vcpu, struct perf_event *event,
			     struct vpmu_event *own)
{
	if (!event_grant(vcpu, event, own) && (own->spent || !own->task))
		vpmu_vcpu_append(vcpu, event, VPMU_COMMAND_ENABLE, 0);
	own->spent = false;
	if (own->task)
		vpmu_vcpu_append(vcpu, event, VPMU_COMMAND_IN, 0);
}

/**
 * vpmu_event_start() - start counting an event
 * @vcpu: this CPU's queue
 * @event: the event; its context's lock is held
 *
 * Does nothing if the event is already started or must not count. It must not
 * count if its limit of overflows (PERF_EVENT_IOC_REFRESH) is used up, if it is
 * not open on the device, or if the machine sleeps.
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
	if (own->started || own->limit_hit || !own->id || READ_ONCE(own->dev->life.asleep))
		return;
	own->started = true;
	own->cpu = smp_processor_id();
	if (own->sampler)
		vpmu_sampling_start(vcpu, own);
	if (is_sampling_event(event))
		event_send_period(vcpu, event, own);
	event_send_start(vcpu, event, own);
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
	own->started = false;
	/*
	 * The state in the answer to OUT shows whether the limit of overflows
	 * is used up. The answer to DISABLE always has the state OFF, so send a
	 * READ before it.
	 */
	if (!own->task && own->granted) {
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
	taken = never || own->unpaid_ns == VPMU_OWED_ALL ? room : min(own->unpaid_ns, room - kept);
	perf_core_set_running(event, room - taken);
	if (own->unpaid_ns != VPMU_OWED_ALL)
		own->unpaid_ns -= min(own->unpaid_ns, taken);
}

/* Adds @time to the running time to be subtracted. */
static void event_owe(struct vpmu_event *own, u64 time)
{
	if (check_add_overflow(own->unpaid_ns, time, &own->unpaid_ns))
		own->unpaid_ns = VPMU_OWED_ALL;
}

/*
 * Adds the count and the times since the device's last answer to the event.
 */
static void event_credit(struct perf_event *event, struct vpmu_event *own, u32 op,
			 u64 count, u64 enabled, u64 running)
{
	/* RESET sets both the device's count and perf's count to zero. */
	if (op == VPMU_COMMAND_RESET)
		local64_set(&event->count, 0);
	else
		local64_add(count, &event->count);
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
	own->unpaid_ns = VPMU_OWED_ALL;
	event_settle(event, own, stops ? VPMU_COMMAND_OUT : VPMU_COMMAND_READ);
}

/*
 * Marks an event as lost. The device has lost it at an unknown time, so the
 * count may be too small. A module cannot put an event of perf core into the
 * error state, so all its running time is subtracted instead, as if it had never
 * run. perf then shows the event as not counted, or, if it was inherited, a
 * running time below the enabled time, because one task's running time is
 * missing.
 */
static void event_lost(struct perf_event *event, struct vpmu_event *own, u32 op)
{
	/* Do not wake up readers: the scheduler's locks may be held. */
	if (own->file)
		WRITE_ONCE(own->file->error, true);
	own->unpaid_ns = VPMU_OWED_ALL;
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
	if (state != VPMU_STATE_OFF || !own->granted)
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

	return READ_ONCE(first->incomplete) || READ_ONCE(first->links.anchored);
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

/*
 * Takes back the overflows that the device has used up. Returns true if the
 * program has allowed more.
 */
static bool event_take_back(struct perf_event *event, struct vpmu_event *own)
{
	u32 used = own->granted;

	own->granted = 0;
	own->limit_hit = false;
	own->spent = true;
	return perf_core_use_limit(event, used);
}

/* Asks the device whether it has disabled the event at its last overflow. */
static bool event_asks_spent(struct vpmu_vcpu *vcpu, struct perf_event *event,
			     struct vpmu_event *own)
{
	vpmu_vcpu_append(vcpu, event, VPMU_COMMAND_READ, 0);
	vpmu_vcpu_flush(vcpu);
	return own->limit_hit;
}

/* Returns false if the event goes on. */
static bool event_spent_here(struct vpmu_vcpu *vcpu, struct perf_event *event,
			     struct vpmu_event *own)
{
	if (!own->id || !event_asks_spent(vcpu, event, own))
		return true;
	if (event_take_back(event, own)) {
		event_grant(vcpu, event, own);
		vpmu_vcpu_flush(vcpu);
		return false;
	}
	perf_core_disable_now(event);
	return true;
}

/**
 * vpmu_event_spent_here() - disable an event in perf core, after the last overflow
 *                           that PERF_EVENT_IOC_REFRESH allowed; the device has
 *                           disabled the event at this overflow
 * @event: the event that was opened, kept alive by the caller. Interrupts are off;
 *         perf core disables the event when they are on again
 *
 * Does not disable the event if more overflows have been allowed since by the ring
 * descriptor. If that was by the descriptor from perf_event_open(2), the event goes on,
 * without the overflows in between: perf core does not call the PMU when that changes
 * the limit of an active event.
 *
 * Return: 1 if the limit was used up; 0 if the event goes on; -EAGAIN if the event is
 * not active on this CPU: call vpmu_event_spent().
 */
int vpmu_event_spent_here(struct perf_event *event)
{
	struct perf_event_context *ctx = perf_core_context(event);
	struct vpmu_event *own = event->pmu_private;
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(own->dev);
	int ret = -EAGAIN;

	if (!ctx || !vcpu)
		return ret;
	perf_core_lock(ctx);
	if (event->state == PERF_EVENT_STATE_ACTIVE && perf_core_cpu(event) == smp_processor_id())
		ret = event_spent_here(vcpu, event, own);
	perf_core_unlock(ctx);
	return ret;
}

/**
 * vpmu_event_spent() - vpmu_event_spent_here() for an event that is not active on
 *                      this CPU
 * @event: the event; sleeps. Calls of this function and of vpmu_event_refresh() do
 *         not overlap
 *
 * Return: false if the event goes on.
 */
bool vpmu_event_spent(struct perf_event *event)
{
	struct perf_event_context *ctx = perf_core_context(event);
	struct vpmu_event *own = event->pmu_private;
	bool goes_on, enabled;

	/* The answer shows whether the event is still disabled. */
	if (vpmu_call_event(event, VPMU_COMMAND_READ, 0) || !READ_ONCE(own->limit_hit))
		return true;
	perf_event_disable(event);
	perf_core_lock_irq(ctx);
	goes_on = event_take_back(event, own);
	/* The program may have enabled the event in between. */
	enabled = event->state >= PERF_EVENT_STATE_INACTIVE;
	perf_core_unlock_irq(ctx);
	if (!goes_on && !enabled)
		return true;
	/* Let perf core call the PMU, which then grants the overflows. */
	perf_event_disable(event);
	perf_event_enable(event);
	return !goes_on;
}

/**
 * vpmu_event_refresh() - PERF_EVENT_IOC_REFRESH on a ring descriptor
 * @event: the event that was opened; sleeps
 * @overflows: number of further overflows; zero enables the event for those that
 *             remain, or without a limit
 *
 * Return: 0; -EINVAL for an event that does not sample, or is inherited; or another
 * negative errno.
 */
int vpmu_event_refresh(struct perf_event *event, u32 overflows)
{
	int err = 0;

	if (!is_sampling_event(event) || event->attr.inherit)
		return -EINVAL;
	if (overflows) {
		perf_core_add_limit(event, overflows);
		err = vpmu_call_event(event, VPMU_COMMAND_REFRESH, overflows);
	}
	if (err)
		perf_core_use_limit(event, overflows);
	else
		perf_event_enable(event);
	return err;
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
	perf_core_add_lost(event, lost - own->lost);
	own->lost = lost;
	if (is_stop(op))
		own->stopping = false;
}

/*
 * Sends commands for an event when perf core is not scheduling it, for example
 * for an ioctl.
 *
 * A call runs on the CPU where the event is active, and locks the event's
 * context.
 */

/**
 * struct event_call - a command to send on the CPU where its event is active
 * @event: the event
 * @op: VPMU_COMMAND_FLUSH, _RESET, _READ or _REFRESH; zero starts or stops the
 *      event, see call_switch()
 * @value: the command's value
 * @cpu: the CPU to run on, or -1 for any CPU
 * @ret: 0, a negative errno, or -EAGAIN if the event is active on another CPU
 */
struct event_call {
	struct perf_event *event;
	u32 op;
	u64 value;
	int cpu;
	int ret;
};

/*
 * Starts an active event if the machine is awake; otherwise stops it.
 */
static void call_switch(struct vpmu_vcpu *vcpu, struct perf_event *event)
{
	if (event->state != PERF_EVENT_STATE_ACTIVE)
		return;
	if (!READ_ONCE(vcpu->dev->life.asleep))
		vpmu_event_start(vcpu, event);
	else
		vpmu_event_stop(vcpu, event);
}

/*
 * Grants an event more overflows. The command also enables the event on the
 * device: disable it again, unless perf core would now let it count.
 */
static int call_refresh(struct vpmu_vcpu *vcpu, struct perf_event *event, u32 overflows)
{
	struct vpmu_event *own = event->pmu_private;
	struct vpmu_reply reply;
	int err;

	err = vpmu_vcpu_command(vcpu, VPMU_COMMAND_REFRESH, own->id, overflows, &reply);
	if (err)
		return err;
	own->granted += overflows;
	own->limit_hit = false;
	own->spent = false;
	if (!own->task) {
		own->started = true;
		if (event->state != PERF_EVENT_STATE_ACTIVE)
			vpmu_event_stop(vcpu, event);
	} else if (event->state == PERF_EVENT_STATE_ACTIVE) {
		vpmu_event_start(vcpu, event);
	}
	vpmu_vcpu_flush(vcpu);
	return 0;
}

static int call_here(struct event_call *call, struct vpmu_vcpu *vcpu)
{
	struct vpmu_event *own = call->event->pmu_private;

	if (!vcpu || !own->id)
		return -ENODEV;
	if (call->op == VPMU_COMMAND_REFRESH)
		return call_refresh(vcpu, call->event, call->value);
	own->flushed = 0;
	if (call->op)
		vpmu_vcpu_append(vcpu, call->event, call->op, 0);
	else
		call_switch(vcpu, call->event);
	vpmu_vcpu_flush(vcpu);
	vpmu_sampling_settle(vcpu);
	return own->flushed;
}

/*
 * Interrupts were on until this call. Commands are gathered only while
 * interrupts are off, so this CPU's queue has no gathered commands yet.
 */
static void event_call_here(void *info)
{
	struct event_call *call = info;
	struct perf_event *event = call->event;
	struct vpmu_event *own = event->pmu_private;
	struct perf_event_context *ctx = perf_core_context(event);

	/* The lock keeps perf core from scheduling the context's events. */
	perf_core_lock(ctx);
	call->ret = -EAGAIN;
	call->cpu = event->state == PERF_EVENT_STATE_ACTIVE ? perf_core_cpu(event) : -1;
	if (call->cpu < 0 || call->cpu == smp_processor_id())
		call->ret = call_here(call, vpmu_vcpu_local(own->dev));
	perf_core_unlock(ctx);
}

static int event_call(struct perf_event *event, u32 op, u64 value)
{
	struct event_call call = { .event = event, .op = op, .value = value, .cpu = -1 };
	struct vpmu_event *own = event->pmu_private;
	int cpu, err;

	/* A flush may be for an event of a CPU that is offline. */
	if (!own->task && (op != VPMU_COMMAND_FLUSH || cpu_online(event->cpu)))
		call.cpu = event->cpu;
	else if (READ_ONCE(event->state) == PERF_EVENT_STATE_ACTIVE)
		call.cpu = perf_core_cpu(event);
	/*
	 * -EAGAIN: this was the wrong CPU, because the right one was not known
	 * or the task has moved.
	 */
	do {
		cpu = get_cpu();
		if (call.cpu >= 0)
			cpu = call.cpu;
		err = smp_call_function_single(cpu, event_call_here, &call, 1);
		put_cpu();
		cond_resched();
	} while (!err && call.ret == -EAGAIN);
	return err ? -ENODEV : call.ret;
}

/**
 * vpmu_call_switch() - start or stop an active event when the machine goes to
 *                      sleep or resumes
 * @event: the event
 *
 * Return: 0 or a negative errno.
 */
int vpmu_call_switch(struct perf_event *event)
{
	return event_call(event, 0, 0);
}

/**
 * vpmu_call_event() - send a command for one event
 * @event: the event; sleeps
 * @op: VPMU_COMMAND_READ; or VPMU_COMMAND_REFRESH for an event with a file
 * @value: the command's value
 *
 * Return: 0 or a negative errno.
 */
static int vpmu_call_event(struct perf_event *event, u32 op, u64 value)
{
	return event_call(event, op, value);
}

/**
 * vpmu_call_family() - send a command for an event and the events that inherit it
 * @event: the event that was opened; sleeps
 * @op: VPMU_COMMAND_FLUSH or VPMU_COMMAND_RESET
 *
 * After an error for one event, the command is still sent for the others.
 *
 * Return: 0 or the first negative errno; -ENODEV of an inherited event that is
 * not open on the device is ignored.
 */
int vpmu_call_family(struct perf_event *event, u32 op)
{
	struct perf_event *child;
	int err, ret;

	perf_core_lock_family(event);
	err = event_call(event, op, 0);
	perf_core_for_each_child(child, event) {
		const struct vpmu_event *own = child->pmu_private;

		ret = own->id ? event_call(child, op, 0) : 0;
		err = err ?: ret;
	}
	perf_core_unlock_family(event);
	return err;
}

/*
 * Opens an event on the device for each perf event, and closes it later.
 */

/* An event that is opened persistent gets its name from the device. */
static const char no_name[VPMU_PERSISTENT_NAME];

/* Lets notices find an event by its id on the device. */
static int event_publish(struct vpmu_event *own)
{
	struct vpmu_device *dev = own->dev;

	if (own->file)
		return xa_err(xa_store_irq(&dev->lookup.files, own->id, own->file, GFP_KERNEL));
	if (own->sampler && !own->event->parent)
		return xa_err(xa_store_irq(&dev->lookup.sampled, own->id, own, GFP_KERNEL));
	return 0;
}

/**
 * vpmu_event_unpublish() - keep notices from finding an event by its device id
 * @own: the event
 */
void vpmu_event_unpublish(struct vpmu_event *own)
{
	struct vpmu_device *dev = own->dev;

	if (!own->id)
		return;
	if (own->file)
		xa_erase_irq(&dev->lookup.files, own->id);
	if (own->sampler && !own->event->parent)
		xa_erase_irq(&dev->lookup.sampled, own->id);
}

static void event_withdraw(struct vpmu_event *own)
{
	struct vpmu_device *dev = own->dev;

	vpmu_event_unpublish(own);
	/*
	 * Another CPU may still be handling a notice for the event, with this
	 * lock held. Wait until it has finished.
	 */
	spin_lock_irq(&dev->lookup.lock);
	list_del(&own->heir);
	spin_unlock_irq(&dev->lookup.lock);
}

/*
 * Charges an event that was opened without CAP_PERFMON to the share of the device's
 * events for such programs, unless it is charged already. The other events are
 * reserved for programs with CAP_PERFMON. The event stays charged while it is open on
 * the device.
 */
static int event_charge(struct vpmu_event *own)
{
	unsigned int percent = min(READ_ONCE(unprivileged_percent), 100U);
	u32 most = mult_frac(own->dev->info.max_events, percent, 100U);

	if (!own->unprivileged || own->charged)
		return 0;
	if (atomic_inc_return(&own->dev->unprivileged) > most) {
		atomic_dec(&own->dev->unprivileged);
		return -ENOSPC;
	}
	own->charged = true;
	return 0;
}

static void event_uncharge(struct vpmu_event *own)
{
	if (own->charged)
		atomic_dec(&own->dev->unprivileged);
	own->charged = false;
}

static void event_closed(struct vpmu_control_request *request)
{
	struct vpmu_control_close *close = container_of(request, struct vpmu_control_close,
							request);
	struct vpmu_event *own = container_of(close, struct vpmu_event, close);

	vpmu_sampling_free(own);
	kfree(own);
}

/*
 * Releases the resources of @own; with @close, also closes the event on the
 * device.
 */
static void event_free(struct vpmu_event *own, bool close)
{
	struct vpmu_device *dev = own->dev;

	event_uncharge(own);
	if (own->file)
		vpmu_file_put(own->file);
	if (own->tracks)
		vpmu_task_put();
	/* The sampler belongs to the parent, which outlives this event. */
	if (own->event->parent)
		own->sampler = NULL;
	if (close) {
		own->close.request.answered = event_closed;
		vpmu_control_close_later(dev, &own->close, own->id);
	} else {
		vpmu_sampling_free(own);
		kfree(own);
	}
	vpmu_device_put(dev);
}

/*
 * Ends a file whose event is being destroyed. The work that disables the event
 * after its last overflow can be pending only if the event is not inherited.
 */
static void event_close_file(struct perf_event *event, struct vpmu_file *file)
{
	if (event->parent) {
		vpmu_output_gone(file);
		return;
	}
	vpmu_ring_close(file);
	if (!event->attr.inherit)
		cancel_work_sync(&file->waiters.limit);
	perf_core_sync_irq(event);
}

static void event_destroy(struct perf_event *event)
{
	struct vpmu_event *own = event->pmu_private;
	bool close = own->id;

	vpmu_sampling_close(own);
	vpmu_life_remove(own);
	/* Notices that still find the file then leave its event alone. */
	if (own->file && !event->parent)
		WRITE_ONCE(own->file->closed, true);
	event_withdraw(own);
	if (!event->parent)
		vpmu_link_close(own);
	/* An event without a context was opened persistent, but then refused. */
	if (own->view && !perf_core_context(event))
		vpmu_persistent_attach(own->view->file);
	if (own->view)
		vpmu_view_close(own->view);
	if (own->file)
		event_close_file(event, own->file);
	event_free(own, close);
}

/*
 * Finds the leader that the device must know: the samples of the leader contain the
 * counts of its group, or the leader is a trace. A member of a trace's group counts
 * exactly while the trace is enabled, and may pause or resume the trace. Returns
 * the leader's id on the device, or zero.
 */
static u64 event_leader(const struct perf_event *event)
{
	const u32 acts = VPMU_CONFIG1_AUX_PAUSE | VPMU_CONFIG1_AUX_RESUME;
	const struct perf_event *leader = event->group_leader;
	const struct vpmu_event *own;

	if (leader == event || leader->pmu != event->pmu)
		return 0;
	own = leader->pmu_private;
	if ((own->sampler || own->file) && leader->attr.sample_type & PERF_SAMPLE_READ)
		return own->id;
	if (own->file && own->file->spec.trace)
		return own->id;
	return event->attr.config1 & acts ? own->id : 0;
}

/* Fills in the sample and packet fields for an event that the host records. */
static void event_request_file(const struct vpmu_event *own, struct vpmu_open_request *request)
{
	*request = own->file->spec.request;
	request->period = cpu_to_le64(own->period);
}

/* The same engine makes the samples of an event and of those that inherit it. */
static void event_request_engine(const struct perf_event *event,
				 struct vpmu_open_request *request)
{
	const struct vpmu_event *parent;

	if (!event->parent) {
		request->engine = cpu_to_le32(vpmu_attr_engine(&event->attr));
		return;
	}
	parent = event->parent->pmu_private;
	request->parent = cpu_to_le64(parent->id);
	request->engine = cpu_to_le32(parent->engine);
}

/**
 * vpmu_event_request() - fill in the request that opens an event
 * @own: the event
 * @request: filled in
 *
 * Return: 0 or a negative errno.
 */
int vpmu_event_request(struct vpmu_event *own, struct vpmu_open_request *request)
{
	struct perf_event *event = own->event;
	u64 config = event->hw.config;
	struct vpmu_vcpu *vcpu;

	*request = (struct vpmu_open_request) {};
	if (own->file)
		event_request_file(own, request);
	if (own->sampler)
		vpmu_sampling_request(own, request);
	if (own->file || own->sampler)
		event_request_engine(event, request);
	if (event->attr.config1 & VPMU_CONFIG1_ENABLE_ON_STARTER)
		request->flags |= cpu_to_le32(VPMU_OPEN_PAUSED);
	request->leader = cpu_to_le64(event_leader(event));
	/* A task that did not inherit the leader has no trace to pause. */
	if (event->parent && !request->leader)
		request->flags &= ~cpu_to_le32(VPMU_OPEN_AUX_PAUSE | VPMU_OPEN_AUX_RESUME);
	request->kind = cpu_to_le32(config >> VPMU_CONFIG_KIND_SHIFT);
	request->config = cpu_to_le64(config & (VPMU_CONFIG(1, 0) - 1));
	if (own->task) {
		request->context = cpu_to_le32(VPMU_CONTEXT_TASK);
		request->flags |= cpu_to_le32(VPMU_OPEN_ENABLED);
	} else {
		vcpu = *per_cpu_ptr(own->dev->cpu_vcpu, event->cpu);
		if (!vcpu)
			return -ENODEV;
		request->context = cpu_to_le32(vcpu->index);
		/* perf core does not schedule an event that is persistent from the start. */
		if (event->attr.config1 & VPMU_CONFIG1_PERSISTENT && !event->attr.disabled)
			request->flags |= cpu_to_le32(VPMU_OPEN_ENABLED);
	}
	return vpmu_attr_request_exclude(own, request);
}

/*
 * Logs that an event was refused because of one of the operator's limits. For
 * ENOSPC, perf(1) points to lines of the log that contain "perf".
 */
static void event_say_full(struct vpmu_device *dev, const char *limit, const char *option)
{
	vpmu_warn_ratelimited(dev,
			      "perf event refused: the limit on %s is reached; ask the VM's operator for a higher %s\n",
			      limit, option);
}

/* Opens the event on the device for @event. */
static int event_open(struct perf_event *event, struct vpmu_event *own)
{
	struct vpmu_open_request request;
	struct vpmu_device *dev = own->dev;
	struct vpmu_opened opened;
	int err;

	err = vpmu_event_request(own, &request);
	if (err)
		return err;
	err = event_charge(own);
	if (err) {
		event_say_full(dev, "events without CAP_PERFMON", "--max-events");
		return err;
	}
	err = vpmu_control_open(dev, &request, &opened);
	if (err == -ENOSPC)
		event_say_full(dev, "events", "--max-events");
	if (err)
		goto uncharge;
	own->id = opened.id;
	own->resets = opened.resets;
	own->engine = opened.engine;
	/*
	 * Publish the event before its ring is mapped: the device writes to a
	 * mapped ring immediately, and its notices must find the event.
	 */
	err = event_publish(own);
	if (!err && own->sampler)
		err = vpmu_sampling_map(own);
	if (!err)
		return 0;
	if (err == -ENOSPC)
		event_say_full(dev, "pages of rings", "--max-pages");
	vpmu_event_unpublish(own);
	if (vpmu_event_is_stale(own))
		err = -ENODEV;
	/*
	 * If the close fails, the device may still write to the ring, so leak
	 * the ring.
	 */
	if (vpmu_control_close(dev, own->id))
		own->sampler = NULL;
	own->id = 0;
uncharge:
	event_uncharge(own);
	return err;
}

/**
 * vpmu_event_reopen() - open an event again after a reset; its count in perf
 *                       core does not change
 * @own: the event, which is stopped
 *
 * Return: 0 or a negative errno.
 */
int vpmu_event_reopen(struct vpmu_event *own)
{
	int err;

	vpmu_event_unpublish(own);
	own->id = 0;
	own->count = 0;
	own->enabled_ns = 0;
	own->running_ns = 0;
	own->lost = 0;
	own->prompt = false;
	own->started = false;
	own->stopping = false;
	err = event_open(own->event, own);
	if (!err && own->file && !own->event->parent)
		own->file->id = own->id;
	return err;
}

/*
 * An inherited event has the privileges of its parent, which another task may
 * have opened.
 */
static bool event_is_unprivileged(const struct perf_event *event)
{
	const struct vpmu_event *parent;

	if (!event->parent)
		return !perfmon_capable();
	parent = event->parent->pmu_private;
	return parent->unprivileged;
}

/*
 * Creates the file of an event whose records the host writes. perf core must not
 * adapt the period, because the device does: see vpmu_sampling_alloc().
 */
static struct vpmu_file *event_file(struct vpmu_device *dev, struct perf_event *event)
{
	struct vpmu_file *file = vpmu_file_alloc(dev);
	struct perf_event_attr *attr = &event->attr;
	int err = 0;

	if (!file)
		return ERR_PTR(-ENOMEM);
	file->spec.config = event->hw.config;
	file->spec.period = attr->sample_period;
	file->spec.freq = attr->freq;
	file->spec.trace = vpmu_config_is_trace(event->hw.config);
	vpmu_attr_request(attr, file->spec.trace, &file->spec.request);
	file->place.cpu = event->cpu;
	file->place.task = event->hw.target;
	if (file->spec.trace ? !vpmu_has_feature(dev, VPMU_F_AUX) :
	    attr->sample_period && !vpmu_has_feature(dev, VPMU_F_RING))
		err = -EOPNOTSUPP;
	if (!err && vpmu_attr_needs_task(&file->spec.request, file->spec.trace)) {
		err = vpmu_task_get(dev);
		file->tracks = !err;
	}
	if (err) {
		vpmu_file_put(file);
		return ERR_PTR(err);
	}
	attr->freq = 0;
	return file;
}

/* Finds or creates what the event needs for its records. */
static int event_records(struct vpmu_event *own)
{
	struct perf_event *event = own->event;
	const struct vpmu_event *parent;
	struct vpmu_file *file;

	if (!(event->attr.config1 & VPMU_CONFIG1_RING))
		return is_sampling_event(event) ? vpmu_sampling_alloc(own) : 0;
	own->period = event->attr.sample_period;
	if (event->parent) {
		parent = event->parent->pmu_private;
		own->file = parent->file;
		own->freq = parent->freq;
		if (own->file)
			vpmu_file_get(own->file);
		return own->file ? 0 : -EIO;
	}
	own->freq = event->attr.freq;
	file = event_file(own->dev, event);
	if (IS_ERR(file))
		return PTR_ERR(file);
	own->file = file;
	return 0;
}

static struct vpmu_event *event_alloc(struct vpmu_device *dev, struct perf_event *event)
{
	struct vpmu_event *own = kzalloc(sizeof(*own), GFP_KERNEL);
	int err;

	if (!own)
		return ERR_PTR(-ENOMEM);
	own->dev = dev;
	own->event = event;
	own->task = perf_core_is_of_task(event);
	own->unprivileged = event_is_unprivileged(event);
	INIT_LIST_HEAD(&own->heirs);
	INIT_LIST_HEAD(&own->heir);
	vpmu_link_init(&own->links);
	err = event_records(own);
	if (err) {
		kfree(own);
		return ERR_PTR(err);
	}
	vpmu_device_get(dev);
	return own;
}

/* Whether a reset has ended the event that @event is inherited from. */
static bool event_parent_has_ended(const struct perf_event *event)
{
	const struct vpmu_event *parent = event->parent->pmu_private;

	return !READ_ONCE(parent->id);
}

static int event_prepare(struct perf_event *event, struct vpmu_event *own)
{
	struct vpmu_device *dev = own->dev;
	int err;

	/* Pairs with the barrier in device_leave(). */
	smp_mb__after_atomic();
	if (READ_ONCE(dev->life.lost))
		return READ_ONCE(dev->life.lost);
	/*
	 * An inherited event uses its parent's references: the parent outlives
	 * it.
	 */
	if (event->parent)
		return event_parent_has_ended(event) ? -EIO : 0;
	if (own->task) {
		err = perf_core_anchor_task(event->hw.target);
		if (err)
			return err;
	}
	/*
	 * If the device has no task pages, open the event anyway: its samples
	 * then do not name tasks.
	 */
	if (own->sampler) {
		err = vpmu_task_get(dev);
		own->tracks = !err;
		return err == -EOPNOTSUPP ? 0 : err;
	}
	return 0;
}

/*
 * Called when the event that a new task inherits could not be opened on the
 * device. Pins the contexts of the event's family. To perf core, the new task's
 * context is equal to the contexts of the family's other tasks. Without the
 * pins, perf core would swap the contexts at a switch between these tasks, and
 * so give the new task the open event of another task. Does nothing if a reset
 * has ended the parent.
 */
static void event_miss(struct vpmu_event *missing, int err)
{
	struct perf_event *child, *parent = missing->event->parent;
	struct vpmu_event *own = parent->pmu_private;
	struct vpmu_device *dev = own->dev;

	if (event_parent_has_ended(missing->event))
		return;
	perf_core_lock_family(parent);
	WRITE_ONCE(own->incomplete, true);
	local_irq_disable();
	vpmu_event_anchor(own);
	perf_core_for_each_child(child, parent)
		vpmu_event_anchor(child->pmu_private);
	local_irq_enable();
	perf_core_unlock_family(parent);
	vpmu_warn_ratelimited(dev, "an inherited event is not counted in a new task (%d)\n", err);
}

/* Lets the event's family, and its file, find the event. */
static void event_adopt(struct perf_event *event, struct vpmu_event *own)
{
	struct vpmu_event *parent;

	if (!event->parent) {
		if (own->file) {
			own->file->id = own->id;
			own->file->event = event;
		}
		return;
	}
	parent = event->parent->pmu_private;
	spin_lock_irq(&own->dev->lookup.lock);
	list_add(&own->heir, &parent->heirs);
	spin_unlock_irq(&own->dev->lookup.lock);
	vpmu_link_inherit(own);
}

/**
 * vpmu_event_create() - set up a perf event, and open it on the device
 * @dev: the device
 * @event: the event, opened or inherited; its PMU has already checked the attr
 *
 * Return: 0 or a negative errno.
 */
int vpmu_event_create(struct vpmu_device *dev, struct perf_event *event)
{
	struct perf_event_attr *attr = &event->attr;
	struct vpmu_event *own;
	int err;

	if (has_branch_stack(event) || attr->exclude_host || attr->exclude_idle)
		return -EOPNOTSUPP;
	if (event->cpu >= 0 && !cpu_possible(event->cpu))
		return -ENODEV;

	own = event_alloc(dev, event);
	if (IS_ERR(own))
		return PTR_ERR(own);
	err = event_prepare(event, own);
	if (!err)
		err = event_open(event, own);
	if (err && !event->parent)
		goto free;
	/*
	 * For an inherited event, an error would make the fork fail. Instead,
	 * the event is created but never counts, and its running time stays
	 * zero.
	 */
	if (err)
		event_miss(own, err);

	event->hw.state = PERF_HES_STOPPED | PERF_HES_UPTODATE;
	event->pmu_private = own;
	event_adopt(event, own);
	event->destroy = event_destroy;
	vpmu_life_add(own);
	if (!(attr->config1 & VPMU_CONFIG1_PERSISTENT))
		return 0;
	err = vpmu_persistent_detach(event, no_name);
	/* perf core calls event->destroy() only for an event without an error. */
	if (err) {
		event_destroy(event);
		event->destroy = NULL;
	}
	return err;
free:
	event_free(own, false);
	return err;
}

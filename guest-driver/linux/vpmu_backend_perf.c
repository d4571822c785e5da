// SPDX-License-Identifier: GPL-2.0
/*
 * Sends commands for events when perf core is not scheduling them, for example
 * for an ioctl.
 *
 * A call runs on the CPU where the event is active, and locks the event's
 * context. For each task, the events of a group are in one context, so a call
 * for a group sends the commands of all its events with one kick.
 */
#include <linux/perf_event.h>
#include <linux/sched.h>
#include <linux/smp.h>

#include "compat.h"
#include "perf_core_private.h"
#include "vpmu.h"
#include "vpmu_event.h"
#include "vpmu_file.h"
#include "vpmu_ring.h"

/**
 * struct event_call - a command to send on the CPU where its events are active
 * @event: the event; with @leader, any event in the context to visit
 * @leader: leader of the group whose events get the command; NULL if only
 *          @event gets it
 * @only: the only file of the group whose events get the command; NULL if the
 *        events of all files get it
 * @call_seq: number of the call, stored in vpmu_event::call_seq of each event
 *            that the call has visited
 * @op: VPMU_COMMAND_*; zero starts or stops each event, see call_switch()
 * @value: the command's value; not used with @leader
 * @cpu: the CPU to run on, or -1 for any CPU
 * @flushed: the first error among the events that were flushed
 * @ret: 0, a negative errno, or -EAGAIN if the events are active on another CPU
 */
struct event_call {
	struct perf_event *event;
	struct vpmu_file *leader;
	struct vpmu_file *only;
	u64 call_seq;
	u32 op;
	u64 value;
	int cpu;
	int flushed;
	int ret;
};

static atomic64_t call_count = ATOMIC64_INIT(0);

/*
 * Starts an active event if the machine is awake and the event's group allows
 * it to count; otherwise stops the event.
 */
static void call_switch(struct vpmu_vcpu *vcpu, struct perf_event *event)
{
	if (event->state != PERF_EVENT_STATE_ACTIVE)
		return;
	if (vpmu_group_allows(event) && !READ_ONCE(vcpu->dev->life.asleep))
		vpmu_event_start(vcpu, event);
	else
		vpmu_event_stop(vcpu, event);
}

static void call_append(struct event_call *call, struct vpmu_vcpu *vcpu, struct perf_event *event)
{
	struct vpmu_event *own = event->pmu_private;

	if (!own->id)
		return;
	switch (call->op) {
	case 0:
		call_switch(vcpu, event);
		break;
	case VPMU_COMMAND_READ:
		/*
		 * READ also makes the device write a pending PERF_RECORD_LOST,
		 * so also send it for inactive events with samples or packets.
		 */
		if (event->state == PERF_EVENT_STATE_ACTIVE || own->file->spec.period ||
		    own->file->spec.trace)
			vpmu_vcpu_append(vcpu, event, call->op, 0);
		break;
	default:
		vpmu_vcpu_append(vcpu, event, call->op, 0);
	}
}

/* Adds an event's counts to its file's totals. */
static void call_sum(struct event_call *call, struct vpmu_vcpu *vcpu, struct perf_event *event)
{
	struct vpmu_event *own = event->pmu_private;
	struct vpmu_file *file = own->file;
	struct vpmu_totals *totals = &file->tally.totals;

	totals->value += local64_read(&event->count);
	totals->missed += perf_core_missed(event);
	if (perf_core_is_scheduled(event) &&
	    (event->state == PERF_EVENT_STATE_INACTIVE || !own->id))
		totals->behind = true;
	/*
	 * The file's tally already includes the inherited events, so it is
	 * copied, not added up. It is copied again at each event, so that the
	 * copy that remains is as recent as the last count.
	 */
	totals->enabled = atomic64_read(&file->tally.enabled_ns);
	totals->running = atomic64_read(&file->tally.running_ns);
	totals->lost = atomic64_read(&file->tally.lost);
}

/* Whether the call is for @event. */
static bool call_reaches(const struct event_call *call, const struct perf_event *event)
{
	const struct vpmu_event *own;

	if (event->pmu != call->event->pmu)
		return false;
	own = event->pmu_private;
	if (!own->file || vpmu_group_leader(own->file) != call->leader)
		return false;
	return !call->only || call->only == own->file;
}

/* Keeps the first error among the flushed events. */
static void call_flushed(struct event_call *call, struct vpmu_vcpu *vcpu,
			 struct perf_event *event)
{
	struct vpmu_event *own = event->pmu_private;

	if (own->id)
		call->flushed = call->flushed ?: own->flushed;
}

/*
 * Visits the call's events in the context, then call->event, which may no
 * longer be in the context.
 */
static void call_each(struct event_call *call, struct vpmu_vcpu *vcpu,
		      void (*visit)(struct event_call *call, struct vpmu_vcpu *vcpu,
				    struct perf_event *event))
{
	struct perf_event *event = call->event, *other;
	struct vpmu_event *own = event->pmu_private;

	perf_core_for_each_event(other, perf_core_context(event)) {
		if (other == event || !call_reaches(call, other))
			continue;
		own = other->pmu_private;
		own->call_seq = call->call_seq;
		visit(call, vcpu, other);
	}
	own = event->pmu_private;
	own->call_seq = call->call_seq;
	visit(call, vcpu, event);
}

static int call_group_here(struct event_call *call, struct vpmu_vcpu *vcpu)
{
	bool sum = call->op == VPMU_COMMAND_READ;

	if (vcpu) {
		/*
		 * Interrupts are off, so only this call adds commands to the
		 * queue while vcpu->reading is set.
		 */
		vcpu->reading = true;
		call_each(call, vcpu, call_append);
		vcpu->reading = false;
		vpmu_vcpu_flush(vcpu);
	}
	if (sum)
		call_each(call, vcpu, call_sum);
	if (!vcpu && !sum)
		return -ENODEV;
	if (call->op == VPMU_COMMAND_FLUSH)
		call_each(call, vcpu, call_flushed);
	return 0;
}

static int call_event_here(struct event_call *call, struct vpmu_vcpu *vcpu)
{
	struct perf_event *event = call->event;
	struct vpmu_event *own = event->pmu_private;
	struct vpmu_reply reply;
	int err;

	if (!vcpu || !own->id)
		return -ENODEV;
	if (!call->op) {
		call_switch(vcpu, event);
		vpmu_vcpu_flush(vcpu);
		vpmu_sampling_settle(vcpu);
		return 0;
	}
	err = vpmu_vcpu_command(vcpu, call->op, own->id, call->value, &reply);
	if (err || (call->op != VPMU_COMMAND_REFRESH && call->op != VPMU_COMMAND_ENABLE))
		return err;
	own->limit_hit = false;
	if (own->task)
		return 0;
	/*
	 * The command has enabled the event on the device. Disable it again,
	 * unless perf core and the group's files would now let it count.
	 */
	own->started = true;
	if (event->state != PERF_EVENT_STATE_ACTIVE || !vpmu_group_allows(event))
		vpmu_event_stop(vcpu, event);
	return 0;
}

/*
 * Returns the CPU where events of the call are active, or -1 if none is active.
 * If perf core has stopped one event of a group, other events of the group may
 * still be active.
 */
static int call_cpu(const struct event_call *call)
{
	struct perf_event *event = call->event, *other;

	if (event->state == PERF_EVENT_STATE_ACTIVE)
		return perf_core_cpu(event);
	if (!call->leader)
		return -1;
	perf_core_for_each_event(other, perf_core_context(event))
		if (other->state == PERF_EVENT_STATE_ACTIVE && call_reaches(call, other))
			return perf_core_cpu(other);
	return -1;
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
	struct vpmu_vcpu *vcpu;

	/* The lock keeps perf core from scheduling the context's events. */
	perf_core_lock(ctx);
	call->ret = -EAGAIN;
	call->cpu = call_cpu(call);
	if (call->cpu < 0 || call->cpu == smp_processor_id()) {
		vcpu = vpmu_vcpu_local(own->dev);
		call->ret = call->leader ? call_group_here(call, vcpu) :
					   call_event_here(call, vcpu);
	}
	perf_core_unlock(ctx);
}

static int event_call(struct event_call *call)
{
	struct perf_event *event = call->event;
	struct vpmu_event *own = event->pmu_private;
	int cpu, err;

	/* A flush may be for an event of a CPU that is offline. */
	if (!own->task && (call->op != VPMU_COMMAND_FLUSH || cpu_online(event->cpu)))
		call->cpu = event->cpu;
	else if (READ_ONCE(event->state) == PERF_EVENT_STATE_ACTIVE)
		call->cpu = perf_core_cpu(event);
	else
		call->cpu = -1;
	/*
	 * -EAGAIN: this was the wrong CPU, because the right one was not known
	 * or the task has moved.
	 */
	do {
		cpu = get_cpu();
		if (call->cpu >= 0)
			cpu = call->cpu;
		err = smp_call_function_single(cpu, event_call_here, call, 1);
		put_cpu();
		cond_resched();
	} while (!err && call->ret == -EAGAIN);
	return err ? -ENODEV : call->ret;
}

/*
 * Makes the call for @event and the events that inherit it, one context at a
 * time. Skips events that the call has already visited.
 */
static int call_family(struct event_call *call, struct perf_event *event)
{
	struct vpmu_event *own = event->pmu_private;
	struct perf_event *child;
	int err = 0, ret;

	call->event = event;
	if (own->call_seq != call->call_seq)
		err = event_call(call);
	perf_core_for_each_child(child, event) {
		own = child->pmu_private;
		if (own->call_seq == call->call_seq)
			continue;
		call->event = child;
		ret = event_call(call);
		err = err ?: ret;
	}
	return err;
}

/* Adds the counts of closed inherited events to their file's totals. */
static void call_sum_dead(struct vpmu_file *file)
{
	struct perf_event *event = file->event;

	file->tally.totals.value += perf_core_dead_count(event);
	file->tally.totals.missed += perf_core_dead_missed(event);
}

/* Sends @op to all events of the group, or to the events of @only. */
static int call_group(struct vpmu_file *leader, struct vpmu_file *only, u32 op)
{
	struct event_call call = { .leader = leader, .only = only, .op = op };
	struct vpmu_file *file;
	int err = 0, ret;

	call.call_seq = atomic64_inc_return(&call_count);
	/*
	 * With these mutexes held, inherited events are neither added nor
	 * removed. No other code takes several of these mutexes at once, so the
	 * order in which they are taken does not matter.
	 */
	vpmu_group_for_each(file, leader) {
		perf_core_lock_family_of(file->event, &leader->group.lock);
		memset(&file->tally.totals, 0, sizeof(file->tally.totals));
	}
	vpmu_group_for_each(file, leader) {
		if (only && only != file)
			continue;
		ret = call_family(&call, file->event);
		err = err ?: ret;
		if (op == VPMU_COMMAND_READ)
			call_sum_dead(file);
	}
	vpmu_group_for_each(file, leader)
		perf_core_unlock_family(file->event);
	return err ?: call.flushed;
}

/**
 * vpmu_call_event() - send a command for one event
 * @event: the event
 * @op: VPMU_COMMAND_PERIOD; VPMU_COMMAND_REFRESH; or VPMU_COMMAND_ENABLE, to
 *      continue an event that has used up its limit of overflows
 * @value: the command's value
 *
 * Return: 0 or a negative errno, which may come from the device.
 */
int vpmu_call_event(struct perf_event *event, u32 op, u64 value)
{
	struct event_call call = { .event = event, .op = op, .value = value };

	return event_call(&call);
}

/**
 * vpmu_call_switch() - start or stop one active event when the machine goes to
 *                      sleep or resumes
 * @event: the event
 *
 * Return: 0 or a negative errno.
 */
int vpmu_call_switch(struct perf_event *event)
{
	struct event_call call = { .event = event };

	return event_call(&call);
}

static int call_refresh(struct vpmu_file *file, u32 overflows)
{
	int err;

	WRITE_ONCE(file->control.limited, true);
	WRITE_ONCE(file->control.enabled, true);
	if (file->control.on_exec)
		perf_event_enable(file->event);
	err = vpmu_call_event(file->event, VPMU_COMMAND_REFRESH, overflows);
	return err ?: call_group(vpmu_group_leader(file), NULL, 0);
}

static int call_period(struct vpmu_file *file, u64 period)
{
	return vpmu_call_event(file->event, VPMU_COMMAND_PERIOD, period);
}

static bool call_has_error(const struct vpmu_file *file)
{
	return READ_ONCE(file->event->state) == PERF_EVENT_STATE_ERROR;
}

static void call_close(struct vpmu_file *file)
{
	/*
	 * Close the ring before the event is freed: notices find the event
	 * through the ring.
	 */
	vpmu_ring_close(file);
	perf_event_release_kernel(file->event);
}

/* Operations on events that perf core schedules with their task or CPU. */
const struct vpmu_backend vpmu_perf_backend = {
	.group		= call_group,
	.refresh	= call_refresh,
	.period		= call_period,
	.has_error	= call_has_error,
	.close		= call_close,
};

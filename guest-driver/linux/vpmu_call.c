// SPDX-License-Identifier: GPL-2.0
/*
 * Commands for an event from outside perf core's scheduling: switch, reset, period.
 */
#include <linux/perf_event.h>
#include <linux/sched.h>
#include <linux/smp.h>

#include "compat.h"
#include "vpmu.h"

/* Besides VPMU_COMMAND_*: start or stop the event as its file says, if it runs. */
#define CALL_SWITCH	0

/**
 * struct event_call - a command on its way to the CPU where the event is
 * @event: whose
 * @op: VPMU_COMMAND_* or CALL_SWITCH
 * @value: of the command
 * @ret: 0, a negative errno, or -EAGAIN when the event was elsewhere by then
 */
struct event_call {
	struct perf_event *event;
	u32 op;
	u64 value;
	int ret;
};

static void event_switch_here(struct vpmu_vcpu *vcpu, struct perf_event *event, bool enable)
{
	if (enable)
		vpmu_event_start(vcpu, event);
	else if (vpmu_event_stop(vcpu, event) && !VPMU_CONTEXT_IS_BRACKETED)
		vpmu_context_leave(vcpu, event);
}

/* Runs with interrupts off, by which nothing has gathered on this CPU's queue. */
static void event_call_here(void *info)
{
	struct event_call *call = info;
	struct perf_event *event = call->event;
	struct vpmu_event *own = event->pmu_private;
	struct perf_event_context *ctx = event->ctx;
	struct vpmu_vcpu *vcpu;
	struct vpmu_reply reply;

	/* While it is held, the event is scheduled neither in nor out. */
	raw_spin_lock(&ctx->lock);
	call->ret = -EAGAIN;
	if (event->state == PERF_EVENT_STATE_ACTIVE && event->oncpu != smp_processor_id())
		goto unlock;

	vcpu = vpmu_vcpu_local(own->dev);
	call->ret = -ENODEV;
	if (!vcpu || !own->id)
		goto unlock;
	if (call->op == CALL_SWITCH) {
		call->ret = 0;
		if (event->state == PERF_EVENT_STATE_ACTIVE)
			event_switch_here(vcpu, event, READ_ONCE(own->file->enabled));
		goto unlock;
	}
	call->ret = vpmu_vcpu_command(vcpu, call->op, own->id, call->value, &reply);
	if (!call->ret && call->op == VPMU_COMMAND_RESET) {
		own->count = le64_to_cpu(reply.value);
		local64_set(&event->count, 0);
		perf_event_update_userpage(event);
	}
unlock:
	raw_spin_unlock(&ctx->lock);
}

static int event_call(struct perf_event *event, u32 op, u64 value)
{
	struct vpmu_event *own = event->pmu_private;
	struct event_call call = { .event = event, .op = op, .value = value };
	int cpu, err;

	/* Each turn but the last means that the task has moved in the meantime. */
	do {
		cpu = get_cpu();
		if (!own->task)
			cpu = event->cpu;
		else if (READ_ONCE(event->state) == PERF_EVENT_STATE_ACTIVE &&
			 READ_ONCE(event->oncpu) >= 0)
			cpu = READ_ONCE(event->oncpu);
		err = smp_call_function_single(cpu, event_call_here, &call, 1);
		put_cpu();
		cond_resched();
	} while (!err && call.ret == -EAGAIN);
	return err ? -ENODEV : call.ret;
}

/* The same for an event and those that inherit it; those without a device event have no part. */
static int event_call_family(struct perf_event *event, u32 op)
{
	struct perf_event *child;
	int err;

	lockdep_assert_held(&event->child_mutex);
	err = event_call(event, op, 0);
	list_for_each_entry(child, &event->child_list, child_list) {
		struct vpmu_event *own = child->pmu_private;

		if (!err && own->id)
			err = event_call(child, op, 0);
	}
	return err;
}

/**
 * vpmu_call_switch() - switch on or off, as PERF_EVENT_IOC_ENABLE and _DISABLE do
 * @event: the event of a file, not an inherited one
 * @enable: on
 *
 * Return: 0 or a negative errno.
 */
int vpmu_call_switch(struct perf_event *event, bool enable)
{
	struct vpmu_event *own = event->pmu_private;
	struct perf_event *child;
	int err = 0;

	mutex_lock(&event->child_mutex);
	/* perf core's own switch is off before the exec, and there is none for children. */
	if (enable && own->file->on_exec)
		list_for_each_entry(child, &event->child_list, child_list)
			if (READ_ONCE(child->state) == PERF_EVENT_STATE_OFF)
				err = -EOPNOTSUPP;
	if (!err) {
		WRITE_ONCE(own->file->enabled, enable);
		err = event_call_family(event, CALL_SWITCH);
	}
	mutex_unlock(&event->child_mutex);
	if (!err && enable && own->file->on_exec)
		perf_event_enable(event);
	return err;
}

/**
 * vpmu_call_reset() - set the count to zero, as PERF_EVENT_IOC_RESET does
 * @event: the event of a file, not an inherited one; those that inherit it are
 *         reset too
 *
 * Return: 0 or a negative errno.
 */
int vpmu_call_reset(struct perf_event *event)
{
	int err;

	mutex_lock(&event->child_mutex);
	err = event_call_family(event, VPMU_COMMAND_RESET);
	mutex_unlock(&event->child_mutex);
	return err;
}

/**
 * vpmu_call_settle() - have the device write what it still owes an event's ring
 * @event: the event; perf core asks the device only while it runs
 *
 * Return: 0 or a negative errno.
 */
int vpmu_call_settle(struct perf_event *event)
{
	return event_call(event, VPMU_COMMAND_READ, 0);
}

/**
 * vpmu_call_period() - set the period, as PERF_EVENT_IOC_PERIOD does
 * @event: the event
 * @period: a sample every so many from now on
 *
 * Return: 0 or a negative errno.
 */
int vpmu_call_period(struct perf_event *event, u64 period)
{
	return event_call(event, VPMU_COMMAND_PERIOD, period);
}

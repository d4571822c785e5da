// SPDX-License-Identifier: GPL-2.0
/*
 * Sends one kick for a context switch between two tasks that both have events.
 *
 * perf core schedules the old task's events out before the switch, and the new
 * task's events in after the switch. But this driver sends the commands for
 * both with one kick, before the switch. Until the device has answered, the
 * contexts of both tasks are locked, and perf_event::oncpu of the old task's
 * events is still this CPU. So every reader sees complete counts.
 *
 * An event that this kick has started is "coming" (vpmu_event::coming) until
 * perf core adds the event. Interrupts stay off from the kick until then. Only
 * groups that perf core is sure to add are started early. Other CPUs see a
 * coming event as inactive. If vpmu_backend_perf.c finds a coming event in the
 * context of a call, it repeats the call on the CPU of the switch, after the
 * switch.
 *
 * Between the kick and the schedule-in, another CPU can still disable the event
 * or remove it from the context: while the context is not active, perf core
 * does not send these calls to the CPU of the switch. Then perf core does not
 * add the event. At the CPU's next switch, the driver stops the event, and drops
 * its count and its samples. If perf core adds the event earlier after all,
 * because it was enabled again, the driver restarts it. If perf core destroys
 * the event earlier, vpmu_event_purge() removes it from this CPU's lists.
 */
#include <linux/mutex.h>
#include <linux/percpu.h>
#include <linux/perf_event.h>
#include <linux/sched.h>
#include <linux/smp.h>
#include <linux/string.h>
#include <linux/tracepoint.h>

#include "compat.h"
#include "perf_core_private.h"
#include "vpmu.h"
#include "vpmu_event.h"

/**
 * struct task_switch - a CPU's last task switch
 * @prev: the old task; the switch is in progress while @prev is current
 * @next: the new task
 * @coming: the events of @next that are coming, by vpmu_event::arrival
 *
 * Only the CPU itself uses this struct, with interrupts off. Another CPU may
 * use it while that CPU is offline.
 */
struct task_switch {
	const struct task_struct *prev;
	struct task_struct *next;
	struct list_head coming;
};

static DEFINE_PER_CPU(struct task_switch, task_switches);
static struct tracepoint *sched_switch;
static DEFINE_MUTEX(switch_lock);
static unsigned int switch_users;

/*
 * Stops an event that another CPU has disabled or removed while it was coming.
 * Another CPU may be destroying the event. If vpmu_event_purge() on that CPU
 * finds vpmu_event::coming set, it waits until this CPU has interrupts on.
 */
static void switch_stop(struct vpmu_event *own)
{
	struct perf_event_context *ctx = perf_core_context(own->event);
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(own->dev);

	perf_core_lock(ctx);
	list_del_init(&own->arrival);
	own->unexpected = own->started;
	vpmu_event_stop(vcpu, own->event);
	vpmu_sampling_settle(vcpu);
	perf_core_unlock(ctx);
	/*
	 * Pairs with vpmu_event_purge(). After this store, the event may be
	 * freed.
	 */
	smp_store_release(&own->coming, false);
}

/*
 * Called with interrupts off, before perf core schedules events for this
 * switch.
 */
static void switch_begins(void *data, bool preempt, struct task_struct *prev,
			  struct task_struct *next, unsigned int prev_state)
{
	struct vpmu_event *own, *more;

	list_for_each_entry_safe(own, more, this_cpu_ptr(&task_switches.coming), arrival)
		switch_stop(own);
	this_cpu_write(task_switches.prev, prev);
	this_cpu_write(task_switches.next, next);
}

/* Forgets the last switch: its tasks may have exited, or run here again. */
static void switch_forget(void *unused)
{
	this_cpu_write(task_switches.prev, NULL);
	this_cpu_write(task_switches.next, NULL);
}

static void switch_find(struct tracepoint *tracepoint, void *unused)
{
	if (!strcmp(tracepoint->name, "sched_switch"))
		sched_switch = tracepoint;
}

/**
 * vpmu_switch_init() - find the scheduler's tracepoint
 *
 * Return: the tracepoint, which is never removed; NULL if the kernel has none.
 */
struct tracepoint *vpmu_switch_init(void)
{
	unsigned int cpu;

	for_each_possible_cpu(cpu)
		INIT_LIST_HEAD(per_cpu_ptr(&task_switches.coming, cpu));
	for_each_kernel_tracepoint(switch_find, NULL);
	return sched_switch;
}

/**
 * vpmu_switch_get() - add a task event to those that need the tracepoint's
 *                     probe; the first call registers the probe
 *
 * Sleeps. Paired with vpmu_switch_put().
 *
 * Return: 0 or a negative errno.
 */
int vpmu_switch_get(void)
{
	int err = 0;

	if (!sched_switch)
		return 0;
	mutex_lock(&switch_lock);
	if (!switch_users) {
		on_each_cpu(switch_forget, NULL, 1);
		err = tracepoint_probe_register(sched_switch, switch_begins, NULL);
	}
	if (!err)
		switch_users++;
	mutex_unlock(&switch_lock);
	return err;
}

/**
 * vpmu_switch_put() - undo vpmu_switch_get(); the last call unregisters the
 *                     probe
 */
void vpmu_switch_put(void)
{
	if (!sched_switch)
		return;
	mutex_lock(&switch_lock);
	if (!--switch_users)
		tracepoint_probe_unregister(sched_switch, switch_begins, NULL);
	mutex_unlock(&switch_lock);
}

/* Whether perf core adds @event with its group. */
static bool member_comes(const struct perf_event *event)
{
	return event->state == PERF_EVENT_STATE_INACTIVE;
}

static void member_take(struct vpmu_vcpu *vcpu, struct perf_event *event)
{
	struct vpmu_event *own = event->pmu_private;

	if (!member_comes(event) || !vpmu_event_start(vcpu, event))
		return;
	own->coming = true;
	own->came = perf_core_clock(event);
	list_add(&own->arrival, this_cpu_ptr(&task_switches.coming));
}

static void group_take(struct vpmu_vcpu *vcpu, struct perf_event *leader)
{
	struct perf_event *sibling;

	member_take(vcpu, leader);
	for_each_sibling_event(sibling, leader)
		member_take(vcpu, sibling);
}

/**
 * vpmu_switch_arrived() - an event is no longer coming: perf core has added it,
 *                         or it was stopped
 * @own: the event, on the CPU where it was started; interrupts are off
 */
void vpmu_switch_arrived(struct vpmu_event *own)
{
	own->coming = false;
	list_del_init(&own->arrival);
}

/**
 * vpmu_switch_is_from() - whether a context belongs to the task that this CPU
 *                         is switching from
 * @ctx: a locked context with an event that is being scheduled out
 *
 * Return: true if it does; perf core is then scheduling out all events of the
 * task.
 */
bool vpmu_switch_is_from(const struct perf_event_context *ctx)
{
	return this_cpu_read(task_switches.prev) == current &&
	       ctx == perf_core_task_context(current);
}

/* Whether the queued commands schedule out events of @ctx. */
static bool switch_takes_out(const struct vpmu_vcpu *vcpu, const struct perf_event_context *ctx)
{
	return vcpu->pending && vcpu->events[vcpu->pending - 1]->ctx == ctx;
}

/*
 * Returns the new task's context if the queued commands are for events of a
 * task that is being switched out, else NULL. If this returns a context, perf
 * core holds the lock of the old task's context, and has decided not to swap
 * the two contexts.
 */
static struct perf_event_context *switch_next(const struct vpmu_vcpu *vcpu)
{
	const struct task_switch *now = this_cpu_ptr(&task_switches);

	if (now->prev != current || !switch_takes_out(vcpu, perf_core_task_context(current)))
		return NULL;
	return perf_core_task_context(now->next);
}

/* Adds the commands for the new task's events. */
static void context_take(struct vpmu_vcpu *vcpu, struct perf_event_context *ctx)
{
	struct perf_event *event;

	perf_core_assert_locked(ctx);
	perf_core_for_each_event(event, ctx)
		if (event->group_leader == event && event->pmu == &vcpu->dev->counting.pmu &&
		    vpmu_context_adds(event))
			group_take(vcpu, event);
}

/*
 * Undoes the early start after the queue has failed. When perf core then adds
 * the events, starting them also fails, and they are marked as lost.
 */
static void context_drop(struct vpmu_vcpu *vcpu, struct perf_event_context *ctx)
{
	struct perf_event *event;
	struct vpmu_event *own;

	perf_core_assert_locked(ctx);
	perf_core_for_each_event(event, ctx) {
		if (event->pmu != &vcpu->dev->counting.pmu)
			continue;
		own = event->pmu_private;
		if (own->coming) {
			own->started = false;
			if (own->sampler)
				vpmu_sampling_forget(own);
		}
		vpmu_switch_arrived(own);
	}
}

/**
 * vpmu_switch_flush() - send queued commands, and the commands for the new task
 * @vcpu: this CPU's queue; its PMU is disabled, and interrupts are off
 */
void vpmu_switch_flush(struct vpmu_vcpu *vcpu)
{
	struct perf_event_context *ctx = switch_next(vcpu);

	if (!ctx || vcpu->broken || !perf_core_trylock(ctx)) {
		vpmu_vcpu_flush(vcpu);
		return;
	}
	context_take(vcpu, ctx);
	vpmu_vcpu_flush(vcpu);
	if (vcpu->broken)
		context_drop(vcpu, ctx);
	perf_core_unlock(ctx);
}

/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The only file that accesses perf core's own fields.
 *
 * perf core lets a PMU use the fields attr, hw, pmu, cpu, parent, group_leader,
 * state, count, pmu_private and destroy of an event. This driver needs more
 * fields: it accesses events while perf core is not scheduling them, updates
 * their times, and makes samples. These fields are private to
 * kernel/events/core.c, which may change their meaning in any version. The
 * comment of each helper explains why the access is safe in 6.1, in 6.12 and in
 * 7.3. To port the driver to another version, check this file first.
 */
#ifndef _VPMU_PERF_CORE_PRIVATE_H
#define _VPMU_PERF_CORE_PRIVATE_H

#include <linux/cgroup.h>
#include <linux/err.h>
#include <linux/fcntl.h>
#include <linux/filter.h>
#include <linux/fs.h>
#include <linux/irq_work.h>
#include <linux/list.h>
#include <linux/lockdep.h>
#include <linux/mutex.h>
#include <linux/perf_event.h>
#include <linux/percpu.h>
#include <linux/pid_namespace.h>
#include <linux/poll.h>
#include <linux/sched.h>
#include <linux/smp.h>
#include <linux/spinlock.h>

#include "compat.h"

/* Contexts */

/**
 * perf_core_context() - get the context of an event
 * @event: the event
 *
 * Safe without a lock: perf_install_in_context() sets the field with
 * smp_store_release(), and only when the context is complete. An event holds a
 * reference on its context until the event is freed.
 *
 * Return: the context; NULL while the event is being created.
 */
static inline struct perf_event_context *perf_core_context(const struct perf_event *event)
{
	return READ_ONCE(event->ctx);
}

/**
 * perf_core_anchor_task() - keep an event of this module from creating a task's
 *                           software context
 * @task: the task
 *
 * Before 6.2, a task's perf context keeps a pointer to the PMU of the event
 * that created the context, and the context can outlive this module. So, if the
 * task has no such context yet, this function opens an event of the kernel's
 * own software PMU, which creates the context, and releases the event
 * immediately. Safe without a lock: a context exists until its task exits.
 *
 * Return: 0 or a negative errno.
 */
static inline int perf_core_anchor_task(struct task_struct *task)
{
#if !VPMU_PERF_ONE_CONTEXT
	struct perf_event_attr attr = {
		.type = PERF_TYPE_SOFTWARE,
		.size = sizeof(attr),
		.config = PERF_COUNT_SW_DUMMY,
		.disabled = 1,
	};
	struct perf_event *event;

	if (READ_ONCE(task->perf_event_ctxp[perf_sw_context]))
		return 0;

	event = perf_event_create_kernel_counter(&attr, -1, task, NULL, NULL);
	if (IS_ERR(event))
		return PTR_ERR(event);
	perf_event_release_kernel(event);
#endif
	return 0;
}

/**
 * perf_core_lock() - keep the events of a context from being scheduled
 * @ctx: the context; interrupts are off
 *
 * perf core holds this lock whenever it adds or removes events of the context,
 * changes their state or times, or calls their PMU. It does these things on the
 * CPU of the context.
 */
static inline void perf_core_lock(struct perf_event_context *ctx)
	__acquires(&ctx->lock)
{
	raw_spin_lock(&ctx->lock);
}

/**
 * perf_core_unlock() - undo perf_core_lock()
 * @ctx: the context
 */
static inline void perf_core_unlock(struct perf_event_context *ctx)
	__releases(&ctx->lock)
{
	raw_spin_unlock(&ctx->lock);
}

/**
 * perf_core_lock_irq() - disable interrupts, then perf_core_lock()
 * @ctx: the context
 */
static inline void perf_core_lock_irq(struct perf_event_context *ctx)
	__acquires(&ctx->lock)
{
	raw_spin_lock_irq(&ctx->lock);
}

/**
 * perf_core_unlock_irq() - undo perf_core_lock_irq()
 * @ctx: the context
 */
static inline void perf_core_unlock_irq(struct perf_event_context *ctx)
	__releases(&ctx->lock)
{
	raw_spin_unlock_irq(&ctx->lock);
}

/**
 * perf_core_assert_locked() - let lockdep check that a context is locked
 * @ctx: the context
 */
static inline void perf_core_assert_locked(const struct perf_event_context *ctx)
{
	lockdep_assert_held(&ctx->lock);
}

/**
 * perf_core_for_each_event() - iterate over all events of a context, active or
 *                              not
 * @event: set to each event in turn
 * @ctx: the context, which is locked; list_add_event() and list_del_event()
 *       change the list only with the lock held
 */
#define perf_core_for_each_event(event, ctx) \
	list_for_each_entry(event, &(ctx)->event_list, event_entry)

/**
 * perf_core_pin() - keep perf core from swapping an event's context with
 *                   another task's context
 * @event: an event of the context, which is locked
 *
 * Safe: perf core counts its own pins in the same field, with the lock held,
 * and only increments and decrements it. perf_event_context_sched_out() does
 * not swap a context that has a pin.
 */
static inline void perf_core_pin(struct perf_event *event)
{
	perf_core_assert_locked(event->ctx);
	event->ctx->pin_count++;
}

/**
 * perf_core_unpin() - undo perf_core_pin()
 * @event: an event of the context, which is locked
 */
static inline void perf_core_unpin(struct perf_event *event)
{
	perf_core_assert_locked(event->ctx);
	event->ctx->pin_count--;
}

/**
 * perf_core_admits() - whether perf core lets an event count on this CPU now
 * @event: the event, whose context is locked and is being scheduled in here
 *
 * Checks the event's CPU and cgroup as event_filter_match() does. Only CPU
 * events have a cgroup. Safe before 6.2: core.c changes the CPU's cgroup only
 * with the context locked, and perf_cgroup_switch() does so before it
 * schedules the events in. From 6.2 on, the CPU's cgroup is private, and this
 * function admits no event with a cgroup.
 *
 * Return: true if perf core does not filter the event out.
 */
static inline bool perf_core_admits(const struct perf_event *event)
{
	if (event->cpu != -1 && event->cpu != smp_processor_id())
		return false;
#ifdef CONFIG_CGROUP_PERF
	if (event->cgrp) {
#if !VPMU_PERF_ONE_CONTEXT
		const struct perf_cgroup *now;

		now = this_cpu_ptr(event->ctx->pmu->pmu_cpu_context)->cgrp;
		return now && cgroup_is_descendant(now->css.cgroup, event->cgrp->css.cgroup);
#else
		return false;
#endif
	}
#endif
	return true;
}

/**
 * perf_core_has_room() - whether perf core tries to add a group no matter which
 *                        other events are active
 * @leader: the group's leader, whose context is locked
 *
 * group_can_go_on() always lets groups of software events pass. It may refuse
 * other groups, because of an exclusive event or because counters are scarce. A
 * software event that loses its hardware leader becomes a group of its own, but
 * keeps the leader's group_caps, so it may still be refused. Safe: core.c
 * changes group_caps only with the context locked.
 *
 * Return: true if all events of the group are software events.
 */
static inline bool perf_core_has_room(const struct perf_event *leader)
{
	return leader->group_caps & PERF_EV_CAP_SOFTWARE;
}

/**
 * perf_core_class_leaves() - whether perf core is scheduling out all events of
 *                            the class of @other
 * @event: an event that is being scheduled out; its context is locked
 * @other: the event to check: @event, or another active event of its context
 *
 * There are two classes, pinned and flexible events, and is_active has a bit
 * for each. To schedule out one class or both, ctx_sched_out() first clears
 * their bits, and then schedules out their events: all of them, or, from 6.2
 * on, sometimes only those of one PMU. In 7.3, it leaves the bits as they are
 * when it schedules out only events of PMUs with PERF_PMU_CAP_MEDIATED_VPMU,
 * which this driver's PMUs do not have. Safe: the bits (enum event_type_t in
 * core.c) have the same values in all versions.
 *
 * Return: true if @other is scheduled out before the context is unlocked.
 */
static inline bool perf_core_class_leaves(const struct perf_event *event,
					  const struct perf_event *other)
{
	const int flexible = 0x1, pinned = 0x2;

#if VPMU_PERF_ONE_CONTEXT
	if (other->pmu_ctx != event->pmu_ctx)
		return false;
#endif
	return !(other->ctx->is_active & (other->group_leader->attr.pinned ? pinned : flexible));
}

/*
 * Reads the time of an event from the times of its context or of its cgroup. In
 * 7.3, these are two: all of the time, and behind it the part while a guest of
 * this kernel had the hardware's counters, in which an event that excludes guests
 * does not count. Safe: core.c asserts the places of both.
 */
#ifdef VPMU_PERF_HAS_TIME_CTX
static inline u64 perf_core_time(const struct perf_event *event, const struct perf_time_ctx *times)
{
	return times[0].time - (event->attr.exclude_guest ? times[1].time : 0);
}
#else
static inline u64 perf_core_time(const struct perf_event *event, const u64 *times)
{
	return *times;
}
#endif

/**
 * perf_core_clock() - read the clock that measures an event's times
 * @event: the event, whose context is locked
 *
 * Reads the clock like perf_event_time(). Safe: update_context_time() advances
 * it with the lock held.
 *
 * Return: the time.
 */
static inline u64 perf_core_clock(const struct perf_event *event)
{
#ifdef CONFIG_CGROUP_PERF
	if (event->cgrp)
		return perf_core_time(event, &per_cpu_ptr(event->cgrp->info, event->cpu)->time);
#endif
	return perf_core_time(event, &event->ctx->time);
}

/* Times of an event */

/**
 * perf_core_add_up() - update an event's enabled time
 * @event: an active event, whose context is locked
 *
 * Adds the time since tstamp, and advances tstamp, as perf_event_update_time()
 * does. Unlike that function, it leaves the running time as it is: the caller
 * must update it. Safe: perf core later adds only the time after the new
 * tstamp.
 *
 * Return: the time that was added.
 */
static inline u64 perf_core_add_up(struct perf_event *event)
{
	u64 fresh = perf_core_clock(event) - event->tstamp;

	event->tstamp += fresh;
	event->total_time_enabled += fresh;
	return fresh;
}

/**
 * perf_core_running() - get an event's running time
 * @event: the event, whose context is locked
 *
 * Return: the time, up to the last change of state.
 */
static inline u64 perf_core_running(const struct perf_event *event)
{
	return event->total_time_running;
}

/**
 * perf_core_set_running() - set an event's running time
 * @event: the event, whose context is locked
 * @running: the running time
 *
 * Safe: core.c adds to total_time_running only with the lock held, and never
 * compares it with a clock. Readers without the lock see the old or the new
 * value.
 */
static inline void perf_core_set_running(struct perf_event *event, u64 running)
{
	event->total_time_running = running;
}

/**
 * perf_core_set_times() - set an event's enabled and running times
 * @event: an active event, whose context is locked
 * @enabled: the enabled time
 * @running: the running time
 *
 * Safe, as perf_core_add_up() and perf_core_set_running() are.
 */
static inline void perf_core_set_times(struct perf_event *event, u64 enabled, u64 running)
{
	perf_core_add_up(event);
	event->total_time_enabled = enabled;
	event->total_time_running = running;
}

/*
 * Families: a family is an event and its children. The children are the events
 * that are inherited from it.
 */

/**
 * perf_core_lock_family() - keep an event's list of children from changing
 * @event: the event that was opened
 *
 * inherit_event() and perf_event_exit_event() hold this lock when they change
 * the list of children.
 */
static inline void perf_core_lock_family(struct perf_event *event)
	__acquires(&event->child_mutex)
{
	mutex_lock(&event->child_mutex);
}

/**
 * perf_core_unlock_family() - undo perf_core_lock_family()
 * @event: the event that was opened
 */
static inline void perf_core_unlock_family(struct perf_event *event)
	__releases(&event->child_mutex)
{
	mutex_unlock(&event->child_mutex);
}

/**
 * perf_core_for_each_child() - iterate over the children of an event
 * @child: set to each child in turn
 * @event: the event that was opened, its family locked
 */
#define perf_core_for_each_child(child, event) \
	list_for_each_entry(child, &(event)->child_list, child_list)

/**
 * perf_core_has_children() - whether an event has children
 * @event: the event that was opened; if its family is not locked, the answer is
 *         only a hint
 *
 * Return: true if @event has a child that has not ended.
 */
static inline bool perf_core_has_children(const struct perf_event *event)
{
	return !list_empty(&event->child_list);
}

/* The CPU, the task and the group of an event */

/**
 * perf_core_cpu() - get the CPU that an event is active on
 * @event: the event
 *
 * Safe if the event's context is locked. Without that lock, the answer is only
 * a hint: the caller must check it on that CPU.
 *
 * Return: the CPU, or -1.
 */
static inline int perf_core_cpu(const struct perf_event *event)
{
	return READ_ONCE(event->oncpu);
}

/**
 * perf_core_task_ended() - whether the task of an event has exited
 * @event: an event of a task
 *
 * When a task exits, perf core first schedules the task's events out, and sets
 * their context's task to TASK_TOMBSTONE. It changes the events' state later.
 * Reading the context's task is safe: core.c defines TASK_TOMBSTONE as
 * (void *)-1L in 6.1, in 6.12 and in 7.3, and the context keeps this value until
 * it is freed. In 7.3, the states of events whose PMU is gone and of closed
 * events are below PERF_EVENT_STATE_EXIT.
 *
 * Return: true if the task has exited.
 */
static inline bool perf_core_task_ended(const struct perf_event *event)
{
	void *const tombstone = (void *)-1L;

	return READ_ONCE(event->state) <= PERF_EVENT_STATE_EXIT ||
	       READ_ONCE(event->ctx->task) == tombstone;
}

/**
 * perf_core_is_of_task() - whether an event follows a task
 * @event: the event
 *
 * Safe: perf_event_alloc() sets PERF_ATTACH_TASK before it calls event_init(),
 * and perf core never clears this bit.
 *
 * Return: true if the event follows a task, false if it belongs to a CPU.
 */
static inline bool perf_core_is_of_task(const struct perf_event *event)
{
	return event->attach_state & PERF_ATTACH_TASK;
}

/**
 * perf_core_is_alone() - whether an event is alone in its group
 * @event: the event
 *
 * Safe as a hint only: a program that has the event's descriptor can open a
 * sibling of the event at any later time.
 *
 * Return: true if the event has neither siblings nor another leader.
 */
static inline bool perf_core_is_alone(const struct perf_event *event)
{
	return event->group_leader == event && !event->nr_siblings;
}

/* Samples */

/**
 * perf_core_buffer() - identify the ring that an event's records go to
 * @event: the event
 *
 * Safe: the pointer is only compared, and ring_buffer_attach() writes it with a
 * single store.
 *
 * Return: an address that identifies the ring; NULL if there is no ring.
 */
static inline const void *perf_core_buffer(const struct perf_event *event)
{
	return READ_ONCE(event->rb);
}

/**
 * perf_core_add_lost() - add to the count of lost samples of the event that was
 *                        opened
 * @event: the event, or one that inherits it
 * @count: number of samples for which no record was written
 *
 * A read with PERF_FORMAT_LOST returns the event's count. Safe:
 * perf_output_begin() adds to the same field of the same event, lost_samples,
 * which is atomic.
 */
static inline void perf_core_add_lost(struct perf_event *event, u64 count)
{
	atomic64_add(count, &(event->parent ?: event)->lost_samples);
}

/**
 * perf_core_event_clock() - read the clock that timestamps an event's records
 * @event: the event
 *
 * Safe: perf core sets event->clock before it installs the event, and never
 * changes it afterwards.
 *
 * Return: the time.
 */
static inline u64 perf_core_event_clock(const struct perf_event *event)
{
	return event->clock();
}

/**
 * perf_core_namespace() - get the PID namespace of an event's records
 * @event: the event
 *
 * Safe: perf_event_alloc() takes a reference on the namespace, and the event
 * holds that reference until the event is freed.
 *
 * Return: the namespace; for an inherited event, its parent's namespace, as in
 * perf core.
 */
static inline struct pid_namespace *perf_core_namespace(const struct perf_event *event)
{
	return event->parent ? event->parent->ns : event->ns;
}

/**
 * perf_core_sync_irq() - wait for an event's irq_work
 * @event: an event that perf core is destroying
 *
 * _free_event() waits for the irq_work, and then calls perf_event::destroy. In
 * between, a replay or the end of a limit may have queued the irq_work again.
 */
static inline void perf_core_sync_irq(struct perf_event *event)
{
	irq_work_sync(&event->pending_irq);
#ifdef VPMU_EVENT_HAS_DISABLE_IRQ
	irq_work_sync(&event->pending_disable_irq);
#endif
}

/**
 * perf_core_disable() - have an irq_work of perf core disable an event
 * @event: the event, active on this CPU; interrupts are off
 *
 * Does what perf_event_disable_inatomic() does, which modules cannot call. In
 * kernels without pending_disable_irq, the caller must queue pending_irq.
 */
static inline void perf_core_disable(struct perf_event *event)
{
	event->pending_disable = 1;
#ifdef VPMU_EVENT_HAS_DISABLE_IRQ
	irq_work_queue(&event->pending_disable_irq);
#endif
}

/**
 * perf_core_disable_now() - have perf core disable an event as soon as interrupts
 *                           are on
 * @event: the event, active on this CPU; interrupts are off
 */
static inline void perf_core_disable_now(struct perf_event *event)
{
	perf_core_disable(event);
	irq_work_queue(&event->pending_irq);
}

/**
 * perf_core_disable_again() - repeat perf_core_disable() for an event that left
 *                             its CPU before the irq_work ran
 * @event: the event, which becomes active on this CPU; interrupts are off
 *
 * Return: true if the event is about to be disabled.
 */
static inline bool perf_core_disable_again(struct perf_event *event)
{
	if (!event->pending_disable)
		return false;
	perf_core_disable_now(event);
	return true;
}

/**
 * perf_core_bpf_passes() - run the BPF program of an event
 * @event: the event
 * @data: its sample
 * @regs: the registers of the sample
 *
 * Before 6.10, the program is the event's overflow handler, and this function
 * does nothing. From 6.10 on, core.c runs the program in
 * bpf_overflow_handler(). That function also checks bpf_prog_active, to skip
 * the program and the record while another program runs on this CPU, and calls
 * perf_prepare_sample(). This function does neither, because both need symbols
 * that are not exported.
 *
 * Safe without the check of bpf_prog_active: BPF programs and maps hold locks
 * only while interrupts are off, and no replay starts while they are off.
 * Programs of raw tracepoints also nest without this check. Safe without
 * perf_prepare_sample(): the program's context and helpers use only the
 * registers, address, period and call chain, which the replay has set.
 *
 * Return: false if the program suppresses the record.
 */
static inline bool perf_core_bpf_passes(struct perf_event *event, struct perf_sample_data *data,
					struct pt_regs *regs)
{
#if VPMU_PERF_BPF_IS_APART && defined(CONFIG_BPF_SYSCALL)
	struct bpf_perf_event_data_kern context = {
		.regs = perf_arch_bpf_user_pt_regs(regs),
		.data = data,
		.event = event,
	};
	struct bpf_prog *program;
	u32 passes = 1;

	rcu_read_lock();
	program = READ_ONCE(event->prog);
	if (program && program->type == BPF_PROG_TYPE_PERF_EVENT)
		passes = bpf_prog_run(program, &context);
	rcu_read_unlock();
	return passes;
#else
	return true;
#endif
}

/**
 * perf_core_overflow() - pass an overflow to perf core
 * @event: the event
 * @data: its sample
 * @regs: the registers of the sample
 *
 * Calls the event's overflow handler. This is the last step of
 * perf_event_overflow(), which modules cannot call. Safe: before 6.10, a BPF
 * program may replace the handler at any time, so this function, like perf
 * core, reads it only once.
 *
 * Return: false if the event's BPF program suppresses the record.
 */
static inline bool perf_core_overflow(struct perf_event *event, struct perf_sample_data *data,
				      struct pt_regs *regs)
{
	perf_overflow_handler_t handler = READ_ONCE(event->overflow_handler);

	if (!perf_core_bpf_passes(event, data, regs))
		return false;
	handler(event, data, regs);
	return true;
}

/**
 * perf_core_reports_each() - whether a program is told about each of an event's
 *                            overflows when it happens
 * @event: the event; interrupts are off
 *
 * A program gets a signal if it has set O_ASYNC, or if the event has a limit of
 * overflows. A BPF program of the event runs at each overflow. Safe: the fields
 * are only read, each once; a change that is missed here is seen at the next
 * call.
 *
 * Return: true if an overflow cannot wait for a later replay.
 */
static inline bool perf_core_reports_each(const struct perf_event *event)
{
	const struct perf_event *first = event->parent ?: event;

#ifdef CONFIG_BPF_SYSCALL
	if (READ_ONCE(event->prog))
		return true;
#endif
	return READ_ONCE(first->fasync) || atomic_read(&event->event_limit);
}

/**
 * perf_core_limit() - get the number of overflows that an event is limited to
 * @event: the event
 *
 * PERF_EVENT_IOC_REFRESH adds to the number. Safe: it is atomic, and only an
 * overflow that the driver passes to perf core decrements it.
 *
 * Return: the number; zero without a limit.
 */
static inline u32 perf_core_limit(const struct perf_event *event)
{
	return atomic_read(&event->event_limit);
}

/**
 * perf_core_add_limit() - add overflows to an event's limit, as
 *                         PERF_EVENT_IOC_REFRESH does
 * @event: the event
 * @overflows: number of overflows
 */
static inline void perf_core_add_limit(struct perf_event *event, u32 overflows)
{
	atomic_add(overflows, &event->event_limit);
}

/**
 * perf_core_use_limit() - subtract overflows from an event's limit
 * @event: the event, whose overflows are not passed to perf core
 * @overflows: number of overflows
 *
 * Return: true if the event may overflow further before the limit is used up.
 */
static inline bool perf_core_use_limit(struct perf_event *event, u32 overflows)
{
	return atomic_sub_return(overflows, &event->event_limit);
}

/**
 * perf_core_signal() - signal an event's owner after an overflow, and decrement
 *                      the event's overflow limit
 * @event: the event, which is active on this CPU or was last active here;
 *         interrupts are off
 * @ended: set if the limit of PERF_EVENT_IOC_REFRESH is used up
 *
 * Does both as __perf_event_overflow() does. Safe: only the CPU that the event
 * is active on accesses the pending fields, and perf_pending_irq() reads them
 * on that CPU.
 *
 * Return: true if the owner gets a signal, or the event is disabled, once
 * interrupts are on.
 */
static inline bool perf_core_signal(struct perf_event *event, bool *ended)
{
	struct fasync_struct **fasync = &(event->parent ?: event)->fasync;

	event->pending_kill = POLL_IN;
	if (atomic_read(&event->event_limit) && atomic_dec_and_test(&event->event_limit)) {
		event->pending_kill = POLL_HUP;
		*ended = true;
		perf_core_disable(event);
	} else if (!READ_ONCE(*fasync)) {
		return false;
	}
	event->pending_wakeup = 1;
	irq_work_queue(&event->pending_irq);
	return true;
}

/**
 * perf_core_signal_is_pending() - whether perf_core_signal() has queued a signal
 *                                 that was not sent yet
 * @event: the event; interrupts are off
 *
 * Safe: perf_pending_irq() clears the field before it sends the signal, on this
 * CPU, where it cannot be interrupted by the caller.
 *
 * Return: true if another overflow would be merged into that signal.
 */
static inline bool perf_core_signal_is_pending(const struct perf_event *event)
{
	return READ_ONCE(event->pending_wakeup) && READ_ONCE((event->parent ?: event)->fasync);
}

#endif /* _VPMU_PERF_CORE_PRIVATE_H */

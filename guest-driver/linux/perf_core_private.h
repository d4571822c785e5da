/* SPDX-License-Identifier: GPL-2.0 */
/*
 * perf core's own fields: the only file that accesses them.
 *
 * perf core gives a PMU the fields attr, hw, pmu, cpu, parent, group_leader, state, count,
 * pmu_private and destroy of an event. This driver needs more: it reaches events from outside
 * perf core's scheduling, keeps their times, and makes samples. The fields for that belong to
 * kernel/events/core.c, which may change their meaning in any version. Each helper here names the
 * rule of core.c that makes it safe in 6.1 and in 6.12; a port to another version starts here.
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
#include <linux/spinlock.h>

#include "compat.h"

/* Contexts */

/**
 * perf_core_context() - the context that an event is in
 * @event: the event
 *
 * Safe without a lock: perf_install_in_context() publishes a context that is complete, by
 * smp_store_release(), and an event holds a reference on its context until it is freed.
 *
 * Return: the context; NULL while the event is being made.
 */
static inline struct perf_event_context *perf_core_context(const struct perf_event *event)
{
	return READ_ONCE(event->ctx);
}

/**
 * perf_core_task_context() - the context of a task's software events
 * @task: the current task, or the task that this CPU is switching to;
 *        interrupts are off
 *
 * Safe for such a task: its context is released only when the task exits, and
 * is swapped with another task's context only when one of the two tasks is
 * scheduled out.
 *
 * Return: the context, or NULL if the task has none.
 */
static inline struct perf_event_context *perf_core_task_context(struct task_struct *task)
{
#if !VPMU_PERF_ONE_CONTEXT
	return READ_ONCE(task->perf_event_ctxp[perf_sw_context]);
#else
	return READ_ONCE(task->perf_event_ctxp);
#endif
}

/**
 * perf_core_anchor_task() - create a task's software context with an event of
 *                           another PMU
 * @task: the task
 *
 * Before 6.2 a task's perf context keeps a pointer to the PMU of the event that
 * created the context, and the context can outlive this module. So a software
 * event, which is released at once, creates the context first. Safe: the check
 * needs no lock, because a context that exists stays.
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
 * perf core holds the lock, on the CPU of the context, whenever it adds or
 * removes events, changes their state or their times, or calls a PMU.
 */
static inline void perf_core_lock(struct perf_event_context *ctx)
	__acquires(&ctx->lock)
{
	raw_spin_lock(&ctx->lock);
}

/**
 * perf_core_trylock() - perf_core_lock(), unless another CPU holds it
 * @ctx: the context; interrupts are off
 *
 * For a second context: perf core takes the locks of two contexts as well, to swap them. Trying
 * cannot deadlock with that.
 */
#define perf_core_trylock(ctx)	raw_spin_trylock(&(ctx)->lock)

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
 * perf_core_assert_locked() - have lockdep check for perf_core_lock()
 * @ctx: the context
 */
static inline void perf_core_assert_locked(const struct perf_event_context *ctx)
{
	lockdep_assert_held(&ctx->lock);
}

/**
 * perf_core_for_each_event() - all events of a context, active or not
 * @event: set to each of them
 * @ctx: the context, locked: list_add_event() and list_del_event() need the lock
 */
#define perf_core_for_each_event(event, ctx) \
	list_for_each_entry(event, &(ctx)->event_list, event_entry)

/**
 * perf_core_pin() - keep perf core from swapping a context with another task's
 * @event: an event of the context, which is locked
 *
 * Safe: perf core counts its own pins in the same field, with the lock, and
 * only increments and decrements it. perf_event_context_sched_out() does not
 * swap a context that has a pin.
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
 * perf_core_is_scheduled() - whether the context of an event is on a CPU
 * @event: the event; its context is locked, as it is when perf core writes the
 *         field
 *
 * Return: true if the context is on a CPU.
 */
static inline bool perf_core_is_scheduled(const struct perf_event *event)
{
	return event->ctx->is_active;
}

/**
 * perf_core_class_leaves() - whether an event is scheduled out together with
 *                            all pinned, or all flexible, events
 * @event: the event that is scheduled out; its context is locked
 * @other: @event, or another active event of its context
 *
 * Safe: enum event_type_t of core.c has the same values in all versions.
 * ctx_sched_out() first clears the bits of the classes, pinned and flexible,
 * that it takes out, and then takes out their events. From 6.2 on it may take
 * out the events of only one PMU.
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

/**
 * perf_core_clock() - the clock by which perf core adds up the times of an event
 * @event: the event, whose context is locked
 *
 * As perf_event_time() reads it. Safe: update_context_time() advances it with the lock.
 *
 * Return: the time.
 */
static inline u64 perf_core_clock(const struct perf_event *event)
{
#ifdef CONFIG_CGROUP_PERF
	if (event->cgrp)
		return per_cpu_ptr(event->cgrp->info, event->cpu)->time;
#endif
	return event->ctx->time;
}

/* Times of an event */

/**
 * perf_core_add_up() - add the time since the last change of state to the time enabled
 * @event: an active event, whose context is locked
 *
 * As perf_event_update_time() does, except for the time running, which the
 * caller adds. Safe: perf core adds up the time from the new tstamp on.
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
 * perf_core_running() - the time running of an event
 * @event: the event, whose context is locked
 *
 * Return: the time, up to the last change of state.
 */
static inline u64 perf_core_running(const struct perf_event *event)
{
	return event->total_time_running;
}

/**
 * perf_core_set_running() - change the time running of an event
 * @event: the event, whose context is locked
 * @running: the time
 *
 * Safe: core.c adds to it only with the lock, and never compares it with a clock.
 * Readers without the lock see the old or the new value.
 */
static inline void perf_core_set_running(struct perf_event *event, u64 running)
{
	event->total_time_running = running;
}

/**
 * perf_core_missed() - the time that an event was enabled and did not run
 * @event: the event, whose context is locked
 *
 * Return: the time, up to the last change of state.
 */
static inline u64 perf_core_missed(const struct perf_event *event)
{
	return event->total_time_enabled - event->total_time_running;
}

/* Families: an event and its children, which tasks inherit */

/**
 * perf_core_lock_family() - keep tasks from inheriting an event, and children from ending
 * @event: the event that was opened
 *
 * inherit_event() and perf_event_exit_event() change the list of children with this lock.
 */
static inline void perf_core_lock_family(struct perf_event *event)
	__acquires(&event->child_mutex)
{
	mutex_lock(&event->child_mutex);
}

/**
 * perf_core_lock_family_of() - perf_core_lock_family() for several events at once
 * @event: the event that was opened
 * @outer: a mutex that the caller holds, like every caller that takes several of
 *         these locks at once
 */
#define perf_core_lock_family_of(event, outer) \
	mutex_lock_nest_lock(&(event)->child_mutex, outer)

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
 * @child: set to each of them
 * @event: the event that was opened, its family locked
 */
#define perf_core_for_each_child(child, event) \
	list_for_each_entry(child, &(event)->child_list, child_list)

/**
 * perf_core_has_children() - whether an event has children
 * @event: the event that was opened; without the lock of its family the answer is a hint
 *
 * Return: true if it has a live child.
 */
static inline bool perf_core_has_children(const struct perf_event *event)
{
	return !list_empty(&event->child_list);
}

/**
 * perf_core_dead_count() - count of the children that have ended
 * @event: the event that was opened, its family locked
 *
 * Safe: sync_child_event() adds to the field as a child ends; the field is
 * atomic in both versions.
 *
 * Return: the count.
 */
static inline u64 perf_core_dead_count(const struct perf_event *event)
{
	return atomic64_read(&event->child_count);
}

/**
 * perf_core_dead_missed() - perf_core_missed() of the children that have ended
 * @event: the event that was opened, its family locked
 *
 * Return: the time.
 */
static inline u64 perf_core_dead_missed(const struct perf_event *event)
{
	return atomic64_read(&event->child_total_time_enabled) -
	       atomic64_read(&event->child_total_time_running);
}

/* The CPU, the task and the group of an event */

/**
 * perf_core_cpu() - the CPU that an event is active on
 * @event: the event
 *
 * Safe with its context locked. Without that lock, the answer is a hint that the
 * caller checks on that CPU.
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
 * perf core takes the events of a task that exits off the CPU, marks their context, and
 * changes their state later. Safe: the mark is TASK_TOMBSTONE of core.c, (void *)-1L in
 * both versions, and is never removed.
 *
 * Return: true if it has.
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
 * Safe: perf_event_alloc() sets the bit before event_init(), and it is never cleared.
 *
 * Return: true if it does, false if it belongs to a CPU.
 */
static inline bool perf_core_is_of_task(const struct perf_event *event)
{
	return event->attach_state & PERF_ATTACH_TASK;
}

/**
 * perf_core_is_alone() - whether an event is not in a group
 * @event: the event
 *
 * Safe: the answer is a hint, because a program that holds a descriptor can
 * join another event at any later time.
 *
 * Return: true if it has neither siblings nor another leader.
 */
static inline bool perf_core_is_alone(const struct perf_event *event)
{
	return event->group_leader == event && !event->nr_siblings;
}

/**
 * perf_core_handler_context() - the overflow handler context of an in-kernel event
 * @event: the event
 * @handler: the overflow handler that identifies events of one origin
 *
 * Safe: perf_event_alloc() sets both fields, and copies them to inherited events. A BPF program,
 * which before 6.10 replaces the handler, is attached through a descriptor, and an in-kernel
 * event has none.
 *
 * Return: the context given with @handler, or NULL for an event with another handler.
 */
static inline void *perf_core_handler_context(const struct perf_event *event,
					      perf_overflow_handler_t handler)
{
	return event->overflow_handler == handler ? event->overflow_handler_context : NULL;
}

/* Samples */

/**
 * perf_core_buffer() - the ring that perf core writes the records of an event to
 * @event: the event
 *
 * Safe: the pointer is only compared, and ring_buffer_attach() writes it with a
 * single store.
 *
 * Return: an address that identifies the ring, or NULL without a ring.
 */
static inline const void *perf_core_buffer(const struct perf_event *event)
{
	return READ_ONCE(event->rb);
}

/**
 * perf_core_trace_started() - keep perf core from reporting the start of a trace again
 * @event: the event, whose context is locked
 *
 * perf core writes PERF_RECORD_ITRACE_START for each event that it adds, until
 * perf_event_itrace_started() has set this bit; modules cannot call that
 * function. Safe: PMUs call it with the context's lock held, as here.
 */
static inline void perf_core_trace_started(struct perf_event *event)
{
	event->attach_state |= PERF_ATTACH_ITRACE;
}

/**
 * perf_core_add_lost() - count samples without a record
 * @event: the event
 * @count: how many
 *
 * For PERF_FORMAT_LOST. Safe: perf_output_begin() adds to the same field, which
 * is atomic.
 */
static inline void perf_core_add_lost(struct perf_event *event, u64 count)
{
	atomic64_add(count, &event->lost_samples);
}

/**
 * perf_core_event_clock() - the clock of an event's records
 * @event: the event
 *
 * Safe: perf core sets the function before the event is installed, and never changes it.
 *
 * Return: the time.
 */
static inline u64 perf_core_event_clock(const struct perf_event *event)
{
	return event->clock();
}

/**
 * perf_core_namespace() - the PID namespace of an event's records
 * @event: the event
 *
 * Safe: perf_event_alloc() takes the reference, and the event holds it until it is freed.
 *
 * Return: the namespace; for an inherited event, its parent's, which perf core
 * uses, too.
 */
static inline struct pid_namespace *perf_core_namespace(const struct perf_event *event)
{
	return event->parent ? event->parent->ns : event->ns;
}

/**
 * perf_core_disable() - let perf core disable an event in its next irq_work
 * @event: the event, active on this CPU; interrupts are off
 *
 * Does what perf_event_disable_inatomic() does, which modules cannot call. In
 * kernels without pending_disable_irq, the caller must queue pending_irq. perf
 * core does the same when an AUX area is truncated. But until 6.16, perf core
 * had two defects in that case. It stored the CPU's number in pending_disable,
 * so an event on CPU 0 was not disabled. And in kernels with
 * pending_disable_irq, it queued the wrong work.
 */
static inline void perf_core_disable(struct perf_event *event)
{
	event->pending_disable = 1;
#ifdef VPMU_EVENT_HAS_DISABLE_IRQ
	irq_work_queue(&event->pending_disable_irq);
#endif
}

/**
 * perf_core_disable_again() - repeat perf_core_disable() for an event that left
 *                             its CPU before the irq_work ran
 * @event: the event, which becomes active on this CPU; interrupts are off
 *
 * Return: true if it is about to be disabled.
 */
static inline bool perf_core_disable_again(struct perf_event *event)
{
	if (!event->pending_disable)
		return false;
	perf_core_disable(event);
	irq_work_queue(&event->pending_irq);
	return true;
}

/**
 * perf_core_bpf_passes() - run the BPF program of an event
 * @event: the event
 * @data: its sample
 * @regs: the registers of the sample
 *
 * Before 6.10 such a program is the event's overflow handler. From 6.10 on, bpf_overflow_handler()
 * of core.c calls it. That function skips program and record while a program runs on this CPU,
 * and calls perf_prepare_sample() first; but bpf_prog_active and perf_prepare_sample() are not
 * exported. Safe without both. Programs and maps hold their locks with interrupts off, when no
 * replay can begin. Programs of raw tracepoints nest without a check of bpf_prog_active, too. The
 * replay has set the fields that the program's context and its helpers use: registers, address,
 * period and call chain.
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
 * perf_core_overflow() - hand an overflow to perf core
 * @event: the event
 * @data: its sample
 * @regs: the registers of the sample
 *
 * Makes the last call of perf_event_overflow(), which modules cannot call.
 * Safe: like perf core, this reads the handler once, because before 6.10 a BPF
 * program may replace it at any time.
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
 * perf_core_signal() - signal an event's owner, and count down its limit, after an overflow
 * @event: the event, active on this CPU; interrupts are off
 *
 * As __perf_event_overflow() does. Safe: only the CPU that the event is active
 * on uses the pending fields; perf_pending_irq() reads them there.
 *
 * Return: true if the limit of PERF_EVENT_IOC_REFRESH is used up.
 */
static inline bool perf_core_signal(struct perf_event *event)
{
	struct fasync_struct **fasync = &(event->parent ?: event)->fasync;
	bool ended = atomic_read(&event->event_limit) && atomic_dec_and_test(&event->event_limit);

	event->pending_kill = ended ? POLL_HUP : POLL_IN;
	if (ended)
		perf_core_disable(event);
	else if (!READ_ONCE(*fasync))
		return false;
	event->pending_wakeup = 1;
	irq_work_queue(&event->pending_irq);
	return ended;
}

#endif /* _VPMU_PERF_CORE_PRIVATE_H */

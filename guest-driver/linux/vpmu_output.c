// SPDX-License-Identifier: GPL-2.0
/*
 * Output: which ring an event writes to, and which programs are woken.
 *
 * An event writes to its own ring or, if redirected, to the ring of another
 * event. The device's notice names an event that writes to a ring that needs a
 * wakeup. The driver wakes the pollers of all events that write to the ring, and
 * signals only the owner of the named event.
 *
 * The device's interrupt comes on any CPU, but the work must be done at the
 * expense of the programs that caused it. So the interrupt only notes who is to
 * be woken, and a softirq on the event's CPU does the rest.
 */
#include <linux/cpu.h>
#include <linux/cpumask.h>
#include <linux/fs.h>
#include <linux/interrupt.h>
#include <linux/minmax.h>
#include <linux/overflow.h>
#include <linux/percpu.h>
#include <linux/perf_event.h>
#include <linux/poll.h>
#include <linux/rcupdate.h>
#include <linux/sched.h>
#include <linux/smp.h>
#include <linux/workqueue.h>

#include "vpmu.h"
#include "vpmu_event.h"
#include "vpmu_file.h"
#include "vpmu_persistent.h"
#include "vpmu_ring.h"

/* Number of programs that one call of vpmu_output_deliver() wakes or signals */
#define DELIVERIES	64

/**
 * vpmu_output_attach() - change the ring that an event writes to
 * @file: the event's file; the device's output_lock is held
 * @ring: the ring, or NULL
 */
void vpmu_output_attach(struct vpmu_file *file, struct vpmu_ring *ring)
{
	lockdep_assert_held(&file->dev->output_lock);
	spin_lock_irq(&file->dev->lookup.lock);
	list_del_init(&file->output.entry);
	list_del_init(&file->output.poller);
	/* Wake pollers: the old ring is gone, or another has replaced it. */
	if (file->output.ring)
		wake_up_all(&file->waiters.queue);
	file->output.ring = ring;
	if (ring)
		list_add_tail(&file->output.entry, &ring->writers);
	spin_unlock_irq(&file->dev->lookup.lock);
}

/**
 * vpmu_output_abandon() - detach a ring from all events that write to it
 * @dev: the device; its output_lock is held
 * @ring: the ring
 */
void vpmu_output_abandon(struct vpmu_device *dev, struct vpmu_ring *ring)
{
	struct vpmu_file *file, *next;

	lockdep_assert_held(&dev->output_lock);
	list_for_each_entry_safe(file, next, &ring->writers, output.entry)
		vpmu_output_attach(file, NULL);
	spin_lock_irq(&dev->lookup.lock);
	list_del_init(&ring->woken);
	spin_unlock_irq(&dev->lookup.lock);
}

/**
 * vpmu_output_forget() - drop the signals that a file's owners would get
 * @file: the file, which is about to be freed; notices do not find it
 */
void vpmu_output_forget(struct vpmu_file *file)
{
	unsigned long flags;

	spin_lock_irqsave(&file->dev->lookup.lock, flags);
	list_del_init(&file->output.poller);
	list_del_init(&file->waiters.entry);
	spin_unlock_irqrestore(&file->dev->lookup.lock, flags);
}

/**
 * vpmu_output_unmapped() - after an event's last unmap, detach the event from
 *                          its ring
 * @file: the event's file; the device's output_lock is held
 *
 * If @file writes to the ring of another event, this function detaches @file
 * from that ring, as perf does. But an event stays attached to its own ring: on
 * the device, a ring always belongs to the event through which it was first
 * mapped.
 */
void vpmu_output_unmapped(struct vpmu_file *file)
{
	if (file->output.ring->id == file->id)
		return;
	if (!file->output.ring->ended && vpmu_control_redirect(file->dev, file->id, 0))
		vpmu_err(file->dev, "event %llu cannot be detached from the ring of event %llu\n",
			 file->id, file->output.ring->id);
	vpmu_output_attach(file, NULL);
}

static int output_redirect(struct vpmu_file *file, struct vpmu_file *target)
{
	struct vpmu_ring *ring = target ? target->output.ring : NULL;
	int err;

	lockdep_assert_held(&file->dev->output_lock);
	/*
	 * An event cannot be redirected while it has mappings of its ring. It
	 * also cannot be redirected while it has a ring of its own, because
	 * another event may have mapped that ring.
	 */
	if (file->output.maps || (file->output.ring && file->output.ring->id == file->id))
		return -EINVAL;
	if (target && !ring)
		return -EINVAL;
	if (file->output.ring == ring)
		return 0;
	err = vpmu_control_redirect(file->dev, file->id, target ? target->id : 0);
	if (!err)
		vpmu_output_attach(file, ring);
	return err;
}

/*
 * Whether perf allows two events to share a ring: both are for the same CPU, or for
 * the same task on all CPUs.
 */
static bool output_shares(const struct vpmu_place *place, const struct vpmu_place *other)
{
	return place->cpu == other->cpu && (place->cpu != -1 || place->task == other->task);
}

/**
 * vpmu_output_redirect() - PERF_EVENT_IOC_SET_OUTPUT
 * @file: the event to redirect, with the events that inherit it
 * @target: the event whose ring receives their records; NULL to end the
 *          redirection, after which @file has no ring until a program maps one
 *          through it
 *
 * Return: 0; -EPERM if @file or @target is an event of the host; -EINVAL, as in
 * perf, if @target is @file, counts on another CPU or for another task, differs
 * in write_backward, or has no ring, or if @file is mapped or has a ring of its
 * own; or another negative errno.
 */
int vpmu_output_redirect(struct vpmu_file *file, struct vpmu_file *target)
{
	const __le32 backward = cpu_to_le32(VPMU_OPEN_BACKWARD);
	int err;

	if (target && READ_ONCE(target->failure))
		return READ_ONCE(target->failure);
	/* Check this first: the guest must not change events of the host. */
	if (file->persist.operator || (target && target->persist.operator))
		return -EPERM;
	if (target) {
		if (target == file || target->dev != file->dev ||
		    !output_shares(&file->place, &target->place))
			return -EINVAL;
		if ((target->spec.request.flags ^ file->spec.request.flags) & backward)
			return -EINVAL;
	}
	mutex_lock(&file->dev->output_lock);
	err = output_redirect(file, target);
	mutex_unlock(&file->dev->output_lock);
	return err;
}

/**
 * vpmu_output_pause() - PERF_EVENT_IOC_PAUSE_OUTPUT
 * @file: the file of an event that writes to the ring
 * @paused: true to pause, false to resume
 *
 * Return: 0; -EINVAL without a ring, or if it has no data pages; or another
 * negative errno.
 */
int vpmu_output_pause(struct vpmu_file *file, bool paused)
{
	int err = -EINVAL;

	mutex_lock(&file->dev->output_lock);
	if (file->output.ring && file->output.ring->count > 1)
		err = vpmu_control_pause(file->dev, file->id, paused);
	mutex_unlock(&file->dev->output_lock);
	return err;
}

/**
 * vpmu_output_interval() - set the wakeup interval of an event's records
 * @file: the event's file
 * @wakeup: the interval
 *
 * The interval also applies to the events that inherit @file's event, now or
 * later.
 *
 * Return: 0; -EINVAL for an invalid interval or an event without records;
 * -EPERM for an event of the host; or another negative errno.
 */
int vpmu_output_interval(struct vpmu_file *file, const struct vpmu_wakeup *wakeup)
{
	int err;

	/*
	 * Redirecting or mapping an event also sets its wakeup interval. The
	 * lock prevents both during this call.
	 */
	mutex_lock(&file->dev->output_lock);
	err = file->ended ? -ENOENT : vpmu_control_wakeup(file->dev, file->id, wakeup);
	mutex_unlock(&file->dev->output_lock);
	return err;
}

/**
 * vpmu_output_ended() - wake pollers of an event that the host has ended
 * @file: the event's file
 */
void vpmu_output_ended(struct vpmu_file *file)
{
	vpmu_ring_ended(file);
	WRITE_ONCE(file->error, true);
	spin_lock_irq(&file->dev->lookup.lock);
	wake_up_all(&file->waiters.queue);
	spin_unlock_irq(&file->dev->lookup.lock);
	kill_fasync(&file->waiters.fasync, SIGIO, POLL_HUP);
}

/**
 * vpmu_output_poll() - whether a ring has crossed its watermark since the last
 *                      poll
 * @file: the polled file
 * @reported: number of the last wakeup that this descriptor has reported;
 *	updated
 *
 * Return: EPOLLIN if the ring has crossed its watermark, 0 if it has not,
 * EPOLLHUP if the event has no ring.
 */
__poll_t vpmu_output_poll(struct vpmu_file *file, loff_t *reported)
{
	__poll_t events = EPOLLHUP;

	spin_lock_irq(&file->dev->lookup.lock);
	if (file->output.ring) {
		events = file->output.ring->wakeup > *reported ? EPOLLIN : 0;
		*reported = max(*reported, file->output.ring->wakeup);
		if (list_empty(&file->output.poller))
			list_add_tail(&file->output.poller, &file->output.ring->pollers);
	}
	spin_unlock_irq(&file->dev->lookup.lock);
	return events;
}

/**
 * vpmu_output_gone() - wake pollers when one of an event's tasks has ended
 * @file: the event's file
 *
 * perf core itself wakes only pollers of events that write to one of perf
 * core's rings.
 */
void vpmu_output_gone(struct vpmu_file *file)
{
	unsigned long flags;

	spin_lock_irqsave(&file->dev->lookup.lock, flags);
	if (!READ_ONCE(file->closed))
		wake_up_all(&file->waiters.queue);
	spin_unlock_irqrestore(&file->dev->lookup.lock, flags);
}

/*
 * Returns the queue of the CPU that wakes and signals programs for @file: where
 * its event counts or, for an event of a task, last counted. NULL if no queue is
 * known.
 */
static struct vpmu_vcpu *output_vcpu(struct vpmu_file *file)
{
	struct vpmu_event *own = file->event ? file->event->pmu_private : NULL;
	const struct vpmu_event *heir;
	int cpu = file->place.cpu;

	lockdep_assert_held(&file->dev->lookup.lock);
	if (cpu < 0 && own) {
		heir = list_first_entry_or_null(&own->heirs, struct vpmu_event, heir);
		cpu = READ_ONCE((heir ?: own)->cpu);
	}
	if (cpu < 0 || !cpu_online(cpu))
		cpu = smp_processor_id();
	vpmu_vcpu_call(file->dev, cpu);
	return *per_cpu_ptr(file->dev->cpu_vcpu, cpu);
}

/*
 * Notes that programs that poll the ring of @file must be woken, and that the
 * owner of @file must get @count more signals, which @signals counts: programs
 * may count wakeups by counting these signals.
 */
static void output_wakeup(struct vpmu_file *file, u32 *signals, u32 count)
{
	struct vpmu_ring *ring = file->output.ring;
	bool polled = ring && !list_empty(&ring->pollers);
	struct vpmu_vcpu *vcpu;

	if (ring)
		ring->wakeup = ++file->dev->lookup.wakeups;
	if (!polled && !file->waiters.fasync)
		return;
	vcpu = output_vcpu(file);
	if (!vcpu)
		return;
	if (polled && list_empty(&ring->woken))
		list_add_tail(&ring->woken, &vcpu->woken);
	if (!file->waiters.fasync)
		return;
	if (check_add_overflow(*signals, clamp_t(u32, count, 1, VPMU_NOTICE_COUNT), signals))
		*signals = U32_MAX;
	if (list_empty(&file->waiters.entry))
		list_add_tail(&file->waiters.entry, &vcpu->signalled);
}

/* The same for an event that is now in the error state. */
static void output_error(struct vpmu_file *file)
{
	struct vpmu_vcpu *vcpu = output_vcpu(file);

	WRITE_ONCE(file->error, true);
	file->waiters.err = true;
	if (vcpu && list_empty(&file->waiters.entry))
		list_add_tail(&file->waiters.entry, &vcpu->signalled);
}

/* Wakes the pollers of one file. Returns false if no ring is due. */
static bool output_wake_next(struct vpmu_vcpu *vcpu)
{
	struct vpmu_lookup *lookup = &vcpu->dev->lookup;
	struct vpmu_file *file = NULL;
	struct vpmu_ring *ring;
	unsigned long flags;

	spin_lock_irqsave(&lookup->lock, flags);
	ring = list_first_entry_or_null(&vcpu->woken, struct vpmu_ring, woken);
	if (ring)
		file = list_first_entry_or_null(&ring->pollers, struct vpmu_file, output.poller);
	if (file)
		list_del_init(&file->output.poller);
	if (ring && list_empty(&ring->pollers))
		list_del_init(&ring->woken);
	spin_unlock_irqrestore(&lookup->lock, flags);
	if (file)
		wake_up_all(&file->waiters.queue);
	return ring;
}

/* Takes the next signal of a file. Returns POLL_*. */
static int output_take_signal(struct vpmu_waiters *waiters)
{
	if (waiters->in) {
		waiters->in--;
		return POLL_IN;
	}
	if (waiters->hup) {
		waiters->hup--;
		return POLL_HUP;
	}
	waiters->err = false;
	return POLL_ERR;
}

/*
 * The event of @file has used up its limit of overflows. Notes that programs must be
 * woken and signalled, once perf core has disabled the event.
 */
static void output_spent(struct vpmu_file *file)
{
	u32 limits = file->waiters.limits;
	int spent = vpmu_event_spent_here(file->event);

	if (spent < 0) {
		schedule_work(&file->waiters.limit);
		return;
	}
	file->waiters.limits = 0;
	if (spent)
		output_wakeup(file, &file->waiters.hup, limits);
}

/* Sends one signal. Returns false if no signal is due. */
static bool output_signal_next(struct vpmu_vcpu *vcpu)
{
	struct vpmu_lookup *lookup = &vcpu->dev->lookup;
	struct vpmu_waiters *waiters;
	struct vpmu_file *file;
	unsigned long flags;
	int reason = 0;

	spin_lock_irqsave(&lookup->lock, flags);
	file = list_first_entry_or_null(&vcpu->signalled, struct vpmu_file, waiters.entry);
	if (file) {
		waiters = &file->waiters;
		/* Others go first before the file's next signal. */
		list_del_init(&waiters->entry);
		if (waiters->in || waiters->hup || waiters->err)
			reason = output_take_signal(waiters);
		else if (waiters->limits && file->event && !READ_ONCE(file->closed))
			output_spent(file);
		if ((waiters->in || waiters->hup || waiters->err || (reason && waiters->limits)) &&
		    list_empty(&waiters->entry))
			list_add_tail(&waiters->entry, &vcpu->signalled);
	}
	spin_unlock_irqrestore(&lookup->lock, flags);
	if (!file)
		return false;
	if (reason == POLL_ERR)
		wake_up_all(&file->waiters.queue);
	if (reason)
		kill_fasync(&file->waiters.fasync, SIGIO, reason);
	return true;
}

/**
 * vpmu_output_deliver() - wake and signal programs
 * @vcpu: the queue whose CPU must do it
 *
 * Call without locks. A flush calls this function on any CPU.
 *
 * Return: true if more programs must be woken or signalled.
 */
bool vpmu_output_deliver(struct vpmu_vcpu *vcpu)
{
	unsigned int left = DELIVERIES;

	/* RCU keeps the memory of a file that is closed meanwhile. */
	rcu_read_lock();
	while (left && (output_wake_next(vcpu) || output_signal_next(vcpu)))
		left--;
	rcu_read_unlock();
	return !left;
}

/**
 * vpmu_output_limit() - wake and signal programs after the last overflow that
 *                       PERF_EVENT_IOC_REFRESH allowed
 * @file: the event's file; perf core has disabled the event. Sleeps
 * @spent: the limit was used up; otherwise the event goes on, and nobody is woken
 */
void vpmu_output_limit(struct vpmu_file *file, bool spent)
{
	spin_lock_irq(&file->dev->lookup.lock);
	if (spent && file->waiters.limits && !READ_ONCE(file->closed))
		output_wakeup(file, &file->waiters.hup, file->waiters.limits);
	file->waiters.limits = 0;
	spin_unlock_irq(&file->dev->lookup.lock);
}

/*
 * The event of @file has used up its limit of overflows, @count times. Its CPU then
 * disables it in perf core.
 */
static void output_limit(struct vpmu_file *file, u32 count)
{
	struct vpmu_vcpu *vcpu;

	if (!file->event) {
		output_wakeup(file, &file->waiters.hup, count);
		return;
	}
	file->waiters.limits += clamp_t(u32, count, 1, VPMU_NOTICE_COUNT);
	vcpu = output_vcpu(file);
	if (!vcpu)
		schedule_work(&file->waiters.limit);
	else if (list_empty(&file->waiters.entry))
		list_add_tail(&file->waiters.entry, &vcpu->signalled);
}

/**
 * vpmu_output_notice() - handle a notice from the device
 * @dev: the device
 * @notice: the notice
 *
 * Called with interrupts off.
 */
void vpmu_output_notice(struct vpmu_device *dev, const struct vpmu_notice *notice)
{
	struct vpmu_file *file;
	unsigned long flags;

	if (le32_to_cpu(notice->kind) == VPMU_NOTICE_PERSISTENT) {
		vpmu_persistent_notice(dev);
		return;
	}
	if (le32_to_cpu(notice->kind) == VPMU_NOTICE_WAKEUP &&
	    vpmu_sampling_notice(dev, le64_to_cpu(notice->event)))
		return;
	/*
	 * Notices can find a file until its last event is destroyed. RCU keeps
	 * the file's memory valid until rcu_read_unlock().
	 */
	rcu_read_lock();
	spin_lock_irqsave(&dev->lookup.lock, flags);
	file = xa_load(&dev->lookup.files, le64_to_cpu(notice->event));
	if (!file || READ_ONCE(file->closed))
		goto unlock;
	switch (le32_to_cpu(notice->kind)) {
	case VPMU_NOTICE_WAKEUP:
		output_wakeup(file, &file->waiters.in, le32_to_cpu(notice->value));
		if (file->persist.views && file->place.cpu >= 0)
			vpmu_vcpu_call(dev, file->place.cpu);
		break;
	case VPMU_NOTICE_LIMIT:
		output_limit(file, le32_to_cpu(notice->value));
		break;
	case VPMU_NOTICE_ERROR:
		output_error(file);
		break;
	}
unlock:
	spin_unlock_irqrestore(&dev->lookup.lock, flags);
	rcu_read_unlock();
}

/*
 * Flush: make samples and packets visible to programs, and wake the programs.
 *
 * Before the device answers VPMU_COMMAND_FLUSH, it writes the samples and
 * packets, and puts notices about them into the event queue. The event queue's
 * interrupt may come after the answer, so the flush handles the notices itself.
 */

static void flush_wake(struct vpmu_device *dev)
{
	u32 turns = dev->info.max_events, i;

	/*
	 * Each iteration empties the event queue, so that the device can put
	 * more notices into it. A flush causes only a few notices per event,
	 * and an iteration handles many, so max_events iterations are enough.
	 * Without this limit, notices about new data could keep the loop
	 * running forever.
	 */
	while (vpmu_notices_take(dev) && turns--)
		cond_resched();
	/*
	 * Wake and signal from here, instead of from the events' CPUs. If such a
	 * CPU has begun to, wait for it.
	 */
	for (i = 0; i < dev->info.vcpus; i++) {
		while (vpmu_output_deliver(&dev->vcpus[i]) && turns--)
			cond_resched();
		tasklet_unlock_wait(&dev->vcpus[i].soft);
	}
}

/**
 * vpmu_flush() - flush an event and the events that inherit it
 * @file: the event's file
 *
 * After an error of one event, the others are still flushed.
 *
 * Return: 0; -EIO if an event is in the error state (its data is published
 * anyway); or another negative errno.
 */
int vpmu_flush(struct vpmu_file *file)
{
	struct perf_event *event = READ_ONCE(file->event);
	int err;

	err = event ? vpmu_call_family(event, VPMU_COMMAND_FLUSH) :
		      vpmu_direct_command(file, VPMU_COMMAND_FLUSH, 0);
	flush_wake(file->dev);
	return err;
}

/**
 * struct flush_call - a flush of all persistent events on one CPU
 * @dev: the device
 * @ret: the result
 */
struct flush_call {
	struct vpmu_device *dev;
	int ret;
};

static void flush_here(void *info)
{
	struct flush_call *call = info;
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(call->dev);
	struct vpmu_reply reply;

	/* The guest has no events on a CPU without a queue. */
	call->ret = vcpu ? vpmu_vcpu_command(vcpu, VPMU_COMMAND_FLUSH, 0, 0, &reply) : 0;
}

/**
 * vpmu_flush_all() - flush all persistent events
 * @dev: the device
 *
 * Return: like vpmu_flush().
 */
int vpmu_flush_all(struct vpmu_device *dev)
{
	struct flush_call call = { .dev = dev };
	int cpu, err = 0, ret;

	cpus_read_lock();
	for_each_online_cpu(cpu) {
		ret = smp_call_function_single(cpu, flush_here, &call, 1);
		err = err ?: ret ?: call.ret;
	}
	cpus_read_unlock();
	flush_wake(dev);
	return err;
}

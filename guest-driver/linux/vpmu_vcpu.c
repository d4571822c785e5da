// SPDX-License-Identifier: GPL-2.0
/*
 * The vCPU queues: the driver sends commands with interrupts off, and the
 * device answers them before the kick returns.
 *
 * The host handles the kick of a vCPU queue on that vCPU's thread. So when the
 * store that notifies the device completes, the answers are already in the used
 * ring. The driver needs no interrupt and does not wait.
 *
 * While perf core has the PMU disabled, commands are gathered. One kick sends
 * them when perf core enables the PMU, or earlier when perf core schedules an
 * event out and needs its count. So scheduling a task's events out costs one
 * exit for any number of events, and scheduling them in costs another; see
 * vpmu_pmu.c.
 *
 * Callbacks that can nest: a probe or a tracepoint can fire anywhere in the
 * kernel, also in this file and in the virtio functions that it calls. The
 * probe's event, or its BPF program, can then read the count of any event on
 * this CPU. So struct pmu::read can interrupt every other callback, and itself;
 * an NMI can, too. No other callback nests: perf core makes all other calls
 * with the context's lock held, and defers the rest, such as disabling an
 * event, to an irq_work. A nested read relies on this:
 *
 * - Between vcpu_enter() and vcpu_leave(), a read on the same CPU
 *   sends no command, and returns the last count: the CPU may hold a queue's
 *   lock, or be updating a count. So a read never waits for itself.
 * - Elsewhere, it may send its READ, with any commands gathered so far. The
 *   interrupted callback changes an event's state, such as
 *   vpmu_event::started, before it adds the command for the change, so a READ
 *   between the two returns the count of either state.
 * - It starts no replay: the interrupted code may hold locks that a BPF program
 *   of the replayed event needs.
 * - If it subtracts running time (see vpmu_event.c) while perf core adds to it
 *   on this CPU, the subtraction is lost. The running time is then too long by
 *   what the host did not count since the last answer.
 */
#include <linux/cpu.h>
#include <linux/interrupt.h>
#include <linux/irqflags.h>
#include <linux/minmax.h>
#include <linux/mm.h>
#include <linux/percpu.h>
#include <linux/preempt.h>
#include <linux/scatterlist.h>
#include <linux/sched.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/smp.h>
#include <linux/string.h>
#include <linux/timex.h>
#include <linux/tracepoint.h>
#include <linux/virtio_config.h>
#include <linux/workqueue.h>

#include "vpmu.h"
#include "vpmu_event.h"

/* Number of calls of vcpu_enter() on each CPU without vcpu_leave() */
static DEFINE_PER_CPU(unsigned int, vcpu_depth);

/*
 * Keeps reads that interrupt this CPU from using a queue and from updating a
 * count, until vcpu_leave(). Calls can be nested. Call before taking a queue's
 * lock: a probe can also fire while the lock is being taken or released.
 *
 * Turns interrupts off. Returns the flags for vcpu_leave().
 */
static unsigned long vcpu_enter(void)
{
	unsigned long flags;

	local_irq_save(flags);
	__this_cpu_inc(vcpu_depth);
	/* The compiler must not move what follows before the increment. */
	barrier();
	return flags;
}

static void vcpu_leave(unsigned long flags)
{
	barrier();
	__this_cpu_dec(vcpu_depth);
	local_irq_restore(flags);
}

/**
 * vpmu_vcpu_may_read() - whether a read that may have interrupted other code of
 *                        this driver may use a queue
 *
 * Call with interrupts off.
 *
 * Return: false in an NMI, and between vcpu_enter() and vcpu_leave().
 */
bool vpmu_vcpu_may_read(void)
{
	return !in_nmi() && !__this_cpu_read(vcpu_depth);
}

static unsigned long vcpu_lock(struct vpmu_vcpu *vcpu)
	__acquires(&vcpu->lock)
{
	unsigned long flags = vcpu_enter();

	raw_spin_lock(&vcpu->lock);
	return flags;
}

static void vcpu_unlock(struct vpmu_vcpu *vcpu, unsigned long flags)
	__releases(&vcpu->lock)
{
	raw_spin_unlock(&vcpu->lock);
	vcpu_leave(flags);
}

/*
 * Logs an error from an irq_work, because the scheduler's locks may be held
 * when the error is found.
 */
static void vcpu_alarm(struct irq_work *work)
{
	struct vpmu_vcpu *vcpu = container_of(work, struct vpmu_vcpu, error_work);

	vpmu_err(vcpu->dev, "vCPU queue %u did not answer its kick immediately\n",
		 vcpu->index);
	vpmu_device_give_up(vcpu->dev);
}

/**
 * vpmu_vcpu_open() - give a queue a new virtqueue, and allow commands
 * @vcpu: the queue
 * @vq: the new virtqueue
 */
void vpmu_vcpu_open(struct vpmu_vcpu *vcpu, struct virtqueue *vq)
{
	unsigned long flags = vcpu_lock(vcpu);

	vcpu->vq = vq;
	virtqueue_disable_cb(vq);
	vcpu->broken = false;
	vcpu->closed = false;
	vcpu_unlock(vcpu, flags);
}

/**
 * vpmu_vcpu_close() - make all later commands of a queue fail
 * @vcpu: the queue; its virtqueue is not accessed after this function returns
 */
void vpmu_vcpu_close(struct vpmu_vcpu *vcpu)
{
	unsigned long flags = vcpu_lock(vcpu);

	vcpu->closed = true;
	vcpu_unlock(vcpu, flags);
}

/**
 * vpmu_vcpu_is_closed() - whether a queue is closed, so that all commands fail
 * @vcpu: the queue
 *
 * Return: true after vpmu_vcpu_close(), until vpmu_vcpu_open().
 */
bool vpmu_vcpu_is_closed(struct vpmu_vcpu *vcpu)
{
	unsigned long flags = vcpu_lock(vcpu);
	bool closed = vcpu->closed;

	vcpu_unlock(vcpu, flags);
	return closed;
}

/* Runs in a softirq, on the queue's CPU unless that CPU went offline. */
static void vcpu_soft(struct tasklet_struct *soft)
{
	struct vpmu_vcpu *vcpu = container_of(soft, struct vpmu_vcpu, soft);

	if (vpmu_output_deliver(vcpu))
		vpmu_vcpu_serve(vcpu);
	vpmu_sampling_run(vcpu);
}

/**
 * vpmu_vcpu_serve() - wake and signal programs, and replay samples, in a softirq
 *                     of this CPU
 * @vcpu: this CPU's queue; called in an interrupt or a softirq
 */
void vpmu_vcpu_serve(struct vpmu_vcpu *vcpu)
{
	tasklet_schedule(&vcpu->soft);
}

static void vcpu_call_here(void *info)
{
	struct vpmu_vcpu *vcpu = info;

	vpmu_vcpu_serve(vcpu);
	vpmu_device_put(vcpu->dev);
}

/**
 * vpmu_vcpu_call() - vpmu_vcpu_serve() on any CPU
 * @dev: the device; the caller holds a reference, and interrupts are off
 * @cpu: the CPU; nothing is done if it is offline or has no queue
 */
void vpmu_vcpu_call(struct vpmu_device *dev, int cpu)
{
	struct vpmu_vcpu *vcpu = *per_cpu_ptr(dev->cpu_vcpu, cpu);

	if (!vcpu)
		return;
	/* The call holds a reference. A call that is pending does it, too. */
	vpmu_device_get(dev);
	if (smp_call_function_single_async(cpu, &vcpu->soft_call))
		vpmu_device_put(dev);
}

/**
 * vpmu_vcpu_init() - prepare a queue
 * @vcpu: the queue, zeroed; it is closed until vpmu_vcpu_open()
 * @dev: the device
 * @index: the vCPU
 *
 * Return: 0 or -ENOMEM; call vpmu_vcpu_exit() in both cases.
 */
int vpmu_vcpu_init(struct vpmu_vcpu *vcpu, struct vpmu_device *dev, u32 index)
{
	vcpu->dev = dev;
	vcpu->index = index;
	raw_spin_lock_init(&vcpu->lock);
	init_irq_work(&vcpu->error_work, vcpu_alarm);
	INIT_LIST_HEAD(&vcpu->woken);
	INIT_LIST_HEAD(&vcpu->signalled);
	INIT_CSD(&vcpu->soft_call, vcpu_call_here, vcpu);
	tasklet_setup(&vcpu->soft, vcpu_soft);
	vcpu->commands = kcalloc(VPMU_BATCH + VPMU_DIRECT, sizeof(*vcpu->commands), GFP_KERNEL);
	vcpu->replies = kcalloc(VPMU_BATCH + VPMU_DIRECT, sizeof(*vcpu->replies), GFP_KERNEL);
	if (vpmu_sampling_init(vcpu) || !vcpu->commands || !vcpu->replies)
		return -ENOMEM;
	vcpu->closed = true;
	return 0;
}

/**
 * vpmu_vcpu_exit() - free a queue's buffers, after the device was reset
 * @vcpu: the queue
 */
void vpmu_vcpu_exit(struct vpmu_vcpu *vcpu)
{
	irq_work_sync(&vcpu->error_work);
	/* First what schedules the tasklet, then the tasklet. */
	vpmu_sampling_exit(vcpu);
	tasklet_kill(&vcpu->soft);
	kfree(vcpu->commands);
	kfree(vcpu->replies);
}

/*
 * Sends @count commands from vcpu->commands, starting at slot @first. The
 * answers go to the same slots of vcpu->replies.
 */
static int vcpu_send(struct vpmu_vcpu *vcpu, unsigned int first, unsigned int count)
{
	struct scatterlist out, in, *sgs[] = { &out, &in };
	unsigned int len;
	void *token;
	int err;

	lockdep_assert_held(&vcpu->lock);
	if (vcpu->broken || vcpu->closed)
		return READ_ONCE(vcpu->dev->life.lost) ?: -EIO;

	sg_init_one(&out, &vcpu->commands[first], count * sizeof(*vcpu->commands));
	sg_init_one(&in, &vcpu->replies[first], count * sizeof(*vcpu->replies));
	err = virtqueue_add_sgs(vcpu->vq, sgs, 1, 1, vcpu, GFP_ATOMIC);
	if (err)
		return err;
	virtqueue_kick(vcpu->vq);
	token = virtqueue_get_buf(vcpu->vq, &len);
	if (likely(token && len >= count * sizeof(*vcpu->replies)))
		return 0;
	if (token)
		return -EPROTO;

	/*
	 * The device may still write to the buffers at any time, so never use
	 * them again.
	 */
	vcpu->broken = true;
	irq_work_queue(&vcpu->error_work);
	return -EIO;
}

static void vcpu_flush(struct vpmu_vcpu *vcpu)
{
	unsigned int i, count = vcpu->pending;
	int err;

	lockdep_assert_held(&vcpu->lock);
	if (!count)
		return;
	err = vcpu_send(vcpu, 0, count);
	vcpu->pending = 0;
	for (i = 0; i < count; i++)
		vpmu_event_answer(vcpu->events[i], le32_to_cpu(vcpu->commands[i].op),
				  err ? NULL : &vcpu->replies[i]);
}

/**
 * vpmu_vcpu_flush() - send gathered commands
 * @vcpu: this CPU's queue
 */
void vpmu_vcpu_flush(struct vpmu_vcpu *vcpu)
{
	unsigned long flags = vcpu_lock(vcpu);

	vcpu_flush(vcpu);
	vcpu_unlock(vcpu, flags);
}

/**
 * vpmu_vcpu_append() - add a command for an event
 * @vcpu: this CPU's queue
 * @event: the event; interrupts are off until the command is sent
 * @op: VPMU_COMMAND_*
 * @value: the command's value, or zero
 *
 * The command is sent immediately, unless commands are gathered because the PMU
 * is disabled or perf core reads a group. The answer goes to
 * vpmu_event_answer().
 */
void vpmu_vcpu_append(struct vpmu_vcpu *vcpu, struct perf_event *event, u32 op, u64 value)
{
	struct vpmu_event *own = event->pmu_private;
	struct vpmu_command *command;
	unsigned long flags;

	flags = vcpu_lock(vcpu);
	if (vcpu->pending == VPMU_BATCH)
		vcpu_flush(vcpu);
	command = &vcpu->commands[vcpu->pending];
	memset(command, 0, sizeof(*command));
	command->op = cpu_to_le32(op);
	command->event = cpu_to_le64(own->id);
	command->value = cpu_to_le64(value);
	vcpu->events[vcpu->pending++] = event;
	if (!vcpu->pmu_disabled && !vcpu->reading)
		vcpu_flush(vcpu);
	vcpu_unlock(vcpu, flags);
}

/**
 * vpmu_vcpu_commands() - send commands immediately, with one kick
 * @vcpu: this CPU's queue, or any queue for VPMU_COMMAND_VCPU
 * @commands: the commands
 * @replies: filled in, on success, with one answer per command
 * @count: number of commands, at most VPMU_DIRECT
 *
 * Call with preemption off. Does not send gathered commands, because the queue
 * may belong to another CPU whose PMU is disabled.
 *
 * Return: 0 if the device answered, in which case each answer has its own
 * status; or a negative errno.
 */
static int vpmu_vcpu_commands(struct vpmu_vcpu *vcpu, const struct vpmu_command *commands,
			      struct vpmu_reply *replies, unsigned int count)
{
	unsigned long flags;
	int err;

	flags = vcpu_lock(vcpu);
	memcpy(&vcpu->commands[VPMU_BATCH], commands, count * sizeof(*commands));
	err = vcpu_send(vcpu, VPMU_BATCH, count);
	if (!err)
		memcpy(replies, &vcpu->replies[VPMU_BATCH], count * sizeof(*replies));
	vcpu_unlock(vcpu, flags);
	return err;
}

/**
 * vpmu_vcpu_command() - send one command immediately
 * @vcpu: this CPU's queue, or any queue for VPMU_COMMAND_VCPU
 * @op: VPMU_COMMAND_*
 * @event: the event's id, or zero
 * @value: the command's value, or zero
 * @reply: filled in with the answer, on success
 *
 * Call with preemption off.
 *
 * Return: 0 or a negative errno, which may come from the device.
 */
int vpmu_vcpu_command(struct vpmu_vcpu *vcpu, u32 op, u64 event, u64 value,
		      struct vpmu_reply *reply)
{
	const struct vpmu_command command = {
		.op = cpu_to_le32(op),
		.event = cpu_to_le64(event),
		.value = cpu_to_le64(value),
	};
	int err = vpmu_vcpu_commands(vcpu, &command, reply, 1);

	return err ?: -(int)le32_to_cpu(reply->status);
}

/**
 * vpmu_vcpu_discover() - find the queue of the current CPU
 * @dev: the device
 *
 * The guest's CPU numbers may differ from the host's vCPU indices, so the index
 * comes from the device.
 *
 * Return: 0 or a negative errno.
 */
int vpmu_vcpu_discover(struct vpmu_device *dev)
{
	struct vpmu_reply reply;
	u64 index;
	int cpu, err;

	cpu = get_cpu();
	err = vpmu_vcpu_command(&dev->vcpus[cpu % dev->info.vcpus], VPMU_COMMAND_VCPU, 0, 0,
				&reply);
	if (!err) {
		index = le64_to_cpu(reply.value);
		if (index < dev->info.vcpus)
			*this_cpu_ptr(dev->cpu_vcpu) = &dev->vcpus[index];
		else
			err = -EPROTO;
	}
	put_cpu();
	return err;
}

/**
 * vpmu_vcpu_cpu() - find the CPU number of a vCPU
 * @dev: the device
 * @index: the vCPU's index
 *
 * Return: the CPU's number, or -1 while it is unknown.
 */
int vpmu_vcpu_cpu(struct vpmu_device *dev, u32 index)
{
	const struct vpmu_vcpu *vcpu;
	unsigned int cpu;

	for_each_possible_cpu(cpu) {
		vcpu = READ_ONCE(*per_cpu_ptr(dev->cpu_vcpu, cpu));
		if (vcpu && vcpu->index == index)
			return cpu;
	}
	return -1;
}

/**
 * vpmu_vcpu_local() - find this CPU's queue
 * @dev: the device
 *
 * Call with preemption off.
 *
 * Return: the queue, or NULL if the CPU has none.
 */
struct vpmu_vcpu *vpmu_vcpu_local(struct vpmu_device *dev)
{
	return *this_cpu_ptr(dev->cpu_vcpu);
}

/*
 * Reports each CPU's current task, in one page per CPU. The device reads the
 * page when it writes a sample.
 *
 * The page contains the current task, for a sample that is taken now; the
 * address of the task's user registers, for a sample in kernel mode; and a
 * history of tasks, for samples that the device collects later. A page costs a
 * few stores per task switch while an event needs it, and nothing otherwise.
 */

/*
 * The pages are global, so that a task switch finds its page without looking up
 * the device. This works because a guest has only one device.
 */
static DEFINE_PER_CPU(struct vpmu_task_page *, task_page);
/*
 * For each entry of the page's history: a time at which the switch was over; zero
 * if none is known
 */
static DEFINE_PER_CPU(u64 *, task_switched);
static DEFINE_PER_CPU(bool, task_page_told);
/* The old task of this CPU's last switch; only compared */
static DEFINE_PER_CPU(const struct task_struct *, task_before);
static struct tracepoint *sched_switch;

/*
 * Lock order: users_lock, then tell_lock. vpmu_task_online() takes only
 * tell_lock. If it took users_lock, it could deadlock: a task that holds
 * users_lock may be patching the tracepoint, which waits for CPU hotplug, and
 * CPU hotplug waits for vpmu_task_online().
 */
static DEFINE_MUTEX(users_lock);
static unsigned int task_users;
/* The device that the probe was registered for */
static struct vpmu_device *task_device;
static DEFINE_MUTEX(tell_lock);
static bool telling;

/*
 * Runs with interrupts off on the CPU that switches to @task. Each CPU's page
 * is written only by that CPU.
 */
static void task_write(struct task_struct *task)
{
	struct vpmu_task_page *page = this_cpu_read(task_page);
	struct vpmu_task_switch *entry;
	u64 who, regs, switches, since;

	if (!page)
		return;
	who = (u32)task_tgid_nr(task) | (u64)(u32)task_pid_nr(task) << 32;
	regs = task->flags & PF_KTHREAD ? 0 : (unsigned long)task_pt_regs(task);
	/* Before the ids change: no sample names a task before its turn. */
	since = get_cycles();
	/*
	 * For a sample at an exit, the device reads user_regs, pid and tid
	 * while this CPU is stopped, maybe between two of these stores. The
	 * zero keeps a sample from combining the ids of one task with the
	 * registers of another task.
	 */
	WRITE_ONCE(page->user_regs, 0);
	/* A single store: pid and tid always belong to the same task. */
	WRITE_ONCE(*(__le64 *)&page->pid, cpu_to_le64(who));
	WRITE_ONCE(page->user_regs, cpu_to_le64(regs));

	switches = le64_to_cpu(page->switches);
	entry = &page->history[switches % VPMU_TASK_HISTORY];
	WRITE_ONCE(*(__le64 *)&entry->pid, cpu_to_le64(who));
	WRITE_ONCE(entry->since, cpu_to_le64(since));
	this_cpu_read(task_switched)[switches % VPMU_TASK_HISTORY] = 0;
	/*
	 * The device may read the history on another CPU at the same time. An
	 * entry is complete before it is counted, and the device ignores the
	 * oldest entry, which is overwritten next.
	 */
	smp_store_release(&page->switches, cpu_to_le64(switches + 1));
}

static void tracepoint_find(struct tracepoint *tracepoint, void *unused)
{
	if (!strcmp(tracepoint->name, "sched_switch"))
		sched_switch = tracepoint;
}

/* Runs before perf core schedules events for the switch. */
static void task_switch(void *dev, bool preempt, struct task_struct *prev,
			struct task_struct *next, unsigned int prev_state)
{
	vpmu_sampling_switch(dev, is_idle_task(prev));
	this_cpu_write(task_before, prev);
	task_write(next);
}

static void task_write_current(void *unused)
{
	this_cpu_write(task_before, NULL);
	task_write(current);
}

/**
 * vpmu_task_is_switching() - whether this CPU is switching to another task
 *
 * Call with interrupts off.
 *
 * Return: true if the scheduler holds the runqueue's lock, and the old task is
 * still current; false while the current task is not reported.
 */
bool vpmu_task_is_switching(void)
{
	return this_cpu_read(task_before) == current;
}

/* Passes the page of @cpu to the device, if the CPU's queue is known. */
static int task_tell(struct vpmu_device *dev, unsigned int cpu)
{
	struct vpmu_vcpu *vcpu = *per_cpu_ptr(dev->cpu_vcpu, cpu);
	void *page = per_cpu(task_page, cpu);
	int err;

	lockdep_assert_held(&tell_lock);
	if (!vcpu || !page || per_cpu(task_page_told, cpu))
		return 0;
	err = vpmu_control_task_page(dev, vcpu->index, virt_to_phys(page));
	if (!err)
		per_cpu(task_page_told, cpu) = true;
	return err;
}

/**
 * vpmu_task_switched() - note that the last switch of this CPU is over
 *
 * Called with interrupts off, by an interrupt, softirq or system call: a switch
 * has interrupts off.
 */
void vpmu_task_switched(void)
{
	const struct vpmu_task_page *page = this_cpu_read(task_page);
	u64 *switched, switches;

	if (!page)
		return;
	switches = le64_to_cpu(page->switches);
	switched = this_cpu_read(task_switched) + (switches - 1) % VPMU_TASK_HISTORY;
	if (switches && !*switched)
		*switched = get_cycles();
}

/**
 * vpmu_task_place() - move the time of a sample into a turn of the sample's task
 * @dev: the device
 * @tid: the task
 * @time: the time of the sample, which was taken on this CPU
 * @user: the sample was taken in user mode, where no switch is in progress
 * @late: move the time to the end of the turn, or to now if the turn has not
 *        ended
 *
 * The host also takes samples while this CPU switches tasks. To perf core, which
 * has interrupts off then, the old task's turn ends when the switch begins, and
 * the new task's turn begins when the switch ends. A sample of the old task gets
 * the time before the switch. A sample of the new task gets a time at which the
 * switch was over: that of the first replay after it, or the end of the turn, or
 * now.
 *
 * Return: the time for perf core.
 */
u64 vpmu_task_place(const struct vpmu_device *dev, u32 tid, u64 time, bool user, bool late)
{
	const struct vpmu_task_page *page = this_cpu_read(task_page);
	const struct vpmu_info info = vpmu_info_of(dev);
	const struct vpmu_task_switch *turn, *before;
	u64 since, switched, n, end;

	if (!page || (user && !late))
		return time;
	end = vpmu_info_clock(&info, get_cycles());
	/* The oldest entries may be overwritten. */
	for (n = le64_to_cpu(page->switches); n > 1; n--) {
		turn = &page->history[(n - 1) % VPMU_TASK_HISTORY];
		before = &page->history[(n - 2) % VPMU_TASK_HISTORY];
		since = vpmu_info_clock(&info, le64_to_cpu(turn->since));
		if (since <= time)
			break;
		end = since;
		if (le64_to_cpu(page->switches) - n > VPMU_TASK_HISTORY - 3)
			return time;
	}
	if (n <= 1)
		return time;
	if (le32_to_cpu(turn->tid) != tid)
		return le32_to_cpu(before->tid) == tid ? since - 1 : time;
	switched = this_cpu_read(task_switched)[(n - 1) % VPMU_TASK_HISTORY];
	if (late || !switched)
		return max(time, end - 1);
	return max(time, vpmu_info_clock(&info, switched));
}

static void task_end(void)
{
	lockdep_assert_held(&users_lock);
	tracepoint_probe_unregister(sched_switch, task_switch, task_device);
	mutex_lock(&tell_lock);
	telling = false;
	mutex_unlock(&tell_lock);
}

static int task_begin(struct vpmu_device *dev)
{
	unsigned int cpu;
	int err;

	lockdep_assert_held(&users_lock);
	err = tracepoint_probe_register(sched_switch, task_switch, dev);
	if (err)
		return err;
	task_device = dev;
	/*
	 * If a CPU comes online now, either the loop below includes it, or
	 * vpmu_task_online() sees that telling is set.
	 */
	mutex_lock(&tell_lock);
	telling = true;
	for_each_online_cpu(cpu) {
		err = task_tell(dev, cpu);
		if (err)
			break;
	}
	mutex_unlock(&tell_lock);
	if (err)
		task_end();
	else
		on_each_cpu(task_write_current, NULL, 1);
	return err;
}

/**
 * vpmu_task_get() - start reporting the current task
 * @dev: the device
 *
 * Sleeps. Paired with vpmu_task_put().
 *
 * Return: 0 or a negative errno.
 */
int vpmu_task_get(struct vpmu_device *dev)
{
	int err = 0;

	if (!vpmu_has_feature(dev, VPMU_F_TASK_PAGE))
		return -EOPNOTSUPP;
	mutex_lock(&users_lock);
	if (!telling)
		err = task_begin(dev);
	if (!err)
		task_users++;
	mutex_unlock(&users_lock);
	return err;
}

/*
 * To register the probe soon after it was unregistered, the kernel would wait
 * for a grace period. So the probe stays for a while, as perf core's own switch
 * for task events does.
 */
static void task_drop(struct work_struct *work)
{
	mutex_lock(&users_lock);
	if (!task_users && telling)
		task_end();
	mutex_unlock(&users_lock);
}

static DECLARE_DELAYED_WORK(task_drop_work, task_drop);

/**
 * vpmu_task_put() - undo vpmu_task_get(); a second after the last call, the
 *                   current task is no longer reported
 */
void vpmu_task_put(void)
{
	mutex_lock(&users_lock);
	if (!--task_users)
		mod_delayed_work(system_wq, &task_drop_work, HZ);
	mutex_unlock(&users_lock);
}

/**
 * vpmu_task_online() - report the current task of a CPU that came online
 * @dev: the device
 * @cpu: the CPU; the caller runs on it
 */
void vpmu_task_online(struct vpmu_device *dev, unsigned int cpu)
{
	int err = 0;

	mutex_lock(&tell_lock);
	if (telling) {
		err = task_tell(dev, cpu);
		local_irq_disable();
		task_write(current);
		local_irq_enable();
	}
	mutex_unlock(&tell_lock);
	if (err)
		vpmu_err(dev, "CPU %u: samples will not name their task (%d)\n",
			 cpu, err);
}

/**
 * vpmu_task_forgotten() - mark the pages as unknown to the device after a reset
 * @dev: the device
 */
void vpmu_task_forgotten(struct vpmu_device *dev)
{
	unsigned int cpu;

	mutex_lock(&tell_lock);
	for_each_possible_cpu(cpu)
		per_cpu(task_page_told, cpu) = false;
	mutex_unlock(&tell_lock);
}

/**
 * vpmu_task_resume() - pass the pages to a device that was reset
 * @dev: the device
 *
 * Return: 0 or a negative errno.
 */
int vpmu_task_resume(struct vpmu_device *dev)
{
	unsigned int cpu;
	int err = 0, ret;

	mutex_lock(&tell_lock);
	if (telling) {
		for_each_online_cpu(cpu) {
			ret = task_tell(dev, cpu);
			err = err ?: ret;
		}
	}
	mutex_unlock(&tell_lock);
	return err;
}

/**
 * vpmu_task_init() - allocate the pages
 * @dev: the device
 *
 * Return: 0 or a negative errno; call vpmu_task_exit() in both cases.
 */
int vpmu_task_init(struct vpmu_device *dev)
{
	unsigned int cpu;

	if (!vpmu_has_feature(dev, VPMU_F_TASK_PAGE))
		return 0;
	for_each_kernel_tracepoint(tracepoint_find, NULL);
	if (!sched_switch)
		return -ENOENT;
	for_each_possible_cpu(cpu) {
		void *page = (void *)get_zeroed_page(GFP_KERNEL);

		if (!page)
			return -ENOMEM;
		per_cpu(task_switched, cpu) = kcalloc(VPMU_TASK_HISTORY, sizeof(u64), GFP_KERNEL);
		if (!per_cpu(task_switched, cpu)) {
			free_page((unsigned long)page);
			return -ENOMEM;
		}
		per_cpu(task_page, cpu) = page;
	}
	return 0;
}

/**
 * vpmu_task_exit() - free the pages, after the device was reset
 * @dev: the device
 */
void vpmu_task_exit(struct vpmu_device *dev)
{
	unsigned int cpu;

	cancel_delayed_work_sync(&task_drop_work);
	task_drop(NULL);
	tracepoint_synchronize_unregister();
	for_each_possible_cpu(cpu) {
		free_page((unsigned long)per_cpu(task_page, cpu));
		per_cpu(task_page, cpu) = NULL;
		kfree(per_cpu(task_switched, cpu));
		per_cpu(task_switched, cpu) = NULL;
		per_cpu(task_page_told, cpu) = false;
	}
}

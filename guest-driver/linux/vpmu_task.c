// SPDX-License-Identifier: GPL-2.0
/*
 * Reports each CPU's current task, in one page per CPU. The device reads the
 * page when it writes a sample.
 *
 * The page contains the current task, for a sample that is taken now; the
 * address of the task's user registers, for a sample in kernel mode; and a
 * history of tasks, for samples that the device collects later. A page costs a
 * few stores per task switch while an event needs it, and nothing otherwise.
 */
#include <linux/cpu.h>
#include <linux/irqflags.h>
#include <linux/minmax.h>
#include <linux/mm.h>
#include <linux/sched.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/timex.h>
#include <linux/tracepoint.h>
#include <linux/virtio_config.h>
#include <linux/workqueue.h>

#include "vpmu.h"

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

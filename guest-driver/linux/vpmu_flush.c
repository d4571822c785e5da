// SPDX-License-Identifier: GPL-2.0
/*
 * Flush: make samples and packets visible to programs, and wake the programs.
 *
 * Before the device answers VPMU_COMMAND_FLUSH, it writes the samples and
 * packets, and puts notices about them into the event queue. The event queue's
 * interrupt may come after the answer, so the flush handles the notices itself.
 */
#include <linux/cpu.h>
#include <linux/cpumask.h>
#include <linux/interrupt.h>
#include <linux/sched.h>
#include <linux/smp.h>

#include "vpmu.h"
#include "vpmu_file.h"

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
 * @whole: flush the whole group
 *
 * After an error of one event, the others are still flushed.
 *
 * Return: 0; -EIO if an event is in the error state (its data is published
 * anyway); or another negative errno.
 */
int vpmu_flush(struct vpmu_file *file, bool whole)
{
	struct vpmu_file *leader = vpmu_group_lock(file);
	int err = vpmu_call_group(leader, whole ? NULL : file, VPMU_COMMAND_FLUSH);

	vpmu_group_unlock(leader);
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

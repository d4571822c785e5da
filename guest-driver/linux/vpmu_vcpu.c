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
 * vpmu_context.c.
 */
#include <linux/scatterlist.h>
#include <linux/slab.h>
#include <linux/smp.h>

#include "vpmu.h"
#include "vpmu_event.h"

/*
 * Logs an error from an irq_work, because the scheduler's locks may be held
 * when the error is found.
 */
static void vcpu_alarm(struct irq_work *work)
{
	struct vpmu_vcpu *vcpu = container_of(work, struct vpmu_vcpu, error_work);

	dev_err(&vcpu->dev->vdev->dev, "vCPU queue %u did not answer its kick immediately\n",
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
	raw_spin_lock_irq(&vcpu->lock);
	vcpu->vq = vq;
	virtqueue_disable_cb(vq);
	vcpu->broken = false;
	vcpu->closed = false;
	raw_spin_unlock_irq(&vcpu->lock);
}

/**
 * vpmu_vcpu_close() - make all later commands of a queue fail
 * @vcpu: the queue; its virtqueue is not accessed after this function returns
 */
void vpmu_vcpu_close(struct vpmu_vcpu *vcpu)
{
	raw_spin_lock_irq(&vcpu->lock);
	vcpu->closed = true;
	raw_spin_unlock_irq(&vcpu->lock);
}

/**
 * vpmu_vcpu_is_closed() - whether a queue is closed, so that all commands fail
 * @vcpu: the queue
 *
 * Return: true after vpmu_vcpu_close(), until vpmu_vcpu_open().
 */
bool vpmu_vcpu_is_closed(struct vpmu_vcpu *vcpu)
{
	bool closed;

	raw_spin_lock_irq(&vcpu->lock);
	closed = vcpu->closed;
	raw_spin_unlock_irq(&vcpu->lock);
	return closed;
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
	INIT_LIST_HEAD(&vcpu->traces);
	INIT_CSD(&vcpu->service, vpmu_trace_service, vcpu);
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
	vpmu_sampling_exit(vcpu);
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
	unsigned long flags;

	raw_spin_lock_irqsave(&vcpu->lock, flags);
	vcpu_flush(vcpu);
	raw_spin_unlock_irqrestore(&vcpu->lock, flags);
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

	raw_spin_lock_irqsave(&vcpu->lock, flags);
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
	raw_spin_unlock_irqrestore(&vcpu->lock, flags);
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
int vpmu_vcpu_commands(struct vpmu_vcpu *vcpu, const struct vpmu_command *commands,
		       struct vpmu_reply *replies, unsigned int count)
{
	unsigned long flags;
	int err;

	raw_spin_lock_irqsave(&vcpu->lock, flags);
	memcpy(&vcpu->commands[VPMU_BATCH], commands, count * sizeof(*commands));
	err = vcpu_send(vcpu, VPMU_BATCH, count);
	if (!err)
		memcpy(replies, &vcpu->replies[VPMU_BATCH], count * sizeof(*replies));
	raw_spin_unlock_irqrestore(&vcpu->lock, flags);
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

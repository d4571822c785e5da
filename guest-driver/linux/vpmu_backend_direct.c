// SPDX-License-Identifier: GPL-2.0
/*
 * Direct events: events that the driver enables on the device without a perf
 * event.
 *
 * A perf event ends when its last descriptor is closed. So an event that is or
 * was persistent has no perf event. The driver itself sends the event's
 * commands, from the CPU that the event counts on. A direct event is always
 * alone in its group.
 */
#include <linux/perf_event.h>
#include <linux/smp.h>

#include "perf_core_private.h"
#include "vpmu.h"
#include "vpmu_event.h"
#include "vpmu_file.h"
#include "vpmu_ring.h"

/**
 * struct direct_call - a command to be sent on the CPU of its event
 * @file: the event's file
 * @op: VPMU_COMMAND_*
 * @value: the command's value
 * @reply: the answer, on success
 * @err: 0 or a negative errno
 */
struct direct_call {
	const struct vpmu_file *file;
	u32 op;
	u64 value;
	struct vpmu_reply reply;
	int err;
};

static void direct_here(void *info)
{
	struct direct_call *call = info;
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(call->file->dev);

	call->err = -ENODEV;
	if (vcpu)
		call->err = vpmu_vcpu_command(vcpu, call->op, call->file->id, call->value,
					      &call->reply);
}

static int direct_call(struct direct_call *call)
{
	if (call->file->place.cpu < 0 ||
	    smp_call_function_single(call->file->place.cpu, direct_here, call, 1))
		return -ENODEV;
	return call->err;
}

/**
 * vpmu_direct_take() - take an event from perf core, with its count and state
 * @file: the event's file; the event counts on a CPU and is alone in its group,
 *        which is locked
 *
 * The event continues on the device. From now on, perf core's calls for the
 * returned perf event do not reach the device.
 *
 * Return: the perf event, for perf_event_release_kernel().
 */
struct perf_event *vpmu_direct_take(struct vpmu_file *file)
{
	struct perf_event *event = file->event;
	struct vpmu_event *own = event->pmu_private;

	/* The lock keeps perf core from scheduling the context's events. */
	perf_core_lock_irq(perf_core_context(event));
	own->id = 0;
	own->started = false;
	own->limit_hit = true;
	perf_core_unlock_irq(perf_core_context(event));

	WRITE_ONCE(file->backend, &vpmu_direct_backend);
	file->spec.inherit = false;
	file->control.on_exec = false;
	file->control.limited = false;
	file->event = NULL;
	return event;
}

/*
 * Called when a file has no handles left, so only notices can still find the
 * file. If the event is still persistent, vpmu_persistent_close() has taken the
 * file off the list of persistent events, and the event stays on the device if
 * it can outlive a reset. All other events are closed.
 */
static void direct_close(struct vpmu_file *file)
{
	struct vpmu_device *dev = file->dev;

	if (!file->persist.active || !vpmu_ring_forget(file)) {
		if (file->persist.active)
			vpmu_control_attach(dev, file->id);
		vpmu_ring_close(file);
		if (!file->ended)
			vpmu_control_close(dev, file->id);
	}
	/* After a reset, another file may be registered for the event's id. */
	xa_cmpxchg_irq(&dev->lookup.files, file->id, file, NULL, 0);
}

/*
 * Sends a READ from this CPU, because the event's CPU is offline. The device
 * accepts a READ on the queue of any vCPU.
 */
static void direct_call_anywhere(struct direct_call *call)
{
	get_cpu();
	local_irq_disable();
	direct_here(call);
	local_irq_enable();
	put_cpu();
}

static int direct_read(struct vpmu_file *file)
{
	struct direct_call call = { .file = file, .op = VPMU_COMMAND_READ };
	int err;

	if (READ_ONCE(file->dev->life.asleep))
		return 0;
	err = direct_call(&call);
	if (err == -ENODEV) {
		direct_call_anywhere(&call);
		err = call.err;
	}
	if (err) {
		/*
		 * -ENODEV: this CPU has no usable queue, either. Keep the last
		 * count.
		 */
		if (err != -ENODEV)
			WRITE_ONCE(file->error, true);
		return err;
	}
	if ((s32)le32_to_cpu(call.reply.state) == VPMU_STATE_ERROR)
		WRITE_ONCE(file->error, true);
	file->tally.totals = (struct vpmu_totals) {
		.value = le64_to_cpu(call.reply.value),
		.enabled = le64_to_cpu(call.reply.time_enabled),
		.running = le64_to_cpu(call.reply.time_running),
		.lost = le64_to_cpu(call.reply.lost),
	};
	return 0;
}

/* Returns -ENODEV while the CPU of the event is offline. */
static int direct_command(struct vpmu_file *file, u32 op, u64 value)
{
	struct direct_call call = { .file = file, .op = op, .value = value };

	return direct_call(&call);
}

/* A direct event is alone in its group. */
static int direct_group(struct vpmu_file *file, struct vpmu_file *only, u32 op)
{
	switch (op) {
	case 0:
		op = READ_ONCE(file->control.enabled) ? VPMU_COMMAND_ENABLE : VPMU_COMMAND_DISABLE;
		return direct_command(file, op, 0);
	case VPMU_COMMAND_READ:
		return direct_read(file);
	default:
		return direct_command(file, op, 0);
	}
}

static int direct_refresh(struct vpmu_file *file, u32 overflows)
{
	return direct_command(file, VPMU_COMMAND_REFRESH, overflows);
}

static int direct_period(struct vpmu_file *file, u64 period)
{
	return direct_command(file, VPMU_COMMAND_PERIOD, period);
}

static bool direct_has_error(const struct vpmu_file *file)
{
	return false;
}

/* Operations of direct events */
const struct vpmu_backend vpmu_direct_backend = {
	.group		= direct_group,
	.refresh	= direct_refresh,
	.period		= direct_period,
	.has_error	= direct_has_error,
	.close		= direct_close,
};

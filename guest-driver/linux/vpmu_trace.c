// SPDX-License-Identifier: GPL-2.0
/*
 * A separate PMU for events that write to AUX areas of perf_event_open(2).
 *
 * perf core owns the area, its head and its records; the device writes the
 * data. The device may write only during a span, from VPMU_COMMAND_AUX_BEGIN to
 * VPMU_COMMAND_AUX_END. A span begins when perf core grants space in the area.
 * It ends when the event stops, at a flush, or when the device sends a notice
 * (where a hardware PMU would raise an interrupt). The event is disabled
 * between spans, so the trace does not contain the driver's own kicks.
 */
#include <linux/cpumask.h>
#include <linux/math.h>
#include <linux/module.h>
#include <linux/perf_event.h>
#include <linux/security.h>
#include <linux/slab.h>
#include <linux/virtio_config.h>

#include "compat.h"
#include "perf_core_private.h"
#include "vpmu.h"
#include "vpmu_event.h"
#include "vpmu_trace.h"

/**
 * vpmu_trace_alloc() - allocate the struct vpmu_trace of an event
 * @own: the new event
 *
 * Return: the struct, or NULL.
 */
struct vpmu_trace *vpmu_trace_alloc(struct vpmu_event *own)
{
	struct vpmu_trace *trace = kzalloc(sizeof(*trace), GFP_KERNEL);

	if (!trace)
		return NULL;
	trace->own = own;
	trace->cpu = -1;
	trace->period = own->event->attr.sample_period;
	return trace;
}

static struct vpmu_command trace_command(const struct vpmu_event *own, u32 op)
{
	return (struct vpmu_command) {
		.op = cpu_to_le32(op),
		.event = cpu_to_le64(own->id),
	};
}

/*
 * Gets space from perf core, in the area that was mapped through this event or,
 * for an inherited event, through its parent. The device has no other area for
 * the event. So if two events share a ring, only one of them can write to the
 * ring's AUX area: the event through which the area was mapped. The children of
 * this event can also write to it.
 *
 * Returns 0 if there is space. Returns -ENOSPC if no packet fits; this function
 * has then made perf core disable the event. Returns -EINVAL if there is no
 * area, or if the area is full. If it is full, perf core itself disables the
 * event.
 */
static int trace_room(struct vpmu_trace *trace)
{
	struct perf_event *event = trace->own->event, *output = event->parent ?: event;
	struct vpmu_event *owner = output->pmu_private;
	const void *buffer = READ_ONCE(owner->trace->buffer);
	struct vpmu_area *area;

	if (!buffer || buffer != perf_core_buffer(output))
		return -EINVAL;
	area = perf_aux_output_begin(&trace->handle, event);
	if (!area)
		return -EINVAL;
	trace->head = trace->handle.head;
	if (area->overwrite)
		trace->room = (u64)area->count << PAGE_SHIFT;
	else
		trace->room = round_down(trace->handle.size, VPMU_PACKET_ALIGN);
	if (trace->room)
		return 0;
	/*
	 * A few bytes may be left, too few for a packet, so the head may not
	 * have crossed the watermark. Set the flag to wake the reader anyway.
	 */
	perf_aux_output_flag(&trace->handle, PERF_AUX_FLAG_TRUNCATED);
	perf_aux_output_end(&trace->handle, 0);
	perf_core_disable(event);
	return -ENOSPC;
}

/*
 * Begins a span of a disabled event. Returns 0 if the event is now enabled,
 * otherwise the error from trace_room().
 */
static int trace_begin(struct vpmu_trace *trace, struct vpmu_vcpu *vcpu)
{
	struct vpmu_event *own = trace->own;
	u32 on = own->task ? VPMU_COMMAND_IN : VPMU_COMMAND_ENABLE;
	u64 period = own->event->attr.sample_period;
	struct vpmu_command commands[VPMU_DIRECT];
	struct vpmu_reply replies[VPMU_DIRECT];
	unsigned int count = 0;
	unsigned long flags;
	int err;

	err = trace_room(trace);
	if (err)
		return err;
	WRITE_ONCE(trace->noticed, false);
	WRITE_ONCE(trace->cpu, smp_processor_id());
	list_add(&trace->active, &vcpu->traces);

	commands[count] = trace_command(own, VPMU_COMMAND_AUX_BEGIN);
	commands[count].value = cpu_to_le64(trace->head);
	commands[count++].room = cpu_to_le64(trace->room);
	if (period != trace->period) {
		commands[count] = trace_command(own, VPMU_COMMAND_PERIOD);
		commands[count++].value = cpu_to_le64(period);
		trace->period = period;
	}
	commands[count++] = trace_command(own, on);
	flags = vpmu_vcpu_enter();
	err = vpmu_vcpu_commands(vcpu, commands, replies, count);
	own->started = true;
	perf_core_trace_started(own->event);
	vpmu_event_answer(own->event, on, err ? NULL : &replies[count - 1]);
	vpmu_vcpu_leave(flags);
	return 0;
}

/*
 * Disables the event on the device, and ends the span. With @stays, the event
 * remains active for perf core. Returns false if data was lost.
 */
static bool trace_end(struct vpmu_trace *trace, struct vpmu_vcpu *vcpu, bool stays)
{
	struct vpmu_event *own = trace->own;
	u32 off = own->task ? VPMU_COMMAND_OUT : VPMU_COMMAND_DISABLE;
	const struct vpmu_command commands[] = {
		trace_command(own, off),
		trace_command(own, VPMU_COMMAND_AUX_END),
	};
	struct vpmu_reply replies[ARRAY_SIZE(commands)];
	struct perf_output_handle *handle = &trace->handle;
	const struct vpmu_area *area = perf_get_aux(handle);
	u64 head = trace->head, lost = 0;
	unsigned long flags;
	bool truncated;
	int err;

	flags = vpmu_vcpu_enter();
	err = vpmu_vcpu_commands(vcpu, commands, replies, ARRAY_SIZE(commands));
	own->started = false;
	vpmu_event_answer(own->event, stays ? VPMU_COMMAND_READ : off, err ? NULL : &replies[0]);
	vpmu_vcpu_leave(flags);
	if (!err && replies[1].status)
		err = -EIO;
	if (!err) {
		head = le64_to_cpu(replies[1].value);
		lost = le64_to_cpu(replies[1].lost);
	}
	if (area->overwrite)
		handle->head = head;
	truncated = err || lost;
	if (truncated)
		perf_aux_output_flag(handle, PERF_AUX_FLAG_TRUNCATED);
	if (trace->lost)
		perf_aux_output_flag(handle, PERF_AUX_FLAG_PARTIAL);
	trace->lost = lost;

	list_del(&trace->active);
	WRITE_ONCE(trace->cpu, -1);
	/* Report at most the room that perf core has granted. */
	perf_aux_output_end(handle, min(head - trace->head, trace->room));
	if (truncated)
		perf_core_disable(own->event);
	return !truncated;
}

/**
 * vpmu_trace_service() - end spans because of a notice or a flush, and begin
 *                        new spans
 * @vcpu: this CPU's queue
 *
 * Called with interrupts off, like an interrupt handler.
 */
void vpmu_trace_service(void *vcpu)
{
	struct vpmu_vcpu *here = vcpu;
	struct vpmu_trace *trace, *next;

	/* Pairs with the barrier in vpmu_trace_notice(). */
	smp_mb();
	list_for_each_entry_safe(trace, next, &here->traces, active) {
		if (!READ_ONCE(trace->noticed))
			continue;
		if (trace_end(trace, here, true) && !trace_begin(trace, here))
			continue;
		/*
		 * No new span has begun, so have perf core disable the event.
		 * As for any PMU, a reader that has freed space must also
		 * enable the event again.
		 */
		trace->own->event->hw.state = PERF_HES_STOPPED | PERF_HES_UPTODATE;
		perf_core_disable(trace->own->event);
	}
	vpmu_device_put(here->dev);
}

/**
 * vpmu_trace_notice() - end a span whose area has crossed its watermark or is
 *                       full
 * @dev: the device
 * @id: id of the event that writes to the area
 *
 * Called from the device's interrupt, on any CPU. Calls vpmu_trace_service() on
 * the trace's CPU; that call holds a reference on the device until it is done.
 */
void vpmu_trace_notice(struct vpmu_device *dev, u64 id)
{
	struct vpmu_event *own;
	unsigned long flags;
	int cpu = -1;

	spin_lock_irqsave(&dev->lookup.lock, flags);
	own = xa_load(&dev->lookup.traces, id);
	if (own) {
		WRITE_ONCE(own->trace->noticed, true);
		cpu = READ_ONCE(own->trace->cpu);
	}
	/* While the lock is held, the event keeps a reference on the device. */
	if (cpu >= 0)
		vpmu_device_get(dev);
	spin_unlock_irqrestore(&dev->lookup.lock, flags);
	if (cpu < 0)
		return;
	/* A call that is already pending handles this notice, too. */
	smp_mb();
	if (smp_call_function_single_async(cpu, &(*per_cpu_ptr(dev->cpu_vcpu, cpu))->service))
		vpmu_device_put(dev);
}

/**
 * vpmu_trace_flush() - publish the data that a trace has written so far
 * @own: the trace's event; the caller keeps it open
 *
 * An inactive trace has already published everything.
 */
void vpmu_trace_flush(struct vpmu_event *own)
{
	struct vpmu_device *dev = own->dev;
	int cpu;

	WRITE_ONCE(own->trace->noticed, true);
	cpu = READ_ONCE(own->trace->cpu);
	if (cpu < 0)
		return;
	vpmu_device_get(dev);
	if (smp_call_function_single(cpu, vpmu_trace_service, *per_cpu_ptr(dev->cpu_vcpu, cpu), 1))
		vpmu_device_put(dev);
}

/* Begins a span of a stopped event. Returns what trace_begin() returns. */
static int trace_try(struct vpmu_trace *trace, struct vpmu_vcpu *vcpu)
{
	int err = trace_begin(trace, vcpu);

	if (!err)
		trace->own->event->hw.state = 0;
	return err;
}

static void trace_start(struct perf_event *event, int flags)
{
	struct vpmu_event *own = event->pmu_private;
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(own->dev);

	if (vcpu && own->id && event->hw.state & PERF_HES_STOPPED)
		trace_try(own->trace, vcpu);
}

static void trace_stop(struct perf_event *event, int flags)
{
	struct vpmu_event *own = event->pmu_private;
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(own->dev);

	if (!vcpu || event->hw.state & PERF_HES_STOPPED || vpmu_stop_is_throttle(flags))
		return;
	event->hw.state = PERF_HES_STOPPED | PERF_HES_UPTODATE;
	trace_end(own->trace, vcpu, false);
}

static int trace_add(struct perf_event *event, int flags)
{
	struct vpmu_event *own = event->pmu_private;
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(own->dev);

	if (!vcpu)
		return -ENODEV;
	event->hw.state = PERF_HES_STOPPED | PERF_HES_UPTODATE;
	/* Add lost events, too; see vpmu_pmu_add(). */
	if (!own->id)
		return 0;
	/*
	 * -EINVAL: there is no area, or the area is full. Fail, so that the
	 * event does not appear to run. -ENOSPC: no packet fits, and
	 * trace_room() has made perf core disable the event. Add the event
	 * anyway: if this call failed, perf core would not disable the event,
	 * but would try to add it again at each switch.
	 */
	if (flags & PERF_EF_START && trace_try(own->trace, vcpu) == -EINVAL)
		return -EINVAL;
	vpmu_event_pin(event);
	return 0;
}

static void trace_del(struct perf_event *event, int flags)
{
	vpmu_event_unpin(event);
	trace_stop(event, PERF_EF_UPDATE);
	vpmu_event_idle(event, true);
}

static int trace_event_init(struct perf_event *event)
{
	struct vpmu_device *dev = container_of(event->pmu, struct vpmu_device, tracing.pmu);

	if (event->attr.type != event->pmu->type || !vpmu_config_is_trace(event->attr.config))
		return -ENOENT;
	event->hw.config = event->attr.config;
	/*
	 * In frequency mode, perf core would have to handle each packet to
	 * adapt the period.
	 */
	if (event->attr.freq) {
		vpmu_info_ratelimited(dev,
				      "vpmu_trace takes a period, not a frequency; perf record cannot read its packets: use vperf exits\n");
		return -EINVAL;
	}
	if (!event->parent && vpmu_config_has_registers(event->attr.config)) {
		int err = security_locked_down(LOCKDOWN_PERF);

		if (err)
			return err;
	}
	return vpmu_event_create(dev, event);
}

/**
 * vpmu_trace_register() - register the PMU vpmu_trace
 * @dev: the device
 *
 * Return: 0, also for a device without the feature; or a negative errno.
 */
int vpmu_trace_register(struct vpmu_device *dev)
{
	int err;

	if (!vpmu_has_feature(dev, VPMU_F_AUX))
		return 0;
	err = vpmu_sysfs_init(dev, &dev->tracing.sysfs, true);
	if (err)
		return err;
	dev->tracing.pmu = (struct pmu) {
		.module		= THIS_MODULE,
		.attr_groups	= dev->tracing.sysfs.groups,
		.task_ctx_nr	= perf_sw_context,
		.capabilities	= PERF_PMU_CAP_ITRACE,
		.event_init	= trace_event_init,
		.add		= trace_add,
		.del		= trace_del,
		.start		= trace_start,
		.stop		= trace_stop,
		.read		= vpmu_event_read,
		.setup_aux	= vpmu_area_setup,
		.free_aux	= vpmu_area_free,
	};
	err = perf_pmu_register(&dev->tracing.pmu, "vpmu_trace", -1);
	if (err) {
		vpmu_sysfs_exit(&dev->tracing.sysfs);
		dev->tracing.pmu.type = 0;
	}
	return err;
}

/**
 * vpmu_trace_unregister() - unregister the PMU, after all events are closed
 * @dev: the device
 */
void vpmu_trace_unregister(struct vpmu_device *dev)
{
	if (!dev->tracing.pmu.type)
		return;
	perf_pmu_unregister(&dev->tracing.pmu);
	vpmu_sysfs_exit(&dev->tracing.sysfs);
}

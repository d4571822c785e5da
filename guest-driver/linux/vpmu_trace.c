// SPDX-License-Identifier: GPL-2.0
/*
 * AUX areas through the perf core door: a PMU of its own for what writes to them.
 *
 * perf core owns the area, its head and its records; the device writes the data. So
 * an area is lent in turns: one begins where perf core says that there is room, and
 * ends when the event stops or the device sends a notice, as hardware would raise an
 * interrupt. The event is off between two turns, by which the driver's own kicks are
 * not in the trace.
 */
#include <linux/cpumask.h>
#include <linux/math.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/perf_event.h>
#include <linux/rcupdate.h>
#include <linux/slab.h>
#include <linux/virtio_config.h>

#include "compat.h"
#include "vpmu.h"

/**
 * struct vpmu_area - pages of perf core's that the device may write to
 * @dev: of which device
 * @owner: the event that they were mapped with, NULL once it is closed
 * @pages: their addresses
 * @count: how many
 * @overwrite: nobody moves the tail
 * @kept: the device may not have let go of them
 */
struct vpmu_area {
	struct vpmu_device *dev;
	struct vpmu_event *owner;
	void **pages;
	u32 count;
	bool overwrite;
	bool kept;
};

/**
 * struct vpmu_trace - an event's part in it
 * @own: the event
 * @area: that it was mapped with, if any
 * @buffer: perf core's ring beside @area, to tell whether the event still writes there
 * @handle: perf core's, within a turn
 * @active: in the vCPU's traces, within a turn
 * @cpu: where the turn is, -1 between two
 * @noticed: the device wants this turn to end
 * @head: where the turn began
 * @room: bytes that there were
 * @lost: bytes that the turn before has lost
 * @period: as the device has it
 */
struct vpmu_trace {
	struct vpmu_event *own;
	struct vpmu_area *area;
	const void *buffer;
	struct perf_output_handle handle;
	struct list_head active;
	int cpu;
	bool noticed;
	u64 head;
	u64 room;
	u64 lost;
	u64 period;
};

/**
 * vpmu_trace_alloc() - an event's part
 * @own: the event, which is being made
 *
 * Return: it, or NULL.
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
 * Takes room from perf core. Two events that perf core has made share a ring cannot
 * both write to the area beside it, and the device knows only the event's own: so an
 * event writes to no other. An inherited one writes to its parent's.
 */
static struct vpmu_area *trace_room(struct vpmu_trace *trace)
{
	struct perf_event *event = trace->own->event, *output = event->parent ?: event;
	struct vpmu_event *owner = output->pmu_private;
	const void *buffer = READ_ONCE(owner->trace->buffer);
	struct vpmu_area *area;

	if (!buffer || buffer != READ_ONCE(output->rb))
		return NULL;
	area = perf_aux_output_begin(&trace->handle, event);
	if (!area)
		return NULL;
	trace->head = trace->handle.head;
	if (area->overwrite)
		trace->room = (u64)area->count << PAGE_SHIFT;
	else
		trace->room = round_down(trace->handle.size, VPMU_PACKET_ALIGN);
	if (trace->room)
		return area;
	/* For no packet, though for a byte: of an event that was on this has to be told. */
	if (!(event->hw.state & PERF_HES_STOPPED))
		perf_aux_output_flag(&trace->handle, PERF_AUX_FLAG_TRUNCATED);
	perf_aux_output_end(&trace->handle, 0);
	return NULL;
}

/* Begins a turn; the event is off. Returns whether it is on now. */
static bool trace_begin(struct vpmu_trace *trace, struct vpmu_vcpu *vcpu)
{
	struct vpmu_event *own = trace->own;
	u32 on = own->task ? VPMU_COMMAND_IN : VPMU_COMMAND_ENABLE;
	u64 period = own->event->attr.sample_period;
	struct vpmu_command commands[VPMU_DIRECT];
	struct vpmu_reply replies[VPMU_DIRECT];
	unsigned int count = 0;
	int err;

	if (!trace_room(trace))
		return false;
	/* perf core tells once that a trace begins, if told so; it does not export how. */
	own->event->attach_state |= PERF_ATTACH_ITRACE;
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
	err = vpmu_vcpu_commands(vcpu, commands, replies, count);
	own->started = true;
	/* perf core says once, before it adds an event, that its trace starts. */
	own->event->attach_state |= PERF_ATTACH_ITRACE;
	vpmu_event_answer(own->event, on, err ? NULL : &replies[count - 1]);
	return true;
}

/*
 * Ends the turn; the event is off then, for perf core only if it does not stay. Returns
 * whether all found room.
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
	bool truncated;
	int err;

	err = vpmu_vcpu_commands(vcpu, commands, replies, ARRAY_SIZE(commands));
	own->started = false;
	vpmu_event_answer(own->event, stays ? VPMU_COMMAND_READ : off, err ? NULL : &replies[0]);
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
	/* Never more than perf core has given. */
	perf_aux_output_end(handle, min(head - trace->head, trace->room));
	if (truncated)
		vpmu_aux_disable(own->event);
	return !truncated;
}

/**
 * vpmu_trace_service() - end turns that the device wants to end, and begin new ones
 * @vcpu: this CPU's queue
 *
 * Called with interrupts off, as an interrupt.
 */
void vpmu_trace_service(void *vcpu)
{
	struct vpmu_vcpu *here = vcpu;
	struct vpmu_trace *trace, *next;

	list_for_each_entry_safe(trace, next, &here->traces, active) {
		if (!READ_ONCE(trace->noticed))
			continue;
		if (trace_end(trace, here, true) && trace_begin(trace, here))
			continue;
		/* Who makes room again has to enable it, too, as with any of perf core's. */
		trace->own->event->hw.state = PERF_HES_STOPPED | PERF_HES_UPTODATE;
		vpmu_aux_disable(trace->own->event);
	}
}

/**
 * vpmu_trace_notice() - an area has crossed its mark, or is full
 * @dev: the device
 * @id: of the event that has written there
 *
 * Called from the device's interrupt, on any CPU.
 */
void vpmu_trace_notice(struct vpmu_device *dev, u64 id)
{
	struct vpmu_event *own;
	unsigned long flags;
	int cpu = -1;

	spin_lock_irqsave(&dev->notice_lock, flags);
	own = xa_load(&dev->traces, id);
	if (own) {
		WRITE_ONCE(own->trace->noticed, true);
		cpu = READ_ONCE(own->trace->cpu);
	}
	spin_unlock_irqrestore(&dev->notice_lock, flags);
	/* One on its way already sees this notice as well. */
	if (cpu >= 0)
		smp_call_function_single_async(cpu, &(*per_cpu_ptr(dev->cpu_vcpu, cpu))->service);
}

static void trace_start(struct perf_event *event, int flags)
{
	struct vpmu_event *own = event->pmu_private;
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(own->dev);

	if (vcpu && event->hw.state & PERF_HES_STOPPED && trace_begin(own->trace, vcpu))
		event->hw.state = 0;
}

static void trace_stop(struct perf_event *event, int flags)
{
	struct vpmu_event *own = event->pmu_private;
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(own->dev);

	if (!vcpu || event->hw.state & PERF_HES_STOPPED)
		return;
	event->hw.state = PERF_HES_STOPPED | PERF_HES_UPTODATE;
	trace_end(own->trace, vcpu, false);
}

static int trace_add(struct perf_event *event, int flags)
{
	struct vpmu_event *own = event->pmu_private;
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(own->dev);

	if (!vcpu || vcpu->broken || !own->id)
		return -ENODEV;
	event->hw.state = PERF_HES_STOPPED | PERF_HES_UPTODATE;
	if (flags & PERF_EF_START) {
		trace_start(event, flags);
		/* Without an area, or room there, nothing must seem to run. */
		if (event->hw.state & PERF_HES_STOPPED)
			return -EINVAL;
	}
	vpmu_event_pin(event);
	return 0;
}

static void trace_del(struct perf_event *event, int flags)
{
	vpmu_event_unpin(event);
	trace_stop(event, PERF_EF_UPDATE);
}

/* The area is mapped: the device gets its pages. Sleeps, as all of mmap(2) may. */
static void *trace_setup_aux(struct perf_event *event, void **pages, int count, bool overwrite)
{
	struct vpmu_event *own = event->pmu_private;
	struct vpmu_device *dev = own->dev;
	struct vpmu_area *area;
	struct page **list;
	u32 flags = VPMU_MAP_DRIVEN;
	int i;

	if (count > dev->info.max_aux_pages || own->trace->area)
		return NULL;
	area = kzalloc(sizeof(*area), GFP_KERNEL);
	list = kvmalloc_array(count, sizeof(*list), GFP_KERNEL);
	if (!area || !list)
		goto free;
	for (i = 0; i < count; i++)
		list[i] = virt_to_page(pages[i]);
	if (!overwrite)
		flags |= VPMU_MAP_WRITABLE;
	if (vpmu_control_map_aux(dev, own->id, list, count, flags))
		goto free;
	kvfree(list);

	*area = (struct vpmu_area) {
		.dev = dev,
		.owner = own,
		.pages = pages,
		.count = count,
		.overwrite = overwrite,
	};
	/* The pages can outlive their event, by a map through another that shares the ring. */
	__module_get(THIS_MODULE);
	vpmu_device_get(dev);
	mutex_lock(&dev->output_lock);
	own->trace->area = area;
	WRITE_ONCE(own->trace->buffer, event->rb);
	mutex_unlock(&dev->output_lock);
	return area;
free:
	kvfree(list);
	kfree(area);
	return NULL;
}

/* The last map has gone; no turn is left, and none begins any more. */
static void trace_free_aux(void *aux)
{
	struct vpmu_area *area = aux;
	struct vpmu_device *dev = area->dev;
	struct vpmu_event *own;
	u32 i;

	mutex_lock(&dev->output_lock);
	own = area->owner;
	if (own) {
		WRITE_ONCE(own->trace->buffer, NULL);
		own->trace->area = NULL;
		area->kept = vpmu_control_unmap_aux(dev, own->id);
	}
	mutex_unlock(&dev->output_lock);
	if (area->kept) {
		dev_err(&dev->vdev->dev, "the device keeps an AUX area: %u pages are lost\n",
			area->count);
		for (i = 0; i < area->count; i++)
			get_page(virt_to_page(area->pages[i]));
	}
	kfree(area);
	vpmu_device_put(dev);
	module_put(THIS_MODULE);
}

/**
 * vpmu_trace_close() - close an event that perf core has taken off its CPU for good
 * @own: the event; the device forgets its area with it
 */
void vpmu_trace_close(struct vpmu_event *own)
{
	struct vpmu_device *dev = own->dev;
	struct vpmu_area *area;
	int err = 0;

	mutex_lock(&dev->output_lock);
	area = own->trace->area;
	if (own->id)
		err = vpmu_control_close(dev, own->id);
	if (area) {
		area->owner = NULL;
		area->kept = err;
	}
	mutex_unlock(&dev->output_lock);
}

static int trace_event_init(struct perf_event *event)
{
	struct vpmu_device *dev = container_of(event->pmu, struct vpmu_device, trace_pmu);

	if (event->attr.type != event->pmu->type || !vpmu_config_is_trace(event->attr.config))
		return -ENOENT;
	/* perf core would have to see each packet. */
	if (event->attr.freq)
		return -EINVAL;
	return vpmu_event_create(dev, event);
}

/**
 * vpmu_trace_register() - make what writes to AUX areas a PMU
 * @dev: the device
 *
 * Return: 0, also for a device without the feature; or a negative errno.
 */
int vpmu_trace_register(struct vpmu_device *dev)
{
	int err;

	if (!virtio_has_feature(dev->vdev, VPMU_F_AUX))
		return 0;
	err = vpmu_sysfs_init(dev, &dev->trace_sysfs, true);
	if (err)
		return err;
	dev->trace_pmu = (struct pmu) {
		.module		= THIS_MODULE,
		.attr_groups	= dev->trace_sysfs.groups,
		.task_ctx_nr	= perf_sw_context,
		.capabilities	= PERF_PMU_CAP_ITRACE,
		.event_init	= trace_event_init,
		.add		= trace_add,
		.del		= trace_del,
		.start		= trace_start,
		.stop		= trace_stop,
		.read		= vpmu_event_read,
		.setup_aux	= trace_setup_aux,
		.free_aux	= trace_free_aux,
	};
	err = perf_pmu_register(&dev->trace_pmu, "vpmu_trace", -1);
	if (err) {
		vpmu_sysfs_exit(&dev->trace_sysfs);
		dev->trace_pmu.type = 0;
	}
	return err;
}

/**
 * vpmu_trace_unregister() - it is one no more; no event may be left
 * @dev: the device
 */
void vpmu_trace_unregister(struct vpmu_device *dev)
{
	u32 i;

	if (!dev->trace_pmu.type)
		return;
	perf_pmu_unregister(&dev->trace_pmu);
	vpmu_sysfs_exit(&dev->trace_sysfs);
	/* The last calls for a notice find no event, but have to be over. */
	for (i = 0; i < dev->info.vcpus; i++)
		while (READ_ONCE(dev->vcpus[i].service.node.u_flags) & CSD_FLAG_LOCK)
			cond_resched();
	synchronize_rcu();
}

// SPDX-License-Identifier: GPL-2.0
/*
 * Views: events of perf core that read persistent events.
 *
 * A persistent event belongs to the device, which counts and samples with or
 * without a reader. perf core has views of it: events opened with the type of
 * the persistent PMU, and perf events that were made persistent. A view reads
 * the persistent event's whole count, including what was counted before the
 * view was opened. Disabling a view does not disable the persistent event.
 *
 * A view's ring belongs to perf core. While the view's ring is mapped, the
 * samples in the persistent event's ring are replayed to it. Samples that were
 * taken before the mapping come first. As with a ring that several programs
 * map, each sample goes to only one reader.
 */
#include <linux/perf_event.h>
#include <linux/slab.h>
#include <linux/smp.h>

#include "perf_core_private.h"
#include "vpmu.h"
#include "vpmu_arch.h"
#include "vpmu_event.h"
#include "vpmu_file.h"
#include "vpmu_persistent.h"
#include "vpmu_replay.h"
#include "vpmu_ring.h"
#include "vpmu_view.h"

/*
 * Fields that perf core takes from the replayed sample. perf core itself fills
 * in the other fields.
 */
#define SAMPLE_PASSED	(PERF_SAMPLE_IP | PERF_SAMPLE_TID | PERF_SAMPLE_TIME | PERF_SAMPLE_ADDR | \
			 PERF_SAMPLE_CALLCHAIN | PERF_SAMPLE_REGS_INTR)

/**
 * vpmu_view_alloc() - allocate a view that does not read a persistent event yet
 * @event: perf core's event
 *
 * Return: the view, to be freed with vpmu_view_close(); or NULL.
 */
struct vpmu_view *vpmu_view_alloc(struct perf_event *event)
{
	struct vpmu_view *view = kzalloc(sizeof(*view), GFP_KERNEL);

	if (!view)
		return NULL;
	INIT_LIST_HEAD(&view->entry);
	view->event = event;
	return view;
}

/*
 * Whether the records in an event's ring have all fields that a view needs.
 * @wanted is the view's sample_type.
 */
static bool view_fits(const struct vpmu_file *file, u64 wanted)
{
	u64 type = le64_to_cpu(file->spec.request.sample_type);

	if (type & ~(u64)VPMU_REPLAYED || (type | wanted) & VPMU_SAMPLE_PROMPT)
		return false;
	if (type & PERF_SAMPLE_REGS_INTR &&
	    le64_to_cpu(file->spec.request.regs_intr) != VPMU_ARCH_REGS)
		return false;
	/*
	 * In frequency mode the period changes, so the records must contain it.
	 */
	if (wanted & PERF_SAMPLE_PERIOD && !(type & PERF_SAMPLE_PERIOD) && file->spec.freq)
		return false;
	return !(wanted & SAMPLE_PASSED & ~type);
}

/*
 * Whether a view can consume the samples in a ring: new records must not
 * overwrite old ones, and only one event may write to the ring.
 */
static bool view_ring_fits(const struct vpmu_ring *ring)
{
	return ring && ring->count > 1 && !ring->overwrites && !ring->ended &&
	       list_is_singular(&ring->writers);
}

static void view_map(struct vpmu_view *view)
{
	struct vpmu_file *file = view->file;
	struct vpmu_ring *ring = file->output.ring;
	struct vpmu_records *records = &ring->records;

	vpmu_ring_mapped(file);
	records->type = le64_to_cpu(file->spec.request.sample_type);
	records->period = file->spec.period;
	records->shared = true;
	records->pages = ring->pages;
	records->window = ring->window ? vpmu_window_address(file->dev, ring->pfn) : NULL;
	records->size = (ring->count - 1) * PAGE_SIZE;
	view->ring = ring;
}

/**
 * vpmu_view_open() - let a view read a persistent event
 * @view: the view
 * @file: the event's file; on success, the view takes over the caller's handle
 *
 * Return: 0; or -EOPNOTSUPP if the view samples, but the event has no ring
 * whose samples can be replayed to the view.
 */
int vpmu_view_open(struct vpmu_view *view, struct vpmu_file *file)
{
	struct perf_event *event = view->event;
	struct vpmu_device *dev = file->dev;
	int err = 0;

	mutex_lock(&dev->output_lock);
	view->file = file;
	if (view_ring_fits(file->output.ring) && view_fits(file, event->attr.sample_type))
		view_map(view);
	else if (is_sampling_event(event))
		err = -EOPNOTSUPP;
	mutex_unlock(&dev->output_lock);
	if (err) {
		view->file = NULL;
		return err;
	}
	spin_lock_irq(&dev->lookup.lock);
	file->persist.views++;
	spin_unlock_irq(&dev->lookup.lock);
	return 0;
}

/**
 * vpmu_view_close() - free a view, and drop its handle
 * @view: the view, which is not active
 */
void vpmu_view_close(struct vpmu_view *view)
{
	struct vpmu_file *file = view->file;
	struct vpmu_device *dev;

	if (file) {
		dev = file->dev;
		spin_lock_irq(&dev->lookup.lock);
		file->persist.views--;
		spin_unlock_irq(&dev->lookup.lock);
		mutex_lock(&dev->output_lock);
		if (view->ring)
			vpmu_ring_unmapped(file);
		mutex_unlock(&dev->output_lock);
		vpmu_persistent_put(file);
	}
	kfree(view);
}

/* Sets the view's count to the event's whole count. */
static void view_update(struct vpmu_vcpu *vcpu, struct vpmu_view *view)
{
	struct vpmu_reply reply;

	if (vpmu_vcpu_command(vcpu, VPMU_COMMAND_READ, view->file->id, 0, &reply))
		return;
	local64_set(&view->event->count, le64_to_cpu(reply.value));
}

/**
 * vpmu_view_replay() - replay a persistent event's samples to a view
 * @vcpu: this CPU's queue; interrupts are off
 * @view: the view, which is active on this CPU
 * @left: number of records to replay at most; decremented for each
 *
 * Return: true if records are left for another call.
 */
bool vpmu_view_replay(struct vpmu_vcpu *vcpu, struct vpmu_view *view, unsigned int *left)
{
	/*
	 * A view without a ring of its own would consume the samples but write
	 * no records.
	 */
	if (!view->ring || !perf_core_buffer(view->event))
		return false;
	return vpmu_replay(vcpu, view->event, &view->ring->records, &view->ended, left);
}

/**
 * vpmu_view_start() - start a view
 * @vcpu: this CPU's queue; interrupts are off
 * @view: the view
 */
void vpmu_view_start(struct vpmu_vcpu *vcpu, struct vpmu_view *view)
{
	view_update(vcpu, view);
	view->ended = false;
	if (!view->ring)
		return;
	list_move_tail(&view->entry, &vcpu->views);
	vpmu_sampling_arm(vcpu);
}

/**
 * vpmu_view_stop() - stop a view
 * @vcpu: this CPU's queue; interrupts are off
 * @view: the view
 */
void vpmu_view_stop(struct vpmu_vcpu *vcpu, struct vpmu_view *view)
{
	unsigned int left = VPMU_REPLAY_PIECE;

	view_update(vcpu, view);
	/* If more records are left, they remain in the persistent event's ring. */
	vpmu_view_replay(vcpu, view, &left);
	list_del_init(&view->entry);
}

/**
 * vpmu_view_read() - struct pmu::read
 * @view: the view, on its CPU; interrupts are off
 */
void vpmu_view_read(struct vpmu_view *view)
{
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(view->file->dev);

	/* The call may be nested; see vpmu_vcpu.c. Then keep the last count. */
	if (!vpmu_vcpu_may_read() || !vcpu || view->event->hw.state & PERF_HES_STOPPED)
		return;
	view_update(vcpu, view);
	if (view->ring)
		irq_work_queue(&vcpu->replay_kick);
}

/**
 * struct view_call - a piece of records to replay to a view
 * @view: the view
 * @more: records are left
 */
struct view_call {
	struct vpmu_view *view;
	bool more;
};

static void view_show_here(void *info)
{
	struct view_call *call = info;
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(call->view->file->dev);
	unsigned int left = VPMU_REPLAY_PIECE;

	call->more = vcpu && !list_empty(&call->view->entry) &&
		     vpmu_view_replay(vcpu, call->view, &left);
}

/**
 * vpmu_view_show() - replay all of a persistent event's samples to a view
 * @view: the view; the caller ensures that perf core's event is not destroyed
 */
void vpmu_view_show(struct vpmu_view *view)
{
	struct view_call call = { .view = view };
	/* New records must not keep the loop running forever. */
	size_t pieces = view->ring ? view->ring->count * (PAGE_SIZE / sizeof(u64)) : 0;

	while (pieces--) {
		if (smp_call_function_single(view->event->cpu, view_show_here, &call, 1) ||
		    !call.more)
			break;
		cond_resched();
	}
}

/*
 * Runs with interrupts off, on the event's CPU or, if that CPU is offline, on
 * any other CPU.
 */
static void view_take(void *info)
{
	struct vpmu_view *view = info;
	struct perf_event *event = view->event;
	struct vpmu_event *own = event->pmu_private;
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(own->dev);

	/* The lock keeps perf core from scheduling the context's events. */
	perf_core_lock(perf_core_context(event));
	WRITE_ONCE(view->file->control.enabled, own->started);
	own->id = 0;
	own->started = false;
	own->limit_hit = true;
	if (own->sampler)
		vpmu_sampling_forget(own);
	own->view = view;
	if (vcpu && event->state == PERF_EVENT_STATE_ACTIVE &&
	    !(event->hw.state & PERF_HES_STOPPED))
		vpmu_view_start(vcpu, view);
	perf_core_unlock(perf_core_context(event));
}

/**
 * vpmu_view_take() - turn perf core's event into a view of a persistent event
 * @view: the view, which is open; its event is CPU-wide, and alone in its group
 *
 * The event keeps counting on the device, and its enabled and running times in
 * perf core continue.
 */
void vpmu_view_take(struct vpmu_view *view)
{
	struct vpmu_event *own = view->event->pmu_private;
	struct vpmu_device *dev = own->dev;

	mutex_lock(&dev->life.lock);
	vpmu_event_unpublish(own);
	if (smp_call_function_single(view->event->cpu, view_take, view, 1)) {
		local_irq_disable();
		view_take(view);
		local_irq_enable();
	}
	/* From now on, vpmu_life.c finds the event in lookup.files. */
	list_del_init(&own->entry);
	mutex_unlock(&dev->life.lock);
}

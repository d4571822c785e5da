// SPDX-License-Identifier: GPL-2.0
/*
 * Ends open events when the device is removed, and reopens them after sleep.
 *
 * A reset removes everything from the device except persistent events. If the
 * device does not answer, or its transport is unbound, open events end:
 * programs stop waiting for the device, and the memory of rings stays until it
 * is unmapped. After a sleep, events for which event_can_go_on() is true are
 * opened again and continue.
 */
#include <linux/fs.h>
#include <linux/kref.h>
#include <linux/limits.h>
#include <linux/perf_event.h>
#include <linux/rcupdate.h>
#include <linux/smp.h>
#include <linux/virtio_config.h>

#include "perf_core_private.h"
#include "vpmu.h"
#include "vpmu_event.h"
#include "vpmu_file.h"
#include "vpmu_ring.h"

/**
 * vpmu_life_is_gone() - check whether nothing answers for the device any more
 * @dev: the device
 *
 * Return: true if all registers read ones: the device was taken out of the
 * machine, or the process that carries it has ended.
 */
bool vpmu_life_is_gone(const struct vpmu_device *dev)
{
	return dev->vdev->config->get_status(dev->vdev) == U8_MAX;
}

/**
 * vpmu_life_close() - reset the device, and stop using it
 * @dev: the device
 * @err: the negative errno that waiting and later requests return
 *
 * On return, the queues are no longer accessed. Calling this again is harmless.
 */
void vpmu_life_close(struct vpmu_device *dev, int err)
{
	u32 i;

	for (i = 0; i < dev->info.vcpus; i++)
		vpmu_vcpu_close(&dev->vcpus[i]);
	spin_lock_irq(&dev->notices.lock);
	dev->notices.closed = true;
	spin_unlock_irq(&dev->notices.lock);
	/*
	 * Reset the device before the requests fail: when a request fails, its
	 * sender frees buffers that the device may still write to. A device
	 * that is gone writes nothing, and never ends a reset.
	 */
	if (!vpmu_life_is_gone(dev))
		virtio_reset_device(dev->vdev);
	/*
	 * The transport's interrupt handler may have begun before the reset,
	 * and may still walk the queues, without a lock. Wait for it, because
	 * the queues are freed soon.
	 */
	virtio_synchronize_cbs(dev->vdev);
	vpmu_control_close_queue(dev, err);
	vpmu_task_forgotten(dev);
}

/*
 * Ends a file's event. The records and packets in its ring and its AUX area
 * stay readable.
 */
static void file_lose(struct vpmu_file *file, int err)
{
	struct vpmu_device *dev = file->dev;
	struct vpmu_ring *ring;

	mutex_lock(&dev->output_lock);
	WRITE_ONCE(file->failure, err);
	file->ended = true;
	if (list_empty(&file->persist.entry))
		file->persist.active = false;
	ring = file->output.ring;
	if (ring) {
		ring->ended = true;
		if (ring->id == file->id)
			ring->kept = false;
	}
	mutex_unlock(&dev->output_lock);

	WRITE_ONCE(file->error, true);
	spin_lock_irq(&dev->lookup.lock);
	wake_up_all(&file->waiters.queue);
	kill_fasync(&file->waiters.fasync, SIGIO, POLL_HUP);
	spin_unlock_irq(&dev->lookup.lock);
}

/*
 * Finds the file with the lowest id that is at least *@id, and sets *@id to
 * that file's id. Returns the file, with a reference; NULL if no file is left.
 */
static struct vpmu_file *file_next(struct vpmu_device *dev, unsigned long *id)
{
	struct vpmu_file *file;

	rcu_read_lock();
	file = xa_find(&dev->lookup.files, id, ULONG_MAX, XA_PRESENT);
	while (file && !kref_get_unless_zero(&file->ref))
		file = xa_find_after(&dev->lookup.files, id, ULONG_MAX, XA_PRESENT);
	rcu_read_unlock();
	return file;
}

/**
 * vpmu_life_end() - end all open events
 * @dev: the device, which vpmu_life_close() has closed
 * @err: the negative errno that later calls on the events return
 */
void vpmu_life_end(struct vpmu_device *dev, int err)
{
	struct vpmu_event *own;
	struct vpmu_file *file;
	unsigned long id;

	for (id = 0; (file = file_next(dev, &id)); id++) {
		file_lose(file, err);
		xa_erase_irq(&dev->lookup.files, id);
		vpmu_file_put(file);
	}
	mutex_lock(&dev->life.lock);
	list_for_each_entry(own, &dev->life.events, entry)
		vpmu_event_lose(own);
	mutex_unlock(&dev->life.lock);
}

/**
 * vpmu_event_is_stale() - check whether a reset has ended an event
 * @own: the event, not persistent
 *
 * If the event is not yet on the list of all events, vpmu_life_end() does not
 * find it.
 *
 * Return: true if the device was reset since it opened the event.
 */
bool vpmu_event_is_stale(const struct vpmu_event *own)
{
	return own->id && own->resets != READ_ONCE(own->dev->control.resets);
}

/**
 * vpmu_life_add() - add an event to the list of all events
 * @own: the event
 */
void vpmu_life_add(struct vpmu_event *own)
{
	struct vpmu_device *dev = own->dev;
	int lost;

	mutex_lock(&dev->life.lock);
	list_add_tail(&own->entry, &dev->life.events);
	lost = READ_ONCE(dev->life.lost);
	/* The device may already be bound again, with life.lost cleared. */
	if (!lost && vpmu_event_is_stale(own))
		lost = -ENODEV;
	if (lost)
		vpmu_event_lose(own);
	mutex_unlock(&dev->life.lock);
	/*
	 * The file is no longer published, so vpmu_life_end() does not find it.
	 */
	if (lost && own->file && !own->event->parent)
		file_lose(own->file, lost);
}

/**
 * vpmu_life_remove() - remove an event from the list of all events
 * @own: the event
 */
void vpmu_life_remove(struct vpmu_event *own)
{
	mutex_lock(&own->dev->life.lock);
	list_del(&own->entry);
	mutex_unlock(&own->dev->life.lock);
}

/*
 * Stops or starts events, on the CPUs where they are active.
 */
static void events_switch(struct vpmu_device *dev)
{
	struct vpmu_event *own;

	lockdep_assert_held(&dev->life.lock);
	list_for_each_entry(own, &dev->life.events, entry)
		if (own->id && perf_core_context(own->event) &&
		    READ_ONCE(own->event->state) == PERF_EVENT_STATE_ACTIVE)
			vpmu_call_switch(own->event);
}

/**
 * vpmu_life_pause() - stop all events, and close the device
 * @dev: the device, which is closed on return
 *
 * Called when programs are frozen. On return, perf core has all counts.
 */
void vpmu_life_pause(struct vpmu_device *dev)
{
	WRITE_ONCE(dev->life.asleep, true);
	/*
	 * A CPU that has not seen @asleep may be starting an event, with
	 * interrupts off. Wait until it has: events_switch() then finds the
	 * event active.
	 */
	kick_all_cpus_sync();
	mutex_lock(&dev->life.lock);
	events_switch(dev);
	mutex_unlock(&dev->life.lock);
	vpmu_life_close(dev, -ENODEV);
}

/*
 * Whether an event that a reset ended can be opened again on the device. The
 * following cannot: linked events, and events of /dev/vpmu that sample
 * or have a ring. An event that samples through perf core can: programs see
 * only the records that perf core makes, which do not contain the event's
 * device id.
 */
static bool event_can_go_on(const struct vpmu_event *own)
{
	const struct vpmu_file *file = own->file;

	if (READ_ONCE(own->linked))
		return false;
	if (!file)
		return true;
	return !file->spec.period && !file->spec.trace && !file->output.ring &&
	       !file->links.anchored && !file->links.actor[VPMU_STARTER] &&
	       !file->links.actor[VPMU_STOPPER];
}

/*
 * A reset closes direct events that are no longer persistent. Ends them in the
 * driver, too.
 */
static void files_end(struct vpmu_device *dev)
{
	struct vpmu_file *file;
	unsigned long id;

	for (id = 0; (file = file_next(dev, &id)); id++) {
		if (vpmu_file_is_direct(file) && !file->persist.active) {
			file_lose(file, -EIO);
			xa_erase_irq(&dev->lookup.files, id);
		}
		vpmu_file_put(file);
	}
}

/**
 * vpmu_life_resume() - open events again, and start them
 * @dev: the device, with new queues
 */
void vpmu_life_resume(struct vpmu_device *dev)
{
	struct vpmu_event *own;

	mutex_lock(&dev->life.lock);
	list_for_each_entry(own, &dev->life.events, entry) {
		if (!own->id || (event_can_go_on(own) && !vpmu_event_reopen(own)))
			continue;
		if (own->file)
			file_lose(own->file, -EIO);
		vpmu_event_lose(own);
	}
	WRITE_ONCE(dev->life.asleep, false);
	events_switch(dev);
	mutex_unlock(&dev->life.lock);
	files_end(dev);
}

// SPDX-License-Identifier: GPL-2.0
/*
 * The virtio device: probe and remove, queues, notices.
 *
 * The transport can be unbound while events are open. Unbinding ends the events
 * without waiting for their users; the driver's objects stay until perf core
 * and programs release them. If a device is bound before all these objects are
 * released, it replaces the unbound device.
 */
#include <linux/cpu.h>
#include <linux/cpuhotplug.h>
#include <linux/fs.h>
#include <linux/io.h>
#include <linux/kref.h>
#include <linux/limits.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/moduleparam.h>
#include <linux/perf_event.h>
#include <linux/rcupdate.h>
#include <linux/reboot.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>
#include <linux/smp.h>
#include <linux/string.h>
#include <linux/virtio_config.h>
#include <linux/virtio_ring.h>

#include "compat.h"
#include "perf_core_private.h"
#include "vpmu.h"
#include "vpmu_event.h"
#include "vpmu_file.h"
#include "vpmu_persistent.h"
#include "vpmu_ring.h"

/*
 * Ends open events when the device is removed, and reopens them after sleep.
 *
 * A reset removes everything from the device except persistent events. If the
 * device does not answer, or its transport is unbound, open events end:
 * programs stop waiting for the device, and the memory of rings stays until it
 * is unmapped. After a sleep, events for which event_can_go_on() is true are
 * opened again and continue.
 */

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
static void vpmu_life_close(struct vpmu_device *dev, int err)
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
static void vpmu_life_end(struct vpmu_device *dev, int err)
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
static void vpmu_life_pause(struct vpmu_device *dev)
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
 * following cannot: linked events, and events whose records the host writes, if
 * they sample or have a ring. An event whose samples are replayed can: programs
 * see only the records that perf core makes, which do not contain the event's
 * device id.
 */
static bool event_can_go_on(const struct vpmu_event *own)
{
	const struct vpmu_file *file = own->file;

	if (READ_ONCE(own->linked))
		return false;
	if (!file)
		return true;
	return !file->spec.period && !file->spec.trace && !file->output.ring;
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
		if (file->direct && !file->persist.active) {
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
static void vpmu_life_resume(struct vpmu_device *dev)
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

/* Limits on the device's configuration, so that no size below can overflow. */
#define MAX_CATALOGUE	4096
#define MAX_VCPUS	4096

static enum cpuhp_state vpmu_online_state;
/*
 * Only one device can be bound, because there is only one PMU name, one
 * /dev/vpmu and one set of task pages.
 */
static atomic_t vpmu_present = ATOMIC_INIT(0);
/* A removed device that had users. vpmu_present serializes access to it. */
static struct vpmu_device *vpmu_kept;

/**
 * vpmu_device_get() - add a user of the device
 * @dev: the device
 */
void vpmu_device_get(struct vpmu_device *dev)
{
	atomic_inc(&dev->life.users);
}

/**
 * vpmu_device_put() - remove a user of the device
 * @dev: the device
 */
void vpmu_device_put(struct vpmu_device *dev)
{
	if (atomic_dec_and_test(&dev->life.users))
		wake_up_all(&dev->life.idle);
}

/* Stops further opens. Returns whether the device still has users. */
static bool device_leave(struct vpmu_device *dev)
{
	WRITE_ONCE(dev->life.lost, -ENODEV);
	/*
	 * Either the read below sees the user that vpmu_event_create() adds, or
	 * vpmu_event_create() sees that @lost is set.
	 */
	smp_mb();
	return atomic_read(&dev->life.users);
}

/* Stops further opens, and waits until the device has no users. */
static void device_drain(struct vpmu_device *dev)
{
	device_leave(dev);
	wait_event(dev->life.idle, !atomic_read(&dev->life.users));
	/*
	 * The last user has woken this task, but may still be in wake_up_all().
	 * Also, perf core accesses the PMU once more after perf_event::destroy.
	 * A task does not sleep in either place, but may be preempted there.
	 * synchronize_rcu_tasks() waits until the task has left the place. If
	 * the last user is an interrupt handler, synchronize_rcu() waits for
	 * it.
	 */
	synchronize_rcu_tasks();
	synchronize_rcu();
}

/* Texts for VPMU_REFUSED_* */
static const char *refusal(u32 why)
{
	switch (why) {
	case VPMU_REFUSED_IN_USE:
		return "another user holds the host's counters exclusively";
	case VPMU_REFUSED_PERMISSION:
		return "no permission";
	case VPMU_REFUSED_DESCRIPTORS:
		return "the VMM has no free file descriptor";
	case VPMU_REFUSED_ABSENT:
		return "the host has no such event";
	case VPMU_REFUSED_POLICY:
		return "disabled by its operator";
	case VPMU_REFUSED_SEVERAL_PMUS:
		return "the VMM may run on CPUs of several core PMUs, or on CPUs without one";
	case VPMU_REFUSED_MEDIATED:
		return "the host's counters are left to VMs with a mediated PMU";
	default:
		return "an error";
	}
}

/**
 * vpmu_device_refused() - log that the host has refused a counter for an event
 * @dev: the device
 * @why: VPMU_REFUSED_*
 *
 * Logs each reason only once, because programs can repeat the request.
 */
void vpmu_device_refused(struct vpmu_device *dev, u32 why)
{
	/* A newer device may have reasons that this driver does not know. */
	if (why > VPMU_REFUSED_MEDIATED)
		why = VPMU_REFUSED_OTHER;
	if (why != VPMU_REFUSED_NOT && !test_and_set_bit(why, &dev->refused))
		vpmu_warn(dev, "the host refused a counter for an event: %s; ask the operator\n",
			  refusal(why));
}

/* If the catalogue has no events of @kind, logs why. */
static void device_say_refused(struct virtio_device *vdev, const char *kind, u8 why)
{
	if (why == VPMU_REFUSED_ABSENT)
		dev_info(&vdev->dev, "no %s events: the host has none\n", kind);
	else if (why != VPMU_REFUSED_NOT)
		dev_warn(&vdev->dev, "no %s events: the host refused them: %s; ask the operator\n",
			 kind, refusal(why));
}

static void device_say_refusals(struct virtio_device *vdev)
{
	u8 hardware, software;

	virtio_cread_le(vdev, struct vpmu_config, refused_hardware, &hardware);
	virtio_cread_le(vdev, struct vpmu_config, refused_software, &software);
	device_say_refused(vdev, "hardware", hardware);
	device_say_refused(vdev, "software", software);
}

static int notices_post(struct vpmu_device *dev, struct vpmu_notice *notice)
{
	struct scatterlist sg;

	sg_init_one(&sg, notice, sizeof(*notice));
	return virtqueue_add_inbuf(dev->notices.vq, &sg, 1, notice, GFP_ATOMIC);
}

static void notice_handle(struct vpmu_device *dev, const struct vpmu_notice *notice)
{
	if (le32_to_cpu(notice->kind) == VPMU_NOTICE_ERROR)
		vpmu_device_refused(dev, le32_to_cpu(notice->value));
	vpmu_output_notice(dev, notice);
}

/**
 * vpmu_notices_take() - handle up to VPMU_NOTICES pending notices of the device
 * @dev: the device
 *
 * If another CPU is handling notices, waits for that CPU. If there may be more
 * notices than this call has handled, a work item handles them: programs can
 * make the device send notices at any rate, and the CPU that gets the device's
 * interrupt need not be theirs.
 *
 * Return: true if there were notices.
 */
bool vpmu_notices_take(struct vpmu_device *dev)
{
	unsigned int left = VPMU_NOTICES, len;
	struct vpmu_notice *notice;
	struct virtqueue *vq;
	unsigned long flags;

	spin_lock_irqsave(&dev->notices.lock, flags);
	if (dev->notices.closed)
		goto unlock;
	vq = dev->notices.vq;
	do {
		virtqueue_disable_cb(vq);
		while (left && (notice = virtqueue_get_buf(vq, &len))) {
			if (len >= sizeof(*notice))
				notice_handle(dev, notice);
			notices_post(dev, notice);
			left--;
		}
	} while (left && !virtqueue_enable_cb(vq));
	if (!left)
		schedule_work(&dev->notices.work);
	/* If no buffer was posted, a kick would only cost an exit. */
	if (left != VPMU_NOTICES)
		virtqueue_kick(vq);
unlock:
	spin_unlock_irqrestore(&dev->notices.lock, flags);
	return left != VPMU_NOTICES;
}

static void notices_callback(struct virtqueue *vq)
{
	vpmu_notices_take(vq->vdev->priv);
}

/* Queues itself again while there are notices. */
static void notices_work(struct work_struct *work)
{
	vpmu_notices_take(container_of(work, struct vpmu_device, notices.work));
}

static const unsigned int vpmu_features[] = {
	VPMU_F_RING,
	VPMU_F_TASK_PAGE,
	VPMU_F_DOORBELL,
	VPMU_F_AUX,
	VPMU_F_WINDOW,
	VPMU_F_PERSISTENT,
	VPMU_F_LINKS,
	VPMU_F_FLUSH,
};

/*
 * Returns the device-specific feature bits that both the device and this driver
 * know. A generic transport may not pass these bits on, so the device repeats
 * them in its configuration space.
 */
static u64 device_features(struct virtio_device *vdev)
{
	u64 offered, known = 0;
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(vpmu_features); i++)
		known |= BIT_ULL(vpmu_features[i]);
	virtio_cread_le(vdev, struct vpmu_config, features, &offered);
	return (offered | vdev->features) & known;
}

/* Reads the fields that a restore of the machine on another host can change. */
static void device_host_info(struct virtio_device *vdev, struct vpmu_info *info)
{
	u16 shift;

	virtio_cread_le(vdev, struct vpmu_config, max_events, &info->max_events);
	virtio_cread_le(vdev, struct vpmu_config, max_ring_pages, &info->max_ring_pages);
	virtio_cread_le(vdev, struct vpmu_config, count_mode, &info->count_mode);
	virtio_cread_le(vdev, struct vpmu_config, time_zero, &info->time_zero);
	virtio_cread_le(vdev, struct vpmu_config, time_mult, &info->time_mult);
	virtio_cread_le(vdev, struct vpmu_config, time_shift, &shift);
	virtio_cread_le(vdev, struct vpmu_config, tsc_khz, &info->tsc_khz);
	virtio_cread_le(vdev, struct vpmu_config, max_sample_rate, &info->max_sample_rate);
	if (device_features(vdev) & BIT_ULL(VPMU_F_AUX))
		virtio_cread_le(vdev, struct vpmu_config, max_aux_pages, &info->max_aux_pages);
	virtio_cread_le(vdev, struct vpmu_config, max_persistent, &info->max_persistent);
	info->time_shift = shift;
}

static int device_info(struct virtio_device *vdev, struct vpmu_info *info)
{
	virtio_cread_le(vdev, struct vpmu_config, version, &info->version);
	virtio_cread_le(vdev, struct vpmu_config, vcpus, &info->vcpus);
	virtio_cread_le(vdev, struct vpmu_config, catalogue_len, &info->catalogue_len);
	device_host_info(vdev, info);

	if (info->version != VPMU_VERSION) {
		dev_err(&vdev->dev, "the device has version %u, this driver supports version %u\n",
			info->version, VPMU_VERSION);
		return -EINVAL;
	}
	if (!info->vcpus || info->vcpus > MAX_VCPUS || info->catalogue_len > MAX_CATALOGUE) {
		dev_err(&vdev->dev, "invalid configuration: %u vCPUs, %u catalogue entries\n",
			info->vcpus, info->catalogue_len);
		return -EINVAL;
	}
	/* The device uses guest-physical addresses of pages. */
	if (virtio_has_feature(vdev, VIRTIO_F_ACCESS_PLATFORM)) {
		dev_err(&vdev->dev, "not supported behind an IOMMU\n");
		return -EOPNOTSUPP;
	}
	return 0;
}

static void notices_start(struct vpmu_device *dev, struct virtqueue *vq)
{
	unsigned int i;

	spin_lock_irq(&dev->notices.lock);
	dev->notices.vq = vq;
	dev->notices.closed = false;
	/* A queue that is shorter than the array holds fewer buffers. */
	for (i = 0; i < VPMU_NOTICES; i++)
		if (notices_post(dev, &dev->notices.buffers[i]))
			break;
	virtqueue_kick(vq);
	spin_unlock_irq(&dev->notices.lock);
}

/* Sets up the queues, and marks the device ready. */
static int device_start(struct vpmu_device *dev)
{
	unsigned int i, count = VPMU_QUEUE_VCPU + dev->info.vcpus;
	vq_callback_t **callbacks;
	struct virtqueue **vqs;
	const char **names;
	int err = -ENOMEM;

	vqs = kcalloc(count, sizeof(*vqs), GFP_KERNEL);
	callbacks = kcalloc(count, sizeof(*callbacks), GFP_KERNEL);
	names = kcalloc(count, sizeof(*names), GFP_KERNEL);
	if (!vqs || !callbacks || !names)
		goto free;
	for (i = 0; i < count; i++)
		names[i] = "vcpu";
	names[VPMU_QUEUE_CONTROL] = "control";
	callbacks[VPMU_QUEUE_CONTROL] = vpmu_control_callback;
	names[VPMU_QUEUE_EVENT] = "event";
	callbacks[VPMU_QUEUE_EVENT] = notices_callback;

	err = vpmu_find_vqs(dev->vdev, count, vqs, callbacks, names);
	if (err)
		goto free;
	virtio_device_ready(dev->vdev);
	dev->control.vq = vqs[VPMU_QUEUE_CONTROL];
	vpmu_control_open_queue(dev);
	notices_start(dev, vqs[VPMU_QUEUE_EVENT]);
	for (i = 0; i < dev->info.vcpus; i++)
		vpmu_vcpu_open(&dev->vcpus[i], vqs[VPMU_QUEUE_VCPU + i]);
	/* Accept the features first: other requests may need one of them. */
	if (dev->features & ~dev->vdev->features)
		err = vpmu_control_features(dev, dev->features & ~dev->vdev->features);
free:
	kfree(names);
	kfree(callbacks);
	kfree(vqs);
	return err;
}

/* Ends background work of a closed device, then deletes its queues. */
static void device_stop(struct vpmu_device *dev)
{
	u32 i;

	for (i = 0; i < dev->info.vcpus; i++)
		irq_work_sync(&dev->vcpus[i].error_work);
	cancel_work_sync(&dev->life.give_up);
	cancel_work_sync(&dev->notices.work);
	flush_work(&dev->reread);
	vpmu_persistent_exit(dev);
	if (dev->control.vq)
		dev->vdev->config->del_vqs(dev->vdev);
	dev->control.vq = NULL;
}

/* Ends the use of a device that stays bound. */
static void device_end(struct vpmu_device *dev, int err)
{
	vpmu_life_close(dev, err);
	/*
	 * A later restore reads the device's list of persistent events into new
	 * files.
	 */
	vpmu_persistent_close(dev);
	vpmu_life_end(dev, err);
}

static void give_up_work(struct work_struct *work)
{
	struct vpmu_device *dev = container_of(work, struct vpmu_device, life.give_up);

	/* A device that is being unbound is already lost. */
	if (!cmpxchg(&dev->life.lost, 0, -EIO))
		vpmu_err(dev, "the device does not answer: it is given up, and its events end; bind it again\n");
	device_end(dev, dev->life.lost);
}

/**
 * vpmu_device_give_up() - give up a device that does not answer
 * @dev: the device
 *
 * A work item later ends all waits for the device.
 */
void vpmu_device_give_up(struct vpmu_device *dev)
{
	schedule_work(&dev->life.give_up);
}

/*
 * Reads the configuration again after the VM was restored from a snapshot,
 * perhaps on another host. Events that this host lacks stay in the catalogue,
 * but the device refuses to open them.
 */
static void reread_work(struct work_struct *work)
{
	struct vpmu_device *dev = container_of(work, struct vpmu_device, reread);
	struct vpmu_info info;

	/*
	 * After the probe, only this work changes dev->info, so it can read
	 * dev->info without a lock.
	 */
	info = dev->info;
	device_host_info(dev->vdev, &info);
	write_seqlock_irq(&dev->info_lock);
	dev->info = info;
	write_sequnlock_irq(&dev->info_lock);
}

static void device_free(struct vpmu_device *dev)
{
	u32 i;

	if (dev->vcpus)
		for (i = 0; i < dev->info.vcpus && dev->vcpus[i].dev; i++)
			vpmu_vcpu_exit(&dev->vcpus[i]);
	xa_destroy(&dev->lookup.files);
	xa_destroy(&dev->lookup.sampled);
	free_percpu(dev->cpu_vcpu);
	kfree(dev->vcpus);
	kfree(dev->notices.buffers);
	kvfree(dev->catalogue);
	kfree(dev);
}

/* Binds the driver's objects to a virtio device. */
static void device_meet(struct vpmu_device *dev, struct virtio_device *vdev)
{
	dev->vdev = vdev;
	vdev->priv = dev;
	strscpy(dev->name, dev_name(&vdev->dev), sizeof(dev->name));
}

static struct vpmu_device *device_alloc(struct virtio_device *vdev)
{
	struct vpmu_device *dev;

	dev = kzalloc(sizeof(*dev), GFP_KERNEL);
	if (!dev)
		return ERR_PTR(-ENOMEM);
	device_meet(dev, vdev);
	seqlock_init(&dev->info_lock);
	spin_lock_init(&dev->control.lock);
	INIT_LIST_HEAD(&dev->control.sent);
	INIT_LIST_HEAD(&dev->control.waiting);
	mutex_init(&dev->output_lock);
	mutex_init(&dev->link_lock);
	spin_lock_init(&dev->notices.lock);
	spin_lock_init(&dev->lookup.lock);
	xa_init_flags(&dev->lookup.files, XA_FLAGS_LOCK_IRQ);
	xa_init_flags(&dev->lookup.sampled, XA_FLAGS_LOCK_IRQ);
	init_waitqueue_head(&dev->life.idle);
	mutex_init(&dev->life.lock);
	INIT_LIST_HEAD(&dev->life.events);
	INIT_WORK(&dev->life.give_up, give_up_work);
	INIT_WORK(&dev->notices.work, notices_work);
	INIT_WORK(&dev->reread, reread_work);
	dev->control.closed = -ENODEV;
	dev->notices.closed = true;
	vpmu_persistent_init(dev);
	return dev;
}

/* Allocates state whose size is in the configuration space. */
static int device_arrays(struct vpmu_device *dev)
{
	int err = 0;
	u32 i;

	dev->vcpus = kcalloc(dev->info.vcpus, sizeof(*dev->vcpus), GFP_KERNEL);
	dev->notices.buffers = kcalloc(VPMU_NOTICES, sizeof(*dev->notices.buffers), GFP_KERNEL);
	dev->catalogue = kvcalloc(dev->info.catalogue_len, sizeof(*dev->catalogue), GFP_KERNEL);
	dev->cpu_vcpu = alloc_percpu(struct vpmu_vcpu *);
	if (!dev->vcpus || !dev->notices.buffers || !dev->catalogue || !dev->cpu_vcpu)
		return -ENOMEM;
	for (i = 0; i < dev->info.vcpus && !err; i++)
		err = vpmu_vcpu_init(&dev->vcpus[i], dev, i);
	return err;
}

static int device_doorbell(struct vpmu_device *dev)
{
	struct virtio_shm_region region;

	if (!vpmu_has_feature(dev, VPMU_F_DOORBELL))
		return 0;
	if (!virtio_get_shm_region(dev->vdev, &region, VPMU_SHM_DOORBELL) ||
	    region.len < sizeof(u32)) {
		vpmu_err(dev, "the device offers a doorbell without its memory region\n");
		return -ENXIO;
	}
	/*
	 * Programs can map only whole pages, so let them map the doorbell only
	 * if nothing else shares its pages.
	 */
	if (region.len >= PAGE_SIZE && PAGE_ALIGNED(region.addr))
		dev->doorbell.page = region.addr;
	dev->doorbell.address = ioremap(region.addr, region.len);
	return dev->doorbell.address ? 0 : -ENOMEM;
}

static void device_say_no_queue(struct vpmu_device *dev, unsigned int cpu, int err)
{
	vpmu_err(dev, "CPU %u: its queue was not found; events on it are refused (%d)\n",
		 cpu, err);
}

static int vpmu_online(unsigned int cpu, struct hlist_node *node)
{
	struct vpmu_device *dev = hlist_entry_safe(node, struct vpmu_device, hotplug);
	int err;

	/*
	 * While the queues are closed, this CPU cannot find its queue.
	 * device_restart() opens the queues, then makes each online CPU find
	 * its queue. A CPU that comes online later finds its queue in the code
	 * below, even if the device is not in use yet.
	 */
	if (vpmu_vcpu_is_closed(&dev->vcpus[cpu % dev->info.vcpus]))
		return 0;
	err = vpmu_vcpu_discover(dev);
	/* A CPU without a queue stays online; events on it are refused. */
	if (err)
		device_say_no_queue(dev, cpu, err);
	else
		vpmu_task_online(dev, cpu);
	return 0;
}

static void rediscover(void *device)
{
	struct vpmu_device *dev = device;
	int err = vpmu_vcpu_discover(dev);

	if (err)
		device_say_no_queue(dev, smp_processor_id(), err);
}

/*
 * Restores the state of a device after a reset, and finds the CPU of each
 * queue.
 */
static int device_restart(struct vpmu_device *dev)
{
	int err;

	err = device_start(dev);
	if (err)
		return err;
	cpus_read_lock();
	on_each_cpu(rediscover, dev, 1);
	err = vpmu_task_resume(dev);
	cpus_read_unlock();
	return err;
}

/*
 * Waits until all events are closed, and unregisters the device from the
 * kernel.
 */
static void device_withdraw(struct vpmu_device *dev)
{
	device_drain(dev);
	vpmu_persistent_unregister(dev);
	vpmu_pmu_unregister(dev);
	cpuhp_state_remove_instance(vpmu_online_state, &dev->hotplug);
}

/* Frees a stopped device. */
static void device_release(struct vpmu_device *dev)
{
	if (dev->doorbell.address)
		iounmap(dev->doorbell.address);
	vpmu_window_exit(dev);
	vpmu_task_exit(dev);
	device_free(dev);
}

/* Frees the last device, whose users are gone. */
static void device_forget(void)
{
	struct vpmu_device *dev = vpmu_kept;

	vpmu_kept = NULL;
	device_withdraw(dev);
	device_release(dev);
}

/*
 * Ends all open events of a device that is being removed. Its users may still
 * hold the driver's objects.
 */
static void device_part(struct vpmu_device *dev)
{
	vpmu_life_close(dev, -ENODEV);
	device_stop(dev);
	vpmu_life_end(dev, -ENODEV);
	dev->vdev = NULL;
}

/*
 * Whether programs that still use @dev, the previous device, can continue with
 * @vdev: the features, the configuration and the mapped regions must match.
 */
static bool device_is_same(const struct vpmu_device *dev, struct virtio_device *vdev)
{
	struct virtio_shm_region region;
	struct vpmu_info info = dev->info;

	if (device_features(vdev) != dev->features || device_info(vdev, &info) ||
	    memcmp(&info, &dev->info, sizeof(info)))
		return false;
	if (dev->doorbell.page && (!virtio_get_shm_region(vdev, &region, VPMU_SHM_DOORBELL) ||
				   region.addr != dev->doorbell.page))
		return false;
	return !dev->window.base || (virtio_get_shm_region(vdev, &region, VPMU_SHM_WINDOW) &&
				PHYS_PFN(region.addr) == dev->window.pfn &&
				region.len / VPMU_PAGE_SIZE >= dev->window.pages);
}

/* Reads the catalogue, which must be unchanged. */
static int device_recall(struct vpmu_device *dev)
{
	size_t size = dev->info.catalogue_len * sizeof(*dev->catalogue);
	void *before = kvmalloc(size, GFP_KERNEL);
	int err;

	if (!before)
		return -ENOMEM;
	memcpy(before, dev->catalogue, size);
	err = vpmu_control_catalogue(dev);
	if (!err && memcmp(dev->catalogue, before, size))
		err = -EBUSY;
	if (err)
		memcpy(dev->catalogue, before, size);
	kvfree(before);
	return err;
}

/*
 * Binds @vdev to the objects of @dev, a removed device. The users of @dev can
 * then open events again.
 */
static int device_rebind(struct vpmu_device *dev, struct virtio_device *vdev)
{
	int err = -EBUSY;

	if (!device_is_same(dev, vdev)) {
		dev_err(&vdev->dev, "programs still hold events of another device\n");
		return err;
	}
	device_meet(dev, vdev);
	err = device_restart(dev);
	if (!err)
		err = device_recall(dev);
	if (!err)
		err = vpmu_persistent_resume(dev);
	if (err)
		goto close;
	WRITE_ONCE(dev->life.lost, 0);
	err = vpmu_cdev_register(dev);
	if (!err)
		return 0;
	device_leave(dev);
	vpmu_persistent_close(dev);
close:
	/* A program may already have opened an event. */
	device_part(dev);
	return err;
}

static int device_bind(struct virtio_device *vdev)
{
	struct vpmu_device *dev;
	int err;

	dev = device_alloc(vdev);
	if (IS_ERR(dev))
		return PTR_ERR(dev);
	err = device_info(vdev, &dev->info);
	if (err)
		goto free;
	dev->features = device_features(vdev);
	err = device_arrays(dev);
	if (err)
		goto free;
	err = vpmu_task_init(dev);
	if (err)
		goto release;
	err = device_start(dev);
	if (err)
		goto close;
	err = vpmu_control_catalogue(dev);
	if (err)
		goto close;
	err = device_doorbell(dev);
	if (err)
		goto close;
	err = vpmu_window_init(dev);
	if (err)
		goto close;
	err = cpuhp_state_add_instance(vpmu_online_state, &dev->hotplug);
	if (err)
		goto close;
	err = vpmu_pmu_register(dev);
	if (err)
		goto offline;
	err = vpmu_persistent_register(dev);
	if (err)
		goto unregister;
	err = vpmu_cdev_register(dev);
	if (err)
		goto forget;
	dev_info(&vdev->dev, "%u vCPUs, %u events in the catalogue\n",
		 dev->info.vcpus, dev->info.catalogue_len);
	device_say_refusals(vdev);
	return 0;

forget:
	vpmu_persistent_close(dev);
	device_drain(dev);
	vpmu_persistent_unregister(dev);
unregister:
	device_drain(dev);
	vpmu_pmu_unregister(dev);
offline:
	cpuhp_state_remove_instance(vpmu_online_state, &dev->hotplug);
close:
	vpmu_life_close(dev, -ENODEV);
	device_stop(dev);
release:
	device_release(dev);
	return err;
free:
	device_free(dev);
	return err;
}

static int vpmu_probe(struct virtio_device *vdev)
{
	int err;

	if (atomic_cmpxchg(&vpmu_present, 0, 1)) {
		dev_err(&vdev->dev, "another virtio PMU is bound already\n");
		return -EBUSY;
	}
	if (vpmu_kept && !atomic_read(&vpmu_kept->life.users))
		device_forget();
	if (vpmu_kept) {
		err = device_rebind(vpmu_kept, vdev);
		if (!err)
			vpmu_kept = NULL;
	} else {
		err = device_bind(vdev);
	}
	if (err)
		atomic_set(&vpmu_present, 0);
	return err;
}

static void vpmu_remove(struct virtio_device *vdev)
{
	struct vpmu_device *dev = vdev->priv;

	vpmu_cdev_unregister(dev);
	device_leave(dev);
	vpmu_persistent_close(dev);
	if (device_leave(dev)) {
		device_part(dev);
		vpmu_kept = dev;
	} else {
		device_withdraw(dev);
		vpmu_life_close(dev, -ENODEV);
		device_stop(dev);
		device_release(dev);
	}
	atomic_set(&vpmu_present, 0);
}

/*
 * Called from an interrupt handler. Reading the configuration may sleep, so a
 * work item reads it. virtio does not call this function before the end of the
 * probe, or after it has begun to remove or freeze the device.
 */
static void vpmu_config_changed(struct virtio_device *vdev)
{
	struct vpmu_device *dev = vdev->priv;

	schedule_work(&dev->reread);
}

/* Called before suspend or hibernation. */
static int vpmu_freeze(struct virtio_device *vdev)
{
	struct vpmu_device *dev = vdev->priv;

	vpmu_life_pause(dev);
	device_stop(dev);
	return 0;
}

/*
 * Called after a resume. virtio has reset the device and negotiated the same
 * features.
 */
static int vpmu_restore(struct virtio_device *vdev)
{
	struct vpmu_device *dev = vdev->priv;
	int err;

	err = device_restart(dev);
	if (err) {
		dev_err(&vdev->dev, "the device cannot be restored; its events end (%d)\n", err);
		WRITE_ONCE(dev->life.lost, -EIO);
		device_end(dev, -EIO);
		WRITE_ONCE(dev->life.asleep, false);
		return err;
	}
	/* A device that was given up works again after the reset. */
	WRITE_ONCE(dev->life.lost, 0);
	vpmu_life_resume(dev);
	err = vpmu_persistent_resume(dev);
	if (err)
		dev_err(&vdev->dev, "persistent events cannot be listed (%d)\n", err);
	return 0;
}

/*
 * Clears the features of virtqueues that a device must not offer
 * (VPMU-D-3-2). The scheduler calls this driver with the runqueue's lock held:
 * an indirect descriptor would then be allocated, which can wake a thread, and
 * with notifications that the device may suppress, a kick need not reach it.
 */
static int vpmu_validate(struct virtio_device *vdev)
{
	__virtio_clear_bit(vdev, VIRTIO_RING_F_INDIRECT_DESC);
	__virtio_clear_bit(vdev, VIRTIO_RING_F_EVENT_IDX);
	__virtio_clear_bit(vdev, VIRTIO_F_RING_PACKED);
	return 0;
}

static const struct virtio_device_id vpmu_ids[] = {
	{ VPMU_DEVICE_ID, VIRTIO_DEV_ANY_ID },
	{ },
};
MODULE_DEVICE_TABLE(virtio, vpmu_ids);

static struct virtio_driver vpmu_driver = {
	.driver = {
		.name = "virtio_pmu",
		.owner = THIS_MODULE,
	},
	.id_table = vpmu_ids,
	.feature_table = vpmu_features,
	.feature_table_size = ARRAY_SIZE(vpmu_features),
	.validate = vpmu_validate,
	.probe = vpmu_probe,
	.remove = vpmu_remove,
	.config_changed = vpmu_config_changed,
	.freeze = vpmu_freeze,
	.restore = vpmu_restore,
};

/* Stops a device, and returns whether it is gone. Its lock is held. */
static bool device_shut(struct vpmu_device *dev)
{
	/*
	 * If the device has been given up, wait for give_up_work(), which may
	 * not have reset the device yet.
	 */
	if (!cmpxchg(&dev->life.lost, 0, -ENODEV))
		vpmu_life_close(dev, -ENODEV);
	else
		flush_work(&dev->life.give_up);
	return vpmu_life_is_gone(dev);
}

/*
 * Resets the device before kexec starts another kernel, whose memory the device
 * must not write to. From 6.15 on, and in some older stable kernels, virtio
 * itself resets devices that have a driver, and waits forever for one that is
 * gone. So the driver leaves such a device.
 */
static int vpmu_reboot(struct notifier_block *block, unsigned long action, void *unused)
{
	struct device *device = driver_find_next_device(&vpmu_driver.driver, NULL);
	bool gone = false;

	if (!device)
		return NOTIFY_DONE;
	device_lock(device);
	if (device->driver == &vpmu_driver.driver)
		gone = device_shut(dev_to_virtio(device)->priv);
	device_unlock(device);
	if (gone)
		device_release_driver(device);
	put_device(device);
	return NOTIFY_DONE;
}

static struct notifier_block vpmu_reboot_block = {
	.notifier_call = vpmu_reboot,
};

#ifdef VPMU_UNVERIFIED
static bool unverified;
module_param(unverified, bool, 0444);
MODULE_PARM_DESC(unverified, "Load although this kernel's series is not verified");

static bool __init kernel_is_refused(void)
{
	if (!unverified)
		pr_err("virtio_pmu: not verified on this kernel's series: use another kernel, or load with unverified=1\n");
	return !unverified;
}
#else
static bool __init kernel_is_refused(void)
{
	return false;
}
#endif

static int __init vpmu_init(void)
{
	int ret;

	if (kernel_is_refused())
		return -EOPNOTSUPP;
	ret = cpuhp_setup_state_multi(CPUHP_AP_ONLINE_DYN, "perf/virtio_pmu:online",
				      vpmu_online, NULL);
	if (ret < 0)
		return ret;
	vpmu_online_state = ret;
	ret = register_virtio_driver(&vpmu_driver);
	if (ret)
		cpuhp_remove_multi_state(vpmu_online_state);
	else
		register_reboot_notifier(&vpmu_reboot_block);
	return ret;
}
module_init(vpmu_init);

static void __exit vpmu_exit(void)
{
	unregister_reboot_notifier(&vpmu_reboot_block);
	unregister_virtio_driver(&vpmu_driver);
	if (vpmu_kept)
		device_forget();
	cpuhp_remove_multi_state(vpmu_online_state);
}
module_exit(vpmu_exit);

MODULE_DESCRIPTION("Paravirtual PMU");
MODULE_LICENSE("GPL");

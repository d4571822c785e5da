// SPDX-License-Identifier: GPL-2.0
/*
 * The driver's list of persistent events.
 *
 * It follows the device's list, because the host starts and ends some of the
 * events, and events can outlive this driver. The driver has a struct vpmu_file
 * for each event, whether the event is open or not. The file holds the event's
 * ring, its name in sysfs, and the programs to wake.
 */
#include <linux/ctype.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/workqueue.h>

#include "vpmu.h"
#include "vpmu_attr.h"
#include "vpmu_file.h"
#include "vpmu_persistent.h"
#include "vpmu_ring.h"

/* Events per request */
#define PERSISTENT_STEP	64

/* Whether sysfs and perf accept the device's name for an event */
static bool name_fits(const char *name)
{
	if (!islower(*name))
		return false;
	for (; *name; name++)
		if (!islower(*name) && !isdigit(*name) && *name != '-' && *name != '_')
			return false;
	return true;
}

/**
 * vpmu_persistent_find() - find a persistent event's file
 * @dev: the device; its persistent.lock is held
 * @id: the event's id
 *
 * Return: the file, or NULL.
 */
struct vpmu_file *vpmu_persistent_find(struct vpmu_device *dev, u64 id)
{
	struct vpmu_file *file;

	lockdep_assert_held(&dev->persistent.lock);
	list_for_each_entry(file, &dev->persistent.files, persist.entry)
		if (file->id == id)
			return file;
	return NULL;
}

/**
 * vpmu_persistent_add() - add a file to the list, with a reference
 * @file: the file; the device's persistent.lock is held
 */
void vpmu_persistent_add(struct vpmu_file *file)
{
	vpmu_file_get(file);
	list_add_tail(&file->persist.entry, &file->dev->persistent.files);
}

/**
 * vpmu_persistent_remove() - take a file off the list, and pass the list's
 *                            reference to the caller
 * @file: the file; the device's persistent.lock is held
 */
void vpmu_persistent_remove(struct vpmu_file *file)
{
	vpmu_persistent_hide(file);
	list_del_init(&file->persist.entry);
}

/**
 * vpmu_persistent_adopt() - create a file for an event that exists on the
 *                           device
 * @dev: the device; its persistent.lock is held
 * @event: its entry in the device's list; the name is not used
 *
 * Return: the file, with a reference that the caller owns; it can be passed to
 * vpmu_persistent_add(). Or an ERR_PTR.
 */
struct vpmu_file *vpmu_persistent_adopt(struct vpmu_device *dev,
					const struct vpmu_persistent_event *event)
{
	u32 flags = le32_to_cpu(event->open.flags);
	struct vpmu_file *file;
	int err;

	file = vpmu_file_alloc(dev);
	if (!file)
		return ERR_PTR(-ENOMEM);
	file->backend = &vpmu_direct_backend;
	file->persist.active = true;
	file->id = le64_to_cpu(event->id);
	file->label = file->id;
	file->place.cpu = vpmu_vcpu_cpu(dev, le32_to_cpu(event->open.context));
	file->persist.operator = le32_to_cpu(event->flags) & VPMU_PERSISTENT_OPERATOR;
	file->spec.request = event->open;
	file->spec.type = vpmu_attr_type(dev, &event->open, &file->spec.config);
	file->spec.trace = vpmu_config_is_trace(file->spec.config);
	file->spec.read_format = le64_to_cpu(event->open.read_format);
	file->spec.engine = le32_to_cpu(event->open.engine);
	file->spec.period = le64_to_cpu(event->open.period);
	file->spec.freq = flags & VPMU_OPEN_FREQ;
	file->control.enabled = flags & VPMU_OPEN_ENABLED;

	/* Records name tasks while task pages are in use. */
	if (vpmu_attr_needs_task(&event->open, file->spec.trace)) {
		err = vpmu_task_get(dev);
		file->tracks = !err;
		if (err && err != -EOPNOTSUPP)
			goto put;
	}
	err = vpmu_ring_adopt(file, event);
	if (err)
		goto put;
	/*
	 * -EBUSY: the device lists an event that this driver opened but did not
	 * make persistent.
	 */
	err = xa_insert_irq(&dev->lookup.files, file->id, file, GFP_KERNEL);
	if (!err)
		return file;
	vpmu_ring_forget(file);
put:
	vpmu_file_put(file);
	return ERR_PTR(err);
}

/*
 * Ends an event that the device no longer lists, because the host or a reset
 * has ended it.
 */
static void persistent_gone(struct vpmu_file *file)
{
	vpmu_persistent_remove(file);
	vpmu_output_ended(file);
	vpmu_link_close(file);
	if (!file->persist.handles) {
		vpmu_file_get(file);
		vpmu_file_close(file);
	}
	vpmu_file_put(file);
}

static void see_known(struct vpmu_device *dev, const struct vpmu_persistent_event *event)
{
	struct vpmu_file *file = vpmu_persistent_find(dev, le64_to_cpu(event->id));
	char name[VPMU_PERSISTENT_NAME + 1] = {};

	if (!file) {
		dev->persistent.has_new = true;
		return;
	}
	file->persist.generation = dev->persistent.generation;
	memcpy(name, event->name, sizeof(event->name));
	if (strcmp(name, file->persist.name)) {
		vpmu_persistent_hide(file);
		memcpy(file->persist.name, name, sizeof(name));
	}
}

static void see_new(struct vpmu_device *dev, const struct vpmu_persistent_event *event)
{
	struct vpmu_file *file;

	if (vpmu_persistent_find(dev, le64_to_cpu(event->id)))
		return;
	file = vpmu_persistent_adopt(dev, event);
	if (IS_ERR(file)) {
		vpmu_err(dev, "persistent event %llu cannot be opened (%ld)\n",
			 le64_to_cpu(event->id), PTR_ERR(file));
		return;
	}
	vpmu_persistent_add(file);
	vpmu_file_put(file);
	memcpy(file->persist.name, event->name, sizeof(event->name));
}

/* Calls @see for each event in the device's list. */
static int persistent_see(struct vpmu_device *dev,
			  void (*see)(struct vpmu_device *dev,
				      const struct vpmu_persistent_event *event))
{
	struct vpmu_persistent_event *events;
	u64 after = 0;
	int got, i;

	events = kcalloc(PERSISTENT_STEP, sizeof(*events), GFP_KERNEL);
	if (!events)
		return -ENOMEM;
	while ((got = vpmu_control_persistent(dev, after, events, PERSISTENT_STEP)) > 0) {
		for (i = 0; i < got; i++)
			see(dev, &events[i]);
		after = le64_to_cpu(events[got - 1].id);
	}
	kfree(events);
	/* A device without persistent events may refuse the request. */
	return got == -EOPNOTSUPP ? 0 : got;
}

/**
 * vpmu_persistent_refresh() - bring the list up to date with the device's list
 * @dev: the device; its persistent.lock is held
 *
 * Events that have ended are removed before new ones are added, because a new
 * event may have the name of an event that has ended.
 *
 * Return: 0 or a negative errno.
 */
int vpmu_persistent_refresh(struct vpmu_device *dev)
{
	struct vpmu_file *file, *next;
	int err;

	lockdep_assert_held(&dev->persistent.lock);
	dev->persistent.generation++;
	dev->persistent.has_new = false;
	err = persistent_see(dev, see_known);
	if (err)
		return err;
	list_for_each_entry_safe(file, next, &dev->persistent.files, persist.entry)
		if (file->persist.generation != dev->persistent.generation)
			persistent_gone(file);
	if (dev->persistent.has_new)
		err = persistent_see(dev, see_new);
	list_for_each_entry(file, &dev->persistent.files, persist.entry)
		if (name_fits(file->persist.name))
			vpmu_persistent_show(file);
	return err;
}

static void persistent_work(struct work_struct *work)
{
	struct vpmu_device *dev = container_of(work, struct vpmu_device, persistent.work);
	int err = 0;

	mutex_lock(&dev->persistent.lock);
	if (!dev->persistent.closed)
		err = vpmu_persistent_refresh(dev);
	mutex_unlock(&dev->persistent.lock);
	if (err)
		vpmu_err(dev, "persistent events cannot be listed (%d)\n", err);
}

/**
 * vpmu_persistent_notice() - schedule a refresh of the list after the host has
 *                            changed the device's list
 * @dev: the device
 *
 * Called from the interrupt handler.
 */
void vpmu_persistent_notice(struct vpmu_device *dev)
{
	schedule_work(&dev->persistent.work);
}

/**
 * vpmu_persistent_resume() - fill the driver's list of persistent events from
 *                            the device's list, at the probe and after sleep
 * @dev: the device
 *
 * Return: 0 or a negative errno.
 */
int vpmu_persistent_resume(struct vpmu_device *dev)
{
	int err;

	mutex_lock(&dev->persistent.lock);
	dev->persistent.closed = false;
	err = vpmu_persistent_refresh(dev);
	mutex_unlock(&dev->persistent.lock);
	return err;
}

/**
 * vpmu_persistent_register() - register the PMU and read the list
 * @dev: the device
 *
 * Return: 0 or a negative errno.
 */
int vpmu_persistent_register(struct vpmu_device *dev)
{
	int err;

	err = vpmu_persistent_pmu_register(dev);
	if (err)
		return err;
	err = vpmu_persistent_resume(dev);
	if (err) {
		vpmu_persistent_close(dev);
		vpmu_persistent_unregister(dev);
	}
	return err;
}

/**
 * vpmu_persistent_close() - empty the list; events that outlive a reset
 *                           continue
 * @dev: the device, which can no longer be opened
 *
 * Events that cannot outlive a reset end here, if the device still answers
 * requests. Open files stay until they are closed.
 */
void vpmu_persistent_close(struct vpmu_device *dev)
{
	struct vpmu_file *file, *next;

	mutex_lock(&dev->persistent.lock);
	dev->persistent.closed = true;
	list_for_each_entry_safe(file, next, &dev->persistent.files, persist.entry) {
		vpmu_persistent_remove(file);
		if (!file->persist.handles) {
			vpmu_file_get(file);
			vpmu_file_close(file);
		}
		vpmu_file_put(file);
	}
	mutex_unlock(&dev->persistent.lock);
}

/**
 * vpmu_persistent_unregister() - unregister the PMU, after the last file is
 *                                freed
 * @dev: the device
 */
void vpmu_persistent_unregister(struct vpmu_device *dev)
{
	vpmu_persistent_pmu_unregister(dev);
}

/**
 * vpmu_persistent_init() - prepare the list
 * @dev: the device
 */
void vpmu_persistent_init(struct vpmu_device *dev)
{
	mutex_init(&dev->persistent.lock);
	INIT_LIST_HEAD(&dev->persistent.files);
	INIT_WORK(&dev->persistent.work, persistent_work);
	dev->persistent.closed = true;
}

/**
 * vpmu_persistent_exit() - cancel a scheduled refresh of the list, and wait for
 *                          a running one
 * @dev: the device, which must have been reset
 */
void vpmu_persistent_exit(struct vpmu_device *dev)
{
	cancel_work_sync(&dev->persistent.work);
}

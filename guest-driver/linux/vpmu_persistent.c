// SPDX-License-Identifier: GPL-2.0
/*
 * Persistent events: which there are, and how they come to be, are opened again and end.
 *
 * The device has the list, for the host makes and ends some of them and all outlive this
 * driver. Here is a file for each, whether or not anybody has it open: it holds the ring,
 * the name in sysfs, and who is told of wakeups. However an event became persistent, its
 * file is the same kind, one without a perf event; see vpmu_direct.c.
 */
#include <linux/capability.h>
#include <linux/ctype.h>
#include <linux/perf_event.h>
#include <linux/security.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/workqueue.h>

#include "vpmu.h"

/* Events asked for in one request. */
#define PERSISTENT_STEP	64

static const char no_name[VPMU_PERSISTENT_NAME];

/* What must be so of a name for sysfs and perf, whatever the device says. */
static bool name_fits(const char *name)
{
	if (!islower(*name))
		return false;
	for (; *name; name++)
		if (!islower(*name) && !isdigit(*name) && *name != '-' && *name != '_')
			return false;
	return true;
}

static struct vpmu_file *persistent_find(struct vpmu_device *dev, u64 id)
{
	struct vpmu_file *file;

	lockdep_assert_held(&dev->persistent_lock);
	list_for_each_entry(file, &dev->persistent, persist)
		if (file->id == id)
			return file;
	return NULL;
}

/* The list has a reference. */
static void persistent_add(struct vpmu_file *file)
{
	vpmu_file_get(file);
	list_add_tail(&file->persist, &file->dev->persistent);
}

static void persistent_remove(struct vpmu_file *file)
{
	vpmu_persistent_hide(file);
	list_del_init(&file->persist);
}

/* A file for an event that this driver has not opened. */
static struct vpmu_file *persistent_adopt(struct vpmu_device *dev,
					  const struct vpmu_persistent_event *event)
{
	u32 flags = le32_to_cpu(event->open.flags);
	struct vpmu_file *file;
	int err;

	file = vpmu_file_alloc(dev);
	if (!file)
		return ERR_PTR(-ENOMEM);
	file->direct = true;
	file->persistent = true;
	file->id = le64_to_cpu(event->id);
	file->cpu = vpmu_vcpu_cpu(dev, le32_to_cpu(event->open.context));
	file->operator = le32_to_cpu(event->flags) & VPMU_PERSISTENT_OPERATOR;
	file->wanted = event->open;
	file->type = vpmu_request_type(dev, &event->open, &file->config);
	file->trace = vpmu_config_is_trace(file->config);
	file->read_format = le64_to_cpu(event->open.read_format);
	file->engine = le32_to_cpu(event->open.engine);
	file->period = le64_to_cpu(event->open.period);
	file->freq = flags & VPMU_OPEN_FREQ;
	file->enabled = flags & VPMU_OPEN_ENABLED;

	/* Records name tasks as long as somebody tells the device who runs. */
	if (vpmu_request_names_tasks(&event->open, file->trace)) {
		err = vpmu_task_get(dev);
		file->tracks = !err;
		if (err && err != -EOPNOTSUPP)
			goto put;
	}
	err = vpmu_ring_adopt(file, event);
	if (err)
		goto put;
	err = xa_err(xa_store_irq(&dev->files, file->id, file, GFP_KERNEL));
	if (!err)
		return file;
	vpmu_ring_forget(file);
put:
	vpmu_file_put(file);
	return ERR_PTR(err);
}

/* The host has ended an event, or the device never said that it would live on. */
static void persistent_gone(struct vpmu_file *file)
{
	persistent_remove(file);
	file->persistent = false;
	vpmu_output_ended(file);
	vpmu_link_close(file);
	if (!file->handles) {
		vpmu_file_get(file);
		vpmu_file_close(file);
	}
	vpmu_file_put(file);
}

static void see_known(struct vpmu_device *dev, const struct vpmu_persistent_event *event)
{
	struct vpmu_file *file = persistent_find(dev, le64_to_cpu(event->id));
	char name[VPMU_PERSISTENT_NAME + 1] = {};

	if (!file) {
		dev->persistent_news = true;
		return;
	}
	file->seen = dev->persistent_turn;
	memcpy(name, event->name, sizeof(event->name));
	if (strcmp(name, file->name)) {
		vpmu_persistent_hide(file);
		memcpy(file->name, name, sizeof(name));
	}
}

static void see_new(struct vpmu_device *dev, const struct vpmu_persistent_event *event)
{
	struct vpmu_file *file;

	if (persistent_find(dev, le64_to_cpu(event->id)))
		return;
	file = persistent_adopt(dev, event);
	if (IS_ERR(file)) {
		dev_err(&dev->vdev->dev, "persistent event %llu cannot be opened (%ld)\n",
			le64_to_cpu(event->id), PTR_ERR(file));
		return;
	}
	persistent_add(file);
	vpmu_file_put(file);
	memcpy(file->name, event->name, sizeof(event->name));
}

/* Shows each that the device has. */
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
	/* A device that has none need not know the request. */
	return got == -EOPNOTSUPP ? 0 : got;
}

/*
 * Makes the list what the device's is. What has gone goes first: what is new may have
 * its name.
 */
static int persistent_refresh(struct vpmu_device *dev)
{
	struct vpmu_file *file, *next;
	int err;

	lockdep_assert_held(&dev->persistent_lock);
	dev->persistent_turn++;
	dev->persistent_news = false;
	err = persistent_see(dev, see_known);
	if (err)
		return err;
	list_for_each_entry_safe(file, next, &dev->persistent, persist)
		if (file->seen != dev->persistent_turn)
			persistent_gone(file);
	if (dev->persistent_news)
		err = persistent_see(dev, see_new);
	list_for_each_entry(file, &dev->persistent, persist)
		if (name_fits(file->name))
			vpmu_persistent_show(file);
	return err;
}

static void persistent_work(struct work_struct *work)
{
	struct vpmu_device *dev = container_of(work, struct vpmu_device, persistent_work);
	int err = 0;

	mutex_lock(&dev->persistent_lock);
	if (!dev->persistent_closed)
		err = persistent_refresh(dev);
	mutex_unlock(&dev->persistent_lock);
	if (err)
		dev_err(&dev->vdev->dev, "persistent events cannot be listed (%d)\n", err);
}

/**
 * vpmu_persistent_notice() - the host has started or ended some
 * @dev: the device
 *
 * Called from the interrupt.
 */
void vpmu_persistent_notice(struct vpmu_device *dev)
{
	schedule_work(&dev->persistent_work);
}

/**
 * vpmu_persistent_get() - a handle more of a persistent event
 * @dev: the device
 * @id: the event's
 *
 * Return: its file, for vpmu_persistent_put(); or an ERR_PTR of -ENOENT or another
 * negative errno.
 */
struct vpmu_file *vpmu_persistent_get(struct vpmu_device *dev, u64 id)
{
	struct vpmu_file *file;
	int err = -ENODEV;

	mutex_lock(&dev->persistent_lock);
	if (dev->persistent_closed)
		goto unlock;
	file = persistent_find(dev, id);
	/* The notice of it may be on its way. */
	if (!file) {
		err = persistent_refresh(dev);
		if (err)
			goto unlock;
		file = persistent_find(dev, id);
	}
	err = -ENOENT;
	if (!file)
		goto unlock;
	/* Its CPU may have come since. */
	if (file->cpu < 0)
		file->cpu = vpmu_vcpu_cpu(dev, le32_to_cpu(file->wanted.context));
	vpmu_file_get(file);
	file->handles++;
	err = 0;
unlock:
	mutex_unlock(&dev->persistent_lock);
	return err ? ERR_PTR(err) : file;
}

/**
 * vpmu_persistent_put() - a handle less of an event, persistent or not
 * @file: the event's; it ends with the last, unless it is persistent
 */
void vpmu_persistent_put(struct vpmu_file *file)
{
	struct vpmu_device *dev = file->dev;
	bool ends;

	mutex_lock(&dev->persistent_lock);
	ends = !--file->handles && (!file->persistent || dev->persistent_closed);
	mutex_unlock(&dev->persistent_lock);
	if (ends)
		vpmu_file_close(file);
	else
		vpmu_file_put(file);
}

/**
 * vpmu_persistent_open() - VPMU_IOC_OPEN by the type of the persistent PMU
 * @dev: the device
 * @args: with no flag but PERF_FLAG_FD_CLOEXEC
 * @attr: with a type and config alone
 *
 * Return: the event's file with a handle more, or an ERR_PTR.
 */
struct vpmu_file *vpmu_persistent_open(struct vpmu_device *dev, const struct vpmu_open *args,
				       const struct perf_event_attr *attr)
{
	struct perf_event_attr rest = *attr;
	struct vpmu_file *file;
	int err = -EINVAL;

	if (!perfmon_capable())
		return ERR_PTR(-EPERM);
	rest.type = 0;
	rest.size = 0;
	rest.config = 0;
	if (memchr_inv(&rest, 0, sizeof(rest)) || args->engine ||
	    args->flags & ~PERF_FLAG_FD_CLOEXEC || args->pid != -1 || args->group_fd != -1)
		return ERR_PTR(-EINVAL);
	file = vpmu_persistent_get(dev, attr->config);
	if (IS_ERR(file))
		return file;
	if (file->cpu != args->cpu)
		goto put;
	err = 0;
	if (vpmu_request_tells_registers(&file->wanted, file->config))
		err = security_locked_down(LOCKDOWN_PERF);
	if (!err)
		return file;
put:
	vpmu_persistent_put(file);
	return ERR_PTR(err);
}

/* What the device need not be asked. */
static bool persistent_fits(const struct vpmu_file *file, const struct vpmu_file *leader)
{
	return !file->task && leader == file && !file->siblings;
}

/* Makes an event persistent on the device; one that is may get another name. */
static int persistent_detach(struct vpmu_file *file, const char *name)
{
	struct vpmu_file *leader = vpmu_group_lock(file);
	struct vpmu_device *dev = file->dev;
	struct perf_event *event = NULL;
	int err = -EINVAL;

	if (!persistent_fits(file, leader))
		goto unlock;
	mutex_lock(&dev->output_lock);
	/* Its output outlives no other event. */
	if (!file->ring || file->ring->id == file->id)
		err = vpmu_control_detach(dev, file->id, name);
	if (!err)
		file->persistent = true;
	if (!err && file->ring)
		file->ring->kept = true;
	mutex_unlock(&dev->output_lock);
	if (err)
		goto unlock;
	if (!file->direct)
		event = vpmu_direct_take(file);
	if (list_empty(&file->persist))
		persistent_add(file);
unlock:
	vpmu_group_unlock(leader);
	if (event)
		perf_event_release_kernel(event);
	return err;
}

/**
 * vpmu_persistent_detach() - as VPMU_IOC_DETACH does
 * @file: whose event lives on from now
 * @name: VPMU_PERSISTENT_NAME bytes; NULL or all zero for the device's choice
 *
 * Return: 0; -EPERM without CAP_PERFMON; -EINVAL for an event of a task, in a group or
 * redirected; or another negative errno, the device's own included.
 */
int vpmu_persistent_detach(struct vpmu_file *file, const char *name)
{
	struct vpmu_device *dev = file->dev;
	int err = -ENODEV;

	if (!perfmon_capable())
		return -EPERM;
	mutex_lock(&dev->persistent_lock);
	if (!dev->persistent_closed)
		err = persistent_detach(file, name ?: no_name);
	/* The device has chosen the name; one that cannot be asked for it now is later. */
	if (!err && persistent_refresh(dev))
		schedule_work(&dev->persistent_work);
	mutex_unlock(&dev->persistent_lock);
	return err;
}

/**
 * vpmu_persistent_attach() - as VPMU_IOC_ATTACH does
 * @file: whose event ends with its last handle from now on
 *
 * Return: 0; -EPERM without CAP_PERFMON, or if it is the host's; -EINVAL if it is not
 * persistent; or another negative errno.
 */
int vpmu_persistent_attach(struct vpmu_file *file)
{
	struct vpmu_device *dev = file->dev;
	int err = -EINVAL;

	if (!perfmon_capable())
		return -EPERM;
	mutex_lock(&dev->persistent_lock);
	if (file->ended)
		err = -ENOENT;
	if (!file->persistent || dev->persistent_closed)
		goto unlock;
	err = vpmu_control_attach(dev, file->id);
	if (err)
		goto unlock;
	persistent_remove(file);
	mutex_lock(&dev->output_lock);
	file->persistent = false;
	if (file->ring)
		file->ring->kept = false;
	mutex_unlock(&dev->output_lock);
	vpmu_file_put(file);
unlock:
	mutex_unlock(&dev->persistent_lock);
	return err;
}

/**
 * vpmu_persistent_register() - find what persistent events there are
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
	mutex_lock(&dev->persistent_lock);
	dev->persistent_closed = false;
	err = persistent_refresh(dev);
	mutex_unlock(&dev->persistent_lock);
	if (err) {
		vpmu_persistent_close(dev);
		vpmu_persistent_unregister(dev);
	}
	return err;
}

/**
 * vpmu_persistent_close() - forget them; those that outlive a reset go on
 * @dev: the device, which nobody opens any more
 *
 * The others end here, while the device can still be told. Files that are open stay
 * until they are closed.
 */
void vpmu_persistent_close(struct vpmu_device *dev)
{
	struct vpmu_file *file, *next;

	mutex_lock(&dev->persistent_lock);
	dev->persistent_closed = true;
	list_for_each_entry_safe(file, next, &dev->persistent, persist) {
		persistent_remove(file);
		if (!file->handles) {
			vpmu_file_get(file);
			vpmu_file_close(file);
		}
		vpmu_file_put(file);
	}
	mutex_unlock(&dev->persistent_lock);
}

/**
 * vpmu_persistent_unregister() - what is left to do once no file is left
 * @dev: the device
 */
void vpmu_persistent_unregister(struct vpmu_device *dev)
{
	vpmu_persistent_pmu_unregister(dev);
}

/**
 * vpmu_persistent_init() - prepare for notices
 * @dev: the device
 */
void vpmu_persistent_init(struct vpmu_device *dev)
{
	mutex_init(&dev->persistent_lock);
	INIT_LIST_HEAD(&dev->persistent);
	INIT_WORK(&dev->persistent_work, persistent_work);
	dev->persistent_closed = true;
}

/**
 * vpmu_persistent_exit() - nothing is under way any more, after the device was reset
 * @dev: the device
 */
void vpmu_persistent_exit(struct vpmu_device *dev)
{
	cancel_work_sync(&dev->persistent_work);
}

// SPDX-License-Identifier: GPL-2.0
/*
 * Persistent events: making an event persistent, opening it again, and ending
 * it.
 *
 * Each persistent event has a struct vpmu_file but no perf event. Programs have
 * it open through views, which are perf events that read it; see vpmu_view.c.
 */
#include <linux/build_bug.h>
#include <linux/capability.h>
#include <linux/ctype.h>
#include <linux/minmax.h>
#include <linux/perf_event.h>
#include <linux/slab.h>
#include <linux/smp.h>
#include <linux/string.h>
#include <linux/uaccess.h>
#include <linux/workqueue.h>

#include "perf_core_private.h"
#include "vpmu.h"
#include "vpmu_event.h"
#include "vpmu_file.h"
#include "vpmu_persistent.h"
#include "vpmu_ring.h"

/*
 * Direct events: events that the device counts without a perf event.
 *
 * A perf event ends when its last descriptor is closed. So an event that is or
 * was persistent has no perf event, only views that read it. The driver sends
 * the event's commands from the CPU that the event counts on.
 */

/**
 * struct direct_call - a command to be sent on the CPU of its event
 * @file: the event's file
 * @op: VPMU_COMMAND_*
 * @value: the command's value
 * @err: 0 or a negative errno
 */
struct direct_call {
	const struct vpmu_file *file;
	u32 op;
	u64 value;
	int err;
};

static void direct_here(void *info)
{
	struct direct_call *call = info;
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(call->file->dev);
	struct vpmu_reply reply;

	call->err = -ENODEV;
	if (vcpu)
		call->err = vpmu_vcpu_command(vcpu, call->op, call->file->id, call->value, &reply);
}

/**
 * vpmu_direct_command() - send a command for a direct event
 * @file: the event
 * @op: VPMU_COMMAND_*
 * @value: the command's value
 *
 * Return: 0; -ENODEV while the CPU of the event is offline; or another negative
 * errno, which may come from the device.
 */
int vpmu_direct_command(struct vpmu_file *file, u32 op, u64 value)
{
	struct direct_call call = { .file = file, .op = op, .value = value };

	if (file->place.cpu < 0 ||
	    smp_call_function_single(file->place.cpu, direct_here, &call, 1))
		return -ENODEV;
	return call.err;
}

/**
 * vpmu_direct_take() - separate a file from its perf event, which has become a
 *                      view
 * @file: the file
 */
static void vpmu_direct_take(struct vpmu_file *file)
{
	spin_lock_irq(&file->dev->lookup.lock);
	WRITE_ONCE(file->direct, true);
	WRITE_ONCE(file->event, NULL);
	spin_unlock_irq(&file->dev->lookup.lock);
	/* It may still use the perf event. */
	flush_work(&file->waiters.limit);
}

/**
 * vpmu_direct_end() - end an event that has no view left
 * @file: its file; drops the caller's reference
 *
 * Only notices can still find the file. If the event is still persistent,
 * vpmu_persistent_close() has taken the file off the list of persistent events,
 * and the event stays on the device if it can outlive a reset. All other events
 * are closed.
 */
static void vpmu_direct_end(struct vpmu_file *file)
{
	struct vpmu_device *dev = file->dev;

	WRITE_ONCE(file->closed, true);
	if (!file->persist.active || !vpmu_ring_forget(file)) {
		if (file->persist.active)
			vpmu_control_attach(dev, file->id);
		vpmu_ring_close(file);
		if (!file->ended)
			vpmu_control_close(dev, file->id);
	}
	/* After a reset, another file may be registered for the event's id. */
	xa_cmpxchg_irq(&dev->lookup.files, file->id, file, NULL, 0);
	vpmu_file_put(file);
}

/*
 * The driver's list of persistent events.
 *
 * It follows the device's list, because the host starts and ends some of the
 * events, and events can outlive this driver. The driver has a struct vpmu_file
 * for each event, whether the event is open or not. The file holds the event's
 * ring, its name in sysfs, and the programs to wake.
 */

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
static struct vpmu_file *vpmu_persistent_find(struct vpmu_device *dev, u64 id)
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
static void vpmu_persistent_add(struct vpmu_file *file)
{
	vpmu_file_get(file);
	list_add_tail(&file->persist.entry, &file->dev->persistent.files);
}

/**
 * vpmu_persistent_remove() - take a file off the list, and pass the list's
 *                            reference to the caller
 * @file: the file; the device's persistent.lock is held
 */
static void vpmu_persistent_remove(struct vpmu_file *file)
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
static struct vpmu_file *vpmu_persistent_adopt(struct vpmu_device *dev,
					       const struct vpmu_persistent_event *event)
{
	u32 flags = le32_to_cpu(event->open.flags);
	struct vpmu_file *file;
	int err;

	file = vpmu_file_alloc(dev);
	if (!file)
		return ERR_PTR(-ENOMEM);
	file->direct = true;
	file->persist.active = true;
	file->id = le64_to_cpu(event->id);
	file->place.cpu = vpmu_vcpu_cpu(dev, le32_to_cpu(event->open.context));
	file->persist.operator = le32_to_cpu(event->flags) & VPMU_PERSISTENT_OPERATOR;
	file->spec.request = event->open;
	vpmu_attr_type(dev, &event->open, &file->spec.config);
	file->spec.trace = vpmu_config_is_trace(file->spec.config);
	file->spec.period = le64_to_cpu(event->open.period);
	file->spec.freq = flags & VPMU_OPEN_FREQ;

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
	if (!file->persist.views) {
		vpmu_file_get(file);
		vpmu_direct_end(file);
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
static int vpmu_persistent_refresh(struct vpmu_device *dev)
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
		if (!file->persist.views) {
			vpmu_file_get(file);
			vpmu_direct_end(file);
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

/*
 * VPMU_IOC_PERSISTENT: the device's list of persistent events, for programs.
 */

/* Events per request */
#define LIST_STEP	8

static void list_entry_fill(struct vpmu_device *dev, const struct vpmu_persistent_event *event,
			    struct vpmu_persistent_entry *entry)
{
	struct perf_event_attr attr;
	u32 map = le32_to_cpu(event->map);

	static_assert(sizeof(attr) >= sizeof(entry->attr));
	memset(entry, 0, sizeof(*entry));
	entry->id = le64_to_cpu(event->id);
	strscpy(entry->name, event->name, sizeof(entry->name));
	/* While the CPU is unknown, this is -1: the program reads U32_MAX. */
	entry->cpu = vpmu_vcpu_cpu(dev, le32_to_cpu(event->open.context));
	entry->pages = le32_to_cpu(event->pages);
	entry->engine = le32_to_cpu(event->open.engine);
	entry->flags = le32_to_cpu(event->flags) & VPMU_PERSISTENT_OPERATOR;
	if (entry->pages && map & VPMU_MAP_WINDOW)
		entry->flags |= VPMU_PERSISTENT_WINDOW;
	if (entry->pages && !(map & VPMU_MAP_WRITABLE))
		entry->flags |= VPMU_PERSISTENT_OVERWRITE;
	vpmu_attr_from_request(dev, &event->open, &attr);
	memcpy(entry->attr, &attr, sizeof(entry->attr));
}

/* Copies up to @count entries; returns their number, or a negative errno. */
static int list_step(struct vpmu_device *dev, u64 *after, u32 count,
		     struct vpmu_persistent_event *events, struct vpmu_persistent_entry *entries)
{
	int got, i;

	got = vpmu_control_persistent(dev, *after, events, min_t(u32, count, LIST_STEP));
	/* A device without persistent events may refuse the request. */
	if (got == -EOPNOTSUPP)
		return 0;
	for (i = 0; i < got; i++) {
		list_entry_fill(dev, &events[i], &entries[i]);
		*after = entries[i].id;
	}
	return got;
}

/**
 * vpmu_persistent_list() - VPMU_IOC_PERSISTENT
 * @dev: the device
 * @arg: the id after which the list starts, and the program's buffer
 *
 * Every program may list the events; opening one needs permission.
 *
 * Return: the number of entries written, or a negative errno.
 */
long vpmu_persistent_list(struct vpmu_device *dev, struct vpmu_persistent __user *arg)
{
	struct vpmu_persistent_entry __user *to;
	struct vpmu_persistent_entry *entries;
	struct vpmu_persistent_event *events;
	struct vpmu_persistent wanted;
	u32 done = 0;
	long ret;
	int got;

	if (copy_from_user(&wanted, arg, sizeof(wanted)))
		return -EFAULT;
	if (wanted.reserved)
		return -EINVAL;
	wanted.count = min_t(u32, wanted.count, INT_MAX);
	to = u64_to_user_ptr(wanted.entries);
	entries = kcalloc(LIST_STEP, sizeof(*entries), GFP_KERNEL);
	events = kcalloc(LIST_STEP, sizeof(*events), GFP_KERNEL);
	ret = -ENOMEM;
	if (!entries || !events)
		goto free;
	while (done < wanted.count) {
		got = list_step(dev, &wanted.after, wanted.count - done, events, entries);
		ret = got;
		if (got < 0)
			goto free;
		if (!got)
			break;
		ret = -EFAULT;
		if (copy_to_user(to + done, entries, got * sizeof(*entries)))
			goto free;
		done += got;
	}
	ret = done;
free:
	kfree(events);
	kfree(entries);
	return ret;
}

/* Changes the number of views, which notices read. */
static void persistent_views(struct vpmu_file *file, int more)
{
	lockdep_assert_held(&file->dev->persistent.lock);
	spin_lock_irq(&file->dev->lookup.lock);
	file->persist.views += more;
	spin_unlock_irq(&file->dev->lookup.lock);
}

/**
 * vpmu_persistent_get() - find a persistent event for a new view
 * @dev: the device
 * @id: the event's id
 *
 * Return: its file, to be released with vpmu_persistent_put(); or an ERR_PTR of
 * -ENOENT or another negative errno.
 */
struct vpmu_file *vpmu_persistent_get(struct vpmu_device *dev, u64 id)
{
	struct vpmu_file *file;
	int err;

	mutex_lock(&dev->persistent.lock);
	err = READ_ONCE(dev->life.lost) ?: -ENODEV;
	if (dev->persistent.closed)
		goto unlock;
	file = vpmu_persistent_find(dev, id);
	/* The notice of a new event may not have been handled yet. */
	if (!file) {
		err = vpmu_persistent_refresh(dev);
		if (err)
			goto unlock;
		file = vpmu_persistent_find(dev, id);
	}
	err = -ENOENT;
	if (!file)
		goto unlock;
	/* The event's CPU may have come online since the list was read. */
	if (file->place.cpu < 0)
		file->place.cpu = vpmu_vcpu_cpu(dev, le32_to_cpu(file->spec.request.context));
	vpmu_file_get(file);
	persistent_views(file, 1);
	err = 0;
unlock:
	mutex_unlock(&dev->persistent.lock);
	return err ? ERR_PTR(err) : file;
}

/**
 * vpmu_persistent_put() - undo vpmu_persistent_get()
 * @file: the event's file; if this was the last view, the event ends, unless it is
 *        persistent
 */
void vpmu_persistent_put(struct vpmu_file *file)
{
	struct vpmu_device *dev = file->dev;
	bool ends;

	mutex_lock(&dev->persistent.lock);
	persistent_views(file, -1);
	ends = !file->persist.views && (!file->persist.active || dev->persistent.closed);
	mutex_unlock(&dev->persistent.lock);
	if (ends)
		vpmu_direct_end(file);
	else
		vpmu_file_put(file);
}

/*
 * Updates the list, to get the name that the event has on the device. After an
 * error, schedules another update.
 */
static void persistent_name(struct vpmu_device *dev)
{
	if (vpmu_persistent_refresh(dev))
		schedule_work(&dev->persistent.work);
}

/*
 * Makes the event of a file persistent on the device, or renames a persistent
 * event.
 */
static int persistent_keep(struct vpmu_file *file, const char *name)
{
	struct vpmu_device *dev = file->dev;
	int err = -EINVAL;

	mutex_lock(&dev->output_lock);
	/*
	 * Refuse a redirected event: it writes to the ring of another event,
	 * which may end before this event.
	 */
	if (!file->output.ring || file->output.ring->id == file->id)
		err = vpmu_control_detach(dev, file->id, name);
	if (!err)
		file->persist.active = true;
	if (!err && file->output.ring)
		file->output.ring->kept = true;
	mutex_unlock(&dev->output_lock);
	if (!err && list_empty(&file->persist.entry))
		vpmu_persistent_add(file);
	return err;
}

/*
 * Makes an event with a file persistent; the perf event becomes a view. The view
 * takes over the event's reference on the file.
 */
static int persistent_take_file(struct perf_event *event, const char *name)
{
	struct vpmu_event *own = event->pmu_private;
	struct vpmu_file *file = own->file;
	struct vpmu_view *view;
	int err;

	view = vpmu_view_alloc(event);
	if (!view)
		return -ENOMEM;
	err = persistent_keep(file, name);
	if (err) {
		vpmu_view_close(view);
		return err;
	}
	file->spec.period = own->period;
	persistent_views(file, 1);
	vpmu_view_join(view, file);
	vpmu_view_take(view);
	vpmu_direct_take(file);
	return 0;
}

/*
 * Makes an event of perf core persistent on the device; the perf event becomes
 * a view of the persistent event.
 */
static int persistent_take(struct perf_event *event, const char *name)
{
	struct vpmu_event *own = event->pmu_private;
	struct vpmu_persistent_event as = { .id = cpu_to_le64(own->id) };
	struct vpmu_device *dev = own->dev;
	struct vpmu_ring *ring = NULL;
	struct vpmu_file *file;
	struct vpmu_view *view;
	int err;

	err = vpmu_event_request(own, &as.open);
	if (err)
		return err;
	view = vpmu_view_alloc(event);
	if (own->sampler)
		ring = vpmu_sampling_ring(own);
	err = -ENOMEM;
	if (!view || (own->sampler && !ring))
		goto free;
	err = vpmu_control_detach(dev, own->id, name);
	if (err)
		goto free;
	file = vpmu_persistent_adopt(dev, &as);
	if (IS_ERR(file)) {
		err = PTR_ERR(file);
		vpmu_control_attach(dev, own->id);
		goto free;
	}
	if (ring)
		vpmu_ring_attach(file, ring);
	vpmu_persistent_add(file);
	/*
	 * The view takes over the reference from vpmu_persistent_adopt().
	 * vpmu_view_open() cannot fail here, because the records in a sampler's
	 * ring have all fields that the view needs.
	 */
	persistent_views(file, 1);
	vpmu_view_open(view, file);
	vpmu_view_take(view);
	return 0;
free:
	if (ring)
		vpmu_ring_free(ring);
	if (view)
		vpmu_view_close(view);
	return err;
}

static int persistent_detach(struct perf_event *event, const char *name)
{
	struct vpmu_event *own = event->pmu_private;

	if (own->view)
		return persistent_keep(own->view->file, name);
	if (event->cpu < 0 || own->task || !perf_core_is_alone(event))
		return -EINVAL;
	if (!own->id)
		return -EIO;
	if (own->file)
		return persistent_take_file(event, name);
	/*
	 * Samples with these fields must be replayed immediately after the
	 * overflow. Samples of a view may be replayed later.
	 */
	if (event->attr.sample_type & VPMU_SAMPLE_PROMPT)
		return -EOPNOTSUPP;
	return persistent_take(event, name);
}

/**
 * vpmu_persistent_detach() - VPMU_IOC_DETACH
 * @event: perf core's event, of the PMU vpmu, which then becomes a view of the
 *         persistent event
 * @name: VPMU_PERSISTENT_NAME bytes, as for vpmu_control_detach()
 *
 * Return: 0; -EPERM without CAP_PERFMON; -EINVAL for an event of a task, in a
 * group or with a redirected ring; -EOPNOTSUPP for an event whose samples perf
 * core must make immediately; or another negative errno, which may come from the
 * device.
 */
int vpmu_persistent_detach(struct perf_event *event, const char *name)
{
	struct vpmu_event *own = event->pmu_private;
	struct vpmu_device *dev = own->dev;
	int err = -ENODEV;

	if (!perfmon_capable())
		return -EPERM;
	mutex_lock(&dev->persistent.lock);
	if (!dev->persistent.closed)
		err = persistent_detach(event, name);
	if (!err)
		persistent_name(dev);
	mutex_unlock(&dev->persistent.lock);
	return err;
}

/**
 * vpmu_persistent_detach_view() - VPMU_IOC_DETACH on a view: renames the event,
 *                                 or makes it persistent again
 * @view: the view
 * @name: as for vpmu_persistent_detach()
 *
 * Return: 0; -EPERM without CAP_PERFMON; or another negative errno.
 */
int vpmu_persistent_detach_view(struct vpmu_view *view, const char *name)
{
	struct vpmu_device *dev = view->file->dev;
	int err = -ENODEV;

	if (!perfmon_capable())
		return -EPERM;
	mutex_lock(&dev->persistent.lock);
	if (!dev->persistent.closed)
		err = persistent_keep(view->file, name);
	if (!err)
		persistent_name(dev);
	mutex_unlock(&dev->persistent.lock);
	return err;
}

/**
 * vpmu_persistent_attach() - VPMU_IOC_ATTACH
 * @file: the file of the event; on success, the event ends with its last view
 *
 * Return: 0; -EPERM without CAP_PERFMON or for an event of the host; -EINVAL if
 * the event is not persistent; or another negative errno.
 */
int vpmu_persistent_attach(struct vpmu_file *file)
{
	struct vpmu_device *dev = file->dev;
	int err = -EINVAL;

	if (!perfmon_capable())
		return -EPERM;
	mutex_lock(&dev->persistent.lock);
	if (file->ended)
		err = -ENOENT;
	if (!file->persist.active || dev->persistent.closed)
		goto unlock;
	err = vpmu_control_attach(dev, file->id);
	if (err)
		goto unlock;
	vpmu_persistent_remove(file);
	mutex_lock(&dev->output_lock);
	file->persist.active = false;
	if (file->output.ring)
		file->output.ring->kept = false;
	mutex_unlock(&dev->output_lock);
	vpmu_file_put(file);
unlock:
	mutex_unlock(&dev->persistent.lock);
	return err;
}

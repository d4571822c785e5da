// SPDX-License-Identifier: GPL-2.0
/*
 * Persistent events: making an event persistent, opening it again, and ending
 * it.
 *
 * Each persistent event has a struct vpmu_file but no perf event, whichever
 * interface it was opened with; see vpmu_backend_direct.c. An event's handles
 * are its open files and perf core's views of it.
 */
#include <linux/capability.h>
#include <linux/perf_event.h>
#include <linux/security.h>
#include <linux/string.h>
#include <linux/workqueue.h>

#include "perf_core_private.h"
#include "vpmu.h"
#include "vpmu_attr.h"
#include "vpmu_event.h"
#include "vpmu_file.h"
#include "vpmu_persistent.h"
#include "vpmu_ring.h"
#include "vpmu_view.h"

static const char no_name[VPMU_PERSISTENT_NAME];

/**
 * vpmu_persistent_get() - get a handle of a persistent event
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
	file->persist.handles++;
	err = 0;
unlock:
	mutex_unlock(&dev->persistent.lock);
	return err ? ERR_PTR(err) : file;
}

/**
 * vpmu_persistent_put() - drop a handle of an event, persistent or not
 * @file: the event's file; if this was the last handle, the event ends, unless
 *        it is persistent
 */
void vpmu_persistent_put(struct vpmu_file *file)
{
	struct vpmu_device *dev = file->dev;
	bool ends;

	mutex_lock(&dev->persistent.lock);
	ends = !--file->persist.handles && (!file->persist.active || dev->persistent.closed);
	mutex_unlock(&dev->persistent.lock);
	if (ends)
		vpmu_file_close(file);
	else
		vpmu_file_put(file);
}

/**
 * vpmu_persistent_open() - handle VPMU_IOC_OPEN if the attr's type is that of
 *                          the persistent PMU
 * @dev: the device
 * @args: arguments, without flags other than PERF_FLAG_FD_CLOEXEC
 * @attr: the attr, with only type and config set
 *
 * Return: the event's file with another handle, or an ERR_PTR.
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
	if (file->place.cpu != args->cpu)
		goto put;
	err = 0;
	if (vpmu_attr_opens_registers(&file->spec.request, file->spec.config))
		err = security_locked_down(LOCKDOWN_PERF);
	if (!err)
		return file;
put:
	vpmu_persistent_put(file);
	return ERR_PTR(err);
}

/* Checks that need no request to the device */
static bool persistent_fits(const struct vpmu_file *file, const struct vpmu_file *leader)
{
	return !file->place.task && leader == file && !file->group.siblings;
}

/* Makes an event persistent on the device, or renames a persistent event. */
static int persistent_detach(struct vpmu_file *file, const char *name)
{
	struct vpmu_file *leader = vpmu_group_lock(file);
	struct vpmu_device *dev = file->dev;
	struct perf_event *event = NULL;
	int err = -EINVAL;

	if (!persistent_fits(file, leader))
		goto unlock;
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
	if (err)
		goto unlock;
	if (!vpmu_file_is_direct(file))
		event = vpmu_direct_take(file);
	if (list_empty(&file->persist.entry))
		vpmu_persistent_add(file);
unlock:
	vpmu_group_unlock(leader);
	if (event)
		perf_event_release_kernel(event);
	return err;
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

/**
 * vpmu_persistent_detach() - VPMU_IOC_DETACH
 * @file: the file of the event; on success, the event is persistent
 * @name: VPMU_PERSISTENT_NAME bytes, as for vpmu_control_detach(); NULL has the
 *        same effect as zeros
 *
 * Return: 0; -EPERM without CAP_PERFMON; -EINVAL if the event counts for a
 * task, is in a group, or is redirected; or another negative errno, which may
 * come from the device.
 */
int vpmu_persistent_detach(struct vpmu_file *file, const char *name)
{
	struct vpmu_device *dev = file->dev;
	int err = -ENODEV;

	if (!perfmon_capable())
		return -EPERM;
	mutex_lock(&dev->persistent.lock);
	if (!dev->persistent.closed)
		err = persistent_detach(file, name ?: no_name);
	if (!err)
		persistent_name(dev);
	mutex_unlock(&dev->persistent.lock);
	return err;
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

	if (!own->id)
		return -EIO;
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
	 * The view is the first handle of the file, and takes over the
	 * reference from vpmu_persistent_adopt(). vpmu_view_open() cannot fail
	 * here, because the records in a sampler's ring have all fields that
	 * the view needs.
	 */
	file->persist.handles = 1;
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

static int persistent_detach_perf(struct perf_event *event, const char *name)
{
	struct vpmu_event *own = event->pmu_private;

	if (own->view)
		return persistent_detach(own->view->file, name);
	if (event->cpu < 0 || own->task || !perf_core_is_alone(event))
		return -EINVAL;
	/*
	 * Samples with these fields must be replayed immediately after the
	 * overflow. Samples of a view may be replayed later.
	 */
	if (event->attr.sample_type & VPMU_SAMPLE_PROMPT)
		return -EOPNOTSUPP;
	return persistent_take(event, name);
}

/**
 * vpmu_persistent_detach_perf() - make an event of perf_event_open(2)
 *                                 persistent
 * @event: perf core's event, which then becomes a view of the persistent event
 * @name: as for vpmu_persistent_detach()
 *
 * Return: 0; -EPERM without CAP_PERFMON; -EINVAL for an event of a task or in a
 * group; -EOPNOTSUPP for an event whose samples perf core must
 * make immediately; or another negative errno, which may come from the device.
 */
int vpmu_persistent_detach_perf(struct perf_event *event, const char *name)
{
	struct vpmu_event *own = event->pmu_private;
	struct vpmu_device *dev = own->dev;
	int err = -ENODEV;

	if (!perfmon_capable())
		return -EPERM;
	mutex_lock(&dev->persistent.lock);
	if (!dev->persistent.closed)
		err = persistent_detach_perf(event, name);
	if (!err)
		persistent_name(dev);
	mutex_unlock(&dev->persistent.lock);
	return err;
}

/**
 * vpmu_persistent_attach() - VPMU_IOC_ATTACH
 * @file: the file of the event; on success, the event ends when its last handle
 *        is dropped
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

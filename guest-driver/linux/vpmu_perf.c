// SPDX-License-Identifier: GPL-2.0
/*
 * VPMU_IOC_PERF: this driver's calls on descriptors of perf_event_open(2).
 *
 * perf core does not pass ioctls to a PMU, so a program passes the descriptor
 * to /dev/vpmu. Any holder of the descriptor may make these calls: each changes
 * only that event and, for a link, another event whose descriptor the caller
 * holds. The calls for persistence also need CAP_PERFMON.
 */
#include <linux/capability.h>
#include <linux/dcache.h>
#include <linux/err.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <linux/perf_event.h>
#include <linux/smp.h>
#include <linux/string.h>
#include <linux/uaccess.h>

#include "perf_core_private.h"
#include "vpmu.h"
#include "vpmu_event.h"
#include "vpmu_file.h"
#include "vpmu_persistent.h"
#include "vpmu_view.h"

/*
 * Whether a file is a perf event. This function cannot check for perf core's
 * file operations, because perf core does not export them. Instead, it checks
 * that the file is an anonymous inode with the name that perf gives to its
 * files: only the kernel can assign that name.
 */
static bool file_is_perf(const struct file *filp)
{
	return file_inode(filp)->i_sb->s_magic == ANON_INODE_FS_MAGIC &&
	       !strcmp(filp->f_path.dentry->d_name.name, "[perf_event]");
}

/*
 * Returns the file of an event of @dev, to be released with fput(); or an
 * ERR_PTR of -EBADF.
 */
static struct file *perf_fget(const struct vpmu_device *dev, int fd)
{
	struct file *filp = fget(fd);
	const struct perf_event *event;

	if (!filp)
		return ERR_PTR(-EBADF);
	if (file_is_perf(filp)) {
		event = filp->private_data;
		if (event->pmu == &dev->counting.pmu || event->pmu == &dev->persistent.pmu)
			return filp;
	}
	fput(filp);
	return ERR_PTR(-EBADF);
}

/* Returns the struct vpmu_view of @event; NULL if @event is not a view. */
static struct vpmu_view *perf_view(const struct vpmu_device *dev, const struct perf_event *event)
{
	const struct vpmu_event *own = event->pmu_private;

	return event->pmu == &dev->persistent.pmu ? event->pmu_private : own->view;
}

/*
 * Flushes an event. To flush samples, this function reads the event, and then
 * replays the samples. Both cover each event of the family.
 */
static int perf_flush(const struct vpmu_device *dev, struct perf_event *event)
{
	struct vpmu_event *own = event->pmu_private;
	struct vpmu_view *view = perf_view(dev, event);
	u64 enabled, running;
	int err;

	if (view) {
		err = vpmu_flush(view->file, false);
		vpmu_view_show(view);
		return err;
	}
	perf_event_read_value(event, &enabled, &running);
	if (own->sampler)
		vpmu_sampling_flush(own);
	return own->unpaid_ns == U64_MAX ? -EIO : 0;
}

/* The event's id on the device */
static u64 perf_id(const struct vpmu_device *dev, const struct perf_event *event)
{
	const struct vpmu_view *view = perf_view(dev, event);
	const struct vpmu_event *own = event->pmu_private;

	return view ? view->file->id : own->id;
}

static int perf_detach(const struct vpmu_device *dev, struct perf_event *event,
		       struct vpmu_detach __user *arg)
{
	struct vpmu_view *view = perf_view(dev, event);
	struct vpmu_detach detach;

	if (copy_from_user(&detach, arg, sizeof(detach)))
		return -EFAULT;
	/*
	 * The id does not change. Write it first, so that a fault leaves the
	 * event unchanged.
	 */
	if (put_user(perf_id(dev, event), &arg->id))
		return -EFAULT;
	if (view)
		return vpmu_persistent_detach(view->file, detach.name);
	return vpmu_persistent_detach_perf(event, detach.name);
}

static int perf_attach(const struct vpmu_device *dev, struct perf_event *event)
{
	struct vpmu_view *view = perf_view(dev, event);

	if (view)
		return vpmu_persistent_attach(view->file);
	return perfmon_capable() ? -EINVAL : -EPERM;
}

/*
 * Sets vpmu_event::linked, so that @event is not opened again after a reset.
 * Does nothing for a view.
 */
static void perf_mark_linked(const struct vpmu_device *dev, struct perf_event *event)
{
	struct vpmu_event *own = event->pmu_private;

	if (!perf_view(dev, event))
		WRITE_ONCE(own->linked, true);
}

static int perf_link(struct vpmu_device *dev, struct perf_event *event, u64 fd,
		     enum vpmu_role role)
{
	struct perf_event *target;
	struct file *filp;
	int err = -EINVAL;

	filp = fd <= INT_MAX ? perf_fget(dev, fd) : ERR_PTR(-EBADF);
	if (IS_ERR(filp))
		return PTR_ERR(filp);
	target = filp->private_data;
	if (event == target || event->cpu != target->cpu ||
	    event->hw.target != target->hw.target)
		goto put;
	/*
	 * Refuse events with inheritance: the started or stopped state of a
	 * linked event belongs to one task, but perf core swaps the contexts of
	 * tasks that inherited the same events.
	 */
	err = event->attr.inherit || target->attr.inherit ?
		-EOPNOTSUPP : vpmu_link_ids(dev, perf_id(dev, event), perf_id(dev, target), role);
	if (!err) {
		perf_mark_linked(dev, event);
		perf_mark_linked(dev, target);
	}
put:
	fput(filp);
	return err;
}

/**
 * vpmu_perf_call() - VPMU_IOC_PERF
 * @dev: the device
 * @arg: a struct vpmu_perf
 *
 * Return: 0; -EBADF for a descriptor that is not a perf event of this device;
 * -EOPNOTSUPP for a call that such events do not support; otherwise what the
 * same call returns for an event of /dev/vpmu.
 */
int vpmu_perf_call(struct vpmu_device *dev, const void __user *arg)
{
	struct perf_event *event;
	struct vpmu_perf call;
	struct file *filp;
	int err;

	if (copy_from_user(&call, arg, sizeof(call)))
		return -EFAULT;
	filp = perf_fget(dev, call.fd);
	if (IS_ERR(filp))
		return PTR_ERR(filp);
	event = filp->private_data;
	switch (call.call) {
	case VPMU_IOC_FLUSH:
		err = call.arg ? -EINVAL : perf_flush(dev, event);
		break;
	case VPMU_IOC_DETACH:
		err = perf_detach(dev, event, u64_to_user_ptr(call.arg));
		break;
	case VPMU_IOC_ATTACH:
		err = call.arg ? -EINVAL : perf_attach(dev, event);
		break;
	case VPMU_IOC_SET_STARTER:
		err = perf_link(dev, event, call.arg, VPMU_STARTER);
		break;
	case VPMU_IOC_SET_STOPPER:
		err = perf_link(dev, event, call.arg, VPMU_STOPPER);
		break;
	default:
		err = -EOPNOTSUPP;
	}
	fput(filp);
	return err;
}

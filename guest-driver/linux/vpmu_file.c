// SPDX-License-Identifier: GPL-2.0
/*
 * File operations of descriptors from VPMU_IOC_OPEN: the same operations as for
 * perf events, with perf's ioctl numbers.
 */
#include <linux/anon_inodes.h>
#include <linux/bpf.h>
#include <linux/capability.h>
#include <linux/fcntl.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/perf_event.h>
#include <linux/poll.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/uaccess.h>

#include "perf_core_private.h"
#include "vpmu.h"
#include "vpmu_attr.h"
#include "vpmu_file.h"
#include "vpmu_persistent.h"
#include "vpmu_ring.h"

/**
 * vpmu_file_overflow() - overflow handler that only marks the perf events of a
 *                        vpmu_file
 * @event: unused
 * @data: unused
 * @regs: unused
 *
 * perf core never calls this handler, because it does not know that the event
 * samples. But it copies the handler, and the handler's context (the file), to
 * inherited events, so that vpmu_file_of() also recognizes those.
 */
void vpmu_file_overflow(struct perf_event *event, struct perf_sample_data *data,
			struct pt_regs *regs)
{
}

/**
 * vpmu_file_of() - get the file of a perf event
 * @event: the event
 *
 * Return: the file of an event opened with VPMU_IOC_OPEN, or NULL.
 */
struct vpmu_file *vpmu_file_of(const struct perf_event *event)
{
	return perf_core_handler_context(event, vpmu_file_overflow);
}

static void file_gone(struct irq_work *work)
{
	vpmu_output_gone(container_of(work, struct vpmu_file, waiters.gone));
}

/**
 * vpmu_file_alloc() - allocate a file
 * @dev: the device
 *
 * Return: the file, with one reference, or NULL.
 */
struct vpmu_file *vpmu_file_alloc(struct vpmu_device *dev)
{
	struct vpmu_file *file = kzalloc(sizeof(*file), GFP_KERNEL);

	if (!file)
		return NULL;
	kref_init(&file->ref);
	mutex_init(&file->group.lock);
	INIT_LIST_HEAD(&file->family);
	INIT_LIST_HEAD(&file->group.members);
	INIT_LIST_HEAD(&file->group.entry);
	INIT_LIST_HEAD(&file->output.entry);
	INIT_LIST_HEAD(&file->output.poller);
	INIT_LIST_HEAD(&file->waiters.entry);
	INIT_LIST_HEAD(&file->persist.entry);
	address_space_init_once(&file->output.mapping);
	file->output.mapping.a_ops = &empty_aops;
	init_waitqueue_head(&file->waiters.queue);
	init_irq_work(&file->waiters.gone, file_gone);
	vpmu_link_init(&file->links);
	vpmu_device_get(dev);
	file->dev = dev;
	file->backend = &vpmu_perf_backend;
	return file;
}

/**
 * vpmu_file_get() - get a reference on a file
 * @file: the file
 */
void vpmu_file_get(struct vpmu_file *file)
{
	kref_get(&file->ref);
}

static void file_free(struct kref *ref)
{
	struct vpmu_file *file = container_of(ref, struct vpmu_file, ref);
	struct vpmu_device *dev = file->dev;

	irq_work_sync(&file->waiters.gone);
	vpmu_output_forget(file);
	if (file->tracks)
		vpmu_task_put();
	/* This does not recurse further: a leader does not have a leader. */
	if (file->group.leader)
		vpmu_file_put(file->group.leader);
	kfree_rcu(file, rcu);
	vpmu_device_put(dev);
}

/**
 * vpmu_file_put() - drop a reference on a file
 * @file: the file
 */
void vpmu_file_put(struct vpmu_file *file)
{
	kref_put(&file->ref, file_free);
}

/**
 * vpmu_file_shares_context() - whether perf allows two open events to share a
 *                              ring
 * @file: one event's file
 * @other: the other event's file
 *
 * Return: true if both are for the same CPU, or for the same task on all CPUs.
 */
bool vpmu_file_shares_context(const struct vpmu_file *file, const struct vpmu_file *other)
{
	return file->dev == other->dev && file->place.cpu == other->place.cpu &&
	       (file->place.cpu != -1 || file->place.task == other->place.task);
}

/**
 * vpmu_file_fget() - find an open event by its descriptor
 * @fd: the descriptor
 *
 * Return: the open file, which the caller must release with fput(); or an
 * ERR_PTR of -EBADF if @fd is not the descriptor of an event.
 */
struct file *vpmu_file_fget(int fd)
{
	struct file *filp = fget(fd);

	if (filp && filp->f_op == &vpmu_file_fops)
		return filp;
	if (filp)
		fput(filp);
	return ERR_PTR(-EBADF);
}

/**
 * vpmu_file_open() - create a struct file for a new descriptor of an event
 * @file: the event; on success, the struct file takes over the caller's handle
 *
 * Return: the struct file, or an ERR_PTR.
 */
struct file *vpmu_file_open(struct vpmu_file *file)
{
	struct file *filp = anon_inode_getfile("[vpmu]", &vpmu_file_fops, file, O_RDWR);

	if (IS_ERR(filp))
		return filp;
	/*
	 * An event has no read position. Instead, f_pos holds the last wakeup
	 * that poll() has reported.
	 */
	stream_open(file_inode(filp), filp);
	/*
	 * All descriptors of the event share one address_space, through which
	 * vpmu_window_revoke() finds all mappings.
	 */
	file->output.mapping.host = file_inode(filp);
	filp->f_mapping = &file->output.mapping;
	return filp;
}

/**
 * vpmu_file_close() - end an event
 * @file: its file; drops the caller's reference
 */
void vpmu_file_close(struct vpmu_file *file)
{
	vpmu_group_leave(file);
	file->backend->close(file);
	vpmu_link_close(file);
	vpmu_file_put(file);
}

static int file_release(struct inode *inode, struct file *filp)
{
	vpmu_persistent_put(filp->private_data);
	return 0;
}

static ssize_t file_read(struct file *filp, char __user *buf, size_t count, loff_t *ppos)
{
	ssize_t size;
	u64 *values;

	/*
	 * As in perf, end of file means that the event is in the error state.
	 */
	size = vpmu_read(filp->private_data, &values, count);
	if (size > 0 && copy_to_user(buf, values, size))
		size = -EFAULT;
	kfree(values);
	return size;
}

static bool file_has_children(struct perf_event *event)
{
	bool has;

	perf_core_lock_family(event);
	has = perf_core_has_children(event);
	perf_core_unlock_family(event);
	return has;
}

static __poll_t file_poll(struct file *filp, poll_table *wait)
{
	struct vpmu_file *file = filp->private_data;

	poll_wait(filp, &file->waiters.queue, wait);
	if (READ_ONCE(file->error))
		return EPOLLHUP | EPOLLERR;
	if (file->place.task && perf_core_task_ended(file->event) &&
	    !file_has_children(file->event))
		return EPOLLHUP;
	return vpmu_output_poll(file, &filp->f_pos);
}

static int file_fasync(int fd, struct file *filp, int on)
{
	struct vpmu_file *file = filp->private_data;
	struct inode *inode = file_inode(filp);
	int ret;

	inode_lock(inode);
	/*
	 * Without signals, the notices of a ring name any event that writes to
	 * it. An event without records has no notices, and refuses the request.
	 */
	if (on && !file->waiters.fasync)
		vpmu_control_signal(file->dev, file->id, true);
	ret = fasync_helper(fd, filp, on, &file->waiters.fasync);
	if (!on && ret > 0 && !file->waiters.fasync)
		vpmu_control_signal(file->dev, file->id, false);
	inode_unlock(inode);
	return ret < 0 ? ret : 0;
}

static long file_refresh(struct vpmu_file *file, int overflows)
{
	if (!file->spec.period || file->spec.inherit || overflows < 0)
		return -EINVAL;
	/*
	 * As in perf, an argument of zero enables the event for its remaining
	 * overflows, or without a limit if none remain.
	 */
	if (!overflows)
		return vpmu_group_switch(file, false, true);
	return vpmu_group_refresh(file, overflows);
}

static long file_period(struct vpmu_file *file, u64 __user *arg)
{
	u64 period;

	if (copy_from_user(&period, arg, sizeof(period)))
		return -EFAULT;
	if (!file->spec.period || !period)
		return -EINVAL;
	if (file->spec.freq ? period > file->dev->info.max_sample_rate : period >> 63)
		return -EINVAL;
	return vpmu_group_period(file, period);
}

static long file_wakeup(struct vpmu_file *file, const struct vpmu_wakeup __user *arg)
{
	struct vpmu_wakeup wakeup;

	if (copy_from_user(&wakeup, arg, sizeof(wakeup)))
		return -EFAULT;
	return vpmu_output_interval(file, &wakeup);
}

static long file_set_output(struct vpmu_file *file, unsigned long fd)
{
	struct file *target;
	long err;

	if (fd == -1UL)
		return vpmu_output_redirect(file, NULL);
	target = vpmu_file_fget(fd);
	if (IS_ERR(target))
		return PTR_ERR(target);
	err = vpmu_output_redirect(file, target->private_data);
	fput(target);
	return err;
}

static long file_link(struct vpmu_file *file, unsigned long fd, enum vpmu_role role)
{
	struct file *target;
	long err;

	if (fd > INT_MAX)
		return -EBADF;
	target = vpmu_file_fget(fd);
	if (IS_ERR(target))
		return PTR_ERR(target);
	err = vpmu_link_set(file, target->private_data, role);
	fput(target);
	return err;
}

static long file_modify(struct vpmu_file *file, struct perf_event_attr __user *arg)
{
	struct perf_event_attr attr;
	int err = vpmu_attr_copy(&attr, arg);

	if (err)
		return err;
	/* As in perf, only breakpoints can be modified. */
	return attr.type == file->spec.type ? -EOPNOTSUPP : -EINVAL;
}

/* Always fails: only tracepoints and instruction traces have filters. */
static long file_set_filter(const char __user *arg)
{
	char *filter = strndup_user(arg, PAGE_SIZE);

	if (IS_ERR(filter))
		return PTR_ERR(filter);
	kfree(filter);
	return -EINVAL;
}

/*
 * Always fails: perf core runs BPF programs when it handles an overflow. But it
 * does not handle overflows of events of /dev/vpmu, because the device writes
 * their samples directly to a ring.
 */
static long file_set_bpf(u32 fd)
{
	struct bpf_prog *prog = bpf_prog_get_type_dev(fd, BPF_PROG_TYPE_PERF_EVENT, false);

	if (IS_ERR(prog))
		return PTR_ERR(prog);
	bpf_prog_put(prog);
	return -EOPNOTSUPP;
}

static long file_detach(struct vpmu_file *file, struct vpmu_detach __user *arg)
{
	struct vpmu_detach detach;

	if (copy_from_user(&detach, arg, sizeof(detach)))
		return -EFAULT;
	/*
	 * Detaching does not change the id. Write the id to the program first:
	 * if this faults, the event stays unchanged.
	 */
	if (put_user(file->id, &arg->id))
		return -EFAULT;
	return vpmu_persistent_detach(file, detach.name);
}

static long file_ioctl(struct file *filp, unsigned int cmd, unsigned long arg)
{
	bool whole = arg & PERF_IOC_FLAG_GROUP;
	struct vpmu_file *file = filp->private_data;
	void __user *user = (void __user *)arg;
	int failure = READ_ONCE(file->failure);

	if (failure && cmd != PERF_EVENT_IOC_ID)
		return failure;
	switch (cmd) {
	case PERF_EVENT_IOC_ENABLE:
		return vpmu_group_switch(file, whole, true);
	case PERF_EVENT_IOC_DISABLE:
		return vpmu_group_switch(file, whole, false);
	case PERF_EVENT_IOC_RESET:
		return vpmu_group_reset(file, whole);
	case PERF_EVENT_IOC_REFRESH:
		return file_refresh(file, arg);
	case PERF_EVENT_IOC_PERIOD:
		return file_period(file, user);
	case PERF_EVENT_IOC_ID:
		return put_user(file->label, (u64 __user *)user);
	case PERF_EVENT_IOC_SET_OUTPUT:
		return file_set_output(file, arg);
	case PERF_EVENT_IOC_PAUSE_OUTPUT:
		return vpmu_output_pause(file, arg);
	case PERF_EVENT_IOC_MODIFY_ATTRIBUTES:
		return file_modify(file, user);
	case PERF_EVENT_IOC_SET_FILTER:
		return file_set_filter(user);
	case PERF_EVENT_IOC_SET_BPF:
		return file_set_bpf(arg);
	case PERF_EVENT_IOC_QUERY_BPF:
		/* Same errors as in perf for an event without a tracepoint. */
		return perfmon_capable() ? -EINVAL : -EPERM;
	case VPMU_IOC_DETACH:
		return file_detach(file, user);
	case VPMU_IOC_ATTACH:
		return vpmu_persistent_attach(file);
	case VPMU_IOC_ENGINE:
		return put_user(file->spec.engine, (u32 __user *)user);
	case VPMU_IOC_WAKEUP:
		return file_wakeup(file, user);
	case VPMU_IOC_SET_STARTER:
		return file_link(file, arg, VPMU_STARTER);
	case VPMU_IOC_SET_STOPPER:
		return file_link(file, arg, VPMU_STOPPER);
	case VPMU_IOC_FLUSH:
		if (arg & ~(unsigned long)PERF_IOC_FLAG_GROUP)
			return -EINVAL;
		return vpmu_flush(file, whole);
	default:
		return -ENOTTY;
	}
}

const struct file_operations vpmu_file_fops = {
	.owner		= THIS_MODULE,
	.release	= file_release,
	.read		= file_read,
	.poll		= file_poll,
	.unlocked_ioctl	= file_ioctl,
	.compat_ioctl	= compat_ptr_ioctl,
	.mmap		= vpmu_ring_mmap,
	.fasync		= file_fasync,
};

// SPDX-License-Identifier: GPL-2.0
/*
 * What a file descriptor from VPMU_IOC_OPEN does: perf's interface, perf's numbers.
 */
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/perf_event.h>
#include <linux/poll.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "vpmu.h"

/**
 * vpmu_file_overflow() - marks perf events that belong to a vpmu_file
 * @event: never called for one: perf core does not know that it samples
 * @data: unused
 * @regs: unused
 *
 * perf core hands the handler and its context, the file, on to inherited events.
 */
void vpmu_file_overflow(struct perf_event *event, struct perf_sample_data *data,
			struct pt_regs *regs)
{
}

/**
 * vpmu_file_get() - keep a file's state
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

	if (file->tracks)
		vpmu_task_put(dev);
	kfree_rcu(file, rcu);
	vpmu_device_put(dev);
}

/**
 * vpmu_file_put() - let it go
 * @file: the file
 */
void vpmu_file_put(struct vpmu_file *file)
{
	kref_put(&file->ref, file_free);
}

/**
 * vpmu_file_notice() - the device tells something of an event
 * @dev: the device
 * @notice: what
 *
 * Called from the interrupt.
 */
void vpmu_file_notice(struct vpmu_device *dev, const struct vpmu_notice *notice)
{
	struct perf_event *event;
	struct vpmu_file *file;

	/* An event is looked up here until it is destroyed, and freed a grace period later. */
	rcu_read_lock();
	file = xa_load(&dev->files, le64_to_cpu(notice->event));
	event = file ? READ_ONCE(file->event) : NULL;
	if (event) {
		if (le32_to_cpu(notice->kind) == VPMU_NOTICE_ERROR)
			WRITE_ONCE(file->error, true);
		else
			atomic_set(&file->poll, (__force int)EPOLLIN);
		wake_up_all(&event->waitq);
		kill_fasync(&event->fasync, SIGIO, POLL_IN);
	}
	rcu_read_unlock();
}

static int file_release(struct inode *inode, struct file *filp)
{
	struct vpmu_file *file = filp->private_data;

	perf_event_release_kernel(file->event);
	vpmu_file_put(file);
	return 0;
}

static u64 file_id(struct vpmu_file *file)
{
	struct vpmu_event *own = file->event->pmu_private;

	return own->id;
}

static ssize_t file_read(struct file *filp, char __user *buf, size_t count, loff_t *ppos)
{
	struct vpmu_file *file = filp->private_data;
	u64 values[4], value, enabled, running, missed;
	size_t n = 0;

	/* End of file says that the event is in error, as perf's own do. */
	if (READ_ONCE(file->error) || READ_ONCE(file->event->state) == PERF_EVENT_STATE_ERROR)
		return 0;
	if (count < sizeof(u64) * (1 + hweight64(file->read_format)))
		return -ENOSPC;

	/* A loss that found no room in the ring yet is told at a read, at the latest. */
	if (READ_ONCE(file->period))
		vpmu_call_settle(file->event);
	value = perf_event_read_value(file->event, &enabled, &running);
	/* What was read last may be what told of the error. */
	if (READ_ONCE(file->error))
		return 0;
	/*
	 * Times are the device's: perf core's run while the file is switched off. But
	 * what perf core wanted to count and could not, the device knows nothing of.
	 */
	missed = enabled > running ? enabled - running : 0;
	values[n++] = value;
	if (file->read_format & PERF_FORMAT_TOTAL_TIME_ENABLED)
		values[n++] = atomic64_read(&file->enabled_ns) + missed;
	if (file->read_format & PERF_FORMAT_TOTAL_TIME_RUNNING)
		values[n++] = atomic64_read(&file->running_ns);
	if (file->read_format & PERF_FORMAT_ID)
		values[n++] = file_id(file);
	if (copy_to_user(buf, values, n * sizeof(u64)))
		return -EFAULT;
	return n * sizeof(u64);
}

static bool file_has_children(struct perf_event *event)
{
	bool has;

	mutex_lock(&event->child_mutex);
	has = !list_empty(&event->child_list);
	mutex_unlock(&event->child_mutex);
	return has;
}

static __poll_t file_poll(struct file *filp, poll_table *wait)
{
	struct vpmu_file *file = filp->private_data;
	struct perf_event *event = file->event;
	__poll_t events = EPOLLHUP;

	/* perf core wakes this queue too, when the task or an inheriting one ends. */
	poll_wait(filp, &event->waitq, wait);
	if (READ_ONCE(file->error))
		return EPOLLHUP | EPOLLERR;
	if (READ_ONCE(event->state) == PERF_EVENT_STATE_EXIT && !file_has_children(event))
		return events;

	mutex_lock(&file->ring_lock);
	if (file->ring)
		events = (__force __poll_t)atomic_xchg(&file->poll, 0);
	mutex_unlock(&file->ring_lock);
	return events;
}

static int file_fasync(int fd, struct file *filp, int on)
{
	struct vpmu_file *file = filp->private_data;
	struct inode *inode = file_inode(filp);
	int ret;

	inode_lock(inode);
	ret = fasync_helper(fd, filp, on, &file->event->fasync);
	inode_unlock(inode);
	return ret < 0 ? ret : 0;
}

static long file_period(struct vpmu_file *file, u64 __user *arg)
{
	u64 period;
	int err;

	if (get_user(period, arg))
		return -EFAULT;
	if (!period || period >> 63 || !READ_ONCE(file->period))
		return -EINVAL;
	err = vpmu_call_period(file->event, period);
	if (!err)
		WRITE_ONCE(file->period, period);
	return err;
}

static long file_ioctl(struct file *filp, unsigned int cmd, unsigned long arg)
{
	struct vpmu_file *file = filp->private_data;

	switch (cmd) {
	case PERF_EVENT_IOC_ENABLE:
		return vpmu_call_switch(file->event, true);
	case PERF_EVENT_IOC_DISABLE:
		return vpmu_call_switch(file->event, false);
	case PERF_EVENT_IOC_RESET:
		return vpmu_call_reset(file->event);
	case PERF_EVENT_IOC_PERIOD:
		return file_period(file, (u64 __user *)arg);
	case PERF_EVENT_IOC_ID:
		return put_user(file_id(file), (u64 __user *)arg);
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

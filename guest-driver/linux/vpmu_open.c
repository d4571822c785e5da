// SPDX-License-Identifier: GPL-2.0
/*
 * VPMU_IOC_OPEN: takes the arguments of perf_event_open(2), and returns a file
 * descriptor.
 *
 * The event is an in-kernel perf event of this driver's PMU: perf core
 * schedules it with its task, lets child tasks inherit it and enables it on
 * exec. The device writes samples directly to the ring that the program maps.
 */
#include <linux/fcntl.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/pid.h>
#include <linux/sched/signal.h>
#include <linux/sched/task.h>
#include <linux/security.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/uaccess.h>
#include <linux/virtio_config.h>

#include "vpmu.h"
#include "vpmu_attr.h"
#include "vpmu_file.h"
#include "vpmu_persistent.h"
#include "vpmu_ring.h"

static struct task_struct *open_task(pid_t pid)
{
	struct task_struct *task;

	rcu_read_lock();
	task = pid ? pid_task(find_vpid(pid), PIDTYPE_PID) : current;
	if (task)
		get_task_struct(task);
	rcu_read_unlock();
	return task ? task : ERR_PTR(-ESRCH);
}

static struct vpmu_file *open_file(struct vpmu_device *dev, const struct perf_event_attr *attr,
				   const struct vpmu_open *args)
{
	struct vpmu_file *file;
	int err;

	file = vpmu_file_alloc(dev);
	if (!file)
		return ERR_PTR(-ENOMEM);
	err = vpmu_attr_config(dev, attr, &file->spec.config);
	if (err)
		goto put;
	file->persist.handles = 1;
	file->spec.type = attr->type;
	file->spec.inherit = attr->inherit;
	file->spec.read_format = attr->read_format;
	file->control.on_exec = attr->enable_on_exec;
	file->control.enabled = !attr->disabled || attr->enable_on_exec;
	file->spec.period = attr->sample_period;
	file->spec.freq = attr->freq;
	file->spec.trace = vpmu_attr_is_trace(dev, attr);
	vpmu_attr_request(attr, file->spec.trace, &file->spec.request);
	if (args->flags & VPMU_FLAG_ENABLE_ON_STARTER)
		file->spec.request.flags |= cpu_to_le32(VPMU_OPEN_PAUSED);
	if (file->spec.period) {
		file->spec.request.engine = cpu_to_le32(args->engine);
		err = vpmu_has_feature(dev, VPMU_F_RING) ? 0 : -EOPNOTSUPP;
	}
	if (file->spec.trace && !vpmu_has_feature(dev, VPMU_F_AUX))
		err = -EOPNOTSUPP;
	if (!err && vpmu_attr_needs_task(&file->spec.request, file->spec.trace)) {
		err = vpmu_task_get(dev);
		file->tracks = !err;
	}
	if (!err)
		return file;
put:
	vpmu_file_put(file);
	return ERR_PTR(err);
}

/*
 * Creates the perf event of @file. exec_update_lock keeps the task's
 * credentials from changing after they have been checked.
 */
static int open_event(struct vpmu_file *file, const struct perf_event_attr *wanted, int cpu,
		      struct task_struct *task)
{
	struct perf_event_attr attr = {
		.type = file->dev->counting.pmu.type,
		.size = sizeof(attr),
		.config = file->spec.config,
		.disabled = wanted->disabled && wanted->enable_on_exec,
		.inherit = wanted->inherit,
		.pinned = wanted->pinned,
		.exclude_user = wanted->exclude_user,
		.exclude_kernel = wanted->exclude_kernel,
		.exclude_hv = wanted->exclude_hv,
		.exclude_guest = wanted->exclude_guest,
		.enable_on_exec = wanted->enable_on_exec,
	};
	struct perf_event *event;
	int err;

	if (task) {
		err = down_read_interruptible(&task->signal->exec_update_lock);
		if (err)
			return err;
	}
	err = vpmu_permission_open(file->dev, wanted, task);
	if (!err) {
		event = perf_event_create_kernel_counter(&attr, cpu, task, vpmu_file_overflow,
							 file);
		err = PTR_ERR_OR_ZERO(event);
	}
	if (task)
		up_read(&task->signal->exec_update_lock);
	return err;
}

/* Creates the perf event in its group. */
static int open_in_group(struct vpmu_file *file, const struct perf_event_attr *attr, int cpu,
			 struct task_struct *task, struct vpmu_file *leader)
{
	int err;

	if (!leader)
		return open_event(file, attr, cpu, task);

	/*
	 * Lock the requested leader itself, not the leader of its group: if the
	 * requested leader is a sibling, vpmu_group_admits() refuses it.
	 */
	mutex_lock(&leader->group.lock);
	err = vpmu_group_admits(leader, file, attr, cpu, task);
	if (!err) {
		vpmu_file_get(leader);
		file->group.leader = leader;
		err = open_event(file, attr, cpu, task);
	}
	if (!err) {
		err = vpmu_group_join(file);
		if (err)
			perf_event_release_kernel(file->event);
	}
	mutex_unlock(&leader->group.lock);
	return err;
}

/*
 * Opens the event of @file and its descriptor; takes over the caller's
 * reference on @file.
 */
static int open_fd(struct vpmu_file *file, const struct vpmu_open *args,
		   const struct perf_event_attr *attr, struct task_struct *task,
		   struct vpmu_file *other)
{
	struct vpmu_file *leader = args->flags & PERF_FLAG_FD_NO_GROUP ? NULL : other;
	struct file *filp;
	int fd, err;

	fd = get_unused_fd_flags(args->flags & PERF_FLAG_FD_CLOEXEC ? O_CLOEXEC : 0);
	if (fd < 0) {
		vpmu_file_put(file);
		return fd;
	}
	err = open_in_group(file, attr, args->cpu, task, leader);
	if (err) {
		vpmu_file_put(file);
		goto put_fd;
	}
	if (other && args->flags & PERF_FLAG_FD_OUTPUT) {
		err = vpmu_output_redirect(file, other);
		if (err)
			goto close;
	}
	filp = vpmu_file_open(file);
	if (IS_ERR(filp)) {
		err = PTR_ERR(filp);
		goto close;
	}
	err = args->flags & VPMU_FLAG_PERSISTENT ? vpmu_persistent_detach(file, NULL) : 0;
	if (err) {
		fput(filp);
		goto put_fd;
	}
	fd_install(fd, filp);
	return fd;

close:
	vpmu_file_close(file);
put_fd:
	put_unused_fd(fd);
	return err;
}

static int open_task_event(struct vpmu_device *dev, const struct vpmu_open *args,
			   const struct perf_event_attr *attr, struct vpmu_file *other)
{
	struct task_struct *task = NULL;
	struct vpmu_file *file;
	int ret;

	if (args->pid != -1) {
		task = open_task(args->pid);
		if (IS_ERR(task))
			return PTR_ERR(task);
	}
	file = open_file(dev, attr, args);
	if (IS_ERR(file))
		ret = PTR_ERR(file);
	else
		ret = open_fd(file, args, attr, task, other);
	if (task)
		put_task_struct(task);
	return ret;
}

/* Opens another file descriptor of a persistent event. */
static int open_persistent(struct vpmu_device *dev, const struct vpmu_open *args,
			   const struct perf_event_attr *attr)
{
	struct vpmu_file *file;
	struct file *filp;
	int fd;

	file = vpmu_persistent_open(dev, args, attr);
	if (IS_ERR(file))
		return PTR_ERR(file);
	fd = get_unused_fd_flags(args->flags & PERF_FLAG_FD_CLOEXEC ? O_CLOEXEC : 0);
	if (fd < 0)
		goto put;
	filp = vpmu_file_open(file);
	if (IS_ERR(filp)) {
		put_unused_fd(fd);
		fd = PTR_ERR(filp);
		goto put;
	}
	fd_install(fd, filp);
	return fd;
put:
	vpmu_persistent_put(file);
	return fd;
}

/**
 * vpmu_open() - open an event
 * @dev: the device
 * @args: arguments as for perf_event_open(2)
 *
 * Return: a file descriptor or a negative errno.
 */
int vpmu_open(struct vpmu_device *dev, struct vpmu_open *args)
{
	const u64 flags = PERF_FLAG_FD_CLOEXEC | PERF_FLAG_FD_NO_GROUP | PERF_FLAG_FD_OUTPUT |
			  VPMU_FLAG_PERSISTENT | VPMU_FLAG_ENABLE_ON_STARTER;
	struct perf_event_attr attr;
	struct file *group = NULL;
	bool trace;
	int ret;

	if (args->engine > VPMU_ENGINE_BATCHED || args->flags & ~(flags | PERF_FLAG_PID_CGROUP))
		return -EINVAL;
	ret = vpmu_attr_copy(&attr, u64_to_user_ptr(args->attr));
	if (ret)
		return ret;
	if (args->flags & PERF_FLAG_PID_CGROUP)
		return -EOPNOTSUPP;
	if (attr.type == dev->persistent.pmu.type)
		return open_persistent(dev, args, &attr);
	if (args->cpu < -1 || (args->pid == -1 && args->cpu == -1))
		return -EINVAL;
	trace = vpmu_attr_is_trace(dev, &attr);
	ret = vpmu_attr_check(&attr, dev->info.max_sample_rate, trace);
	if (ret)
		return ret;
	/* A locked-down kernel hides registers from all programs. */
	if (vpmu_attr_has_registers(&attr, trace)) {
		ret = security_locked_down(LOCKDOWN_PERF);
		if (ret)
			return ret;
	}
	if (args->group_fd != -1) {
		group = vpmu_file_fget(args->group_fd);
		if (IS_ERR(group))
			return PTR_ERR(group);
	}
	ret = open_task_event(dev, args, &attr, group ? group->private_data : NULL);
	if (group)
		fput(group);
	return ret;
}

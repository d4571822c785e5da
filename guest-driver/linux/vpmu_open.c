// SPDX-License-Identifier: GPL-2.0
/*
 * VPMU_IOC_OPEN: from the arguments of perf_event_open(2) to a file descriptor.
 *
 * The event is an in-kernel perf event of our own PMU, so perf core schedules it
 * with its task, counts it in inherited tasks and enables it on exec. What perf
 * core cannot do for a module, samples and their ring, the device does.
 */
#include <linux/anon_inodes.h>
#include <linux/capability.h>
#include <linux/cred.h>
#include <linux/fcntl.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/pid.h>
#include <linux/sched/coredump.h>
#include <linux/sched/mm.h>
#include <linux/sched/signal.h>
#include <linux/sched/task.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/uaccess.h>
#include <linux/virtio_config.h>

#include "vpmu.h"

#define READ_FORMATS \
	(PERF_FORMAT_TOTAL_TIME_ENABLED | PERF_FORMAT_TOTAL_TIME_RUNNING | PERF_FORMAT_ID)

/* Copies attributes of any version that has nothing we do not know. */
static int open_copy_attr(struct perf_event_attr *attr, struct perf_event_attr __user *user)
{
	u32 size;
	int err;

	if (get_user(size, &user->size))
		return -EFAULT;
	if (!size)
		size = PERF_ATTR_SIZE_VER0;
	err = -E2BIG;
	if (size >= PERF_ATTR_SIZE_VER0 && size <= PAGE_SIZE) {
		memset(attr, 0, sizeof(*attr));
		err = copy_struct_from_user(attr, sizeof(*attr), user, size);
	}
	if (err == -E2BIG && put_user((u32)sizeof(*attr), &user->size))
		return -EFAULT;
	return err;
}

/* Refuses what the device or this driver would not honour. */
static int open_check_attr(const struct perf_event_attr *attr)
{
	struct perf_event_attr rest = *attr;

	if (attr->__reserved_1 || attr->__reserved_2)
		return -EINVAL;
	if (attr->sample_type & ~(u64)(PERF_SAMPLE_MAX - 1) ||
	    attr->read_format & ~(u64)(PERF_FORMAT_MAX - 1))
		return -EINVAL;
	if (!attr->freq && attr->sample_period >> 63)
		return -EINVAL;
	if (attr->exclude_user && attr->exclude_kernel)
		return -EINVAL;
	if (attr->sample_type & ~(u64)VPMU_SAMPLE_ALLOWED ||
	    attr->read_format & ~(u64)READ_FORMATS)
		return -EOPNOTSUPP;

	/* Everything that is honoured is taken out; nothing may be left. */
	rest.type = 0;
	rest.size = 0;
	rest.config = 0;
	if (!attr->freq)
		rest.sample_period = 0;
	rest.sample_type = 0;
	rest.read_format = 0;
	rest.disabled = 0;
	rest.inherit = 0;
	rest.pinned = 0;
	rest.exclude_user = 0;
	rest.exclude_kernel = 0;
	/* count_mode says what becomes of the hypervisor's work; our own guests are our work. */
	rest.exclude_hv = 0;
	rest.exclude_guest = 0;
	rest.enable_on_exec = 0;
	rest.watermark = 0;
	rest.wakeup_events = 0;
	return memchr_inv(&rest, 0, sizeof(rest)) ? -EOPNOTSUPP : 0;
}

/* The config of our own PMU that means the same. */
static int open_config(struct vpmu_device *dev, const struct perf_event_attr *attr, u64 *config)
{
	u32 kind;

	if (attr->type == dev->pmu.type) {
		*config = attr->config;
		return 0;
	}
	switch (attr->type) {
	case PERF_TYPE_HARDWARE:
		kind = VPMU_KIND_HARDWARE;
		break;
	case PERF_TYPE_SOFTWARE:
		kind = VPMU_KIND_SOFTWARE;
		break;
	case PERF_TYPE_HW_CACHE:
		kind = VPMU_KIND_HW_CACHE;
		break;
	case PERF_TYPE_RAW:
		kind = VPMU_KIND_RAW;
		break;
	default:
		return -ENOENT;
	}
	if (attr->config >> VPMU_CONFIG_KIND_SHIFT)
		return -EINVAL;
	*config = VPMU_CONFIG(kind, attr->config);
	return 0;
}

/* Whether the caller could trace @task, as far as a module can tell: it owns it wholly. */
static bool open_owns(struct task_struct *task)
{
	const struct cred *cred = current_cred(), *theirs;
	struct mm_struct *mm;
	bool owns;

	if (same_thread_group(task, current))
		return true;

	rcu_read_lock();
	theirs = __task_cred(task);
	owns = uid_eq(cred->uid, theirs->euid) && uid_eq(cred->uid, theirs->suid) &&
	       uid_eq(cred->uid, theirs->uid) && gid_eq(cred->gid, theirs->egid) &&
	       gid_eq(cred->gid, theirs->sgid) && gid_eq(cred->gid, theirs->gid);
	rcu_read_unlock();
	if (!owns)
		return false;

	mm = get_task_mm(task);
	if (!mm)
		return false;
	owns = get_dumpable(mm) == SUID_DUMP_USER;
	mmput(mm);
	return owns;
}

/*
 * perf_event_paranoid is out of a module's reach; perf core itself applies it to
 * events of a CPU only. So without CAP_PERFMON this allows tasks of the caller's own
 * and never a CPU, whatever the level. Other than at perf's level 2, what those tasks
 * do in the kernel may be counted and sampled too, because most kinds cannot leave it
 * out; only samples that would tell its addresses are refused.
 */
static int open_permitted(const struct perf_event_attr *attr, struct task_struct *task)
{
	if (perfmon_capable())
		return 0;
	if (!task)
		return -EACCES;
	/* A sample of the kernel tells where the kernel lies. */
	if (attr->sample_period && attr->sample_type & PERF_SAMPLE_IP && !attr->exclude_kernel)
		return -EACCES;
	return open_owns(task) ? 0 : -EACCES;
}

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

static struct vpmu_file *open_file(struct vpmu_device *dev, const struct perf_event_attr *attr)
{
	struct vpmu_file *file;
	int err;

	file = kzalloc(sizeof(*file), GFP_KERNEL);
	if (!file)
		return ERR_PTR(-ENOMEM);
	kref_init(&file->ref);
	mutex_init(&file->ring_lock);
	err = open_config(dev, attr, &file->config);
	if (err)
		goto free;
	file->read_format = attr->read_format;
	file->on_exec = attr->disabled && attr->enable_on_exec;
	file->enabled = !attr->disabled || attr->enable_on_exec;
	file->period = attr->sample_period;
	if (file->period) {
		file->sample_type = attr->sample_type;
		file->watermark = attr->watermark;
		file->wakeup = attr->watermark ? attr->wakeup_watermark : attr->wakeup_events;
		err = virtio_has_feature(dev->vdev, VPMU_F_RING) ? 0 : -EOPNOTSUPP;
		if (!err && file->sample_type & PERF_SAMPLE_TID) {
			err = vpmu_task_get(dev);
			file->tracks = !err;
		}
		if (err)
			goto free;
	}
	vpmu_device_get(dev);
	file->dev = dev;
	return file;
free:
	kfree(file);
	return ERR_PTR(err);
}

/* Makes the perf event behind @file; a task's credentials stay as they were checked. */
static int open_event(struct vpmu_file *file, const struct perf_event_attr *wanted, int cpu,
		      struct task_struct *task)
{
	struct perf_event_attr attr = {
		.type = file->dev->pmu.type,
		.size = sizeof(attr),
		.config = file->config,
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
	err = open_permitted(wanted, task);
	if (!err) {
		event = perf_event_create_kernel_counter(&attr, cpu, task, vpmu_file_overflow,
							 file);
		err = PTR_ERR_OR_ZERO(event);
	}
	if (task)
		up_read(&task->signal->exec_update_lock);
	return err;
}

/**
 * vpmu_open() - open an event
 * @dev: the device
 * @args: those of perf_event_open(2)
 *
 * Return: a file descriptor or a negative errno.
 */
int vpmu_open(struct vpmu_device *dev, struct vpmu_open *args)
{
	struct task_struct *task = NULL;
	struct perf_event_attr attr;
	struct vpmu_file *file;
	struct file *filp;
	int fd, err;

	if (args->engine || args->flags & ~(u64)PERF_FLAG_FD_CLOEXEC)
		return -EINVAL;
	if (args->group_fd != -1)
		return -EOPNOTSUPP;
	if (args->pid < -1 || args->cpu < -1 || (args->pid == -1 && args->cpu == -1))
		return -EINVAL;
	err = open_copy_attr(&attr, u64_to_user_ptr(args->attr));
	if (err)
		return err;
	err = open_check_attr(&attr);
	if (err)
		return err;

	if (args->pid != -1) {
		task = open_task(args->pid);
		if (IS_ERR(task))
			return PTR_ERR(task);
	}
	file = open_file(dev, &attr);
	if (IS_ERR(file)) {
		err = PTR_ERR(file);
		goto put_task;
	}
	fd = get_unused_fd_flags(args->flags & PERF_FLAG_FD_CLOEXEC ? O_CLOEXEC : 0);
	if (fd < 0) {
		err = fd;
		goto put_file;
	}
	err = open_event(file, &attr, args->cpu, task);
	if (err)
		goto put_fd;
	filp = anon_inode_getfile("[vpmu]", &vpmu_file_fops, file, O_RDWR);
	if (IS_ERR(filp)) {
		err = PTR_ERR(filp);
		goto release;
	}
	fd_install(fd, filp);
	if (task)
		put_task_struct(task);
	return fd;

release:
	perf_event_release_kernel(file->event);
put_fd:
	put_unused_fd(fd);
put_file:
	vpmu_file_put(file);
put_task:
	if (task)
		put_task_struct(task);
	return err;
}

// SPDX-License-Identifier: GPL-2.0
/*
 * Permission to open events: VPMU_IOC_OPEN applies the rules of
 * perf_event_open(2).
 *
 * Most of these rules are in perf's system call, and use symbols that are not
 * exported to modules: sysctl_perf_event_paranoid, ptrace_may_access() and
 * security_perf_event_open(). For in-kernel events, perf core applies only the
 * rule for CPU events, and calls only that rule's LSM hook. This file
 * reimplements the other rules:
 *
 * - The level is read from the sysctl's file in procfs. The file is opened when
 *   the device is probed, through the driver's own mount, so the caller's
 *   mounts do not matter.
 * - permission_owns() compares credentials to decide whether the caller may
 *   trace a task. It is stricter than ptrace.
 * - The LSM hook for kernel mode is called if the kernel exports
 *   perf_allow_kernel(). The hook for opening an event cannot be called; an LSM
 *   policy can restrict /dev/vpmu instead.
 */
#include <linux/capability.h>
#include <linux/cred.h>
#include <linux/err.h>
#include <linux/fcntl.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/kernel.h>
#include <linux/math.h>
#include <linux/minmax.h>
#include <linux/module.h>
#include <linux/mount.h>
#include <linux/sched/signal.h>
#include <linux/security.h>

#include "compat.h"
#include "vpmu.h"
#include "vpmu_file.h"

/* Value of the parameter paranoid: use the level of the sysctl */
#define PARANOID_FOLLOWS	-2
/* The level if the sysctl cannot be read: the strictest */
#define PARANOID_UNKNOWN	INT_MAX

static int paranoid = PARANOID_FOLLOWS;
module_param(paranoid, int, 0644);
MODULE_PARM_DESC(paranoid,
		 "Level of perf_event_paranoid for task events opened through /dev/vpmu (default: -2, the level of the sysctl kernel.perf_event_paranoid; CPU events always use the sysctl)");

static unsigned int unprivileged_percent = 75;
module_param(unprivileged_percent, uint, 0644);
MODULE_PARM_DESC(unprivileged_percent,
		 "Percent of the device's events that programs without CAP_PERFMON can have open in total (default: 75)");

/**
 * vpmu_permission_init() - open the file of the sysctl
 * @dev: the device
 *
 * If the file cannot be opened, for example in a kernel without procfs, callers
 * need CAP_PERFMON to open events, unless the parameter paranoid is set.
 */
void vpmu_permission_init(struct vpmu_device *dev)
{
	struct file_system_type *proc = get_fs_type("proc");
	struct vfsmount *mnt;
	struct file *file;

	mnt = proc ? kern_mount(proc) : ERR_PTR(-ENODEV);
	if (IS_ERR(mnt)) {
		file = ERR_CAST(mnt);
	} else {
		file = file_open_root_mnt(mnt, "sys/kernel/perf_event_paranoid", O_RDONLY, 0);
		/* The open file holds its own reference on the mount. */
		kern_unmount(mnt);
	}
	if (IS_ERR(file)) {
		vpmu_warn(dev,
			  "kernel.perf_event_paranoid is not readable (%ld): opening events needs CAP_PERFMON\n",
			  PTR_ERR(file));
		return;
	}
	dev->permission.paranoid = file;
}

/**
 * vpmu_permission_exit() - close the file of the sysctl
 * @dev: the device
 */
void vpmu_permission_exit(struct vpmu_device *dev)
{
	if (dev->permission.paranoid)
		fput(dev->permission.paranoid);
	dev->permission.paranoid = NULL;
}

static int permission_sysctl(struct vpmu_device *dev)
{
	struct file *sysctl = dev->permission.paranoid;
	char text[16] = {};
	loff_t pos = 0;
	int level;

	if (!sysctl || kernel_read(sysctl, text, sizeof(text) - 1, &pos) <= 0 ||
	    kstrtoint(text, 10, &level))
		return PARANOID_UNKNOWN;
	return level;
}

/*
 * Whether the caller may trace @task: either @task is a thread of the caller's
 * process; or the caller's user and group ids match those of @task, the caller
 * has all capabilities of @task, and @task is dumpable.
 */
static bool permission_owns(struct task_struct *task)
{
	const struct cred *cred = current_cred(), *theirs;
	bool owns;

	if (same_thread_group(task, current))
		return true;

	rcu_read_lock();
	theirs = __task_cred(task);
	owns = uid_eq(cred->uid, theirs->euid) && uid_eq(cred->uid, theirs->suid) &&
	       uid_eq(cred->uid, theirs->uid) && gid_eq(cred->gid, theirs->egid) &&
	       gid_eq(cred->gid, theirs->sgid) && gid_eq(cred->gid, theirs->gid) &&
	       theirs->user_ns == cred->user_ns &&
	       cap_issubset(theirs->cap_permitted, cred->cap_permitted);
	rcu_read_unlock();
	return owns && vpmu_task_is_dumpable(task);
}

/**
 * vpmu_permission_open() - whether the caller may open an event
 * @dev: the device
 * @attr: the requested attr
 * @task: the event's task, whose credentials must not change during the call;
 *        NULL for a CPU event
 *
 * Return: 0, or the negative errno of perf_event_open(2).
 */
int vpmu_permission_open(struct vpmu_device *dev, const struct perf_event_attr *attr,
			 struct task_struct *task)
{
	bool capable = perfmon_capable();
	int level = READ_ONCE(paranoid);
	bool follows = level == PARANOID_FOLLOWS;

	if (!capable) {
		if (follows)
			level = permission_sysctl(dev);
		if (vpmu_paranoid_refuses_all(level))
			return -EACCES;
		if (level > 1 && !attr->exclude_kernel)
			return -EACCES;
		/* perf core checks CPU events. */
		if (task && !permission_owns(task))
			return -EACCES;
	}
	if (attr->exclude_kernel || !(capable || follows))
		return 0;
	return vpmu_perf_allow_kernel();
}

/**
 * vpmu_permission_charge() - charge an event to the share of the device's
 *                            events that programs without CAP_PERFMON can open
 * @dev: the device
 *
 * The other events are reserved for programs with CAP_PERFMON.
 *
 * Return: 0, after which the caller must call vpmu_permission_uncharge() when
 * the event has ended; or -ENOSPC.
 */
int vpmu_permission_charge(struct vpmu_device *dev)
{
	unsigned int percent = min(READ_ONCE(unprivileged_percent), 100U);
	u32 most = mult_frac(dev->info.max_events, percent, 100U);

	if (atomic_inc_return(&dev->permission.unprivileged) <= most)
		return 0;
	atomic_dec(&dev->permission.unprivileged);
	return -ENOSPC;
}

/**
 * vpmu_permission_uncharge() - undo vpmu_permission_charge() for an event that
 *                              has ended
 * @dev: the device
 */
void vpmu_permission_uncharge(struct vpmu_device *dev)
{
	atomic_dec(&dev->permission.unprivileged);
}

// SPDX-License-Identifier: GPL-2.0
/*
 * /dev/vpmu: information about the device, its catalogue, marks, and what perf
 * core's events lack.
 */
#include <linux/capability.h>
#include <linux/dcache.h>
#include <linux/err.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/io.h>
#include <linux/irqflags.h>
#include <linux/magic.h>
#include <linux/minmax.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/perf_event.h>
#include <linux/security.h>
#include <linux/string.h>
#include <linux/uaccess.h>

#include "compat.h"
#include "perf_core_private.h"
#include "vpmu.h"
#include "vpmu_event.h"
#include "vpmu_file.h"
#include "vpmu_persistent.h"

/*
 * VPMU_IOC_RING and VPMU_IOC_PERF: this driver's calls on descriptors of
 * perf_event_open(2).
 *
 * perf core does not pass ioctls to a PMU, so a program passes the descriptor
 * to /dev/vpmu. Any holder of the descriptor may make these calls: each changes
 * only that event and, for a link, another event whose descriptor the caller
 * holds. The calls for persistence also need CAP_PERFMON.
 */

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
 * Flushes an event. To flush samples that are replayed, this function reads the
 * event, and then replays the samples. Both cover each event of the family.
 */
static int perf_flush(const struct vpmu_device *dev, struct perf_event *event)
{
	struct vpmu_view *view = perf_view(dev, event);
	struct vpmu_event *own = event->pmu_private;
	u64 enabled, running;
	int err;

	if (view) {
		err = vpmu_flush(view->file);
		vpmu_view_show(view);
		return err;
	}
	if (own->file)
		return vpmu_flush(own->file);
	perf_event_read_value(event, &enabled, &running);
	if (own->sampler)
		vpmu_sampling_flush(own);
	return own->unpaid_ns == VPMU_OWED_ALL ? -EIO : 0;
}

/* The event's id on the device */
static u64 perf_id(const struct vpmu_device *dev, const struct perf_event *event)
{
	const struct vpmu_view *view = perf_view(dev, event);
	const struct vpmu_event *own = event->pmu_private;

	return view ? view->file->id : own->id;
}

static int perf_state(const struct vpmu_device *dev, const struct perf_event *event,
		      struct vpmu_event_state __user *arg)
{
	const struct vpmu_view *view = perf_view(dev, event);
	const struct vpmu_event *own = event->pmu_private;
	struct vpmu_event_state state = { .id = perf_id(dev, event) };

	state.engine = view ? le32_to_cpu(view->file->spec.request.engine) : own->engine;
	return copy_to_user(arg, &state, sizeof(state)) ? -EFAULT : 0;
}

static int perf_detach(const struct vpmu_device *dev, struct perf_event *event,
		       struct vpmu_detach __user *arg)
{
	struct vpmu_detach detach;

	if (copy_from_user(&detach, arg, sizeof(detach)))
		return -EFAULT;
	/*
	 * The id does not change. Write it first, so that a fault leaves the
	 * event unchanged.
	 */
	if (put_user(perf_id(dev, event), &arg->id))
		return -EFAULT;
	if (event->pmu == &dev->persistent.pmu)
		return vpmu_persistent_detach_view(event->pmu_private, detach.name);
	return vpmu_persistent_detach(event, detach.name);
}

static int perf_attach(const struct vpmu_device *dev, struct perf_event *event)
{
	struct vpmu_view *view = perf_view(dev, event);

	if (view)
		return vpmu_persistent_attach(view->file);
	return perfmon_capable() ? -EINVAL : -EPERM;
}

/*
 * Links two events with the same place. Those of a CPU are not inherited, and may
 * be persistent, so only the device links them.
 */
static int perf_link_events(struct vpmu_device *dev, struct perf_event *event,
			    struct perf_event *target, enum vpmu_role role)
{
	struct vpmu_event *own = event->pmu_private, *other = target->pmu_private;
	int err;

	if (event->hw.target)
		return vpmu_link_set(own, other, role);
	err = vpmu_link_ids(dev, perf_id(dev, event), perf_id(dev, target), role);
	if (err)
		return err;
	/* After a reset, a linked event is not opened again. */
	if (!perf_view(dev, event))
		WRITE_ONCE(own->linked, true);
	if (!perf_view(dev, target))
		WRITE_ONCE(other->linked, true);
	return 0;
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
	if (event != target && event->cpu == target->cpu &&
	    event->hw.target == target->hw.target)
		err = perf_link_events(dev, event, target, role);
	fput(filp);
	return err;
}

/*
 * Finds the file of an event, with a reference; NULL if the host does not write
 * the event's records.
 */
static struct vpmu_file *perf_file(struct vpmu_device *dev, const struct perf_event *event)
{
	const struct vpmu_event *own = event->pmu_private;
	const struct vpmu_view *view;
	struct vpmu_file *file;

	/* With the lock held, the event does not become a view. */
	mutex_lock(&dev->persistent.lock);
	view = perf_view(dev, event);
	file = view ? view->file : own->file;
	if (file)
		vpmu_file_get(file);
	mutex_unlock(&dev->persistent.lock);
	return file;
}

static int perf_ring(struct vpmu_device *dev, struct file *perf)
{
	struct vpmu_file *file = perf_file(dev, perf->private_data);
	int ret = 0;

	if (!file)
		return -EINVAL;
	/* A locked-down kernel hides registers from all programs. */
	if (vpmu_attr_opens_registers(&file->spec.request, file->spec.config))
		ret = security_locked_down(LOCKDOWN_PERF);
	if (!ret)
		ret = vpmu_file_descriptor(file, perf);
	vpmu_file_put(file);
	return ret;
}

/**
 * vpmu_perf_ring() - VPMU_IOC_RING
 * @dev: the device
 * @fd: a descriptor of perf_event_open(2)
 *
 * Return: the ring descriptor; -EBADF for a descriptor that is not a perf event of
 * this device; -EINVAL for an event whose records the host does not write; or
 * another negative errno.
 */
static int vpmu_perf_ring(struct vpmu_device *dev, unsigned long fd)
{
	struct file *filp = fd <= INT_MAX ? perf_fget(dev, fd) : ERR_PTR(-EBADF);
	int ret;

	if (IS_ERR(filp))
		return PTR_ERR(filp);
	ret = perf_ring(dev, filp);
	fput(filp);
	return ret;
}

/**
 * vpmu_perf_call() - VPMU_IOC_PERF
 * @dev: the device
 * @arg: a struct vpmu_perf
 *
 * Return: 0; -EBADF for a descriptor that is not a perf event of this device;
 * -EOPNOTSUPP for an unknown call; or another negative errno.
 */
static int vpmu_perf_call(struct vpmu_device *dev, const void __user *arg)
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
	case VPMU_IOC_EVENT:
		err = perf_state(dev, event, u64_to_user_ptr(call.arg));
		break;
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

static struct vpmu_device *to_vpmu(struct file *filp)
{
	return container_of(filp->private_data, struct vpmu_device, misc);
}

static int cdev_open(struct inode *inode, struct file *filp)
{
	/* The misc core calls this only while /dev/vpmu is registered. */
	vpmu_device_get(to_vpmu(filp));
	return nonseekable_open(inode, filp);
}

static int cdev_release(struct inode *inode, struct file *filp)
{
	vpmu_device_put(to_vpmu(filp));
	return 0;
}

static long cdev_catalogue(struct vpmu_device *dev, void __user *arg)
{
	struct vpmu_catalogue wanted;
	u32 count;

	if (copy_from_user(&wanted, arg, sizeof(wanted)))
		return -EFAULT;
	if (wanted.first >= dev->info.catalogue_len)
		return 0;
	count = min(wanted.count, dev->info.catalogue_len - wanted.first);
	if (copy_to_user(u64_to_user_ptr(wanted.entries), &dev->catalogue[wanted.first],
			 count * sizeof(*dev->catalogue)))
		return -EFAULT;
	return count;
}

/*
 * The last switch of this CPU is over before the mark. So the mark's sample keeps
 * its time, and two marks have different times. The sample is in the ring when
 * the write returns, so a prompt one is replayed before the program goes on.
 */
static void cdev_mark(struct vpmu_device *dev, u32 value)
{
	struct vpmu_vcpu *vcpu;
	unsigned long flags;

	local_irq_save(flags);
	vpmu_task_switched();
	writel(value, dev->doorbell.address);
	vcpu = vpmu_vcpu_local(dev);
	if (vcpu)
		vpmu_sampling_prompt(vcpu);
	local_irq_restore(flags);
}

static long cdev_ioctl(struct file *filp, unsigned int cmd, unsigned long arg)
{
	struct vpmu_device *dev = to_vpmu(filp);
	void __user *user = (void __user *)arg;
	int lost = READ_ONCE(dev->life.lost);
	struct vpmu_info info;

	if (lost)
		return lost;
	switch (cmd) {
	case VPMU_IOC_INFO:
		info = vpmu_info_of(dev);
		return copy_to_user(user, &info, sizeof(info)) ? -EFAULT : 0;
	case VPMU_IOC_RING:
		return vpmu_perf_ring(dev, arg);
	case VPMU_IOC_CATALOGUE:
		return cdev_catalogue(dev, user);
	case VPMU_IOC_PERSISTENT:
		return vpmu_persistent_list(dev, user);
	case VPMU_IOC_MARK:
		if (!dev->doorbell.address)
			return -EOPNOTSUPP;
		if (arg > U32_MAX)
			return -EINVAL;
		cdev_mark(dev, arg);
		return 0;
	case VPMU_IOC_PERF:
		return vpmu_perf_call(dev, user);
	case VPMU_IOC_FLUSH:
		if (arg)
			return -EINVAL;
		return perfmon_capable() ? vpmu_flush_all(dev) : -EPERM;
	default:
		return -ENOTTY;
	}
}

/*
 * Maps the doorbell, so that a program can place marks without a system call.
 * The mapping holds a reference on the file, and the file holds one on the
 * device. After a reset of the device, a store to the mapping has no effect.
 *
 * The hypervisor emulates each access to the mapping, and stops the VM at an
 * instruction that it cannot emulate. A program can make the kernel access the
 * mapping with such an instruction: for example, if the program's signal stack
 * is in the mapping, the kernel writes the signal frame with FXSAVE or XSAVE.
 * So mapping the doorbell needs a capability whose holder can stop the VM
 * anyway. VPMU_IOC_MARK needs no capability.
 */
static int cdev_mmap(struct file *filp, struct vm_area_struct *vma)
{
	struct vpmu_device *dev = to_vpmu(filp);

	if (!dev->doorbell.page)
		return -EOPNOTSUPP;
	if (!capable(CAP_SYS_RAWIO))
		return -EPERM;
	if (vma->vm_pgoff || vma_pages(vma) != 1)
		return -EINVAL;
	if (!(vma->vm_flags & VM_SHARED) || !(vma->vm_flags & VM_WRITE) ||
	    vma->vm_flags & VM_EXEC)
		return -EINVAL;
	vpmu_vm_flags_clear(vma, VM_MAYEXEC);
	vma->vm_page_prot = pgprot_noncached(vma->vm_page_prot);
	return io_remap_pfn_range(vma, vma->vm_start, PHYS_PFN(dev->doorbell.page), PAGE_SIZE,
				  vma->vm_page_prot);
}

static const struct file_operations cdev_fops = {
	.owner		= THIS_MODULE,
	.open		= cdev_open,
	.release	= cdev_release,
	.unlocked_ioctl	= cdev_ioctl,
	.compat_ioctl	= compat_ptr_ioctl,
	.mmap		= cdev_mmap,
};

/**
 * vpmu_cdev_register() - create /dev/vpmu
 * @dev: the device
 *
 * Every program may open the device file, just as every program may call
 * perf_event_open(2). Placing a mark needs no permission, because a mark
 * reveals only data of the program that places it. Calls for an event take its
 * descriptor, which perf core gives only to programs that may have it. The
 * handlers of other calls check capabilities themselves.
 *
 * Return: 0 or a negative errno.
 */
int vpmu_cdev_register(struct vpmu_device *dev)
{
	dev->misc = (struct miscdevice) {
		.minor = MISC_DYNAMIC_MINOR,
		.name = "vpmu",
		.fops = &cdev_fops,
		.parent = &dev->vdev->dev,
		.mode = 0666,
	};
	return misc_register(&dev->misc);
}

/**
 * vpmu_cdev_unregister() - remove /dev/vpmu; open files remain open
 * @dev: the device
 */
void vpmu_cdev_unregister(struct vpmu_device *dev)
{
	misc_deregister(&dev->misc);
}

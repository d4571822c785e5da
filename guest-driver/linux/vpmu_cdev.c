// SPDX-License-Identifier: GPL-2.0
/*
 * /dev/vpmu: information about the device, its catalogue, marks, and opening
 * events.
 */
#include <linux/capability.h>
#include <linux/fs.h>
#include <linux/io.h>
#include <linux/irqflags.h>
#include <linux/minmax.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/uaccess.h>

#include "compat.h"
#include "vpmu.h"
#include "vpmu_file.h"
#include "vpmu_persistent.h"

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

static long cdev_open_event(struct vpmu_device *dev, void __user *arg)
{
	struct vpmu_open args;

	if (copy_from_user(&args, arg, sizeof(args)))
		return -EFAULT;
	return vpmu_open(dev, &args);
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
	case VPMU_IOC_OPEN:
		return cdev_open_event(dev, user);
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
 * reveals only data of the program that places it. vpmu_permission_open()
 * decides which events a program may open. The handlers of other calls check
 * capabilities themselves.
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

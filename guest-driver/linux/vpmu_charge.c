// SPDX-License-Identifier: GPL-2.0
/*
 * Accounting of mapped pages, as in perf: pages up to the user's allowance are
 * charged to the user, and further pages to the address space.
 */
#include <linux/capability.h>
#include <linux/cpumask.h>
#include <linux/cred.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/sched/mm.h>

#include "compat.h"
#include "vpmu.h"
#include "vpmu_ring.h"

/*
 * A module cannot read kernel.perf_event_mlock_kb; this is the sysctl's
 * default.
 */
static unsigned int mlock_kb = 512 + PAGE_SIZE / 1024;
module_param(mlock_kb, uint, 0644);
MODULE_PARM_DESC(mlock_kb,
		 "Allowance of each user for rings and AUX areas, in KiB per online CPU, before RLIMIT_MEMLOCK applies; perf's own rings use the same allowance (default: 512 KiB and one page, as in the kernel)");

/**
 * vpmu_charge() - charge pages to the caller
 * @charge: filled in, for vpmu_uncharge()
 * @count: number of pages
 *
 * Return: 0, or -EPERM if the pages exceed RLIMIT_MEMLOCK and the caller does
 * not have CAP_IPC_LOCK.
 */
int vpmu_charge(struct vpmu_charge *charge, unsigned long count)
{
	unsigned long limit = rlimit(RLIMIT_MEMLOCK) >> PAGE_SHIFT;
	unsigned long allowed, locked, extra;
	const struct cred *owner = current_cred();
	struct mm_struct *mm = current->mm;

	allowed = (unsigned long)READ_ONCE(mlock_kb) / (PAGE_SIZE / 1024) * num_online_cpus();
	/*
	 * The number of locked pages can exceed the allowance, if the allowance
	 * was larger when they were locked.
	 */
	locked = min_t(unsigned long, atomic_long_read(vpmu_user_locked(owner->user)), allowed);
	locked += count;
	extra = locked > allowed ? locked - allowed : 0;
	if (atomic64_read(&mm->pinned_vm) + extra > limit && !capable(CAP_IPC_LOCK))
		return -EPERM;

	charge->count = count;
	charge->extra = extra;
	charge->owner = get_cred(owner);
	atomic_long_add(count - extra, vpmu_user_locked(owner->user));
	mmgrab(mm);
	charge->mm = mm;
	atomic64_add(extra, &mm->pinned_vm);
	return 0;
}

/**
 * vpmu_uncharge() - undo vpmu_charge()
 * @charge: from vpmu_charge()
 */
void vpmu_uncharge(struct vpmu_charge *charge)
{
	atomic_long_sub(charge->count - charge->extra, vpmu_user_locked(charge->owner->user));
	put_cred(charge->owner);
	atomic64_sub(charge->extra, &charge->mm->pinned_vm);
	mmdrop(charge->mm);
}

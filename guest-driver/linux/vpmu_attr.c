// SPDX-License-Identifier: GPL-2.0
/*
 * What a perf_event_attr may say on /dev/vpmu, and what it says to the device.
 *
 * perf_event_open(2) refuses senseless attributes with EINVAL, larger ones than it
 * knows with E2BIG; both here as there. What makes sense, but not to this driver or
 * the device, is EOPNOTSUPP.
 */
#include <linux/perf_event.h>
#include <linux/string.h>
#include <linux/uaccess.h>

#include "compat.h"
#include "vpmu.h"
#include "vpmu_arch.h"
#include "vpmu_file.h"

/* What sample_id_all puts behind records that are no samples. */
#define SAMPLE_ID \
	(PERF_SAMPLE_TID | PERF_SAMPLE_TIME | PERF_SAMPLE_ID | PERF_SAMPLE_STREAM_ID | \
	 PERF_SAMPLE_CPU | PERF_SAMPLE_IDENTIFIER)

#define AUX_ACTIONS	(VPMU_AUX_START_PAUSED | VPMU_AUX_PAUSE | VPMU_AUX_RESUME)

/* Reads an attr of any version that says nothing we do not know. */
static int attr_read(struct perf_event_attr *attr, struct perf_event_attr __user *user)
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
	/* Where this cannot be written the error says enough. */
	if (err == -E2BIG)
		put_user((u32)sizeof(*attr), &user->size);
	return err;
}

static bool regs_valid(u64 mask)
{
	return mask && !(mask & ~(VPMU_ARCH_REGS | PERF_REG_EXTENDED_MASK));
}

/**
 * vpmu_attr_copy() - read an attr from a program
 * @attr: filled in
 * @user: where it stands
 *
 * Return: 0; or the errno that perf has for what no event could mean.
 */
int vpmu_attr_copy(struct perf_event_attr *attr, struct perf_event_attr __user *user)
{
	const u64 weights = PERF_SAMPLE_WEIGHT | PERF_SAMPLE_WEIGHT_STRUCT;
	int err = attr_read(attr, user);

	if (err)
		return err;
	if (attr->__reserved_1 || attr->__reserved_2 || attr->vpmu_aux_action & ~AUX_ACTIONS)
		return -EINVAL;
	if (attr->sample_type & ~(u64)(PERF_SAMPLE_MAX - 1) ||
	    attr->read_format & ~(u64)(PERF_FORMAT_MAX - 1))
		return -EINVAL;
	if (attr->sample_type & PERF_SAMPLE_REGS_USER && !regs_valid(attr->sample_regs_user))
		return -EINVAL;
	if (attr->sample_type & PERF_SAMPLE_REGS_INTR && !regs_valid(attr->sample_regs_intr))
		return -EINVAL;
	if (attr->sample_type & PERF_SAMPLE_STACK_USER &&
	    (attr->sample_stack_user >= U16_MAX || attr->sample_stack_user % sizeof(u64)))
		return -EINVAL;
	if ((attr->sample_type & weights) == weights)
		return -EINVAL;
	if (attr->inherit_thread && !attr->inherit)
		return -EINVAL;
	if (attr->remove_on_exec && attr->enable_on_exec)
		return -EINVAL;
	if (attr->sigtrap && !attr->remove_on_exec)
		return -EINVAL;
	return 0;
}

/*
 * Whether anything is asked for that is not honoured. Everything that is, or that
 * means nothing without a bit that is not set, is taken out; nothing may be left.
 */
static bool attr_asks_more(const struct perf_event_attr *attr)
{
	struct perf_event_attr rest = *attr;

	rest.type = 0;
	rest.size = 0;
	rest.config = 0;
	rest.sample_period = 0;
	rest.freq = 0;
	rest.sample_type = 0;
	rest.read_format = 0;
	rest.disabled = 0;
	rest.inherit = 0;
	rest.inherit_stat = 0;
	rest.pinned = 0;
	rest.exclude_user = 0;
	rest.exclude_kernel = 0;
	/* Guests of our own are our work. */
	rest.exclude_hv = 0;
	rest.exclude_guest = 0;
	rest.exclude_callchain_kernel = 0;
	rest.exclude_callchain_user = 0;
	rest.enable_on_exec = 0;
	rest.sample_id_all = 0;
	rest.write_backward = 0;
	rest.watermark = 0;
	rest.wakeup_events = 0;
	rest.sample_max_stack = 0;
	rest.sample_regs_user = 0;
	rest.sample_regs_intr = 0;
	rest.sample_stack_user = 0;
	rest.branch_sample_type = 0;
	rest.aux_watermark = 0;
	rest.vpmu_aux_action = 0;
	return memchr_inv(&rest, 0, sizeof(rest));
}

/* What of AUX data only some events can have, in the order of perf's errors. */
static int attr_check_aux(const struct perf_event_attr *attr, bool trace)
{
	if (attr->aux_output)
		return -EOPNOTSUPP;
	if (attr->vpmu_aux_action & VPMU_AUX_PAUSE && attr->vpmu_aux_action & VPMU_AUX_RESUME)
		return -EINVAL;
	if (attr->vpmu_aux_action & VPMU_AUX_START_PAUSED && !trace)
		return -EOPNOTSUPP;
	/* No trace of the device's can be sampled. */
	return attr->aux_sample_size ? -EINVAL : 0;
}

/**
 * vpmu_attr_check() - refuse what the device or this driver would not honour
 * @attr: from vpmu_attr_copy()
 * @max_rate: most samples a second
 * @trace: of an event that writes to an AUX area
 *
 * Return: 0 or a negative errno.
 */
int vpmu_attr_check(const struct perf_event_attr *attr, u32 max_rate, bool trace)
{
	int err = attr_check_aux(attr, trace);

	if (err)
		return err;
	if (attr->freq ? attr->sample_freq > max_rate : attr->sample_period >> 63)
		return -EINVAL;
	if (attr->exclude_user && attr->exclude_kernel)
		return -EINVAL;
	/* The reading of one task's event in a sample says nothing of the family. */
	if (attr->inherit && attr->sample_type & PERF_SAMPLE_READ)
		return -EINVAL;
	if (attr->sample_type & PERF_SAMPLE_CALLCHAIN && attr->sample_max_stack > VPMU_MAX_STACK)
		return -EOVERFLOW;
	if (attr->sample_type & ~(u64)VPMU_SAMPLE_ALLOWED ||
	    attr->read_format & ~(u64)VPMU_READ_ALLOWED)
		return -EOPNOTSUPP;
	/* Vector registers are not the device's to read. */
	if (attr->sample_type & PERF_SAMPLE_REGS_USER &&
	    attr->sample_regs_user & PERF_REG_EXTENDED_MASK)
		return -EOPNOTSUPP;
	if (attr->sample_type & PERF_SAMPLE_REGS_INTR &&
	    attr->sample_regs_intr & PERF_REG_EXTENDED_MASK)
		return -EOPNOTSUPP;
	return attr_asks_more(attr) ? -EOPNOTSUPP : 0;
}

/**
 * vpmu_attr_request() - put it into the device's words, as far as samples go
 * @attr: from vpmu_attr_check()
 * @trace: packets, not samples
 * @request: what is asked besides is left as it is
 */
void vpmu_attr_request(const struct perf_event_attr *attr, bool trace,
		       struct vpmu_open_request *request)
{
	u64 sample_type = attr->sample_type;
	u32 flags = 0;

	/* Without samples it says only how other records end. */
	if (!attr->sample_period || trace)
		sample_type &= SAMPLE_ID;
	request->period = cpu_to_le64(attr->sample_period);
	request->sample_type = cpu_to_le64(sample_type);
	request->read_format = cpu_to_le64(attr->read_format);
	request->wakeup = cpu_to_le32(attr->watermark ? attr->wakeup_watermark :
						       attr->wakeup_events);
	if (sample_type & PERF_SAMPLE_CALLCHAIN)
		request->max_stack = cpu_to_le32(attr->sample_max_stack);
	if (sample_type & PERF_SAMPLE_REGS_USER)
		request->regs_user = cpu_to_le64(attr->sample_regs_user);
	if (sample_type & PERF_SAMPLE_REGS_INTR)
		request->regs_intr = cpu_to_le64(attr->sample_regs_intr);
	if (sample_type & PERF_SAMPLE_STACK_USER)
		request->stack_user = cpu_to_le32(attr->sample_stack_user);
	if (trace)
		request->aux_watermark = cpu_to_le32(attr->aux_watermark);
	if (attr->watermark)
		flags |= VPMU_OPEN_WATERMARK;
	if (attr->freq && attr->sample_freq)
		flags |= VPMU_OPEN_FREQ;
	if (attr->sample_id_all)
		flags |= VPMU_OPEN_SAMPLE_ID_ALL;
	if (attr->write_backward)
		flags |= VPMU_OPEN_BACKWARD;
	if (attr->pinned)
		flags |= VPMU_OPEN_PINNED;
	if (attr->inherit_stat)
		flags |= VPMU_OPEN_INHERIT_STAT;
	if (attr->exclude_callchain_kernel)
		flags |= VPMU_OPEN_EXCLUDE_CHAIN_KERNEL;
	if (attr->exclude_callchain_user)
		flags |= VPMU_OPEN_EXCLUDE_CHAIN_USER;
	if (attr->vpmu_aux_action & VPMU_AUX_START_PAUSED)
		flags |= VPMU_OPEN_AUX_START_PAUSED;
	if (attr->vpmu_aux_action & VPMU_AUX_PAUSE)
		flags |= VPMU_OPEN_AUX_PAUSE;
	if (attr->vpmu_aux_action & VPMU_AUX_RESUME)
		flags |= VPMU_OPEN_AUX_RESUME;
	request->flags = cpu_to_le32(flags);
}

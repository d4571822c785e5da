// SPDX-License-Identifier: GPL-2.0
/*
 * Attributes: translation between perf_event_attr and requests to the device.
 *
 * perf core has already checked an attr. Here, only fields are checked that the
 * device, or a replay of samples, cannot support.
 */
#include <linux/minmax.h>
#include <linux/perf_event.h>
#include <linux/string.h>

#include "compat.h"
#include "vpmu.h"
#include "vpmu_arch.h"
#include "vpmu_event.h"

/* Fields that sample_id_all appends to records other than samples. */
#define SAMPLE_ID \
	(PERF_SAMPLE_TID | PERF_SAMPLE_TIME | PERF_SAMPLE_ID | PERF_SAMPLE_STREAM_ID | \
	 PERF_SAMPLE_CPU | PERF_SAMPLE_IDENTIFIER)

/*
 * Fields that the device reports for perf core's samples; perf core fills in
 * the others.
 */
#define SAMPLE_REPORTED	(PERF_SAMPLE_IP | PERF_SAMPLE_TID | PERF_SAMPLE_TIME | \
			 PERF_SAMPLE_ADDR | PERF_SAMPLE_PERIOD)

/*
 * Fields that the driver refuses. For some of them, the device has no data. For
 * the others, perf core would read the data at the replay, when the current
 * task or CPU may differ from the sample's.
 */
#define SAMPLE_REFUSED	(PERF_SAMPLE_PHYS_ADDR | PERF_SAMPLE_DATA_PAGE_SIZE | \
			 PERF_SAMPLE_CODE_PAGE_SIZE | PERF_SAMPLE_CGROUP | PERF_SAMPLE_AUX | \
			 PERF_SAMPLE_BRANCH_STACK)

/*
 * If an event has any of these fields, the driver requests the registers at the
 * time of the sample (REGS_INTR) from the device.
 */
#define SAMPLE_REGS \
	(PERF_SAMPLE_REGS_USER | PERF_SAMPLE_STACK_USER | PERF_SAMPLE_REGS_INTR)

/* All bits of config1 */
#define CONFIG1_KNOWN \
	(VPMU_CONFIG1_ENABLE_ON_STARTER | VPMU_CONFIG1_ENGINE | VPMU_CONFIG1_RING | \
	 VPMU_CONFIG1_PERSISTENT | CONFIG1_AUX)
/* Bits of config1 that matter only for packets */
#define CONFIG1_AUX \
	(VPMU_CONFIG1_AUX_START_PAUSED | VPMU_CONFIG1_AUX_PAUSE | VPMU_CONFIG1_AUX_RESUME)

/*
 * Whether an attr sets an unsupported field. In a copy of the attr, clears the
 * supported fields. Also clears the fields that matter only together with a bit
 * that is refused anyway. If a field of the copy is still set, the attr is not
 * supported.
 */
static bool attr_asks_more(const struct perf_event_attr *attr)
{
	struct perf_event_attr rest = *attr;

	rest.type = 0;
	rest.size = 0;
	rest.config = 0;
	rest.config1 = 0;
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
	rest.exclude_hv = 0;
	/* exclude_guest has no effect: nested guests count as this guest. */
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
	return memchr_inv(&rest, 0, sizeof(rest));
}

/**
 * vpmu_attr_engine() - get the engine that a program asks for
 * @attr: the event's attr
 *
 * Return: VPMU_ENGINE_*, once vpmu_attr_check() has accepted the attr.
 */
u32 vpmu_attr_engine(const struct perf_event_attr *attr)
{
	return (attr->config1 & VPMU_CONFIG1_ENGINE) >> VPMU_CONFIG1_ENGINE_SHIFT;
}

/**
 * vpmu_attr_check() - refuse values of config1 and config2 that mean nothing
 * @attr: the event's attr
 * @trace: the event writes to an AUX area
 *
 * Return: 0; -EINVAL; or -EOPNOTSUPP for an event that is not a trace and would
 * be opened as a paused one.
 */
int vpmu_attr_check(const struct perf_event_attr *attr, bool trace)
{
	u64 config1 = attr->config1;

	if (config1 & ~(u64)CONFIG1_KNOWN || attr->config2 ||
	    vpmu_attr_engine(attr) > VPMU_ENGINE_BATCHED)
		return -EINVAL;
	if (config1 & CONFIG1_AUX && !(config1 & VPMU_CONFIG1_RING))
		return -EINVAL;
	if (config1 & VPMU_CONFIG1_AUX_PAUSE && config1 & VPMU_CONFIG1_AUX_RESUME)
		return -EINVAL;
	return config1 & VPMU_CONFIG1_AUX_START_PAUSED && !trace ? -EOPNOTSUPP : 0;
}

/**
 * vpmu_attr_check_ring() - refuse an event if the host cannot write its records
 * @attr: the attr of an event that is being opened with VPMU_CONFIG1_RING
 *
 * Return: 0 or a negative errno.
 */
int vpmu_attr_check_ring(const struct perf_event_attr *attr)
{
	if (attr->exclude_user && attr->exclude_kernel)
		return -EINVAL;
	/*
	 * A sample would contain the count of one task's event, not the sum
	 * over the event and all events that inherit it.
	 */
	if (attr->inherit && attr->sample_type & PERF_SAMPLE_READ)
		return -EINVAL;
	if (attr->sample_type & PERF_SAMPLE_CALLCHAIN && attr->sample_max_stack > VPMU_MAX_STACK)
		return -EOVERFLOW;
	if (attr->sample_type & ~(u64)VPMU_SAMPLE_ALLOWED ||
	    attr->read_format & ~(u64)VPMU_READ_ALLOWED)
		return -EOPNOTSUPP;
	/* The device does not read vector registers. */
	if (attr->sample_type & PERF_SAMPLE_REGS_USER &&
	    attr->sample_regs_user & PERF_REG_EXTENDED_MASK)
		return -EOPNOTSUPP;
	if (attr->sample_type & PERF_SAMPLE_REGS_INTR &&
	    attr->sample_regs_intr & PERF_REG_EXTENDED_MASK)
		return -EOPNOTSUPP;
	return attr_asks_more(attr) ? -EOPNOTSUPP : 0;
}

/**
 * vpmu_attr_check_replay() - refuse an event if a replay cannot make its
 *                            samples
 * @event: a sampling event that is being opened
 *
 * Return: 0; -EOPNOTSUPP; -EOVERFLOW for a call chain that is too long, which
 * kernel.perf_event_max_stack can cause; or -EINVAL, after which perf(1) retries without
 * inheritance.
 */
int vpmu_attr_check_replay(const struct perf_event *event)
{
	const struct perf_event_attr *attr = &event->attr;

	if (attr->sample_type & SAMPLE_REFUSED || attr->aux_output || attr->aux_sample_size)
		return -EOPNOTSUPP;
	/* The device cannot put counts into the samples of inherited events. */
	if (attr->inherit && attr->sample_type & PERF_SAMPLE_READ)
		return -EINVAL;
	if (attr->sample_type & PERF_SAMPLE_CALLCHAIN && attr->sample_max_stack > VPMU_MAX_STACK)
		return -EOVERFLOW;
	/*
	 * The program must get the SIGTRAP before it executes its next
	 * instruction. A replay is too late for that.
	 */
	if (attr->sigtrap)
		return -EOPNOTSUPP;
	/* The device does not read vector registers. */
	if (attr->sample_type & (PERF_SAMPLE_REGS_USER | PERF_SAMPLE_REGS_INTR) &&
	    (attr->sample_regs_user | attr->sample_regs_intr) & PERF_REG_EXTENDED_MASK)
		return -EOPNOTSUPP;
	return 0;
}

/* Kinds with a perf type of their own */
static const struct {
	u32 type;
	u32 kind;
} attr_kinds[] = {
	{ PERF_TYPE_HARDWARE, VPMU_KIND_HARDWARE },
	{ PERF_TYPE_SOFTWARE, VPMU_KIND_SOFTWARE },
	{ PERF_TYPE_HW_CACHE, VPMU_KIND_HW_CACHE },
	{ PERF_TYPE_RAW, VPMU_KIND_RAW },
};

/* Finds the entry of an event in the catalogue; NULL if the host lacks it. */
static const struct vpmu_catalogue_entry *attr_entry(const struct vpmu_device *dev, u64 config)
{
	const struct vpmu_catalogue_entry *entry;
	u32 i;

	for (i = 0; i < dev->info.catalogue_len; i++) {
		entry = &dev->catalogue[i];
		if (entry->kind != config >> VPMU_CONFIG_KIND_SHIFT)
			continue;
		if (entry->flags & VPMU_CATALOGUE_ANY_CONFIG ||
		    VPMU_CONFIG(entry->kind, entry->config) == config)
			return entry;
	}
	return NULL;
}

/* Whether perf defines the event that @attr, of one of perf's types, selects. */
static bool attr_is_defined(const struct perf_event_attr *attr)
{
	u64 config = attr->config;

	switch (attr->type) {
	case PERF_TYPE_HARDWARE:
		return config < PERF_COUNT_HW_MAX;
	case PERF_TYPE_HW_CACHE:
		return (config & 0xff) < PERF_COUNT_HW_CACHE_MAX &&
		       (config >> 8 & 0xff) < PERF_COUNT_HW_CACHE_OP_MAX &&
		       config >> 16 < PERF_COUNT_HW_CACHE_RESULT_MAX;
	default:
		return !(config >> VPMU_CONFIG_KIND_SHIFT);
	}
}

/*
 * Returns -ENOENT for a hardware event that the host lacks. The catalogue lists
 * each one that the host has, so it is not necessary to ask the device.
 */
static int attr_check_listed(const struct vpmu_device *dev, u64 config)
{
	switch (config >> VPMU_CONFIG_KIND_SHIFT) {
	case VPMU_KIND_HARDWARE:
	case VPMU_KIND_HW_CACHE:
	case VPMU_KIND_RAW:
		return attr_entry(dev, config) ? 0 : -ENOENT;
	default:
		return 0;
	}
}

/**
 * vpmu_attr_config() - translate type and config to the config of the vpmu PMU
 * @dev: the device
 * @attr: the attr
 * @config: filled in
 *
 * Return: 0; -ENOENT for a type without a matching VPMU_KIND_*, and for a
 * hardware event that the host lacks; -EINVAL for a number that is no event.
 */
int vpmu_attr_config(const struct vpmu_device *dev, const struct perf_event_attr *attr,
		     u64 *config)
{
	unsigned int i;

	if (attr->type == dev->counting.pmu.type) {
		*config = attr->config;
		return attr_check_listed(dev, *config);
	}
	for (i = 0; i < ARRAY_SIZE(attr_kinds); i++) {
		if (attr_kinds[i].type != attr->type)
			continue;
		if (!attr_is_defined(attr))
			return -EINVAL;
		*config = VPMU_CONFIG(attr_kinds[i].kind, attr->config);
		if (attr->type == PERF_TYPE_RAW)
			*config &= ~vpmu_arch_raw_ignored();
		return attr_check_listed(dev, *config);
	}
	return -ENOENT;
}

/**
 * vpmu_attr_type() - translate a request back to type and config
 * @dev: the device
 * @request: the request
 * @config: filled in with the config of the vpmu PMU
 *
 * Return: perf's own type for this kind of event, if there is one; else the
 * type of the PMU vpmu.
 */
u32 vpmu_attr_type(const struct vpmu_device *dev, const struct vpmu_open_request *request,
		   u64 *config)
{
	u32 kind = le32_to_cpu(request->kind);
	unsigned int i;

	*config = VPMU_CONFIG(kind, le64_to_cpu(request->config));
	for (i = 0; i < ARRAY_SIZE(attr_kinds); i++)
		if (attr_kinds[i].kind == kind)
			return attr_kinds[i].type;
	return dev->counting.pmu.type;
}

/**
 * vpmu_attr_request() - request the samples or packets that the host writes
 * @attr: the attr, which vpmu_attr_check_ring() must have accepted
 * @trace: whether the event writes packets, not samples
 * @request: the request whose sample and packet fields this function sets
 */
void vpmu_attr_request(const struct perf_event_attr *attr, bool trace,
		       struct vpmu_open_request *request)
{
	u64 sample_type = attr->sample_type;
	u32 flags = 0;

	/*
	 * An event without samples writes only records of other types. Such a
	 * record contains only those fields of sample_type that sample_id_all
	 * appends.
	 */
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
	if (attr->config1 & VPMU_CONFIG1_AUX_START_PAUSED)
		flags |= VPMU_OPEN_AUX_START_PAUSED;
	if (attr->config1 & VPMU_CONFIG1_AUX_PAUSE)
		flags |= VPMU_OPEN_AUX_PAUSE;
	if (attr->config1 & VPMU_CONFIG1_AUX_RESUME)
		flags |= VPMU_OPEN_AUX_RESUME;
	request->flags = cpu_to_le32(flags);
}

/**
 * vpmu_attr_replayed() - get the sample fields that a replay needs for an event
 *                        of perf core
 * @attr: the event's attr
 *
 * Return: PERF_SAMPLE_* fields for the request.
 */
u64 vpmu_attr_replayed(const struct perf_event_attr *attr)
{
	u64 type = SAMPLE_REPORTED;

	type |= attr->sample_type & (PERF_SAMPLE_CALLCHAIN | PERF_SAMPLE_READ);
	if (attr->sample_type & SAMPLE_REGS)
		type |= PERF_SAMPLE_REGS_INTR;
	return type;
}

/**
 * vpmu_attr_request_replay() - request the samples for an event of perf core
 * @attr: the event's attr
 * @request: its sample fields are filled in, except for the period and the
 *           wakeup
 */
void vpmu_attr_request_replay(const struct perf_event_attr *attr,
			      struct vpmu_open_request *request)
{
	u64 type = vpmu_attr_replayed(attr);
	u32 flags = 0;

	request->sample_type = cpu_to_le64(type);
	if (type & PERF_SAMPLE_READ)
		request->read_format = cpu_to_le64(PERF_FORMAT_ID | PERF_FORMAT_GROUP);
	if (type & PERF_SAMPLE_CALLCHAIN)
		request->max_stack = cpu_to_le32(attr->sample_max_stack);
	if (type & PERF_SAMPLE_REGS_INTR)
		request->regs_intr = cpu_to_le64(VPMU_ARCH_REGS);
	if (attr->exclude_callchain_kernel)
		flags |= VPMU_OPEN_EXCLUDE_CHAIN_KERNEL;
	if (attr->exclude_callchain_user)
		flags |= VPMU_OPEN_EXCLUDE_CHAIN_USER;
	request->flags |= cpu_to_le32(flags);
}

/* Whether the catalogue allows an event to exclude kernel or user mode. */
static bool attr_can_exclude(const struct vpmu_device *dev, u64 config)
{
	const struct vpmu_catalogue_entry *entry = attr_entry(dev, config);

	return entry && entry->flags & VPMU_CATALOGUE_EXCLUDES;
}

/* Whether an event counts time: a clock, the TSC or the guest's time. */
static bool attr_counts_time(u64 config)
{
	switch (config) {
	case VPMU_CONFIG(VPMU_KIND_SOFTWARE, PERF_COUNT_SW_CPU_CLOCK):
	case VPMU_CONFIG(VPMU_KIND_SOFTWARE, PERF_COUNT_SW_TASK_CLOCK):
	case VPMU_CONFIG(VPMU_KIND_TSC, 0):
	case VPMU_CONFIG(VPMU_KIND_GUEST_TIME, 0):
		return true;
	default:
		return false;
	}
}

/**
 * vpmu_attr_request_exclude() - request to exclude user or kernel mode, or
 *                               the host's work
 * @own: the event
 * @request: its flags are filled in
 *
 * Like the kernel's own clocks, a clock cannot exclude a mode: it counts both
 * modes, and a replay drops samples of the excluded mode. If the host writes the
 * samples, nothing can drop them, so the device refuses to exclude a mode.
 *
 * Return: 0; or -EACCES if the event would count the kernel for a program
 * without permission. perf(1) prints an explanation for this errno.
 */
int vpmu_attr_request_exclude(const struct vpmu_event *own, struct vpmu_open_request *request)
{
	const struct perf_event_attr *attr = &own->event->attr;
	u64 config = own->event->hw.config;
	u32 flags = 0;

	/*
	 * A device that counts only the guest does not need this flag, and may
	 * be too old to know it.
	 */
	if (attr->exclude_hv && own->dev->info.count_mode == VPMU_COUNT_VCPU)
		flags |= VPMU_OPEN_EXCLUDE_HOST;
	if ((attr->exclude_user || attr->exclude_kernel) && !own->file &&
	    !attr_can_exclude(own->dev, config)) {
		if (attr_counts_time(config))
			goto out;
		if (own->unprivileged && attr->exclude_kernel)
			return -EACCES;
	}
	if (attr->exclude_user)
		flags |= VPMU_OPEN_EXCLUDE_USER;
	if (attr->exclude_kernel)
		flags |= VPMU_OPEN_EXCLUDE_KERNEL;
out:
	request->flags |= cpu_to_le32(flags);
	return 0;
}

/**
 * vpmu_attr_needs_task() - whether the device must know the current task for an
 *                          event
 * @request: the request for the event
 * @trace: the event writes packets
 *
 * Return: true if records or packets contain the task or its user registers.
 */
bool vpmu_attr_needs_task(const struct vpmu_open_request *request, bool trace)
{
	const u64 samples = PERF_SAMPLE_TID | PERF_SAMPLE_CALLCHAIN | PERF_SAMPLE_REGS_USER |
			    PERF_SAMPLE_STACK_USER;

	return trace || le32_to_cpu(request->flags) & VPMU_OPEN_INHERIT_STAT ||
	       (request->period && le64_to_cpu(request->sample_type) & samples);
}

/**
 * vpmu_attr_opens_registers() - whether samples or packets of an open event
 *                               contain registers
 * @request: the request that opened the event
 * @config: the config of the vpmu PMU
 *
 * PERF_SAMPLE_REGS_USER is not considered: only registers from kernel mode can
 * leak the kernel's secrets.
 *
 * Return: true if they do.
 */
bool vpmu_attr_opens_registers(const struct vpmu_open_request *request, u64 config)
{
	return le64_to_cpu(request->sample_type) & PERF_SAMPLE_REGS_INTR ||
	       vpmu_config_has_registers(config);
}

static u64 attr_config1(const struct vpmu_open_request *request)
{
	u32 flags = le32_to_cpu(request->flags);

	return VPMU_CONFIG1_RING | VPMU_CONFIG1_PERSISTENT |
	       le32_to_cpu(request->engine) << VPMU_CONFIG1_ENGINE_SHIFT |
	       (flags & VPMU_OPEN_AUX_START_PAUSED ? VPMU_CONFIG1_AUX_START_PAUSED : 0) |
	       (flags & VPMU_OPEN_AUX_PAUSE ? VPMU_CONFIG1_AUX_PAUSE : 0) |
	       (flags & VPMU_OPEN_AUX_RESUME ? VPMU_CONFIG1_AUX_RESUME : 0);
}

/**
 * vpmu_attr_from_request() - translate a request back to an attr
 * @dev: the device
 * @request: the request
 * @attr: filled in
 */
void vpmu_attr_from_request(const struct vpmu_device *dev,
			    const struct vpmu_open_request *request,
			    struct perf_event_attr *attr)
{
	u32 flags = le32_to_cpu(request->flags);
	u64 config;

	*attr = (struct perf_event_attr) {
		.type = vpmu_attr_type(dev, request, &config),
		.size = VPMU_ATTR_SIZE,
		.sample_period = le64_to_cpu(request->period),
		.sample_type = le64_to_cpu(request->sample_type),
		.read_format = le64_to_cpu(request->read_format),
		.disabled = !(flags & VPMU_OPEN_ENABLED),
		.pinned = !!(flags & VPMU_OPEN_PINNED),
		.exclude_user = !!(flags & VPMU_OPEN_EXCLUDE_USER),
		.exclude_kernel = !!(flags & VPMU_OPEN_EXCLUDE_KERNEL),
		.exclude_hv = !!(flags & VPMU_OPEN_EXCLUDE_HOST),
		.freq = !!(flags & VPMU_OPEN_FREQ),
		.inherit_stat = !!(flags & VPMU_OPEN_INHERIT_STAT),
		.watermark = !!(flags & VPMU_OPEN_WATERMARK),
		.sample_id_all = !!(flags & VPMU_OPEN_SAMPLE_ID_ALL),
		.exclude_callchain_kernel = !!(flags & VPMU_OPEN_EXCLUDE_CHAIN_KERNEL),
		.exclude_callchain_user = !!(flags & VPMU_OPEN_EXCLUDE_CHAIN_USER),
		.write_backward = !!(flags & VPMU_OPEN_BACKWARD),
		.wakeup_events = le32_to_cpu(request->wakeup),
		.sample_regs_user = le64_to_cpu(request->regs_user),
		.sample_regs_intr = le64_to_cpu(request->regs_intr),
		.sample_stack_user = le32_to_cpu(request->stack_user),
		.aux_watermark = le32_to_cpu(request->aux_watermark),
		.sample_max_stack = le32_to_cpu(request->max_stack),
		.config1 = attr_config1(request),
	};
	/* The configs of perf's own types do not contain the kind. */
	attr->config = attr->type == dev->counting.pmu.type ? config : le64_to_cpu(request->config);
}

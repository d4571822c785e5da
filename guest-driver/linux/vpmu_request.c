// SPDX-License-Identifier: GPL-2.0
/*
 * What a request to open an event says, in perf's words: for events that others have
 * opened. The way there is in vpmu_attr.c.
 */
#include <linux/perf_event.h>

#include "compat.h"
#include "vpmu.h"
#include "vpmu_file.h"

/**
 * vpmu_request_type() - what to open the same event with
 * @dev: the device
 * @request: the request
 * @config: perf_event_attr::config of the vpmu PMU for it
 *
 * Return: perf_event_attr::type with which perf knows it, else the vpmu PMU's.
 */
u32 vpmu_request_type(const struct vpmu_device *dev, const struct vpmu_open_request *request,
		      u64 *config)
{
	u32 kind = le32_to_cpu(request->kind);

	*config = VPMU_CONFIG(kind, le64_to_cpu(request->config));
	switch (kind) {
	case VPMU_KIND_HARDWARE:
		return PERF_TYPE_HARDWARE;
	case VPMU_KIND_SOFTWARE:
		return PERF_TYPE_SOFTWARE;
	case VPMU_KIND_HW_CACHE:
		return PERF_TYPE_HW_CACHE;
	case VPMU_KIND_RAW:
		return PERF_TYPE_RAW;
	default:
		return dev->pmu.type;
	}
}

/**
 * vpmu_request_config() - the other way round: an event of one of perf's types
 * @type: perf_event_attr::type, not a PMU's own
 * @config: perf_event_attr::config
 * @own: filled in with the config of the vpmu PMU
 *
 * Return: 0; -ENOENT for a type that no kind stands for; -EINVAL for a config too large.
 */
int vpmu_request_config(u32 type, u64 config, u64 *own)
{
	u32 kind;

	switch (type) {
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
	if (config >> VPMU_CONFIG_KIND_SHIFT)
		return -EINVAL;
	*own = VPMU_CONFIG(kind, config);
	return 0;
}

/**
 * vpmu_request_excludes() - whether an event can leave the kernel's or programs' part out
 * @dev: the device
 * @config: of the vpmu PMU
 *
 * Return: true if the catalogue says so.
 */
bool vpmu_request_excludes(const struct vpmu_device *dev, u64 config)
{
	const struct vpmu_catalogue_entry *entry;
	u32 i;

	for (i = 0; i < dev->info.catalogue_len; i++) {
		entry = &dev->catalogue[i];
		if (entry->kind != config >> VPMU_CONFIG_KIND_SHIFT)
			continue;
		if (entry->flags & VPMU_CATALOGUE_ANY_CONFIG ||
		    VPMU_CONFIG(entry->kind, entry->config) == config)
			return entry->flags & VPMU_CATALOGUE_EXCLUDES;
	}
	return false;
}

/**
 * vpmu_request_is_time() - whether an event counts time
 * @config: of the vpmu PMU
 *
 * Return: true for clocks and the like.
 */
bool vpmu_request_is_time(u64 config)
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
 * vpmu_request_names_tasks() - whether records or packets say who ran, or take from its registers
 * @request: the request
 * @trace: packets
 *
 * Return: true if so.
 */
bool vpmu_request_names_tasks(const struct vpmu_open_request *request, bool trace)
{
	const u64 samples = PERF_SAMPLE_TID | PERF_SAMPLE_CALLCHAIN | PERF_SAMPLE_REGS_USER |
			    PERF_SAMPLE_STACK_USER;

	return trace || le32_to_cpu(request->flags) & VPMU_OPEN_INHERIT_STAT ||
	       (request->period && le64_to_cpu(request->sample_type) & samples);
}

/**
 * vpmu_request_tells_registers() - whether they tell registers, by which the kernel's secrets
 * @request: the request
 * @config: from vpmu_request_type()
 *
 * Return: true if so.
 */
bool vpmu_request_tells_registers(const struct vpmu_open_request *request, u64 config)
{
	return le64_to_cpu(request->sample_type) & PERF_SAMPLE_REGS_INTR ||
	       vpmu_config_tells_registers(config);
}

static void request_aux_action(u32 flags, struct perf_event_attr *attr)
{
	attr->vpmu_aux_action = (flags & VPMU_OPEN_AUX_START_PAUSED ? VPMU_AUX_START_PAUSED : 0) |
				(flags & VPMU_OPEN_AUX_PAUSE ? VPMU_AUX_PAUSE : 0) |
				(flags & VPMU_OPEN_AUX_RESUME ? VPMU_AUX_RESUME : 0);
}

/**
 * vpmu_request_attr() - the attr that would have led to a request
 * @dev: the device
 * @request: the request
 * @attr: filled in
 */
void vpmu_request_attr(const struct vpmu_device *dev, const struct vpmu_open_request *request,
		       struct perf_event_attr *attr)
{
	u32 flags = le32_to_cpu(request->flags);
	u64 config;

	*attr = (struct perf_event_attr) {
		.type = vpmu_request_type(dev, request, &config),
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
	};
	/* Other than the vpmu PMU's, perf's types have no kind in it. */
	attr->config = attr->type == dev->pmu.type ? config : le64_to_cpu(request->config);
	request_aux_action(flags, attr);
}

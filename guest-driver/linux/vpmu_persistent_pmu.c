// SPDX-License-Identifier: GPL-2.0
/*
 * /sys/bus/event_source/devices/persistent: lists the current persistent
 * events, and lets perf_event_open(2) open them; see vpmu_view.c.
 */
#include <linux/capability.h>
#include <linux/device.h>
#include <linux/module.h>
#include <linux/perf_event.h>
#include <linux/sysfs.h>

#include "perf_core_private.h"
#include "vpmu.h"
#include "vpmu_attr.h"
#include "vpmu_event.h"
#include "vpmu_file.h"
#include "vpmu_persistent.h"
#include "vpmu_view.h"

PMU_FORMAT_ATTR(id, "config:0-63");

static struct attribute *format_attrs[] = {
	&format_attr_id.attr,
	NULL,
};

static const struct attribute_group format_group = {
	.name = "format",
	.attrs = format_attrs,
};

/* Empty: vpmu_persistent_show() adds files while the PMU is registered */
static struct attribute *events_attrs[] = {
	NULL,
};

static const struct attribute_group events_group = {
	.name = "events",
	.attrs = events_attrs,
};

static const struct attribute_group *persistent_groups[] = {
	&format_group,
	&events_group,
	NULL,
};

static ssize_t event_show(struct device *device, struct device_attribute *attr, char *buf)
{
	const struct vpmu_file *file = container_of(attr, struct vpmu_file, persist.attr);

	return sysfs_emit(buf, "id=0x%llx\n", file->id);
}

/**
 * vpmu_persistent_show() - list an event in sysfs
 * @file: the file of a persistent event, with its name
 */
void vpmu_persistent_show(struct vpmu_file *file)
{
	struct vpmu_device *dev = file->dev;
	int err;

	if (file->persist.shown)
		return;
	sysfs_attr_init(&file->persist.attr.attr);
	file->persist.attr.attr.name = file->persist.name;
	file->persist.attr.attr.mode = 0444;
	file->persist.attr.show = event_show;
	err = sysfs_add_file_to_group(&dev->persistent.pmu.dev->kobj, &file->persist.attr.attr,
				      events_group.name);
	file->persist.shown = !err;
	if (err)
		vpmu_warn(dev, "persistent event %llu is not in sysfs (%d)\n", file->id,
			  err);
}

/**
 * vpmu_persistent_hide() - remove an event from sysfs, and wait for its readers
 * @file: the event's file
 */
void vpmu_persistent_hide(struct vpmu_file *file)
{
	if (!file->persist.shown)
		return;
	sysfs_remove_file_from_group(&file->dev->persistent.pmu.dev->kobj, &file->persist.attr.attr,
				     events_group.name);
	file->persist.shown = false;
}

static struct vpmu_vcpu *view_vcpu(const struct perf_event *event)
{
	const struct vpmu_view *view = event->pmu_private;

	return vpmu_vcpu_local(view->file->dev);
}

static void view_read(struct perf_event *event)
{
	vpmu_view_read(event->pmu_private);
}

static void view_start(struct perf_event *event, int flags)
{
	struct vpmu_vcpu *vcpu = view_vcpu(event);

	if (!vcpu || !(event->hw.state & PERF_HES_STOPPED))
		return;
	event->hw.state = 0;
	vpmu_view_start(vcpu, event->pmu_private);
}

static void view_stop(struct perf_event *event, int flags)
{
	struct vpmu_vcpu *vcpu = view_vcpu(event);

	if (!vcpu || event->hw.state & PERF_HES_STOPPED || vpmu_stop_is_throttle(flags))
		return;
	event->hw.state = PERF_HES_STOPPED | PERF_HES_UPTODATE;
	vpmu_view_stop(vcpu, event->pmu_private);
}

static int view_add(struct perf_event *event, int flags)
{
	event->hw.state = PERF_HES_STOPPED | PERF_HES_UPTODATE;
	if (flags & PERF_EF_START)
		view_start(event, flags);
	return 0;
}

static void view_del(struct perf_event *event, int flags)
{
	view_stop(event, PERF_EF_UPDATE);
}

static void view_event_mapped(struct perf_event *event, struct mm_struct *mm)
{
	vpmu_view_show(event->pmu_private);
}

static void view_destroy(struct perf_event *event)
{
	vpmu_view_close(event->pmu_private);
}

static int view_event_init(struct perf_event *event)
{
	struct vpmu_device *dev = container_of(event->pmu, struct vpmu_device, persistent.pmu);
	struct perf_event_attr *attr = &event->attr;
	struct vpmu_file *file;
	struct vpmu_view *view;
	int err;

	if (attr->type != event->pmu->type)
		return -ENOENT;
	if (attr->precise_ip || has_branch_stack(event))
		return -EOPNOTSUPP;
	err = vpmu_attr_check_replay(event);
	if (err)
		return err;
	if (event->cpu < 0 || perf_core_is_of_task(event))
		return -EINVAL;
	if (attr->config1 || attr->config2 || attr->exclude_user || attr->exclude_kernel ||
	    attr->exclude_host || attr->exclude_idle)
		return -EINVAL;
	if (!perfmon_capable())
		return -EPERM;
	file = vpmu_persistent_get(dev, attr->config);
	if (IS_ERR(file))
		return PTR_ERR(file);
	err = -EINVAL;
	if (file->place.cpu != event->cpu)
		goto put;
	err = -ENOMEM;
	view = vpmu_view_alloc(event);
	if (!view)
		goto put;
	err = vpmu_view_open(view, file);
	if (err) {
		vpmu_view_close(view);
		goto put;
	}
	/*
	 * The persistent event has its own period: perf core must not adapt it.
	 */
	attr->freq = 0;
	event->pmu_private = view;
	event->destroy = view_destroy;
	return 0;
put:
	vpmu_persistent_put(file);
	return err;
}

/**
 * vpmu_persistent_pmu_register() - register the PMU of persistent events
 * @dev: the device
 *
 * Return: 0 or a negative errno.
 */
int vpmu_persistent_pmu_register(struct vpmu_device *dev)
{
	int err;

	dev->persistent.pmu = (struct pmu) {
		.module		= THIS_MODULE,
		.attr_groups	= persistent_groups,
		/*
		 * Views are CPU events: with perf_invalid_context, perf core
		 * refuses events of tasks.
		 */
		.task_ctx_nr	= perf_invalid_context,
		.event_init	= view_event_init,
		.event_mapped	= view_event_mapped,
		.add		= view_add,
		.del		= view_del,
		.start		= view_start,
		.stop		= view_stop,
		.read		= view_read,
	};
	err = perf_pmu_register(&dev->persistent.pmu, "persistent", -1);
	if (!err)
		dev->info.persistent_type = dev->persistent.pmu.type;
	return err;
}

/**
 * vpmu_persistent_pmu_unregister() - unregister the PMU, after all views are
 *                                    closed
 * @dev: the device
 */
void vpmu_persistent_pmu_unregister(struct vpmu_device *dev)
{
	perf_pmu_unregister(&dev->persistent.pmu);
}

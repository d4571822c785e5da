// SPDX-License-Identifier: GPL-2.0
/*
 * Creates the sysfs attributes in /sys/bus/event_source/devices/vpmu:
 * the format of an event's config, and the events that this host can count.
 *
 * Do not add a cpumask attribute: perf would treat the PMU as an uncore PMU and
 * refuse to count tasks.
 */
#include <linux/ctype.h>
#include <linux/device.h>
#include <linux/perf_event.h>
#include <linux/slab.h>
#include <linux/sysfs.h>

#include "vpmu.h"

PMU_FORMAT_ATTR(event, "config:0-47");
PMU_FORMAT_ATTR(kind, "config:48-63");
PMU_FORMAT_ATTR(enable_on_starter, "config1:0");
PMU_FORMAT_ATTR(engine, "config1:1-2");

static struct attribute *format_attrs[] = {
	&format_attr_event.attr,
	&format_attr_kind.attr,
	&format_attr_enable_on_starter.attr,
	&format_attr_engine.attr,
	NULL,
};

static const struct attribute_group format_group = {
	.name = "format",
	.attrs = format_attrs,
};

/**
 * struct text_attr - a sysfs file with fixed contents
 * @attr: the device attribute
 * @name: name of the file
 * @text: contents of the file, without the newline
 */
struct text_attr {
	struct device_attribute attr;
	char name[sizeof_field(struct vpmu_catalogue_entry, name) + sizeof(".scale")];
	char text[48];
};

static ssize_t text_show(struct device *device, struct device_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%s\n", container_of(attr, struct text_attr, attr)->text);
}

/* The device chose the name: show it only if perf can parse it. */
static bool name_fits(const char *name)
{
	if (!islower(*name))
		return false;
	for (; *name; name++)
		if (!islower(*name) && !isdigit(*name) && *name != '-')
			return false;
	return true;
}

static struct attribute *text_attr_init(struct text_attr *text)
{
	sysfs_attr_init(&text->attr.attr);
	text->attr.attr.name = text->name;
	text->attr.attr.mode = 0444;
	text->attr.show = text_show;
	return &text->attr.attr;
}

/**
 * vpmu_sysfs_init() - create a PMU's attribute groups from the catalogue
 * @dev: the device
 * @sysfs: filled in
 *
 * Return: 0 or -ENOMEM.
 */
int vpmu_sysfs_init(struct vpmu_device *dev, struct vpmu_sysfs *sysfs)
{
	const struct vpmu_catalogue_entry *entry;
	u32 i, len = dev->info.catalogue_len;
	struct attribute_group *group;
	struct attribute **attrs;
	struct text_attr *text;

	/*
	 * One allocation holds the group, its NULL-terminated list, and up to
	 * three files for each entry of the catalogue: the event, its unit and
	 * its scale.
	 */
	group = kvzalloc(sizeof(*group) + (3 * len + 1) * sizeof(*attrs) +
			 3 * len * sizeof(*text), GFP_KERNEL);
	if (!group)
		return -ENOMEM;
	attrs = (struct attribute **)(group + 1);
	text = (struct text_attr *)(attrs + 3 * len + 1);
	group->name = "events";
	group->attrs = attrs;

	for (i = 0; i < len; i++) {
		entry = &dev->catalogue[i];
		if (!name_fits(entry->name) || entry->config >> VPMU_CONFIG_KIND_SHIFT ||
		    entry->kind >> 16) {
			vpmu_warn(dev,
				  "catalogue entry %u is not listed in sysfs: invalid name, kind or config\n",
				  i);
			continue;
		}
		strscpy(text->name, entry->name, sizeof(text->name));
		/* If the event takes any config, this is its default. */
		snprintf(text->text, sizeof(text->text), "event=0x%llx,kind=0x%x",
			 entry->config, entry->kind);
		*attrs++ = text_attr_init(text++);

		if (!*entry->unit)
			continue;
		snprintf(text->name, sizeof(text->name), "%s.unit", entry->name);
		strscpy(text->text, entry->unit, sizeof(text->text));
		*attrs++ = text_attr_init(text++);

		/* Tools expect a scale beside each unit. */
		snprintf(text->name, sizeof(text->name), "%s.scale", entry->name);
		strscpy(text->text, "1", sizeof(text->text));
		*attrs++ = text_attr_init(text++);
	}

	sysfs->events = group;
	sysfs->groups[0] = &format_group;
	sysfs->groups[1] = group;
	return 0;
}

/**
 * vpmu_sysfs_exit() - free attribute groups, after the PMU was unregistered
 * @sysfs: the groups
 */
void vpmu_sysfs_exit(struct vpmu_sysfs *sysfs)
{
	kvfree(sysfs->events);
	sysfs->events = NULL;
}

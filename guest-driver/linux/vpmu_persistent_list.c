// SPDX-License-Identifier: GPL-2.0
/*
 * VPMU_IOC_PERSISTENT: the device's list of persistent events, for programs.
 */
#include <linux/build_bug.h>
#include <linux/minmax.h>
#include <linux/perf_event.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/uaccess.h>

#include "vpmu.h"
#include "vpmu_attr.h"
#include "vpmu_persistent.h"

/* Events per request */
#define LIST_STEP	8

static void list_entry_fill(struct vpmu_device *dev, const struct vpmu_persistent_event *event,
			    struct vpmu_persistent_entry *entry)
{
	struct perf_event_attr attr;
	u32 map = le32_to_cpu(event->map);

	static_assert(sizeof(attr) >= sizeof(entry->attr));
	memset(entry, 0, sizeof(*entry));
	entry->id = le64_to_cpu(event->id);
	strscpy(entry->name, event->name, sizeof(entry->name));
	/* While the CPU is unknown, this is -1: the program reads U32_MAX. */
	entry->cpu = vpmu_vcpu_cpu(dev, le32_to_cpu(event->open.context));
	entry->pages = le32_to_cpu(event->pages);
	entry->engine = le32_to_cpu(event->open.engine);
	entry->flags = le32_to_cpu(event->flags) & VPMU_PERSISTENT_OPERATOR;
	if (entry->pages && map & VPMU_MAP_WINDOW)
		entry->flags |= VPMU_PERSISTENT_WINDOW;
	if (entry->pages && !(map & VPMU_MAP_WRITABLE))
		entry->flags |= VPMU_PERSISTENT_OVERWRITE;
	vpmu_attr_from_request(dev, &event->open, &attr);
	memcpy(entry->attr, &attr, sizeof(entry->attr));
}

/* Copies up to @count entries; returns their number, or a negative errno. */
static int list_step(struct vpmu_device *dev, u64 *after, u32 count,
		     struct vpmu_persistent_event *events, struct vpmu_persistent_entry *entries)
{
	int got, i;

	got = vpmu_control_persistent(dev, *after, events, min_t(u32, count, LIST_STEP));
	/* A device without persistent events may refuse the request. */
	if (got == -EOPNOTSUPP)
		return 0;
	for (i = 0; i < got; i++) {
		list_entry_fill(dev, &events[i], &entries[i]);
		*after = entries[i].id;
	}
	return got;
}

/**
 * vpmu_persistent_list() - VPMU_IOC_PERSISTENT
 * @dev: the device
 * @arg: the id after which the list starts, and the program's buffer
 *
 * Every program may list the events; opening one needs permission.
 *
 * Return: the number of entries written, or a negative errno.
 */
long vpmu_persistent_list(struct vpmu_device *dev, struct vpmu_persistent __user *arg)
{
	struct vpmu_persistent_entry __user *to;
	struct vpmu_persistent_entry *entries;
	struct vpmu_persistent_event *events;
	struct vpmu_persistent wanted;
	u32 done = 0;
	long ret;
	int got;

	if (copy_from_user(&wanted, arg, sizeof(wanted)))
		return -EFAULT;
	if (wanted.reserved)
		return -EINVAL;
	wanted.count = min_t(u32, wanted.count, INT_MAX);
	to = u64_to_user_ptr(wanted.entries);
	entries = kcalloc(LIST_STEP, sizeof(*entries), GFP_KERNEL);
	events = kcalloc(LIST_STEP, sizeof(*events), GFP_KERNEL);
	ret = -ENOMEM;
	if (!entries || !events)
		goto free;
	while (done < wanted.count) {
		got = list_step(dev, &wanted.after, wanted.count - done, events, entries);
		ret = got;
		if (got < 0)
			goto free;
		if (!got)
			break;
		ret = -EFAULT;
		if (copy_to_user(to + done, entries, got * sizeof(*entries)))
			goto free;
		done += got;
	}
	ret = done;
free:
	kfree(events);
	kfree(entries);
	return ret;
}

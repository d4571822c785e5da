// SPDX-License-Identifier: GPL-2.0
/*
 * The control queue's requests about persistent events, and about rings in the
 * window.
 */
#include <linux/minmax.h>
#include <linux/slab.h>
#include <linux/string.h>

#include "vpmu.h"

/**
 * vpmu_control_detach() - make an event persistent
 * @dev: the device
 * @id: the event's id
 * @name: VPMU_PERSISTENT_NAME bytes padded with zeros; if all are zero, the
 *        event keeps its name or, if it has none, gets one from the device
 *
 * Return: 0 or a negative errno, which may come from the device.
 */
int vpmu_control_detach(struct vpmu_device *dev, u64 id, const char *name)
{
	struct vpmu_detach_request *request;
	int ret;

	request = kzalloc(sizeof(*request), GFP_KERNEL);
	if (!request)
		return -ENOMEM;
	request->header.op = cpu_to_le32(VPMU_CONTROL_DETACH);
	request->header.event = cpu_to_le64(id);
	memcpy(request->name, name, sizeof(request->name));
	ret = vpmu_control_call(dev, request, sizeof(*request), NULL);
	kfree(request);
	return ret;
}

/**
 * vpmu_control_attach() - make an event non-persistent
 * @dev: the device
 * @id: the event's id
 *
 * Return: 0 or a negative errno, which may come from the device.
 */
int vpmu_control_attach(struct vpmu_device *dev, u64 id)
{
	return vpmu_control_event(dev, VPMU_CONTROL_ATTACH, id);
}

/**
 * vpmu_control_map_window() - give a persistent event a ring in the window
 * @dev: the device
 * @id: the event's id
 * @count: number of pages of the ring, including the metadata page
 * @flags: VPMU_MAP_WRITABLE or zero
 * @page: filled in with the number of the ring's first page in the window, on
 *        success
 *
 * Return: 0 or a negative errno, which may come from the device.
 */
int vpmu_control_map_window(struct vpmu_device *dev, u64 id, u32 count, u32 flags, u32 *page)
{
	struct vpmu_map_request *request;
	int ret;

	request = kzalloc(sizeof(*request), GFP_KERNEL);
	if (!request)
		return -ENOMEM;
	request->header.op = cpu_to_le32(VPMU_CONTROL_MAP);
	request->header.event = cpu_to_le64(id);
	request->pages = cpu_to_le32(count);
	request->flags = cpu_to_le32(flags | VPMU_MAP_WINDOW);
	ret = vpmu_control_call(dev, request, sizeof(*request), page);
	kfree(request);
	return ret;
}

/* Whether the ids in @events ascend and are above @after. */
static bool persistent_ascend(const struct vpmu_persistent_event *events, u32 count, u64 after)
{
	u32 i;

	for (i = 0; i < count; i++) {
		if (le64_to_cpu(events[i].id) <= after)
			return false;
		after = le64_to_cpu(events[i].id);
	}
	return true;
}

/**
 * vpmu_control_persistent() - read entries of the list of persistent events
 * @dev: the device
 * @after: read only events with a higher id
 * @events: filled in, in the order of their ids
 * @count: maximum number of events to read
 *
 * Return: the number of events in @events; 0 at the end of the list; or a
 * negative errno, which may come from the device.
 */
int vpmu_control_persistent(struct vpmu_device *dev, u64 after,
			    struct vpmu_persistent_event *events, u32 count)
{
	struct vpmu_persistent_request *request;
	struct vpmu_control_reply *reply;
	size_t len;
	u32 got;
	int ret = -ENOMEM;

	len = sizeof(*reply) + count * sizeof(*events);
	request = kzalloc(sizeof(*request), GFP_KERNEL);
	reply = kzalloc(len, GFP_KERNEL);
	if (!request || !reply)
		goto free;
	request->header.op = cpu_to_le32(VPMU_CONTROL_PERSISTENT);
	request->after = cpu_to_le64(after);
	request->count = cpu_to_le32(count);

	ret = vpmu_control_send(dev, request, sizeof(*request), reply, len);
	if (ret < 0)
		goto free;
	len = ret;
	ret = len < sizeof(*reply) ? -EPROTO : -(int)le32_to_cpu(reply->status);
	if (ret)
		goto free;
	got = le32_to_cpu(reply->value);
	ret = -EPROTO;
	if (got > count || len < sizeof(*reply) + got * sizeof(*events))
		goto free;
	memcpy(events, reply + 1, got * sizeof(*events));
	if (persistent_ascend(events, got, after))
		ret = got;
free:
	kfree(reply);
	kfree(request);
	return ret;
}

// SPDX-License-Identifier: GPL-2.0
/*
 * The control queue: requests whose sender sleeps until the answer comes, and
 * requests for which nobody waits.
 */
#include <linux/atomic.h>
#include <linux/completion.h>
#include <linux/jiffies.h>
#include <linux/minmax.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>
#include <linux/virtio_config.h>

#include "vpmu.h"

/* Catalogue entries per request */
#define CATALOGUE_STEP	16

static unsigned int answer_seconds = 30;
module_param(answer_seconds, uint, 0644);
MODULE_PARM_DESC(answer_seconds,
		 "Seconds within which the device must answer a request; if it does not, the driver gives up the device (default 30)");

/* A request whose sender sleeps until it is answered. */
struct control_wait {
	struct vpmu_control_request request;
	struct completion answered;
};

enum open_state { OPEN_WAITS, OPEN_ANSWERED, OPEN_LEFT };

/**
 * struct control_open - a request to open an event, whose sender may be killed
 * @request: the request
 * @dev: the device
 * @answered: completed for the sender
 * @state: enum open_state; decides who frees the request. The sender frees it
 *         after the answer. If the sender stops waiting before the answer,
 *         open_answered() or open_closed() frees it
 * @asked: buffer of the request
 * @reply: buffer of the reply
 * @close: closes the event if the sender no longer waits
 */
struct control_open {
	struct vpmu_control_request request;
	struct vpmu_device *dev;
	struct completion answered;
	atomic_t state;
	struct vpmu_open_request asked;
	struct vpmu_open_reply reply;
	struct vpmu_control_close close;
};

static int control_add(struct vpmu_device *dev, struct vpmu_control_request *request)
{
	struct scatterlist out, in, *sgs[] = { &out, &in };

	lockdep_assert_held(&dev->control.lock);
	sg_init_one(&out, request->out, request->out_len);
	sg_init_one(&in, request->in, request->in_len);
	return virtqueue_add_sgs(dev->control.vq, sgs, 1, 1, request, GFP_ATOMIC);
}

/*
 * Moves waiting requests to the queue until it is full. If a request cannot be
 * added for a reason other than a full queue, it goes to @refused.
 */
static void control_refill(struct vpmu_device *dev, struct list_head *refused)
{
	struct vpmu_control_request *request, *next;
	int err;

	lockdep_assert_held(&dev->control.lock);
	list_for_each_entry_safe(request, next, &dev->control.waiting, entry) {
		err = control_add(dev, request);
		if (err == -ENOSPC)
			break;
		request->ret = err;
		list_move_tail(&request->entry, err ? refused : &dev->control.sent);
	}
	virtqueue_kick(dev->control.vq);
}

/* Moves all unanswered requests to @refused, with the result @err. */
static void control_fail(struct vpmu_device *dev, struct list_head *refused, int err)
{
	struct vpmu_control_request *request;

	lockdep_assert_held(&dev->control.lock);
	list_splice_tail_init(&dev->control.sent, refused);
	list_splice_tail_init(&dev->control.waiting, refused);
	list_for_each_entry(request, refused, entry) {
		request->ret = err;
		request->reset = dev->control.closed;
	}
}

static void control_answer(struct list_head *requests)
{
	struct vpmu_control_request *request, *next;

	/* answered() may free the request. */
	list_for_each_entry_safe(request, next, requests, entry)
		request->answered(request);
}

/**
 * vpmu_control_callback() - handle an interrupt of the control queue
 * @vq: the control queue
 */
void vpmu_control_callback(struct virtqueue *vq)
{
	struct vpmu_device *dev = vq->vdev->priv;
	struct vpmu_control_request *request;
	LIST_HEAD(answered);
	LIST_HEAD(refused);
	unsigned long flags;
	unsigned int len;

	spin_lock_irqsave(&dev->control.lock, flags);
	if (dev->control.closed)
		goto unlock;
	while ((request = virtqueue_get_buf(vq, &len))) {
		request->ret = min_t(size_t, len, request->in_len);
		list_move_tail(&request->entry, &answered);
	}
	if (virtqueue_is_broken(vq))
		control_fail(dev, &refused, -EIO);
	else if (!list_empty(&dev->control.waiting))
		control_refill(dev, &refused);
unlock:
	spin_unlock_irqrestore(&dev->control.lock, flags);
	control_answer(&answered);
	control_answer(&refused);
}

/**
 * vpmu_control_post() - send a request without waiting for its answer
 * @dev: the device
 * @request: the request; the device owns it and its buffers until it answers
 *
 * The device executes requests in the order in which they are posted.
 */
static void vpmu_control_post(struct vpmu_device *dev, struct vpmu_control_request *request)
{
	LIST_HEAD(refused);
	unsigned long flags;

	spin_lock_irqsave(&dev->control.lock, flags);
	request->resets = dev->control.resets;
	request->reset = false;
	list_add_tail(&request->entry, &dev->control.waiting);
	if (dev->control.closed)
		control_fail(dev, &refused, dev->control.closed);
	else
		control_refill(dev, &refused);
	spin_unlock_irqrestore(&dev->control.lock, flags);
	control_answer(&refused);
}

/**
 * vpmu_control_open_queue() - allow requests on a new queue
 * @dev: the device, with a new queue
 */
void vpmu_control_open_queue(struct vpmu_device *dev)
{
	spin_lock_irq(&dev->control.lock);
	dev->control.closed = 0;
	spin_unlock_irq(&dev->control.lock);
}

/**
 * vpmu_control_close_queue() - fail all requests, after the device was reset
 * @dev: the device
 * @err: the negative errno that unanswered and later requests return
 *
 * Once this function has returned, nothing accesses the queue.
 */
void vpmu_control_close_queue(struct vpmu_device *dev, int err)
{
	LIST_HEAD(refused);

	spin_lock_irq(&dev->control.lock);
	dev->control.closed = err;
	WRITE_ONCE(dev->control.resets, dev->control.resets + 1);
	control_fail(dev, &refused, err);
	spin_unlock_irq(&dev->control.lock);
	control_answer(&refused);
}

static void control_wake(struct vpmu_control_request *request)
{
	complete(&container_of(request, struct control_wait, request)->answered);
}

/*
 * Gives up a device that has not answered in time. When a device is removed,
 * the driver calls vpmu_control_close_queue() and then waits for the work
 * life.give_up. Both functions take control.lock, so this one schedules the
 * work before the queue is closed, or not at all. If a sender gets here only
 * after the device has been bound again, its request is already completed, and
 * this function does nothing.
 */
static void control_give_up(struct vpmu_device *dev, struct completion *answered)
{
	spin_lock_irq(&dev->control.lock);
	if (!dev->control.closed && !completion_done(answered))
		vpmu_device_give_up(dev);
	spin_unlock_irq(&dev->control.lock);
}

/*
 * Waits for an answer, or until the device is given up because it has not
 * answered in time or is gone. Waits in steps of one second: if the whole VM is stopped
 * for a while, at most one second of that time counts. Returns 0, or -EINTR if
 * the sender was killed.
 */
static int control_await(struct vpmu_device *dev, struct completion *answered, bool killable)
{
	unsigned int seconds;
	long left;

	for (seconds = max(READ_ONCE(answer_seconds), 1U); seconds; seconds--) {
		if (killable)
			left = wait_for_completion_killable_timeout(answered, HZ);
		else
			left = wait_for_completion_timeout(answered, HZ);
		if (left)
			return left > 0 ? 0 : -EINTR;
		if (vpmu_life_is_gone(dev))
			break;
	}
	control_give_up(dev, answered);
	wait_for_completion(answered);
	return 0;
}

/*
 * Sends a request and waits for its answer. Both buffers are from kmalloc. Sets
 * *@reset if the device was reset before it answered. Returns the length of the
 * answer in bytes, or a negative errno.
 */
static int control_send(struct vpmu_device *dev, void *request, size_t request_len, void *reply,
			size_t reply_len, bool *reset)
{
	struct control_wait wait = {
		.request = {
			.out = request,
			.out_len = request_len,
			.in = reply,
			.in_len = reply_len,
			.answered = control_wake,
		},
	};

	init_completion(&wait.answered);
	vpmu_control_post(dev, &wait.request);
	/*
	 * The buffers belong to the device until it answers or is reset, so a
	 * signal must not end this wait.
	 */
	control_await(dev, &wait.answered, false);
	*reset = wait.request.reset;
	return wait.request.ret;
}

/* vpmu_control_call(). Sets *@reset if the device was reset before it answered. */
static int control_call(struct vpmu_device *dev, void *request, size_t len, u32 *value,
			bool *reset)
{
	struct vpmu_control_reply *reply;
	int ret;

	reply = kzalloc(sizeof(*reply), GFP_KERNEL);
	if (!reply)
		return -ENOMEM;
	ret = control_send(dev, request, len, reply, sizeof(*reply), reset);
	if (ret >= 0)
		ret = ret < sizeof(*reply) ? -EPROTO : -(int)le32_to_cpu(reply->status);
	if (!ret && value)
		*value = le32_to_cpu(reply->value);
	kfree(reply);
	return ret;
}

/**
 * vpmu_control_call() - send a request with a vpmu_control_reply as its answer
 * @dev: the device
 * @op: VPMU_CONTROL_*
 * @id: the event's id; zero if the request is about no event
 * @request: the request without its header; it is copied
 * @len: length of the request in bytes, including the header
 * @value: filled in with the reply's value, on success; NULL if the caller does
 *         not need the value
 *
 * Return: 0 or a negative errno, which may come from the device.
 */
int vpmu_control_call(struct vpmu_device *dev, u32 op, u64 id, const void *request, size_t len,
		      u32 *value)
{
	struct vpmu_control_header *copy = kmemdup(request, len, GFP_KERNEL);
	bool reset;
	int ret;

	if (!copy)
		return -ENOMEM;
	copy->op = cpu_to_le32(op);
	copy->event = cpu_to_le64(id);
	ret = control_call(dev, copy, len, value, &reset);
	kfree(copy);
	return ret;
}

/**
 * vpmu_control_event() - send a request that is only a header
 * @dev: the device
 * @op: VPMU_CONTROL_*
 * @id: the event's id
 *
 * If the device was reset before it answered, requests to close an event or to
 * unmap pages succeed: the reset has closed all events that are not persistent,
 * and unmapped all pages of the guest. They also succeed if the device does not
 * have the event: ids are never reused, so a reset has ended the event.
 *
 * Return: 0 or a negative errno, which may come from the device.
 */
static int vpmu_control_event(struct vpmu_device *dev, u32 op, u64 id)
{
	bool ends = op == VPMU_CONTROL_CLOSE || op == VPMU_CONTROL_UNMAP ||
		    op == VPMU_CONTROL_UNMAP_AUX;
	struct vpmu_control_header *header;
	bool reset = false;
	int ret;

	header = kzalloc(sizeof(*header), GFP_KERNEL);
	if (!header)
		return -ENOMEM;
	header->op = cpu_to_le32(op);
	header->event = cpu_to_le64(id);
	ret = control_call(dev, header, sizeof(*header), NULL, &reset);
	kfree(header);
	if (ends && (ret == -ENOENT || reset))
		return 0;
	return ret;
}

/* The result of a request to open: 0 or a negative errno. */
static int open_result(const struct control_open *open)
{
	int ret = open->request.ret;

	if (ret >= 0)
		ret = ret < sizeof(open->reply) ? -EPROTO : -(int)le32_to_cpu(open->reply.status);
	if (!ret && !open->reply.id)
		ret = -EPROTO;
	return ret;
}

static void open_closed(struct vpmu_control_request *request)
{
	struct vpmu_control_close *close = container_of(request, struct vpmu_control_close,
							request);

	kfree(container_of(close, struct control_open, close));
}

static void open_answered(struct vpmu_control_request *request)
{
	struct control_open *open = container_of(request, struct control_open, request);

	if (atomic_cmpxchg(&open->state, OPEN_WAITS, OPEN_ANSWERED) == OPEN_WAITS) {
		complete(&open->answered);
	} else if (open_result(open)) {
		kfree(open);
	} else {
		open->close.request.answered = open_closed;
		vpmu_control_close_later(open->dev, &open->close, le64_to_cpu(open->reply.id));
	}
}

/**
 * vpmu_control_open() - open an event
 * @dev: the device
 * @wanted: the request; its header is filled in here
 * @opened: filled in on success
 *
 * If the task is killed while it waits, the event is closed as soon as the
 * device has opened it.
 *
 * Return: 0; -EINTR if the task was killed; or a negative errno, which may come
 * from the device.
 */
int vpmu_control_open(struct vpmu_device *dev, const struct vpmu_open_request *wanted,
		      struct vpmu_opened *opened)
{
	struct control_open *open;
	int ret;

	open = kzalloc(sizeof(*open), GFP_KERNEL);
	if (!open)
		return -ENOMEM;
	open->dev = dev;
	init_completion(&open->answered);
	open->asked = *wanted;
	open->asked.header.op = cpu_to_le32(VPMU_CONTROL_OPEN);
	open->request = (struct vpmu_control_request) {
		.out = &open->asked,
		.out_len = sizeof(open->asked),
		.in = &open->reply,
		.in_len = sizeof(open->reply),
		.answered = open_answered,
	};
	vpmu_control_post(dev, &open->request);
	ret = control_await(dev, &open->answered, true);
	if (ret && atomic_cmpxchg(&open->state, OPEN_WAITS, OPEN_LEFT) == OPEN_WAITS)
		return ret;
	/* The sender was killed, but the answer is already being handled. */
	if (ret)
		wait_for_completion(&open->answered);

	ret = open_result(open);
	if (!ret) {
		*opened = (struct vpmu_opened) {
			.id = le64_to_cpu(open->reply.id),
			.resets = open->request.resets,
			.engine = le32_to_cpu(open->reply.engine),
		};
	} else if (open->request.ret >= (int)sizeof(open->reply) && open->reply.status) {
		vpmu_device_refused(dev, le32_to_cpu(open->reply.engine));
	}
	kfree(open);
	return ret;
}

/**
 * vpmu_control_close() - close an event
 * @dev: the device
 * @id: the event's id
 *
 * Return: 0 or a negative errno.
 */
int vpmu_control_close(struct vpmu_device *dev, u64 id)
{
	return vpmu_control_event(dev, VPMU_CONTROL_CLOSE, id);
}

/**
 * vpmu_control_close_later() - close an event without waiting
 * @dev: the device
 * @close: the request, in which the caller has set request.answered; see
 *         vpmu_control_post()
 * @id: the event's id
 *
 * If this function waited, a task that closes its events would sleep once for
 * each event, and each time, the task's remaining events would be scheduled out
 * and in again. The device executes requests in order, so later requests find
 * the event closed.
 */
void vpmu_control_close_later(struct vpmu_device *dev, struct vpmu_control_close *close, u64 id)
{
	close->header = (struct vpmu_control_header) {
		.op = cpu_to_le32(VPMU_CONTROL_CLOSE),
		.event = cpu_to_le64(id),
	};
	close->request.out = &close->header;
	close->request.out_len = sizeof(close->header);
	close->request.in = &close->reply;
	close->request.in_len = sizeof(close->reply);
	vpmu_control_post(dev, &close->request);
}

static int control_map(struct vpmu_device *dev, u32 op, u64 id, struct page **pages, u32 count,
		       u32 flags)
{
	struct vpmu_map_request *request;
	__le64 *addresses;
	bool reset;
	size_t len;
	u32 i;
	int ret;

	len = sizeof(*request) + count * sizeof(*addresses);
	/*
	 * For a large area, the buffer may be too large to allocate. That is
	 * not worth a warning.
	 */
	request = kzalloc(len, GFP_KERNEL | __GFP_NOWARN);
	if (!request)
		return -ENOMEM;
	request->header.op = cpu_to_le32(op);
	request->header.event = cpu_to_le64(id);
	request->pages = cpu_to_le32(count);
	request->flags = cpu_to_le32(flags);
	addresses = (__le64 *)(request + 1);
	for (i = 0; i < count; i++)
		addresses[i] = cpu_to_le64(page_to_phys(pages[i]));
	ret = control_call(dev, request, len, NULL, &reset);
	kfree(request);
	return ret;
}

/**
 * vpmu_control_map() - map an event's ring
 * @dev: the device
 * @id: the event's id
 * @pages: the metadata page, then the data pages
 * @count: number of pages
 * @flags: VPMU_MAP_*
 *
 * Return: 0, after which the device writes to the pages until
 * vpmu_control_unmap(); or a negative errno.
 */
int vpmu_control_map(struct vpmu_device *dev, u64 id, struct page **pages, u32 count, u32 flags)
{
	return control_map(dev, VPMU_CONTROL_MAP, id, pages, count, flags);
}

/**
 * vpmu_control_map_aux() - map an AUX area beside a ring
 * @dev: the device
 * @id: id of the event through which the ring was mapped
 * @pages: the area's pages
 * @count: number of pages
 * @flags: VPMU_MAP_*
 *
 * Return: 0, after which the device writes to the pages until
 * vpmu_control_unmap_aux(); or a negative errno.
 */
int vpmu_control_map_aux(struct vpmu_device *dev, u64 id, struct page **pages, u32 count,
			 u32 flags)
{
	return control_map(dev, VPMU_CONTROL_MAP_AUX, id, pages, count, flags);
}

/**
 * vpmu_control_unmap_aux() - unmap an AUX area
 * @dev: the device
 * @id: as for vpmu_control_map_aux()
 *
 * Return: 0 if the device no longer writes to the pages; or a negative errno if
 * it may still write to them.
 */
int vpmu_control_unmap_aux(struct vpmu_device *dev, u64 id)
{
	return vpmu_control_event(dev, VPMU_CONTROL_UNMAP_AUX, id);
}

/**
 * vpmu_control_unmap() - unmap an event's ring
 * @dev: the device
 * @id: the event's id
 *
 * Return: 0 if the device no longer writes to the pages; or a negative errno if
 * it may still write to them.
 */
int vpmu_control_unmap(struct vpmu_device *dev, u64 id)
{
	return vpmu_control_event(dev, VPMU_CONTROL_UNMAP, id);
}

/**
 * vpmu_control_redirect() - send an event's records to the ring of another
 *                           event
 * @dev: the device
 * @id: the event's id
 * @target: id of the event with the ring; zero to end the redirection
 *
 * Return: 0 or a negative errno.
 */
int vpmu_control_redirect(struct vpmu_device *dev, u64 id, u64 target)
{
	struct vpmu_redirect_request request = { .target = cpu_to_le64(target) };

	return vpmu_control_call(dev, VPMU_CONTROL_REDIRECT, id, &request, sizeof(request), NULL);
}

/**
 * vpmu_control_pause() - pause or resume writing to an event's ring
 * @dev: the device
 * @id: the event's id
 * @paused: true to pause
 *
 * Return: 0 or a negative errno.
 */
int vpmu_control_pause(struct vpmu_device *dev, u64 id, bool paused)
{
	struct vpmu_pause_request request = { .paused = cpu_to_le32(paused) };

	return vpmu_control_call(dev, VPMU_CONTROL_PAUSE, id, &request, sizeof(request), NULL);
}

/**
 * vpmu_control_signal() - choose which notices report an event's wakeups
 * @dev: the device
 * @id: the event's id
 * @own: true for notices that name the event, false for those that all events
 *       share which write to the same ring
 *
 * Return: 0 or a negative errno.
 */
int vpmu_control_signal(struct vpmu_device *dev, u64 id, bool own)
{
	struct vpmu_signal_request request = { .own = cpu_to_le32(own) };

	return vpmu_control_call(dev, VPMU_CONTROL_SIGNAL, id, &request, sizeof(request), NULL);
}

/**
 * vpmu_control_wakeup() - set the wakeup interval of an event and of the events
 *                         that are inherited from it
 * @dev: the device
 * @id: the event's id
 * @wakeup: the interval, which the device checks
 *
 * Return: 0 or a negative errno.
 */
int vpmu_control_wakeup(struct vpmu_device *dev, u64 id, const struct vpmu_wakeup *wakeup)
{
	struct vpmu_wakeup_request request = {
		.every = cpu_to_le64(wakeup->every),
		.unit = cpu_to_le32(wakeup->unit),
		.reserved = cpu_to_le32(wakeup->reserved),
	};

	return vpmu_control_call(dev, VPMU_CONTROL_WAKEUP, id, &request, sizeof(request), NULL);
}

/**
 * vpmu_control_task_page() - pass a vCPU's task page to the device
 * @dev: the device
 * @vcpu: the vCPU
 * @address: the page's address, or zero to remove it
 *
 * Return: 0 or a negative errno.
 */
int vpmu_control_task_page(struct vpmu_device *dev, u32 vcpu, phys_addr_t address)
{
	struct vpmu_task_page_request request = {
		.vcpu = cpu_to_le32(vcpu),
		.address = cpu_to_le64(address),
	};

	return vpmu_control_call(dev, VPMU_CONTROL_TASK_PAGE, 0, &request, sizeof(request), NULL);
}

/**
 * vpmu_control_features() - accept features that the transport did not
 *                           negotiate
 * @dev: the device
 * @features: the feature bits
 *
 * Return: 0 or a negative errno.
 */
int vpmu_control_features(struct vpmu_device *dev, u64 features)
{
	struct vpmu_features_request request = { .features = cpu_to_le64(features) };

	return vpmu_control_call(dev, VPMU_CONTROL_FEATURES, 0, &request, sizeof(request), NULL);
}

/*
 * Reads up to @count entries of @size bytes of a list of the device. Returns
 * the number of entries read, or a negative errno.
 */
static int control_list(struct vpmu_device *dev, u32 op, const void *request, size_t request_len,
			void *entries, size_t size, u32 count)
{
	struct vpmu_control_header *copy = kmemdup(request, request_len, GFP_KERNEL);
	size_t len = sizeof(struct vpmu_control_reply) + count * size;
	struct vpmu_control_reply *reply = kzalloc(len, GFP_KERNEL);
	int ret = -ENOMEM;
	bool reset;
	u32 got;

	if (!copy || !reply)
		goto free;
	copy->op = cpu_to_le32(op);
	ret = control_send(dev, copy, request_len, reply, len, &reset);
	if (ret < 0)
		goto free;
	len = ret;
	ret = len < sizeof(*reply) ? -EPROTO : -(int)le32_to_cpu(reply->status);
	if (ret)
		goto free;
	got = le32_to_cpu(reply->value);
	ret = -EPROTO;
	if (got > count || len < sizeof(*reply) + got * size)
		goto free;
	memcpy(entries, reply + 1, got * size);
	ret = got;
free:
	kfree(reply);
	kfree(copy);
	return ret;
}

/*
 * Reads catalogue entries, starting at @first. Returns the number of entries
 * read, or a negative errno.
 */
static int control_catalogue_step(struct vpmu_device *dev, u32 first, u32 count)
{
	struct vpmu_catalogue_entry *entries = &dev->catalogue[first];
	struct vpmu_catalogue_request request = {
		.first = cpu_to_le32(first),
		.count = cpu_to_le32(count),
	};
	struct vpmu_catalogue_entry *entry;
	int got;

	got = control_list(dev, VPMU_CONTROL_CATALOGUE, &request, sizeof(request), entries,
			   sizeof(*entries), count);
	if (got <= 0)
		return got ?: -EPROTO;
	for (entry = entries; entry < entries + got; entry++) {
		entry->kind = le32_to_cpu((__force __le32)entry->kind);
		entry->flags = le32_to_cpu((__force __le32)entry->flags);
		entry->config = le64_to_cpu((__force __le64)entry->config);
		entry->name[sizeof(entry->name) - 1] = '\0';
		entry->unit[sizeof(entry->unit) - 1] = '\0';
		entry->source[sizeof(entry->source) - 1] = '\0';
		entry->counts[sizeof(entry->counts) - 1] = '\0';
	}
	return got;
}

/**
 * vpmu_control_catalogue() - read the whole catalogue
 * @dev: the device; dev->catalogue is allocated for info.catalogue_len entries
 *
 * Return: 0 or a negative errno.
 */
int vpmu_control_catalogue(struct vpmu_device *dev)
{
	u32 len = dev->info.catalogue_len, first = 0;

	while (first < len) {
		u32 count = min_t(u32, len - first, CATALOGUE_STEP);
		int got = control_catalogue_step(dev, first, count);

		if (got < 0)
			return got;
		first += got;
	}
	return 0;
}

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
	struct vpmu_detach_request request = {};

	memcpy(request.name, name, sizeof(request.name));
	return vpmu_control_call(dev, VPMU_CONTROL_DETACH, id, &request, sizeof(request), NULL);
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
	struct vpmu_map_request request = {
		.pages = cpu_to_le32(count),
		.flags = cpu_to_le32(flags | VPMU_MAP_WINDOW),
	};

	return vpmu_control_call(dev, VPMU_CONTROL_MAP, id, &request, sizeof(request), page);
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
	struct vpmu_persistent_request request = {
		.after = cpu_to_le64(after),
		.count = cpu_to_le32(count),
	};
	int got;

	got = control_list(dev, VPMU_CONTROL_PERSISTENT, &request, sizeof(request), events,
			   sizeof(*events), count);
	return got < 0 || persistent_ascend(events, got, after) ? got : -EPROTO;
}

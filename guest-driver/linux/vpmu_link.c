// SPDX-License-Identifier: GPL-2.0
/*
 * Links: an event can start or stop another event when it overflows.
 *
 * The device does the starting and stopping. A program links two events that it
 * has opened. The driver then links each pair of events that is scheduled
 * together: the two opened events, and the two events of each task that inherited
 * both. A link never changes. When either of its events is closed, the link ends,
 * in the driver and on the device.
 */
#include <linux/mutex.h>
#include <linux/overflow.h>
#include <linux/perf_event.h>
#include <linux/slab.h>

#include "perf_core_private.h"
#include "vpmu.h"
#include "vpmu_event.h"

/**
 * struct link_end - snapshot of an event's identity
 * @id: its id on the device
 * @task: the task that it was created for
 * @ctx: its context; NULL until it has one
 * @inherited: the event was inherited
 *
 * The pointers are only compared, never dereferenced.
 */
struct link_end {
	u64 id;
	const void *task;
	const void *ctx;
	bool inherited;
};

/* An event and those that inherit it */
struct link_ends {
	size_t count;
	struct link_end *ends;
};

/**
 * vpmu_link_init() - prepare the links of a new event
 * @links: the links
 */
void vpmu_link_init(struct vpmu_links *links)
{
	unsigned int role;

	for (role = 0; role < VPMU_ROLES; role++) {
		INIT_LIST_HEAD(&links->targets[role]);
		INIT_LIST_HEAD(&links->entry[role]);
	}
}

/**
 * vpmu_link_ids() - link two events on the device
 * @dev: the device
 * @id: id of the event that starts or stops @target
 * @target: id of the target
 * @role: VPMU_STARTER or VPMU_STOPPER
 *
 * The link ends when either event ends.
 *
 * Return: 0 or a negative errno.
 */
int vpmu_link_ids(struct vpmu_device *dev, u64 id, u64 target, enum vpmu_role role)
{
	static const u32 roles[] = {
		[VPMU_STARTER] = VPMU_LINK_STARTER,
		[VPMU_STOPPER] = VPMU_LINK_STOPPER,
	};
	struct vpmu_link_request request = {
		.target = cpu_to_le64(target),
		.role = cpu_to_le32(roles[role]),
	};

	return vpmu_control_call(dev, VPMU_CONTROL_LINK, id, &request, sizeof(request), NULL);
}

/*
 * Whether two events are scheduled together, in one context. perf core swaps
 * the contexts of tasks that inherited the same events, so two events that now
 * share a context may have been created for different tasks: compare their
 * contexts, not their tasks. But if both events are inherited, compare their
 * tasks. All events that one fork creates belong to one context, but until the
 * fork ends, their pointers to the context may be NULL.
 */
static bool link_paired(const struct link_end *one, const struct link_end *other)
{
	if (one->inherited && other->inherited)
		return one->task == other->task;
	return one->ctx && one->ctx == other->ctx;
}

static struct link_end link_look(const struct vpmu_event *own)
{
	return (struct link_end) {
		.id = own->id,
		.task = own->event->hw.target,
		.ctx = perf_core_context(own->event),
		.inherited = own->event->parent,
	};
}

/*
 * Collects an event and those that inherit it; the caller frees @all->ends with
 * kvfree(). vpmu_link_inherit() links events that are created later.
 */
static int link_collect(const struct vpmu_event *own, struct link_ends *all)
{
	struct vpmu_device *dev = own->dev;
	struct vpmu_event *heir;
	size_t room = 1;

	spin_lock_irq(&dev->lookup.lock);
	list_for_each_entry(heir, &own->heirs, heir)
		room++;
	spin_unlock_irq(&dev->lookup.lock);

	all->count = 0;
	all->ends = kvmalloc_array(room, sizeof(*all->ends), GFP_KERNEL);
	if (!all->ends)
		return -ENOMEM;
	spin_lock_irq(&dev->lookup.lock);
	if (own->id)
		all->ends[all->count++] = link_look(own);
	list_for_each_entry(heir, &own->heirs, heir) {
		if (all->count == room)
			break;
		if (heir->id)
			all->ends[all->count++] = link_look(heir);
	}
	spin_unlock_irq(&dev->lookup.lock);
	return 0;
}

/*
 * Keeps perf core from swapping the contexts of an event and of the events that
 * inherit it, because the started or stopped state belongs to one task.
 */
static void link_anchor(struct vpmu_event *own)
{
	struct vpmu_device *dev = own->dev;
	struct vpmu_event *heir;

	WRITE_ONCE(own->links.anchored, true);
	spin_lock_irq(&dev->lookup.lock);
	vpmu_event_anchor(own);
	list_for_each_entry(heir, &own->heirs, heir)
		vpmu_event_anchor(heir);
	spin_unlock_irq(&dev->lookup.lock);
}

/*
 * Links two events, at least one of which is inherited. It is not an error if
 * they are already linked, or if one of them has been closed in the meantime.
 */
static int link_heirs(struct vpmu_device *dev, u64 id, u64 target, unsigned int role)
{
	int err = vpmu_link_ids(dev, id, target, role);

	return err == -EEXIST || err == -ENOENT ? 0 : err;
}

static int link_pair(struct vpmu_device *dev, const struct link_end *one,
		     const struct link_end *other, unsigned int role)
{
	if (one->inherited || other->inherited)
		return link_heirs(dev, one->id, other->id, role);
	return vpmu_link_ids(dev, one->id, other->id, role);
}

/*
 * With @inherited, links the pairs in which both events are inherited; without
 * it, links all other pairs.
 */
static int link_pairs_of(struct vpmu_device *dev, const struct link_ends *from,
			 const struct link_ends *to, unsigned int role, bool inherited)
{
	const struct link_end *one, *other;
	int err = 0, ret;

	for (one = from->ends; one < from->ends + from->count; one++) {
		for (other = to->ends; other < to->ends + to->count; other++) {
			if ((one->inherited && other->inherited) != inherited ||
			    !link_paired(one, other))
				continue;
			ret = link_pair(dev, one, other, role);
			err = err ?: ret;
		}
	}
	return err;
}

static void link_list(struct vpmu_event *own, struct vpmu_event *target, unsigned int role)
{
	target->links.actor[role] = own;
	list_add_tail(&target->links.entry[role], &own->links.targets[role]);
	WRITE_ONCE(own->linked, true);
	WRITE_ONCE(target->linked, true);
}

static int link_families(struct vpmu_event *own, struct vpmu_event *target, unsigned int role)
{
	struct link_ends from = {}, to = {};
	int err;

	link_anchor(own);
	link_anchor(target);
	err = link_collect(own, &from);
	if (!err)
		err = link_collect(target, &to);
	/*
	 * First link the pairs in which at most one event is inherited. If the
	 * device refuses one of these, it would refuse all other pairs, too.
	 */
	if (!err)
		err = link_pairs_of(own->dev, &from, &to, role, false);
	if (err)
		goto free;
	link_list(own, target, role);
	err = link_pairs_of(own->dev, &from, &to, role, true);
free:
	kvfree(from.ends);
	kvfree(to.ends);
	return err;
}

/**
 * vpmu_link_set() - let overflows of one event start or stop another event
 * @own: the event, of a task
 * @target: the other event, of the same task
 * @role: VPMU_STARTER or VPMU_STOPPER
 *
 * The caller keeps both events open.
 *
 * Return: 0; -EEXIST if the two are linked in this role already; -EBUSY if
 * another event has this role for @target; or another negative errno.
 */
int vpmu_link_set(struct vpmu_event *own, struct vpmu_event *target, enum vpmu_role role)
{
	const struct vpmu_event *actor;
	int err;

	mutex_lock(&own->dev->link_lock);
	actor = target->links.actor[role];
	if (actor)
		err = actor == own ? -EEXIST : -EBUSY;
	else
		err = link_families(own, target, role);
	mutex_unlock(&own->dev->link_lock);
	return err;
}

/*
 * Returns the id of the event that inherits @parent and is created by the same
 * fork as @own; zero if the fork has not created that event yet.
 */
static u64 link_twin(const struct vpmu_event *parent, const struct vpmu_event *own)
{
	const struct link_end end = link_look(own);
	struct link_end other;
	struct vpmu_event *twin;
	u64 id = 0;

	spin_lock_irq(&parent->dev->lookup.lock);
	list_for_each_entry(twin, &parent->heirs, heir) {
		other = link_look(twin);
		if (link_paired(&end, &other))
			id = other.id;
	}
	spin_unlock_irq(&parent->dev->lookup.lock);
	return id;
}

static int link_inherit_role(struct vpmu_event *own, const struct vpmu_links *links,
			     unsigned int role)
{
	struct vpmu_event *target;
	int err = 0, ret;
	u64 twin;

	if (links->actor[role]) {
		twin = link_twin(links->actor[role], own);
		if (twin)
			err = link_heirs(own->dev, twin, own->id, role);
	}
	list_for_each_entry(target, &links->targets[role], links.entry[role]) {
		twin = link_twin(target, own);
		if (!twin)
			continue;
		ret = link_heirs(own->dev, own->id, twin, role);
		err = err ?: ret;
	}
	return err;
}

/**
 * vpmu_link_inherit() - link an inherited event like its parent
 * @own: the event, already in its parent's list of heirs
 *
 * If a new task inherits both events of a link, the fork creates one event
 * after the other. The call for the second event finds the first, and links the
 * two.
 */
void vpmu_link_inherit(struct vpmu_event *own)
{
	const struct vpmu_event *parent = own->event->parent->pmu_private;
	struct vpmu_device *dev = own->dev;
	unsigned int role;
	int err = 0, ret;

	/* If the event is linked later, link_collect() will find this heir. */
	if (!own->id || !READ_ONCE(parent->links.anchored))
		return;
	mutex_lock(&dev->link_lock);
	for (role = 0; role < VPMU_ROLES; role++) {
		ret = link_inherit_role(own, &parent->links, role);
		err = err ?: ret;
	}
	mutex_unlock(&dev->link_lock);
	if (err)
		vpmu_warn_ratelimited(dev,
				      "an inherited event is not started or stopped in a new task (%d)\n",
				      err);
}

/**
 * vpmu_link_close() - remove all links of an event
 * @own: the event that was opened
 */
void vpmu_link_close(struct vpmu_event *own)
{
	struct vpmu_links *links = &own->links;
	struct vpmu_event *target, *next;
	unsigned int role;

	/* Without the lock: an event that is being destroyed is not linked anew. */
	if (!READ_ONCE(own->linked))
		return;
	mutex_lock(&own->dev->link_lock);
	for (role = 0; role < VPMU_ROLES; role++) {
		list_del_init(&links->entry[role]);
		links->actor[role] = NULL;
		list_for_each_entry_safe(target, next, &links->targets[role],
					 links.entry[role]) {
			list_del_init(&target->links.entry[role]);
			target->links.actor[role] = NULL;
		}
	}
	mutex_unlock(&own->dev->link_lock);
}

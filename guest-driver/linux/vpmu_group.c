// SPDX-License-Identifier: GPL-2.0
/*
 * Groups of /dev/vpmu events. The events of a group are started, stopped and
 * read together.
 *
 * perf core cannot group in-kernel events, so to perf core each event of
 * /dev/vpmu is alone. In this driver, a group consists of the files (struct
 * vpmu_file) of a leader and its siblings. The device knows each sibling's
 * leader, for samples that contain the counts of the group and for overflows
 * that pause the leader's trace. A sibling counts only while its leader is
 * enabled: it is started and stopped with the leader. A single event is a group
 * of one.
 */
#include <linux/perf_event.h>
#include <linux/rcupdate.h>

#include "perf_core_private.h"
#include "vpmu.h"
#include "vpmu_event.h"
#include "vpmu_file.h"

/**
 * vpmu_group_leader() - find the leader of a file's group
 * @file: the file
 *
 * In an RCU read-side critical section, the leader's memory stays valid even
 * without a reference: it is not freed until a grace period has passed after
 * @file stopped pointing to the leader.
 *
 * Return: the leader; or @file itself, if @file is a leader, is in no group, or
 * has lost its leader because that was closed.
 */
struct vpmu_file *vpmu_group_leader(struct vpmu_file *file)
{
	/* Do not dereference the leader: without RCU, it may be freed. */
	return READ_ONCE(file->group.leader) ?: file;
}

/* Gets a reference on the leader, for vpmu_file_put(). */
static struct vpmu_file *group_leader_get(struct vpmu_file *file)
{
	struct vpmu_file *leader;

	/*
	 * A leader without references has already released its siblings, and is
	 * about to be freed: read the file's leader again.
	 */
	rcu_read_lock();
	do {
		leader = vpmu_group_leader(file);
	} while (!kref_get_unless_zero(&leader->ref));
	rcu_read_unlock();
	return leader;
}

/**
 * vpmu_group_unlock() - unlock a group
 * @leader: from vpmu_group_lock()
 */
void vpmu_group_unlock(struct vpmu_file *leader)
{
	mutex_unlock(&leader->group.lock);
	vpmu_file_put(leader);
}

/**
 * vpmu_group_lock() - lock the group of an open file
 * @file: the file
 *
 * Until vpmu_group_unlock(), no file can join or leave the group, and the
 * events of its files are not released.
 *
 * Return: the leader.
 */
struct vpmu_file *vpmu_group_lock(struct vpmu_file *file)
{
	struct vpmu_file *leader;

	for (;;) {
		leader = group_leader_get(file);
		mutex_lock(&leader->group.lock);
		if (vpmu_group_leader(file) == leader)
			return leader;
		vpmu_group_unlock(leader);
	}
}

/**
 * vpmu_group_admits() - check whether a new event may join a group, as in perf
 * @leader: an open file; its group is locked
 * @file: the new event's file
 * @attr: the requested attr
 * @cpu: the new event's CPU, or -1
 * @task: the new event's task, or NULL
 *
 * Return: 0 or a negative errno.
 */
int vpmu_group_admits(struct vpmu_file *leader, const struct vpmu_file *file,
		      const struct perf_event_attr *attr, int cpu, struct task_struct *task)
{
	struct perf_event *event = leader->event;

	lockdep_assert_held(&leader->group.lock);
	if (READ_ONCE(leader->failure))
		return READ_ONCE(leader->failure);
	if (vpmu_group_leader(leader) != leader || leader->dev != file->dev ||
	    vpmu_file_is_direct(leader))
		return -EINVAL;
	if (event->cpu != cpu || event->hw.target != task)
		return -EINVAL;
	if (attr->pinned || (task && event->attr.inherit != attr->inherit))
		return -EINVAL;
	return leader->group.siblings + 1 < VPMU_GROUP ? 0 : -E2BIG;
}

/**
 * vpmu_group_join() - add a new event to its group
 * @file: the file, whose event and leader are set; the leader's group is locked
 *
 * Return: 0 or -EINVAL.
 */
int vpmu_group_join(struct vpmu_file *file)
{
	struct vpmu_file *leader = file->group.leader;

	lockdep_assert_held(&leader->group.lock);
	/*
	 * The contexts differ if perf core has swapped the leader's context
	 * with the context of a task that inherited the leader. The leader and
	 * the new event would then not be scheduled together.
	 */
	if (perf_core_context(leader->event) != perf_core_context(file->event))
		return -EINVAL;
	list_add_tail(&file->group.entry, &leader->group.members);
	leader->group.siblings++;
	return 0;
}

/**
 * vpmu_group_leave() - remove a closed file from its group; a leader releases
 *                      its siblings
 * @file: the file, which no other thread closes
 */
void vpmu_group_leave(struct vpmu_file *file)
{
	struct vpmu_file *leader = vpmu_group_lock(file), *sibling;
	bool held, waits;

	if (leader != file) {
		list_del_init(&file->group.entry);
		leader->group.siblings--;
	}
	vpmu_group_unlock(leader);

	mutex_lock(&file->group.lock);
	WRITE_ONCE(file->closed, true);
	file->group.siblings = 0;
	held = !READ_ONCE(file->control.enabled) || file->control.on_exec;
	/*
	 * Until the device closes a leader's event, siblings count only while
	 * the leader's event is enabled. An event of a task stays enabled when
	 * it is scheduled out, unless its limit of overflows is used up. An
	 * event of a CPU must stay enabled until the device closes it.
	 */
	waits = !held && !list_empty(&file->group.members) &&
		(!file->place.task || file->control.limited);
	while (!list_empty(&file->group.members)) {
		sibling = list_first_entry(&file->group.members, struct vpmu_file, group.entry);
		/*
		 * Hold a reference: once the sibling has no leader, it can be
		 * closed without this file's lock.
		 */
		vpmu_file_get(sibling);
		mutex_lock_nested(&sibling->group.lock, SINGLE_DEPTH_NESTING);
		list_del_init(&sibling->group.entry);
		WRITE_ONCE(sibling->group.leader, NULL);
		vpmu_file_put(file);
		/*
		 * Start siblings that were stopped because the leader was
		 * disabled. They count once the device has closed the leader's
		 * event.
		 */
		if (held) {
			waits |= READ_ONCE(sibling->control.enabled);
			vpmu_call_group(sibling, NULL, 0);
		}
		mutex_unlock(&sibling->group.lock);
		vpmu_file_put(sibling);
	}
	WRITE_ONCE(file->group.close_waits, waits);
	mutex_unlock(&file->group.lock);
}

/*
 * Whether perf core has enabled the leader's event in the context of @event.
 * While the leader waits for an exec (enable_on_exec), perf core keeps the
 * leader's event disabled. Returns true if the context has no event of @leader.
 */
static bool group_leader_is_on(const struct perf_event *event, const struct vpmu_file *leader)
{
	const struct vpmu_event *own;
	struct perf_event *other;

	perf_core_for_each_event(other, perf_core_context(event)) {
		if (other->pmu != event->pmu)
			continue;
		own = other->pmu_private;
		if (own->file == leader)
			return other->state >= PERF_EVENT_STATE_INACTIVE;
	}
	return true;
}

/**
 * vpmu_group_allows() - whether an event's file and its leader's file are
 *                       enabled
 * @event: the event; its context's lock is held
 *
 * Return: true if both are enabled, or if the event has no file.
 */
bool vpmu_group_allows(const struct perf_event *event)
{
	const struct vpmu_event *own = event->pmu_private;
	struct vpmu_file *file = own->file, *leader;

	if (!file)
		return true;
	if (!READ_ONCE(file->control.enabled))
		return false;
	leader = vpmu_group_leader(file);
	if (leader == file)
		return true;
	return READ_ONCE(leader->control.enabled) &&
	       (!leader->control.on_exec || group_leader_is_on(event, leader));
}

/**
 * vpmu_group_leader_id() - find the device's id for the leader of an event
 * @file: the file of the event being opened
 * @task: the event's task, or NULL for a CPU event
 *
 * Return: the id of the leader's event for the same task; zero if there is
 *         none.
 */
u64 vpmu_group_leader_id(struct vpmu_file *file, const struct task_struct *task)
{
	struct vpmu_file *leader = group_leader_get(file);
	struct vpmu_event *own;
	u64 id = 0;

	if (leader != file) {
		spin_lock_irq(&file->dev->lookup.lock);
		list_for_each_entry(own, &leader->family, family)
			if (own->event->hw.target == task)
				id = own->id;
		spin_unlock_irq(&file->dev->lookup.lock);
	}
	vpmu_file_put(leader);
	return id;
}

static bool group_child_is_off(struct vpmu_file *file)
{
	struct perf_event *child;
	bool off = false;

	perf_core_lock_family(file->event);
	perf_core_for_each_child(child, file->event)
		off |= READ_ONCE(child->state) == PERF_EVENT_STATE_OFF;
	perf_core_unlock_family(file->event);
	return off;
}

/* Whether the task has yet to exec. */
static bool group_awaits_exec(struct vpmu_file *file)
{
	return file->control.on_exec && file->event->attr.enable_on_exec;
}

static int group_switch_file(struct vpmu_file *file, bool enable)
{
	int err = 0;

	/*
	 * Disable perf core's event instead of the file, so that the exec can
	 * still enable the event. This works only if the event has no children,
	 * because perf_event_disable() does not disable children.
	 */
	if (!enable && group_awaits_exec(file) && !perf_core_has_children(file->event)) {
		perf_event_disable(file->event);
		return 0;
	}
	WRITE_ONCE(file->control.enabled, enable);
	if (enable && file->control.on_exec)
		perf_event_enable(file->event);
	/*
	 * When an event's limit of overflows is used up, the device disables
	 * the event. So also enable it on the device.
	 */
	if (enable && file->control.limited)
		err = vpmu_call_event(file->event, VPMU_COMMAND_ENABLE, 0);
	return err;
}

/**
 * vpmu_group_switch() - PERF_EVENT_IOC_ENABLE and PERF_EVENT_IOC_DISABLE
 * @file: the event's file; events that inherit the event are switched, too
 * @whole: apply to the whole group
 * @enable: true to enable
 *
 * Return: 0; -EOPNOTSUPP if an event to enable was opened with enable_on_exec,
 * and an event that inherits it is still disabled in perf core; or another
 * negative errno.
 */
int vpmu_group_switch(struct vpmu_file *file, bool whole, bool enable)
{
	struct vpmu_file *leader = vpmu_group_lock(file), *other;
	int err = 0, ret;

	vpmu_group_for_each(other, leader)
		if ((whole || other == file) && enable && other->control.on_exec &&
		    group_child_is_off(other))
			err = -EOPNOTSUPP;
	if (!err) {
		vpmu_group_for_each(other, leader) {
			if (!whole && other != file)
				continue;
			ret = group_switch_file(other, enable);
			err = err ?: ret;
		}
		ret = vpmu_call_group(leader, NULL, 0);
		err = err ?: ret;
	}
	vpmu_group_unlock(leader);
	return err;
}

/**
 * vpmu_group_reset() - PERF_EVENT_IOC_RESET: set counts to zero
 * @file: the event's file; events that inherit the event are reset, too
 * @whole: apply to the whole group
 *
 * Return: 0 or a negative errno.
 */
int vpmu_group_reset(struct vpmu_file *file, bool whole)
{
	struct vpmu_file *leader = vpmu_group_lock(file);
	int err = vpmu_call_group(leader, whole ? NULL : file, VPMU_COMMAND_RESET);

	vpmu_group_unlock(leader);
	return err;
}

/**
 * vpmu_group_refresh() - PERF_EVENT_IOC_REFRESH: enable an event for a number
 *                        of overflows
 * @file: the file of a sampling event without inheritance
 * @overflows: number of overflows
 *
 * Return: 0 or a negative errno.
 */
int vpmu_group_refresh(struct vpmu_file *file, u32 overflows)
{
	struct vpmu_file *leader = vpmu_group_lock(file);
	int err = file->backend->refresh(file, overflows);

	vpmu_group_unlock(leader);
	return err;
}

/**
 * vpmu_group_period() - PERF_EVENT_IOC_PERIOD: set the period or frequency
 * @file: the file of a sampling event
 * @period: the period or frequency
 *
 * Return: 0 or a negative errno.
 */
int vpmu_group_period(struct vpmu_file *file, u64 period)
{
	struct vpmu_file *leader = vpmu_group_lock(file);
	int err = file->backend->period(file, period);

	if (!err)
		WRITE_ONCE(file->spec.period, period);
	vpmu_group_unlock(leader);
	return err;
}

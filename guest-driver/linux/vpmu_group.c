// SPDX-License-Identifier: GPL-2.0
/*
 * Groups: events of /dev/vpmu that act as one.
 *
 * perf core makes no groups of in-kernel events, so for perf core each event of /dev/vpmu is
 * alone. A group consists of the files of a leader and its siblings here, and of a leader on
 * the device, where samples read the group. A sibling counts only while its leader is enabled:
 * it is started and stopped with the leader. An event alone is a group of one.
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
 * It is freed at the earliest an RCU grace period after it has let go of @file.
 *
 * Return: the leader; the file itself if it is one, is alone, or its leader was closed.
 */
struct vpmu_file *vpmu_group_leader(struct vpmu_file *file)
{
	/* Nothing here but the address is looked at: it may be freed unless kept. */
	return READ_ONCE(file->group.leader) ?: file;
}

/* Keeps what vpmu_group_leader() gives; for vpmu_file_put(). */
static struct vpmu_file *group_leader_get(struct vpmu_file *file)
{
	struct vpmu_file *leader;

	/* One that is about to be freed is not the leader any more. */
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
 * Until vpmu_group_unlock() nobody joins or leaves, and the events of its files stay.
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
 * vpmu_group_admits() - whether perf allows a new event in a group
 * @leader: an open file; its group is locked
 * @file: of the new event
 * @attr: as asked for
 * @cpu: its CPU or -1
 * @task: its task or NULL
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
 * @file: with its event and its leader, whose group is locked
 *
 * Return: 0 or -EINVAL.
 */
int vpmu_group_join(struct vpmu_file *file)
{
	struct vpmu_file *leader = file->group.leader;

	lockdep_assert_held(&leader->group.lock);
	/* They part when perf core swaps the contexts of tasks that inherited the leader. */
	if (perf_core_context(leader->event) != perf_core_context(file->event))
		return -EINVAL;
	list_add_tail(&file->group.entry, &leader->group.members);
	leader->group.siblings++;
	return 0;
}

/**
 * vpmu_group_leave() - take a file that is closed out of its group
 * @file: the file; nobody else closes it
 */
void vpmu_group_leave(struct vpmu_file *file)
{
	struct vpmu_file *leader = vpmu_group_lock(file), *sibling;
	bool held;

	if (leader != file) {
		list_del_init(&file->group.entry);
		leader->group.siblings--;
	}
	vpmu_group_unlock(leader);

	mutex_lock(&file->group.lock);
	WRITE_ONCE(file->closed, true);
	file->group.siblings = 0;
	held = !READ_ONCE(file->control.enabled) || file->control.on_exec;
	while (!list_empty(&file->group.members)) {
		sibling = list_first_entry(&file->group.members, struct vpmu_file, group.entry);
		/* From here on it can be closed without this one's lock. */
		vpmu_file_get(sibling);
		mutex_lock_nested(&sibling->group.lock, SINGLE_DEPTH_NESTING);
		list_del_init(&sibling->group.entry);
		WRITE_ONCE(sibling->group.leader, NULL);
		vpmu_file_put(file);
		/* What their leader held back counts from now on. */
		if (held)
			vpmu_call_group(sibling, NULL, 0);
		mutex_unlock(&sibling->group.lock);
		vpmu_file_put(sibling);
	}
	mutex_unlock(&file->group.lock);
}

/*
 * Whether perf core has the leader's event on that is in the context of @event. It
 * has it off before the exec that the leader waits for.
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
 * vpmu_group_allows() - whether an event's file and its leader's have it on
 * @event: the event; its context's lock is held
 *
 * Return: true if its own and its leader's have it on.
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
 * vpmu_group_leader_id() - find the device's id of a leader
 * @file: whose event is being opened
 * @task: for this task, NULL for a CPU
 *
 * Return: the device's id of the leader's event for the same task, zero without.
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

/* Whether the task's exec is still to come. */
static bool group_awaits_exec(struct vpmu_file *file)
{
	return file->control.on_exec && file->event->attr.enable_on_exec;
}

static int group_switch_file(struct vpmu_file *file, bool enable)
{
	int err = 0;

	/*
	 * Before the exec perf core's switch is the one that counts, because the exec
	 * turns it. It reaches no inherited event.
	 */
	if (!enable && group_awaits_exec(file) && !perf_core_has_children(file->event)) {
		perf_event_disable(file->event);
		return 0;
	}
	WRITE_ONCE(file->control.enabled, enable);
	if (enable && file->control.on_exec)
		perf_event_enable(file->event);
	/* The device has one off that has used up its refreshes. */
	if (enable && file->control.limited)
		err = vpmu_call_event(file->event, VPMU_COMMAND_ENABLE, 0);
	return err;
}

/**
 * vpmu_group_switch() - PERF_EVENT_IOC_ENABLE and PERF_EVENT_IOC_DISABLE
 * @file: whose event, with those that inherit it
 * @whole: with all of its group
 * @enable: on
 *
 * Return: 0; -EOPNOTSUPP to enable before its exec what tasks have inherited; or
 * another negative errno.
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
 * @file: whose event, with those that inherit it
 * @whole: with all of its group
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
 * vpmu_group_refresh() - PERF_EVENT_IOC_REFRESH: enable for a number of overflows
 * @file: of an event that samples and is not inherited
 * @overflows: how many
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
 * @file: of an event that samples
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

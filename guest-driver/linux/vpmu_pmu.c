// SPDX-License-Identifier: GPL-2.0
/*
 * The PMU vpmu: a struct pmu whose counters the device provides.
 *
 * A CPU event is enabled and disabled on its vCPU. A task event is enabled when
 * it is opened. The commands IN and OUT then schedule it in and out on the vCPU
 * where its task runs.
 */
#include <linux/cpumask.h>
#include <linux/ctype.h>
#include <linux/device.h>
#include <linux/err.h>
#include <linux/module.h>
#include <linux/perf_event.h>
#include <linux/security.h>
#include <linux/slab.h>
#include <linux/sysfs.h>

#include "compat.h"
#include "perf_core_private.h"
#include "vpmu.h"
#include "vpmu_arch.h"
#include "vpmu_event.h"
#include "vpmu_file.h"
#include "vpmu_persistent.h"

/*
 * Creates the sysfs attributes in /sys/bus/event_source/devices/vpmu:
 * the format of an event's config, and the events that this host can count.
 *
 * Do not add a cpumask attribute: perf would treat the PMU as an uncore PMU and
 * refuse to count tasks.
 */

PMU_FORMAT_ATTR(event, "config:0-47");
PMU_FORMAT_ATTR(kind, "config:48-63");
PMU_FORMAT_ATTR(enable_on_starter, "config1:0");
PMU_FORMAT_ATTR(engine, "config1:1-2");
PMU_FORMAT_ATTR(persistent, "config1:4");

static struct attribute *format_attrs[] = {
	&format_attr_event.attr,
	&format_attr_kind.attr,
	&format_attr_enable_on_starter.attr,
	&format_attr_engine.attr,
	&format_attr_persistent.attr,
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
static int vpmu_sysfs_init(struct vpmu_device *dev, struct vpmu_sysfs *sysfs)
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
static void vpmu_sysfs_exit(struct vpmu_sysfs *sysfs)
{
	kvfree(sysfs->events);
	sysfs->events = NULL;
}

/*
 * Sends one kick for all events of a context that are scheduled in together,
 * and one kick for all events that are scheduled out together.
 *
 * After pmu->del(), perf core marks an event as off its CPU, and a reader on
 * another CPU then uses the count without the context's lock. So the device
 * must have answered the command that stops the event before pmu->del()
 * returns. To save exits, the driver sends the stop commands of all events when
 * perf core stops the first one, and waits for all answers before pmu->del() of
 * any event returns. Nobody can see that the other events stop early, because
 * the context stays locked until all its events are scheduled out.
 *
 * Before 6.2, perf core disables and enables the PMU for each event separately.
 * So when perf core has added an event, the driver gathers the event's command
 * if perf core is sure to add another event before it unlocks the context. The
 * last of these events sends all commands. If perf core cannot add a group
 * after all, it schedules out the members that it has already added, and this
 * also sends what was gathered.
 */

/*
 * Whether perf core is sure to add the whole group of @leader, of the PMU vpmu,
 * when it schedules in the group's context on this CPU.
 *
 * perf core filters groups by their leader. If an event cannot be added, perf
 * core does not try to add those that follow in the group. So perf core is sure
 * to add a group only if all its events are of the PMU vpmu, which can add
 * every event.
 */
static bool context_adds(struct perf_event *leader)
{
	struct perf_event *sibling;

	if (!perf_core_has_room(leader) || !perf_core_admits(leader))
		return false;
	for_each_sibling_event(sibling, leader)
		if (sibling->pmu != leader->pmu)
			return false;
	return true;
}

/*
 * Whether perf core adds @other after @event, which it has just added, or
 * schedules out @event again. An inactive event of the same group comes later
 * in the group.
 */
static bool context_follows(const struct perf_event *event, const struct perf_event *other)
{
	struct perf_event *leader = other->group_leader;

	if (other->pmu != event->pmu || other->state != PERF_EVENT_STATE_INACTIVE)
		return false;
	if (leader == event->group_leader)
		return true;
	return leader->pmu == event->pmu && leader->state == PERF_EVENT_STATE_INACTIVE &&
	       context_adds(leader);
}

/**
 * vpmu_context_awaits() - whether the command that starts an event can wait for
 *                         the commands of other events
 * @event: the event, which perf core is adding; its context's lock is held
 *
 * Return: true if perf core adds another event, or schedules @event out, before
 * it unlocks the context.
 */
static bool vpmu_context_awaits(const struct perf_event *event)
{
	const struct perf_event *other;

	if (VPMU_CONTEXT_IS_BRACKETED)
		return false;
	perf_core_for_each_event(other, perf_core_context(event))
		if (context_follows(event, other))
			return true;
	return false;
}

/*
 * Stops the events that are scheduled out together with @event, which has been
 * stopped.
 */
static void context_leave(struct vpmu_vcpu *vcpu, struct perf_event *event)
{
	struct perf_event *other;

	perf_core_for_each_event(other, perf_core_context(event)) {
		const struct vpmu_event *own = other->pmu_private;

		if (other->pmu != event->pmu || other == event || !own->started ||
		    !perf_core_class_leaves(event, other))
			continue;
		/*
		 * With this state set, pmu->stop() sends no command when perf
		 * core later calls it for @other.
		 */
		other->hw.state = PERF_HES_STOPPED | PERF_HES_UPTODATE;
		vpmu_event_stop(vcpu, other);
	}
}

/*
 * When perf core schedules out a leader alone, it may schedule out the siblings
 * next. Read the siblings with the leader's kick, so that they then need no
 * kick of their own.
 */
static void context_read_group(struct vpmu_vcpu *vcpu, struct perf_event *event)
{
	struct perf_event *sibling;

	if (event->group_leader != event)
		return;
	vcpu->group_read = event;
	for_each_sibling_event(sibling, event) {
		const struct vpmu_event *own = sibling->pmu_private;

		if (sibling->pmu == event->pmu && own->started &&
		    sibling->state == PERF_EVENT_STATE_ACTIVE)
			vpmu_vcpu_append(vcpu, sibling, VPMU_COMMAND_READ, 0);
	}
}

/*
 * Whether the command that stops @event can wait until perf core enables the
 * PMU. Sending the command earlier would cost another exit. It can wait if:
 *
 * - the event was read when its leader was scheduled out; or
 * - perf core schedules out all CPU events of a class, pinned or flexible: perf
 *   core then keeps the PMU disabled until it has added these events again,
 *   also when it switches to a task with pinned events, or between cgroups.
 */
static bool context_waits(const struct vpmu_vcpu *vcpu, const struct perf_event *event)
{
	const struct vpmu_event *own = event->pmu_private;

	if (!VPMU_CONTEXT_IS_BRACKETED)
		return false;
	if (perf_core_class_leaves(event, event))
		return !own->task;
	return vcpu->group_read == event->group_leader;
}

/**
 * vpmu_context_part() - get the count of a stopped event that is being
 *                       scheduled out, unless this can wait until the PMU is
 *                       enabled
 * @vcpu: this CPU's queue; its PMU is disabled
 * @event: the event; its context's lock is held
 */
static void vpmu_context_part(struct vpmu_vcpu *vcpu, struct perf_event *event)
{
	if (context_waits(vcpu, event))
		return;
	if (!VPMU_CONTEXT_IS_BRACKETED || perf_core_class_leaves(event, event))
		context_leave(vcpu, event);
	else
		context_read_group(vcpu, event);
	vpmu_vcpu_flush(vcpu);
}

static struct vpmu_device *to_vpmu(const struct pmu *pmu)
{
	return container_of(pmu, struct vpmu_device, counting.pmu);
}

static void vpmu_pmu_enable(struct pmu *pmu)
{
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(to_vpmu(pmu));

	if (!vcpu)
		return;
	vcpu->pmu_disabled = false;
	vcpu->group_read = NULL;
	if (!vcpu->awaits)
		vpmu_vcpu_flush(vcpu);
	vpmu_sampling_settle(vcpu);
}

static void vpmu_pmu_disable(struct pmu *pmu)
{
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(to_vpmu(pmu));

	if (!vcpu)
		return;
	vcpu->pmu_disabled = true;
	vcpu->awaits = false;
}

static void vpmu_pmu_start_txn(struct pmu *pmu, unsigned int flags)
{
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(to_vpmu(pmu));

	if (vcpu && flags == PERF_PMU_TXN_READ)
		vcpu->reading = true;
}

static int vpmu_pmu_commit_txn(struct pmu *pmu)
{
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(to_vpmu(pmu));

	if (vcpu && vcpu->reading) {
		vcpu->reading = false;
		vpmu_vcpu_flush(vcpu);
	}
	return 0;
}

static void vpmu_pmu_cancel_txn(struct pmu *pmu)
{
	vpmu_pmu_commit_txn(pmu);
}

static void pmu_start(struct vpmu_vcpu *vcpu, struct perf_event *event)
{
	struct vpmu_event *own = event->pmu_private;

	if (!(event->hw.state & PERF_HES_STOPPED))
		return;
	event->hw.state = 0;
	if (own->view)
		vpmu_view_start(vcpu, own->view);
	else if (!event->attr.exclude_host)
		vpmu_event_start(vcpu, event);
}

static void vpmu_pmu_start(struct perf_event *event, int flags)
{
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(to_vpmu(event->pmu));

	if (vcpu)
		pmu_start(vcpu, event);
}

/* Returns true if a command was needed. */
static bool pmu_stop(struct vpmu_vcpu *vcpu, struct perf_event *event)
{
	struct vpmu_event *own = event->pmu_private;

	if (event->hw.state & PERF_HES_STOPPED)
		return false;
	event->hw.state = PERF_HES_STOPPED | PERF_HES_UPTODATE;
	if (own->view) {
		vpmu_view_stop(vcpu, own->view);
		return false;
	}
	return vpmu_event_stop(vcpu, event);
}

static void vpmu_pmu_stop(struct perf_event *event, int flags)
{
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(to_vpmu(event->pmu));

	if (!vcpu || vpmu_stop_is_throttle(flags))
		return;
	pmu_stop(vcpu, event);
	if (!vcpu->pmu_disabled)
		vpmu_sampling_settle(vcpu);
}

static int vpmu_pmu_add(struct perf_event *event, int flags)
{
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(to_vpmu(event->pmu));

	/*
	 * Add lost events, too: if an event cannot be added, perf core does not
	 * add the events after it.
	 */
	if (!vcpu)
		return -ENODEV;
	vpmu_event_pin(event);
	event->hw.state = PERF_HES_STOPPED | PERF_HES_UPTODATE;
	if (flags & PERF_EF_START)
		pmu_start(vcpu, event);
	vcpu->awaits = vpmu_context_awaits(event);
	return 0;
}

static void vpmu_pmu_del(struct perf_event *event, int flags)
{
	struct vpmu_vcpu *vcpu = vpmu_vcpu_local(to_vpmu(event->pmu));
	struct vpmu_event *own = event->pmu_private;

	vpmu_event_unpin(event);
	if (vcpu && pmu_stop(vcpu, event))
		vpmu_context_part(vcpu, event);
	vpmu_event_idle(event, true);
	if (own->task && own->sampler && current->flags & PF_EXITING)
		vpmu_sampling_exit_task(event);
	/*
	 * For an event of an exiting task, this is the last call, so wake the
	 * event's pollers, in an irq_work that runs after the context is
	 * unlocked.
	 */
	if (own->task && own->file && !event->parent && current->flags & PF_EXITING)
		irq_work_queue(&own->file->waiters.gone);
}

static void vpmu_pmu_event_mapped(struct perf_event *event, struct mm_struct *mm)
{
	struct vpmu_event *own = event->pmu_private;

	if (own->view)
		vpmu_view_show(own->view);
	else if (own->sampler)
		vpmu_sampling_grow(own);
}

/*
 * Checks a frequency, because perf core takes it for a period: see
 * vpmu_sampling_alloc().
 */
static int vpmu_pmu_check_period(struct perf_event *event, u64 period)
{
	const struct vpmu_event *own = event->pmu_private;

	return own->freq && period > own->dev->info.max_sample_rate ? -EINVAL : 0;
}

/*
 * Whether perf core offers events of @type to every PMU if there is no CPU PMU.
 */
static bool type_is_generic(u32 type)
{
	return type == PERF_TYPE_HARDWARE || type == PERF_TYPE_HW_CACHE || type == PERF_TYPE_RAW;
}

/*
 * Sets perf_event::hw.config, which perf core leaves to the PMU's driver, to
 * the event's config in the PMU vpmu.
 */
static int pmu_config(struct perf_event *event)
{
	const struct vpmu_device *dev = to_vpmu(event->pmu);
	u32 type = event->attr.type;

	if (type != event->pmu->type && !(dev->generic && type_is_generic(type)))
		return -ENOENT;
	return vpmu_attr_config(dev, &event->attr, &event->hw.config);
}

/* Checks an event whose records the host writes. */
static int pmu_check_ring(const struct perf_event *event, bool trace)
{
	int err = vpmu_attr_check_ring(&event->attr);

	/* A locked-down kernel hides registers from all programs. */
	if (!err && trace && vpmu_config_has_registers(event->hw.config))
		err = security_locked_down(LOCKDOWN_PERF);
	return err;
}

static int pmu_event_init(struct perf_event *event)
{
	bool ring = event->attr.config1 & VPMU_CONFIG1_RING, trace;
	int err = pmu_config(event);

	if (err)
		return err;
	trace = vpmu_config_is_trace(event->hw.config);
	/* The host writes a trace to an AUX area, which must be its own. */
	if (trace && !ring) {
		vpmu_info_ratelimited(to_vpmu(event->pmu),
				      "perf cannot read traces: use vperf exits, or a ring of /dev/vpmu\n");
		return -EOPNOTSUPP;
	}
	err = vpmu_attr_check(&event->attr, trace);
	if (err)
		return err;
	/*
	 * Fail as a CPU PMU without precise samples does: perf then retries
	 * with a lower precise_ip.
	 */
	if (event->attr.precise_ip)
		return -EOPNOTSUPP;
	/*
	 * The event counts only guests of this guest. If there can be none, its
	 * count is zero, and it is never started on the device. The device
	 * cannot tell such guests from this one.
	 */
	if (event->attr.exclude_host && vpmu_arch_can_nest())
		return -EOPNOTSUPP;
	if (ring)
		err = pmu_check_ring(event, trace);
	else if (is_sampling_event(event))
		err = vpmu_attr_check_replay(event);
	return err ?: vpmu_event_create(to_vpmu(event->pmu), event);
}

static int vpmu_pmu_event_init(struct perf_event *event)
{
	int err = pmu_event_init(event);

	/*
	 * Without this module, no PMU would take an event of perf's own types.
	 * Programs then fall back, for example from cycles to a clock, which
	 * they do not after EOPNOTSUPP.
	 */
	if (err == -EOPNOTSUPP && type_is_generic(event->attr.type))
		err = -ENOENT;
	return err;
}

/*
 * Whether the guest has a CPU PMU of its own, which then counts perf's generic
 * events.
 */
static bool cpu_pmu_exists(void)
{
	struct perf_event_attr attr = {
		.type = PERF_TYPE_RAW,
		.size = sizeof(attr),
		.disabled = 1,
	};
	struct perf_event *event;

	event = perf_event_create_kernel_counter(&attr, cpumask_first(cpu_online_mask), NULL, NULL,
						 NULL);
	if (IS_ERR(event))
		return PTR_ERR(event) != -ENOENT;
	perf_event_release_kernel(event);
	return true;
}

/**
 * vpmu_pmu_register() - register the PMU vpmu
 * @dev: the device
 *
 * Return: 0 or a negative errno.
 */
int vpmu_pmu_register(struct vpmu_device *dev)
{
	int err;

	dev->generic = !cpu_pmu_exists();
	err = vpmu_sysfs_init(dev, &dev->counting.sysfs);
	if (err)
		return err;
	dev->counting.pmu = (struct pmu) {
		.module		= THIS_MODULE,
		.attr_groups	= dev->counting.sysfs.groups,
		/*
		 * Not perf_hw_context: only one PMU can use that context, and
		 * it must remain free for the CPU's own PMU.
		 */
		.task_ctx_nr	= perf_sw_context,
		.pmu_enable	= vpmu_pmu_enable,
		.pmu_disable	= vpmu_pmu_disable,
		.event_init	= vpmu_pmu_event_init,
		.event_mapped	= vpmu_pmu_event_mapped,
		.check_period	= vpmu_pmu_check_period,
		.add		= vpmu_pmu_add,
		.del		= vpmu_pmu_del,
		.start		= vpmu_pmu_start,
		.stop		= vpmu_pmu_stop,
		.read		= vpmu_event_read,
		.start_txn	= vpmu_pmu_start_txn,
		.commit_txn	= vpmu_pmu_commit_txn,
		.cancel_txn	= vpmu_pmu_cancel_txn,
	};
	err = perf_pmu_register(&dev->counting.pmu, "vpmu", -1);
	if (err) {
		vpmu_sysfs_exit(&dev->counting.sysfs);
		return err;
	}
	dev->info.pmu_type = dev->counting.pmu.type;
	return 0;
}

/**
 * vpmu_pmu_unregister() - unregister the PMU, after all events are closed
 * @dev: the device
 */
void vpmu_pmu_unregister(struct vpmu_device *dev)
{
	perf_pmu_unregister(&dev->counting.pmu);
	vpmu_sysfs_exit(&dev->counting.sysfs);
}

// SPDX-License-Identifier: GPL-2.0
/*
 * read(2) on events of /dev/vpmu: counts and times, laid out as perf's
 * read_format specifies.
 */
#include <linux/perf_event.h>
#include <linux/slab.h>

#include "vpmu.h"
#include "vpmu_file.h"

/* Whether the count was lost. */
static bool read_has_error(const struct vpmu_file *file)
{
	return READ_ONCE(file->error) || file->backend->has_error(file);
}

static size_t read_values(const struct vpmu_file *file, const struct vpmu_file *leader)
{
	u64 format = file->spec.read_format;
	size_t each = 1 + !!(format & PERF_FORMAT_ID) + !!(format & PERF_FORMAT_LOST);
	size_t times = !!(format & PERF_FORMAT_TOTAL_TIME_ENABLED) +
		       !!(format & PERF_FORMAT_TOTAL_TIME_RUNNING);

	return format & PERF_FORMAT_GROUP ? 1 + times + (1 + leader->group.siblings) * each :
					    times + each;
}

/*
 * Reports the device's times, because perf core's times also run while the file
 * is disabled. The device does not know the time in which perf core could not
 * schedule the event, so this function adds that time to the enabled time.
 */
static size_t read_put_times(struct vpmu_file *file, u64 format, u64 *values)
{
	u64 enabled = 0, running = 0, missed = file->tally.totals.missed;
	size_t n = 0;

	if (file->tally.totals.behind) {
		perf_event_read_value(file->event, &enabled, &running);
		missed = enabled > running ? enabled - running : 0;
	}
	if (format & PERF_FORMAT_TOTAL_TIME_ENABLED)
		values[n++] = file->tally.totals.enabled + missed;
	if (format & PERF_FORMAT_TOTAL_TIME_RUNNING)
		values[n++] = file->tally.totals.running;
	return n;
}

static size_t read_put_rest(const struct vpmu_file *file, u64 format, u64 *values)
{
	size_t n = 0;

	if (format & PERF_FORMAT_ID)
		values[n++] = file->label;
	if (format & PERF_FORMAT_LOST)
		values[n++] = file->tally.totals.lost;
	return n;
}

static void read_put(struct vpmu_file *file, struct vpmu_file *leader, u64 *values)
{
	u64 format = file->spec.read_format;
	struct vpmu_file *other;

	if (!(format & PERF_FORMAT_GROUP)) {
		*values++ = file->tally.totals.value;
		values += read_put_times(file, format, values);
		read_put_rest(file, format, values);
		return;
	}
	*values++ = 1 + leader->group.siblings;
	values += read_put_times(leader, format, values);
	vpmu_group_for_each(other, leader) {
		*values++ = other->tally.totals.value;
		values += read_put_rest(other, format, values);
	}
}

/**
 * vpmu_read() - read(2)
 * @file: the file; with PERF_FORMAT_GROUP, its whole group is read as one
 *        snapshot
 * @values: on success, set to an array that the caller must free; otherwise
 *          NULL
 * @room: size of the program's buffer in bytes
 *
 * Return: the length of the array in bytes; 0, with no array, if a count was
 * lost; -ENOSPC if @room is too small; or another negative errno.
 */
ssize_t vpmu_read(struct vpmu_file *file, u64 **values, size_t room)
{
	bool whole = file->spec.read_format & PERF_FORMAT_GROUP;
	struct vpmu_file *leader = vpmu_group_lock(file), *other;
	size_t size = read_values(file, leader) * sizeof(u64);
	ssize_t ret = 0;

	*values = NULL;
	if (read_has_error(file))
		goto unlock;
	ret = -ENOSPC;
	if (room < size)
		goto unlock;
	/* An event whose CPU is offline keeps its last count. */
	vpmu_call_group(leader, whole ? NULL : file, VPMU_COMMAND_READ);
	ret = 0;
	vpmu_group_for_each(other, leader)
		if ((whole || other == file) && read_has_error(other))
			goto unlock;
	ret = -ENOMEM;
	*values = kcalloc(size / sizeof(u64), sizeof(u64), GFP_KERNEL);
	if (!*values)
		goto unlock;
	read_put(file, leader, *values);
	ret = size;
unlock:
	vpmu_group_unlock(leader);
	return ret;
}

// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * A reader for perf's interface. It uses only three ioctls of this project. It
 * maps, polls and reads by the rules of <linux/perf_event.h>, and prints the
 * records.
 *
 *	reader THREAD VALUE COUNT
 *
 * Samples each mark VALUE of THREAD. Prints "ready", then a line for each
 * record. When COUNT records have been read or lost, prints the event's count.
 */
#include <linux/perf_event.h>

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "vpmu_uapi.h"

#define PAGES 2

static void fail(const char *what)
{
	fprintf(stderr, "reader: %s: %s\n", what, strerror(errno));
	exit(1);
}

/* Copies bytes out of the ring; the bytes may wrap around the ring's end. */
static void copy(void *to, const uint8_t *data, uint64_t size, uint64_t at, uint64_t bytes)
{
	uint64_t offset = at % size;
	uint64_t first = bytes < size - offset ? bytes : size - offset;

	memcpy(to, data + offset, first);
	memcpy((uint8_t *)to + first, data, bytes - first);
}

static int open_marks(int device, int thread, uint64_t value)
{
	struct perf_event_attr attr = {
		.size = sizeof(attr),
		.config = VPMU_CONFIG(VPMU_KIND_MARK, value),
		.sample_period = 1,
		.sample_type = PERF_SAMPLE_TID | PERF_SAMPLE_TIME | PERF_SAMPLE_READ,
		.wakeup_events = 1,
		.config1 = VPMU_CONFIG1_RING,
		.disabled = 1,
	};
	struct vpmu_info info;
	int fd;

	if (ioctl(device, VPMU_IOC_INFO, &info))
		fail("querying the device");
	attr.type = info.pmu_type;
	fd = syscall(SYS_perf_event_open, &attr, thread, -1, -1, PERF_FLAG_FD_CLOEXEC);
	if (fd < 0)
		fail("opening the event");
	return fd;
}

/* Prints a record; returns the number of overflows that it reports. */
static uint64_t print(const struct perf_event_header *header, const uint64_t *body)
{
	switch (header->type) {
	case PERF_RECORD_SAMPLE:
		printf("sample %u %u %llu %llu\n", (uint32_t)body[0], (uint32_t)(body[0] >> 32),
		       (unsigned long long)body[1], (unsigned long long)body[2]);
		return 1;
	case PERF_RECORD_LOST:
		printf("lost %llu\n", (unsigned long long)body[1]);
		return body[1];
	default:
		printf("type %u\n", header->type);
		return 0;
	}
}

static uint64_t drain(struct perf_event_mmap_page *page)
{
	const uint8_t *data = (const uint8_t *)page + page->data_offset;
	uint64_t size = page->data_size, tail = page->data_tail, seen = 0;
	uint64_t head = __atomic_load_n(&page->data_head, __ATOMIC_ACQUIRE);

	while (tail != head) {
		struct perf_event_header header;
		uint64_t body[64] = { 0 };

		copy(&header, data, size, tail, sizeof(header));
		if (header.size < sizeof(header) || header.size > sizeof(body)) {
			errno = EPROTO;
			fail("a record's size");
		}
		copy(body, data, size, tail + sizeof(header), header.size - sizeof(header));
		seen += print(&header, body);
		tail += header.size;
	}
	__atomic_store_n(&page->data_tail, tail, __ATOMIC_RELEASE);
	return seen;
}

int main(int argc, char **argv)
{
	int device = open("/dev/vpmu", O_RDWR | O_CLOEXEC), event, ring;
	struct perf_event_mmap_page *page;
	uint64_t seen = 0, wanted, count;

	if (argc != 4 || device < 0)
		fail("usage: reader THREAD VALUE COUNT (needs /dev/vpmu)");
	wanted = strtoull(argv[3], NULL, 0);
	event = open_marks(device, atoi(argv[1]), strtoull(argv[2], NULL, 0));
	ring = ioctl(device, VPMU_IOC_RING, event);
	if (ring < 0)
		fail("opening the ring");
	page = mmap(NULL, (1 + PAGES) * 4096, PROT_READ | PROT_WRITE, MAP_SHARED, ring, 0);
	if (page == MAP_FAILED)
		fail("mapping the ring");
	if (ioctl(event, PERF_EVENT_IOC_ENABLE, 0))
		fail("enabling the event");
	printf("ready\n");
	fflush(stdout);

	while (seen < wanted) {
		struct pollfd ready = { .fd = ring, .events = POLLIN };

		if (poll(&ready, 1, 20000) != 1) {
			fprintf(stderr, "reader: no wakeup after %llu records\n", (unsigned long long)seen);
			return 1;
		}
		seen += drain(page);
		/* The flush makes the device write a record of any pending loss. */
		if (ioctl(ring, VPMU_IOC_FLUSH, 0))
			fail("flushing the event");
		seen += drain(page);
	}
	if (read(event, &count, sizeof(count)) != sizeof(count))
		fail("reading the count");
	printf("count %llu\n", (unsigned long long)count);
	return 0;
}

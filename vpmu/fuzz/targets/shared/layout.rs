//! The layout of guest memory: as small as possible, because each execution begins by zeroing it.

use std::ops::Range;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vpmu::QueueState;
use vpmu::abi::{PAGE_SIZE, QUEUE_VCPU};
use vpmu_testkit::{DriverQueue, VCPUS};

const PAGE: u64 = PAGE_SIZE as u64;
/// The number of queues: control, event, and one for each vCPU.
const QUEUE_COUNT: u64 = QUEUE_VCPU as u64 + VCPUS as u64;
/// The task page of vCPU 0. The task pages of the other vCPUs follow it.
pub(crate) const TASK_PAGES: u64 = 0x8000;
/// The page that holds the rings of queue 0. The pages of the other queues follow it.
const QUEUES: u64 = 0x1_0000;
/// The first of [`ARENA_PAGES`] pages for rings and areas. Each of them is followed by a page that the driver never
/// names, so the device must not write to it.
const ARENA: u64 = 0x1_4000;
/// Number of pages that the driver can map any number of times. The driver also writes the guest's page tables to some
/// of them.
pub(crate) const SHARED_PAGES: u64 = 8;
/// Number of pages that are each in at most one ring during an execution. Only the device writes records to them.
const OWN_PAGES: u64 = 16;
/// Number of pages for the checks at the end of an execution.
const LAST_PAGES: usize = 8;
const ARENA_PAGES: u64 = SHARED_PAGES + OWN_PAGES + LAST_PAGES as u64;
/// The first buffer of queue 0. The first buffers of the other queues follow, with one page for each queue. The second
/// buffer of a queue is [`DriverQueue::BUFFER`] bytes after the first, and so on, as in the tests of the device.
const BUFFERS: u64 = ARENA + 2 * ARENA_PAGES * PAGE;
/// Number of buffers of each queue.
pub(crate) const SLOTS: u16 = 3;
/// Address of the window.
pub(crate) const WINDOW: u64 = 0xd010_0000;
/// Number of pages of the window.
pub(crate) const WINDOW_PAGES: u64 = 16;

/// Guest memory and a window, reused by all executions.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) guest: GuestMemoryMmap,
    pub(crate) window: GuestMemoryMmap,
    ranges: Vec<(GuestAddress, usize)>,
}

fn range(range: &Range<u64>) -> (GuestAddress, usize) {
    let len = usize::try_from(range.end - range.start).expect("small");
    (GuestAddress(range.start), len)
}

impl Memory {
    /// Memory with room for the queues of a device.
    pub(crate) fn new() -> Self {
        // Use few regions, because each access searches for its region.
        let buffers = QUEUE_COUNT * PAGE;
        let mut ranges = vec![range(&(TASK_PAGES..BUFFERS + buffers))];
        for slot in 1..u64::from(SLOTS) {
            let start = BUFFERS + slot * DriverQueue::BUFFER;
            ranges.push(range(&(start..start + buffers)));
        }
        let window = range(&(WINDOW..WINDOW + WINDOW_PAGES * PAGE));
        Self {
            guest: GuestMemoryMmap::from_ranges(&ranges).expect("memory"),
            window: GuestMemoryMmap::from_ranges(&[window]).expect("memory"),
            ranges,
        }
    }

    /// Sets up all queues anew. Returns the driver's side and the device's side of each.
    pub(crate) fn queues(&self) -> (Vec<DriverQueue>, Vec<QueueState>) {
        let both = (0..QUEUE_COUNT).map(|index| {
            let (rings, buffers) = (QUEUES + index * PAGE, BUFFERS + index * PAGE);
            DriverQueue::new(&self.guest, rings, buffers)
        });
        let (drivers, queues): (Vec<_>, _) = both.unzip();
        for queue in &drivers[usize::from(QUEUE_VCPU)..] {
            queue.want_no_interrupt();
        }
        (drivers, queues)
    }

    /// Zeroes guest memory and the window.
    pub(crate) fn clear(&self) {
        let clear = |memory: &GuestMemoryMmap, &(start, len): &(GuestAddress, usize)| {
            let mut at = start.0;
            while at < start.0 + len as u64 {
                memory.write_slice(&[0; PAGE_SIZE], GuestAddress(at)).expect("in memory");
                at += PAGE;
            }
        };
        for each in &self.ranges {
            clear(&self.guest, each);
        }
        clear(&self.window, &range(&(WINDOW..WINDOW + WINDOW_PAGES * PAGE)));
    }

    /// Checks that the device did not write to pages that the driver never gave to it.
    pub(crate) fn assert_neighbours_untouched(&self) {
        let mut bytes = [0; PAGE_SIZE];
        for number in 0..ARENA_PAGES {
            let neighbour = GuestAddress(arena(number) + PAGE);
            self.guest.read_slice(&mut bytes, neighbour).expect("in memory");
            assert!(
                bytes == [0; PAGE_SIZE],
                "the device wrote to page {:#x}, which the driver never named",
                neighbour.0
            );
        }
    }
}

fn arena(number: u64) -> u64 {
    ARENA + number * 2 * PAGE
}

/// A page that several rings and areas may share.
pub(crate) fn shared(number: u64) -> u64 {
    arena(number % SHARED_PAGES)
}

/// A page for a page table of the guest. The device walks the page tables when a sample needs callers or the user
/// stack. Rings may use this page, too.
pub(crate) fn table(number: u64) -> u64 {
    shared(number)
}

/// Page `number` of the [`OWN_PAGES`]; `None` if there is no such page.
pub(crate) fn own(number: u64) -> Option<u64> {
    (number < OWN_PAGES).then(|| arena(SHARED_PAGES + number))
}

/// The pages for the checks at the end of an execution.
pub(crate) fn last() -> [u64; LAST_PAGES] {
    std::array::from_fn(|number| arena(SHARED_PAGES + OWN_PAGES + number as u64))
}

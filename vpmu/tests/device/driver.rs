//! One virtqueue from the driver's side.

use std::sync::atomic::Ordering;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vpmu::QueueState;

pub(crate) const QUEUE_SIZE: u16 = 16;
const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// A queue whose rings are in one page and whose buffers are elsewhere.
#[derive(Debug)]
pub(crate) struct DriverQueue {
    memory: GuestMemoryMmap,
    descriptors: u64,
    available: u64,
    used: u64,
    buffers: u64,
    next: u16,
    seen: u16,
}

/// A descriptor as the driver writes it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Descriptor {
    pub(crate) address: u64,
    pub(crate) len: u32,
    pub(crate) writable: bool,
    /// The next descriptor.
    pub(crate) next: Option<u16>,
}

impl DriverQueue {
    pub(crate) const BUFFER: u64 = 0x2_0000;

    pub(crate) fn new(memory: &GuestMemoryMmap, rings: u64, buffers: u64) -> (Self, QueueState) {
        let blank = [0; 4096];
        memory.write_slice(&blank, GuestAddress(rings)).expect("in memory");
        let queue = QueueState {
            ready: true,
            size: QUEUE_SIZE,
            desc_table: rings,
            avail_ring: rings + 0x400,
            used_ring: rings + 0x800,
            ..QueueState::default()
        };
        let driver = Self {
            memory: memory.clone(),
            descriptors: queue.desc_table,
            available: queue.avail_ring,
            used: queue.used_ring,
            buffers,
            next: 0,
            seen: 0,
        };
        (driver, queue)
    }

    /// Returns the driver's side of the same queue in `memory`, which is a copy of guest memory.
    pub(crate) fn at(&self, memory: &GuestMemoryMmap) -> Self {
        Self { memory: memory.clone(), ..*self }
    }

    pub(crate) fn want_no_interrupt(&self) {
        self.store(self.available, 1_u16);
    }

    pub(crate) fn want_interrupts(&self) {
        self.store(self.available, 0_u16);
    }

    /// The address of buffer `slot`.
    pub(crate) fn buffer(&self, slot: u16) -> u64 {
        self.buffers + u64::from(slot) * Self::BUFFER
    }

    pub(crate) fn describe(&self, index: u16, descriptor: Descriptor) {
        self.describe_as(index, descriptor, 0);
    }

    /// Like [`DriverQueue::describe`], with more flags.
    pub(crate) fn describe_as(&self, index: u16, descriptor: Descriptor, flags: u16) {
        let at = self.descriptors + 16 * u64::from(index);
        let write = if descriptor.writable { WRITE } else { 0 };
        let next = descriptor.next.map_or(0, |_| NEXT);
        self.store(at, descriptor.address);
        self.store(at + 8, descriptor.len);
        self.store(at + 12, write | next | flags);
        self.store(at + 14, descriptor.next.unwrap_or(0));
    }

    /// Makes the chain that starts at descriptor `head` available.
    pub(crate) fn offer(&mut self, head: u16) {
        let slot = u64::from(self.next % QUEUE_SIZE);
        self.store(self.available + 4 + 2 * slot, head);
        self.next = self.next.wrapping_add(1);
        self.store(self.available + 2, self.next);
    }

    /// Stores an available index, valid or not.
    pub(crate) fn claim(&self, index: u16) {
        self.store(self.available + 2, index);
    }

    /// Offers a request and `room` bytes for its answer, in descriptors 0 and 1.
    pub(crate) fn request(&mut self, request: &[u8], room: usize) {
        self.request_at(0, request, room);
    }

    /// Offers a request and `room` bytes for its answer, in descriptors `slot` and `slot + 1`.
    pub(crate) fn request_at(&mut self, slot: u16, request: &[u8], room: usize) {
        let (from, to) = (self.buffer(slot), self.buffer(slot + 1));
        self.memory.write_slice(request, GuestAddress(from)).expect("in memory");
        self.describe(
            slot,
            Descriptor {
                address: from,
                len: u32::try_from(request.len()).expect("short"),
                writable: false,
                next: (room > 0).then_some(slot + 1),
            },
        );
        self.describe(
            slot + 1,
            Descriptor { address: to, len: u32::try_from(room).expect("short"), writable: true, next: None },
        );
        self.offer(slot);
    }

    /// Takes the next returned chain. Returns the chain's head, and the number of bytes that the device wrote to the
    /// chain.
    pub(crate) fn reclaim(&mut self) -> Option<(u32, u32)> {
        let index: u16 = self.load(self.used + 2);
        if index == self.seen {
            return None;
        }
        let at = self.used + 4 + 8 * u64::from(self.seen % QUEUE_SIZE);
        self.seen = self.seen.wrapping_add(1);
        Some((self.load(at), self.load(at + 4)))
    }

    /// Takes the answer to [`DriverQueue::request`]. Returns `None` if the device has not answered yet.
    pub(crate) fn answer(&mut self) -> Option<Vec<u8>> {
        let (head, len) = self.reclaim()?;
        let slot = u16::try_from(head).expect("a slot") + 1;
        let mut answer = vec![0; usize::try_from(len).expect("short")];
        self.memory.read_slice(&mut answer, GuestAddress(self.buffer(slot))).expect("in memory");
        Some(answer)
    }

    fn store<T: vm_memory::AtomicAccess>(&self, at: u64, value: T) {
        self.memory.store(value, GuestAddress(at), Ordering::SeqCst).expect("in memory");
    }

    fn load<T: vm_memory::AtomicAccess>(&self, at: u64) -> T {
        self.memory.load(GuestAddress(at), Ordering::SeqCst).expect("in memory")
    }
}

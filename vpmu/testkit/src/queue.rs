//! One virtqueue from the driver's side.

use std::sync::atomic::Ordering;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vpmu::QueueState;
use vpmu::abi::QUEUE_VCPU;

pub const QUEUE_SIZE: u16 = 16;
const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// Where the queues of a device are in guest memory: the control queue, the event queue, and a queue for each vCPU.
#[derive(Debug, Clone, Copy)]
pub struct Layout {
    pub vcpus: u32,
    /// The page with the rings of the first queue. The pages of the other queues follow.
    pub rings: u64,
    /// The first buffer of the first queue. Its other buffers and those of the other queues follow.
    pub buffers: u64,
    /// Number of buffers of each queue.
    pub slots: u16,
}

impl Layout {
    /// One vCPU and one request at a time, below 1 MiB.
    pub const SMALL: Self = Self { vcpus: 1, rings: 0x1_0000, buffers: 0x2_0000, slots: 2 };

    /// Sets up the queues. Returns the driver's side and the device's side of each queue.
    pub fn set_up(self, memory: &GuestMemoryMmap) -> (Vec<DriverQueue>, Vec<QueueState>) {
        let queue = |index: u32| {
            let buffers = self.buffers + u64::from(index) * u64::from(self.slots) * DriverQueue::BUFFER;
            DriverQueue::new(memory, self.rings + u64::from(index) * 0x1000, buffers)
        };
        (0..u32::from(QUEUE_VCPU) + self.vcpus).map(queue).unzip()
    }
}

/// A queue whose rings are in one page and whose buffers are elsewhere.
#[derive(Debug)]
pub struct DriverQueue {
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
pub struct Descriptor {
    pub address: u64,
    pub len: u32,
    pub writable: bool,
    /// The next descriptor.
    pub next: Option<u16>,
}

impl DriverQueue {
    /// Size in bytes of each buffer.
    pub const BUFFER: u64 = 0x2_0000;

    pub fn new(memory: &GuestMemoryMmap, rings: u64, buffers: u64) -> (Self, QueueState) {
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
    pub fn at(&self, memory: &GuestMemoryMmap) -> Self {
        Self { memory: memory.clone(), ..*self }
    }

    pub fn want_no_interrupt(&self) {
        self.store(self.available, 1_u16);
    }

    pub fn want_interrupts(&self) {
        self.store(self.available, 0_u16);
    }

    /// The address of buffer `slot`.
    pub fn buffer(&self, slot: u16) -> u64 {
        self.buffers + u64::from(slot) * Self::BUFFER
    }

    pub fn describe(&self, index: u16, descriptor: Descriptor) {
        self.describe_as(index, descriptor, 0);
    }

    /// Like [`DriverQueue::describe`], with more flags.
    pub fn describe_as(&self, index: u16, descriptor: Descriptor, flags: u16) {
        let at = self.descriptors + 16 * u64::from(index);
        let write = if descriptor.writable { WRITE } else { 0 };
        let next = descriptor.next.map_or(0, |_| NEXT);
        self.store(at, descriptor.address);
        self.store(at + 8, descriptor.len);
        self.store(at + 12, write | next | flags);
        self.store(at + 14, descriptor.next.unwrap_or(0));
    }

    /// Makes the chain that starts at descriptor `head` available.
    pub fn offer(&mut self, head: u16) {
        self.place(self.next, head);
        self.offer_placed();
    }

    /// Fills the available ring with these heads in turn, for [`DriverQueue::offer_placed`].
    pub fn place_in_turn(&self, heads: &[u16]) {
        for (ahead, &head) in (0..QUEUE_SIZE).zip(heads.iter().cycle()) {
            self.place(self.next.wrapping_add(ahead), head);
        }
    }

    fn place(&self, index: u16, head: u16) {
        self.store(self.available + 4 + 2 * u64::from(index % QUEUE_SIZE), head);
    }

    /// Makes the next chain of the available ring available, with only one store: a benchmark measures the device.
    pub fn offer_placed(&mut self) {
        self.next = self.next.wrapping_add(1);
        self.store(self.available + 2, self.next);
    }

    /// Takes all returned chains. Returns whether the device has returned every chain.
    pub fn reclaim_all(&mut self) -> bool {
        self.seen = self.load(self.used + 2);
        self.seen == self.next
    }

    /// Stores an available index, valid or not.
    pub fn claim(&self, index: u16) {
        self.store(self.available + 2, index);
    }

    /// Offers a request and `room` bytes for its answer, in descriptors 0 and 1.
    pub fn request(&mut self, request: &[u8], room: usize) {
        self.request_at(0, request, room);
    }

    /// Offers a request and `room` bytes for its answer, in descriptors `slot` and `slot + 1`.
    pub fn request_at(&mut self, slot: u16, request: &[u8], room: usize) {
        self.lay(slot, request, room);
        self.offer(slot);
    }

    /// Writes a request and the chain in descriptors `slot` and `slot + 1`, but does not offer it.
    pub fn lay(&self, slot: u16, request: &[u8], room: usize) {
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
    }

    /// Sends a request, and calls `notify`, which must notify the device. Returns the answer.
    pub fn exchange(&mut self, request: &[u8], room: usize, notify: impl FnOnce()) -> Vec<u8> {
        self.request(request, room);
        notify();
        self.answer().expect("the device answers during the notification")
    }

    /// Takes the next returned chain. Returns the chain's head, and the number of bytes that the device wrote to the
    /// chain.
    pub fn reclaim(&mut self) -> Option<(u32, u32)> {
        let index: u16 = self.load(self.used + 2);
        if index == self.seen {
            return None;
        }
        let at = self.used + 4 + 8 * u64::from(self.seen % QUEUE_SIZE);
        self.seen = self.seen.wrapping_add(1);
        Some((self.load(at), self.load(at + 4)))
    }

    /// Takes the answer to [`DriverQueue::request`]. Returns `None` if the device has not answered yet.
    pub fn answer(&mut self) -> Option<Vec<u8>> {
        let (head, len) = self.reclaim()?;
        let slot = u16::try_from(head).expect("a slot") + 1;
        Some(self.written(slot, usize::try_from(len).expect("short")))
    }

    /// The first `len` bytes of buffer `slot`.
    pub fn written(&self, slot: u16, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read_slice(&mut bytes, GuestAddress(self.buffer(slot))).expect("in memory");
        bytes
    }

    fn store<T: vm_memory::AtomicAccess>(&self, at: u64, value: T) {
        self.memory.store(value, GuestAddress(at), Ordering::Release).expect("in memory");
    }

    fn load<T: vm_memory::AtomicAccess>(&self, at: u64) -> T {
        self.memory.load(GuestAddress(at), Ordering::Acquire).expect("in memory")
    }
}

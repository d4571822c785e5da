//! One virtqueue. This module takes the driver's buffers and returns them, without interpreting their contents.

use std::io::{self, Read, Write};
use std::sync::atomic::Ordering;

use vm_memory::{Address, GuestAddress, GuestMemoryError};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::memory::{Memory, View};
use crate::saved::saved;
use crate::work;

/// Bit in the flags of the available ring: the driver does not want an interrupt.
const NO_INTERRUPT: u16 = 1;
/// Limits one round of serving a queue. Once the device has used this many descriptors per entry of the queue, it takes
/// no more buffers in that round. One per entry is enough for a correct driver: if the driver adds buffers during a
/// round, it notifies the device again, and the notification starts another round.
const DESCRIPTORS_PER_ENTRY: usize = 2;

/// Descriptor flags. In this order, they mean: another descriptor follows; the device writes the buffer; the buffer is
/// a table of descriptors.
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// The largest split virtqueue.
const MAX_SIZE: u16 = 1 << 15;
/// Offsets of the index and of the entries in a ring.
const INDEX: u64 = 2;
const ENTRIES: u64 = 4;

saved! {
    /// The device's position in a virtqueue.
    pub(crate) struct SavedQueue {
        pub(crate) next_available: u16,
        pub(crate) next_used: u16,
        pub(crate) broken: bool,
    }
}

/// A split virtqueue as the transport and the driver set it up, with the device's positions in its available and used
/// rings. The default is an unused queue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QueueState {
    /// Whether the driver uses the queue.
    pub ready: bool,
    /// Number of entries. It is a power of two up to 2^15.
    pub size: u16,
    /// Guest-physical address of the descriptor table.
    pub desc_table: u64,
    /// Guest-physical address of the available ring: the driver's area.
    pub avail_ring: u64,
    /// Guest-physical address of the used ring: the device's area.
    pub used_ring: u64,
    /// Free-running index, modulo 2^16, of the next buffer that the device takes from the available ring; zero
    /// after a reset.
    pub next_avail: u16,
    /// Free-running index, modulo 2^16, of the next buffer that the device returns in the used ring; zero after a
    /// reset.
    pub next_used: u16,
}

/// A descriptor in guest memory.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Descriptor {
    address: U64,
    len: U32,
    flags: U16,
    next: U16,
}

/// A used-ring element in guest memory.
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct Used {
    head: U32,
    len: U32,
}

/// The rings of a queue are outside guest memory, or are inconsistent.
#[derive(Debug, thiserror::Error)]
enum BadRings {
    #[error("its rings are not in guest memory")]
    Memory(#[from] GuestMemoryError),
    #[error("the driver made more buffers available than the queue has entries")]
    Index,
    #[error("a buffer begins beyond the descriptor table")]
    Head,
}

impl QueueState {
    /// Whether the queue is valid. The rings of a valid queue are aligned and in guest memory.
    pub(crate) fn is_sound(&self, memory: &View<'_>) -> bool {
        let size = usize::from(self.size);
        let rings = [
            (self.desc_table, size_of::<Descriptor>() * size, 16),
            (self.avail_ring, 6 + size_of::<u16>() * size, 2),
            (self.used_ring, 6 + size_of::<Used>() * size, 4),
        ];
        let in_memory = |&(at, len, alignment): &(u64, usize, u64)| {
            at.is_multiple_of(alignment) && memory.is_writable(GuestAddress(at), len)
        };
        let sized = self.size.is_power_of_two() && self.size <= MAX_SIZE;
        self.ready && sized && rings.iter().all(in_memory)
    }

    /// The head of the next buffer that the driver made available.
    fn take(&mut self, memory: &View<'_>) -> Result<Option<u16>, BadRings> {
        let ring = GuestAddress(self.avail_ring);
        // Pairs with the barrier that the driver executes before it stores the index. All buffers before the index are
        // therefore completely written.
        let index = memory.load(ring.unchecked_add(INDEX), Ordering::Acquire)?;
        let available = u16::from_le(index).wrapping_sub(self.next_avail);
        if available == 0 {
            return Ok(None);
        }
        if available > self.size {
            return Err(BadRings::Index);
        }
        let slot = u64::from(self.next_avail % self.size);
        let at = ring.unchecked_add(ENTRIES + slot * size_of::<u16>() as u64);
        let head = u16::from_le(memory.load(at, Ordering::Relaxed)?);
        if head >= self.size {
            return Err(BadRings::Head);
        }
        self.next_avail = self.next_avail.wrapping_add(1);
        Ok(Some(head))
    }

    /// Returns the buffer that starts at descriptor `head`.
    fn give_back(&mut self, memory: &View<'_>, head: u16, len: u32) -> Result<(), BadRings> {
        let ring = GuestAddress(self.used_ring);
        let slot = u64::from(self.next_used % self.size);
        let at = ring.unchecked_add(ENTRIES + slot * size_of::<Used>() as u64);
        let used = Used { head: u32::from(head).into(), len: len.into() };
        memory.write(used.as_bytes(), at)?;
        self.next_used = self.next_used.wrapping_add(1);
        let index = self.next_used.to_le();
        // The element and the buffer must be visible before the index.
        memory.store(index, ring.unchecked_add(INDEX), Ordering::Release)?;
        Ok(())
    }
}

/// A virtqueue during one activation of the device. The default is an unused queue.
#[derive(Debug, Default)]
pub(crate) struct DeviceQueue(Option<Active>);

#[derive(Debug)]
struct Active {
    memory: Memory,
    index: u16,
    queue: QueueState,
    /// Whether the rings were inconsistent or inaccessible. If so, the queue stays unused until a reset.
    broken: bool,
    /// Number of descriptors that the current round of serving the queue may still use.
    descriptors: usize,
    /// The parts of the last returned buffer. The next buffer reuses the allocation of this vector.
    spare: Vec<Part>,
}

/// A buffer taken off a queue. Its descriptors are walked only once, because the walk accounts for most of the time
/// that a notification takes.
#[derive(Debug)]
pub(crate) struct Chain {
    memory: Memory,
    head: u16,
    /// All parts are in guest memory, unless the buffer is `broken`. A buffer is broken if it is not completely in
    /// guest memory, if it has more descriptors than the queue has entries, if it refers to a descriptor beyond the
    /// table, or if it has an indirect descriptor. The device does not offer the feature for indirect descriptors.
    parts: Vec<Part>,
    broken: bool,
}

/// One descriptor.
#[derive(Debug, Clone, Copy)]
struct Part {
    address: GuestAddress,
    len: usize,
    writable: bool,
}

/// A buffer that is broken (see [`Chain`]) or too short.
#[derive(Debug, thiserror::Error)]
#[error("the buffer is malformed or too short")]
pub(crate) struct BadChain;

impl DeviceQueue {
    pub(crate) fn new(memory: &Memory, index: u16, queue: QueueState) -> Self {
        Self(Some(Active { memory: memory.clone(), index, queue, broken: false, descriptors: 0, spare: Vec::new() }))
    }

    /// Returns the current state. For an unused queue, returns the default.
    pub(crate) fn state(&self) -> QueueState {
        self.0.as_ref().map_or_else(QueueState::default, |active| active.queue)
    }

    /// Returns the device's position. `None` for an unused queue.
    pub(crate) fn save(&self) -> Option<SavedQueue> {
        let active = self.0.as_ref()?;
        Some(SavedQueue {
            next_available: active.queue.next_avail,
            next_used: active.queue.next_used,
            broken: active.broken,
        })
    }

    /// Continues at a saved position. Call this before the queue is used.
    pub(crate) fn restore(&mut self, saved: &SavedQueue) {
        if let Some(active) = &mut self.0 {
            active.queue.next_avail = saved.next_available;
            active.queue.next_used = saved.next_used;
            active.broken = saved.broken;
        }
    }

    /// Starts a round of queue processing, either after a notification or because a notice is pending. This resets the
    /// number of descriptors that [`DeviceQueue::take`] may use until the next round.
    pub(crate) fn notified(&mut self) {
        if let Some(active) = &mut self.0 {
            active.descriptors = usize::from(active.queue.size) * DESCRIPTORS_PER_ENTRY;
        }
    }

    /// Maximum number of buffers that one round of serving the queue may take. It equals the queue's size.
    pub(crate) fn bound(&self) -> u16 {
        self.0.as_ref().map_or(0, |active| active.queue.size)
    }

    /// Takes the next available buffer, unless the current round has used up its descriptors.
    pub(crate) fn take(&mut self) -> Option<Chain> {
        let active = self.0.as_mut()?;
        if active.broken || active.descriptors == 0 || !active.queue.ready {
            return None;
        }
        let memory = active.memory.view();
        let head = match active.queue.take(&memory) {
            Ok(head) => head?,
            Err(error) => {
                let index = active.index;
                log::warn!("queue {index} is inconsistent and is ignored until a reset: {error}");
                active.broken = true;
                return None;
            }
        };
        let mut parts = std::mem::take(&mut active.spare);
        parts.clear();
        let broken = walk(&active.queue, &memory, head, &mut parts).is_err();
        // Even a broken chain costs the read of one descriptor.
        let read = parts.len().max(1);
        active.descriptors = active.descriptors.saturating_sub(read);
        work::charge(read as u64);
        Some(Chain { memory: active.memory.clone(), head, parts, broken })
    }

    /// Makes the last taken buffer available again.
    pub(crate) fn put_back(&mut self) {
        if let Some(active) = &mut self.0 {
            active.queue.next_avail = active.queue.next_avail.wrapping_sub(1);
        }
    }

    /// Returns a buffer with `len` written bytes.
    pub(crate) fn give_back(&mut self, chain: Chain, len: u32) {
        let Some(active) = &mut self.0 else {
            return;
        };
        let memory = active.memory.view();
        if let Err(error) = active.queue.give_back(&memory, chain.head, len) {
            let index = active.index;
            log::warn!("cannot return a buffer on queue {index}, which is ignored until a reset: {error}");
            active.broken = true;
        }
        active.spare = chain.parts;
    }

    /// Returns whether the driver wants an interrupt for the returned buffers.
    pub(crate) fn wants_interrupt(&self) -> bool {
        let Some(active) = &self.0 else {
            return false;
        };
        // Pairs with the driver's barrier: the driver clears NO_INTERRUPT before the barrier, and checks the used
        // ring after it.
        std::sync::atomic::fence(Ordering::SeqCst);
        let flags = GuestAddress(active.queue.avail_ring);
        active
            .memory
            .view()
            .load::<u16>(flags, Ordering::Relaxed)
            .is_ok_and(|flags| u16::from_le(flags) & NO_INTERRUPT == 0)
    }
}

/// Collects the descriptors of one buffer of `queue`. The buffer starts at descriptor `head`.
fn walk(queue: &QueueState, memory: &View<'_>, head: u16, parts: &mut Vec<Part>) -> Result<(), BadChain> {
    let mut next = Some(head);
    while let Some(index) = next {
        if index >= queue.size || parts.len() == usize::from(queue.size) {
            return Err(BadChain);
        }
        let offset = u64::from(index) * size_of::<Descriptor>() as u64;
        let at = queue.desc_table.checked_add(offset).ok_or(BadChain)?;
        let mut bytes = [0; size_of::<Descriptor>()];
        let read = memory.read(&mut bytes, GuestAddress(at));
        read.map_err(|_| BadChain)?;
        let descriptor: Descriptor = zerocopy::transmute!(bytes);
        let flags = descriptor.flags.get();
        let part = Part {
            address: GuestAddress(descriptor.address.get()),
            len: descriptor.len.get() as usize,
            writable: flags & WRITE != 0,
        };
        let in_memory = if part.writable {
            memory.is_writable(part.address, part.len)
        } else {
            memory.is_readable(part.address, part.len)
        };
        if flags & INDIRECT != 0 || !in_memory {
            return Err(BadChain);
        }
        parts.push(part);
        next = (flags & NEXT != 0).then(|| descriptor.next.get());
    }
    Ok(())
}

impl Chain {
    /// Returns the number of bytes that the driver sent, and a reader for them.
    pub(crate) fn reader(&self) -> Result<(usize, impl Read + use<'_>), BadChain> {
        self.cursor(false).map(|cursor| (cursor.left(), cursor))
    }

    /// Returns the number of bytes that the device may write, and a writer for them.
    pub(crate) fn writer(&self) -> Result<(usize, impl Write + use<'_>), BadChain> {
        self.cursor(true).map(|cursor| (cursor.left(), cursor))
    }

    fn cursor(&self, writable: bool) -> Result<Cursor<'_>, BadChain> {
        if self.broken {
            Err(BadChain)
        } else {
            Ok(Cursor { chain: self, memory: self.memory.view(), writable, part: 0, offset: 0 })
        }
    }
}

/// A position in the readable parts or in the writable parts of a buffer.
struct Cursor<'a> {
    chain: &'a Chain,
    memory: View<'a>,
    writable: bool,
    part: usize,
    /// Number of bytes of the current part that precede the position.
    offset: usize,
}

impl Cursor<'_> {
    fn left(&self) -> usize {
        let parts = self.chain.parts.iter();
        let own = parts.filter(|part| part.writable == self.writable);
        // The sum cannot overflow, because a queue has at most 2^15 descriptors of at most 2^32 bytes.
        own.map(|part| part.len).sum()
    }

    /// Advances by up to `most` bytes that are contiguous in memory. Returns the address and the number of these bytes.
    /// At the end of the buffer, the number is zero.
    fn advance(&mut self, most: usize) -> (GuestAddress, usize) {
        while let Some(part) = self.chain.parts.get(self.part) {
            let left = part.len - self.offset;
            if part.writable != self.writable || left == 0 {
                self.part += 1;
                self.offset = 0;
                continue;
            }
            // The part is in guest memory, so the sum does not wrap.
            let address = GuestAddress(part.address.0 + self.offset as u64);
            let len = left.min(most);
            self.offset += len;
            return (address, len);
        }
        (GuestAddress(0), 0)
    }
}

impl Read for Cursor<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let (address, len) = self.advance(bytes.len());
        let read = self.memory.read(&mut bytes[..len], address);
        read.map(|()| len).map_err(io::Error::other)
    }
}

impl Write for Cursor<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let (address, len) = self.advance(bytes.len());
        let written = self.memory.write(&bytes[..len], address);
        written.map(|()| len).map_err(io::Error::other)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes `value` to `writer`, the part of a buffer that the device may write.
pub(crate) fn put<T: IntoBytes + Immutable + ?Sized>(writer: &mut impl Write, value: &T) -> Result<(), BadChain> {
    writer.write_all(value.as_bytes()).map_err(|_| BadChain)
}

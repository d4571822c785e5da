//! One virtqueue: takes buffers off it and gives them back. Knows nothing of their content.

use std::io::{self, Read, Write};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemory, GuestMemoryMmap, Permissions};
use zerocopy::{Immutable, IntoBytes};

use crate::save::SavedQueue;
use crate::work;

/// Bit of the available ring's flags: the driver wants no interrupt.
const NO_INTERRUPT: u16 = 1;
/// Descriptors that one notification looks at, for each entry of the queue. A driver uses each
/// descriptor once; one that makes buffers available meanwhile notifies again.
const DESCRIPTORS_PER_ENTRY: usize = 2;

/// A virtqueue of one activation; by default the device has none.
#[derive(Debug, Default)]
pub(crate) struct DeviceQueue(Option<Active>);

#[derive(Debug)]
struct Active {
    memory: Arc<GuestMemoryMmap>,
    index: usize,
    queue: Queue,
    /// Its rings made no sense; it stays silent until a reset.
    broken: bool,
    /// Descriptors that this notification may still look at.
    descriptors: usize,
    /// The room of the last buffer that was given back.
    spare: Vec<Part>,
}

/// A driver's buffer, taken off a queue. Its descriptors are walked once: a notification costs most of
/// its time here.
#[derive(Debug)]
pub(crate) struct Chain {
    memory: Arc<GuestMemoryMmap>,
    head: u16,
    /// Each lies in guest memory, unless the buffer is `broken`: outside memory, longer than the queue,
    /// or with an indirect descriptor, which the device does not offer.
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

/// A buffer outside memory, or too short.
#[derive(Debug, thiserror::Error)]
#[error("the buffer is not guest memory, or too short")]
pub(crate) struct BadChain;

impl DeviceQueue {
    pub(crate) fn new(memory: &Arc<GuestMemoryMmap>, index: usize, queue: Queue) -> Self {
        Self(Some(Active {
            memory: Arc::clone(memory),
            index,
            queue,
            broken: false,
            descriptors: 0,
            spare: Vec::new(),
        }))
    }

    /// How far the device has come; `None` without a queue.
    pub(crate) fn save(&self) -> Option<SavedQueue> {
        let active = self.0.as_ref()?;
        Some(SavedQueue {
            next_available: active.queue.next_avail(),
            next_used: active.queue.next_used(),
            broken: active.broken,
        })
    }

    /// The device has come so far, before it looks at the queue.
    pub(crate) fn restore(&mut self, saved: &SavedQueue) {
        if let Some(active) = &mut self.0 {
            active.queue.set_next_avail(saved.next_available);
            active.queue.set_next_used(saved.next_used);
            active.broken = saved.broken;
        }
    }

    /// The queue is served from now on, because the driver notified it or a notice is due:
    /// [`DeviceQueue::take`] looks at a bounded number of descriptors until this is called again.
    pub(crate) fn notified(&mut self) {
        if let Some(active) = &mut self.0 {
            active.descriptors = usize::from(active.queue.size()) * DESCRIPTORS_PER_ENTRY;
        }
    }

    /// Most buffers that one notification serves: the queue's size.
    pub(crate) fn bound(&self) -> u16 {
        self.0.as_ref().map_or(0, |active| active.queue.size())
    }

    /// The next buffer that the driver made available, unless the notification has brought too many
    /// descriptors.
    pub(crate) fn take(&mut self) -> Option<Chain> {
        let active = self.0.as_mut()?;
        if active.broken || active.descriptors == 0 || !active.queue.ready() {
            return None;
        }
        let size = active.queue.size();
        let next = active
            .queue
            .iter(&*active.memory)
            .map(|mut chains| chains.next().map(|chain| chain.head_index()));
        let head = match next {
            Ok(None) => return None,
            Ok(Some(head)) if head < size => head,
            Ok(Some(_)) | Err(_) => {
                let index = active.index;
                log::warn!("queue {index} makes no sense: it stays silent until a reset");
                active.broken = true;
                return None;
            }
        };
        let mut parts = std::mem::take(&mut active.spare);
        parts.clear();
        let broken = active.walk(head, &mut parts).is_err();
        active.descriptors = active.descriptors.saturating_sub(parts.len().max(1));
        work::charge(parts.len() as u64);
        Some(Chain {
            memory: Arc::clone(&active.memory),
            head,
            parts,
            broken,
        })
    }

    /// Lets the buffer that was taken last be taken again.
    pub(crate) fn put_back(&mut self) {
        if let Some(active) = &mut self.0 {
            active.queue.go_to_previous_position();
        }
    }

    /// Gives a buffer back with `len` bytes written.
    pub(crate) fn give_back(&mut self, chain: Chain, len: u32) {
        let Some(active) = &mut self.0 else {
            return;
        };
        if let Err(error) = active.queue.add_used(&*active.memory, chain.head, len) {
            let index = active.index;
            log::warn!("queue {index} takes nothing back, it stays silent: {error}");
            active.broken = true;
        }
        active.spare = chain.parts;
    }

    /// Whether the driver wants an interrupt for what it got back.
    pub(crate) fn wants_interrupt(&self) -> bool {
        let Some(active) = &self.0 else {
            return false;
        };
        // Pairs with the driver's barrier between clearing the flag and looking at the ring.
        std::sync::atomic::fence(Ordering::SeqCst);
        let flags = GuestAddress(active.queue.avail_ring());
        active
            .memory
            .load::<u16>(flags, Ordering::Relaxed)
            .is_ok_and(|flags| u16::from_le(flags) & NO_INTERRUPT == 0)
    }
}

impl Active {
    /// Collects the descriptors of the buffer that begins with `head`. virtio-queue's own iterator
    /// follows indirect tables whatever was negotiated.
    fn walk(&self, head: u16, parts: &mut Vec<Part>) -> Result<(), BadChain> {
        let mut next = Some(head);
        while let Some(index) = next {
            if index >= self.queue.size() || parts.len() == usize::from(self.queue.size()) {
                return Err(BadChain);
            }
            let offset = u64::from(index) * size_of::<Descriptor>() as u64;
            let at = self.queue.desc_table().checked_add(offset);
            let at = GuestAddress(at.ok_or(BadChain)?);
            let descriptor: Descriptor = self.memory.read_obj(at).map_err(|_| BadChain)?;
            let part = Part {
                address: descriptor.addr(),
                len: descriptor.len() as usize,
                writable: descriptor.is_write_only(),
            };
            let access = Permissions::ReadWrite;
            let is_memory = self.memory.check_range(part.address, part.len, access);
            if descriptor.refers_to_indirect_table() || !is_memory {
                return Err(BadChain);
            }
            parts.push(part);
            next = descriptor.has_next().then(|| descriptor.next());
        }
        Ok(())
    }
}

impl Chain {
    /// The driver's bytes: how many there are, and a reader of them.
    pub(crate) fn reader(&self) -> Result<(usize, impl Read + use<'_>), BadChain> {
        self.cursor(false).map(|cursor| (cursor.left(), cursor))
    }

    /// Room for the device's bytes: how much there is, and a writer to it.
    pub(crate) fn writer(&self) -> Result<(usize, impl Write + use<'_>), BadChain> {
        self.cursor(true).map(|cursor| (cursor.left(), cursor))
    }

    fn cursor(&self, writable: bool) -> Result<Cursor<'_>, BadChain> {
        match self.broken {
            true => Err(BadChain),
            false => Ok(Cursor {
                chain: self,
                writable,
                part: 0,
                offset: 0,
            }),
        }
    }
}

/// A place in the readable or the writable parts of a buffer.
struct Cursor<'a> {
    chain: &'a Chain,
    writable: bool,
    part: usize,
    /// Bytes of that part that were passed.
    offset: usize,
}

impl Cursor<'_> {
    fn left(&self) -> usize {
        let parts = self.chain.parts.iter();
        let own = parts.filter(|part| part.writable == self.writable);
        // A queue has 2^15 descriptors of 2^32 bytes at most.
        own.map(|part| part.len).sum()
    }

    /// The next bytes in memory, `most` of them at most: where, and how many; zero at the end.
    fn advance(&mut self, most: usize) -> (GuestAddress, usize) {
        while let Some(part) = self.chain.parts.get(self.part) {
            let left = part.len - self.offset;
            if part.writable != self.writable || left == 0 {
                self.part += 1;
                self.offset = 0;
                continue;
            }
            // Inside guest memory, so it does not wrap.
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
        let read = self.chain.memory.read_slice(&mut bytes[..len], address);
        read.map(|()| len).map_err(io::Error::other)
    }
}

impl Write for Cursor<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let (address, len) = self.advance(bytes.len());
        let written = self.chain.memory.write_slice(&bytes[..len], address);
        written.map(|()| len).map_err(io::Error::other)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Copies `value` to the device's bytes.
pub(crate) fn put<T: IntoBytes + Immutable + ?Sized>(
    writer: &mut impl Write,
    value: &T,
) -> Result<(), BadChain> {
    writer.write_all(value.as_bytes()).map_err(|_| BadChain)
}

//! The virtqueues: takes chains off them and gives them back. Knows nothing of what they carry.

use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Bit of the available ring's flags: the driver wants no interrupt.
const NO_INTERRUPT: u16 = 1;

/// The queues of one activation; by default none.
#[derive(Debug, Default)]
pub(crate) struct Queues {
    memory: Arc<GuestMemoryMmap>,
    queues: Vec<Queue>,
    /// Queues whose rings made no sense; they stay silent until a reset.
    broken: Vec<bool>,
}

/// One buffer of the driver's, taken off a queue.
#[derive(Debug)]
pub(crate) struct Chain {
    memory: Arc<GuestMemoryMmap>,
    chain: DescriptorChain<Arc<GuestMemoryMmap>>,
}

/// A buffer that lies outside memory or has too little room.
#[derive(Debug, thiserror::Error)]
#[error("the buffer is not guest memory, or too short")]
pub(crate) struct BadChain;

impl Queues {
    pub(crate) fn new(memory: Arc<GuestMemoryMmap>, queues: Vec<Queue>) -> Self {
        let broken = vec![false; queues.len()];
        Self {
            memory,
            queues,
            broken,
        }
    }

    /// Most chains that one notification serves: what the queue can hold.
    pub(crate) fn bound(&self, index: usize) -> u16 {
        self.queues.get(index).map_or(0, QueueT::size)
    }

    /// The next chain that the driver made available.
    pub(crate) fn take(&mut self, index: usize) -> Option<Chain> {
        let queue = self.queues.get_mut(index)?;
        if self.broken[index] || !queue.ready() {
            return None;
        }
        let size = queue.size();
        let next = queue
            .iter(Arc::clone(&self.memory))
            .map(|mut chains| chains.next());
        match next {
            Ok(None) => None,
            Ok(Some(chain)) if chain.head_index() < size => Some(Chain {
                memory: Arc::clone(&self.memory),
                chain,
            }),
            Ok(Some(_)) | Err(_) => {
                log::warn!("queue {index} makes no sense: it stays silent until a reset");
                self.broken[index] = true;
                None
            }
        }
    }

    /// Lets the chain that was taken last be taken again.
    pub(crate) fn put_back(&mut self, index: usize) {
        if let Some(queue) = self.queues.get_mut(index) {
            queue.go_to_previous_position();
        }
    }

    /// Gives a chain back with `len` bytes written.
    pub(crate) fn give_back(&mut self, index: usize, chain: &Chain, len: u32) {
        let Some(queue) = self.queues.get_mut(index) else {
            return;
        };
        let head = chain.chain.head_index();
        if let Err(error) = queue.add_used(&*self.memory, head, len) {
            log::warn!("queue {index} takes nothing back, it stays silent: {error}");
            self.broken[index] = true;
        }
    }

    /// Whether the driver wants an interrupt for what it got back.
    pub(crate) fn wants_interrupt(&self, index: usize) -> bool {
        let Some(queue) = self.queues.get(index) else {
            return false;
        };
        // Pairs with the driver's barrier between clearing the flag and looking at the ring.
        std::sync::atomic::fence(Ordering::SeqCst);
        let flags = GuestAddress(queue.avail_ring());
        self.memory
            .load::<u16>(flags, Ordering::Relaxed)
            .is_ok_and(|flags| u16::from_le(flags) & NO_INTERRUPT == 0)
    }
}

impl Chain {
    /// The driver's bytes: how many there are, and a reader of them.
    pub(crate) fn reader(&self) -> Result<(usize, impl Read + use<'_>), BadChain> {
        let reader = self
            .chain
            .clone()
            .reader(&self.memory)
            .map_err(|_| BadChain)?;
        Ok((reader.available_bytes(), reader))
    }

    /// Room for the device's bytes: how much there is, and a writer to it.
    pub(crate) fn writer(&self) -> Result<(usize, impl Write + use<'_>), BadChain> {
        let writer = self
            .chain
            .clone()
            .writer(&self.memory)
            .map_err(|_| BadChain)?;
        Ok((writer.available_bytes(), writer))
    }
}

/// Copies the next `T` out of the driver's bytes.
pub(crate) fn take<T: FromBytes + IntoBytes>(reader: &mut impl Read) -> Result<T, BadChain> {
    let mut value = T::new_zeroed();
    reader
        .read_exact(value.as_mut_bytes())
        .map_err(|_| BadChain)?;
    Ok(value)
}

/// Copies `value` to the device's bytes.
pub(crate) fn put<T: IntoBytes + Immutable + ?Sized>(
    writer: &mut impl Write,
    value: &T,
) -> Result<(), BadChain> {
    writer.write_all(value.as_bytes()).map_err(|_| BadChain)
}

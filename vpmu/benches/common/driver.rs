//! The parts of a driver that benchmarks and examples share: virtqueues in guest memory, and control
//! requests.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vpmu::abi::*;
use vpmu::{Interrupt, QueueState, Vpmu};
use zerocopy::{FromBytes, IntoBytes};

const QUEUE_SIZE: u16 = 16;
/// Offsets from the base of a queue. The descriptor table is at offset 0.
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const REQUESTS: u64 = 0x3000;
const ANSWERS: u64 = 0x5000;
/// Size in bytes of each request buffer and each answer buffer.
const BUFFER: u64 = 0x1000;
/// Descriptor flags.
const NEXT: u16 = 1;
const WRITE: u16 = 2;
/// Flag of the available ring: the device raises no interrupt for this queue.
const NO_INTERRUPT: u16 = 1;

/// Discards interrupts: the driver polls.
#[derive(Debug)]
pub(crate) struct Silent;

impl Interrupt for Silent {
    fn used(&self, _queues: &[u16]) -> io::Result<()> {
        Ok(())
    }
}

/// The driver's side of a virtqueue. It writes descriptor chains once, and then offers the same chains repeatedly.
#[derive(Debug)]
pub(crate) struct DriverQueue {
    memory: GuestMemoryMmap,
    base: u64,
    offered: u16,
}

impl DriverQueue {
    /// Number of bytes of guest memory that a queue occupies, including its buffers.
    pub(crate) const BYTES: u64 = 0x8000;

    /// Sets up a queue at `base`. Returns the driver's side of the queue, and the queue's description for the device.
    pub(crate) fn new(memory: &GuestMemoryMmap, base: u64) -> io::Result<(Self, QueueState)> {
        let driver = Self { memory: memory.clone(), base, offered: 0 };
        driver.put(base + AVAILABLE, &NO_INTERRUPT.to_le_bytes())?;
        Ok((driver, describe(base)))
    }

    /// Writes the descriptors of at most two chains. For each chain, `chains` holds the request and the size in bytes
    /// of the answer buffer. [`DriverQueue::offer`] alternates between the chains, starting with the first.
    pub(crate) fn lay(&self, chains: &[(&[u8], usize)]) -> io::Result<()> {
        for ((request, room), chain) in chains.iter().zip(0_u16..) {
            let request_at = self.base + REQUESTS + u64::from(chain) * BUFFER;
            let answer_at = self.base + ANSWERS + u64::from(chain) * BUFFER;
            let request_len = u32::try_from(request.len()).map_err(io::Error::other)?;
            let answer_len = u32::try_from(*room).map_err(io::Error::other)?;
            let head = self.base + 32 * u64::from(chain);
            self.put(request_at, request)?;
            self.put(head, &descriptor(request_at, request_len, NEXT, 2 * chain + 1))?;
            self.put(head + 16, &descriptor(answer_at, answer_len, WRITE, 0))?;
        }
        let heads = (0..u16::try_from(chains.len()).map_err(io::Error::other)?).cycle();
        for (ahead, chain) in (0..QUEUE_SIZE).zip(heads) {
            let slot = u64::from(self.offered.wrapping_add(ahead) % QUEUE_SIZE);
            let at = self.base + AVAILABLE + 4 + 2 * slot;
            self.put(at, &(2 * chain).to_le_bytes())?;
        }
        Ok(())
    }

    /// Offers the next chain and calls `notify`, which must notify the device. Returns an error if the device has
    /// not answered when `notify` returns.
    pub(crate) fn offer(&mut self, notify: impl FnOnce()) -> io::Result<()> {
        self.offered = self.offered.wrapping_add(1);
        let available = GuestAddress(self.base + AVAILABLE + 2);
        self.memory.store(self.offered.to_le(), available, Ordering::Release).map_err(io::Error::other)?;
        notify();
        let used: u16 =
            self.memory.load(GuestAddress(self.base + USED + 2), Ordering::Acquire).map_err(io::Error::other)?;
        if u16::from_le(used) != self.offered {
            return Err(io::Error::other("the device did not answer"));
        }
        Ok(())
    }

    /// Reads the first `room` bytes of the answer buffer of chain number `chain`, which holds the latest answer
    /// to this chain.
    pub(crate) fn answer(&self, chain: u64, room: usize) -> io::Result<Vec<u8>> {
        let mut answer = vec![0; room];
        let at = GuestAddress(self.base + ANSWERS + chain * BUFFER);
        self.memory.read_slice(&mut answer, at).map_err(io::Error::other)?;
        Ok(answer)
    }

    /// Replaces all chains with a single one, offers it, and returns the answer.
    pub(crate) fn exchange(&mut self, request: &[u8], room: usize, notify: impl FnOnce()) -> io::Result<Vec<u8>> {
        self.lay(&[(request, room)])?;
        self.offer(notify)?;
        self.answer(0, room)
    }

    fn put(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let written = self.memory.write_slice(bytes, GuestAddress(at));
        written.map_err(io::Error::other)
    }
}

/// The control queue of a device.
#[derive(Debug)]
pub(crate) struct Control {
    vpmu: Arc<Vpmu>,
    queue: DriverQueue,
    notify: fn(&Vpmu),
}

impl Control {
    /// `queue` is the driver's side of the control queue of `vpmu`. `notify` notifies the device that the
    /// queue has a request.
    pub(crate) fn new(vpmu: &Arc<Vpmu>, queue: DriverQueue, notify: fn(&Vpmu)) -> Self {
        Self { vpmu: Arc::clone(vpmu), queue, notify }
    }

    /// Opens an event; returns its id.
    pub(crate) fn open(&mut self, request: &OpenRequest) -> io::Result<u64> {
        let request = OpenRequest { header: header(CONTROL_OPEN, 0), ..*request };
        let answer = self.exchange(request.as_bytes(), size_of::<OpenReply>())?;
        let reply = OpenReply::read_from_bytes(&answer).map_err(|_| failed("open", 0))?;
        check("open", reply.status.get())?;
        Ok(reply.id.get())
    }

    /// Maps a ring for `event` if `op` is [`CONTROL_MAP`], or an AUX area if `op` is [`CONTROL_MAP_AUX`]. The memory is
    /// `pages` pages long and starts at address `from`.
    pub(crate) fn map(&mut self, op: u32, event: u64, flags: u32, from: u64, pages: u64) -> io::Result<()> {
        let request = MapRequest {
            header: header(op, event),
            pages: u32::try_from(pages).map_err(io::Error::other)?.into(),
            flags: flags.into(),
        };
        let mut bytes = request.as_bytes().to_vec();
        for page in 0..pages {
            bytes.extend((from + page * PAGE_SIZE as u64).to_le_bytes());
        }
        self.request("map", &bytes)
    }

    /// Sends a request whose answer is only a status.
    pub(crate) fn request(&mut self, what: &str, request: &[u8]) -> io::Result<()> {
        let answer = self.exchange(request, size_of::<ControlReply>())?;
        let reply = ControlReply::read_from_bytes(&answer).map_err(|_| failed(what, 0))?;
        check(what, reply.status.get())
    }

    fn exchange(&mut self, request: &[u8], room: usize) -> io::Result<Vec<u8>> {
        let Self { vpmu, queue, notify } = self;
        queue.exchange(request, room, || notify(vpmu))
    }
}

pub(crate) fn header(op: u32, event: u64) -> ControlHeader {
    ControlHeader { op: op.into(), reserved: 0.into(), event: event.into() }
}

/// Encodes one request that contains the same command for each event.
pub(crate) fn commands(op: u32, events: &[u64]) -> Vec<u8> {
    let command = |&event: &u64| Command { op: op.into(), event: event.into(), ..Command::default() };
    let commands: Vec<Command> = events.iter().map(command).collect();
    commands.as_bytes().to_vec()
}

/// Returns an error unless `status` is zero.
pub(crate) fn check(what: &str, status: u32) -> io::Result<()> {
    match status {
        0 => Ok(()),
        errno => Err(failed(what, errno)),
    }
}

fn failed(what: &str, errno: u32) -> io::Error {
    io::Error::other(format!("{what}: errno {errno}"))
}

fn descriptor(at: u64, len: u32, flags: u16, next: u16) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&at.to_le_bytes());
    bytes[8..12].copy_from_slice(&len.to_le_bytes());
    bytes[12..14].copy_from_slice(&flags.to_le_bytes());
    bytes[14..].copy_from_slice(&next.to_le_bytes());
    bytes
}

/// Describes the queue at `base` for the device.
fn describe(base: u64) -> QueueState {
    QueueState {
        ready: true,
        size: QUEUE_SIZE,
        desc_table: base,
        avail_ring: base + AVAILABLE,
        used_ring: base + USED,
        ..QueueState::default()
    }
}

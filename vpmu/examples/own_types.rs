//! The device in a VMM with its own types for memory, queues and interrupts. The memory regions log dirty pages, and
//! can be plugged and unplugged while the device is in use. The queues have the format in which the VMM's transport
//! saves them. Each queue has an MSI-X vector.
//!
//! `cargo run -p vpmu --example own_types`. It needs no KVM: the guest is a driver in this process that maps
//! the same files as guest memory.
//!
//! EMBEDDING.md states the number of lines of each section below. A section begins with `// --`.

#![expect(clippy::expect_used, reason = "examples fail by panicking")]

#[expect(dead_code, reason = "only the device's tests use the rest of the module")]
#[path = "../tests/device/driver.rs"]
mod driver;

use std::error::Error;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vm_memory::bitmap::{AtomicBitmap, BS};
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryAtomic, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    GuestMemoryRegionBytes, GuestRegionCollection, GuestRegionMmap, GuestUsize, MemoryRegionAddress, MmapRegion,
    VolatileSlice, guest_memory,
};
use vmm_sys_util::signal::SIGRTMIN;
use vpmu::abi::*;
use vpmu::host::PerfSource;
use vpmu::{GuestRegs, Interrupt, Machine, Memory, QueueState, Registers, Settings, VcpuSession, Vpmu};
use zerocopy::{FromBytes, IntoBytes};

use driver::{Descriptor, DriverQueue};

const PAGE: u64 = PAGE_SIZE as u64;
const RAM: usize = 4 << 20;
const PLUGGED: u64 = 1 << 30;
const QUEUES: u64 = 0x1000;
const BUFFERS: u64 = 0x10_0000;
const RING: u64 = 0x30_0000;

// -- memory: this VMM's own type for a memory region, and a collection of such regions.

#[derive(Debug)]
struct Region {
    mapping: GuestRegionMmap<AtomicBitmap>,
}

type Ram = GuestRegionCollection<Region>;

impl GuestMemoryRegion for Region {
    type B = AtomicBitmap;

    fn len(&self) -> GuestUsize {
        self.mapping.len()
    }

    fn start_addr(&self) -> GuestAddress {
        self.mapping.start_addr()
    }

    fn bitmap(&self) -> BS<'_, AtomicBitmap> {
        self.mapping.bitmap()
    }

    fn get_slice(
        &self,
        offset: MemoryRegionAddress,
        count: usize,
    ) -> guest_memory::Result<VolatileSlice<'_, BS<'_, AtomicBitmap>>> {
        self.mapping.get_slice(offset, count)
    }
}

impl GuestMemoryRegionBytes for Region {}

// -- queues: as this VMM's transport keeps and saves them.

#[derive(Debug, Default, Clone, Copy, PartialEq)]
struct Queue {
    enabled: bool,
    size: u16,
    /// Descriptors, available ring, used ring.
    rings: [u64; 3],
    /// Indices in the available and the used ring.
    indices: [u16; 2],
}

impl From<Queue> for QueueState {
    fn from(queue: Queue) -> Self {
        let [desc_table, avail_ring, used_ring] = queue.rings;
        let [next_avail, next_used] = queue.indices;
        Self { ready: queue.enabled, size: queue.size, desc_table, avail_ring, used_ring, next_avail, next_used }
    }
}

impl From<QueueState> for Queue {
    fn from(state: QueueState) -> Self {
        Self {
            enabled: state.ready,
            size: state.size,
            rings: [state.desc_table, state.avail_ring, state.used_ring],
            indices: [state.next_avail, state.next_used],
        }
    }
}

// -- interrupts: a vector for each queue.

#[derive(Debug)]
struct Vectors(Vec<AtomicU64>);

impl Interrupt for Vectors {
    fn used(&self, queues: &[u16]) -> io::Result<()> {
        for vector in queues.iter().filter_map(|&queue| self.0.get(usize::from(queue))) {
            // A real VMM would write to the vector's irqfd here, unless the vector is masked.
            vector.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }
}

// -- machine: this VMM has no statistics.

#[derive(Debug)]
struct Host;

impl Machine for Host {
    fn exits(&self, _vcpu: u32) -> Option<u64> {
        None
    }

    fn halts(&self, _vcpu: u32) -> Option<u64> {
        None
    }
}

// -- end of the VMM.

/// Registers of a vCPU that never moves.
struct Still;

impl Registers for Still {
    fn registers(&mut self) -> Option<GuestRegs> {
        Some(GuestRegs { ip: 0x1234, user: false })
    }
}

/// A mapping: guest address, length, file.
type Range = (GuestAddress, usize, Option<FileOffset>);

/// Creates a region, backed by a file, at guest address `at`. Also returns the [`Range`] that lets the guest's driver
/// map the same file.
fn region(at: u64, len: usize) -> Result<(Region, Range), Box<dyn Error>> {
    let file = tempfile::tempfile()?;
    file.set_len(len as u64)?;
    let offset = |file: File| FileOffset::new(file, 0);
    let mapping = MmapRegion::from_file(offset(file.try_clone()?), len)?;
    let mapping = GuestRegionMmap::new(mapping, GuestAddress(at)).ok_or("the region exceeds the address space")?;
    Ok((Region { mapping }, (GuestAddress(at), len, Some(offset(file)))))
}

/// Returns the addresses of the pages that were written since the last call.
fn take_dirty(ram: &Ram) -> Vec<String> {
    let mut dirty = Vec::new();
    for region in ram.iter() {
        let bitmap = (*region.mapping).bitmap();
        for at in (0..region.len()).step_by(PAGE_SIZE) {
            if usize::try_from(at).is_ok_and(|at| bitmap.is_addr_set(at)) {
                dirty.push(format!("{:#x}", region.start_addr().0 + at));
            }
        }
        bitmap.reset();
    }
    dirty
}

/// The guest's driver.
struct Guest {
    vpmu: Arc<Vpmu>,
    queues: Vec<DriverQueue>,
}

impl Guest {
    fn ask<T: FromBytes>(&mut self, request: &[u8]) -> Result<T, Box<dyn Error>> {
        let queue = &mut self.queues[usize::from(QUEUE_CONTROL)];
        queue.request(request, size_of::<T>());
        let _ = self.vpmu.notify(QUEUE_CONTROL);
        let answer = queue.answer().ok_or("the device did not answer")?;
        T::read_from_bytes(&answer).map_err(|_| "malformed reply".into())
    }

    /// Opens an event that samples each mark of value 7 and wakes its reader at each record. Maps its ring of two pages
    /// at `ring`.
    fn sample(&mut self, ring: u64) -> Result<u64, Box<dyn Error>> {
        let header = |op: u32, event: u64| ControlHeader { op: op.into(), reserved: 0.into(), event: event.into() };
        let open = OpenRequest {
            header: header(CONTROL_OPEN, 0),
            kind: KIND_MARK.into(),
            config: 7.into(),
            period: 1.into(),
            sample_type: 1.into(),
            flags: OPEN_ENABLED.into(),
            wakeup: 1.into(),
            ..OpenRequest::default()
        };
        let reply: OpenReply = self.ask(open.as_bytes())?;
        let map =
            MapRequest { header: header(CONTROL_MAP, reply.id.get()), pages: 2.into(), flags: MAP_WRITABLE.into() };
        let pages = [ring, ring + PAGE].map(u64::to_le_bytes);
        let mapped: ControlReply = self.ask(&[map.as_bytes(), pages.as_flattened()].concat())?;
        match (reply.status.get(), mapped.status.get()) {
            (0, 0) => Ok(reply.id.get()),
            refused => Err(format!("refused: {refused:?}").into()),
        }
    }

    /// Posts `count` buffers for notices.
    fn post(&mut self, count: u16) {
        let queue = &mut self.queues[usize::from(QUEUE_EVENT)];
        for slot in 0..count {
            let buffer = Descriptor { address: queue.buffer(slot), len: 16, writable: true, next: None };
            queue.describe(slot, buffer);
            queue.offer(slot);
        }
        let _ = self.vpmu.notify(QUEUE_EVENT);
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let settings = Settings::new(1, 1_000_000);
    let source = PerfSource::new(SIGRTMIN())?;
    let vpmu = Arc::new(Vpmu::new(settings, Arc::new(Host), Box::new(source))?);
    let ((first, first_range), (second, second_range)) = (region(0, RAM)?, region(PLUGGED, RAM)?);
    let guest_ram = GuestMemoryMmap::<()>::from_ranges_with_files([first_range, second_range])?;
    let ram = Ram::from_regions(vec![first])?;
    let space = GuestMemoryAtomic::new(ram.clone());
    let (queues, set_up): (Vec<_>, Vec<_>) = (0..u64::from(QUEUE_VCPU) + 1)
        .map(|queue| {
            let buffers = BUFFERS + queue * 2 * DriverQueue::BUFFER;
            DriverQueue::new(&guest_ram, QUEUES + queue * PAGE, buffers)
        })
        .unzip();
    let mut transport: Vec<Queue> = set_up.into_iter().map(Queue::from).collect();
    let vectors = Arc::new(Vectors(transport.iter().map(|_| AtomicU64::new(0)).collect()));
    let states: Vec<QueueState> = transport.iter().copied().map(QueueState::from).collect();
    let memory = Memory::space(space.clone());
    vpmu.activate(memory, vpmu.features(), &states, Arc::clone(&vectors) as _)?;
    let mut session: VcpuSession = vpmu.attach(0, 0)?;
    let mut guest = Guest { vpmu: Arc::clone(&vpmu), queues };

    guest.post(2);
    guest.sample(RING)?;
    take_dirty(&ram);
    session.mark(7, &mut Still);
    println!("a sample and its notice: pages {}", take_dirty(&ram).join(" "));

    let more = ram.insert_region(Arc::new(second))?;
    space.lock().map_err(|_| "a thread panicked")?.replace(more.clone());
    guest.sample(PLUGGED)?;
    take_dirty(&more);
    session.mark(7, &mut Still);
    println!("two samples, one in a plugged region: pages {}", take_dirty(&more).join(" "));

    let (less, gone) = more.remove_region(GuestAddress(PLUGGED), RAM as u64)?;
    space.lock().map_err(|_| "a thread panicked")?.replace(less);
    session.mark(7, &mut Still);
    drop((more, gone));
    let metrics = vpmu.metrics();
    println!("unplugged: {} samples written, {} lost", metrics.samples_written, metrics.samples_lost);

    transport = vpmu.queue_states().into_iter().map(Queue::from).collect();
    for (queue, (saved, vector)) in transport.iter().zip(&vectors.0).enumerate() {
        let raised = vector.load(Ordering::Relaxed);
        let [avail, used] = saved.indices;
        println!("queue {queue}: {raised} interrupts, next_avail {avail}, next_used {used}");
    }
    Ok(())
}

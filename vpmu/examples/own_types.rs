//! The device in a VMM with its own types for memory, queues and interrupts. The memory regions log dirty pages, and
//! can be plugged and unplugged while the device is in use. The queues have the format in which the VMM's transport
//! saves them. Each queue has an MSI-X vector.
//!
//! `cargo run -p vpmu --example own_types`. It needs no KVM: the guest is a driver in this process that maps
//! the same files as guest memory.
//!
//! EMBEDDING.md states the number of lines of each section below. A section begins with `// --`.

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
use vpmu::{Interrupt, Machine, Memory, QueueState, Settings, VcpuSession, Vpmu};
use vpmu_testkit::{At, Descriptor, Driver, Layout, open_of};

const RAM: usize = 4 << 20;
const PLUGGED: u64 = 1 << 30;
const LAYOUT: Layout = Layout { vcpus: 1, rings: 0x1000, buffers: 0x10_0000, slots: 2 };
const RING: u64 = 0x30_0000;
/// The instruction at which the vCPU always exits.
const IP: u64 = 0x1234;

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

/// Opens an event that samples each mark of value 7 and wakes its reader at each record. Maps its ring of two pages
/// at `ring`.
fn sample(driver: &mut Driver, ring: u64) -> io::Result<()> {
    let event = driver.open(&OpenRequest {
        period: 1.into(),
        sample_type: 1.into(),
        flags: OPEN_ENABLED.into(),
        wakeup: 1.into(),
        ..open_of(KIND_MARK, 7, 0)
    })?;
    driver.map(CONTROL_MAP, event, MAP_WRITABLE, ring, 2)
}

/// Posts `count` buffers for notices.
fn post(driver: &mut Driver, vpmu: &Vpmu, count: u16) {
    let queue = &mut driver.queues[usize::from(QUEUE_EVENT)];
    for slot in 0..count {
        let buffer = Descriptor { address: queue.buffer(slot), len: 16, writable: true, next: None };
        queue.describe(slot, buffer);
        queue.offer(slot);
    }
    let _ = vpmu.notify(QUEUE_EVENT);
}

fn main() -> Result<(), Box<dyn Error>> {
    let settings = Settings::new(1, 1_000_000);
    let source = PerfSource::new(SIGRTMIN())?;
    let vpmu = Arc::new(Vpmu::new(settings, Arc::new(Host), Box::new(source))?);
    let ((first, first_range), (second, second_range)) = (region(0, RAM)?, region(PLUGGED, RAM)?);
    let guest_ram = GuestMemoryMmap::<()>::from_ranges_with_files([first_range, second_range])?;
    let ram = Ram::from_regions(vec![first])?;
    let space = GuestMemoryAtomic::new(ram.clone());
    let vectors = Arc::new(Vectors((0..vpmu.queue_count()).map(|_| AtomicU64::new(0)).collect()));
    let mut driver = Driver::new(&vpmu, &guest_ram, LAYOUT, |set_up| {
        let transport: Vec<Queue> = set_up.iter().copied().map(Queue::from).collect();
        let states: Vec<QueueState> = transport.into_iter().map(QueueState::from).collect();
        vpmu.activate(Memory::space(space.clone()), vpmu.features(), &states, Arc::clone(&vectors) as _)
    })?;
    let mut session: VcpuSession = vpmu.attach(0, 0)?;

    post(&mut driver, &vpmu, 2);
    sample(&mut driver, RING)?;
    take_dirty(&ram);
    session.mark(7, &mut At(IP));
    println!("a sample and its notice: pages {}", take_dirty(&ram).join(" "));

    let more = ram.insert_region(Arc::new(second))?;
    space.lock().map_err(|_| "a thread panicked")?.replace(more.clone());
    sample(&mut driver, PLUGGED)?;
    take_dirty(&more);
    session.mark(7, &mut At(IP));
    println!("two samples, one in a plugged region: pages {}", take_dirty(&more).join(" "));

    let (less, gone) = more.remove_region(GuestAddress(PLUGGED), RAM as u64)?;
    space.lock().map_err(|_| "a thread panicked")?.replace(less);
    session.mark(7, &mut At(IP));
    drop((more, gone));
    let metrics = vpmu.metrics();
    println!("unplugged: {} samples written, {} lost", metrics.samples_written, metrics.samples_lost);

    let transport: Vec<Queue> = vpmu.queue_states().into_iter().map(Queue::from).collect();
    for (queue, (saved, vector)) in transport.iter().zip(&vectors.0).enumerate() {
        let raised = vector.load(Ordering::Relaxed);
        let [avail, used] = saved.indices;
        println!("queue {queue}: {raised} interrupts, next_avail {avail}, next_used {used}");
    }
    Ok(())
}

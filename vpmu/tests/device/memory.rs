//! Other types of guest memory: memory with a bitmap of dirty pages, memory whose regions change, and memory with
//! address translation. The tests also check the queues and interrupts of other transports.

use std::collections::BTreeSet;
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

use vm_memory::bitmap::AtomicBitmap;
use vm_memory::guest_memory::GuestMemorySliceIterator;
use vm_memory::{
    FileOffset, GuestAddress, GuestMemory, GuestMemoryAtomic, GuestMemoryBackend, GuestMemoryError, GuestMemoryMmap,
    GuestMemoryRegion, Permissions,
};
use vpmu::abi::*;
use vpmu::{AuxProducer, Engines, Error, ExitReason, Memory, QueueState};
use vpmu_testkit::{
    ALL_FEATURES, At, Descriptor, DriverQueue, Fields, Fixture, MEMORY_LEN, QUEUES, VCPUS, WINDOW, WINDOW_FEATURES,
    header, limits, map_aux, open_of,
};
use zerocopy::IntoBytes;

const PAGE: u64 = 0x1000;
const WINDOW_PAGES: usize = 8;
const WATCHDOG: AuxProducer = AuxProducer { name: "watchdog", counts: "frames of 64 bytes", format: 130 };

/// Memory with a bitmap of dirty pages.
type Watched = GuestMemoryMmap<AtomicBitmap>;

/// Maps the same memory twice. The device's mapping has a bitmap of dirty pages, and the driver's mapping has none.
fn shared(at: u64, len: usize) -> (Watched, GuestMemoryMmap) {
    let file = tempfile::tempfile().expect("a file");
    file.set_len(len as u64).expect("room");
    let range = |file: &File| {
        let file = file.try_clone().expect("a descriptor");
        [(GuestAddress(at), len, Some(FileOffset::new(file, 0)))]
    };
    let watched = Watched::from_ranges_with_files(range(&file)).expect("memory");
    let plain = GuestMemoryMmap::from_ranges_with_files(range(&file)).expect("memory");
    (watched, plain)
}

/// A device whose guest memory and window have bitmaps of dirty pages.
struct WatchedRig {
    fixture: Fixture,
    memory: Watched,
    window: Watched,
}

impl WatchedRig {
    fn new() -> Self {
        let (memory, plain) = shared(0, MEMORY_LEN);
        let (window, _) = shared(WINDOW, WINDOW_PAGES * PAGE_SIZE);
        let mut fixture = Fixture::bare(Engines::Auto, limits(), None);
        fixture.memory = plain;
        let vpmu = Arc::into_inner(fixture.vpmu).expect("the only reference");
        let vpmu = vpmu.with_window(window.clone()).expect("a window");
        fixture.vpmu = Arc::new(vpmu);
        let mut fixture = fixture.with_producers(&[WATCHDOG]);
        (0..VCPUS).for_each(|vcpu| fixture.attach(vcpu));
        let queues = fixture.make_queues();
        let interrupt = fixture.interrupt.clone();
        fixture.vpmu.activate(memory.clone(), WINDOW_FEATURES, &queues, interrupt).expect("active");
        Self { fixture, memory, window }
    }

    /// Returns the pages that were marked dirty since the last call.
    fn take_dirty(&self) -> BTreeSet<u64> {
        let mut dirty = BTreeSet::new();
        for region in self.memory.iter().chain(self.window.iter()) {
            let mapping = region.get_mmap();
            let bitmap = mapping.bitmap();
            let first = region.start_addr().0;
            let offsets = (0..region.len()).step_by(PAGE_SIZE);
            let marked = offsets.filter(|&at| {
                let at = usize::try_from(at).expect("small");
                bitmap.is_addr_set(at)
            });
            dirty.extend(marked.map(|at| first + at));
            bitmap.reset();
        }
        dirty
    }

    /// Returns the pages that the device writes when it answers on a queue: the used ring and the buffer.
    fn answered(&self, queue: usize) -> [u64; 2] {
        let ring = QUEUES + queue as u64 * PAGE;
        [ring, self.fixture.queues[queue].buffer(1)]
    }

    /// Opens an enabled event that samples each mark of value 5.
    fn sampled(&mut self) -> u64 {
        let request = open_of(KIND_MARK, 5, 0).sampled(1).wakeup(1).flags(OPEN_ENABLED);
        self.fixture.opened(&request)
    }
}

/// Returns these pages as a set for comparison with the dirty pages.
fn exactly(pages: impl IntoIterator<Item = u64>) -> BTreeSet<u64> {
    pages.into_iter().collect()
}

#[test]
fn reply_to_a_request_marks_the_used_ring_and_the_buffer() {
    let mut watched = WatchedRig::new();
    assert_eq!(watched.take_dirty(), exactly([]), "activation writes nothing");
    let event = watched.fixture.opened(&open_of(KIND_MARK, 5, 0));
    assert_eq!(watched.take_dirty(), exactly(watched.answered(0)));
    watched.fixture.command(0, COMMAND_ENABLE, event);
    assert_eq!(watched.take_dirty(), exactly(watched.answered(2)));
    watched.fixture.command(1, COMMAND_READ, event);
    assert_eq!(watched.take_dirty(), exactly(watched.answered(3)));
}

#[test]
fn sample_marks_the_metadata_page_and_the_data_pages_that_it_touches() {
    let mut watched = WatchedRig::new();
    let event = watched.sampled();
    let pages: Vec<u64> = (0..5).map(|page| 0x20_0000 + page * 2 * PAGE).collect();
    watched.take_dirty();
    watched.fixture.map_pages(event, MAP_WRITABLE, &pages).expect("mapped");
    let laid = watched.answered(0).into_iter().chain([pages[0]]);
    assert_eq!(watched.take_dirty(), exactly(laid));
    watched.fixture.mark(0, 5, 1);
    assert_eq!(watched.take_dirty(), exactly([pages[0], pages[1]]));
    // A sample has 72 bytes, so the 57th sample crosses from the first data page to the second.
    (0..55).for_each(|_| watched.fixture.mark(0, 5, 1));
    assert_eq!(watched.take_dirty(), exactly([pages[0], pages[1]]));
    watched.fixture.mark(0, 5, 1);
    assert_eq!(watched.take_dirty(), exactly(pages[..3].iter().copied()));
    watched.fixture.mark(0, 5, 1);
    assert_eq!(watched.take_dirty(), exactly([pages[0], pages[2]]));
    watched.fixture.mark(0, 6, 1);
    assert_eq!(watched.take_dirty(), exactly([]), "a mark that no event counts writes nothing");
}

#[test]
fn shown_count_marks_the_metadata_page() {
    let mut watched = WatchedRig::new();
    let event = watched.fixture.opened(&open_of(KIND_MARK, 5, 0));
    watched.fixture.map_pages(event, MAP_WRITABLE, &[0x20_0000]).expect("mapped");
    watched.take_dirty();
    watched.fixture.command(0, COMMAND_ENABLE, event);
    let shown = watched.answered(2).into_iter().chain([0x20_0000]);
    assert_eq!(watched.take_dirty(), exactly(shown));
}

#[test]
fn notice_marks_the_used_ring_and_the_buffer_of_the_event_queue() {
    let mut watched = WatchedRig::new();
    let event = watched.sampled();
    let pages = [0x20_0000, 0x20_1000];
    watched.fixture.map_pages(event, MAP_WRITABLE, &pages).expect("mapped");
    watched.fixture.post_notice(0, 16);
    watched.take_dirty();
    watched.fixture.mark(0, 5, 1);
    let notice = [QUEUES + PAGE, watched.fixture.queues[1].buffer(0)];
    let written = pages.into_iter().chain(notice);
    assert_eq!(watched.take_dirty(), exactly(written));
}

#[test]
fn aux_data_of_any_length_marks_its_pages() {
    let mut watched = WatchedRig::new();
    let request = open_of(KIND_VMM_TRACE, 0, 0);
    let event = watched.fixture.opened(&request);
    let ring = [0x20_0000, 0x20_1000];
    let area: Vec<u64> = (0..8).map(|page| 0x30_0000 + page * PAGE).collect();
    let fixture = &mut watched.fixture;
    fixture.map_pages(event, MAP_WRITABLE, &ring).expect("a ring");
    map_aux(fixture, event, MAP_WRITABLE, &area).expect("an area");
    fixture.command(0, COMMAND_ENABLE, event);
    watched.take_dirty();
    let write = |bytes: usize| {
        let mut writer = watched.fixture.vpmu.aux_begin(event).expect("begun");
        writer.put(&vec![7; bytes / 8]).expect("room");
        writer.end(bytes as u64).expect("ended");
    };
    // The AUX record goes to the ring.
    let with_ring = |area: &[u64]| exactly(ring.into_iter().chain(area.iter().copied()));
    write(64);
    assert_eq!(watched.take_dirty(), with_ring(&area[..1]));
    write(PAGE_SIZE);
    assert_eq!(watched.take_dirty(), with_ring(&area[..2]));
    write(3 * PAGE_SIZE);
    assert_eq!(watched.take_dirty(), with_ring(&area[1..5]));
}

#[test]
fn ring_in_the_window_marks_the_windows_pages() {
    let mut watched = WatchedRig::new();
    let flags = OPEN_ENABLED | OPEN_PERSISTENT;
    let request = open_of(KIND_MARK, 5, 0).sampled(1).flags(flags);
    let event = watched.fixture.opened(&request);
    watched.take_dirty();
    let first = watched.fixture.map_window(event, 1, MAP_WRITABLE);
    assert_eq!(first, Ok(0));
    // The device zeroes the pages of a new ring in the window.
    let laid = watched.answered(0).into_iter();
    let laid = laid.chain([WINDOW, WINDOW + PAGE]);
    assert_eq!(watched.take_dirty(), exactly(laid));
    watched.fixture.mark(0, 5, 1);
    assert_eq!(watched.take_dirty(), exactly([WINDOW, WINDOW + PAGE]));
    // An area in guest RAM. Its head is in the ring's metadata page, which is in the window.
    let area = [0x30_0000];
    let trace = watched.fixture.opened(&open_of(KIND_EXIT_TRACE, EXIT_IO, 0).flags(flags));
    let first = watched.fixture.map_window(trace, 1, MAP_WRITABLE);
    let ring = WINDOW + u64::from(first.expect("mapped")) * PAGE;
    map_aux(&mut watched.fixture, trace, MAP_WRITABLE, &area).expect("an area");
    watched.take_dirty();
    watched.fixture.exit(0, ExitReason::Io, &mut At(1));
    assert_eq!(watched.take_dirty(), exactly(area), "the data is not published yet");
    assert_eq!(watched.fixture.flush(0, trace), 0);
    let shown = watched.answered(2).into_iter();
    let shown = shown.chain([ring, ring + PAGE]);
    assert_eq!(watched.take_dirty(), exactly(shown));
}

/// Memory with two regions. The tests remove the second region and add it again.
struct Changing {
    fixture: Fixture,
    space: GuestMemoryAtomic<GuestMemoryMmap>,
    whole: GuestMemoryMmap,
}

impl Changing {
    const SECOND: u64 = 0x300_0000;

    fn new() -> Self {
        let second = usize::try_from(Self::SECOND).expect("64 bits");
        let ranges = [(GuestAddress(0), second), (GuestAddress(Self::SECOND), MEMORY_LEN - second)];
        let whole = GuestMemoryMmap::<()>::from_ranges(&ranges).expect("memory");
        let space = GuestMemoryAtomic::new(whole.clone());
        let mut fixture = Fixture::bare(Engines::Auto, limits(), None);
        fixture.memory = whole.clone();
        (0..VCPUS).for_each(|vcpu| fixture.attach(vcpu));
        let queues = fixture.make_queues();
        let memory = Memory::space(space.clone());
        fixture.vpmu.activate(memory, ALL_FEATURES, &queues, fixture.interrupt.clone()).expect("active");
        Self { fixture, space, whole }
    }

    fn change(&self, memory: GuestMemoryMmap) {
        self.space.lock().expect("no panic").replace(memory);
    }

    fn remove_second(&self) {
        let len = MEMORY_LEN as u64 - Self::SECOND;
        let removed = self.whole.remove_region(GuestAddress(Self::SECOND), len);
        let (rest, region) = removed.expect("a region");
        self.change(rest);
        drop(region);
    }
}

#[test]
fn ring_whose_region_is_removed_loses_its_samples_and_counts_on() {
    let mut changing = Changing::new();
    let fixture = &mut changing.fixture;
    let open = open_of(KIND_MARK, 5, 0).sampled(1).flags(OPEN_ENABLED);
    let [gone, stays] = [Changing::SECOND, 0x20_0000].map(|ring| {
        let event = fixture.opened(&open);
        let pages = [ring, ring + PAGE];
        fixture.map_pages(event, MAP_WRITABLE, &pages).expect("mapped");
        event
    });
    fixture.mark(0, 5, 1);
    assert_eq!(fixture.vpmu.metrics().samples_lost, 0);
    changing.remove_second();
    let fixture = &mut changing.fixture;
    (0..3).for_each(|_| fixture.mark(0, 5, 1));
    let metrics = fixture.vpmu.metrics();
    assert_eq!((metrics.samples_written, metrics.samples_lost), (5, 3));
    assert_eq!([gone, stays].map(|event| fixture.value(0, event)), [4, 4]);
    let pages = [Changing::SECOND + 2 * PAGE, Changing::SECOND + 3 * PAGE];
    let third = fixture.opened(&open);
    let refused = fixture.map_pages(third, MAP_WRITABLE, &pages);
    assert_eq!(refused, Err(libc::EINVAL), "the address is not memory");
    let whole = changing.whole.clone();
    changing.change(whole);
    let fixture = &mut changing.fixture;
    fixture.map_pages(third, MAP_WRITABLE, &pages).expect("mapped");
    fixture.mark(0, 5, 1);
    let metrics = fixture.vpmu.metrics();
    assert_eq!((metrics.samples_written, metrics.samples_lost), (8, 3));
}

#[test]
fn queues_whose_region_is_removed_fall_silent() {
    let mut changing = Changing::new();
    let event = changing.fixture.opened(&open_of(KIND_MARK, 5, 0));
    changing.change(GuestMemoryMmap::new());
    let fixture = &mut changing.fixture;
    fixture.queues[0].request(&[0; 16], 16);
    let _ = fixture.vpmu.notify(QUEUE_CONTROL);
    assert_eq!(fixture.queues[0].answer(), None);
    fixture.mark(0, 5, 1);
    let whole = changing.whole.clone();
    changing.change(whole);
    let fixture = &mut changing.fixture;
    fixture.activate(ALL_FEATURES);
    assert_eq!(fixture.close(event), Err(libc::ENOENT), "the new driver has no events");
}

/// Guest memory with an address translation that makes a range of addresses read-only for the device.
struct Translated {
    memory: GuestMemoryMmap,
    read_only: Range<u64>,
}

impl GuestMemory for Translated {
    type PhysicalMemory = GuestMemoryMmap;
    type Bitmap = ();

    fn check_range(&self, at: GuestAddress, len: usize, access: Permissions) -> bool {
        let permitted = !access.has_write() || !self.read_only.contains(&at.0);
        permitted && GuestMemory::check_range(&self.memory, at, len, access)
    }

    fn get_slices<'a>(
        &'a self,
        at: GuestAddress,
        len: usize,
        access: Permissions,
    ) -> Result<impl GuestMemorySliceIterator<'a, ()>, GuestMemoryError> {
        if GuestMemory::check_range(self, at, len, access) {
            GuestMemory::get_slices(&self.memory, at, len, access)
        } else {
            Err(GuestMemoryError::InvalidGuestAddress(at))
        }
    }
}

#[test]
fn device_reads_requests_in_memory_that_it_cannot_write() {
    let mut fixture = Fixture::bare(Engines::Auto, limits(), None);
    (0..VCPUS).for_each(|vcpu| fixture.attach(vcpu));
    let queues = fixture.make_queues();
    let first = fixture.queues[0].buffer(0);
    let memory = Translated { memory: fixture.memory.clone(), read_only: first..first + DriverQueue::BUFFER };
    let interrupt = fixture.interrupt.clone();
    fixture.vpmu.activate(memory, ALL_FEATURES, &queues, interrupt).expect("active");
    let event = fixture.opened(&open_of(KIND_MARK, 5, 0));
    // An answer in that memory is refused.
    let request = header(CONTROL_CLOSE, event);
    fixture.queues[0].request(request.as_bytes(), size_of::<ControlReply>());
    fixture.queues[0].describe(1, Descriptor { address: first, len: 16, writable: true, next: None });
    let _ = fixture.vpmu.notify(QUEUE_CONTROL);
    assert_eq!(fixture.queues[0].reclaim(), Some((0, 0)));
    assert_eq!(fixture.vpmu.metrics().bad_requests, 1);
    fixture.close(event).expect("the event is still open");
}

#[test]
fn interrupt_names_the_queues_with_used_buffers() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&open_of(KIND_MARK, 5, 0).sampled(1).wakeup(1).flags(OPEN_ENABLED));
    assert_eq!(fixture.host.take_signalled(), [QUEUE_CONTROL]);
    fixture.map(event, 1);
    fixture.post_notice(0, 16);
    fixture.host.take_signalled();
    fixture.mark(0, 5, 1);
    assert_eq!(fixture.host.take_signalled(), [QUEUE_EVENT]);
    fixture.command(1, COMMAND_READ, event);
    assert!(fixture.host.take_signalled().is_empty(), "an interrupt, although the driver polls this queue");
    fixture.queues[3].want_interrupts();
    fixture.command(1, COMMAND_READ, event);
    assert_eq!(fixture.host.take_signalled(), [QUEUE_VCPU + 1]);
    let interrupts = fixture.host.interrupts();
    assert_eq!(fixture.vpmu.metrics().interrupts, interrupts);
}

#[test]
fn queues_continue_from_the_indices_passed_at_activation() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&open_of(KIND_MARK, 5, 0));
    fixture.read(1, event);
    let states = fixture.vpmu.queue_states();
    let indices: Vec<_> = states.iter().map(|q| (q.next_avail, q.next_used)).collect();
    assert_eq!(indices, [(1, 1), (0, 0), (0, 0), (1, 1)]);
    // Another device takes over the queues of the same driver.
    let mut other = Fixture::bare(Engines::Auto, limits(), None);
    (0..VCPUS).for_each(|vcpu| other.attach(vcpu));
    other.memory = fixture.memory;
    other.queues = fixture.queues;
    other.vpmu.activate(other.memory.clone(), ALL_FEATURES, &states, other.interrupt.clone()).expect("active");
    other.opened(&open_of(KIND_MARK, 5, 0));
    assert_eq!(other.vpmu.queue_states()[0].next_used, 2);
    other.vpmu.reset();
    assert_eq!(other.vpmu.queue_states(), [QueueState::default(); 4]);
}

#[test]
fn unsound_queue_is_refused() {
    let mut fixture = Fixture::new();
    let sound = fixture.make_queues();
    let refused = |change: fn(&mut QueueState)| {
        let mut queues = sound.clone();
        change(&mut queues[1]);
        let memory = fixture.memory.clone();
        let interrupt = fixture.interrupt.clone();
        let activated = fixture.vpmu.activate(memory, ALL_FEATURES, &queues, interrupt);
        matches!(activated, Err(Error::Queue(1)))
    };
    assert!(!refused(|_| {}));
    assert!(refused(|queue| queue.size = 0));
    assert!(refused(|queue| queue.size = 12));
    assert!(refused(|queue| queue.desc_table += 8));
    assert!(refused(|queue| queue.avail_ring += 1));
    assert!(refused(|queue| queue.used_ring += 2));
    assert!(refused(|queue| queue.desc_table = u64::MAX - 15));
    assert!(refused(|queue| queue.used_ring = vpmu_testkit::MEMORY - 4));
    assert!(!refused(|queue| *queue = QueueState::default()), "a queue that is not used was refused");
}

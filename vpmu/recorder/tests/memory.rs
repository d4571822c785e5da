//! Tests how much memory a recording of forged rings takes in addition to its input.
#![expect(unsafe_code, reason = "GlobalAlloc is an unsafe trait")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::fs::File;
use std::io::BufWriter;
use std::sync::atomic::{AtomicUsize, Ordering};

use vpmu::source::Rate;
use vpmu::{History, PersistentStatus, abi};
use vpmu_recorder::{Recording, Symbols};

/// Counts the allocated bytes and their maximum.
struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: both calls pass their arguments to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), Ordering::SeqCst) + layout.size();
        PEAK.fetch_max(held, Ordering::SeqCst);
        // SAFETY: the caller's layout.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::SeqCst);
        // SAFETY: the caller got `at` from `alloc` with this layout.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Maximum memory that a recording may use in addition to its input.
const MOST: usize = 8 << 20;
/// Bytes of each ring.
const RING: usize = 16 << 20;
const IDENTIFIER_IP: u64 = 1 << 16 | 1;
const CALLCHAIN: u64 = 1 << 5;

fn event(id: u64, sample_type: u64) -> PersistentStatus {
    PersistentStatus {
        id,
        name: format!("forged-{id}"),
        event: "marks".to_owned(),
        operator: true,
        vcpu: 0,
        kind: abi::KIND_MARK,
        config: abi::MARK_ANY,
        rate: Some(Rate::Period(1)),
        flags: abi::OPEN_ENABLED | abi::OPEN_BACKWARD,
        engine: abi::ENGINE_EXIT,
        sample_type,
        read_format: 0,
        regs_user: 0,
        regs_intr: 0,
        stack_user: 0,
        state: abi::STATE_ACTIVE,
        count: 0,
        time_enabled: 0,
        time_running: 0,
        lost: 0,
        pages: Some(4096),
        window: true,
    }
}

/// A ring full of samples; sample n has the body `words(n)`.
fn forged(event: PersistentStatus, words: impl Fn(u64) -> Vec<u64>) -> History {
    let mut records = Vec::with_capacity(RING);
    for number in 0.. {
        let body = words(number);
        let size = 8 + 8 * body.len() as u64;
        if records.len() as u64 + size > RING as u64 {
            break;
        }
        let header = 9 | 1 << 32 | size << 48;
        records.extend(u64::to_le_bytes(header));
        records.extend(body.iter().flat_map(|word| word.to_le_bytes()));
    }
    History { event, records }
}

/// A different kernel address each time.
fn address(number: u64) -> u64 {
    1 << 63 | number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 2
}

#[test]
fn forged_rings_make_a_recording_hold_little_more_than_it_reads() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let map = directory.path().join("System.map");
    // One function every 4 KiB. The first samples in the first ring have the addresses of these functions.
    let names: String = (0..40_000_u64).map(|at| format!("{:016x} T function_{at}\n", 1 << 63 | at << 12)).collect();
    std::fs::write(&map, &names).expect("room for it");
    // Two rings of short samples, and a ring of samples with call chains that nearly fill a record.
    let histories = [
        forged(event(3, IDENTIFIER_IP), |number| vec![3, 1 << 63 | number << 12]),
        forged(event(1, IDENTIFIER_IP), |number| vec![1, address(number)]),
        forged(event(2, IDENTIFIER_IP | CALLCHAIN), |number| {
            let chain = (0..8000).map(|frame| address(number * 8000 + frame));
            [2, address(number), 8000].into_iter().chain(chain).collect()
        }),
    ];
    // A recording names the functions at its first 16,384 kernel addresses.
    let mut written = Vec::new();
    for symbols in [None, Some(map.as_path())] {
        let path = directory.path().join("perf.data");
        let file = File::create(&path).expect("a file");
        let symbols = symbols.map(|path| Symbols::open(path).expect("symbols"));
        let before = HELD.load(Ordering::SeqCst);
        PEAK.store(before, Ordering::SeqCst);
        let mut recording = Recording::new(&histories);
        if let Some(symbols) = &symbols {
            recording.name_functions(symbols).expect("names");
        }
        let summary = recording.write(&mut BufWriter::new(file)).expect("written");
        let more = PEAK.load(Ordering::SeqCst) - before;
        // The whole symbol file is read into memory.
        let read = symbols.as_ref().map_or(0, |_| names.len());
        assert!(more <= MOST + read, "{more} bytes, {symbols:?}");
        let least = histories[0].records.len() as u64 / 24;
        assert!(summary.samples > 2 * least, "{summary:?}");
        written.push(summary.bytes);
    }
    let named = "function_0".len() as u64 * 16_384;
    assert!(written[1] > written[0] + named, "{written:?}");
}

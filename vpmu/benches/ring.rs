//! Cost of writing a record into a guest's ring, compared with copying the same bytes.
//!
//! Criterion's figures come first. For the ratios at the end, the two variants alternate in short slices of
//! one run, and their median times are compared. Separate runs would not be comparable: on a machine with
//! other users, speed drifts from run to run.

#![expect(clippy::expect_used, reason = "benchmarks fail by panicking")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput};
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vpmu::internals::{Producer, SHORTEST};
use vpmu_testkit::selects;

/// Number of data pages. The ring is 512 KiB, the size that `perf record` uses by default.
const PAGES: usize = 128;
const DATA: usize = PAGES * 4096;
/// Size of a burst in bytes: half the ring. Before each burst, the ring's reader consumes everything.
const BURST: usize = DATA / 2;
const LENS: [usize; 3] = [SHORTEST, 1024, 65_528];
const SLICES: usize = 400;

fn memory() -> GuestMemoryMmap {
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), DATA + 4096)]).expect("memory")
}

fn producer(len: usize) -> Producer {
    Producer::new(memory(), PAGES, len).expect("a ring")
}

/// The baseline: copies record after record into a buffer of the ring's size.
struct Copier {
    record: Vec<u8>,
    data: Vec<u8>,
    at: usize,
}

impl Copier {
    fn new(len: usize) -> Self {
        Self { record: vec![0x5a; len], data: vec![0; DATA], at: 0 }
    }

    fn burst(&mut self, records: u64) {
        let len = self.record.len();
        for _ in 0..records {
            if self.at + len > DATA {
                self.at = 0;
            }
            self.data[self.at..self.at + len].copy_from_slice(black_box(&self.record));
            self.at += len;
        }
        black_box(&self.data);
    }
}

fn records_of(len: usize) -> u64 {
    (BURST / len) as u64
}

fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("ring");
    group.warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    for len in LENS {
        let records = records_of(len);
        group.throughput(Throughput::Elements(records));
        let mut ring = producer(len);
        group.bench_function(BenchmarkId::new("burst", len), |bencher| {
            bencher.iter(|| assert_eq!(ring.burst(records), records));
        });
    }
    group.throughput(Throughput::Elements(1));
    let mut ring = producer(SHORTEST);
    group.bench_function(BenchmarkId::new("single", SHORTEST), |bencher| {
        bencher.iter(|| assert_eq!(ring.burst(1), 1));
    });
    group.finish();
}

/// Repeatedly runs the two functions in turn. Returns the median time of each function.
fn alternate(mut one: impl FnMut(), mut other: impl FnMut()) -> (Duration, Duration) {
    let mut times = (Vec::new(), Vec::new());
    for _ in 0..SLICES {
        let start = Instant::now();
        one();
        let between = Instant::now();
        other();
        times.0.push(between - start);
        times.1.push(between.elapsed());
    }
    let median = |mut times: Vec<Duration>| {
        times.sort_unstable();
        times[times.len() / 2]
    };
    (median(times.0), median(times.1))
}

fn ratios() {
    println!("\nring: records built and written in bursts, against copying the same bytes");
    for len in LENS {
        let records = records_of(len);
        let (mut ring, mut copier) = (producer(len), Copier::new(len));
        let (ours, copy) = alternate(|| assert_eq!(ring.burst(records), records), || copier.burst(records));
        let rate = records as f64 / ours.as_secs_f64();
        println!(
            "ring: {len:>6} bytes: {:7.2} M records/s {:7.2} GB/s, memcpy {:7.2} GB/s, ratio {:.2}",
            rate / 1e6,
            rate * len as f64 / 1e9,
            records as f64 * len as f64 / copy.as_secs_f64() / 1e9,
            copy.as_secs_f64() / ours.as_secs_f64(),
        );
    }
    let singles = 1000;
    let (mut ring, mut burst) = (producer(SHORTEST), producer(SHORTEST));
    let (single, burst) = alternate(
        || (0..singles).for_each(|_| assert_eq!(ring.burst(1), 1)),
        || assert_eq!(burst.burst(singles), singles),
    );
    println!(
        "ring: {SHORTEST:>6} bytes, one per burst: {:7.2} M records/s, {:.2} of the rate of long bursts",
        singles as f64 / single.as_secs_f64() / 1e6,
        burst.as_secs_f64() / single.as_secs_f64(),
    );
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    bench(&mut criterion);
    criterion.final_summary();
    if selects("ring") {
        ratios();
    }
}

//! Cost of a sample's call chain, by depth: the time to walk the guest's page tables and stack frames,
//! compared with the time to write the shortest record to the ring.

#![expect(clippy::expect_used, reason = "benchmarks fail by panicking")]

use std::time::{Duration, Instant};

use vm_memory::{GuestAddress, GuestMemoryMmap};
use vpmu::internals::{Callers, Producer, SHORTEST};
use vpmu_testkit::selects;

const DEPTHS: [u64; 3] = [1, 10, 126];
const PAGES: usize = 16;
const SLICES: usize = 200;
/// Samples of one slice.
const SAMPLES: u64 = 200;

fn memory(bytes: usize) -> GuestMemoryMmap {
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), bytes)]).expect("memory")
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e9 / SAMPLES as f64
}

fn main() {
    if !selects("callers") {
        return;
    }
    println!("\ncallers: walking one call chain, compared with building and writing one record of {SHORTEST} bytes");
    for depth in DEPTHS {
        let mut callers = Callers::new(memory(Callers::MEMORY), depth).expect("room for it");
        let mut ring = Producer::new(memory((PAGES + 1) * 4096), PAGES, SHORTEST).expect("a ring");
        let (mut walks, mut records) = (Vec::new(), Vec::new());
        for _ in 0..SLICES {
            let start = Instant::now();
            for _ in 0..SAMPLES {
                assert_eq!(callers.walk() as u64, depth + 1);
            }
            let between = Instant::now();
            (0..SAMPLES).for_each(|_| assert_eq!(ring.burst(1), 1));
            walks.push(between - start);
            records.push(between.elapsed());
        }
        let (walk, record) = (median(walks), median(records));
        println!("callers: {depth:>4} frames: {walk:8.0} ns, {:5.1} x the {record:.0} ns of a record", walk / record);
    }
}

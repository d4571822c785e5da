//! Cost of writes to an AUX area. Large writes are compared with memcpy of the same bytes into memory with
//! the same page layout (contiguous, or with gaps between pages). Single packets are measured, too.
//!
//! The variants alternate in short slices of one run, and each ratio compares median times. Separate runs would not be
//! comparable: on a machine with other users, speed drifts from run to run.

#![expect(clippy::expect_used, reason = "benchmarks fail by panicking")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vpmu::internals::{AuxArea, Tracer, aux_memory};
use vpmu_testkit::selects;

/// Pages of the area: 4 MiB.
const PAGES: u64 = 1024;
const SIZE: usize = 1024 * 4096;
const LENS: [usize; 4] = [4096, 64 << 10, 256 << 10, 1 << 20];
/// Number of bytes that each slice writes. They fill the area once.
const SLICE: usize = SIZE;
const SLICES: usize = 200;
/// Packets of one slice.
const PACKETS: u64 = 4000;
const BURST: usize = 4000;

const PAGE_WORDS: usize = 512;

fn memory() -> GuestMemoryMmap {
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), aux_memory(PAGES))]).expect("memory");
    // Touch every page before the measurement.
    let blank = vec![0; aux_memory(PAGES)];
    memory.write_slice(&blank, GuestAddress(0)).expect("memory");
    memory
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64()
}

/// Repeatedly runs the functions in turn. Returns the median time of each function in seconds.
fn alternate<const N: usize>(mut acts: [&mut dyn FnMut(); N]) -> [f64; N] {
    let mut times = [const { Vec::new() }; N];
    for _ in 0..SLICES {
        for (act, times) in acts.iter_mut().zip(&mut times) {
            let start = Instant::now();
            act();
            times.push(start.elapsed());
        }
    }
    times.map(median)
}

fn copies() {
    println!("\naux: large writes into an area of {PAGES} pages, against memcpy of the same bytes");
    let mut together = AuxArea::new(memory(), PAGES, false).expect("an area");
    let mut apart = AuxArea::new(memory(), PAGES, true).expect("an area");
    let mut plain = vec![1_u64; SIZE / 8];
    let mut spread = vec![1_u64; 2 * SIZE / 8];
    for len in LENS {
        let words = vec![0x5a5a_u64; len / 8];
        let times = SLICE / len;
        let write = |area: &mut AuxArea| {
            (0..times).for_each(|_| assert!(area.write(black_box(&words))));
        };
        let mut copy = || {
            for at in plain.chunks_exact_mut(words.len()) {
                at.copy_from_slice(black_box(&words));
            }
            black_box(&plain);
        };
        let mut copy_apart = || {
            // Copy only to every second page, because the area `apart` has the same gaps between its pages.
            let mut pages = spread.chunks_exact_mut(2 * PAGE_WORDS);
            for _ in 0..times {
                let words = black_box(&words);
                for (from, to) in words.chunks_exact(PAGE_WORDS).zip(&mut pages) {
                    to[..PAGE_WORDS].copy_from_slice(from);
                }
            }
            black_box(&spread);
        };
        let [one, copied, other, copied_apart] =
            alternate([&mut || write(&mut together), &mut copy, &mut || write(&mut apart), &mut copy_apart]);
        let rate = |seconds: f64| SLICE as f64 / seconds / 1e9;
        println!(
            "aux: {:>5} KiB: contiguous pages {:6.2} GB/s, memcpy {:6.2} GB/s, ratio {:.2}; pages with gaps \
             {:6.2} GB/s, memcpy {:6.2} GB/s, ratio {:.2}",
            len >> 10,
            rate(one),
            rate(copied),
            copied / one,
            rate(other),
            rate(copied_apart),
            copied_apart / other,
        );
    }
}

fn packets() {
    let mut exits = Tracer::new(memory(), PAGES, false).expect("a trace");
    let mut samples = Tracer::new(memory(), PAGES, true).expect("a trace");
    let mut plain = vec![0_u8; SIZE];
    let packet = [0x5a_u8; 64];
    let [exit, sample, copied] = alternate([
        &mut || assert_eq!(exits.burst(PACKETS), PACKETS),
        &mut || assert_eq!(samples.burst(PACKETS), PACKETS),
        &mut || {
            let room = plain.chunks_exact_mut(packet.len());
            for at in room.take(BURST) {
                at.copy_from_slice(black_box(&packet));
            }
            black_box(&plain);
        },
    ]);
    let rate = |seconds: f64| PACKETS as f64 / seconds / 1e6;
    println!(
        "aux: packets of 64 bytes {:6.2} M/s, of 256 bytes {:6.2} M/s; memcpy of 64 bytes {:6.2} M/s",
        rate(exit),
        rate(sample),
        rate(copied),
    );
}

fn main() {
    if selects("aux") {
        copies();
        packets();
    }
}

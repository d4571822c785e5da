//! Concurrent flushes while vCPUs run.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use vpmu::ExitReason;
use vpmu::abi::*;
use vpmu_testkit::{At, Fixture, thread};

use super::cycles;

const FLUSHES: u64 = 500;
/// Maximum number of overflows on each vCPU. The ring of the vCPU's event has space for this many records.
const OVERFLOWS: u64 = 50_000;

#[test]
fn concurrent_host_flushes_run_while_vcpus_enter_and_leave() {
    let mut fixture = Fixture::new();
    let events = [0, 1].map(|vcpu| cycles(&mut fixture, vcpu, ENGINE_EXIT));
    let mut rings = events.map(|id| fixture.map(id, 1024));
    let over = AtomicBool::new(false);
    let (fixture, over) = (&fixture, &over);
    thread::scope(|scope| {
        let vcpus = [0, 1].map(|vcpu| {
            scope.spawn(move || {
                let mut visits = 0_u64;
                while !over.load(Ordering::Relaxed) {
                    fixture.vcpus.enter(vcpu);
                    if visits < OVERFLOWS {
                        fixture.host.work(thread(vcpu), 100, 4);
                        visits += 1;
                    }
                    // The simulated kicks cannot make the vCPU leave the guest, so this loop makes it leave.
                    fixture.vcpus.leave(vcpu, ExitReason::Signal, &mut At(visits));
                }
                visits
            })
        });
        let flushers = [0, 1, 0].map(|of: usize| {
            let event = events[of];
            scope.spawn(move || {
                for _ in 0..FLUSHES {
                    fixture.vpmu.flush(Some(event)).expect("flushed");
                }
            })
        });
        for flusher in flushers {
            flusher.join().expect("no panic");
        }
        over.store(true, Ordering::Relaxed);
        let visits = vcpus.map(|vcpu| vcpu.join().expect("no panic"));
        for (ring, visits) in rings.iter_mut().zip(visits) {
            let samples = ring.samples();
            // Each overflow is written once and in order, no matter which thread finds it.
            assert!(samples.iter().map(|sample| sample.ip).eq(1..=visits));
        }
    });
}

//! Persistent events on a real host when their vCPU's thread changes, for example after the guest reboots.
#![expect(clippy::expect_used, reason = "tests fail by panicking")]

use std::hint::black_box;
use std::sync::Arc;
use std::thread;

use vm_memory::{GuestAddress, GuestMemoryMmap};
use vmm_sys_util::signal::SIGRTMIN;
use vpmu::abi::{PAGE_SIZE, STATE_ACTIVE, STATE_INACTIVE};
use vpmu::host::PerfSource;
use vpmu::source::Rate;
use vpmu::{Engines, ExitReason, Persist, PersistentStatus, Settings, Vpmu};
use vpmu_testkit::{At, Bare, ignore_signals};

/// How many nanoseconds each thread adds to the event's count.
const SPENT: u64 = 50_000_000;
const IP: u64 = 0x1234;

fn device() -> Vpmu {
    let settings = Settings::new(1, 1_000_000).with_engines(Engines::Exit);
    ignore_signals();
    let source = PerfSource::new(SIGRTMIN()).expect("a source");
    let range = (GuestAddress(0xd000_0000), 64 * PAGE_SIZE);
    let window = GuestMemoryMmap::<()>::from_ranges(&[range]).expect("memory");
    let vpmu = Vpmu::new(settings, Arc::new(Bare::default()), Box::new(source)).expect("a device");
    vpmu.with_window(window).expect("a window")
}

/// Runs the vCPU on a new thread until the event's count has grown by `SPENT`, and then ends the thread. Returns the
/// last count that the thread read.
fn boot(vpmu: &Vpmu) -> u64 {
    let run = || {
        let mut vcpu = vpmu.attach(0, 0).expect("the device has this vCPU");
        let start = only(vpmu).count;
        loop {
            vcpu.enter();
            black_box(());
            vcpu.leave(ExitReason::Signal, &mut At(IP));
            let count = only(vpmu).count;
            if count - start >= SPENT {
                return count;
            }
        }
    };
    thread::scope(|scope| scope.spawn(run).join().expect("the thread ends"))
}

fn only(vpmu: &Vpmu) -> PersistentStatus {
    let mut all = vpmu.persistent();
    assert_eq!(all.len(), 1);
    all.remove(0)
}

#[test]
fn host_clock_continues_on_the_next_thread() {
    let vpmu = device();
    let asked = Persist {
        name: None,
        event: "task-clock".to_owned(),
        vcpu: 0,
        rate: Some(Rate::Period(1_000_000)),
        sample_type: 0x1_0007,
        pages: 16,
    };
    let event = vpmu.persist(&asked).expect("started before any thread");
    assert_eq!(only(&vpmu).state, STATE_INACTIVE);
    let mut before = only(&vpmu);
    for _ in 0..3 {
        let counted = boot(&vpmu);
        // The count continues, although the thread has ended.
        let after = only(&vpmu);
        assert_eq!(after.state, STATE_ACTIVE);
        assert!(counted >= before.count + SPENT, "the count {counted} did not grow by {SPENT} from {before:?}");
        assert!(after.count >= counted, "{after:?}, read before {counted}");
        assert!(after.time_running >= before.time_running);
        vpmu.reset();
        assert_eq!(only(&vpmu).id, event);
        before = after;
    }
    let history = vpmu.history(event).expect("a history");
    let ips: Vec<u64> = history
        .iter()
        .filter(|record| record[0] == 9)
        .map(|record| u64::from_le_bytes(record[16..24].try_into().expect("a word")))
        .collect();
    assert!(!ips.is_empty() && ips.iter().all(|&ip| ip == IP), "no samples, or some at another address: {ips:?}");
}

//! Checks which threads the crate adds to a process that embeds the device. It adds only one, when the source is
//! created. This program has only one test, because other tests would add their own threads.
#![expect(clippy::expect_used, reason = "tests fail by panicking")]

use std::collections::BTreeSet;
use std::fs;
use std::hint::black_box;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vm_memory::{GuestAddress, GuestMemoryMmap};
use vmm_sys_util::signal::SIGRTMIN;
use vpmu::abi::PAGE_SIZE;
use vpmu::host::{HostFiles, PerfSource};
use vpmu::source::Rate;
use vpmu::{Engines, ExitReason, Hardware, Persist, Settings, Vpmu};
use vpmu_testkit::{At, Bare, ignore_signals};

fn threads() -> BTreeSet<String> {
    let tasks = fs::read_dir("/proc/self/task").expect("a process");
    let id = |task: io::Result<fs::DirEntry>| task.expect("a thread").file_name();
    tasks.map(|task| id(task).into_string().expect("a number")).collect()
}

fn names() -> BTreeSet<String> {
    let name = |id: String| fs::read_to_string(format!("/proc/self/task/{id}/comm"));
    let named = threads().into_iter().map(|id| name(id).expect("a thread"));
    named.map(|name| name.trim().to_owned()).collect()
}

fn persist(event: &str) -> Persist {
    Persist {
        event: event.to_owned(),
        vcpu: 0,
        name: None,
        rate: Some(Rate::Period(100_000)),
        sample_type: 0,
        pages: 4,
    }
}

/// Runs the vCPU for 20 ms.
fn run(vpmu: &Vpmu) {
    let mut session = vpmu.attach(0, 0).expect("the vCPU");
    for _ in 0..20 {
        session.enter();
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_millis(1) {
            black_box(0);
        }
        session.leave(ExitReason::Signal, &mut At(0x1234));
    }
}

#[test]
fn construction_makes_every_thread_and_work_makes_none() {
    ignore_signals();
    let (tell, reported) = std::sync::mpsc::channel();
    let begin = move || {
        let name = std::thread::current().name().unwrap_or_default().to_owned();
        tell.send(name).map_err(io::Error::other)
    };
    let before = threads().len();
    let source = PerfSource::confined(HostFiles::read(&Hardware::default()), SIGRTMIN(), begin).expect("a source");
    assert_eq!(reported.try_recv().as_deref(), Ok("vpmu closer"));
    assert!(names().contains("vpmu closer"));
    let settings = Settings::new(1, 1_000_000).with_engines(Engines::Exit);
    let window = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(1 << 32), 64 * PAGE_SIZE)]);
    let vpmu = Vpmu::new(settings, Arc::new(Bare::default()), Box::new(source)).expect("a device");
    let vpmu = vpmu.with_window(window.expect("memory")).expect("a window");
    let made = threads();
    assert_eq!(made.len(), before + 1);
    // If the host cannot trace exits, the device refuses `exit-trace`. Otherwise, the crate's thread (`vpmu closer`)
    // closes the counters of the exit trace.
    for event in ["task-clock", "cpu-clock", "exit-trace"] {
        for _ in 0..3 {
            let started = vpmu.persist(&persist(event));
            run(&vpmu);
            vpmu.drain();
            vpmu.flush(None).expect("flushed");
            if let Ok(id) = started {
                vpmu.end(id).expect("the event exists");
            }
            assert_eq!(threads(), made, "{event}");
        }
    }
    let samples = vpmu.metrics().samples_written;
    assert!(samples > 0, "the events took no samples");
}

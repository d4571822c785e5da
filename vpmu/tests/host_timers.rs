//! Sampling clocks of one thread. A host timer paces each clock, and the device starts and stops all these timers
//! together.
#![expect(clippy::expect_used, reason = "tests fail by panicking")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use vmm_sys_util::signal::SIGRTMIN;
use vpmu::Source;
use vpmu::abi::KIND_SOFTWARE;
use vpmu::host::PerfSource;
use vpmu::source::{Counter, Engine, Overflows, Rate, Request, Sampling};

const CPU_CLOCK: u64 = 0;
const TASK_CLOCK: u64 = 1;
/// A running clock samples within this time, even on a busy machine.
const LONG: Duration = Duration::from_secs(60);

fn open(source: &PerfSource, config: u64) -> Box<dyn Counter> {
    let request = Request {
        kind: KIND_SOFTWARE,
        config,
        sampling: Some(Sampling { rate: Rate::Period(1_000_000), engine: Engine::Batched }),
        ..Request::default()
    };
    let opened = source.open(&request, source.thread());
    opened.expect("perf_event_open: see /proc/sys/kernel/perf_event_paranoid")
}

struct Clocks {
    source: PerfSource,
    clocks: Vec<Box<dyn Counter>>,
}

impl Clocks {
    /// Opens clocks that sample this thread every millisecond.
    fn open(configs: &[u64]) -> Self {
        let source = PerfSource::new(SIGRTMIN()).expect("a source");
        let clocks = configs.iter().map(|&config| open(&source, config));
        let clocks = clocks.collect();
        Self { source, clocks }
    }

    /// Calls `act` on the clocks between the source's `hold` and `release`, as the device does during a notification.
    fn together(&mut self, act: impl FnOnce(&mut [Box<dyn Counter>])) {
        let thread = self.source.thread();
        self.source.hold(thread);
        act(&mut self.clocks);
        self.source.release(thread).expect("released");
    }

    fn start(&mut self, which: &[usize]) {
        let which = which.to_vec();
        self.together(|clocks| {
            for at in which {
                clocks[at].start().expect("started");
            }
        });
    }

    fn stop(&mut self, which: &[usize]) {
        let which = which.to_vec();
        self.together(|clocks| {
            for at in which {
                clocks[at].stop().expect("stopped");
            }
        });
    }

    /// Returns each clock's number of samples since the last call.
    fn samples(&mut self) -> Vec<usize> {
        let drained = self.clocks.iter_mut().map(|clock| {
            let mut overflows = Overflows::default();
            clock.drain(&mut overflows);
            overflows.samples.len()
        });
        drained.collect()
    }

    /// Works until each clock in `running` has sampled three times. Asserts that no other clock has sampled.
    fn assert_run(&mut self, running: &[usize]) {
        self.samples();
        let (begun, mut seen) = (Instant::now(), vec![0; self.clocks.len()]);
        while running.iter().any(|&at| seen[at] < 3) {
            (0..10_000).for_each(|round| {
                black_box(round);
            });
            for (all, more) in seen.iter_mut().zip(self.samples()) {
                *all += more;
            }
            assert!(begun.elapsed() < LONG, "{seen:?} samples, {running:?} run");
        }
        for (at, samples) in seen.iter().enumerate() {
            assert_eq!(*samples > 0, running.contains(&at), "clock {at}: {seen:?}");
        }
    }
}

#[test]
fn clocks_started_together_sample() {
    let mut clocks = Clocks::open(&[CPU_CLOCK, TASK_CLOCK, CPU_CLOCK]);
    clocks.assert_run(&[]);
    clocks.start(&[0, 1, 2]);
    clocks.assert_run(&[0, 1, 2]);
    clocks.stop(&[0, 1, 2]);
    clocks.assert_run(&[]);
}

#[test]
fn clocks_started_and_stopped_beside_running_ones_leave_those_running() {
    let mut clocks = Clocks::open(&[CPU_CLOCK, TASK_CLOCK, CPU_CLOCK, TASK_CLOCK]);
    clocks.start(&[0]);
    clocks.assert_run(&[0]);
    clocks.start(&[1]);
    clocks.assert_run(&[0, 1]);
    clocks.start(&[2, 3]);
    clocks.assert_run(&[0, 1, 2, 3]);
    clocks.stop(&[1]);
    clocks.assert_run(&[0, 2, 3]);
    clocks.stop(&[0, 3]);
    clocks.assert_run(&[2]);
}

#[test]
fn clocks_of_a_paused_thread_stand_still() {
    let mut clocks = Clocks::open(&[CPU_CLOCK, TASK_CLOCK, CPU_CLOCK]);
    // The timers of another source are independent.
    let mut other = Clocks::open(&[CPU_CLOCK]);
    let thread = clocks.source.thread();
    other.start(&[0]);
    clocks.start(&[0, 1]);
    clocks.assert_run(&[0, 1]);
    clocks.source.pause(thread).expect("paused");
    clocks.samples();
    other.assert_run(&[0]);
    assert_eq!(clocks.samples(), [0, 0, 0]);
    clocks.start(&[2]);
    clocks.stop(&[1]);
    other.assert_run(&[0]);
    assert_eq!(clocks.samples(), [0, 0, 0], "a clock that is started in the pause does not sample");
    clocks.source.resume(thread).expect("resumed");
    clocks.assert_run(&[0, 2]);
}

#[test]
fn clock_opened_in_a_pause_waits_for_its_end() {
    let mut clocks = Clocks::open(&[]);
    let mut other = Clocks::open(&[CPU_CLOCK]);
    let thread = clocks.source.thread();
    other.start(&[0]);
    clocks.source.pause(thread).expect("paused");
    clocks.clocks.push(open(&clocks.source, CPU_CLOCK));
    clocks.start(&[0]);
    other.assert_run(&[0]);
    assert_eq!(clocks.samples(), [0]);
    clocks.source.resume(thread).expect("resumed");
    clocks.assert_run(&[0]);
}

#[test]
fn clocks_that_go_and_come_in_one_notification_change_places() {
    let mut clocks = Clocks::open(&[CPU_CLOCK, CPU_CLOCK, TASK_CLOCK]);
    clocks.start(&[0, 1]);
    for (out, come) in [(0, 2), (2, 0), (1, 2)] {
        clocks.together(|clocks| {
            clocks[out].stop().expect("stopped");
            clocks[come].start().expect("started");
        });
        let running: Vec<_> = (0..3).filter(|&at| at != out).collect();
        clocks.assert_run(&running);
    }
    // A clock that is stopped before its timer starts does not sample.
    clocks.together(|clocks| {
        clocks[1].start().expect("started");
        clocks[1].stop().expect("stopped");
    });
    clocks.assert_run(&[0, 2]);
}

#[test]
fn clocks_that_are_not_held_start_and_stop_at_once() {
    let mut clocks = Clocks::open(&[CPU_CLOCK, TASK_CLOCK]);
    for at in [0, 1] {
        clocks.clocks[at].start().expect("started");
    }
    clocks.assert_run(&[0, 1]);
    clocks.clocks[0].stop().expect("stopped");
    clocks.assert_run(&[1]);
    clocks.clocks[1].stop().expect("stopped");
    clocks.assert_run(&[]);
}

#[test]
fn clock_closed_while_it_runs_leaves_others_running() {
    let mut clocks = Clocks::open(&[CPU_CLOCK, CPU_CLOCK, TASK_CLOCK]);
    clocks.start(&[0, 1, 2]);
    clocks.clocks.remove(1);
    clocks.assert_run(&[0, 1]);
    clocks.stop(&[0]);
    clocks.assert_run(&[1]);
    clocks.clocks.remove(1);
    clocks.start(&[0]);
    clocks.assert_run(&[0]);
}

#[test]
fn counts_of_clocks_grow_only_while_they_run() {
    let mut clocks = Clocks::open(&[CPU_CLOCK, TASK_CLOCK]);
    let read = |clocks: &mut Clocks| {
        let read = |clock: &mut Box<dyn Counter>| clock.read().expect("read").value;
        clocks.clocks.iter_mut().map(read).collect::<Vec<_>>()
    };
    clocks.start(&[0]);
    clocks.assert_run(&[0]);
    let before = read(&mut clocks);
    assert!(before[0] > 0 && before[1] == 0, "not only the first clock counted: {before:?}");
    clocks.together(|clocks| {
        clocks[0].stop().expect("stopped");
        clocks[1].start().expect("started");
    });
    let first = read(&mut clocks)[0];
    clocks.assert_run(&[1]);
    let after = read(&mut clocks);
    assert_eq!(after[0], first, "the count of a stopped clock");
    assert!(after[1] > 0);
}

#[test]
fn more_clocks_than_a_group_holds_all_sample() {
    let configs: Vec<u64> = (0..70).map(|at| at % 2).collect();
    let mut clocks = Clocks::open(&configs);
    let all: Vec<usize> = (0..70).collect();
    clocks.start(&all);
    clocks.assert_run(&all);
    clocks.stop(&all[1..]);
    clocks.assert_run(&[0]);
}

//! A vCPU does not have to wait for another vCPU.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use vpmu::abi::*;
use vpmu::{Engines, ExitReason, GuestRegs, Registers};
use vpmu_testkit::{ALL_FEATURES, At, CYCLES, FAULTS, Fields, Fixture, Reader, command, limits, open_of};

use super::{Lane, Pending, VcpuThread, aside, each, task_event};

/// Events of vCPU 1, and of tasks that run there.
struct Own {
    /// A vCPU event that samples marks.
    marks: u64,
    tasks: [Vec<u64>; 2],
    ring: Reader,
}

impl Own {
    fn open(fixture: &mut Fixture) -> Self {
        let marks = fixture.opened(&open_of(KIND_MARK, 5, 1).sampled(1).flags(OPEN_ENABLED));
        let ring = fixture.map(marks, 4);
        let tasks = [(); 2].map(|()| {
            let kinds = [CYCLES, FAULTS, (KIND_MARK, 5), (KIND_TSC, 0)];
            let open = |(kind, config)| fixture.opened(&task_event(kind, config));
            kinds.map(open).to_vec()
        });
        // Run each task once on this vCPU, so that its events have host counters.
        for task in &tasks {
            fixture.commands(1, &each(COMMAND_IN, task));
            fixture.commands(1, &each(COMMAND_OUT, task));
        }
        Self { marks, tasks, ring }
    }

    /// Switches tasks, places marks, and flushes an event on vCPU 1. Checks that nothing waits for another vCPU.
    fn check(&mut self, vcpu: &VcpuThread) {
        const ROUNDS: usize = 100;
        let (marks, tasks) = (self.marks, self.tasks.clone());
        let replies = vcpu.run(move |lane| {
            let mut replies = Vec::new();
            for round in 0..ROUNDS {
                let (one, other) = (&tasks[round % 2], &tasks[(round + 1) % 2]);
                replies.extend(lane.commands(&each(COMMAND_IN, one)));
                lane.mark(5);
                lane.session.leave(ExitReason::Io, &mut At(2));
                lane.session.enter();
                let switch = [each(COMMAND_OUT, one), each(COMMAND_IN, other)].concat();
                replies.extend(lane.commands(&switch));
                replies.extend(lane.commands(&[command(COMMAND_FLUSH, marks)]));
                replies.extend(lane.commands(&each(COMMAND_OUT, other)));
            }
            replies
        });
        assert!(replies.iter().all(|reply| reply.status.get() == 0));
        assert_eq!(self.ring.samples().len(), ROUNDS);
    }
}

/// A hypervisor that returns registers only when the test permits it.
struct Slow {
    asked: Sender<()>,
    let_go: Receiver<()>,
}

impl Registers for Slow {
    fn registers(&mut self) -> Option<GuestRegs> {
        let _ = self.asked.send(());
        let _ = self.let_go.recv();
        At(7).registers()
    }
}

#[test]
fn vcpu_in_its_exit_handler_delays_no_other() {
    let mut fixture = Fixture::new();
    let mut own = Own::open(&mut fixture);
    let request = open_of(CYCLES.0, CYCLES.1, 0).sampled(100).flags(OPEN_ENABLED | OPEN_PERSISTENT).engine(ENGINE_EXIT);
    let of_first = fixture.opened(&request);
    let mut ring = fixture.map(of_first, 1);
    let second = VcpuThread::spawn(Lane::new(&mut fixture, 1));
    fixture.vcpus.enter(0);
    fixture.host.work(vpmu_testkit::thread(0), 250, 4);
    fixture.vcpus.leave(0, ExitReason::Mmio, &mut At(1));
    assert_eq!(ring.samples().len(), 2);
    fixture.host.work(vpmu_testkit::thread(0), 100, 4);
    // vCPU 0 stays outside the guest until the end of the test.
    own.check(&second);
    for event in [Some(of_first), None, Some(own.marks)] {
        let vpmu = Arc::clone(&fixture.vpmu);
        let flushed = aside(move || vpmu.flush(event)).wait();
        flushed.expect("flushed");
    }
    assert_eq!(ring.samples().len(), 1, "the flush writes the overflow that was pending in the host counter");
    let vpmu = Arc::clone(&fixture.vpmu);
    aside(move || vpmu.drain()).wait();
    own.check(&second);
    // The device still serves requests, even requests about events of vCPU 0.
    let other = fixture.opened(&open_of(CYCLES.0, CYCLES.1, 0));
    fixture.close(other).expect("closed");
    assert_eq!(fixture.vpmu.metrics().drains, 1);
}

#[test]
fn vcpu_without_a_thread_delays_no_other() {
    let mut fixture = Fixture::bare(Engines::Auto, limits(), None);
    fixture.attach(1);
    fixture.activate(ALL_FEATURES);
    let mut own = Own::open(&mut fixture);
    let of_first = fixture.opened(&open_of(KIND_MARK, 5, 0).sampled(1).flags(OPEN_ENABLED | OPEN_PERSISTENT));
    let second = VcpuThread::spawn(Lane::new(&mut fixture, 1));
    own.check(&second);
    for event in [Some(of_first), None, Some(own.marks)] {
        let vpmu = Arc::clone(&fixture.vpmu);
        let flushed = aside(move || vpmu.flush(event)).wait();
        flushed.expect("flushed");
    }
    let vpmu = Arc::clone(&fixture.vpmu);
    aside(move || vpmu.drain()).wait();
    own.check(&second);
}

/// While the hypervisor reads a vCPU's registers, the vCPU's shard (the state of its events) is locked. A request about
/// an event of this vCPU waits for the lock, and holds the control plane's lock while it waits.
#[test]
fn vcpu_with_a_slow_hypervisor_delays_requests_and_no_other_vcpu() {
    let mut fixture = Fixture::new();
    let mut own = Own::open(&mut fixture);
    let of_first = fixture.opened(&open_of(KIND_MARK, 6, 0).sampled(1).flags(OPEN_ENABLED));
    let mut ring = fixture.map(of_first, 1);
    let first = VcpuThread::spawn(Lane::new(&mut fixture, 0));
    let second = VcpuThread::spawn(Lane::new(&mut fixture, 1));
    let (asked, is_asked) = channel();
    let (go, let_go) = channel();
    let mark = first.begin(move |lane| {
        lane.session.mark(6, &mut Slow { asked, let_go });
    });
    is_asked.recv_timeout(super::LONG).expect("a sample needs the registers");
    let flush: Pending<_> = {
        let vpmu = Arc::clone(&fixture.vpmu);
        aside(move || vpmu.flush(Some(of_first)))
    };
    let drain = {
        let vpmu = Arc::clone(&fixture.vpmu);
        aside(move || vpmu.drain())
    };
    for _ in 0..5 {
        own.check(&second);
    }
    assert!(!mark.is_over() && !flush.is_over());
    go.send(()).expect("the hypervisor waits");
    mark.wait();
    flush.wait().expect("flushed");
    drain.wait();
    let ips: Vec<_> = ring.samples().iter().map(|sample| sample.ip).collect();
    assert_eq!(ips, [7]);
}

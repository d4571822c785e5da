//! Samples: their number and their fields.

use vm_memory::{Bytes, GuestAddress};
use vpmu::ExitReason;
use vpmu::abi::*;
use vpmu_testkit::{
    At, CYCLES, Fields, Fixture, Nowhere, Record, SHORTEST, Sample, TSC_OFFSET, command, header, open_of, thread,
};
use zerocopy::IntoBytes;

/// VPMU-D-6.6-1.
#[test]
fn n_events_make_n_over_p_records() {
    let mut fixture = Fixture::new();
    for (n, period) in [(10, 1), (100, 7), (99, 100), (100, 100), (1000, 33)] {
        let request = open_of(KIND_MARK, 5, 0).sampled(period);
        let reply = fixture.open_reply(&request);
        assert_eq!(reply.engine.get(), ENGINE_EXIT);
        let event = reply.id.get();
        let mut ring = fixture.map(event, 16);
        fixture.command(0, COMMAND_ENABLE, event);
        for mark in 0..n {
            fixture.mark(0, 5, 0x1000 + mark);
            fixture.mark(0, 6, 0);
        }
        assert_eq!(fixture.value(0, event), n);
        let samples = ring.samples();
        assert_eq!(samples.len() as u64, n / period, "{n} over {period}");
        for (index, sample) in (1..).zip(&samples) {
            assert_eq!(sample.ip, 0x1000 + index * period - 1, "the sample is of the mark that completed the period");
            assert_eq!((sample.id, sample.stream_id), (event, event));
            assert_eq!((sample.cpu, sample.period), (0, period));
            assert!(sample.user && sample.time > TSC_OFFSET);
        }
        assert!(samples.windows(2).all(|two| two[0].time < two[1].time));
        fixture.close(event).expect("closed");
    }
    assert_eq!(fixture.vpmu.metrics().samples_lost, 0);
}

#[test]
fn samples_of_two_vcpus_do_not_mix() {
    let mut fixture = Fixture::new();
    let events = [0, 1].map(|vcpu| {
        let event = fixture.opened(&open_of(KIND_MARK, 5, vcpu).sampled(2));
        fixture.command(vcpu, COMMAND_ENABLE, event);
        event
    });
    let mut rings = events.map(|event| fixture.map(event, 8));
    for _ in 0..100 {
        fixture.mark(0, 5, 10);
        fixture.mark(1, 5, u64::MAX);
        fixture.mark(1, 5, u64::MAX);
    }
    for (vcpu, ring) in (0..).zip(&mut rings) {
        let samples = ring.samples();
        assert_eq!(samples.len() as u64, 50 * (vcpu + 1));
        for sample in samples {
            assert_eq!((sample.cpu, sample.user), (vcpu, vcpu == 0));
        }
    }
}

/// VPMU-D-6.6-1.
#[test]
fn exit_that_completes_the_period_overflows() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&open_of(KIND_EXITS, EXIT_IO, 1).sampled(3));
    let mut ring = fixture.map(event, 2);
    fixture.command(1, COMMAND_ENABLE, event);
    for exit in 0..100 {
        fixture.exit(1, ExitReason::Io, &mut At(exit));
        fixture.exit(1, ExitReason::Hlt, &mut At(0));
        fixture.exit(0, ExitReason::Io, &mut At(0));
    }
    let at: Vec<u64> = ring.samples().iter().map(|sample| sample.ip).collect();
    assert_eq!(at, (0..33).map(|n| 3 * n + 2).collect::<Vec<_>>());
    assert_eq!(fixture.value(1, event), 100);
}

#[test]
fn exits_of_every_reason_share_one_period() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&open_of(KIND_EXITS, EXIT_USER, 0).sampled(5).flags(OPEN_ENABLED));
    let mut ring = fixture.map(event, 2);
    let reasons = [ExitReason::Io, ExitReason::Mmio, ExitReason::Hlt, ExitReason::Signal, ExitReason::Other];
    for exit in 0..100 {
        for (index, reason) in (0..).zip(reasons) {
            fixture.exit(0, reason, &mut At(10 * exit + index));
        }
    }
    let at: Vec<u64> = ring.samples().iter().map(|sample| sample.ip).collect();
    assert_eq!(at, (0..100).map(|n| 10 * n + 4).collect::<Vec<_>>());
}

#[test]
fn host_overflows_become_samples_at_the_exit() {
    let mut fixture = Fixture::new();
    let (kind, config) = CYCLES;
    let event = fixture.opened(&open_of(kind, config, 0).sampled(100));
    let mut ring = fixture.map(event, 2);
    assert!(!fixture.vcpus.wants_registers(0));
    fixture.command(0, COMMAND_ENABLE, event);
    assert!(fixture.vcpus.wants_registers(0) && !fixture.vcpus.wants_registers(1));
    fixture.host.work(thread(0), 250, 4);
    fixture.exit(0, ExitReason::Signal, &mut At(0x4000));
    assert_eq!(fixture.vpmu.metrics().overflow_exits, 1);
    // The device finds the third overflow at an MMIO exit, before the overflow's signal causes an exit.
    fixture.host.work(thread(0), 60, 4);
    fixture.vcpus.leave(0, ExitReason::Mmio, &mut At(0x5000));
    let samples = ring.samples();
    let ips: Vec<u64> = samples.iter().map(|sample| sample.ip).collect();
    assert_eq!(ips, [0x4000, 0x4000, 0x5000]);
    assert!(samples.iter().all(|sample| sample.period == 100));
    fixture.command(0, COMMAND_DISABLE, event);
    assert!(!fixture.vcpus.wants_registers(0));
    fixture.host.work(thread(0), 1000, 4);
    fixture.exit(0, ExitReason::Signal, &mut At(0));
    assert_eq!(ring.samples(), []);
}

#[test]
fn overflows_between_exit_and_schedule_out_belong_to_the_exit_and_the_task() {
    let mut fixture = Fixture::new();
    let runs = |fixture: &Fixture, tid: u32| {
        let task = TaskPage { pid: 41.into(), tid: tid.into(), ..TaskPage::default() };
        fixture.memory.write_slice(&task.as_bytes()[..8], GuestAddress(0x8000)).expect("in memory");
    };
    fixture
        .control(&TaskPageRequest {
            header: header(CONTROL_TASK_PAGE, 0),
            vcpu: 1.into(),
            reserved: 0.into(),
            address: 0x8000.into(),
        })
        .expect("set");
    let (kind, config) = CYCLES;
    let request = open_of(kind, config, CONTEXT_TASK).sampled(100).flags(OPEN_ENABLED);
    let event = fixture.opened(&request);
    let mut ring = fixture.map(event, 2);
    runs(&fixture, 42);
    fixture.command(1, COMMAND_IN, event);
    fixture.vcpus.leave(1, ExitReason::Mmio, &mut At(0x7000));
    fixture.host.work(thread(1), 100, 4);
    // The task page already shows the next task when the event is scheduled out.
    runs(&fixture, 43);
    fixture.queues[3].request(command(COMMAND_OUT, event).as_bytes(), 40);
    fixture.vcpus.kick(1, 3);
    assert_eq!(fixture.queues[3].answer().map(|answer| answer.len()), Some(40));
    let samples = ring.samples();
    assert_eq!(samples.len(), 1);
    assert_eq!((samples[0].ip, samples[0].cpu), (0x7000, 1));
    assert_eq!((samples[0].pid, samples[0].tid), (41, 42));
}

#[test]
fn overflow_found_on_a_running_vcpu_has_no_position() {
    let mut fixture = Fixture::new();
    let (kind, config) = CYCLES;
    let event = fixture.opened(&open_of(kind, config, 0).sampled(100).flags(OPEN_ENABLED));
    let mut ring = fixture.map(event, 2);
    fixture.exit(0, ExitReason::Mmio, &mut At(0x7000));
    // The counter overflows while the vCPU is back in the guest. Then another vCPU disables the event.
    fixture.host.work(thread(0), 100, 4);
    let reply = fixture.command(1, COMMAND_DISABLE, event);
    assert_eq!((reply.status.get(), reply.lost.get()), (0, 1));
    let lost = Record::Lost { id: event, lost: 1 };
    assert_eq!(ring.take(usize::MAX), [lost]);
}

/// VPMU-D-6.6-3.
#[test]
fn sample_in_an_excluded_mode_is_lost() {
    let mut fixture = Fixture::new();
    let (kind, config) = CYCLES;
    let event = fixture.opened(&open_of(kind, config, 0).sampled(100).flags(OPEN_EXCLUDE_USER));
    let mut ring = fixture.map(event, 2);
    fixture.command(0, COMMAND_ENABLE, event);
    fixture.host.work(thread(0), 100, 4);
    // `At` reports user mode.
    fixture.exit(0, ExitReason::Signal, &mut At(0x4000));
    assert_eq!(ring.samples(), []);
    assert_eq!(fixture.vpmu.metrics().samples_lost, 1);
}

#[test]
fn new_period_counts_from_its_command() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&open_of(KIND_MARK, 5, 0).sampled(10).flags(OPEN_ENABLED));
    let mut ring = fixture.map(event, 2);
    let mark = |fixture: &Fixture, times| (0..times).for_each(|_| fixture.mark(0, 5, 1));
    mark(&fixture, 9);
    let period = |value: u64| Command { value: value.into(), ..command(COMMAND_PERIOD, event) };
    assert_eq!(fixture.commands(0, &[period(4)])[0].status.get(), 0);
    mark(&fixture, 8);
    let samples = ring.samples();
    assert_eq!(samples.len(), 2);
    assert!(samples.iter().all(|sample| sample.period == 4));
    for wrong in [0, 1 << 63] {
        let refused = fixture.commands(0, &[period(wrong)])[0];
        assert_eq!(refused.status.get(), libc::EINVAL.unsigned_abs());
        assert_eq!(refused.state.get(), STATE_ACTIVE);
    }

    let (kind, config) = CYCLES;
    let host = fixture.opened(&open_of(kind, config, 0).sampled(SHORTEST));
    let short = Command { value: (SHORTEST - 1).into(), ..command(COMMAND_PERIOD, host) };
    let refused = fixture.commands(0, &[short])[0];
    assert_eq!(refused.status.get(), libc::EINVAL.unsigned_abs());
    let short = open_of(kind, config, 0).sampled(SHORTEST - 1);
    assert_eq!(fixture.open(&short), Err(libc::EOPNOTSUPP));
}

#[test]
fn children_write_to_their_parents_ring() {
    let mut fixture = Fixture::new();
    let parent = fixture.opened(&open_of(KIND_MARK, 5, 0).sampled(1));
    let child_of = |of: u64, vcpu| open_of(KIND_MARK, 5, vcpu).sampled(1).parent(of).flags(OPEN_ENABLED);
    let child = fixture.opened(&child_of(parent, 1));
    let grandchild = fixture.opened(&child_of(child, 1));
    let mut ring = fixture.map(parent, 2);
    fixture.mark(1, 5, 1);
    let ids = |samples: Vec<Sample>| -> Vec<_> { samples.iter().map(|s| (s.id, s.stream_id, s.cpu)).collect() };
    assert_eq!(ids(ring.samples()), [(parent, child, 1), (parent, grandchild, 1)]);
    fixture.close(parent).expect("closed");
    fixture.mark(1, 5, 1);
    assert_eq!(ring.samples().len(), 2, "the ring remains while events write to it");
    fixture.close(child).expect("closed");
    fixture.close(grandchild).expect("closed");
    assert_eq!(fixture.open(&child_of(parent, 0)), Err(libc::EINVAL));
}

#[test]
fn sample_task_is_read_from_the_task_page() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&open_of(KIND_MARK, 5, 1).sampled(1));
    let mut ring = fixture.map(event, 2);
    fixture.command(1, COMMAND_ENABLE, event);
    fixture.mark(1, 5, 1);
    let page = |address: u64| TaskPageRequest {
        header: header(CONTROL_TASK_PAGE, 0),
        vcpu: 1.into(),
        reserved: 0.into(),
        address: address.into(),
    };
    fixture.control(&page(0x8000)).expect("set");
    let task = TaskPage { pid: 41.into(), tid: 42.into(), ..TaskPage::default() };
    fixture.memory.write_slice(&task.as_bytes()[..8], GuestAddress(0x8000)).expect("in memory");
    fixture.mark(1, 5, 1);
    fixture.control(&page(0)).expect("taken away");
    fixture.mark(1, 5, 1);
    let tasks: Vec<_> = ring.samples().iter().map(|s| (s.pid, s.tid)).collect();
    assert_eq!(tasks, [(0, 0), (41, 42), (0, 0)]);
}

#[test]
fn waiting_wakeups_share_one_notice_and_interrupt() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&open_of(KIND_MARK, 5, 0).sampled(1).wakeup(10).flags(OPEN_ENABLED));
    fixture.map(event, 8);
    let before = fixture.host.interrupts();
    (0..35).for_each(|_| fixture.mark(0, 5, 1));
    assert_eq!(fixture.vpmu.metrics().wakeups, 3);
    assert_eq!(fixture.host.interrupts(), before, "the notice waits for a buffer");
    fixture.post_notice(0, 16);
    assert_eq!(fixture.notice(), Some((NOTICE_WAKEUP, event)));
    assert_eq!(fixture.host.interrupts(), before + 1);
    fixture.post_notice(1, 16);
    assert_eq!(fixture.notice(), None, "one notice represents all three wakeups");
    (0..5).for_each(|_| fixture.mark(0, 5, 1));
    assert_eq!(fixture.notice(), Some((NOTICE_WAKEUP, event)));
    assert_eq!(fixture.vpmu.metrics().notices, 2);
    assert_eq!(fixture.vpmu.metrics().interrupts, fixture.host.interrupts());
}

#[test]
fn sample_without_registers_is_lost() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&open_of(KIND_MARK, 5, 0).sampled(1).flags(OPEN_ENABLED));
    let mut ring = fixture.map(event, 2);
    fixture.vcpus.mark(0, 5, &mut Nowhere);
    assert_eq!(ring.samples(), []);
    fixture.command(0, COMMAND_READ, event);
    assert_eq!(ring.take(1), [vpmu_testkit::Record::Lost { id: event, lost: 1 }]);
}

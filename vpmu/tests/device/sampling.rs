//! Samples: their number and their fields.

use vm_memory::{Bytes, GuestAddress};
use vpmu::ExitReason;
use vpmu::abi::*;
use zerocopy::IntoBytes;

use crate::reader::{Record, Sample};
use crate::rig::{Rig, TSC_OFFSET, command, open_of, sampling, thread};
use crate::world::{At, CYCLES, Nowhere, SHORTEST};

/// VPMU-D-6.6-1.
#[test]
fn n_events_make_n_over_p_records() {
    let mut rig = Rig::new();
    for (n, period) in [(10, 1), (100, 7), (99, 100), (100, 100), (1000, 33)] {
        let request = sampling(open_of(KIND_MARK, 5, 0), period);
        let reply = rig.open_reply(&request);
        assert_eq!(reply.engine.get(), ENGINE_EXIT);
        let event = reply.id.get();
        let mut ring = rig.map(event, 16);
        rig.command(0, COMMAND_ENABLE, event);
        for mark in 0..n {
            rig.mark(0, 5, 0x1000 + mark);
            rig.mark(0, 6, 0);
        }
        assert_eq!(rig.value(0, event), n);
        let samples = ring.samples();
        assert_eq!(samples.len() as u64, n / period, "{n} over {period}");
        for (index, sample) in (1..).zip(&samples) {
            assert_eq!(
                sample.ip,
                0x1000 + index * period - 1,
                "the sample is of the mark that completed the period"
            );
            assert_eq!((sample.id, sample.stream_id), (event, event));
            assert_eq!((sample.cpu, sample.period), (0, period));
            assert!(sample.user && sample.time > TSC_OFFSET);
        }
        assert!(samples.windows(2).all(|two| two[0].time < two[1].time));
        rig.close(event).expect("closed");
    }
    assert_eq!(rig.vpmu.metrics().samples_lost, 0);
}

#[test]
fn samples_of_two_vcpus_do_not_mix() {
    let mut rig = Rig::new();
    let events = [0, 1].map(|vcpu| {
        let event = rig
            .open(&sampling(open_of(KIND_MARK, 5, vcpu), 2))
            .expect("open");
        rig.command(vcpu, COMMAND_ENABLE, event);
        event
    });
    let mut rings = events.map(|event| rig.map(event, 8));
    for _ in 0..100 {
        rig.mark(0, 5, 10);
        rig.mark(1, 5, u64::MAX);
        rig.mark(1, 5, u64::MAX);
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
    let mut rig = Rig::new();
    let event = rig
        .open(&sampling(open_of(KIND_EXITS, EXIT_IO, 1), 3))
        .expect("open");
    let mut ring = rig.map(event, 2);
    rig.command(1, COMMAND_ENABLE, event);
    for exit in 0..100 {
        rig.exit(1, ExitReason::Io, &mut At(exit));
        rig.exit(1, ExitReason::Hlt, &mut At(0));
        rig.exit(0, ExitReason::Io, &mut At(0));
    }
    let at: Vec<u64> = ring.samples().iter().map(|sample| sample.ip).collect();
    assert_eq!(at, (0..33).map(|n| 3 * n + 2).collect::<Vec<_>>());
    assert_eq!(rig.value(1, event), 100);
}

#[test]
fn exits_of_every_reason_share_one_period() {
    let mut rig = Rig::new();
    let event = rig
        .open(&sampling(open_of(KIND_EXITS, EXIT_USER, 0), 5))
        .expect("open");
    let mut ring = rig.map(event, 2);
    rig.command(0, COMMAND_ENABLE, event);
    let reasons = [
        ExitReason::Io,
        ExitReason::Mmio,
        ExitReason::Hlt,
        ExitReason::Signal,
        ExitReason::Other,
    ];
    for exit in 0..100 {
        for (index, reason) in (0..).zip(reasons) {
            rig.exit(0, reason, &mut At(10 * exit + index));
        }
    }
    let at: Vec<u64> = ring.samples().iter().map(|sample| sample.ip).collect();
    assert_eq!(at, (0..100).map(|n| 10 * n + 4).collect::<Vec<_>>());
}

#[test]
fn host_overflows_become_samples_at_the_exit() {
    let mut rig = Rig::new();
    let (kind, config) = CYCLES;
    let event = rig
        .open(&sampling(open_of(kind, config, 0), 100))
        .expect("open");
    let mut ring = rig.map(event, 2);
    assert!(!rig.vcpus.wants_registers(0));
    rig.command(0, COMMAND_ENABLE, event);
    assert!(rig.vcpus.wants_registers(0) && !rig.vcpus.wants_registers(1));
    rig.world.work(thread(0), 250, 4);
    rig.exit(0, ExitReason::Signal, &mut At(0x4000));
    assert_eq!(rig.vpmu.metrics().overflow_exits, 1);
    // The device finds the third overflow at an MMIO exit, before the overflow's signal causes an exit.
    rig.world.work(thread(0), 60, 4);
    rig.vcpus.leave(0, ExitReason::Mmio, &mut At(0x5000));
    let samples = ring.samples();
    let ips: Vec<u64> = samples.iter().map(|sample| sample.ip).collect();
    assert_eq!(ips, [0x4000, 0x4000, 0x5000]);
    assert!(samples.iter().all(|sample| sample.period == 100));
    rig.command(0, COMMAND_DISABLE, event);
    assert!(!rig.vcpus.wants_registers(0));
    rig.world.work(thread(0), 1000, 4);
    rig.exit(0, ExitReason::Signal, &mut At(0));
    assert_eq!(ring.samples(), []);
}

#[test]
fn overflows_between_exit_and_schedule_out_belong_to_the_exit_and_the_task() {
    let mut rig = Rig::new();
    let runs = |rig: &Rig, tid: u32| {
        let task = TaskPage {
            pid: 41.into(),
            tid: tid.into(),
            ..TaskPage::default()
        };
        rig.memory
            .write_slice(&task.as_bytes()[..8], GuestAddress(0x8000))
            .expect("in memory");
    };
    rig.control(&TaskPageRequest {
        header: Rig::header(CONTROL_TASK_PAGE, 0),
        vcpu: 1.into(),
        reserved: 0.into(),
        address: 0x8000.into(),
    })
    .expect("set");
    let (kind, config) = CYCLES;
    let request = OpenRequest {
        flags: OPEN_ENABLED.into(),
        ..sampling(open_of(kind, config, CONTEXT_TASK), 100)
    };
    let event = rig.open(&request).expect("open");
    let mut ring = rig.map(event, 2);
    runs(&rig, 42);
    rig.command(1, COMMAND_IN, event);
    rig.vcpus.leave(1, ExitReason::Mmio, &mut At(0x7000));
    rig.world.work(thread(1), 100, 4);
    // The task page already shows the next task when the event is scheduled out.
    runs(&rig, 43);
    rig.queues[3].request(command(COMMAND_OUT, event).as_bytes(), 40);
    rig.vcpus.kick(1, 3);
    assert_eq!(rig.queues[3].answer().map(|answer| answer.len()), Some(40));
    let samples = ring.samples();
    assert_eq!(samples.len(), 1);
    assert_eq!((samples[0].ip, samples[0].cpu), (0x7000, 1));
    assert_eq!((samples[0].pid, samples[0].tid), (41, 42));
}

#[test]
fn overflow_found_on_a_running_vcpu_has_no_position() {
    let mut rig = Rig::new();
    let (kind, config) = CYCLES;
    let request = OpenRequest {
        flags: OPEN_ENABLED.into(),
        ..sampling(open_of(kind, config, 0), 100)
    };
    let event = rig.open(&request).expect("open");
    let mut ring = rig.map(event, 2);
    rig.exit(0, ExitReason::Mmio, &mut At(0x7000));
    // The counter overflows while the vCPU is back in the guest. Then another vCPU disables the event.
    rig.world.work(thread(0), 100, 4);
    let reply = rig.command(1, COMMAND_DISABLE, event);
    assert_eq!((reply.status.get(), reply.lost.get()), (0, 1));
    let lost = Record::Lost { id: event, lost: 1 };
    assert_eq!(ring.take(usize::MAX), [lost]);
}

/// VPMU-D-6.6-3.
#[test]
fn sample_in_an_excluded_mode_is_lost() {
    let mut rig = Rig::new();
    let (kind, config) = CYCLES;
    let event = rig
        .open(&OpenRequest {
            flags: OPEN_EXCLUDE_USER.into(),
            ..sampling(open_of(kind, config, 0), 100)
        })
        .expect("open");
    let mut ring = rig.map(event, 2);
    rig.command(0, COMMAND_ENABLE, event);
    rig.world.work(thread(0), 100, 4);
    // `At` reports user mode.
    rig.exit(0, ExitReason::Signal, &mut At(0x4000));
    assert_eq!(ring.samples(), []);
    assert_eq!(rig.vpmu.metrics().samples_lost, 1);
}

#[test]
fn new_period_counts_from_its_command() {
    let mut rig = Rig::new();
    let event = rig
        .open(&sampling(open_of(KIND_MARK, 5, 0), 10))
        .expect("open");
    let mut ring = rig.map(event, 2);
    rig.command(0, COMMAND_ENABLE, event);
    let mark = |rig: &Rig, times| (0..times).for_each(|_| rig.mark(0, 5, 1));
    mark(&rig, 9);
    let period = |value: u64| Command {
        value: value.into(),
        ..command(COMMAND_PERIOD, event)
    };
    assert_eq!(rig.commands(0, &[period(4)])[0].status.get(), 0);
    mark(&rig, 8);
    let samples = ring.samples();
    assert_eq!(samples.len(), 2);
    assert!(samples.iter().all(|sample| sample.period == 4));
    for wrong in [0, 1 << 63] {
        let refused = rig.commands(0, &[period(wrong)])[0];
        assert_eq!(refused.status.get(), libc::EINVAL.unsigned_abs());
        assert_eq!(refused.state.get(), STATE_ACTIVE);
    }

    let (kind, config) = CYCLES;
    let host = rig
        .open(&sampling(open_of(kind, config, 0), SHORTEST))
        .expect("open");
    let short = Command {
        value: (SHORTEST - 1).into(),
        ..command(COMMAND_PERIOD, host)
    };
    let refused = rig.commands(0, &[short])[0];
    assert_eq!(refused.status.get(), libc::EINVAL.unsigned_abs());
    let short = sampling(open_of(kind, config, 0), SHORTEST - 1);
    assert_eq!(rig.open(&short), Err(libc::EOPNOTSUPP));
}

#[test]
fn children_write_to_their_parents_ring() {
    let mut rig = Rig::new();
    let parent = rig
        .open(&sampling(open_of(KIND_MARK, 5, 0), 1))
        .expect("open");
    let child_of = |of: u64, vcpu| OpenRequest {
        parent: of.into(),
        flags: OPEN_ENABLED.into(),
        ..sampling(open_of(KIND_MARK, 5, vcpu), 1)
    };
    let child = rig.open(&child_of(parent, 1)).expect("open");
    let grandchild = rig.open(&child_of(child, 1)).expect("open");
    let mut ring = rig.map(parent, 2);
    rig.mark(1, 5, 1);
    let ids = |samples: Vec<Sample>| -> Vec<_> {
        samples.iter().map(|s| (s.id, s.stream_id, s.cpu)).collect()
    };
    assert_eq!(
        ids(ring.samples()),
        [(parent, child, 1), (parent, grandchild, 1)]
    );
    rig.close(parent).expect("closed");
    rig.mark(1, 5, 1);
    assert_eq!(
        ring.samples().len(),
        2,
        "the ring remains while events write to it"
    );
    rig.close(child).expect("closed");
    rig.close(grandchild).expect("closed");
    assert_eq!(rig.open(&child_of(parent, 0)), Err(libc::EINVAL));
}

#[test]
fn sample_task_is_read_from_the_task_page() {
    let mut rig = Rig::new();
    let event = rig
        .open(&sampling(open_of(KIND_MARK, 5, 1), 1))
        .expect("open");
    let mut ring = rig.map(event, 2);
    rig.command(1, COMMAND_ENABLE, event);
    rig.mark(1, 5, 1);
    let page = |address: u64| TaskPageRequest {
        header: Rig::header(CONTROL_TASK_PAGE, 0),
        vcpu: 1.into(),
        reserved: 0.into(),
        address: address.into(),
    };
    rig.control(&page(0x8000)).expect("set");
    let task = TaskPage {
        pid: 41.into(),
        tid: 42.into(),
        ..TaskPage::default()
    };
    rig.memory
        .write_slice(&task.as_bytes()[..8], GuestAddress(0x8000))
        .expect("in memory");
    rig.mark(1, 5, 1);
    rig.control(&page(0)).expect("taken away");
    rig.mark(1, 5, 1);
    let tasks: Vec<_> = ring.samples().iter().map(|s| (s.pid, s.tid)).collect();
    assert_eq!(tasks, [(0, 0), (41, 42), (0, 0)]);
}

#[test]
fn waiting_wakeups_share_one_notice_and_interrupt() {
    let mut rig = Rig::new();
    let request = OpenRequest {
        wakeup: 10.into(),
        ..sampling(open_of(KIND_MARK, 5, 0), 1)
    };
    let event = rig.open(&request).expect("open");
    rig.map(event, 8);
    rig.command(0, COMMAND_ENABLE, event);
    let before = rig.world.interrupts();
    (0..35).for_each(|_| rig.mark(0, 5, 1));
    assert_eq!(rig.vpmu.metrics().wakeups, 3);
    assert_eq!(
        rig.world.interrupts(),
        before,
        "the notice waits for a buffer"
    );
    rig.post_notice(0, 16);
    assert_eq!(rig.notice(), Some((NOTICE_WAKEUP, event)));
    assert_eq!(rig.world.interrupts(), before + 1);
    rig.post_notice(1, 16);
    assert_eq!(
        rig.notice(),
        None,
        "one notice represents all three wakeups"
    );
    (0..5).for_each(|_| rig.mark(0, 5, 1));
    assert_eq!(rig.notice(), Some((NOTICE_WAKEUP, event)));
    assert_eq!(rig.vpmu.metrics().notices, 2);
    assert_eq!(rig.vpmu.metrics().interrupts, rig.world.interrupts());
}

#[test]
fn sample_without_registers_is_lost() {
    let mut rig = Rig::new();
    let event = rig
        .open(&sampling(open_of(KIND_MARK, 5, 0), 1))
        .expect("open");
    let mut ring = rig.map(event, 2);
    rig.command(0, COMMAND_ENABLE, event);
    rig.vcpus.mark(0, 5, &mut Nowhere);
    assert_eq!(ring.samples(), []);
    rig.command(0, COMMAND_READ, event);
    assert_eq!(
        ring.take(1),
        [crate::reader::Record::Lost { id: event, lost: 1 }]
    );
}

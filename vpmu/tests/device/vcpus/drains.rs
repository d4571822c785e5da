//! During notifications, marks, exits and overflows of a vCPU, the device drains and reads only the host counters of
//! that vCPU.

use vpmu::ExitReason;
use vpmu::abi::*;
use vpmu::source::{Mode, Overflow};

use super::{done, each, task_event};
use crate::rig::{Rig, open_of, sampling, thread};
use crate::world::{At, CYCLES, FAULTS};

/// Opens sampling events of both engines on each vCPU, and maps their rings.
fn sampled(rig: &mut Rig) -> [u64; 4] {
    let mut events = [0; 4];
    let engines = [ENGINE_EXIT, ENGINE_BATCHED];
    let all = [0, 1].map(|vcpu| engines.map(|engine| (vcpu, engine)));
    for (event, (vcpu, engine)) in events.iter_mut().zip(all.into_iter().flatten()) {
        let request = OpenRequest {
            engine: engine.into(),
            flags: OPEN_ENABLED.into(),
            ..sampling(open_of(CYCLES.0, CYCLES.1, vcpu), 100)
        };
        *event = rig.open(&request).expect("open");
        rig.map(*event, 4);
    }
    events
}

fn record(rig: &Rig, vcpu: u32) {
    let overflow = Overflow {
        tsc: rig.world.now(),
        ip: 3,
        mode: Mode::Guest,
        period: 100,
    };
    rig.world.record(thread(vcpu), overflow);
}

#[test]
fn notifications_marks_exits_and_overflows_visit_counters_of_their_vcpu_only() {
    let mut rig = Rig::new();
    rig.world.know_ips();
    let events = sampled(&mut rig);
    let marks = OpenRequest {
        flags: OPEN_ENABLED.into(),
        ..sampling(open_of(KIND_MARK, 5, 0), 1)
    };
    rig.open(&marks).expect("open");
    let tasks = [FAULTS, CYCLES].map(|(kind, config)| rig.open(&task_event(kind, config)));
    let tasks = tasks.map(|opened| opened.expect("open"));
    for vcpu in [1, 0] {
        rig.commands(vcpu, &each(COMMAND_IN, &tasks));
        rig.commands(vcpu, &each(COMMAND_OUT, &tasks));
    }
    let step = |rig: &mut Rig, what: &str, act: &dyn Fn(&mut Rig)| {
        (0..2).for_each(|vcpu| record(rig, vcpu));
        let before = [0, 1].map(|vcpu| rig.world.visits(thread(vcpu)));
        act(rig);
        let after = [0, 1].map(|vcpu| rig.world.visits(thread(vcpu)));
        assert!(
            after[0] != before[0],
            "{what} visits no counter of its vCPU"
        );
        assert_eq!(
            after[1], before[1],
            "{what}: visits to counters of the other vCPU"
        );
    };
    step(&mut rig, "a read", &|rig| {
        done(rig, 0, COMMAND_READ, events[0]);
    });
    step(&mut rig, "a switch", &|rig| {
        rig.commands(0, &each(COMMAND_IN, &tasks));
        rig.commands(0, &each(COMMAND_OUT, &tasks));
    });
    step(&mut rig, "a flush", &|rig| {
        assert_eq!(rig.flush(0, events[0]), 0);
    });
    step(&mut rig, "a mark", &|rig| rig.mark(0, 5, 1));
    step(&mut rig, "an exit", &|rig| {
        rig.exit(0, ExitReason::Io, &mut At(1));
    });
    step(&mut rig, "an overflow", &|rig| {
        rig.world.work(thread(0), 100, 4);
        rig.exit(0, ExitReason::Signal, &mut At(1));
    });
    step(&mut rig, "a disable", &|rig| {
        done(rig, 0, COMMAND_DISABLE, events[0]);
    });
}

#[test]
fn switch_reads_each_shared_counter_once() {
    let mut rig = Rig::new();
    let mut task = || -> Vec<u64> {
        let open = |(kind, config)| rig.open(&task_event(kind, config)).expect("open");
        [FAULTS, CYCLES].repeat(10).into_iter().map(open).collect()
    };
    let (one, other) = (task(), task());
    for task in [&one, &other] {
        rig.commands(0, &each(COMMAND_IN, task));
        rig.commands(0, &each(COMMAND_OUT, task));
    }
    assert_eq!(
        rig.world.open_counters(),
        2,
        "forty events share two counters"
    );
    rig.commands(0, &each(COMMAND_IN, &one));
    let (drains, reads) = rig.world.visits(thread(0));
    let switch = [each(COMMAND_OUT, &one), each(COMMAND_IN, &other)].concat();
    rig.commands(0, &switch);
    assert_eq!(rig.world.visits(thread(0)), (drains, reads + 2));
}

#[test]
fn drain_visits_every_vcpu_with_records_to_collect() {
    let mut rig = Rig::new();
    rig.world.know_ips();
    sampled(&mut rig);
    rig.world.pass(100_000_000);
    (0..2).for_each(|vcpu| record(&rig, vcpu));
    rig.world.pass(100_000_000);
    let written = rig.vpmu.metrics().samples_written;
    let before = [0, 1].map(|vcpu| rig.world.visits(thread(vcpu)).0);
    rig.vpmu.drain();
    let after = [0, 1].map(|vcpu| rig.world.visits(thread(vcpu)).0);
    assert_eq!(after, before.map(|drains| drains + 1));
    assert_eq!(rig.vpmu.metrics().samples_written, written + 2);
}

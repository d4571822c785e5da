//! During notifications, marks, exits and overflows of a vCPU, the device drains and reads only the host counters of
//! that vCPU.

use vpmu::ExitReason;
use vpmu::abi::*;
use vpmu::source::{Mode, Overflow};
use vpmu_testkit::{At, CYCLES, FAULTS, Fields, Fixture, open_of, thread};

use super::{done, each, task_event};

/// Opens sampling events of both engines on each vCPU, and maps their rings.
fn sampled(fixture: &mut Fixture) -> [u64; 4] {
    let mut events = [0; 4];
    let engines = [ENGINE_EXIT, ENGINE_BATCHED];
    let all = [0, 1].map(|vcpu| engines.map(|engine| (vcpu, engine)));
    for (event, (vcpu, engine)) in events.iter_mut().zip(all.into_iter().flatten()) {
        let request = open_of(CYCLES.0, CYCLES.1, vcpu).sampled(100).engine(engine).flags(OPEN_ENABLED);
        *event = fixture.opened(&request);
        fixture.map(*event, 4);
    }
    events
}

fn record(fixture: &Fixture, vcpu: u32) {
    let overflow = Overflow { tsc: fixture.host.now(), ip: 3, mode: Mode::Guest, period: 100 };
    fixture.host.record(thread(vcpu), overflow);
}

#[test]
fn notifications_marks_exits_and_overflows_visit_counters_of_their_vcpu_only() {
    let mut fixture = Fixture::new();
    fixture.host.know_ips();
    let events = sampled(&mut fixture);
    fixture.opened(&open_of(KIND_MARK, 5, 0).sampled(1).flags(OPEN_ENABLED));
    let tasks = [FAULTS, CYCLES].map(|(kind, config)| fixture.opened(&task_event(kind, config)));
    for vcpu in [1, 0] {
        fixture.commands(vcpu, &each(COMMAND_IN, &tasks));
        fixture.commands(vcpu, &each(COMMAND_OUT, &tasks));
    }
    let step = |fixture: &mut Fixture, what: &str, act: &dyn Fn(&mut Fixture)| {
        (0..2).for_each(|vcpu| record(fixture, vcpu));
        let before = [0, 1].map(|vcpu| fixture.host.visits(thread(vcpu)));
        act(fixture);
        let after = [0, 1].map(|vcpu| fixture.host.visits(thread(vcpu)));
        assert!(after[0] != before[0], "{what} visits no counter of its vCPU");
        assert_eq!(after[1], before[1], "{what}: visits to counters of the other vCPU");
    };
    step(&mut fixture, "a read", &|fixture| {
        done(fixture, 0, COMMAND_READ, events[0]);
    });
    step(&mut fixture, "a switch", &|fixture| {
        fixture.commands(0, &each(COMMAND_IN, &tasks));
        fixture.commands(0, &each(COMMAND_OUT, &tasks));
    });
    step(&mut fixture, "a flush", &|fixture| {
        assert_eq!(fixture.flush(0, events[0]), 0);
    });
    step(&mut fixture, "a mark", &|fixture| fixture.mark(0, 5, 1));
    step(&mut fixture, "an exit", &|fixture| {
        fixture.exit(0, ExitReason::Io, &mut At(1));
    });
    step(&mut fixture, "an overflow", &|fixture| {
        fixture.host.work(thread(0), 100, 4);
        fixture.exit(0, ExitReason::Signal, &mut At(1));
    });
    step(&mut fixture, "a disable", &|fixture| {
        done(fixture, 0, COMMAND_DISABLE, events[0]);
    });
}

#[test]
fn switch_reads_each_shared_counter_once() {
    let mut fixture = Fixture::new();
    let mut task = || -> Vec<u64> {
        let open = |(kind, config)| fixture.opened(&task_event(kind, config));
        [FAULTS, CYCLES].repeat(10).into_iter().map(open).collect()
    };
    let (one, other) = (task(), task());
    for task in [&one, &other] {
        fixture.commands(0, &each(COMMAND_IN, task));
        fixture.commands(0, &each(COMMAND_OUT, task));
    }
    assert_eq!(fixture.host.open_counters(), 2, "forty events share two counters");
    fixture.commands(0, &each(COMMAND_IN, &one));
    let (drains, reads) = fixture.host.visits(thread(0));
    let switch = [each(COMMAND_OUT, &one), each(COMMAND_IN, &other)].concat();
    fixture.commands(0, &switch);
    assert_eq!(fixture.host.visits(thread(0)), (drains, reads + 2));
}

#[test]
fn drain_visits_every_vcpu_with_records_to_collect() {
    let mut fixture = Fixture::new();
    fixture.host.know_ips();
    sampled(&mut fixture);
    fixture.host.pass(100_000_000);
    (0..2).for_each(|vcpu| record(&fixture, vcpu));
    fixture.host.pass(100_000_000);
    let written = fixture.vpmu.metrics().samples_written;
    let before = [0, 1].map(|vcpu| fixture.host.visits(thread(vcpu)).0);
    fixture.vpmu.drain();
    let after = [0, 1].map(|vcpu| fixture.host.visits(thread(vcpu)).0);
    assert_eq!(after, before.map(|drains| drains + 1));
    assert_eq!(fixture.vpmu.metrics().samples_written, written + 2);
}

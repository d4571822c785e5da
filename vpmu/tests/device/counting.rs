//! Counts and their times.

use vpmu::ExitReason;
use vpmu::abi::*;
use vpmu_testkit::{At, CYCLES, FAULTS, Fields, Fixture, command, open_of, thread};

/// VPMU-D-6.2-4.
#[test]
fn marks_count_by_value_and_vcpu() {
    let mut fixture = Fixture::new();
    let events = [0, 1].map(|vcpu| fixture.opened(&open_of(KIND_MARK, 5, vcpu)));
    fixture.mark(0, 5, 0);
    for (vcpu, &event) in (0..).zip(&events) {
        fixture.command(vcpu, COMMAND_ENABLE, event);
    }
    for _ in 0..300 {
        fixture.mark(0, 5, 0);
        fixture.mark(0, 6, 0);
        fixture.mark(1, 5, 0);
        fixture.mark(1, 5, 0);
    }
    assert_eq!(fixture.value(0, events[0]), 300);
    assert_eq!(fixture.value(1, events[1]), 600);
    assert_eq!(fixture.vpmu.metrics().marks, 1201);
}

/// VPMU-D-6.2-4.
#[test]
fn each_exit_counts_once_by_reason() {
    let mut fixture = Fixture::new();
    let reasons = [
        (EXIT_IO, ExitReason::Io, 3),
        (EXIT_HLT, ExitReason::Hlt, 5),
        (EXIT_SIGNAL, ExitReason::Signal, 7),
        (EXIT_OTHER, ExitReason::Other, 11),
        (EXIT_MMIO, ExitReason::Mmio, 13),
    ];
    let events = reasons.map(|(config, ..)| {
        let event = fixture.opened(&open_of(KIND_EXITS, config, 0));
        assert_eq!(fixture.command(0, COMMAND_ENABLE, event).status.get(), 0);
        event
    });
    let all = fixture.opened(&open_of(KIND_EXITS, EXIT_USER, 0).flags(OPEN_ENABLED));
    let before: Vec<_> = events.map(|event| fixture.value(0, event)).to_vec();
    let all_before = fixture.value(0, all);
    for (_, reason, times) in reasons {
        for _ in 0..times {
            fixture.exit(0, reason, &mut At(0));
            fixture.exit(1, reason, &mut At(0));
        }
    }
    // Each command causes an exit. The count also includes the exit of the command that reads it.
    let own = 1;
    assert_eq!(fixture.value(0, all) - all_before, 3 + 5 + 7 + 11 + 13 + own);
    for (index, (config, _, times)) in reasons.into_iter().enumerate() {
        let grown = fixture.value(0, events[index]) - before[index];
        if config == EXIT_MMIO {
            // The event also counts the exits of seven commands: two that read `all`, four that read the other events,
            // and one that reads this event.
            assert_eq!(grown, times + 2 + 4 + own);
        } else {
            assert_eq!(grown, times, "reason {config}");
        }
    }
    assert_eq!(fixture.vpmu.exits(0).io, 3);
    assert_eq!(fixture.vpmu.exits(1).total(), 3 + 5 + 7 + 11 + 13);
}

#[test]
fn exits_count_by_the_statistics() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&open_of(KIND_EXITS, EXIT_ALL, 1));
    fixture.host.add_exits(99);
    fixture.command(1, COMMAND_ENABLE, event);
    fixture.host.add_exits(1000);
    assert_eq!(fixture.value(1, event), 1000);
    assert_eq!(fixture.open(&open_of(KIND_HALTS, 0, 0)), Err(libc::ENOENT), "the statistics have no halts");
}

#[test]
fn tsc_ticks_equal_the_times() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&open_of(KIND_TSC, 0, 0).flags(OPEN_ENABLED));
    fixture.host.pass(1_000_000);
    let reply = fixture.command(0, COMMAND_DISABLE, event);
    let ticks = reply.value.get();
    assert!((1_000_000..1_000_020).contains(&ticks), "{ticks} ticks in 1,000,000 ns");
    // A tick is a nanosecond here. The device reads the clock first for the count and then for the times. Each read
    // advances the clock by a tick.
    assert!(reply.time_enabled.get().abs_diff(ticks) <= 2, "the enabled time is not {ticks} ns: {reply:?}");
    assert_eq!(reply.time_enabled, reply.time_running);
    fixture.host.pass(1_000_000);
    let later = fixture.read(0, event);
    assert_eq!((later.value, later.time_enabled), (reply.value, reply.time_enabled));
    assert_eq!(later.state.get(), STATE_OFF);
}

#[test]
fn guest_time_is_thread_time_inside_the_run_call() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&open_of(KIND_GUEST_TIME, 0, 0));
    fixture.command(0, COMMAND_ENABLE, event);
    fixture.host.spend(5000);
    fixture.vcpus.leave(0, ExitReason::Io, &mut At(0));
    fixture.host.spend(70_000);
    fixture.vcpus.enter(0);
    fixture.host.spend(300);
    assert_eq!(fixture.value(0, event), 5300);
}

#[test]
fn host_counter_counts_while_its_event_does() {
    let mut fixture = Fixture::new();
    let (kind, config) = CYCLES;
    let event = fixture.opened(&open_of(kind, config, 1));
    fixture.host.work(thread(1), 1000, 4);
    fixture.command(1, COMMAND_ENABLE, event);
    fixture.host.work(thread(1), 100, 4);
    fixture.host.work(thread(0), 7000, 4);
    assert_eq!(fixture.value(1, event), 100);
    fixture.command(1, COMMAND_DISABLE, event);
    fixture.host.work(thread(1), 1000, 4);
    assert_eq!(fixture.value(1, event), 100);
    fixture.command(1, COMMAND_RESET, event);
    fixture.command(1, COMMAND_ENABLE, event);
    fixture.host.work(thread(1), 11, 4);
    assert_eq!(fixture.value(1, event), 11);
    assert_eq!(fixture.host.open_counters(), 1);
    fixture.close(event).expect("closed");
    assert_eq!(fixture.host.open_counters(), 0);
}

/// VPMU-D-6.1-2.
#[test]
fn multiplexed_counter_shows_in_the_times() {
    let mut fixture = Fixture::new();
    let (kind, config) = CYCLES;
    let event = fixture.opened(&open_of(kind, config, 0).flags(OPEN_ENABLED));
    fixture.host.pass(1_000_000);
    fixture.host.work(thread(0), 1000, 1);
    let reply = fixture.read(0, event);
    let (enabled, running) = (reply.time_enabled.get(), reply.time_running.get());
    assert!(enabled >= 1_000_000);
    assert_eq!(running, enabled / 4);
}

#[test]
fn task_event_follows_in_and_out_across_vcpus() {
    let mut fixture = Fixture::new();
    let (kind, config) = FAULTS;
    let request = open_of(kind, config, CONTEXT_TASK).flags(OPEN_ENABLED);
    let event = fixture.opened(&request);
    let other = fixture.opened(&request);
    assert_eq!(fixture.read(0, event).state.get(), STATE_INACTIVE);
    for round in 0..10 {
        let vcpu = round % 2;
        let reply = fixture.command(vcpu, COMMAND_IN, event);
        assert_eq!((reply.status.get(), reply.state.get()), (0, STATE_ACTIVE));
        fixture.host.work(thread(vcpu), 10, 4);
        fixture.host.work(thread(1 - vcpu), 5000, 4);
        let switch = [command(COMMAND_OUT, event), command(COMMAND_IN, other)];
        let kicks = fixture.vpmu.metrics().kicks[vcpu as usize];
        let replies = fixture.commands(vcpu, &switch);
        assert_eq!(fixture.vpmu.metrics().kicks[vcpu as usize], kicks + 1);
        assert_eq!(replies[0].value.get(), 10 * (u64::from(round) + 1));
        fixture.host.work(thread(vcpu), 3, 4);
        fixture.command(vcpu, COMMAND_OUT, other);
        fixture.host.work(thread(vcpu), 9000, 4);
    }
    assert_eq!(fixture.value(0, event), 100);
    assert_eq!(fixture.value(1, other), 30);
}

#[test]
fn in_and_out_are_matched() {
    let mut fixture = Fixture::new();
    let task = fixture.opened(&open_of(KIND_MARK, 1, CONTEXT_TASK));
    let on_vcpu = fixture.opened(&open_of(KIND_MARK, 1, 0));
    let status = |fixture: &mut Fixture, vcpu, op, event| {
        i32::try_from(fixture.command(vcpu, op, event).status.get()).expect("an errno")
    };
    assert_eq!(status(&mut fixture, 0, COMMAND_OUT, task), libc::EINVAL);
    assert_eq!(status(&mut fixture, 0, COMMAND_IN, on_vcpu), libc::EINVAL);
    assert_eq!(status(&mut fixture, 0, COMMAND_IN, task), 0);
    assert_eq!(status(&mut fixture, 0, COMMAND_IN, task), libc::EINVAL);
    assert_eq!(status(&mut fixture, 1, COMMAND_IN, task), libc::EINVAL);
    assert_eq!(status(&mut fixture, 1, COMMAND_OUT, task), libc::EINVAL);
    // The event is enabled while it is scheduled in, so it counts from here on.
    assert_eq!(status(&mut fixture, 0, COMMAND_ENABLE, task), 0);
    fixture.mark(0, 1, 0);
    fixture.mark(1, 1, 0);
    let out = fixture.command(0, COMMAND_OUT, task);
    assert_eq!((out.value.get(), out.state.get()), (1, STATE_INACTIVE));
}

/// VPMU-G-2-1.
#[test]
fn queue_of_another_vcpu_is_refused() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&open_of(KIND_MARK, 1, 0));
    let batch = [command(COMMAND_VCPU, 0), command(COMMAND_ENABLE, event)];
    let replies = fixture.commands_from(0, 1, &batch);
    assert_eq!((replies[0].status.get(), replies[0].value.get()), (0, 1));
    assert_eq!(replies[1].status.get(), libc::EXDEV.unsigned_abs());
    assert_eq!(replies[1].state.get(), STATE_OFF);
}

#[test]
fn pinned_event_that_shares_the_hosts_counter_is_in_error() {
    let mut fixture = Fixture::new();
    let (kind, config) = CYCLES;
    let pinned = open_of(kind, config, 0).flags(OPEN_PINNED | OPEN_ENABLED);
    let counting = fixture.opened(&pinned);
    let events = [counting, fixture.opened(&pinned.sampled(1000))];
    // The device does not pin the counter on the host, because a pinned counter would keep the host's other events off
    // the PMU.
    assert_eq!(fixture.host.pinned(), 0);
    fixture.host.work(thread(0), 100, 4);
    for event in events {
        assert_eq!(fixture.value(0, event), 100);
    }
    fixture.host.work(thread(0), 100, 3);
    for event in events {
        let reply = fixture.command(0, COMMAND_READ, event);
        assert_eq!(reply.status.get(), libc::EIO.unsigned_abs());
        assert_eq!((reply.state.get(), reply.value.get()), (STATE_ERROR, 100));
    }
}

/// VPMU-D-6.1-3, VPMU-D-6.1-6.
#[test]
fn lost_backing_puts_the_event_in_error() {
    let mut fixture = Fixture::new();
    let (kind, config) = CYCLES;
    let event = fixture.opened(&open_of(kind, config, 0).flags(OPEN_ENABLED));
    fixture.host.work(thread(0), 100, 4);
    assert_eq!(fixture.value(0, event), 100);
    fixture.post_notice(0, 16);
    fixture.host.break_host();
    let reply = fixture.command(0, COMMAND_READ, event);
    assert_eq!(reply.status.get(), libc::EIO.unsigned_abs());
    assert_eq!((reply.state.get(), reply.value.get()), (STATE_ERROR, 100));
    assert_eq!(fixture.notice(), Some((NOTICE_ERROR, event)));
    assert_eq!(fixture.open(&open_of(kind, config, 0)), Err(libc::EMFILE), "the status is the errno of the host");
    fixture.close(event).expect("closed");
}

/// VPMU-D-6.2-1.
#[test]
fn catalogue_lists_exactly_the_events_that_open() {
    let mut fixture = Fixture::new();
    let mut length = [0; 4];
    fixture.vpmu.read_config(16, &mut length);
    let entries = fixture.catalogue();
    assert_eq!(u32::from_le_bytes(length) as usize, entries.len());
    for entry in entries {
        let paced = entry.kind.get() == KIND_SAMPLE_TRACE;
        let event = fixture.open(&open_of(entry.kind.get(), entry.config.get(), 0));
        assert_eq!(event.err(), paced.then_some(libc::EINVAL), "{entry:?}");
        let request = open_of(entry.kind.get(), entry.config.get(), 0).period(1_000_000);
        let samples = entry.flags.get() & CATALOGUE_SAMPLES != 0;
        let opened = fixture.open(&request);
        assert_eq!(opened.err(), (!samples).then_some(libc::EOPNOTSUPP));
    }
}

#[test]
fn metadata_page_follows_the_count() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&open_of(KIND_MARK, 1, 0).flags(OPEN_ENABLED));
    let page = fixture.map(event, 0);
    fixture.mark(0, 1, 0);
    let reply = fixture.command(0, COMMAND_DISABLE, event);
    assert_eq!(page.field(16), 1);
    assert_eq!(page.field(24), reply.time_enabled.get());
    assert_eq!(page.field(32), reply.time_running.get());
    assert_eq!(page.field(8) & 1, 0, "`lock` is even after the write");
}

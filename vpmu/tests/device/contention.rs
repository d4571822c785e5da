//! A host that shares, revokes or refuses counters. The guest sees this in its events' times, states and replies.

use vpmu::abi::*;
use vpmu::{Hardware, Refusal};
use vpmu_testkit::{ALL_FEATURES, CYCLES, FAULTS, Fields, Fixture, limits, open_of, thread};

fn without_hardware() -> Fixture {
    Fixture::with_hardware(Hardware::default().with(|hardware| hardware.events = false))
}

fn config(fixture: &Fixture) -> Config {
    fixture.config()
}

/// Sends an open request. Returns the status and the host's reason.
fn answer(fixture: &mut Fixture, request: &OpenRequest) -> (i32, u32) {
    let reply = fixture.open_reply(request);
    let status = i32::try_from(reply.status.get()).expect("an errno");
    assert_eq!(reply.id.get() == 0, status != 0);
    (status, reply.engine.get())
}

fn of_host((kind, config): (u32, u64), context: u32) -> OpenRequest {
    open_of(kind, config, context)
}

#[test]
fn others_share_of_a_counter_shows_in_time_running() {
    let mut fixture = Fixture::new();
    for (request, seen) in
        [(of_host(CYCLES, 0), 1), (of_host(FAULTS, 0), 3), (of_host(CYCLES, 0).sampled(1_000_000), 2)]
    {
        let event = fixture.opened(&request);
        fixture.command(0, COMMAND_ENABLE, event);
        // The host's counter counts `seen` of every 4 events that happen.
        for _ in 0..100 {
            fixture.host.pass(4000);
            fixture.host.work(thread(0), 4000, seen);
            fixture.command(0, COMMAND_READ, event);
        }
        let reply = fixture.command(0, COMMAND_DISABLE, event);
        assert_eq!(reply.value.get(), 100_000 * seen);
        let [enabled, running] = [reply.time_enabled, reply.time_running].map(|time| time.get());
        assert!(enabled >= 400_000, "enabled for only {enabled} ns");
        assert!(
            running.abs_diff(enabled * seen / 4) < 1000,
            "ran for {running} of {enabled} ns, expected {seen}/4 of the enabled time"
        );
        fixture.close(event).expect("closed");
    }
}

/// Opens an event, makes the host revoke its counter, and checks that the reply to `op` and a notice report the loss,
/// but give no reason for it.
pub(crate) fn reports_lost_counter(fixture: &mut Fixture, request: &OpenRequest, op: u32) {
    let event = fixture.opened(request);
    fixture.post_notice(0, 16);
    fixture.command(0, COMMAND_ENABLE, event);
    fixture.host.work(thread(0), 40, 4);
    assert_eq!(fixture.value(0, event), 40);
    // The host gives the counter to another user. On a real host, read(2) on the perf event would now return end of
    // file.
    fixture.host.give_up(thread(0));
    let reply = fixture.command(0, op, event);
    assert_eq!(reply.status.get(), libc::EIO.unsigned_abs());
    assert_eq!((reply.state.get(), reply.value.get()), (STATE_ERROR, 40));
    let notice = fixture.whole_notice().expect("a notice");
    assert_eq!((notice.kind.get(), notice.event.get(), notice.value.get()), (NOTICE_ERROR, event, REFUSED_NOT.into()));
}

#[test]
fn counter_that_the_host_gives_up_is_an_error_without_a_reason() {
    for request in [of_host(CYCLES, 0), of_host(CYCLES, 0).sampled(1_000_000), of_host(FAULTS, 0).flags(OPEN_PINNED)] {
        reports_lost_counter(&mut Fixture::new(), &request, COMMAND_READ);
    }
}

/// VPMU-D-6.2-5.
#[test]
fn open_that_the_host_refuses_names_its_reason() {
    let mut fixture = Fixture::new();
    for (errno, reason) in [
        (libc::EBUSY, REFUSED_IN_USE),
        (libc::EOPNOTSUPP, REFUSED_IN_USE),
        (libc::EACCES, REFUSED_PERMISSION),
        (libc::EPERM, REFUSED_PERMISSION),
        (libc::EMFILE, REFUSED_DESCRIPTORS),
        (libc::ENFILE, REFUSED_DESCRIPTORS),
        (libc::ENOENT, REFUSED_ABSENT),
        (libc::ENODEV, REFUSED_ABSENT),
        (libc::ENOMEM, REFUSED_OTHER),
    ] {
        fixture.host.deny(errno);
        for request in [
            of_host(CYCLES, 0),
            of_host(CYCLES, CONTEXT_TASK),
            of_host(CYCLES, 0).sampled(100),
            open_of(KIND_SAMPLE_TRACE, PACE_CYCLES, 0),
        ] {
            let request = match request.kind.get() {
                KIND_SAMPLE_TRACE => request.period(100),
                _ => request,
            };
            let expected = (errno, u32::from(reason));
            assert_eq!(answer(&mut fixture, &request), expected, "{request:?}");
        }
        fixture.host.deny(0);
        let event = fixture.open(&of_host(CYCLES, 0)).expect("as before");
        fixture.close(event).expect("closed");
    }
    assert_eq!(fixture.host.open_counters(), 0);
}

#[test]
fn refusal_of_the_device_has_no_host_reason() {
    let limits = limits().with(|limits| limits.max_host_counters = 1);
    let mut fixture = Fixture::with(limits, ALL_FEATURES);
    let cycles = of_host(CYCLES, 0).sampled(100);
    fixture.open(&cycles).expect("within the limit");
    for (request, errno) in [
        (cycles, libc::EMFILE),
        (of_host((KIND_HARDWARE, 7), 0), libc::ENOENT),
        (of_host((KIND_RAW, 0), 0), libc::ENOENT),
        (of_host(FAULTS, 0).sampled(100), libc::EOPNOTSUPP),
        (of_host(CYCLES, 9), libc::EINVAL),
    ] {
        assert_eq!(answer(&mut fixture, &request), (errno, 0), "{request:?}");
    }
}

/// VPMU-D-6.2-5.
#[test]
fn event_that_another_vcpus_host_refuses_is_in_error_for_that_reason() {
    for sampled in [false, true] {
        let mut fixture = Fixture::new();
        let request = of_host(CYCLES, CONTEXT_TASK);
        let request = if sampled { request.sampled(1_000_000) } else { request };
        let event = fixture.opened(&request);
        fixture.post_notice(0, 16);
        fixture.command(0, COMMAND_ENABLE, event);
        fixture.command(0, COMMAND_IN, event);
        fixture.host.work(thread(0), 40, 4);
        fixture.command(0, COMMAND_OUT, event);
        // The task moves to another vCPU, where the event needs another counter.
        fixture.host.deny(libc::EBUSY);
        let reply = fixture.command(1, COMMAND_IN, event);
        assert_eq!(reply.status.get(), libc::EBUSY.unsigned_abs());
        assert_eq!((reply.state.get(), reply.value.get()), (STATE_ERROR, 40));
        let notice = fixture.whole_notice().expect("a notice");
        assert_eq!(
            (notice.kind.get(), notice.event.get(), notice.value.get()),
            (NOTICE_ERROR, event, REFUSED_IN_USE.into())
        );
        // When another event later loses its counter, the device does not report the reason for this refusal again.
        fixture.host.deny(0);
        let other = fixture.opened(&of_host(FAULTS, 0));
        fixture.post_notice(1, 16);
        fixture.command(0, COMMAND_ENABLE, other);
        fixture.host.give_up(thread(0));
        fixture.command(0, COMMAND_READ, other);
        let notice = fixture.whole_notice().expect("a notice");
        assert_eq!((notice.event.get(), notice.value.get()), (other, REFUSED_NOT.into()));
    }
}

/// VPMU-D-6.2-5.
#[test]
fn configuration_reports_why_a_kind_is_missing() {
    let fixture = Fixture::new();
    let why = |fixture: &Fixture| (config(fixture).refused_hardware, config(fixture).refused_software);
    assert_eq!(why(&fixture), (REFUSED_NOT, REFUSED_NOT));
    fixture.host.refuse_kind(KIND_HARDWARE, Refusal::InUse);
    fixture.host.refuse_kind(KIND_SOFTWARE, Refusal::Permission);
    assert_eq!(why(&fixture), (REFUSED_IN_USE, REFUSED_PERMISSION));
    let fixture = Fixture::new();
    fixture.host.refuse_kind(KIND_HARDWARE, Refusal::SeveralPmus);
    assert_eq!(why(&fixture), (REFUSED_SEVERAL_PMUS, REFUSED_NOT));
}

/// VPMU-D-6.2-3.
#[test]
fn hardware_that_the_operator_keeps_is_not_offered() {
    let mut fixture = without_hardware();
    let kept = [KIND_HARDWARE, KIND_HW_CACHE, KIND_RAW];
    for entry in fixture.catalogue() {
        let pace = (entry.kind.get(), entry.config.get());
        assert!(!kept.contains(&entry.kind.get()), "an event that the operator keeps is listed: {entry:?}");
        assert_ne!(pace, (KIND_SAMPLE_TRACE, PACE_CYCLES));
    }
    let trace = open_of(KIND_SAMPLE_TRACE, PACE_CYCLES, 0).period(100);
    for (request, errno) in [
        (of_host(CYCLES, 0), libc::ENOENT),
        (of_host(CYCLES, CONTEXT_TASK), libc::ENOENT),
        (of_host(CYCLES, 0).sampled(100), libc::ENOENT),
        (open_of(KIND_HW_CACHE, 0, 0), libc::ENOENT),
        (open_of(KIND_RAW, 0, 0), libc::ENOENT),
        (trace, libc::ENOENT),
    ] {
        assert_eq!(answer(&mut fixture, &request), (errno, 0), "{request:?}");
    }
    let persist = crate::persistent::asked("cycles", 0);
    let refused = fixture.vpmu.persist(&persist).expect_err("the operator cannot start it either");
    assert!(refused.to_string().contains("no event `cycles`"), "another error: {refused}");
    assert_eq!(config(&fixture).refused_hardware, REFUSED_POLICY);
    assert_eq!(fixture.host.asked(), [0; 0], "the host was not called");
    // Other events are not affected.
    let faults = fixture.opened(&of_host(FAULTS, 0));
    fixture.command(0, COMMAND_ENABLE, faults);
    fixture.host.work(thread(0), 40, 4);
    assert_eq!(fixture.value(0, faults), 40);
    assert_eq!(fixture.host.asked(), [KIND_SOFTWARE]);
}

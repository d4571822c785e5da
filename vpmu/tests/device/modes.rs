//! Events that the device itself counts, and the guest modes that these events exclude.

use vpmu::ExitReason;
use vpmu::abi::*;
use vpmu_testkit::{At, Fields, Fixture, Nowhere, open_of};

const KERNEL: u64 = u64::MAX;

fn open(fixture: &mut Fixture, request: OpenRequest, exclude: u32) -> u64 {
    let request = request.flags(exclude | OPEN_ENABLED);
    fixture.opened(&request)
}

#[test]
fn marks_and_exits_count_by_the_mode_at_the_exit() {
    let mut fixture = Fixture::new();
    let excludes = [0, OPEN_EXCLUDE_USER, OPEN_EXCLUDE_KERNEL, OPEN_EXCLUDE_USER | OPEN_EXCLUDE_KERNEL];
    let expected = [10, 7, 3, 0];
    let (mark, exit) = (open_of(KIND_MARK, 5, 0), open_of(KIND_EXITS, EXIT_IO, 0));
    let marks = excludes.map(|exclude| open(&mut fixture, mark, exclude));
    let exits = excludes.map(|exclude| open(&mut fixture, exit, exclude));
    assert!(fixture.vcpus.wants_registers(0));
    for ip in [1, KERNEL, KERNEL, 1, KERNEL, 1, KERNEL, KERNEL, KERNEL, KERNEL] {
        fixture.mark(0, 5, ip);
        fixture.exit(0, ExitReason::Io, &mut At(ip));
    }
    assert_eq!(marks.map(|id| fixture.value(0, id)), expected);
    assert_eq!(exits.map(|id| fixture.value(0, id)), expected);
}

#[test]
fn samples_are_only_of_the_counted_mode() {
    let mut fixture = Fixture::new();
    let event = open(&mut fixture, open_of(KIND_MARK, 5, 0).sampled(2), OPEN_EXCLUDE_KERNEL);
    let mut ring = fixture.map(event, 1);
    for round in 0..6 {
        fixture.mark(0, 5, KERNEL);
        fixture.mark(0, 5, round);
    }
    let ips: Vec<u64> = ring.samples().iter().map(|sample| sample.ip).collect();
    assert_eq!(ips, [1, 3, 5]);
    assert_eq!(fixture.value(0, event), 6);
}

/// VPMU-D-6.1-5.
#[test]
fn event_without_a_known_mode_is_in_error() {
    let mut fixture = Fixture::new();
    let mark = open_of(KIND_MARK, 5, 0);
    let plain = open(&mut fixture, mark, 0);
    let event = open(&mut fixture, mark, OPEN_EXCLUDE_USER);
    fixture.post_notice(0, 16);
    fixture.vcpus.mark(0, 5, &mut Nowhere);
    assert_eq!(fixture.notice(), Some((NOTICE_ERROR, event)));
    let reply = fixture.command(0, COMMAND_READ, event);
    assert_eq!((reply.state.get(), reply.value.get()), (STATE_ERROR, 0));
    let enabled = fixture.command(0, COMMAND_ENABLE, event);
    assert_eq!(enabled.status.get(), libc::EIO.unsigned_abs());
    assert_eq!(fixture.value(0, plain), 1);
    assert!(!fixture.vcpus.wants_registers(0));
}

#[test]
fn catalogue_reports_events_that_exclude_modes() {
    let mut fixture = Fixture::new();
    for entry in fixture.catalogue() {
        let opened = fixture.open(&OpenRequest {
            flags: OPEN_EXCLUDE_USER.into(),
            period: match entry.kind.get() {
                KIND_SAMPLE_TRACE => 1_000_000.into(),
                _ => 0.into(),
            },
            ..open_of(entry.kind.get(), entry.config.get(), 0)
        });
        let can = entry.flags.get() & CATALOGUE_EXCLUDES != 0;
        assert_eq!(opened.err(), (!can).then_some(libc::EOPNOTSUPP), "{entry:?}");
    }
}

//! Removal of areas. The device stops writing to a removed area, even while traces remain active.

use vpmu::abi::*;
use vpmu_testkit::{Fields, Fixture, header, map_aux};

use super::{ITRACE_START, Traced, exits, pages, trace};

/// Whether 300 traced exits leave memory unchanged.
fn stays(fixture: &Fixture) -> bool {
    let before = fixture.snapshot();
    exits(fixture, 0, 300);
    fixture.snapshot() == before
}

/// VPMU-D-6.3-3.
#[test]
fn unmapped_area_is_not_written_again() {
    let mut fixture = Fixture::new();
    let mut traced = Traced::on(&mut fixture, 4);
    exits(&fixture, 0, 5);
    assert!(!stays(&fixture));
    let unmap = header(CONTROL_UNMAP_AUX, traced.event);
    fixture.control(&unmap).expect("unmapped");
    // The 305 exits so far do not all fit, because the area has space for 256 packets, including sync packets.
    assert_eq!(traced.area.take().len(), 256);
    let reported: u64 = traced.chunks().iter().map(|[_, size, _]| size).sum();
    assert_eq!(reported, traced.area.head(), "published and reported before the unmap");
    assert!(stays(&fixture));
    let reply = fixture.read(0, traced.event);
    assert_eq!(reply.value.get(), traced.area.head() + reply.lost.get());
    assert_eq!(traced.area.take().len(), 0);
    // A new area starts at position zero, whatever the metadata page contains.
    let area = pages(&mut fixture, 1);
    map_aux(&mut fixture, traced.event, MAP_WRITABLE, &area).expect("an area");
    assert_eq!(traced.area.head(), 0);
    exits(&fixture, 0, 1);
    fixture.read(0, traced.event);
    assert_eq!(traced.area.head(), 128);
}

#[test]
fn area_ends_with_its_ring() {
    let mut fixture = Fixture::new();
    let mut traced = Traced::on(&mut fixture, 4);
    exits(&fixture, 0, 5);
    fixture.unmap(traced.event).expect("unmapped");
    assert_eq!(traced.chunks(), [[0, 6 * 64, 0]], "published and reported before the unmap");
    assert!(stays(&fixture));
    let unmap = header(CONTROL_UNMAP_AUX, traced.event);
    assert_eq!(fixture.control(&unmap), Err(libc::EINVAL));
}

#[test]
fn area_ends_with_its_last_writer() {
    let mut fixture = Fixture::new();
    let traced = Traced::on(&mut fixture, 4);
    let other = fixture.opened(&trace().flags(OPEN_ENABLED));
    fixture.redirect(other, traced.event).expect("redirected");
    fixture.close(traced.event).expect("closed");
    assert!(!stays(&fixture), "the other trace no longer writes");
    let unmap = header(CONTROL_UNMAP_AUX, traced.event);
    fixture.control(&unmap).expect("the id of the closed event is still valid");
    assert!(stays(&fixture));
    fixture.close(other).expect("closed");
    assert_eq!(fixture.control(&unmap), Err(libc::ENOENT));
}

#[test]
fn area_is_not_written_after_a_close_or_a_reset() {
    let mut fixture = Fixture::new();
    let traced = Traced::on(&mut fixture, 4);
    let second = Traced::on(&mut fixture, 4);
    exits(&fixture, 0, 5);
    fixture.close(traced.event).expect("closed");
    assert!(!stays(&fixture));
    fixture.close(second.event).expect("closed");
    assert!(stays(&fixture));
    Traced::on(&mut fixture, 4);
    exits(&fixture, 0, 5);
    // Reset the device during an exit, before the exit's packet is written.
    fixture.vcpus.leave(0, vpmu::ExitReason::Io, &mut vpmu_testkit::At(1));
    fixture.vpmu.reset();
    let before = fixture.snapshot();
    fixture.vcpus.enter(0);
    assert!(fixture.snapshot() == before);
    assert!(stays(&fixture));
}

#[test]
fn redirected_trace_publishes_its_earlier_data() {
    let mut fixture = Fixture::new();
    let mut first = Traced::on(&mut fixture, 4);
    let mut second = Traced::on(&mut fixture, 4);
    let other = fixture.opened(&trace().flags(OPEN_ENABLED));
    fixture.redirect(other, first.event).expect("redirected");
    exits(&fixture, 0, 2);
    fixture.redirect(other, second.event).expect("redirected");
    let reported: u64 = first.chunks().iter().map(|[_, size, _]| size).sum();
    // Two exits of each trace.
    assert_eq!(reported, first.area.head());
    assert_eq!(first.area.exits().len(), 4);
    exits(&fixture, 0, 2);
    fixture.read(0, other);
    assert_eq!(second.area.exits().len(), 6);
}

#[test]
fn trace_redirected_to_an_area_is_announced_there() {
    let mut fixture = Fixture::new();
    let mut traced = Traced::on(&mut fixture, 4);
    let begun = |traced: &mut Traced| {
        let records = traced.ring.raw();
        let begins = records.iter().filter(|record| record.kind == ITRACE_START);
        begins.count()
    };
    assert_eq!(begun(&mut traced), 1);
    let other = fixture.opened(&trace().flags(OPEN_ENABLED));
    assert_eq!(begun(&mut traced), 0, "records of the start of a trace without an area");
    fixture.redirect(other, traced.event).expect("redirected");
    assert_eq!(begun(&mut traced), 1);
    fixture.redirect(other, 0).expect("redirected");
    fixture.redirect(other, traced.event).expect("redirected");
    assert_eq!(begun(&mut traced), 0, "records of the start after a second redirection");
}

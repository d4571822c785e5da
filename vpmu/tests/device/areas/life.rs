//! Removal of areas. The device stops writing to a removed area, even while traces remain active.

use vpmu::abi::*;

use super::{ITRACE_START, Traced, exits, pages, trace};
use crate::rig::Rig;
use crate::traces::area::map_aux;

/// Whether 300 traced exits leave memory unchanged.
fn stays(rig: &Rig) -> bool {
    let before = rig.snapshot();
    exits(rig, 0, 300);
    rig.snapshot() == before
}

/// VPMU-D-6.3-3.
#[test]
fn unmapped_area_is_not_written_again() {
    let mut rig = Rig::new();
    let mut traced = Traced::on(&mut rig, 4);
    exits(&rig, 0, 5);
    assert!(!stays(&rig));
    let unmap = Rig::header(CONTROL_UNMAP_AUX, traced.event);
    rig.control(&unmap).expect("unmapped");
    // The 305 exits so far do not all fit, because the area has space for 256 packets, including sync packets.
    assert_eq!(traced.area.take().len(), 256);
    let told: u64 = traced.chunks().iter().map(|[_, size, _]| size).sum();
    assert_eq!(
        told,
        traced.area.head(),
        "published and reported before the unmap"
    );
    assert!(stays(&rig));
    let reply = rig.read(0, traced.event);
    assert_eq!(reply.value.get(), traced.area.head() + reply.lost.get());
    assert_eq!(traced.area.take().len(), 0);
    // A new area starts at position zero, whatever the metadata page contains.
    let area = pages(&mut rig, 1);
    map_aux(&mut rig, traced.event, MAP_WRITABLE, &area).expect("an area");
    assert_eq!(traced.area.head(), 0);
    exits(&rig, 0, 1);
    rig.read(0, traced.event);
    assert_eq!(traced.area.head(), 128);
}

#[test]
fn area_ends_with_its_ring() {
    let mut rig = Rig::new();
    let mut traced = Traced::on(&mut rig, 4);
    exits(&rig, 0, 5);
    rig.unmap(traced.event).expect("unmapped");
    assert_eq!(
        traced.chunks(),
        [[0, 6 * 64, 0]],
        "published and reported before the unmap"
    );
    assert!(stays(&rig));
    let unmap = Rig::header(CONTROL_UNMAP_AUX, traced.event);
    assert_eq!(rig.control(&unmap), Err(libc::EINVAL));
}

#[test]
fn area_ends_with_its_last_writer() {
    let mut rig = Rig::new();
    let traced = Traced::on(&mut rig, 4);
    let other = OpenRequest {
        flags: OPEN_ENABLED.into(),
        ..trace()
    };
    let other = rig.open(&other).expect("open");
    rig.redirect(other, traced.event).expect("redirected");
    rig.close(traced.event).expect("closed");
    assert!(!stays(&rig), "the other trace no longer writes");
    let unmap = Rig::header(CONTROL_UNMAP_AUX, traced.event);
    rig.control(&unmap)
        .expect("the id of the closed event is still valid");
    assert!(stays(&rig));
    rig.close(other).expect("closed");
    assert_eq!(rig.control(&unmap), Err(libc::ENOENT));
}

#[test]
fn area_is_not_written_after_a_close_or_a_reset() {
    let mut rig = Rig::new();
    let traced = Traced::on(&mut rig, 4);
    let second = Traced::on(&mut rig, 4);
    exits(&rig, 0, 5);
    rig.close(traced.event).expect("closed");
    assert!(!stays(&rig));
    rig.close(second.event).expect("closed");
    assert!(stays(&rig));
    Traced::on(&mut rig, 4);
    exits(&rig, 0, 5);
    // Reset the device during an exit, before the exit's packet is written.
    rig.vcpus
        .leave(0, vpmu::ExitReason::Io, &mut crate::world::At(1));
    rig.vpmu.reset();
    let before = rig.snapshot();
    rig.vcpus.enter(0);
    assert!(rig.snapshot() == before);
    assert!(stays(&rig));
}

#[test]
fn redirected_trace_publishes_its_earlier_data() {
    let mut rig = Rig::new();
    let mut first = Traced::on(&mut rig, 4);
    let mut second = Traced::on(&mut rig, 4);
    let other = OpenRequest {
        flags: OPEN_ENABLED.into(),
        ..trace()
    };
    let other = rig.open(&other).expect("open");
    rig.redirect(other, first.event).expect("redirected");
    exits(&rig, 0, 2);
    rig.redirect(other, second.event).expect("redirected");
    let told: u64 = first.chunks().iter().map(|[_, size, _]| size).sum();
    // Two exits of each trace.
    assert_eq!(told, first.area.head());
    assert_eq!(first.area.exits().len(), 4);
    exits(&rig, 0, 2);
    rig.read(0, other);
    assert_eq!(second.area.exits().len(), 6);
}

#[test]
fn trace_redirected_to_an_area_is_announced_there() {
    let mut rig = Rig::new();
    let mut traced = Traced::on(&mut rig, 4);
    let begun = |traced: &mut Traced| {
        let records = traced.ring.raw();
        let begins = records.iter().filter(|record| record.kind == ITRACE_START);
        begins.count()
    };
    assert_eq!(begun(&mut traced), 1);
    let other = OpenRequest {
        flags: OPEN_ENABLED.into(),
        ..trace()
    };
    let other = rig.open(&other).expect("open");
    assert_eq!(
        begun(&mut traced),
        0,
        "records of the start of a trace without an area"
    );
    rig.redirect(other, traced.event).expect("redirected");
    assert_eq!(begun(&mut traced), 1);
    rig.redirect(other, 0).expect("redirected");
    rig.redirect(other, traced.event).expect("redirected");
    assert_eq!(
        begun(&mut traced),
        0,
        "records of the start after a second redirection"
    );
}

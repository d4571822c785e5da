//! Guest time across a save and restore, and the conditions under which a device may be saved.

use vpmu::abi::*;
use vpmu::{ExitReason, SaveError};
use vpmu_testkit::{At, Fields, Fixture, open_of};

use super::mark;

#[test]
fn save_is_refused_while_a_vcpu_is_in_the_guest() {
    let fixture = Fixture::new();
    fixture.vcpus.enter(1);
    assert!(matches!(fixture.vpmu.save(), Err(SaveError::Inside(1))));
    fixture.vcpus.leave(1, ExitReason::Signal, &mut At(1));
    fixture.save();
}

#[test]
fn device_continues_after_a_save() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&super::marks(0, 3));
    let mut ring = fixture.map(event, 4);
    mark(&fixture, 1, 4);
    fixture.halt();
    fixture.save();
    mark(&fixture, 5, 4);
    let ips: Vec<u64> = ring.samples().iter().map(|sample| sample.ip).collect();
    assert_eq!(ips, [3, 6]);
}

/// VPMU-D-6.13-7.
#[test]
fn restored_pages_have_the_new_tsc_frequency() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&open_of(KIND_MARK, 5, 0).flags(OPEN_ENABLED));
    let page = fixture.map(event, 1);
    fixture.host.pass(8_000_000);
    fixture.halt();
    let before = fixture.read(0, event).time_enabled.get();
    fixture.halt();
    let state = fixture.save();
    let mut settings = fixture.settings();
    settings.tsc_khz = 500_000;
    let mut next = fixture.successor(settings, fixture.memory.clone(), None);
    fixture.vpmu.reset();
    next.resume(&state);
    let config = next.config();
    // This word of the metadata page holds the counter's width, the shift and the multiplier.
    let shown = page.field(48);
    assert_eq!(shown >> 32, u64::from(config.time_mult.get()));
    assert_eq!(shown >> 16 & 0xffff, u64::from(config.time_shift.get()));
    assert_eq!(shown & 0xffff, 64);
    assert_eq!(page.field(8) & 1, 0, "`lock` is even after the write");
    let after = next.read(0, event).time_enabled.get();
    // With the new frequency, each clock read advances the clock by two nanoseconds.
    assert!(after - before < 200, "the enabled time jumped from {before} to {after}");
    next.host.pass(1000);
    let later = next.read(0, event).time_enabled.get();
    assert!((2000..2200).contains(&(later - after)), "the enabled time went from {after} to {later} in 1,000 ticks");
}

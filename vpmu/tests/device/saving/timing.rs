//! Guest time across a save and restore, and the conditions under which a device may be saved.

use vpmu::abi::*;
use vpmu::{ExitReason, SaveError};

use super::mark;
use crate::rig::{Rig, open_of};
use crate::world::At;

#[test]
fn save_is_refused_while_a_vcpu_is_in_the_guest() {
    let rig = Rig::new();
    rig.vcpus.enter(1);
    assert!(matches!(rig.vpmu.save(), Err(SaveError::Inside(1))));
    rig.vcpus.leave(1, ExitReason::Signal, &mut At(1));
    rig.save();
}

#[test]
fn device_continues_after_a_save() {
    let mut rig = Rig::new();
    let event = rig.open(&super::marks(0, 3)).expect("open");
    let mut ring = rig.map(event, 4);
    mark(&rig, 1, 4);
    rig.halt();
    rig.save();
    mark(&rig, 5, 4);
    let ips: Vec<u64> = ring.samples().iter().map(|sample| sample.ip).collect();
    assert_eq!(ips, [3, 6]);
}

/// VPMU-D-6.13-7.
#[test]
fn restored_pages_have_the_new_tsc_frequency() {
    let mut rig = Rig::new();
    let event = rig.open(&open_of(KIND_MARK, 5, 0)).expect("open");
    let page = rig.map(event, 1);
    rig.command(0, COMMAND_ENABLE, event);
    rig.world.pass(8_000_000);
    rig.halt();
    let before = rig.read(0, event).time_enabled.get();
    rig.halt();
    let state = rig.save();
    let mut settings = rig.settings();
    settings.tsc_khz = 500_000;
    let mut next = rig.successor(settings, rig.memory.clone(), None);
    rig.vpmu.reset();
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
    assert!(
        after - before < 200,
        "the enabled time jumped from {before} to {after}"
    );
    next.world.pass(1000);
    let later = next.read(0, event).time_enabled.get();
    assert!(
        (2000..2200).contains(&(later - after)),
        "the enabled time went from {after} to {later} in 1,000 ticks"
    );
}

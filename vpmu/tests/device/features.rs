//! The feature bits that the device offers, and how a driver accepts them through a transport that hides them.

use vpmu::Settings;
use vpmu::abi::*;

use crate::persistent::{WINDOW_FEATURES, window};
use crate::rig::{ALL_FEATURES, Errno, Rig, open_of, sampling};

/// `VIRTIO_F_VERSION_1`, the only feature bit that a driver can accept through a transport that hides the
/// device-specific bits.
const MASKED: u64 = 1 << 32;

fn accept(rig: &mut Rig, features: u64) -> Result<(), Errno> {
    rig.control(&FeaturesRequest {
        header: Rig::header(CONTROL_FEATURES, 0),
        features: features.into(),
    })
}

fn sampled() -> OpenRequest {
    sampling(open_of(KIND_MARK, 5, 0), 1)
}

/// VPMU-D-3-3.
#[test]
fn configuration_mirrors_the_feature_bits() {
    let own = (1 << 24) - 1;
    let rig = Rig::new();
    let all = 1 << F_RING | 1 << F_TASK_PAGE | 1 << F_DOORBELL | 1 << F_AUX;
    let all = all | 1 << F_PERSISTENT | 1 << F_LINKS | 1 << F_FLUSH;
    assert_eq!(rig.vpmu.features() & own, all);
    assert_eq!(rig.config().features.get(), all);
    let memory = window(16);
    let rig = Rig::windowed(&memory);
    assert_eq!(rig.vpmu.features() & own, all | 1 << F_WINDOW);
    assert_eq!(rig.config().features.get(), all | 1 << F_WINDOW);
}

/// VPMU-D-3-3.
#[test]
fn device_without_doorbell_offers_no_marks() {
    let mut rig = Rig::with_settings(Settings::without_doorbell, MASKED);
    assert_eq!(rig.vpmu.features() & 1 << F_DOORBELL, 0);
    assert_eq!(rig.config().features.get() & 1 << F_DOORBELL, 0);
    let entries = rig.catalogue();
    assert!(!entries.is_empty());
    assert!(entries.iter().all(|entry| entry.kind.get() != KIND_MARK));
    for config in [5, MARK_ANY] {
        let opened = rig.open(&open_of(KIND_MARK, config, 0));
        assert_eq!(opened, Err(libc::ENOENT));
    }
    assert_eq!(accept(&mut rig, 1 << F_DOORBELL), Err(libc::EINVAL));
}

/// VPMU-D-3-4.
#[test]
fn feature_accepted_by_a_request_equals_a_negotiated_one() {
    let memory = window(16);
    let mut rig = Rig::windowed(&memory);
    rig.vpmu.reset();
    rig.activate(MASKED);
    assert_eq!(rig.open(&sampled()), Err(libc::EOPNOTSUPP));
    let features = WINDOW_FEATURES & !MASKED;
    assert_eq!(accept(&mut rig, features), Ok(()));
    let event = rig.open(&sampled()).expect("open");
    let ring = rig.map(event, 1);
    rig.command(0, COMMAND_ENABLE, event);
    rig.runs(0, 3, 4);
    rig.mark(0, 5, 1);
    assert_ne!(ring.head(), 0);
    rig.detach(event, "kept").expect("detached");
    rig.unmap(event).expect("unmapped");
    rig.map_window(event, 2, 0).expect("mapped");
    // The acceptance ends with the driver's reset.
    rig.vpmu.reset();
    rig.activate(MASKED);
    assert_eq!(rig.open(&sampled()), Err(libc::EOPNOTSUPP));
}

#[test]
fn feature_that_is_not_offered_is_not_accepted() {
    let mut rig = Rig::new();
    rig.vpmu.reset();
    rig.activate(MASKED);
    for bit in [F_WINDOW, 20, 24, 32, 63] {
        let both = 1 << F_RING | 1 << bit;
        assert_eq!(accept(&mut rig, both), Err(libc::EINVAL), "bit {bit}");
    }
    assert_eq!(
        rig.open(&sampled()),
        Err(libc::EOPNOTSUPP),
        "the refused request accepted no bit"
    );
    assert_eq!(accept(&mut rig, 0), Ok(()));
}

/// VPMU-D-3-5.
#[test]
fn driver_without_later_feature_bits_has_persistence_links_and_flush() {
    let mut rig = Rig::new();
    rig.vpmu.reset();
    rig.activate(ALL_FEATURES);
    let event = rig.open(&sampled()).expect("open");
    let target = rig.open(&open_of(KIND_MARK, 6, 0)).expect("open");
    rig.link(event, target, LINK_STARTER).expect("linked");
    assert_eq!(rig.flush(0, event), 0);
    rig.detach(event, "").expect("detached");
}

#[test]
fn mark_of_more_than_32_bits_is_not_opened() {
    let mut rig = Rig::new();
    for config in [MARK_ANY + 1, MARK_ANY | 5, u64::MAX] {
        let opened = rig.open(&open_of(KIND_MARK, config, 0));
        assert_eq!(
            opened,
            Err(libc::ENOENT),
            "no mark has the value {config:#x}"
        );
    }
    for config in [0, u64::from(u32::MAX), MARK_ANY] {
        rig.open(&open_of(KIND_MARK, config, 0)).expect("open");
    }
}

#[test]
fn feature_accepted_by_a_request_is_kept_over_a_restore() {
    let mut rig = Rig::new();
    rig.vpmu.reset();
    rig.activate(MASKED);
    let ring = MASKED | 1 << F_RING;
    assert_eq!(accept(&mut rig, ring & !MASKED), Ok(()));
    let event = rig.open(&sampled()).expect("open");
    rig.map(event, 1);
    rig.move_on();
    assert_eq!(rig.open(&sampled()), Ok(event + 1));
    // Features that the driver did not accept stay disabled.
    let area = open_of(KIND_EXIT_TRACE, EXIT_IO, 0);
    assert_eq!(rig.open(&area), Err(libc::EOPNOTSUPP));
}

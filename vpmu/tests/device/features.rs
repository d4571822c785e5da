//! The feature bits that the device offers, and how a driver accepts them through a transport that hides them.

use vpmu::Settings;
use vpmu::abi::*;
use vpmu_testkit::{ALL_FEATURES, Errno, Fields, Fixture, WINDOW_FEATURES, header, open_of, window};

/// `VIRTIO_F_VERSION_1`, the only feature bit that a driver can accept through a transport that hides the
/// device-specific bits.
const MASKED: u64 = 1 << 32;

fn accept(fixture: &mut Fixture, features: u64) -> Result<(), Errno> {
    fixture.control(&FeaturesRequest { header: header(CONTROL_FEATURES, 0), features: features.into() })
}

fn sampled() -> OpenRequest {
    open_of(KIND_MARK, 5, 0).sampled(1)
}

/// VPMU-D-3-3.
#[test]
fn configuration_mirrors_the_feature_bits() {
    let own = (1 << 24) - 1;
    let fixture = Fixture::new();
    let all = 1 << F_RING | 1 << F_TASK_PAGE | 1 << F_DOORBELL | 1 << F_AUX;
    let all = all | 1 << F_PERSISTENT | 1 << F_LINKS | 1 << F_FLUSH;
    assert_eq!(fixture.vpmu.features() & own, all);
    assert_eq!(fixture.config().features.get(), all);
    let memory = window(16);
    let fixture = Fixture::windowed(&memory);
    assert_eq!(fixture.vpmu.features() & own, all | 1 << F_WINDOW);
    assert_eq!(fixture.config().features.get(), all | 1 << F_WINDOW);
}

/// VPMU-D-3-3.
#[test]
fn device_without_doorbell_offers_no_marks() {
    let mut fixture = Fixture::with_settings(Settings::without_doorbell, MASKED);
    assert_eq!(fixture.vpmu.features() & 1 << F_DOORBELL, 0);
    assert_eq!(fixture.config().features.get() & 1 << F_DOORBELL, 0);
    let entries = fixture.catalogue();
    assert!(!entries.is_empty());
    assert!(entries.iter().all(|entry| entry.kind.get() != KIND_MARK));
    for config in [5, MARK_ANY] {
        let opened = fixture.open(&open_of(KIND_MARK, config, 0));
        assert_eq!(opened, Err(libc::ENOENT));
    }
    assert_eq!(accept(&mut fixture, 1 << F_DOORBELL), Err(libc::EINVAL));
}

/// VPMU-D-3-4.
#[test]
fn feature_accepted_by_a_request_equals_a_negotiated_one() {
    let memory = window(16);
    let mut fixture = Fixture::windowed(&memory);
    fixture.vpmu.reset();
    fixture.activate(MASKED);
    assert_eq!(fixture.open(&sampled()), Err(libc::EOPNOTSUPP));
    let features = WINDOW_FEATURES & !MASKED;
    assert_eq!(accept(&mut fixture, features), Ok(()));
    let event = fixture.opened(&sampled());
    let ring = fixture.map(event, 1);
    fixture.command(0, COMMAND_ENABLE, event);
    fixture.runs(0, 3, 4);
    fixture.mark(0, 5, 1);
    assert_ne!(ring.head(), 0);
    fixture.detach(event, "kept").expect("detached");
    fixture.unmap(event).expect("unmapped");
    fixture.map_window(event, 2, 0).expect("mapped");
    // The acceptance ends with the driver's reset.
    fixture.vpmu.reset();
    fixture.activate(MASKED);
    assert_eq!(fixture.open(&sampled()), Err(libc::EOPNOTSUPP));
}

#[test]
fn feature_that_is_not_offered_is_not_accepted() {
    let mut fixture = Fixture::new();
    fixture.vpmu.reset();
    fixture.activate(MASKED);
    for bit in [F_WINDOW, 20, 24, 32, 63] {
        let both = 1 << F_RING | 1 << bit;
        assert_eq!(accept(&mut fixture, both), Err(libc::EINVAL), "bit {bit}");
    }
    assert_eq!(fixture.open(&sampled()), Err(libc::EOPNOTSUPP), "the refused request accepted no bit");
    assert_eq!(accept(&mut fixture, 0), Ok(()));
}

/// VPMU-D-3-5.
#[test]
fn driver_without_later_feature_bits_has_persistence_links_and_flush() {
    let mut fixture = Fixture::new();
    fixture.vpmu.reset();
    fixture.activate(ALL_FEATURES);
    let event = fixture.opened(&sampled());
    let target = fixture.opened(&open_of(KIND_MARK, 6, 0));
    fixture.link(event, target, LINK_STARTER).expect("linked");
    assert_eq!(fixture.flush(0, event), 0);
    fixture.detach(event, "").expect("detached");
}

#[test]
fn mark_of_more_than_32_bits_is_not_opened() {
    let mut fixture = Fixture::new();
    for config in [MARK_ANY + 1, MARK_ANY | 5, u64::MAX] {
        let opened = fixture.open(&open_of(KIND_MARK, config, 0));
        assert_eq!(opened, Err(libc::ENOENT), "no mark has the value {config:#x}");
    }
    for config in [0, u64::from(u32::MAX), MARK_ANY] {
        fixture.opened(&open_of(KIND_MARK, config, 0));
    }
}

#[test]
fn feature_accepted_by_a_request_is_kept_over_a_restore() {
    let mut fixture = Fixture::new();
    fixture.vpmu.reset();
    fixture.activate(MASKED);
    let ring = MASKED | 1 << F_RING;
    assert_eq!(accept(&mut fixture, ring & !MASKED), Ok(()));
    let event = fixture.opened(&sampled());
    fixture.map(event, 1);
    fixture.move_on();
    assert_eq!(fixture.open(&sampled()), Ok(event + 1));
    // Features that the driver did not accept stay disabled.
    let area = open_of(KIND_EXIT_TRACE, EXIT_IO, 0);
    assert_eq!(fixture.open(&area), Err(libc::EOPNOTSUPP));
}

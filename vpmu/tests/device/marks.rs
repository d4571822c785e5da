//! Marks of every value, and the values in their samples.

use vpmu::ExitReason;
use vpmu::abi::*;
use vpmu_testkit::{At, Fields, Fixture, SAMPLE, open_of};

const ADDR: u64 = 1 << 3;

/// Returns a request for an enabled event with this kind and config. The event samples with period 1, and ADDR is the
/// only field of its samples.
fn addressed(kind: u32, config: u64) -> OpenRequest {
    open_of(kind, config, 0).period(1).sample_type(ADDR).flags(OPEN_ENABLED)
}

#[test]
fn marks_of_any_value_are_counted() {
    let mut fixture = Fixture::new();
    let events = [MARK_ANY, 5, 0, u32::MAX.into()].map(|config| {
        let request = open_of(KIND_MARK, config, 0).flags(OPEN_ENABLED);
        fixture.opened(&request)
    });
    for value in [0, 5, 5, 6, u32::MAX] {
        fixture.mark(0, value, 1);
    }
    fixture.mark(1, 5, 1);
    let counts = events.map(|id| fixture.value(0, id));
    assert_eq!(counts, [5, 2, 1, 1]);
}

#[test]
fn sample_address_of_a_mark_is_its_value() {
    let mut fixture = Fixture::new();
    for config in [MARK_ANY, 7] {
        let mark = fixture.opened(&addressed(KIND_MARK, config));
        let mut ring = fixture.map(mark, 1);
        for value in [7, u32::MAX, 0] {
            fixture.mark(0, value, 1);
        }
        let addresses: Vec<u64> = ring
            .raw()
            .iter()
            .map(|record| {
                assert_eq!((record.kind, record.words.len()), (SAMPLE, 1));
                record.words[0]
            })
            .collect();
        let all = [7, u64::from(u32::MAX), 0];
        let expected = if config == 7 { &all[..1] } else { &all };
        assert_eq!(addresses, expected);
    }
}

#[test]
fn only_marks_have_a_sample_address() {
    let mut fixture = Fixture::new();
    let exits = fixture.opened(&addressed(KIND_EXITS, EXIT_USER));
    let mut ring = fixture.map(exits, 1);
    fixture.exit(0, ExitReason::Io, &mut At(1));
    fixture.mark(0, 7, 1);
    let records = ring.raw();
    assert!(records.iter().all(|record| record.words == [0]));
    assert_eq!(records.len(), 2);
}

#[test]
fn catalogue_lists_marks_of_any_value_before_those_of_one() {
    let mut fixture = Fixture::new();
    let marks: Vec<_> = fixture
        .catalogue()
        .iter()
        .filter(|entry| entry.kind.get() == KIND_MARK)
        .map(|entry| {
            let len = entry.name.iter().position(|&byte| byte == 0);
            let name = String::from_utf8_lossy(&entry.name[..len.expect("short")]).into_owned();
            (name, entry.config.get(), entry.flags.get())
        })
        .collect();
    let flags = CATALOGUE_SAMPLES | CATALOGUE_GUEST_ONLY | CATALOGUE_EXCLUDES;
    assert_eq!(marks, [("marks".to_owned(), MARK_ANY, flags), ("mark".to_owned(), 0, flags | CATALOGUE_ANY_CONFIG),]);
}

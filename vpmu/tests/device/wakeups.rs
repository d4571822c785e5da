//! Changes of an event's wakeup interval.

use vpmu::abi::*;
use vpmu_testkit::{Fields, Fixture, open_of};

/// Bytes of a record.
const RECORD: u64 = 72;

/// Opens an event that samples marks of value 5 on vCPU 0 and wakes its reader every ten records.
fn event(fixture: &mut Fixture) -> u64 {
    let request = open_of(KIND_MARK, 5, 0).sampled(1).flags(OPEN_ENABLED).wakeup(10);
    fixture.opened(&request)
}

/// Makes the event write `records` records. Returns the numbers of the records that wake the reader, counting from 1.
fn wakes_at(fixture: &mut Fixture, vcpu: u32, records: u32) -> Vec<u32> {
    let wakes = |record: &u32| {
        let before = fixture.vpmu.metrics().wakeups;
        fixture.mark(vcpu, 5, 1);
        let more = fixture.vpmu.metrics().wakeups - before;
        assert!(more <= 1, "record {record} caused {more} wakeups");
        more == 1
    };
    (1..=records).filter(wakes).collect()
}

#[test]
fn changed_interval_restarts_the_count() {
    let mut fixture = Fixture::new();
    let event = event(&mut fixture);
    let mut ring = fixture.map(event, 4);
    assert_eq!(wakes_at(&mut fixture, 0, 27), [10, 20]);
    fixture.set_wakeup(event, 3, WAKEUP_RECORDS).expect("set");
    assert_eq!(wakes_at(&mut fixture, 0, 8), [3, 6]);
    fixture.set_wakeup(event, 2 * RECORD + 1, WAKEUP_BYTES).expect("set");
    // A wakeup is due at each multiple of 145 bytes. Records end at multiples of 72 bytes, so the records that end at
    // 216, 360 and 504 bytes cause the wakeups.
    assert_eq!(wakes_at(&mut fixture, 0, 7), [3, 5, 7]);
    fixture.set_wakeup(event, 1, WAKEUP_RECORDS).expect("set");
    assert_eq!(wakes_at(&mut fixture, 0, 4), [1, 2, 3, 4]);
    assert_eq!(ring.samples().len(), 46);
    fixture.post_notice(0, 16);
    let woken = Some((NOTICE_WAKEUP, event, 2 + 2 + 3 + 4));
    assert_eq!(fixture.counted_notice(), woken);
}

/// VPMU-D-6.3-5.
#[test]
fn interval_applies_to_the_family() {
    let mut fixture = Fixture::new();
    let request = open_of(KIND_MARK, 5, CONTEXT_TASK).sampled(1).flags(OPEN_ENABLED).wakeup(10);
    let parent = fixture.opened(&request);
    fixture.map(parent, 4);
    let child = request.parent(parent);
    let before = fixture.opened(&child);
    fixture.command(1, COMMAND_IN, before);
    fixture.set_wakeup(parent, 2, WAKEUP_RECORDS).expect("set");
    assert_eq!(fixture.set_wakeup(before, 5, WAKEUP_RECORDS), Err(libc::EINVAL));
    assert_eq!(wakes_at(&mut fixture, 1, 4), [2, 4]);
    // The driver opens this child with the parent's original interval, but the family's new interval applies.
    let after = fixture.opened(&child);
    fixture.command(0, COMMAND_IN, after);
    assert_eq!(wakes_at(&mut fixture, 0, 4), [2, 4]);
}

#[test]
fn refused_interval_changes_nothing() {
    let mut fixture = Fixture::new();
    let event = event(&mut fixture);
    fixture.map(event, 4);
    assert_eq!(fixture.set_wakeup(event, 1 << 32, WAKEUP_BYTES), Err(libc::EINVAL));
    assert_eq!(fixture.set_wakeup(event, 1, 3), Err(libc::EINVAL));
    assert_eq!(wakes_at(&mut fixture, 0, 20), [10, 20]);
    fixture.set_wakeup(event, u64::from(u32::MAX), WAKEUP_BYTES).expect("set");
    assert_eq!(wakes_at(&mut fixture, 0, 20), [0; 0]);
}

//! Changes of an event's wakeup interval.

use vpmu::abi::*;

use crate::rig::{Rig, open_of, sampling};

/// Bytes of a record.
const RECORD: u64 = 72;

/// Opens an event that samples marks of value 5 on vCPU 0 and wakes its reader every ten records.
fn event(rig: &mut Rig) -> u64 {
    let request = OpenRequest {
        flags: OPEN_ENABLED.into(),
        wakeup: 10.into(),
        ..sampling(open_of(KIND_MARK, 5, 0), 1)
    };
    rig.open(&request).expect("open")
}

/// Makes the event write `records` records. Returns the numbers of the records that wake the reader, counting from 1.
fn wakes_at(rig: &mut Rig, vcpu: u32, records: u32) -> Vec<u32> {
    let wakes = |record: &u32| {
        let before = rig.vpmu.metrics().wakeups;
        rig.mark(vcpu, 5, 1);
        let more = rig.vpmu.metrics().wakeups - before;
        assert!(more <= 1, "record {record} caused {more} wakeups");
        more == 1
    };
    (1..=records).filter(wakes).collect()
}

#[test]
fn changed_interval_restarts_the_count() {
    let mut rig = Rig::new();
    let event = event(&mut rig);
    let mut ring = rig.map(event, 4);
    assert_eq!(wakes_at(&mut rig, 0, 27), [10, 20]);
    rig.set_wakeup(event, 3, WAKEUP_RECORDS).expect("set");
    assert_eq!(wakes_at(&mut rig, 0, 8), [3, 6]);
    rig.set_wakeup(event, 2 * RECORD + 1, WAKEUP_BYTES)
        .expect("set");
    // A wakeup is due at each multiple of 145 bytes. Records end at multiples of 72 bytes, so the records that end at
    // 216, 360 and 504 bytes cause the wakeups.
    assert_eq!(wakes_at(&mut rig, 0, 7), [3, 5, 7]);
    rig.set_wakeup(event, 1, WAKEUP_RECORDS).expect("set");
    assert_eq!(wakes_at(&mut rig, 0, 4), [1, 2, 3, 4]);
    assert_eq!(ring.samples().len(), 46);
    rig.post_notice(0, 16);
    let woken = Some((NOTICE_WAKEUP, event, 2 + 2 + 3 + 4));
    assert_eq!(rig.counted_notice(), woken);
}

/// VPMU-D-6.3-5.
#[test]
fn interval_applies_to_the_family() {
    let mut rig = Rig::new();
    let request = OpenRequest {
        flags: OPEN_ENABLED.into(),
        wakeup: 10.into(),
        ..sampling(open_of(KIND_MARK, 5, CONTEXT_TASK), 1)
    };
    let parent = rig.open(&request).expect("open");
    rig.map(parent, 4);
    let child = OpenRequest {
        parent: parent.into(),
        ..request
    };
    let before = rig.open(&child).expect("open");
    rig.command(1, COMMAND_IN, before);
    rig.set_wakeup(parent, 2, WAKEUP_RECORDS).expect("set");
    assert_eq!(rig.set_wakeup(before, 5, WAKEUP_RECORDS), Err(libc::EINVAL));
    assert_eq!(wakes_at(&mut rig, 1, 4), [2, 4]);
    // The driver opens this child with the parent's original interval, but the family's new interval applies.
    let after = rig.open(&child).expect("open");
    rig.command(0, COMMAND_IN, after);
    assert_eq!(wakes_at(&mut rig, 0, 4), [2, 4]);
}

#[test]
fn invalid_interval_is_refused() {
    let mut rig = Rig::new();
    let event = event(&mut rig);
    rig.map(event, 4);
    for unit in [WAKEUP_RECORDS, WAKEUP_BYTES] {
        assert_eq!(rig.set_wakeup(event, 0, unit), Err(libc::EINVAL));
        assert_eq!(rig.set_wakeup(event, 1 << 32, unit), Err(libc::EINVAL));
        assert_eq!(rig.set_wakeup(77, 1, unit), Err(libc::ENOENT));
    }
    for unit in [0, 3] {
        assert_eq!(rig.set_wakeup(event, 1, unit), Err(libc::EINVAL));
    }
    let reserved = WakeupRequest {
        header: Rig::header(CONTROL_WAKEUP, event),
        every: 1.into(),
        unit: WAKEUP_RECORDS.into(),
        reserved: 1.into(),
    };
    assert_eq!(rig.control(&reserved), Err(libc::EINVAL));
    let counter = rig.open(&open_of(KIND_MARK, 5, 0)).expect("open");
    assert_eq!(
        rig.set_wakeup(counter, 1, WAKEUP_RECORDS),
        Err(libc::EINVAL)
    );
    // Nothing has changed.
    assert_eq!(wakes_at(&mut rig, 0, 20), [10, 20]);
    rig.set_wakeup(event, u64::from(u32::MAX), WAKEUP_BYTES)
        .expect("set");
    assert_eq!(wakes_at(&mut rig, 0, 20), [0; 0]);
}

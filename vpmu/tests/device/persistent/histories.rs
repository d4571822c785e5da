//! Histories, which the host reads from the rings of persistent events, no matter what the guest wrote to these rings.

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vpmu::abi::*;
use vpmu::{ExitReason, Persist, PersistError};
use vpmu_testkit::{At, CYCLES, Fields, Fixture, WINDOW, WINDOW_FEATURES, limits, open_of, thread, window};

use super::{asked, marks, samples};

/// The address of the first data page of the first ring in the window.
const DATA: u64 = WINDOW + PAGE_SIZE as u64;

fn ips(fixture: &Fixture, event: u64) -> Vec<u64> {
    samples(fixture, event).iter().map(|words| words[2]).collect()
}

fn recorder(memory: &GuestMemoryMmap) -> (Fixture, u64) {
    let fixture = Fixture::windowed(memory);
    let persist = Persist { pages: 1, ..asked("mark=5", 0) };
    let event = fixture.vpmu.persist(&persist).expect("started");
    (fixture, event)
}

#[test]
fn history_has_the_newest_records_oldest_first() {
    let (fixture, event) = recorder(&window(8));
    assert_eq!(ips(&fixture, event), [0; 0]);
    fixture.mark(0, 5, 1);
    assert_eq!(ips(&fixture, event), [1]);
    (2..=1000).for_each(|ip| fixture.mark(0, 5, ip));
    // The ring's page has room for 56 records of 72 bytes.
    assert_eq!(ips(&fixture, event), (945..=1000).collect::<Vec<u64>>());
    let history = fixture.vpmu.history(event).expect("a history");
    assert_eq!(history.event.count, 1000);
    assert_eq!(history.event.lost, 0, "overwritten records are not lost");
    assert_eq!((history.event.pages, history.event.window), (Some(1), true));
}

/// VPMU-D-6.10-6.
#[test]
fn forged_records_are_omitted_or_end_the_history() {
    let memory = window(8);
    let (fixture, event) = recorder(&memory);
    (1..=5).for_each(|ip| fixture.mark(0, 5, ip));
    let at = |newest: u64| GuestAddress(DATA + 4096 - 72 * (6 - newest));
    let header = 9_u64 | 2 << 32 | 72 << 48;
    let write = |newest, word: u64| memory.write_obj(word, at(newest)).expect("in memory");
    // The history omits a record of another kind or of another event.
    write(3, 1 | 72 << 48);
    assert_eq!(ips(&fixture, event), [1, 2, 4, 5]);
    write(3, header);
    let id = GuestAddress(at(3).0 + 8);
    memory.write_obj(event + 1, id).expect("in memory");
    assert_eq!(ips(&fixture, event), [1, 2, 4, 5]);
    memory.write_obj(event, id).expect("in memory");
    assert_eq!(ips(&fixture, event), [1, 2, 3, 4, 5]);
    // If a record has an invalid size, the device cannot find the older records, because they follow this record in the
    // ring.
    for size in [0_u64, 4, 7, 12, 0xffff, 0xfff8] {
        write(3, header & !(0xffff << 48) | size << 48);
        assert_eq!(ips(&fixture, event), [4, 5], "size {size}");
    }
    let noise: Vec<u8> = (0..4096_u32).map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()[2]).collect();
    memory.write_slice(&noise, GuestAddress(DATA)).expect("in memory");
    let history = fixture.vpmu.history(event).expect("a history");
    assert!(history.records.len() <= 4096);
    // The device does not read the metadata page of a ring in overwrite mode.
    memory.write_slice(&[0xff; 4096], GuestAddress(WINDOW)).expect("in memory");
    fixture.mark(0, 5, 6);
    assert_eq!(ips(&fixture, event), [6]);
}

#[test]
fn history_of_small_records_is_bounded_by_the_ring() {
    let memory = window(8);
    let (fixture, event) = recorder(&memory);
    (1..=100).for_each(|ip| fixture.mark(0, 5, ip));
    let smallest = [2_u64 | 8 << 48; 512];
    let bytes: Vec<u8> = smallest.iter().flat_map(|word| word.to_le_bytes()).collect();
    memory.write_slice(&bytes, GuestAddress(DATA)).expect("in memory");
    assert_eq!(fixture.vpmu.history(event).expect("a history").records, [0; 0]);
}

#[test]
fn guest_ring_is_read_from_its_tail() {
    let mut fixture = Fixture::windowed(&window(8));
    let event = fixture.opened(&marks(0));
    let mut ring = fixture.map(event, 1);
    fixture.detach(event, "").expect("detached");
    (1..=10).for_each(|ip| fixture.mark(0, 5, ip));
    ring.take(3);
    // The device reads the tail only when it needs more room in the ring.
    assert_eq!(ips(&fixture, event), (1..=10).collect::<Vec<u64>>());
    (11..=57).for_each(|ip| fixture.mark(0, 5, ip));
    assert_eq!(ips(&fixture, event), (4..=57).collect::<Vec<u64>>());
    ring.set_tail(u64::MAX);
    (58..=70).for_each(|ip| fixture.mark(0, 5, ip));
    assert_eq!(ips(&fixture, event), [0; 0], "an invalid tail");
    let history = fixture.vpmu.history(event).expect("a history");
    assert_eq!((history.event.operator, history.event.window), (false, false));
}

#[test]
fn backward_ring_is_read_to_its_tail() {
    let memory = window(8);
    let mut fixture = Fixture::windowed(&memory);
    let backward = marks(0).flags(OPEN_ENABLED | OPEN_BACKWARD);
    let event = fixture.opened(&backward);
    fixture.detach(event, "").expect("detached");
    fixture.map_window(event, 1, MAP_WRITABLE).expect("mapped");
    (1..=100).for_each(|ip| fixture.mark(0, 5, ip));
    assert_eq!(ips(&fixture, event), (1..=56).collect::<Vec<u64>>());
    assert_eq!(fixture.vpmu.history(event).expect("a history").event.lost, 44);
}

#[test]
fn ring_overwritten_forwards_has_no_history() {
    let mut fixture = Fixture::windowed(&window(8));
    let event = fixture.opened(&marks(0));
    fixture.detach(event, "").expect("detached");
    fixture.map_window(event, 1, 0).expect("mapped");
    (1..=56).for_each(|ip| fixture.mark(0, 5, ip));
    assert_eq!(ips(&fixture, event), (1..=56).collect::<Vec<u64>>());
    fixture.mark(0, 5, 57);
    let unreadable = fixture.vpmu.history(event);
    assert!(
        matches!(unreadable, Err(PersistError::Unreadable(_))),
        "the history of a ring that cannot be read: {unreadable:?}"
    );
}

#[test]
fn only_persistent_events_with_a_ring_have_a_history() {
    let mut fixture = Fixture::windowed(&window(8));
    let event = fixture.opened(&marks(0));
    fixture.map(event, 1);
    assert!(matches!(fixture.vpmu.history(event), Err(PersistError::NoSuch(_))));
    let bare = fixture.opened(&marks(0));
    fixture.detach(bare, "").expect("detached");
    assert!(matches!(fixture.vpmu.history(bare), Err(PersistError::NoRing(_))));
    assert!(matches!(fixture.vpmu.history(77), Err(PersistError::NoSuch(77))));
    let unopened = Fixture::bare(vpmu::Engines::Auto, limits(), None);
    assert!(matches!(unopened.vpmu.history(1), Err(PersistError::NoSuch(1))));
    assert_eq!(unopened.vpmu.persistent(), []);
}

#[test]
fn pending_loss_is_recorded_before_the_history_is_read() {
    let mut fixture = Fixture::windowed(&window(8));
    let event = fixture.opened(&marks(0));
    let mut ring = fixture.map(event, 1);
    fixture.detach(event, "").expect("detached");
    (1..=60).for_each(|ip| fixture.mark(0, 5, ip));
    ring.take(60);
    let history = fixture.vpmu.history(event).expect("a history");
    let last = history.iter().last().expect("a record");
    assert_eq!((last[0], last[16]), (2, 4), "the last record is a LOST record for four samples");
    assert_eq!(history.event.lost, 4);
}

#[test]
fn host_records_are_collected_before_the_history_is_read() {
    let memory = window(8);
    let mut fixture = Fixture::windowed(&memory);
    fixture.host.know_ips();
    let (kind, config) = CYCLES;
    let batched = open_of(kind, config, 0).sampled(100).flags(OPEN_ENABLED | OPEN_BACKWARD).engine(ENGINE_BATCHED);
    let event = fixture.opened(&batched);
    fixture.detach(event, "").expect("detached");
    fixture.map_window(event, 1, 0).expect("mapped");
    let overflow =
        vpmu::source::Overflow { tsc: fixture.host.now(), ip: 77, mode: vpmu::source::Mode::Guest, period: 100 };
    fixture.host.record(thread(0), overflow);
    assert_eq!(ips(&fixture, event), [77]);
}

#[test]
fn history_survives_the_guests_memory() {
    let memory = window(8);
    let (mut fixture, event) = recorder(&memory);
    fixture.mark(0, 5, 1);
    fixture.vpmu.reset();
    fixture.exit(0, ExitReason::Hlt, &mut At(1));
    assert_eq!(ips(&fixture, event), [1]);
    fixture.activate(WINDOW_FEATURES);
    fixture.mark(0, 5, 2);
    assert_eq!(ips(&fixture, event), [1, 2]);
}

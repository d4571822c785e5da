//! Several devices restored from one saved state.

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vpmu_testkit::{Fixture, Reader};

use super::{mark, marks};

/// Copies guest memory.
fn copy(fixture: &Fixture) -> GuestMemoryMmap {
    let bytes = fixture.snapshot();
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), bytes.len())]);
    let memory = memory.expect("memory");
    let copied = memory.write_slice(&bytes, GuestAddress(0));
    copied.expect("in memory");
    memory
}

#[test]
fn two_devices_are_restored_from_one_state() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&marks(0, 2));
    let pages: Vec<u64> = (0..5).map(|page| fixture.next_ring + page * 0x1000).collect();
    fixture.map(event, 4);
    mark(&fixture, 1, 5);
    fixture.halt();
    let state = fixture.save();
    let mut twins = [(); 2].map(|()| {
        let mut twin = fixture.successor(fixture.settings(), copy(&fixture), None);
        twin.resume(&state);
        twin
    });
    mark(&fixture, 6, 1);
    for (number, twin) in (0..).zip(&mut twins) {
        mark(twin, 100 * (number + 1), 2 + number);
    }
    let expected = [vec![2, 4, 100], vec![2, 4, 200, 202]];
    for (twin, expected) in twins.iter_mut().zip(expected) {
        let mut ring = Reader::new(&twin.memory, &pages);
        let ips: Vec<u64> = ring.samples().iter().map(|sample| sample.ip).collect();
        assert_eq!(ips, expected);
        twin.close(event).expect("closed");
    }
    assert_eq!(fixture.value(0, event), 6, "other devices do not affect this count");
}

//! The list of persistent events.

use vpmu::abi::*;
use vpmu_testkit::{CYCLES, Fields, Fixture, open_of, window};

use super::{marks, name};

#[test]
fn entry_is_the_request_that_would_open_the_event() {
    let mut fixture = Fixture::windowed(&window(8));
    let (kind, config) = CYCLES;
    let request = open_of(kind, config, 1)
        .sampled(1000)
        .flags(OPEN_ENABLED | OPEN_BACKWARD | OPEN_SAMPLE_ID_ALL | OPEN_EXCLUDE_KERNEL)
        .wakeup(3)
        .max_stack(7)
        .read_format(0x7)
        .regs_user(0xff)
        .regs_intr(0xf)
        .stack_user(64)
        .sample_type(SAMPLE_ALLOWED);
    let event = fixture.opened(&request);
    fixture.detach(event, "all").expect("detached");
    let first = fixture.map_window(event, 2, 0).expect("mapped");
    let expected = PersistentEvent {
        id: event.into(),
        open: OpenRequest {
            header: ControlHeader::default(),
            flags: (request.flags.get() | OPEN_PERSISTENT).into(),
            sample_type: SAMPLE_ALLOWED.into(),
            engine: ENGINE_EXIT.into(),
            ..request
        },
        pages: 3.into(),
        map: MAP_WINDOW.into(),
        window_page: first.into(),
        flags: 0.into(),
        name: fixture.listed()[0].name,
    };
    assert_eq!(fixture.listed(), [expected]);
    assert_eq!(name(&expected), "all");

    fixture.command(1, COMMAND_DISABLE, event);
    assert_eq!(fixture.valued(1, COMMAND_PERIOD, event, 2000), 0);
    fixture.set_wakeup(event, 512, WAKEUP_BYTES).expect("set");
    let changed = fixture.listed()[0];
    assert_eq!(changed.open.flags.get() & OPEN_ENABLED, 0);
    assert_eq!(changed.open.period.get(), 2000);
    assert_eq!(changed.open.flags.get() & OPEN_WATERMARK, OPEN_WATERMARK);
    assert_eq!(changed.open.wakeup.get(), 512);
    fixture.set_wakeup(event, 7, WAKEUP_RECORDS).expect("set");
    let changed = fixture.listed()[0];
    assert_eq!(changed.open.flags.get() & OPEN_WATERMARK, 0);
    assert_eq!(changed.open.wakeup.get(), 7);
}

#[test]
fn entry_has_the_frequency_and_the_size_of_a_guest_ring() {
    let mut fixture = Fixture::windowed(&window(8));
    let (kind, config) = CYCLES;
    let request = open_of(kind, config, 0).sampled(99).flags(OPEN_FREQ | OPEN_WATERMARK).wakeup(512);
    let event = fixture.opened(&request);
    fixture.map(event, 4);
    fixture.detach(event, "").expect("detached");
    let listed = fixture.listed()[0];
    assert_eq!(listed.open.period.get(), 99);
    assert_eq!(listed.open.flags.get(), OPEN_FREQ | OPEN_WATERMARK | OPEN_PERSISTENT);
    assert_eq!(listed.open.wakeup.get(), 512);
    assert_eq!((listed.pages.get(), listed.map.get()), (5, MAP_WRITABLE));
}

#[test]
fn list_can_be_read_in_parts() {
    let mut fixture = Fixture::new();
    let events = [(); 5].map(|()| fixture.opened(&marks(0)));
    for &event in [1, 0, 3, 4].map(|n| &events[n]) {
        fixture.detach(event, "").expect("detached");
    }
    let ids = |list: Vec<PersistentEvent>| -> Vec<u64> { list.iter().map(|event| event.id.get()).collect() };
    let all = [0, 1, 3, 4].map(|n| events[n]);
    assert_eq!(ids(fixture.listed()), all);
    let room = |entries| size_of::<ControlReply>() + entries * size_of::<PersistentEvent>();
    assert_eq!(ids(fixture.list(0, 2, room(9)).expect("two")), all[..2]);
    assert_eq!(ids(fixture.list(all[0], 9, room(2) + 100).expect("two")), all[1..3]);
    assert_eq!(ids(fixture.list(all[2], 9, room(9)).expect("one")), all[3..]);
    assert_eq!(ids(fixture.list(u64::MAX, 9, room(9)).expect("none")), [0; 0]);
    assert_eq!(ids(fixture.list(0, 0, room(9)).expect("none")), [0; 0]);
    assert_eq!(ids(fixture.list(0, 1, room(0)).expect("none")), [0; 0]);
}

//! Tests each rule of an area separately.

use super::*;

fn kept(pages: u64, overwrite: bool, watermark: u64) -> (DeviceOwned, Fake) {
    (DeviceOwned::new(pages * PAGE, overwrite, watermark), Fake::new(pages))
}

fn driven(overwrite: bool, watermark: u64) -> (DriverOwned, Fake) {
    (DriverOwned::new(PAGE, overwrite, watermark), Fake::new(1))
}

#[test]
fn nested_write_is_refused() {
    let (mut writer, mut pages) = (Writer::new(PAGE, false), Fake::new(1));
    assert_eq!(writer.get(), None);
    assert!(matches!(writer.put(&mut pages, &[1]), Err(Refused::NotBegun)));
    assert!(matches!(writer.skip(&mut pages, 8), Err(Refused::NotBegun)));
    assert!(matches!(writer.end(Some(&pages)), Err(Refused::NotBegun)));
    assert_eq!(writer.begin(&pages).expect("begun"), PAGE);
    assert!(matches!(writer.begin(&pages), Err(Refused::Nested)));
    assert!(matches!(writer.begin_at(0, 64), Err(Refused::Nested)));
    writer.put(&mut pages, &[7; 8]).expect("room");
    let window = Window { head: 64, room: PAGE - 64 };
    assert_eq!(writer.get(), Some(window), "despite the nested write");
    assert_eq!(pages.head.get(), 0, "not published before the end");
    let written = writer.end(Some(&pages)).expect("begun");
    assert_eq!((written.offset, written.size, pages.head.get()), (0, 64, 64));
}

#[test]
fn skipped_bytes_are_zero() {
    let (mut writer, mut pages) = (Writer::new(2 * PAGE, false), Fake::new(2));
    writer.begin(&pages).expect("begun");
    writer.put(&mut pages, &[7; 8]).expect("room");
    writer.skip(&mut pages, PAGE - 64).expect("room");
    writer.put(&mut pages, &[8; 8]).expect("room");
    assert_eq!(pages.words(0, 64), [7; 8]);
    assert_eq!(pages.words(64, PAGE - 64), filled(0, PAGE - 64));
    assert_eq!(pages.words(PAGE, 64), [8; 8]);
    assert_eq!(pages.words(PAGE + 64, 8), [UNTOUCHED]);
    let too_much = writer.skip(&mut pages, PAGE);
    assert!(matches!(too_much, Err(Refused::NoRoom)));
    assert_eq!(writer.head(), PAGE + 64);
}

#[test]
fn full_area_wakes_once_and_continues_when_there_is_room() {
    let (mut area, mut pages) = kept(1, false, PAGE * 8);
    let words = filled(1, 1024);
    for _ in 0..4 {
        let appended = area.append(&mut pages, &entry(&words));
        assert_eq!((appended.whole, appended.written, appended.wake), (true, 1024, false));
    }
    assert_eq!(pages.looks.get(), 1, "at the beginning only");
    let first = area.append(&mut pages, &entry(&words));
    let chunk = Chunk { offset: 0, size: PAGE, flags: TRUNCATED };
    assert_eq!(first, Appended { whole: false, written: 0, chunk: Some(chunk), wake: true });
    assert_eq!(pages.head.get(), PAGE);
    let second = area.append(&mut pages, &entry(&words));
    assert_eq!(second, Appended::default(), "notified already");
    pages.tail.set(1024);
    assert!(area.append(&mut pages, &entry(&words)).whole);
    // The entry above opened a new chunk. The next entry does not fit, so it ends the chunk and wakes the reader again.
    let third = area.append(&mut pages, &entry(&words));
    let chunk = Chunk { offset: PAGE, size: 1024, flags: TRUNCATED | PARTIAL };
    assert_eq!((third.chunk, third.wake), (Some(chunk), true));
}

#[test]
fn loss_before_the_first_byte_is_an_empty_span() {
    let (mut area, mut pages) = kept(1, false, PAGE);
    pages.tail.set(1);
    let appended = area.append(&mut pages, &entry(&filled(1, 64)));
    let chunk = Chunk { offset: 0, size: 0, flags: TRUNCATED };
    assert_eq!((appended.chunk, appended.wake), (Some(chunk), true));
    pages.tail.set(0);
    area.append(&mut pages, &entry(&filled(1, 64)));
    let reported = area.end(&pages, 0).expect("a chunk");
    assert_eq!((reported.size, reported.flags), (64, PARTIAL));
    assert_eq!(area.end(&pages, 0), None, "nothing since");
}

#[test]
fn tail_is_read_only_when_room_runs_out() {
    let (mut area, mut pages) = kept(1, false, PAGE * 8);
    let words = filled(1, 2048);
    area.append(&mut pages, &entry(&words));
    area.append(&mut pages, &entry(&words));
    pages.tail.set(2048);
    assert!(area.append(&mut pages, &entry(&words)).whole, "room freed during the open write");
    assert_eq!(pages.looks.get(), 2);
}

/// VPMU-D-6.8-4.
#[test]
fn invalid_tail_counts_as_a_full_area() {
    for tail in [64 + 8, PAGE, u64::MAX, u64::MAX - PAGE + 63, 1 << 63] {
        let (mut area, mut pages) = kept(1, false, PAGE);
        assert!(area.append(&mut pages, &entry(&filled(1, 64))).whole);
        area.end(&pages, 0);
        pages.tail.set(tail);
        let appended = area.append(&mut pages, &entry(&filled(1, PAGE)));
        assert!(!appended.whole, "{tail:#x}");
        pages.tail.set(64);
        assert!(area.append(&mut pages, &entry(&filled(1, PAGE))).whole);
    }
}

#[test]
fn reader_is_woken_at_multiples_of_the_watermark() {
    let (mut area, mut pages) = kept(2, false, 1024);
    let woken: Vec<bool> = (0..64).map(|_| area.append(&mut pages, &entry(&filled(1, 128))).wake).collect();
    let expected: Vec<bool> = (1..=64).map(|entry| entry * 128 % 1024 == 0).collect();
    assert_eq!(woken, expected);
    // Wakeups occur at multiples of the watermark, counted from the area's first byte and not from the last
    // wakeup.
    pages.tail.set(2 * PAGE);
    let steps = [1000, 1000, 40, 1000].map(|len| {
        let appended = area.append(&mut pages, &entry(&filled(1, len)));
        (appended.wake, appended.chunk.map(|chunk| chunk.size))
    });
    let expected = [(false, None), (true, Some(2000)), (false, None), (true, Some(1040))];
    assert_eq!(steps, expected);
}

#[test]
fn overwriting_area_loses_nothing_and_wakes_no_reader() {
    let (mut area, mut pages) = kept(1, true, 1024);
    pages.tail.set(12345);
    for value in 0..100 {
        let appended = area.append(&mut pages, &entry(&filled(value, 512)));
        assert_eq!(appended, Appended { whole: true, written: 512, chunk: None, wake: false });
    }
    assert_eq!(pages.looks.get(), 0, "the tail is not read");
    let chunk = area.end(&pages, 0).expect("a chunk");
    let all = Chunk { offset: 0, size: 51_200, flags: OVERWRITE };
    assert_eq!((chunk, pages.head.get()), (all, 51_200));
    for back in 1..=8 {
        assert_eq!(pages.words(51_200 - back * 512, 8), [100 - back]);
    }
}

#[test]
fn entry_for_several_overflows_marks_its_span() {
    let (mut area, mut pages) = kept(1, false, PAGE);
    let words = filled(1, 64);
    let several = Entry { collision: true, ..entry(&words) };
    area.append(&mut pages, &several);
    let flags = |chunk: Option<Chunk>| chunk.expect("a chunk").flags;
    assert_eq!(flags(area.end(&pages, 0)), COLLISION);
    area.miss();
    area.append(&mut pages, &entry(&words));
    assert_eq!(flags(area.end(&pages, 0)), PARTIAL);
    area.append(&mut pages, &entry(&words));
    assert_eq!(flags(area.end(&pages, 0)), 0);
}

/// VPMU-D-6.8-5.
#[test]
fn spans_are_joined_after_a_full_ring() {
    let one = Chunk { offset: 64, size: 128, flags: TRUNCATED };
    let next = Chunk { offset: 192, size: 64, flags: PARTIAL };
    let both = Chunk { offset: 64, size: 192, flags: TRUNCATED | PARTIAL };
    assert_eq!(one.with(next), both);
}

#[test]
fn data_for_missing_pages_is_lost() {
    let (mut area, mut pages) = kept(1, false, PAGE);
    pages.hole = Some(128);
    assert!(area.append(&mut pages, &entry(&filled(1, 128))).whole);
    let appended = area.append(&mut pages, &entry(&filled(2, 64)));
    assert_eq!((appended.whole, appended.written), (false, 0));
    pages.hole = None;
    assert!(area.append(&mut pages, &entry(&filled(3, 64))).whole);
    assert_eq!(pages.words(128, 8), [3]);
}

#[test]
fn driver_sets_position_and_room() {
    let (mut area, mut pages) = driven(false, PAGE * 8);
    let words = filled(1, 128);
    assert_eq!(area.position(5), None);
    assert_eq!(area.append(&mut pages, 5, &entry(&words)), Appended::default());
    assert!(matches!(area.finish(5), Err(Refused::NotBegun)));
    assert!(matches!(area.begin(5, 0, PAGE + 1), Err(Refused::NoRoom)));
    let head = u64::MAX - 127;
    area.begin(5, head, 256).expect("begun");
    assert!(matches!(area.begin(6, 0, 64), Err(Refused::Nested)));
    assert_eq!((area.position(5), area.position(6)), (Some(head), None));
    assert!(!area.append(&mut pages, 6, &entry(&words)).whole, "the span is of another event");
    for _ in 0..2 {
        assert!(area.append(&mut pages, 5, &entry(&words)).whole);
    }
    assert_eq!(pages.words(0, 128), words, "round the end");
    for _ in 0..3 {
        assert!(!area.append(&mut pages, 5, &entry(&words)).whole);
    }
    assert!(matches!(area.finish(6), Err(Refused::NotBegun)));
    assert_eq!(area.finish(5).expect("begun"), (128, 384));
    assert!(matches!(area.finish(5), Err(Refused::NotBegun)));
    assert_eq!((pages.head.get(), pages.looks.get()), (0, 0), "the driver manages head and tail");
    area.begin(6, 128, 128).expect("begun");
    let reported: Vec<bool> = (0..4).map(|_| area.append(&mut pages, 6, &entry(&words)).wake).collect();
    assert_eq!(reported, [true, false, false, false], "notified once per span, when little room is left");
    assert_eq!(area.finish(6).expect("begun"), (256, 384));
}

#[test]
fn driver_is_notified_at_the_watermark() {
    let (mut area, mut pages) = driven(false, 1024);
    area.begin(5, 960, PAGE).expect("begun");
    let reported: Vec<bool> = (0..20).map(|_| area.append(&mut pages, 5, &entry(&filled(1, 64))).wake).collect();
    assert_eq!(reported.iter().position(|&reported| reported), Some(0));
    assert_eq!(reported.iter().filter(|&&reported| reported).count(), 1);
}

#[test]
fn driver_is_notified_before_its_room_ends() {
    let (mut area, mut pages) = driven(false, 1 << 20);
    area.begin(5, 64, 1024).expect("begun");
    let reported: Vec<bool> = (0..17).map(|_| area.append(&mut pages, 5, &entry(&filled(1, 64))).wake).collect();
    let half: Vec<bool> = (1..=17).map(|packet| packet == 8).collect();
    assert_eq!(reported, half, "notified when half of the room is used, and not again at the loss");
}

#[test]
fn snapshot_driver_has_unlimited_room() {
    let (mut area, mut pages) = driven(true, 1024);
    area.begin(5, 64, PAGE).expect("begun");
    for value in 0..200 {
        let appended = area.append(&mut pages, 5, &entry(&filled(value, 64)));
        assert_eq!((appended.whole, appended.wake), (true, false));
    }
    assert_eq!(area.finish(5).expect("begun"), (64 + 200 * 64, 0));
    assert_eq!(pages.words(200 * 64, 8), [199]);
}

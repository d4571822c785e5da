//! Tests each rule of a ring separately.

use super::*;
use crate::abi::Metadata;
use crate::record::SAMPLE_TIME;
use crate::ring::user_page::{CAP_USER_TIME, CAPABILITIES};

#[test]
fn absent_reader_loses_all_but_the_first_fill() {
    for mode in [FORWARD, BACKWARD] {
        let mut fixture = Fixture::new(1, mode, Wakeup::Page);
        for _ in 0..1000 {
            fixture.produce(16);
        }
        fixture.settle();
        assert_eq!((fixture.read.len(), fixture.lost), (4096 / 16, 1000 - 256));
    }
}

#[test]
fn first_loss_wakes_a_reader_whose_mark_is_beyond_the_ring() {
    for wakeup in [Wakeup::Records(1_000_000), Wakeup::Bytes(1 << 20)] {
        let mut fixture = Fixture::new(1, FORWARD, wakeup);
        let woke: Vec<_> = (1..=1000).filter(|_| fixture.produce(16).wake).collect();
        assert_eq!(woke, [257], "{wakeup:?}");
        // Only the first of these losses woke the reader. Now the reader frees space, so the device writes a
        // record of the losses, and the next loss wakes the reader again.
        fixture.consume(usize::MAX);
        let woke: Vec<_> = (1..=1000).filter(|_| fixture.produce(16).wake).collect();
        assert_eq!(woke, [255], "{wakeup:?}, the loss record takes 24 bytes");
        fixture.settle();
    }
}

#[test]
fn ring_without_data_pages_writes_nothing() {
    for mode in [FORWARD, OVERWRITE] {
        let mut fixture = Fixture::new(0, mode, Wakeup::Page);
        assert_eq!(fixture.produce(16), Outcome::default());
        assert!(!fixture.flush());
        assert!(fixture.is_clean_outside());
    }
}

#[test]
fn burst_moves_the_head_once() {
    let mut fixture = Fixture::new(1, FORWARD, Wakeup::Page);
    let (layout, sample_id) = (Layout::default(), SampleId::default());
    let context = context(&layout, &sample_id, Wakeup::Page);
    let at = GuestAddress(META + DATA_HEAD as u64);
    let head = || -> u64 { fixture.memory.load(at, Ordering::Acquire).expect("memory") };
    let view = View::of(&fixture.memory);
    let mut session = fixture.ring.session(&view).expect("memory");
    for number in 1..=3 {
        assert!(session.write(&numbered(number, 16), &context).written);
        assert_eq!(head(), 0);
    }
    drop(session);
    assert_eq!(head(), 48);
}

#[test]
fn paused_ring_loses_records_and_wakes_no_reader() {
    for mode in [FORWARD, BACKWARD, OVERWRITE] {
        let mut fixture = Fixture::new(1, mode, Wakeup::Records(1));
        fixture.produce(16);
        fixture.ring.pause(true);
        for _ in 0..5 {
            assert_eq!(fixture.produce(16), Outcome::default());
        }
        assert!(!fixture.flush());
        fixture.consume(usize::MAX);
        assert_eq!((fixture.read.as_slice(), fixture.lost), (&[1][..], 0));
        fixture.ring.pause(false);
        assert!(fixture.produce(16).written);
        fixture.consume(usize::MAX);
        assert_eq!((fixture.read.as_slice(), fixture.lost), (&[1, 7][..], 5));
    }
}

#[test]
fn note_that_does_not_fit_is_not_counted_as_lost() {
    let mut fixture = Fixture::new(1, FORWARD, Wakeup::Records(1));
    let (layout, sample_id) = (Layout::default(), SampleId::default());
    fixture.produce(4080);
    let note = numbered(99, 24);
    let context = context(&layout, &sample_id, Wakeup::Records(1));
    let refused = fixture.ring.note(&View::of(&fixture.memory), &note, &context);
    assert_eq!(refused, Outcome::default());
    fixture.consume(usize::MAX);
    let written = fixture.ring.note(&View::of(&fixture.memory), &note, &context);
    assert!(written.written && !written.wake, "only samples count towards the wakeup");
    fixture.consume(usize::MAX);
    assert_eq!((fixture.read.as_slice(), fixture.lost), (&[1, 99][..], 0));
}

#[test]
fn events_that_share_a_ring_keep_separate_wakeup_counts() {
    let mut fixture = Fixture::new(1, FORWARD, Wakeup::Page);
    let mut wakes = Vec::new();
    for turn in 0..12 {
        fixture.wakeup = [Wakeup::Records(2), Wakeup::Bytes(64)][turn % 2];
        wakes.push(fixture.produce(16).wake);
    }
    // Every second record of the first event wakes the reader. The second event wakes the reader after every 64 bytes
    // that the two events wrote together.
    let by_records = [false, true, false, true, false, true];
    let by_bytes = [false, true, false, true, false, true];
    assert_eq!(wakes.iter().step_by(2).copied().collect::<Vec<_>>(), by_records);
    assert_eq!(wakes[1..].iter().step_by(2).copied().collect::<Vec<_>>(), by_bytes);
}

#[test]
fn loss_is_recorded_for_the_next_writing_event() {
    let mut fixture = Fixture::new(1, FORWARD, Wakeup::Page);
    fixture.ring.lose(3);
    let layout = Layout { sample_type: SAMPLE_TIME, sample_id_all: true, ..Layout::default() };
    let sample_id = SampleId { id: 5, time: 77, ..SampleId::default() };
    let context = context(&layout, &sample_id, Wakeup::Page);
    fixture.ring.write(&View::of(&fixture.memory), &numbered(1, 16), &context);
    let words: Vec<_> = (0..4).map(|word| fixture.word(word * 8)).collect();
    assert_eq!(words, [u64::from(TYPE_LOST) | 32 << 48, 5, 3, 77]);
    assert_eq!(fixture.record(32, 16), (Ok(1), 16));
}

#[test]
fn metadata_page_counts_change_between_even_sequences() {
    let mut fixture = Fixture::new(1, FORWARD, Wakeup::Page);
    fixture.ring.update_page(
        &View::of(&fixture.memory),
        &CountSnapshot { count: 11, time_enabled: 22, time_running: 21, growing_since: Some(5) },
    );
    let page: Metadata = {
        let mut bytes = [0; size_of::<Metadata>()];
        fixture.memory.read_slice(&mut bytes, GuestAddress(META)).expect("memory");
        zerocopy::transmute!(bytes)
    };
    assert_eq!(page.lock.get(), 2);
    assert_eq!(page.index.get(), 0);
    assert_eq!(page.pmc_width.get(), 64);
    assert_eq!(page.offset.get(), 11);
    assert_eq!(page.time_enabled.get(), 22);
    assert_eq!(page.time_running.get(), 21);
    assert_eq!(page.time_offset.get(), 5_u64.wrapping_neg());
    assert_eq!(page.capabilities.get() & CAP_USER_TIME, CAP_USER_TIME);
    assert_eq!(page.data_offset.get(), 4096);
    assert_eq!(page.data_size.get(), 4096);
    fixture.ring.update_page(
        &View::of(&fixture.memory),
        &CountSnapshot { count: 12, time_enabled: 22, time_running: 21, growing_since: None },
    );
    let capabilities: u64 = fixture.memory.read_obj(GuestAddress(META + CAPABILITIES as u64)).expect("memory");
    assert_eq!(capabilities & CAP_USER_TIME, 0, "a stopped count has no time to add");
}

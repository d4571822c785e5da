//! Property tests with records of any length, rings of any size, and honest and dishonest readers of any speed.

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
enum Step {
    Produce(Vec<usize>),
    Consume(usize),
    Lie(u64),
    Pause(bool),
}

/// Lengths of records: mostly short, sometimes up to the maximum.
fn lens() -> impl Strategy<Value = Vec<usize>> {
    let len = prop_oneof![
        8 => (1_usize..12).prop_map(|words| words * 8),
        2 => (1_usize..600).prop_map(|words| words * 8),
        1 => (1_usize..=8191).prop_map(|words| words * 8),
    ];
    prop::collection::vec(len, 1..60)
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => lens().prop_map(Step::Produce),
        4 => (0_usize..100).prop_map(Step::Consume),
        1 => any::<u64>().prop_map(Step::Lie),
        1 => (0_u64..40_000).prop_map(Step::Lie),
        1 => any::<bool>().prop_map(Step::Pause),
    ];
    prop::collection::vec(step, 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn written_and_lost_records_add_up_to_produced(
        steps in steps(), power in 0_u32..5, backward in any::<bool>(),
    ) {
        let mode = RingMode { writable: true, backward };
        let mut fixture = Fixture::new(1 << power, mode, Wakeup::Page);
        for step in steps {
            match step {
                Step::Produce(lens) => {
                    let outcomes = fixture.burst(&lens);
                    prop_assert_eq!(outcomes.len(), lens.len());
                }
                Step::Consume(n) => fixture.consume(n),
                Step::Pause(paused) => fixture.ring.pause(paused),
                // Set the tail only if it is far from the head. The producer then recognises the tail as invalid, and
                // stops. A wrong tail near the head can be a valid position, so the producer could overwrite unread
                // records.
                Step::Lie(tail) => {
                    let ahead = tail.wrapping_sub(fixture.head());
                    if ahead.wrapping_add(1 << 32) >= 1 << 33 {
                        fixture.set_tail(tail);
                    }
                }
            }
        }
        fixture.ring.pause(false);
        fixture.settle();
        prop_assert!(fixture.is_clean_outside());
    }

    #[test]
    fn invalid_tail_never_moves_a_write_outside_the_ring(
        steps in steps(), power in 0_u32..5, data in any::<bool>(),
        writable in any::<bool>(), backward in any::<bool>(),
    ) {
        let mode = RingMode { writable, backward };
        let mut fixture = Fixture::new(if data { 1 << power } else { 0 }, mode, Wakeup::Page);
        for step in steps {
            match step {
                Step::Produce(lens) => { fixture.burst(&lens); }
                Step::Consume(n) => fixture.set_tail(n as u64),
                Step::Pause(paused) => fixture.ring.pause(paused),
                Step::Lie(tail) => fixture.set_tail(tail),
            }
        }
        prop_assert!(fixture.is_clean_outside());
    }

    #[test]
    fn overwritten_ring_has_the_newest_records(bursts in prop::collection::vec(lens(), 1..20), power in 0_u32..5) {
        for backward in [false, true] {
            let mode = RingMode { writable: false, backward };
            let mut fixture = Fixture::new(1 << power, mode, Wakeup::Page);
            // Position, number and size of each written record.
            let (mut written, mut head) = (Vec::new(), 0_u64);
            let mut lost_by = 0;
            for lens in &bursts {
                let first = fixture.produced + 1;
                for ((number, &len), outcome) in (first..).zip(lens).zip(fixture.burst(lens)) {
                    let fits = len as u64 + if lost_by > 0 { 24 } else { 0 } <= fixture.size();
                    prop_assert_eq!(outcome.written, fits, "only a record longer than the ring is lost");
                    if !fits {
                        lost_by += 1;
                        continue;
                    }
                    let lost = if std::mem::take(&mut lost_by) > 0 { 24 } else { 0 };
                    let all = lost + len as u64;
                    let at = if backward { head.wrapping_sub(all) } else { head };
                    head = if backward { at } else { at + all };
                    written.push((number, at.wrapping_add(lost), len as u64));
                }
                prop_assert_eq!(fixture.head(), head);
            }
            let size = fixture.size();
            for &(number, at, len) in written.iter().rev() {
                let end = at.wrapping_add(len);
                let age = if backward { end.wrapping_sub(head) } else { head - at };
                if age > size {
                    break;
                }
                prop_assert_eq!(fixture.record(at, len), (Ok(number), len));
            }
            if backward {
                // A reader that knows only the head finds the same records, newest first.
                let (mut at, mut found) = (head, Vec::new());
                while at != 0 && at.wrapping_sub(head) < size {
                    let room = size - at.wrapping_sub(head);
                    if fixture.word(at) >> 48 > room {
                        break;
                    }
                    let (record, len) = fixture.record(at, room);
                    found.extend(record.ok());
                    at = at.wrapping_add(len);
                }
                let whole = written.iter().rev().take_while(|(_, at, len)| {
                    at.wrapping_add(*len).wrapping_sub(head) <= size
                });
                prop_assert_eq!(found, whole.map(|&(number, ..)| number).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn wakeups_by_records_and_bytes(
        every in 1_u32..300, produced in 1_usize..2000, backward in any::<bool>(),
    ) {
        let mode = RingMode { writable: false, backward };
        for (wakeup, grown) in [
            (Wakeup::Records(every), produced as u64),
            (Wakeup::Bytes(every), produced as u64 * 16),
            (Wakeup::Page, produced as u64 * 16),
        ] {
            let mut fixture = Fixture::new(8, mode, wakeup);
            let wakes = (0..produced).filter(|_| fixture.produce(16).wake).count() as u64;
            // A record of 16 bytes causes only one wakeup, even if the wakeup interval is shorter than the record.
            let expected = match wakeup {
                Wakeup::Bytes(1..16) => produced as u64,
                Wakeup::Page => grown / PAGE,
                _ => grown / u64::from(every),
            };
            prop_assert_eq!(wakes, expected);
        }
    }
}

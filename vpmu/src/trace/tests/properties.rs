//! Random traces and readers: every packet is reported exactly once or counted as lost.

use proptest::prelude::*;

use super::*;
use crate::abi::KIND_SAMPLE_TRACE;

#[derive(Debug, Clone)]
enum Step {
    Exits(u64),
    Samples(u64),
    Commit,
    /// The reader consumes this many quarters (0 to 4) of the unread data.
    Consume(u64),
    Due(u8),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1_u64..90).prop_map(Step::Exits),
        4 => (1_u64..30).prop_map(Step::Samples),
        2 => Just(Step::Commit),
        4 => (0_u64..=4).prop_map(Step::Consume),
        1 => prop_oneof![Just(SYNC_START), Just(SYNC_RESUME)].prop_map(Step::Due),
    ]
}

/// A reader's knowledge of one event's packets.
#[derive(Default)]
struct Seen {
    next: u64,
    lost: u64,
    packets: u64,
    began: bool,
}

impl Seen {
    fn packet(&mut self, sequence: u64) {
        assert!(self.began, "a sync packet comes first");
        assert_eq!(sequence, self.next, "every gap is reported");
        self.next += 1;
        self.packets += 1;
    }

    fn sync(&mut self, sync: &SyncPacket) {
        self.began = true;
        let (next, lost) = (sync.sequence.get(), sync.lost.get());
        if sync.flags & SYNC_LOSS == 0 {
            assert_eq!((next, lost), (self.next, self.lost), "no packet is missing");
        }
        assert!(next >= self.next && lost >= self.lost);
        (self.next, self.lost) = (next, lost);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Two traces in one area, with a reader of any speed. Each byte of the area is reported by exactly one AUX record,
    /// and every packet is in the area or counted as lost.
    #[test]
    fn count_is_what_is_in_the_area_and_what_was_lost(
        steps in prop::collection::vec(step(), 1..60),
        power in 0_u32..4,
        watermark in prop_oneof![Just(0), 64_u32..9000],
        ring in 0_u32..2,
    ) {
        let mut fixture = Fixture::with(u64::from(ring), 1 << power, true, watermark);
        let exits = spec(OWNER, KIND_EXIT_TRACE);
        let samples = spec(6, KIND_SAMPLE_TRACE);
        let (mut exiting, mut sampling) = (Trace::new(), Trace::new());
        let (mut seen_exits, mut seen_samples) = (Seen::default(), Seen::default());
        let (mut produced, mut read, mut reported) = ((0, 0), 0, 0);
        let mut steps = steps;
        // At the end, the reader reads everything.
        steps.extend([Step::Commit, Step::Consume(4), Step::Commit]);
        for step in steps {
            match step {
                Step::Exits(number) => {
                    produced.0 += number;
                    (0..number).for_each(|_| { fixture.exit(&exits, &mut exiting); });
                }
                Step::Samples(number) => {
                    produced.1 += number;
                    (0..number).for_each(|_| { fixture.sample(&samples, &mut sampling, 0); });
                }
                Step::Commit => fixture.commit(&exits),
                Step::Due(flags) => exiting.sync(flags),
                Step::Consume(share) => {
                    let head = fixture.aux_head();
                    let until = read + (head - read) * share / 4;
                    let packets = fixture.packets(read, head);
                    for (at, packet) in packets.into_iter().take_while(|(at, _)| *at < until) {
                        read = at + match packet {
                            Read::Padding => 64,
                            Read::Exit(exit) => {
                                seen_exits.packet(exit.sequence.get());
                                64
                            }
                            Read::Sample(sample) => {
                                seen_samples.packet(sample.sequence.get());
                                256
                            }
                            Read::Sync(sync) => {
                                match sync.event.get() {
                                    OWNER => seen_exits.sync(&sync),
                                    _ => seen_samples.sync(&sync),
                                }
                                64
                            }
                        };
                    }
                    fixture.set_aux_tail(read);
                    for (kind, words) in fixture.records() {
                        prop_assert_eq!((kind, words[0]), (TYPE_AUX, reported));
                        reported += words[1];
                    }
                }
            }
        }
        let head = fixture.aux_head();
        prop_assert_eq!(read, head);
        prop_assert_eq!(exiting.count() + sampling.count(), head + exiting.lost() + sampling.lost());
        let packets_lost = (produced.0 - seen_exits.packets, produced.1 - seen_samples.packets);
        prop_assert_eq!((exiting.lost(), sampling.lost()), (packets_lost.0 * 64, packets_lost.1 * 256));
        for (_, words) in fixture.records() {
            prop_assert_eq!(words[0], reported);
            reported += words[1];
        }
        prop_assert_eq!(reported, if ring == 0 { 0 } else { head });
    }
}

//! Rings that are too small. The number of written records plus the number of lost records is exactly the number of
//! records produced.

use vpmu::ExitReason;
use vpmu::abi::*;
use vpmu_testkit::{
    ALL_FEATURES, At, CYCLES, Fields, Fixture, Reader, Record, account_for_samples, limits, open_of, thread,
};

const SAMPLE: u64 = 72;

struct Produced {
    fixture: Fixture,
    event: u64,
    ring: Reader,
    read: u64,
    lost: u64,
}

impl Produced {
    fn new() -> Self {
        let mut fixture = Fixture::new();
        let event = fixture.opened(&open_of(KIND_MARK, 5, 0).sampled(1).flags(OPEN_ENABLED));
        let ring = fixture.map(event, 1);
        Self { fixture, event, ring, read: 0, lost: 0 }
    }

    fn mark(&self, times: u64) {
        (0..times).for_each(|_| self.fixture.mark(0, 5, 1));
    }

    fn take(&mut self, most: usize) {
        for record in self.ring.take(most) {
            match record {
                Record::Sample(_) => self.read += 1,
                Record::Lost { id, lost } => {
                    assert_eq!(id, self.event);
                    self.lost += lost;
                }
            }
        }
    }

    /// Reads all records, and checks that the records read plus the records lost equal `produced`. To get them all,
    /// reads the ring, sends a command that makes the device report the latest loss, and reads the ring again.
    fn finish(mut self, produced: u64) -> (u64, u64) {
        self.take(usize::MAX);
        let value = self.fixture.value(0, self.event);
        self.take(usize::MAX);
        assert_eq!((value, self.read + self.lost), (produced, produced));
        let metrics = self.fixture.vpmu.metrics();
        assert_eq!((metrics.samples_written, metrics.samples_lost), (self.read, self.lost));
        (self.read, self.lost)
    }
}

/// VPMU-D-6.7-3, VPMU-D-6.7-5.
#[test]
fn lagging_reader_loses_only_counted_records() {
    let mut run = Produced::new();
    for _ in 0..500 {
        run.mark(3);
        run.take(2);
    }
    let (_, lost) = run.finish(1500);
    assert!(lost > 0, "a reader that takes two of three records lost none");
}

/// VPMU-D-6.7-3.
#[test]
fn absent_reader_loses_all_but_a_full_ring() {
    let run = Produced::new();
    run.mark(1000);
    let fill = 4096 / SAMPLE;
    assert_eq!(run.finish(1000), (fill, 1000 - fill));
}

/// VPMU-D-6.7-4.
#[test]
fn invalid_tail_loses_only_counted_records() {
    let fill = 4096 / SAMPLE;
    let full = fill * SAMPLE;
    // Tails that are ahead of the head, tails that are behind it by more than the ring's size, and an impossible value.
    for lie in [full + 1, full + 4096, u64::MAX, 1 << 63, full.wrapping_sub(4097)] {
        let run = Produced::new();
        run.mark(fill);
        run.ring.set_tail(lie);
        run.mark(10);
        assert_eq!(run.ring.head(), full, "nothing is written at {lie:#x}");
        run.ring.set_tail(0);
        assert_eq!(run.finish(fill + 10), (fill, 10), "records written and lost with the tail {lie:#x}");
    }
}

/// VPMU-D-6.7-5.
#[test]
fn last_loss_is_written_when_the_event_is_disabled() {
    let mut run = Produced::new();
    run.mark(100);
    run.take(usize::MAX);
    run.fixture.command(0, COMMAND_DISABLE, run.event);
    let last = run.ring.take(usize::MAX);
    let lost = 100 - 4096 / SAMPLE;
    assert_eq!(last, [Record::Lost { id: run.event, lost }]);
}

#[test]
fn records_dropped_by_the_host_count_as_lost() {
    let mut fixture = Fixture::new();
    let (kind, config) = CYCLES;
    let event = fixture.opened(&open_of(kind, config, 0).sampled(100).flags(OPEN_ENABLED));
    let mut ring = fixture.map(event, 1);
    fixture.host.drop_overflows(thread(0), 7);
    fixture.exit(0, ExitReason::Signal, &mut At(1));
    fixture.command(0, COMMAND_READ, event);
    assert_eq!(ring.take(1), [Record::Lost { id: event, lost: 7 }]);
    assert_eq!(fixture.vpmu.metrics().samples_lost, 7);
}

#[test]
fn event_without_a_ring_loses_every_record() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&open_of(KIND_MARK, 5, 0).sampled(1).flags(OPEN_ENABLED));
    fixture.mark(0, 5, 1);
    let mut ring = fixture.map(event, 1);
    fixture.mark(0, 5, 1);
    assert_eq!(ring.samples().len(), 1);
    fixture.unmap(event).expect("unmapped");
    let head = ring.head();
    fixture.mark(0, 5, 1);
    assert_eq!(ring.head(), head);
    assert_eq!(fixture.vpmu.metrics().samples_lost, 2);
}

/// VPMU-D-6.6-2.
#[test]
fn every_overflow_is_written_lost_or_throttled() {
    for rate in [u32::MAX, 500] {
        let limits = limits().with(|limits| limits.max_sample_rate = rate);
        let mut fixture = Fixture::with(limits, ALL_FEATURES);
        let rings = [[0x10_0000, 0x10_1000], [0x10_2000, 0x10_3000]];
        let overflows = account_for_samples(&mut fixture, 1, &rings).expect("accepted");
        let throttled = overflows.happened - overflows.written - overflows.lost;
        assert!(overflows.written > 0 && (throttled > 0) == (rate == 500), "{overflows:?}");
        assert!(overflows.lost > 0 || rate == 500, "{overflows:?}");
        assert_eq!(fixture.vpmu.metrics().samples_throttled, throttled);
    }
}

//! A driver and a reader execute random operations in random order. The tests check that packets are complete and in
//! order, that AUX records cover all bytes, and that each counted packet is either in an area or lost.

use std::collections::BTreeMap;

use proptest::prelude::*;
use vpmu::ExitReason;
use vpmu::abi::*;
use vpmu_testkit::{
    ALL_FEATURES, AreaReader, At, Fields, Fixture, Packet, Reader, command, header, limits, map_aux, open_of,
};

use super::{AUX, pages};

#[derive(Debug, Clone)]
enum Step {
    Open { config: u64, vcpu: u32, parent: Option<usize>, samples: bool, watermark: u32 },
    Close(usize),
    Command(u32, usize),
    Redirect(usize, Option<usize>),
    Pause(usize, bool),
    Map(usize, u64),
    Unmap(usize),
    MapAux(usize, u32, u64),
    UnmapAux(usize),
    Exits(u32, u64),
    Read(usize),
    Lie(usize, u64),
}

fn step() -> impl Strategy<Value = Step> {
    let event = 0_usize..8;
    let some = prop::option::weighted(0.3, event.clone());
    let marks = prop_oneof![Just(0_u32), 1_u32..9000];
    prop_oneof![
        4 => (EXIT_USER..=EXIT_MMIO, 0_u32..2, some, prop::bool::weighted(0.3), marks).prop_map(
            |(config, vcpu, parent, samples, watermark)| Step::Open {
                config, vcpu, parent, samples, watermark,
            },
        ),
        1 => event.clone().prop_map(Step::Close),
        4 => (COMMAND_ENABLE..=COMMAND_RESET, event.clone())
            .prop_map(|(op, event)| Step::Command(op, event)),
        1 => (event.clone(), prop::option::weighted(0.8, event.clone()))
            .prop_map(|(event, target)| Step::Redirect(event, target)),
        1 => (event.clone(), any::<bool>()).prop_map(|(event, on)| Step::Pause(event, on)),
        4 => (event.clone(), 0_u64..3).prop_map(|(event, order)| Step::Map(event, order)),
        1 => event.clone().prop_map(Step::Unmap),
        4 => (event.clone(), 0_u32..2, 0_u32..3)
            .prop_map(|(event, flags, order)| Step::MapAux(event, flags, 1 << order)),
        1 => event.clone().prop_map(Step::UnmapAux),
        12 => (0_u32..2, 1_u64..150).prop_map(|(vcpu, times)| Step::Exits(vcpu, times)),
        4 => event.clone().prop_map(Step::Read),
        1 => (event, any::<u64>()).prop_map(|(event, tail)| Step::Lie(event, tail)),
    ]
}

/// A ring, and its event's area, if there is one.
struct Mapped {
    metadata: u64,
    ring: Reader,
    area: Option<Read>,
}

/// The test's model of one area.
struct Read {
    area: AreaReader,
    writable: bool,
    /// The end of the last AUX record.
    reported: u64,
    /// Whether the reader has stored an invalid tail. If so, the contents are not checked.
    lies: bool,
    /// The next packet number of each event, if known.
    next: BTreeMap<u64, u64>,
}

struct Run {
    fixture: Fixture,
    opened: Vec<u64>,
    mapped: BTreeMap<u64, Mapped>,
}

impl Run {
    fn new() -> Self {
        let limits = limits().with(|limits| limits.max_sample_rate = u32::MAX);
        Self { fixture: Fixture::with(limits, ALL_FEATURES), opened: Vec::new(), mapped: BTreeMap::new() }
    }

    fn id(&self, place: usize) -> u64 {
        self.opened.get(place).copied().unwrap_or(999)
    }

    /// Reads ring and area of an event.
    fn take(&mut self, id: u64) {
        let Some(mapped) = self.mapped.get_mut(&id) else {
            return;
        };
        for record in mapped.ring.raw() {
            if record.kind != AUX {
                continue;
            }
            let read = mapped.area.as_mut().expect("an area for the record");
            assert_eq!(record.words[0], read.reported, "every byte is reported once");
            read.reported += record.words[1];
            assert_eq!(record.words[2] & 2 != 0, !read.writable);
        }
        let Some(read) = mapped.area.as_mut() else {
            return;
        };
        assert!(read.reported <= read.area.head(), "an AUX record reports data that is not published");
        if read.lies || !read.writable {
            return;
        }
        for packet in read.area.take() {
            let number = match packet {
                Packet::Sync(sync) => {
                    let (event, number) = (sync.event.get(), sync.sequence.get());
                    assert!(self.opened.contains(&event));
                    let next = read.next.entry(event).or_insert(0);
                    assert!(number >= *next, "a sync packet has the number {number}, expected at least {next}");
                    *next = number;
                    continue;
                }
                Packet::Exit(exit) => exit.sequence.get(),
                Packet::Sample(sample) => sample.sequence.get(),
            };
            // Exit and sample packets do not contain the id of their trace, so their numbers can be checked only if one
            // trace alone writes to the area. Each packet must then have the next number of that trace.
            assert!(!read.next.is_empty(), "a packet comes before the first sync packet");
            let alone = read.next.len() == 1;
            if let Some(next) = read.next.values_mut().next().filter(|_| alone) {
                assert_eq!(number, *next, "every gap has a sync packet");
                *next += 1;
            }
        }
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Open { config, vcpu, parent, samples, watermark } => {
                let (kind, config, period) = match samples {
                    true => (KIND_SAMPLE_TRACE, PACE_EXITS, 2),
                    false => (KIND_EXIT_TRACE, config, 0),
                };
                let request = open_of(kind, config, vcpu)
                    .period(period)
                    .flags(OPEN_ENABLED)
                    .parent(parent.map_or(0, |place| self.id(place)))
                    .aux_watermark(watermark);
                if let Ok(id) = self.fixture.open(&request) {
                    self.opened.push(id);
                }
            }
            Step::Close(place) => {
                let _ = self.fixture.close(self.id(place));
            }
            Step::Command(op, place) => {
                self.fixture.command(0, op, self.id(place));
            }
            Step::Redirect(place, target) => {
                let target = target.map_or(0, |place| self.id(place));
                let _ = self.fixture.redirect(self.id(place), target);
            }
            Step::Pause(place, on) => {
                let _ = self.fixture.pause(self.id(place), on.into());
            }
            Step::Map(place, order) => {
                let id = self.id(place);
                // Each mapping has its own pages, so that a later mapping does not overwrite data already read.
                let ring = pages(&mut self.fixture, 1 + order * order);
                if self.fixture.map_pages(id, MAP_WRITABLE, &ring).is_ok() {
                    self.take(id);
                    let mapped =
                        Mapped { metadata: ring[0], ring: Reader::new(&self.fixture.memory, &ring), area: None };
                    self.mapped.insert(id, mapped);
                }
            }
            Step::Unmap(place) => {
                let id = self.id(place);
                self.take(id);
                if self.fixture.unmap(id).is_ok() {
                    self.take(id);
                    self.mapped.remove(&id);
                }
            }
            Step::MapAux(place, flags, count) => {
                let id = self.id(place);
                self.take(id);
                let area = pages(&mut self.fixture, count);
                if map_aux(&mut self.fixture, id, flags, &area).is_ok()
                    && let Some(mapped) = self.mapped.get_mut(&id)
                {
                    mapped.area = Some(Read {
                        area: AreaReader::new(&self.fixture, mapped.metadata, area),
                        writable: flags & MAP_WRITABLE != 0,
                        reported: 0,
                        lies: false,
                        next: BTreeMap::new(),
                    });
                }
            }
            Step::UnmapAux(place) => {
                let id = self.id(place);
                self.take(id);
                if self.fixture.control(&header(CONTROL_UNMAP_AUX, id)).is_ok() {
                    self.take(id);
                    if let Some(mapped) = self.mapped.get_mut(&id) {
                        mapped.area = None;
                    }
                }
            }
            Step::Exits(vcpu, times) => {
                for ip in 0..times {
                    let reasons = [ExitReason::Io, ExitReason::Mmio, ExitReason::Hlt];
                    let reason = reasons[usize::try_from(ip % 3).expect("small")];
                    self.fixture.exit(vcpu, reason, &mut At(ip));
                }
            }
            Step::Read(place) => self.take(self.id(place)),
            Step::Lie(place, tail) => {
                let id = self.id(place);
                let area = self.mapped.get_mut(&id).and_then(|mapped| mapped.area.as_mut());
                if let Some(read) = area {
                    read.lies = true;
                    read.area.set_tail(tail);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// VPMU-D-6.8-1, VPMU-D-6.8-2.
    #[test]
    fn packets_are_whole_and_every_byte_is_reported_once(
        steps in prop::collection::vec(step(), 1..100),
    ) {
        let mut run = Run::new();
        for step in &steps {
            run.step(step);
        }
        let ids: Vec<u64> = run.mapped.keys().copied().collect();
        ids.into_iter().for_each(|id| run.take(id));
    }

    /// Maps and unmaps areas of traces that are never closed.
    #[test]
    fn counted_bytes_are_written_or_lost(
        steps in prop::collection::vec(step(), 1..100),
    ) {
        let mut run = Run::new();
        for (vcpu, config) in [(0, EXIT_USER), (1, EXIT_IO), (0, EXIT_MMIO)] {
            run.step(&Step::Open { config, vcpu, parent: None, samples: vcpu == 1, watermark: 0 });
        }
        for step in &steps {
            match step {
                Step::Open { .. } | Step::Close(_) => {}
                Step::Command(op, _) if *op == COMMAND_RESET => {}
                step => run.step(step),
            }
        }
        let (mut counted, mut lost) = (0, 0);
        let all = |op| -> Vec<Command> { run.opened.iter().map(|&id| command(op, id)).collect() };
        let (off, read) = (all(COMMAND_DISABLE), all(COMMAND_READ));
        // The notification for the commands that disable the traces is also an exit. It is the last exit that the
        // traces record. The commands that read the traces add nothing.
        run.fixture.commands(0, &off);
        for reply in run.fixture.commands(0, &read) {
            counted += reply.value.get();
            lost += reply.lost.get();
        }
        let metrics = run.fixture.vpmu.metrics();
        prop_assert_eq!(metrics.aux_lost, lost);
        prop_assert_eq!(metrics.aux_written + lost, counted);
    }
}

//! A driver executes random operations in random order. The tests check that each overflow is written, lost or
//! throttled, that records are complete, and that each record has the id of an event that was opened.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use vpmu::abi::*;
use vpmu_testkit::{ALL_FEATURES, Fields, Fixture, LOST, READ, Reader, SAMPLE, THROTTLE, UNTHROTTLE, limits, open_of};

/// A step of the driver. A `usize` selects an event by its position among all events opened so far.
#[derive(Debug, Clone)]
enum Step {
    Open {
        task: bool,
        period: u64,
        leader: Option<usize>,
        parent: Option<usize>,
        frequency: bool,
        enabled: bool,
        stat: bool,
    },
    Close(usize),
    Command(u32, u32, usize),
    Refresh(u32, usize, u64),
    Period(usize, u64),
    Redirect(usize, Option<usize>),
    Pause(usize, bool),
    Map(usize, u64),
    Unmap(usize),
    Mark(u32, u64),
    Read(usize),
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let event = 0_usize..12;
    let some = prop::option::weighted(0.3, event.clone());
    prop_oneof![
        4 => (
            (any::<bool>(), 1_u64..4, some.clone(), some),
            (prop::bool::weighted(0.2), any::<bool>(), any::<bool>()),
        )
            .prop_map(|((task, period, leader, parent), (frequency, enabled, stat))| Step::Open {
                task, period, leader, parent, frequency, enabled, stat,
            }),
        1 => event.clone().prop_map(Step::Close),
        4 => (0_u32..2, COMMAND_ENABLE..=COMMAND_RESET, event.clone())
            .prop_map(|(vcpu, op, event)| Step::Command(vcpu, op, event)),
        1 => (0_u32..2, event.clone(), 0_u64..5)
            .prop_map(|(vcpu, event, value)| Step::Refresh(vcpu, event, value)),
        1 => (event.clone(), 0_u64..5).prop_map(|(event, period)| Step::Period(event, period)),
        2 => (event.clone(), prop::option::weighted(0.8, event.clone()))
            .prop_map(|(event, target)| Step::Redirect(event, target)),
        1 => (event.clone(), any::<bool>()).prop_map(|(event, on)| Step::Pause(event, on)),
        2 => (event.clone(), 0_u64..3).prop_map(|(event, order)| Step::Map(event, order)),
        1 => event.clone().prop_map(Step::Unmap),
        8 => (0_u32..2, 1_u64..40).prop_map(|(vcpu, times)| Step::Mark(vcpu, times)),
        2 => event.prop_map(Step::Read),
        1 => (0_u64..20_000_000).prop_map(Step::Pass),
    ]
}

/// The test's model of each opened event.
struct Run {
    fixture: Fixture,
    /// Id and family of each event.
    opened: Vec<(u64, u64)>,
    rings: BTreeMap<u64, Reader>,
    samples: u64,
    told_lost: u64,
}

impl Run {
    fn new() -> Self {
        let limits = limits().with(|limits| {
            limits.max_sample_rate = 3000;
            limits.max_pages = 20;
        });
        Self {
            fixture: Fixture::with(limits, ALL_FEATURES),
            opened: Vec::new(),
            rings: BTreeMap::new(),
            samples: 0,
            told_lost: 0,
        }
    }

    /// Returns the id of an opened event, or the id of an event that never existed.
    fn id(&self, place: usize) -> u64 {
        self.opened.get(place).map_or(999, |&(id, _)| id)
    }

    fn take(&mut self, id: u64) {
        let Some(ring) = self.rings.get_mut(&id) else {
            return;
        };
        let ids: BTreeSet<u64> = self.opened.iter().map(|&(id, _)| id).collect();
        let families: BTreeSet<u64> = self.opened.iter().map(|&(_, family)| family).collect();
        for record in ring.raw() {
            let (family, stream) = match record.kind {
                SAMPLE => {
                    self.samples += 1;
                    assert_eq!(record.words.len(), 8);
                    (record.words[0], record.words[5])
                }
                LOST => {
                    self.told_lost += record.words[1];
                    assert_eq!(record.words.len(), 2);
                    (record.words[0], record.words[0])
                }
                THROTTLE | UNTHROTTLE => (record.words[1], record.words[2]),
                READ => continue,
                other => panic!("unexpected record of type {other}"),
            };
            assert!(families.contains(&family) && ids.contains(&stream));
        }
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Open { task, period, leader, parent, frequency, enabled, stat } => {
                let flag = |on: bool, flag| if on { flag } else { 0 };
                let leader = leader.map_or(0, |place| self.id(place));
                let parent = parent.map_or(0, |place| self.id(place));
                let context = if task { CONTEXT_TASK } else { 0 };
                let request = open_of(KIND_MARK, 5, context)
                    .sampled(period)
                    .flags(flag(frequency, OPEN_FREQ) | flag(enabled, OPEN_ENABLED) | flag(stat, OPEN_INHERIT_STAT))
                    .leader(leader)
                    .parent(parent);
                if let Ok(id) = self.fixture.open(&request) {
                    let family = self.opened.iter().find(|&&(id, _)| id == parent);
                    let family = family.map_or(id, |&(_, family)| family);
                    self.opened.push((id, family));
                }
            }
            Step::Close(place) => {
                let _ = self.fixture.close(self.id(place));
            }
            Step::Command(vcpu, op, place) => {
                self.fixture.command(vcpu, op, self.id(place));
            }
            Step::Refresh(vcpu, place, value) => {
                self.fixture.valued(vcpu, COMMAND_REFRESH, self.id(place), value);
            }
            Step::Period(place, period) => {
                self.fixture.valued(0, COMMAND_PERIOD, self.id(place), period);
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
                if let Ok(reader) = self.fixture.try_map(id, order * order) {
                    self.take(id);
                    self.rings.insert(id, reader);
                }
            }
            Step::Unmap(place) => {
                let id = self.id(place);
                self.take(id);
                if self.fixture.unmap(id).is_ok() {
                    self.take(id);
                }
            }
            Step::Mark(vcpu, times) => (0..times).for_each(|_| self.fixture.mark(vcpu, 5, 1)),
            Step::Read(place) => self.take(self.id(place)),
            Step::Pass(ticks) => self.fixture.host.pass(ticks),
        }
    }

    /// Reads all rings. Checks that all written samples were read, and that the LOST records report no more losses than
    /// the device counted.
    fn check(&mut self) {
        let ids: Vec<u64> = self.rings.keys().copied().collect();
        ids.into_iter().for_each(|id| self.take(id));
        let metrics = self.fixture.vpmu.metrics();
        assert_eq!(self.samples, metrics.samples_written, "every written sample was read");
        assert!(self.told_lost <= metrics.samples_lost);
        let lost: u64 = self.opened.iter().map(|&(id, _)| self.fixture.command(0, COMMAND_READ, id).lost.get()).sum();
        assert!(lost <= metrics.samples_lost, "the open events lost more samples than the device counted");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn records_are_whole_and_name_existing_events(steps in prop::collection::vec(step(), 1..120)) {
        let mut run = Run::new();
        for step in &steps {
            run.step(step);
        }
        run.check();
    }

    /// VPMU-D-6.6-2.
    #[test]
    fn every_overflow_is_written_lost_or_throttled(steps in prop::collection::vec(step(), 1..120), periods in prop::collection::vec(1_u64..5, 3)) {
        let mut run = Run::new();
        // Open events with fixed periods: one on each vCPU, and a child. The number of marks determines the expected
        // number of overflows of each event.
        let request = |period: u64, vcpu, parent: u64| open_of(KIND_MARK, 6, vcpu).sampled(period).parent(parent).flags(OPEN_ENABLED);
        let mut own = Vec::new();
        for (index, &period) in periods.iter().enumerate() {
            let vcpu = u32::from(index > 0);
            let parent = if index == 2 { own[1] } else { 0 };
            own.push(run.fixture.opened(&request(period, vcpu, parent)));
        }
        run.opened.extend([(own[0], own[0]), (own[1], own[1]), (own[2], own[1])]);
        let mut marks = [0_u64; 2];
        for step in &steps {
            // Skip the other steps, because they could change the counts of these events.
            match step {
                Step::Redirect(..) | Step::Pause(..) | Step::Map(..) | Step::Unmap(_)
                | Step::Read(_) | Step::Pass(_) => run.step(step),
                Step::Mark(vcpu, times) => {
                    marks[*vcpu as usize] += times;
                    (0..*times).for_each(|_| run.fixture.mark(*vcpu, 6, 1));
                }
                _ => {}
            }
        }
        let overflows = marks[0] / periods[0] + marks[1] / periods[1] + marks[1] / periods[2];
        let lost: u64 = own.iter().map(|&id| run.fixture.read(0, id).lost.get()).sum();
        run.check();
        let metrics = run.fixture.vpmu.metrics();
        prop_assert_eq!(metrics.samples_lost, lost);
        prop_assert_eq!(metrics.samples_written + lost + metrics.samples_throttled, overflows);
    }
}

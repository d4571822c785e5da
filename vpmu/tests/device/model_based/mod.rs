//! Random sequences of steps that open, link, pause, flush, detach and end events, and that reset or save the device.
//! After each step, the test compares the device with a model.

mod model;

use std::collections::BTreeMap;

use proptest::prelude::*;
use vm_memory::GuestMemoryMmap;
use vpmu::Persist;
use vpmu::abi::*;
use vpmu::source::Rate;
use vpmu_testkit::{Errno, Fields, Fixture, Reader, SAMPLE, WINDOW_FEATURES, command, limits, open_of, window};

use self::model::{Context, Event, MOST, Model, Ring};
use crate::persistent::{name, reader};

const IP: u64 = 1;
const NAMES: [&str; 3] = ["one", "two", "event1"];

/// A step of the test. A `usize` selects an event by its position among the open events.
#[derive(Debug, Clone)]
enum Step {
    /// Opens an event. If the event is to be a group member, the second field is the leader's position.
    Open(Event, Option<usize>),
    /// The operator starts an event. The fields are the vCPU, the value of the mark, and the period.
    Start(u32, u64, u64),
    End(usize),
    Close(usize),
    Detach(usize, Option<usize>),
    Attach(usize),
    Link(usize, usize, u32),
    Map(usize, bool),
    Unmap(usize),
    /// A command. The fields are the vCPU that notifies, the operation and the event.
    Command(u32, u32, usize),
    Refresh(u32, usize, u64),
    In(u32, usize),
    Out(u32, usize),
    /// The vCPU gets a new thread.
    Thread(u32),
    Mark(u32, u32, u64),
    Flush(u32, Option<usize>),
    HostFlush(Option<usize>),
    /// The device is saved. Another device is restored from the saved state and takes its place.
    Move,
    Reset,
}

/// Mostly vCPU 0, so that events interact.
fn vcpu() -> impl Strategy<Value = u32> {
    prop_oneof![9 => Just(0_u32), 1 => Just(1)]
}

/// Half of the events are task events, which are scheduled out when they are opened.
fn context() -> impl Strategy<Value = Context> {
    prop_oneof![vcpu().prop_map(Context::Vcpu), Just(Context::Task(None))]
}

fn config() -> impl Strategy<Value = u64> {
    prop_oneof![4 => 1_u64..3, 1 => Just(MARK_ANY)]
}

fn period() -> impl Strategy<Value = u64> {
    prop_oneof![1 => Just(0_u64), 3 => Just(1), 1 => 2_u64..4]
}

fn event() -> impl Strategy<Value = Event> {
    let flags = (prop::bool::weighted(0.8), prop::bool::weighted(0.4), prop::bool::weighted(0.3));
    (context(), config(), period(), flags).prop_map(|(context, config, period, (enabled, paused, persistent))| Event {
        context,
        leader: None,
        config,
        period,
        enabled,
        paused,
        count: 0,
        progress: 0,
        limit: 0,
        lost: 0,
        name: (persistent && context != Context::Task(None)).then(String::new),
        operator: false,
        ring: None,
    })
}

fn step() -> impl Strategy<Value = Step> {
    let place = prop_oneof![3 => 0_usize..4, 1 => 4_usize..8];
    let some = prop::option::weighted(0.7, place.clone());
    let role = prop_oneof![9 => LINK_STARTER..=LINK_STOPPER, 1 => Just(LINK_STOPPER + 1)];
    prop_oneof![
        20 => (event(), prop::option::weighted(0.3, place.clone())).prop_map(|(event, leader)| Step::Open(event, leader)),
        2 => (vcpu(), config(), 1_u64..3).prop_map(|(vcpu, config, period)| Step::Start(vcpu, config, period)),
        2 => place.clone().prop_map(Step::End),
        8 => place.clone().prop_map(Step::Close),
        12 => (place.clone(), prop::option::of(0..NAMES.len())).prop_map(|(place, name)| Step::Detach(place, name)),
        8 => place.clone().prop_map(Step::Attach),
        24 => (place.clone(), place.clone(), role).prop_map(|(one, other, role)| Step::Link(one, other, role)),
        16 => (place.clone(), any::<bool>()).prop_map(|(place, window)| Step::Map(place, window)),
        2 => place.clone().prop_map(Step::Unmap),
        16 => (0_u32..2, prop::sample::select(&[COMMAND_ENABLE, COMMAND_DISABLE, COMMAND_RESET][..]), place.clone())
            .prop_map(|(by, op, place)| Step::Command(by, op, place)),
        4 => (0_u32..2, place.clone(), 0_u64..4).prop_map(|(by, place, overflows)| Step::Refresh(by, place, overflows)),
        40 => (0_u32..2, place.clone()).prop_map(|(vcpu, place)| Step::In(vcpu, place)),
        30 => (0_u32..2, place).prop_map(|(vcpu, place)| Step::Out(vcpu, place)),
        2 => (0_u32..2).prop_map(Step::Thread),
        60 => (0_u32..2, 1_u32..4, 1_u64..6).prop_map(|(vcpu, value, times)| Step::Mark(vcpu, value, times)),
        8 => (0_u32..2, some.clone()).prop_map(|(vcpu, place)| Step::Flush(vcpu, place)),
        2 => some.prop_map(Step::HostFlush),
        2 => Just(Step::Move),
        1 => Just(Step::Reset),
    ]
}

/// The device, the model, and the records read from the guest's rings.
struct Run {
    window: GuestMemoryMmap,
    fixture: Fixture,
    model: Model,
    ids: Vec<u64>,
    rings: BTreeMap<u64, (Reader, Vec<u64>)>,
    place: u64,
}

impl Run {
    fn new() -> Self {
        let limits = limits().with(|limits| {
            limits.max_sample_rate = u32::MAX;
            limits.max_persistent = u32::try_from(MOST).expect("few");
        });
        let window = window(512);
        Self {
            fixture: Fixture::windowed_with(limits, &window),
            window,
            model: Model::default(),
            ids: Vec::new(),
            rings: BTreeMap::new(),
            place: 0,
        }
    }

    /// Returns the id of the open event at position `place`. If there is no such event, returns the id of an event that
    /// was opened earlier, or an id that was never used.
    fn id(&self, place: usize) -> u64 {
        let known = self.model.events.keys().nth(place);
        known.or_else(|| self.ids.get(place)).copied().unwrap_or(999)
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Open(ref event, leader) => {
                let leader = leader.map(|place| self.id(place));
                self.open(event, leader);
            }
            Step::Start(vcpu, config, period) => self.start(vcpu, config, period),
            Step::End(place) => {
                let id = self.id(place);
                assert_eq!(self.fixture.vpmu.end(id).is_ok(), self.model.end(id));
            }
            Step::Close(place) => {
                let id = self.id(place);
                assert_eq!(self.fixture.close(id), self.model.close(id));
            }
            Step::Detach(place, name) => {
                let id = self.id(place);
                let name = name.map(|name| NAMES[name]);
                let detached = self.fixture.detach(id, name.unwrap_or_default());
                assert_eq!(detached, self.model.detach(id, name));
            }
            Step::Attach(place) => {
                let id = self.id(place);
                assert_eq!(self.fixture.reattach(id), self.model.attach(id));
            }
            Step::Link(one, other, role) => {
                let (one, other) = (self.id(one), self.id(other));
                let linked = self.fixture.link(one, other, role);
                if role > LINK_STOPPER {
                    assert!([Err(libc::EINVAL), Err(libc::EPERM)].contains(&linked));
                } else {
                    assert_eq!(linked, self.model.link(one, other, role));
                }
            }
            Step::Map(place, window) => self.map(self.id(place), window),
            Step::Unmap(place) => {
                let id = self.id(place);
                assert_eq!(self.fixture.unmap(id), self.model.unmap(id));
            }
            Step::Command(by, op, place) => self.command(by, op, self.id(place), 0),
            Step::Refresh(by, place, overflows) => {
                self.command(by, COMMAND_REFRESH, self.id(place), overflows);
            }
            Step::In(vcpu, place) => {
                let id = self.id(place);
                let given = outcome(self.fixture.valued(vcpu, COMMAND_IN, id, 0));
                assert_eq!(given, self.model.schedule(id, vcpu, true));
            }
            Step::Out(vcpu, place) => {
                let id = self.id(place);
                let given = outcome(self.fixture.valued(vcpu, COMMAND_OUT, id, 0));
                assert_eq!(given, self.model.schedule(id, vcpu, false));
            }
            Step::Thread(vcpu) => self.fixture.attach(vcpu),
            Step::Mark(vcpu, value, times) => {
                for _ in 0..times {
                    self.place += 1;
                    self.fixture.mark(vcpu, value, self.place);
                    self.model.mark(vcpu, value.into(), self.place);
                }
            }
            Step::Flush(vcpu, place) => {
                let id = place.map_or(0, |place| self.id(place));
                let flushed = outcome(self.fixture.flush(vcpu, id));
                assert_eq!(flushed, self.model.flush(vcpu, id));
            }
            Step::HostFlush(place) => {
                let id = place.map(|place| self.id(place));
                let known = id.is_none_or(|id| self.model.events.contains_key(&id));
                assert_eq!(self.fixture.vpmu.flush(id).is_ok(), known);
            }
            Step::Move => self.fixture.move_on(),
            Step::Reset => {
                self.fixture.vpmu.reset();
                self.fixture.activate(WINDOW_FEATURES);
                self.model.reset();
            }
        }
    }

    fn open(&mut self, event: &Event, leader: Option<u64>) {
        let persistent = event.name.is_some();
        let context = match event.context {
            Context::Vcpu(vcpu) => vcpu,
            Context::Task(_) => CONTEXT_TASK,
        };
        let flag = |on: bool, flag| if on { flag } else { 0 };
        let flags =
            flag(event.enabled, OPEN_ENABLED) | flag(event.paused, OPEN_PAUSED) | flag(persistent, OPEN_PERSISTENT);
        let request = open_of(KIND_MARK, event.config, context)
            .period(event.period)
            .sample_type(IP)
            .flags(flags)
            .leader(leader.unwrap_or(0));
        let opened = self.fixture.open(&request);
        if leader.is_some_and(|leader| !self.model.can_lead(leader, event)) {
            assert!([Err(libc::EINVAL), Err(libc::EPERM)].contains(&opened));
            return;
        }
        if persistent && let Err(errno) = self.model.most() {
            assert_eq!(opened, Err(errno));
            return;
        }
        let id = opened.expect("opened");
        assert!(self.ids.last().is_none_or(|&last| last < id), "the id {id} is not above all earlier ids");
        self.ids.push(id);
        self.model.open(id, Event { name: persistent.then(|| format!("event{id}")), leader, ..event.clone() });
    }

    fn start(&mut self, vcpu: u32, config: u64, period: u64) {
        let asked = Persist {
            name: None,
            event: match config {
                MARK_ANY => "marks".to_owned(),
                value => format!("mark={value}"),
            },
            vcpu,
            rate: Some(Rate::Period(period)),
            sample_type: IP,
            pages: 4,
        };
        let id = self.fixture.vpmu.persist(&asked).expect("started");
        self.ids.push(id);
        self.model.open(
            id,
            Event {
                context: Context::Vcpu(vcpu),
                leader: None,
                config,
                period,
                enabled: true,
                paused: false,
                count: 0,
                progress: 0,
                limit: 0,
                lost: 0,
                name: Some(format!("event{id}")),
                operator: true,
                ring: Some(Ring { window: true, records: Vec::new() }),
            },
        );
    }

    fn map(&mut self, id: u64, window: bool) {
        let mapped = match window {
            true => {
                let first = self.fixture.map_window(id, 1, MAP_WRITABLE);
                first.map(|first| reader(&self.window, first, 1))
            }
            false => self.fixture.try_map(id, 1),
        };
        let expected = self.model.map(id, window);
        match mapped {
            Ok(reader) => {
                assert_eq!(expected, Ok(()));
                self.rings.insert(id, (reader, Vec::new()));
            }
            Err(errno) => assert_eq!(expected, Err(errno)),
        }
    }

    fn command(&mut self, by: u32, op: u32, id: u64, value: u64) {
        let given = outcome(self.fixture.valued(by, op, id, value));
        assert_eq!(given, self.model.command(op, id, value));
    }

    fn check(&mut self) {
        self.check_figures();
        self.check_list();
        let events = &self.model.events;
        let has_ring = |id: &u64| events.get(id).is_some_and(|event| event.ring.is_some());
        self.rings.retain(|id, _| has_ring(id));
        for (&id, event) in events {
            let Some(ring) = &event.ring else {
                continue;
            };
            let read = match self.rings.get_mut(&id) {
                None => history(&self.fixture, id),
                Some((reader, read)) => {
                    read.extend(reader.raw().iter().map(|record| {
                        assert_eq!(record.kind, SAMPLE);
                        record.words[0]
                    }));
                    read.clone()
                }
            };
            assert_eq!(read, ring.records, "records of {id}");
        }
    }

    /// Checks the state, the count and the losses of every event opened so far.
    fn check_figures(&mut self) {
        let reads: Vec<Command> = self.ids.iter().map(|&id| command(COMMAND_READ, id)).collect();
        let replies = self.fixture.commands(0, &reads);
        for (&id, reply) in self.ids.iter().zip(replies) {
            let status = outcome(i32::try_from(reply.status.get()).expect("an errno"));
            let figures = (reply.state.get(), reply.value.get(), reply.lost.get());
            let Some(event) = self.model.events.get(&id) else {
                assert_eq!(status, Err(libc::ENOENT), "event {id} is closed");
                continue;
            };
            let state = self.model.state(id);
            assert_eq!(status, Ok(()));
            assert_eq!(figures, (state, event.count, event.lost), "figures of {id}");
        }
    }

    /// Checks the list of persistent events as the guest sees it and as its operator sees it.
    fn check_list(&mut self) {
        let persistent = |(&id, event): (&u64, &Event)| {
            let name = event.name.clone()?;
            let windowed = event.ring.as_ref().is_some_and(|ring| ring.window);
            Some((id, name, event.operator, event.enabled, windowed))
        };
        let expected: Vec<_> = self.model.events.iter().filter_map(persistent).collect();
        let listed: Vec<_> = self
            .fixture
            .listed()
            .iter()
            .map(|event| {
                let has = |flags: u32, flag| flags & flag != 0;
                (
                    event.id.get(),
                    name(event),
                    has(event.flags.get(), PERSISTENT_OPERATOR),
                    has(event.open.flags.get(), OPEN_ENABLED),
                    has(event.map.get(), MAP_WINDOW),
                )
            })
            .collect();
        assert_eq!(listed, expected);
        let reported: Vec<_> = self
            .fixture
            .vpmu
            .persistent()
            .into_iter()
            .map(|event| {
                let enabled = event.flags & OPEN_ENABLED != 0;
                (event.id, event.name, event.operator, enabled, event.window)
            })
            .collect();
        assert_eq!(reported, expected);
    }
}

fn outcome(errno: Errno) -> Result<(), Errno> {
    match errno {
        0 => Ok(()),
        errno => Err(errno),
    }
}

/// Returns the address of each mark in the history of an operator's event.
fn history(fixture: &Fixture, id: u64) -> Vec<u64> {
    let history = fixture.vpmu.history(id).expect("a history");
    let place = |record: &[u8]| u64::from_le_bytes(record[8..16].try_into().expect("whole"));
    history.iter().map(place).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn device_matches_the_model(steps in prop::collection::vec(step(), 20..160)) {
        let mut run = Run::new();
        for step in &steps {
            run.step(step);
            run.check();
        }
    }
}

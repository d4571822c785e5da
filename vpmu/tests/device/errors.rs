//! The error tables of SPEC.md. The first row whose condition holds determines the status of a request, even if the
//! conditions of later rows also hold.

mod alternatives;

use std::collections::{BTreeMap, BTreeSet};
use std::mem::offset_of;

use vm_memory::GuestMemoryMmap;
use vpmu::abi::*;
use vpmu::{AuxProducer, Engines, Limits, Persist, PersistentStatus, Settings};
use vpmu_testkit::{
    CLOCK, CYCLES, FAULTS, Fields, Fixture, VCPUS, WINDOW_FEATURES, command, limits, open_of, thread, window,
};
use zerocopy::{FromBytes, IntoBytes};

use crate::persistent::asked;

const SPECIFICATION: &str = include_str!("../../SPEC.md");
const NOBODY: u64 = 77_777;
const NO_OP: u32 = 99;

type Late = fn(&mut Fixture);

/// The parameters of a device that is not created yet.
struct Setup {
    features: u64,
    limits: Limits,
}

/// A request or a command that meets the condition of a row in an error table, and the device that receives this
/// request or command.
struct Scene {
    fixture: Fixture,
    _window: GuestMemoryMmap,
    /// A control request.
    bytes: Vec<u8>,
    command: Command,
    /// `of` is the vCPU whose queue holds the command, and `by` is the vCPU that notifies this queue.
    of: u32,
    by: u32,
    /// The event that the request is about.
    event: u64,
    /// Steps to execute directly before the request, in ascending order of their numbers.
    late: Vec<(u8, Late)>,
}

/// A row of an error table, and functions that make the row's condition hold.
struct Case {
    row: &'static str,
    setup: fn(&mut Setup),
    act: Act,
}

enum Act {
    /// Writes a number to the request at this offset.
    Put(usize, u32),
    Run(fn(&mut Scene)),
}

const fn case(row: &'static str, act: fn(&mut Scene)) -> Case {
    Case { row, setup: |_| {}, act: Act::Run(act) }
}

const fn put(row: &'static str, at: usize, value: u32) -> Case {
    Case { row, setup: |_| {}, act: Act::Put(at, value) }
}

const fn case_with(row: &'static str, setup: fn(&mut Setup), act: fn(&mut Scene)) -> Case {
    Case { row, setup, act: Act::Run(act) }
}

/// A request to open an event that samples marks on vCPU 0.
fn mark() -> OpenRequest {
    open_of(KIND_MARK, 5, 0).sampled(1)
}

fn trace() -> OpenRequest {
    open_of(KIND_EXIT_TRACE, EXIT_IO, 0)
}

fn cycles(context: u32) -> OpenRequest {
    open_of(CYCLES.0, CYCLES.1, context).sampled(1000)
}

impl Scene {
    fn new(setups: &[fn(&mut Setup)]) -> Self {
        let mut setup = Setup {
            features: WINDOW_FEATURES,
            limits: limits().with(|limits| {
                limits.max_events = 1000;
                limits.max_host_counters = 4;
                limits.max_ring_pages = 64;
                limits.max_aux_pages = 64;
                limits.max_pages = 24;
                limits.max_persistent = 4;
                limits.max_window_pages = 16;
                limits.max_sample_rate = 100_000;
            }),
        };
        setups.iter().for_each(|change| change(&mut setup));
        let window = window(16);
        let settings = Settings::new(VCPUS, 1_000_000).with_limits(setup.limits);
        let memory = Fixture::bare(Engines::Auto, limits(), None).memory;
        let producer = AuxProducer { name: "watchdog", counts: "events of the test", format: 130 };
        let fixture = Fixture::with_memory(settings, Some(&window), memory);
        let mut fixture = fixture.with_producers(&[producer]);
        (0..VCPUS).for_each(|vcpu| fixture.attach(vcpu));
        fixture.activate(setup.features);
        Self {
            fixture,
            _window: window,
            bytes: Vec::new(),
            command: Command::default(),
            of: 0,
            by: 0,
            event: 0,
            late: Vec::new(),
        }
    }

    fn put(&mut self, at: usize, value: &[u8]) {
        if let Some(field) = self.bytes.get_mut(at..at + value.len()) {
            field.copy_from_slice(value);
        }
    }

    fn put32(&mut self, at: usize, value: u32) {
        self.put(at, &value.to_le_bytes());
    }

    fn put64(&mut self, at: usize, value: u64) {
        self.put(at, &value.to_le_bytes());
    }

    /// The operation of the request.
    fn op(&self) -> u32 {
        u32::from_le_bytes(*self.bytes.first_chunk().expect("an operation"))
    }

    /// Makes the request or the command refer to this event.
    fn about(&mut self, event: u64) {
        self.event = event;
        self.put64(offset_of!(ControlHeader, event), event);
        self.command.event = event.into();
    }

    /// Opens an event and returns its id, or zero if the device refuses it.
    fn opened(&mut self, request: &OpenRequest) -> u64 {
        self.fixture.open(request).unwrap_or(0)
    }

    fn about_new(&mut self, request: &OpenRequest) {
        let event = self.opened(request);
        self.about(event);
    }

    fn child_of(&mut self, parent: u64, request: &OpenRequest) -> u64 {
        self.opened(&request.parent(parent))
    }

    fn ringed(&mut self, request: &OpenRequest) -> u64 {
        let event = self.opened(request);
        let _ = self.fixture.try_map(event, 1);
        event
    }

    /// Opens a trace with an area that the driver owns.
    fn driven(&mut self) -> u64 {
        let event = self.opened(&trace());
        let pages = self.pages(4);
        let _ = self.fixture.map_as(CONTROL_MAP_AUX, event, MAP_DRIVER_OWNED | MAP_WRITABLE, &pages);
        event
    }

    /// Addresses of unused pages.
    fn pages(&mut self, count: u64) -> Vec<u64> {
        let first = self.fixture.next_ring;
        self.fixture.next_ring += count * 0x1000;
        (0..count).map(|page| first + page * 0x1000).collect()
    }

    /// Lists these pages in the map request.
    fn name(&mut self, pages: &[u64]) {
        self.bytes.truncate(size_of::<MapRequest>());
        let count = u32::try_from(pages.len()).expect("few");
        self.put32(offset_of!(MapRequest, pages), count);
        for page in pages {
            self.bytes.extend(page.to_le_bytes());
        }
    }

    fn name_fresh(&mut self, count: u64) {
        let pages = self.pages(count);
        self.name(&pages);
    }

    fn operators(&mut self) -> u64 {
        let asked = Persist { name: None, pages: 1, ..asked("mark=5", 0) };
        self.fixture.vpmu.persist(&asked).expect("started")
    }

    /// Opens an event of vCPU 0. Puts the event in the error state by making the host revoke its counter.
    fn failed(&mut self) -> u64 {
        let request = open_of(CYCLES.0, CYCLES.1, 0).flags(OPEN_ENABLED);
        let event = self.opened(&request);
        self.fixture.host.give_up(thread(0));
        self.fixture.command(0, COMMAND_READ, event);
        event
    }

    /// Changes the open request.
    fn open(&mut self, change: impl FnOnce(&mut OpenRequest)) {
        let mut request = OpenRequest::read_from_bytes(&self.bytes).expect("whole");
        change(&mut request);
        self.bytes = request.as_bytes().to_vec();
    }

    fn flags(&mut self, set: u32, clear: u32) {
        self.open(|open| open.flags = (open.flags.get() & !clear | set).into());
    }

    fn operate(&mut self, op: u32, value: u64, room: u64) {
        self.command = Command {
            op: op.into(),
            event: self.event.into(),
            value: value.into(),
            room: room.into(),
            ..Command::default()
        };
    }

    /// Returns the state that a failed request must not change: the persistent events, the number of events opened so
    /// far, and the number of open host counters.
    fn state(&self) -> (Vec<PersistentStatus>, u64, usize) {
        let opened = self.fixture.vpmu.metrics().events_opened;
        let counters = self.fixture.host.open_counters();
        let mut persistent = self.fixture.vpmu.persistent();
        for status in &mut persistent {
            // The times grow even if the request changes nothing.
            (status.time_enabled, status.time_running) = (0, 0);
        }
        (persistent, opened, counters)
    }

    /// Sends the request, or the command if there is no request. Returns the status.
    fn send(mut self) -> u32 {
        self.late.sort_by_key(|(phase, _)| *phase);
        for (_, act) in std::mem::take(&mut self.late) {
            act(&mut self.fixture);
        }
        if self.bytes.is_empty() {
            let replies = self.fixture.commands_from(self.of, self.by, &[self.command]);
            return replies[0].status.get();
        }
        let before = self.state();
        let answer = self.fixture.control_bytes(&self.bytes, 0x1_0000);
        let status = u32::from_le_bytes(*answer.first_chunk().expect("a status"));
        if status != 0 {
            assert_eq!(self.state(), before, "the state after a request with status {status}");
        }
        status
    }
}

/// Prepares a valid request or command for `table`.
fn begin(scene: &mut Scene, table: &str) {
    let header = |op: u32| ControlHeader { op: op.into(), ..ControlHeader::default() };
    let map = |op| {
        let request = MapRequest { header: header(op), pages: 0.into(), flags: MAP_WRITABLE.into() };
        request.as_bytes().to_vec()
    };
    let just = |op| header(op).as_bytes().to_vec();
    match table {
        "OPEN" => scene.bytes = mark().as_bytes().to_vec(),
        "CLOSE" => scene.bytes = just(CONTROL_CLOSE),
        "MAP" => scene.bytes = map(CONTROL_MAP),
        "UNMAP" => scene.bytes = just(CONTROL_UNMAP),
        "REDIRECT" => {
            let target = scene.ringed(&mark());
            let request = RedirectRequest { header: header(CONTROL_REDIRECT), target: target.into() };
            scene.bytes = request.as_bytes().to_vec();
        }
        "PAUSE" => {
            let request = PauseRequest { header: header(CONTROL_PAUSE), ..PauseRequest::default() };
            scene.bytes = request.as_bytes().to_vec();
        }
        "CATALOGUE" => {
            let request =
                CatalogueRequest { header: header(CONTROL_CATALOGUE), count: 1.into(), ..CatalogueRequest::default() };
            scene.bytes = request.as_bytes().to_vec();
        }
        "MAP_AUX" => scene.bytes = map(CONTROL_MAP_AUX),
        "UNMAP_AUX" => scene.bytes = just(CONTROL_UNMAP_AUX),
        "DETACH" => {
            let mut request = DetachRequest { header: header(CONTROL_DETACH), ..DetachRequest::default() };
            request.name[..4].copy_from_slice(b"mine");
            scene.bytes = request.as_bytes().to_vec();
        }
        "ATTACH" => scene.bytes = just(CONTROL_ATTACH),
        "PERSISTENT" => {
            let request = PersistentRequest { header: header(CONTROL_PERSISTENT), ..PersistentRequest::default() };
            scene.bytes = request.as_bytes().to_vec();
        }
        "REQ" | "LINK" => {
            let target = scene.opened(&mark());
            let request = LinkRequest {
                header: header(CONTROL_LINK),
                target: target.into(),
                role: LINK_STARTER.into(),
                reserved: 0.into(),
            };
            scene.bytes = request.as_bytes().to_vec();
        }
        "WAKEUP" => {
            let request = WakeupRequest {
                header: header(CONTROL_WAKEUP),
                every: 1.into(),
                unit: WAKEUP_RECORDS.into(),
                reserved: 0.into(),
            };
            scene.bytes = request.as_bytes().to_vec();
        }
        "SIGNAL" => {
            let request = SignalRequest { header: header(CONTROL_SIGNAL), own: 1.into(), reserved: 0.into() };
            scene.bytes = request.as_bytes().to_vec();
        }
        "TASK_PAGE" => {
            let request = TaskPageRequest {
                header: header(CONTROL_TASK_PAGE),
                address: 0x8000.into(),
                ..TaskPageRequest::default()
            };
            scene.bytes = request.as_bytes().to_vec();
        }
        "FEATURES" => {
            let request = FeaturesRequest { header: header(CONTROL_FEATURES), ..FeaturesRequest::default() };
            scene.bytes = request.as_bytes().to_vec();
        }
        _ => {}
    }
    begin_event(scene, table);
}

/// Prepares the event to which a request or command of `table` refers. If it is a command, also prepares the command.
fn begin_event(scene: &mut Scene, table: &str) {
    match table {
        "PAUSE" => {
            let event = scene.ringed(&mark());
            scene.about(event);
        }
        "MAP_AUX" => {
            let event = scene.ringed(&trace());
            scene.about(event);
            scene.name_fresh(2);
        }
        "UNMAP" => {
            let event = scene.ringed(&mark());
            scene.about(event);
        }
        "UNMAP_AUX" => {
            let event = scene.driven();
            scene.about(event);
        }
        "ATTACH" => {
            scene.about_new(&mark());
            let _ = scene.fixture.detach(scene.event, "");
        }
        "IN" | "OUT" => {
            scene.about_new(&open_of(KIND_MARK, 5, CONTEXT_TASK).sampled(1));
            if table == "OUT" {
                scene.fixture.command(0, COMMAND_IN, scene.event);
            }
        }
        "AUX_BEGIN" | "AUX_END" => {
            let event = scene.driven();
            scene.about(event);
            if table == "AUX_END" {
                let begin = Command { room: 4096.into(), ..command(COMMAND_AUX_BEGIN, event) };
                scene.fixture.commands(0, &[begin]);
            }
        }
        "OPEN" | "CATALOGUE" | "PERSISTENT" | "TASK_PAGE" | "FEATURES" => {}
        _ => scene.about_new(&mark()),
    }
    match table {
        "MAP" => scene.name_fresh(2),
        "COMMAND" => scene.operate(COMMAND_READ, 0, 0),
        "IN" => scene.operate(COMMAND_IN, 0, 0),
        "OUT" => scene.operate(COMMAND_OUT, 0, 0),
        "PERIOD" => scene.operate(COMMAND_PERIOD, 100, 0),
        "REFRESH" => scene.operate(COMMAND_REFRESH, 1, 0),
        "PROMPT" => scene.operate(COMMAND_PROMPT, 1, 0),
        "START" => scene.operate(COMMAND_ENABLE, 0, 0),
        "AUX_BEGIN" => scene.operate(COMMAND_AUX_BEGIN, 0, 4096),
        "AUX_END" => scene.operate(COMMAND_AUX_END, 0, 0),
        "FLUSH" => scene.operate(COMMAND_FLUSH, 0, 0),
        _ => {}
    }
}

/// Tables of operations without an event.
const NO_EVENT: [&str; 5] = ["OPEN", "CATALOGUE", "PERSISTENT", "TASK_PAGE", "FEATURES"];
/// Tables for the operations whose request consists only of a header.
const HEADER_ONLY: [&str; 4] = ["CLOSE", "UNMAP", "UNMAP_AUX", "ATTACH"];

fn requests() -> Vec<Case> {
    vec![
        case("REQ-1", |scene| scene.bytes.truncate(15)),
        put("REQ-2", offset_of!(ControlHeader, reserved), 1),
        put("REQ-3", offset_of!(ControlHeader, op), NO_OP),
        case("REQ-4", |scene| {
            if scene.op() == CONTROL_CATALOGUE {
                begin(scene, "LINK");
            }
            let event = scene.operators();
            scene.about(event);
        }),
        case("REQ-5", |scene| {
            let longest = match scene.op() {
                CONTROL_MAP | CONTROL_MAP_AUX => size_of::<MapRequest>(),
                _ => scene.bytes.len(),
            };
            scene.bytes.truncate(longest - 1);
        }),
        case("REQ-6", |scene| {
            if scene.op() == CONTROL_LINK {
                let request = CatalogueRequest::default();
                scene.bytes = request.as_bytes().to_vec();
                scene.put32(offset_of!(ControlHeader, op), CONTROL_CATALOGUE);
            }
            scene.put64(offset_of!(ControlHeader, event), NOBODY);
        }),
    ]
}

fn forms_of_open() -> Vec<Case> {
    vec![
        case("OPEN-1", |scene| {
            scene.open(|open| {
                (open.kind, open.config) = (KIND_MARK.into(), 5.into());
                open.aux_watermark = 1.into();
            });
        }),
        case("OPEN-2", |scene| scene.flags(1 << 17, 0)),
        case("OPEN-3", |scene| {
            scene.flags(OPEN_AUX_PAUSE | OPEN_AUX_RESUME, 0);
        }),
        case("OPEN-4", |scene| scene.open(|open| open.engine = 3.into())),
        case("OPEN-5", |scene| {
            scene.flags(0, OPEN_FREQ);
            scene.open(|open| open.period = (1 << 63).into());
        }),
        case("OPEN-6", |scene| {
            scene.flags(OPEN_FREQ, 0);
            scene.open(|open| open.period = 100_001.into());
        }),
        case("OPEN-7", |scene| {
            scene.open(|open| {
                open.sample_type = (open.sample_type.get() | 1 << 12).into();
                open.regs_user = 0.into();
            });
        }),
        case("OPEN-8", |scene| {
            scene.open(|open| {
                open.sample_type = (open.sample_type.get() | 1 << 13).into();
                open.stack_user = 12.into();
            });
        }),
        case("OPEN-9", |scene| {
            scene.open(|open| {
                open.sample_type = (open.sample_type.get() | 1 << 5).into();
                open.max_stack = 1025.into();
            });
        }),
        case("OPEN-10", |scene| {
            scene.open(|open| open.context = VCPUS.into());
        }),
        case("OPEN-11", |scene| {
            scene.flags(OPEN_PERSISTENT, 0);
            scene.open(|open| open.context = CONTEXT_TASK.into());
        }),
        case("OPEN-12", |scene| {
            scene.flags(OPEN_PERSISTENT, 0);
            let parent = scene.opened(&mark());
            scene.open(|open| open.parent = parent.into());
        }),
        case("OPEN-13", |scene| {
            scene.open(|open| open.parent = NOBODY.into());
        }),
        case("OPEN-14", |scene| {
            scene.flags(0, OPEN_PERSISTENT);
            let parent = scene.operators();
            scene.open(|open| open.parent = parent.into());
        }),
        case("OPEN-15", |scene| {
            let parent = scene.opened(&mark());
            scene.open(|open| {
                open.parent = parent.into();
                open.sample_type = (1 << 4).into();
            });
        }),
    ]
}

fn lead(scene: &mut Scene, leader: u64) {
    scene.flags(0, OPEN_PERSISTENT);
    scene.open(|open| open.leader = leader.into());
}

fn groups_of_open() -> Vec<Case> {
    vec![
        case("OPEN-16", |scene| {
            scene.flags(OPEN_AUX_PAUSE, 0);
            scene.open(|open| open.leader = 0.into());
        }),
        case("OPEN-17", |scene| lead(scene, NOBODY)),
        case("OPEN-18", |scene| {
            let leader = scene.opened(&mark());
            lead(scene, leader);
            scene.flags(OPEN_AUX_RESUME, 0);
        }),
        case("OPEN-19", |scene| {
            let leader = scene.opened(&mark());
            lead(scene, leader);
            scene.flags(OPEN_PERSISTENT, 0);
        }),
        case("OPEN-20", |scene| {
            let leader = scene.opened(&mark());
            let member = scene.opened(&mark().leader(leader));
            lead(scene, member);
        }),
        case("OPEN-21", |scene| {
            let leader = scene.opened(&open_of(KIND_MARK, 5, 1).sampled(1));
            lead(scene, leader);
        }),
        case("OPEN-22", |scene| {
            let leader = scene.opened(&mark());
            lead(scene, leader);
            scene.flags(OPEN_PINNED, 0);
        }),
        case("OPEN-23", |scene| {
            let leader = scene.opened(&open_of(KIND_MARK, 5, 0));
            let member = open_of(KIND_MARK, 5, 0).leader(leader).read_format(READ_ALLOWED);
            while scene.fixture.open(&member).is_ok() {}
            lead(scene, leader);
            scene.open(|open| open.read_format = READ_ALLOWED.into());
        }),
    ]
}

fn kind(scene: &mut Scene, kind: (u32, u64), period: u64) {
    scene.flags(0, OPEN_FREQ | OPEN_AUX_START_PAUSED);
    scene.open(|open| {
        (open.kind, open.config) = (kind.0.into(), kind.1.into());
        open.period = period.into();
    });
}

fn entries_of_open() -> Vec<Case> {
    vec![
        case("OPEN-24", |scene| kind(scene, (KIND_HOST_TRACE, 0), 100)),
        case("OPEN-25", |scene| kind(scene, (NO_OP, 0), 100)),
        case("OPEN-26", |scene| {
            scene.open(|open| open.sample_type = (1 << 10).into());
        }),
        case("OPEN-27", |scene| {
            kind(scene, FAULTS, 0);
            scene.flags(OPEN_EXCLUDE_USER, 0);
        }),
        case("OPEN-28", |scene| kind(scene, FAULTS, 100)),
        case("OPEN-29", |scene| {
            kind(scene, (KIND_MARK, 5), 1);
            scene.flags(OPEN_AUX_START_PAUSED, 0);
        }),
        case_with(
            "OPEN-30",
            |setup| setup.features &= !(1 << F_AUX),
            |scene| kind(scene, (KIND_EXIT_TRACE, EXIT_IO), 0),
        ),
        case("OPEN-31", |scene| {
            kind(scene, (KIND_SAMPLE_TRACE, PACE_EXITS), 0);
        }),
        case("OPEN-32", |scene| {
            kind(scene, (KIND_MARK, 5), 1);
            scene.open(|open| open.engine = ENGINE_BATCHED.into());
        }),
        case("OPEN-33", |scene| {
            let fill: Late = |fixture| while fixture.open(&open_of(KIND_MARK, 5, 0)).is_ok() {};
            scene.late.push((1, fill));
        }),
        case("OPEN-34", |scene| {
            scene.flags(OPEN_PERSISTENT, 0);
            scene.late.push((0, fill_persistent));
        }),
        case("OPEN-35", |scene| {
            kind(scene, CYCLES, 100);
            scene.late.push((0, |fixture| while fixture.open(&cycles(0)).is_ok() {}));
        }),
        case("OPEN-36", |scene| {
            kind(scene, CYCLES, 100);
            scene.late.push((2, |fixture| fixture.host.deny(libc::EACCES)));
        }),
    ]
}

fn fill_persistent(fixture: &mut Fixture) {
    let request = open_of(KIND_MARK, 5, 0).flags(OPEN_PERSISTENT);
    while fixture.open(&request).is_ok() {}
}

fn map_flags(scene: &mut Scene, flags: u32) {
    scene.put32(offset_of!(MapRequest, flags), flags);
}

fn rings() -> Vec<Case> {
    vec![
        case("CLOSE-1", |scene| scene.about(NOBODY)),
        case("CLOSE-2", |scene| {
            let _ = scene.fixture.detach(scene.event, "");
        }),
        case("MAP-1", |scene| map_flags(scene, 1 << 1)),
        case_with("MAP-2", |setup| setup.features &= !(1 << F_RING), |scene| map_flags(scene, 0)),
        case_with("MAP-3", |setup| setup.features &= !(1 << F_WINDOW), |scene| map_flags(scene, MAP_WINDOW)),
        case("MAP-4", |scene| scene.about(NOBODY)),
        case("MAP-5", |scene| {
            scene.about_new(&mark());
            map_flags(scene, MAP_WINDOW);
        }),
        case("MAP-6", |scene| {
            let child = scene.child_of(scene.event, &mark());
            scene.about(child);
        }),
        case("MAP-7", |scene| {
            scene.about_new(&mark());
            let target = scene.ringed(&mark());
            let _ = scene.fixture.redirect(scene.event, target);
        }),
        case("MAP-8", |scene| {
            let event = scene.driven();
            scene.about(event);
        }),
        case("MAP-9", |scene| scene.name_fresh(4)),
        case("MAP-10", |scene| {
            map_flags(scene, 0);
            scene.name_fresh(2);
            scene.put32(offset_of!(MapRequest, pages), 3);
        }),
        case("MAP-11", |scene| {
            map_flags(scene, 0);
            let page = scene.pages(1)[0];
            scene.name(&[page, page]);
        }),
        case("MAP-12", |scene| {
            let _ = scene.fixture.try_map(scene.event, 1);
        }),
        case("MAP-13", |scene| {
            map_flags(scene, 0);
            scene.name_fresh(33);
        }),
        case("MAP-14", |scene| {
            scene.about_new(&mark());
            let _ = scene.fixture.detach(scene.event, "");
            map_flags(scene, MAP_WINDOW);
            scene.put32(offset_of!(MapRequest, pages), 17);
        }),
        case("UNMAP-1", |scene| scene.about(NOBODY)),
        case("UNMAP-2", |scene| scene.about_new(&mark())),
        put("PAUSE-1", offset_of!(PauseRequest, paused), 2),
        put("PAUSE-2", offset_of!(PauseRequest, reserved), 1),
        case("PAUSE-3", |scene| scene.about(NOBODY)),
        case("PAUSE-4", |scene| scene.about_new(&mark())),
        case("PAUSE-5", |scene| {
            scene.about_new(&mark());
            scene.fixture.try_map(scene.event, 0).expect("mapped");
        }),
        put("CATALOGUE-1", offset_of!(CatalogueRequest, first), 9999),
        case("WAKEUP-1", |scene| {
            scene.put64(offset_of!(WakeupRequest, every), 1 << 32);
        }),
        put("WAKEUP-2", offset_of!(WakeupRequest, unit), 3),
        put("WAKEUP-3", offset_of!(WakeupRequest, reserved), 1),
        case("WAKEUP-4", |scene| scene.about(NOBODY)),
        case("WAKEUP-5", |scene| {
            let child = scene.child_of(scene.event, &mark());
            scene.about(child);
        }),
        case("WAKEUP-6", |scene| scene.about_new(&open_of(KIND_MARK, 5, 0))),
        put("SIGNAL-1", offset_of!(SignalRequest, own), 2),
        put("SIGNAL-2", offset_of!(SignalRequest, reserved), 1),
        case("SIGNAL-3", |scene| scene.about(NOBODY)),
        case("SIGNAL-4", |scene| {
            let child = scene.child_of(scene.event, &mark());
            scene.about(child);
        }),
        case("SIGNAL-5", |scene| {
            scene.about_new(&open_of(KIND_MARK, 5, 0));
        }),
        put("TASK_PAGE-1", offset_of!(TaskPageRequest, reserved), 1),
        case_with("TASK_PAGE-2", |setup| setup.features &= !(1 << F_TASK_PAGE), |_| {}),
        put("TASK_PAGE-3", offset_of!(TaskPageRequest, vcpu), VCPUS),
        case("TASK_PAGE-4", |scene| {
            scene.put64(offset_of!(TaskPageRequest, address), 0x1001);
        }),
        case("FEATURES-1", |scene| {
            scene.put64(offset_of!(FeaturesRequest, features), 1 << 20);
        }),
    ]
}

fn set_target(scene: &mut Scene, target: u64) {
    // This works for both requests, because `target` has the same offset in both.
    assert_eq!(offset_of!(RedirectRequest, target), offset_of!(LinkRequest, target));
    scene.put64(offset_of!(LinkRequest, target), target);
}

fn redirections() -> Vec<Case> {
    vec![
        case("REDIRECT-1", |scene| scene.about(NOBODY)),
        case("REDIRECT-2", |scene| {
            let target = scene.operators();
            set_target(scene, target);
        }),
        case("REDIRECT-3", |scene| set_target(scene, NOBODY)),
        case("REDIRECT-4", |scene| set_target(scene, scene.event)),
        case("REDIRECT-5", |scene| {
            let parent = scene.ringed(&mark());
            let child = scene.child_of(parent, &mark());
            set_target(scene, child);
        }),
        case("REDIRECT-6", |scene| {
            let target = scene.ringed(&open_of(KIND_MARK, 5, 1).sampled(1));
            set_target(scene, target);
        }),
        case("REDIRECT-7", |scene| {
            let target = scene.ringed(&mark().flags(OPEN_BACKWARD));
            set_target(scene, target);
        }),
        case("REDIRECT-8", |scene| {
            let target = scene.opened(&mark());
            set_target(scene, target);
        }),
        case("REDIRECT-9", |scene| {
            let event = scene.ringed(&mark());
            scene.about(event);
        }),
        case("REDIRECT-10", |scene| {
            scene.about_new(&mark());
            let _ = scene.fixture.detach(scene.event, "");
        }),
        case("REDIRECT-11", |scene| {
            let child = scene.child_of(scene.event, &mark());
            scene.about(child);
        }),
        case("REDIRECT-12", |scene| {
            let event = scene.driven();
            scene.about(event);
        }),
    ]
}

fn areas() -> Vec<Case> {
    vec![
        case("MAP_AUX-1", |scene| map_flags(scene, MAP_WINDOW)),
        case_with("MAP_AUX-2", |setup| setup.features &= !(1 << F_AUX), |_| {}),
        case("MAP_AUX-3", |scene| scene.about(NOBODY)),
        case("MAP_AUX-4", |scene| scene.about_new(&mark())),
        case("MAP_AUX-5", |scene| {
            scene.about_new(&open_of(KIND_VMM_TRACE, 0, 0));
            map_flags(scene, MAP_DRIVER_OWNED);
        }),
        case("MAP_AUX-6", |scene| {
            let child = scene.child_of(scene.event, &trace());
            scene.about(child);
        }),
        case("MAP_AUX-7", |scene| {
            scene.about_new(&trace());
            map_flags(scene, 0);
        }),
        case("MAP_AUX-8", |scene| {
            let event = scene.ringed(&trace());
            scene.about(event);
            map_flags(scene, MAP_DRIVER_OWNED);
        }),
        case("MAP_AUX-9", |scene| scene.name_fresh(3)),
        case("MAP_AUX-10", |scene| {
            scene.name_fresh(2);
            scene.put32(offset_of!(MapRequest, pages), 4);
        }),
        case("MAP_AUX-11", |scene| {
            let page = scene.pages(1)[0];
            scene.name(&[page, page]);
        }),
        case("MAP_AUX-12", |scene| {
            let event = scene.opened(&trace());
            let pages = scene.pages(2);
            let _ = scene.fixture.map_pages(event, MAP_WRITABLE, &pages);
            scene.about(event);
            scene.name(&[pages[1]]);
        }),
        case("MAP_AUX-13", |scene| {
            let pages = scene.pages(1);
            let mapped = scene.fixture.map_as(CONTROL_MAP_AUX, scene.event, 0, &pages);
            let _ = mapped;
        }),
        case("MAP_AUX-14", |scene| scene.name_fresh(32)),
        case("UNMAP_AUX-1", |scene| scene.about(NOBODY)),
        case("UNMAP_AUX-2", |scene| scene.about_new(&trace())),
    ]
}

fn set_name(scene: &mut Scene, name: &[u8]) {
    let mut bytes = [0; PERSISTENT_NAME];
    bytes[..name.len()].copy_from_slice(name);
    scene.put(offset_of!(DetachRequest, name), &bytes);
}

fn persistence() -> Vec<Case> {
    vec![
        case("DETACH-1", |scene| set_name(scene, b"9mine")),
        case("DETACH-2", |scene| scene.about(NOBODY)),
        case("DETACH-3", |scene| {
            scene.about_new(&open_of(KIND_MARK, 5, CONTEXT_TASK));
        }),
        case("DETACH-4", |scene| {
            let parent = scene.opened(&mark());
            let child = scene.child_of(parent, &mark());
            scene.about(child);
        }),
        case("DETACH-5", |scene| {
            let leader = scene.opened(&mark());
            scene.about_new(&mark().leader(leader));
        }),
        case("DETACH-6", |scene| {
            let target = scene.ringed(&mark());
            scene.about_new(&mark());
            let _ = scene.fixture.redirect(scene.event, target);
        }),
        case("DETACH-7", |scene| {
            let event = scene.failed();
            scene.about(event);
        }),
        case("DETACH-8", |scene| set_name(scene, b"event77")),
        case("DETACH-9", |scene| {
            let other = scene.opened(&mark());
            let _ = scene.fixture.detach(other, "mine");
            set_name(scene, b"mine");
        }),
        case("DETACH-10", |scene| scene.late.push((0, fill_persistent))),
        case("ATTACH-1", |scene| scene.about(NOBODY)),
        case("ATTACH-2", |scene| scene.about_new(&mark())),
        put("PERSISTENT-1", offset_of!(PersistentRequest, reserved), 1),
    ]
}

fn links() -> Vec<Case> {
    vec![
        put("LINK-1", offset_of!(LinkRequest, role), 9),
        put("LINK-2", offset_of!(LinkRequest, reserved), 1),
        case("LINK-3", |scene| scene.about(NOBODY)),
        case("LINK-4", |scene| set_target(scene, NOBODY)),
        case("LINK-5", |scene| {
            let target = scene.operators();
            set_target(scene, target);
        }),
        case("LINK-6", |scene| set_target(scene, scene.event)),
        case("LINK-7", |scene| {
            let target = scene.opened(&open_of(KIND_MARK, 5, 1).sampled(1));
            set_target(scene, target);
        }),
        case("LINK-8", |scene| scene.about_new(&open_of(KIND_MARK, 5, 0))),
        case("LINK-9", |scene| {
            scene.fixture.host.know_ips();
            scene.about_new(&cycles(0).engine(ENGINE_BATCHED));
        }),
        case("LINK-10", |scene| {
            let target = scene.opened(&mark());
            set_target(scene, target);
            let _ = scene.fixture.link(scene.event, target, LINK_STARTER);
        }),
        case("LINK-11", |scene| {
            let (target, other) = (scene.opened(&mark()), scene.opened(&mark()));
            set_target(scene, target);
            let _ = scene.fixture.link(other, target, LINK_STARTER);
        }),
    ]
}

fn commands() -> Vec<Case> {
    vec![
        case("COMMAND-1", |scene| scene.operate(COMMAND_VCPU, 1, 0)),
        case("COMMAND-2", |scene| scene.by = 1 - scene.of),
        case("COMMAND-3", |scene| scene.command.reserved = 1.into()),
        case("COMMAND-4", |scene| scene.about(NOBODY)),
        case("COMMAND-5", |scene| {
            let event = scene.operators();
            scene.about(event);
            scene.operate(COMMAND_ENABLE, 0, 0);
        }),
        case("COMMAND-6", |scene| scene.operate(NO_OP, 0, 0)),
        case("IN-1", |scene| scene.about_new(&mark())),
        case("IN-2", |scene| {
            scene.about_new(&open_of(KIND_MARK, 5, CONTEXT_TASK));
            scene.fixture.command(1, COMMAND_IN, scene.event);
        }),
        case("OUT-1", |scene| {
            scene.about_new(&open_of(KIND_MARK, 5, CONTEXT_TASK));
        }),
        case("PERIOD-1", |scene| {
            scene.about_new(&open_of(KIND_MARK, 5, 0));
        }),
        case("PERIOD-2", |scene| {
            scene.about_new(&cycles(0));
            scene.operate(COMMAND_PERIOD, 1 << 63, 0);
        }),
        case("PERIOD-3", |scene| {
            scene.about_new(&mark().flags(OPEN_FREQ));
            scene.operate(COMMAND_PERIOD, 100_001, 0);
        }),
        case_with(
            "PERIOD-4",
            |setup| setup.limits.max_sample_rate = 1000,
            |scene| {
                let clock = open_of(CLOCK.0, CLOCK.1, 0).sampled(600).flags(OPEN_FREQ | OPEN_ENABLED);
                scene.opened(&clock);
                scene.about_new(&clock.period(300));
                scene.operate(COMMAND_PERIOD, 900, 0);
            },
        ),
        case("PERIOD-5", |scene| {
            scene.about_new(&cycles(0).flags(OPEN_ENABLED));
            scene.operate(COMMAND_PERIOD, 100, 0);
            scene.late.push((1, |fixture| fixture.host.refuse_rates()));
        }),
        case("REFRESH-1", |scene| {
            scene.operate(COMMAND_REFRESH, 0, 0);
        }),
        case("REFRESH-2", |scene| {
            scene.about_new(&open_of(KIND_MARK, 5, 0));
        }),
        case("PROMPT-1", |scene| {
            scene.operate(COMMAND_PROMPT, 2, 0);
        }),
        case("PROMPT-2", |scene| {
            scene.about_new(&open_of(KIND_MARK, 5, 0));
        }),
        case("PROMPT-3", |scene| scene.about_new(&trace())),
        case("PROMPT-4", |scene| {
            scene.fixture.host.know_ips();
            scene.about_new(&cycles(0).flags(OPEN_ENABLED).engine(ENGINE_BATCHED));
            scene.operate(COMMAND_PROMPT, 1, 0);
            scene.late.push((1, |fixture| fixture.host.deny(libc::EACCES)));
        }),
        case("START-1", |scene| {
            let event = scene.failed();
            scene.about(event);
            scene.of = 0;
            scene.by = 0;
            scene.operate(COMMAND_ENABLE, 0, 0);
        }),
        case("START-2", |scene| {
            scene.about_new(&cycles(CONTEXT_TASK).flags(OPEN_ENABLED));
            for op in [COMMAND_IN, COMMAND_OUT] {
                scene.fixture.command(0, op, scene.event);
            }
            scene.of = 1;
            scene.by = 1;
            scene.operate(COMMAND_IN, 0, 0);
            scene.late.push((1, |fixture| fixture.host.deny(libc::EACCES)));
        }),
        case("AUX_BEGIN-1", |scene| scene.command.value = 32.into()),
        case("AUX_BEGIN-2", |scene| scene.about_new(&trace())),
        case("AUX_BEGIN-3", |scene| scene.command.room = (1 << 20).into()),
        case("AUX_BEGIN-4", |scene| {
            let begin = Command { room: 4096.into(), ..command(COMMAND_AUX_BEGIN, scene.event) };
            scene.fixture.commands(0, &[begin]);
        }),
        case("AUX_END-1", |scene| {
            let event = scene.driven();
            scene.about(event);
        }),
        case("FLUSH-1", |scene| {
            scene.about_new(&open_of(KIND_MARK, 5, CONTEXT_TASK).flags(OPEN_ENABLED));
            scene.fixture.command(1, COMMAND_IN, scene.event);
        }),
        case("FLUSH-2", |scene| {
            let event = scene.failed();
            scene.about(event);
        }),
    ]
}

fn cases() -> Vec<Case> {
    [
        requests(),
        forms_of_open(),
        groups_of_open(),
        entries_of_open(),
        rings(),
        redirections(),
        areas(),
        persistence(),
        links(),
        commands(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Returns the cells of a table row.
fn cells(line: &str) -> Vec<&str> {
    let line = line.trim().trim_start_matches('|').trim_end_matches('|');
    line.split(" | ").map(str::trim).collect()
}

/// The numbers of the status codes.
fn numbers() -> BTreeMap<&'static str, u32> {
    let (_, section) = SPECIFICATION.split_once("### Status codes").expect("the section");
    let (section, _) = section.split_once("## 1.").expect("there");
    let rows = section.lines().filter(|line| line.starts_with("| `E"));
    let numbers = rows.map(|line| {
        let cells = cells(line);
        (cells[0].trim_matches('`'), cells[1].parse().expect("a number"))
    });
    numbers.collect()
}

/// Returns the name and the status of each row of the error tables, in the order of SPEC.md.
fn rows() -> Vec<(&'static str, u32)> {
    let numbers = numbers();
    let tables = SPECIFICATION.split("| error | condition | status |").skip(1);
    let lines = tables.flat_map(|table| {
        let lines = table.lines().skip(2);
        lines.take_while(|line| line.starts_with('|'))
    });
    let rows = lines.map(|line| {
        let cells = cells(line);
        assert_eq!(cells.len(), 3, "{line}");
        let status = cells[2].trim_matches('`');
        let number = numbers.get(status);
        (cells[0], *number.unwrap_or_else(|| panic!("{line}")))
    });
    rows.collect()
}

/// The table of a row.
fn table(row: &str) -> &str {
    row.rsplit_once('-').expect("a number").0
}

/// Returns whether the condition of `row` can hold for requests of the table `to`. Rows of the table `REQ` apply to all
/// requests.
fn applies(row: &str, to: &str) -> bool {
    match row {
        "REQ-4" => !NO_EVENT.contains(&to),
        "REQ-5" => !HEADER_ONLY.contains(&to),
        "REQ-6" => NO_EVENT.contains(&to) || to == "REQ",
        _ => true,
    }
}

const COMMANDS: [&str; 10] =
    ["COMMAND", "IN", "OUT", "PERIOD", "REFRESH", "PROMPT", "START", "AUX_BEGIN", "AUX_END", "FLUSH"];

/// Makes the conditions of `cases` hold one after the other, sends a request of `table`, and returns its status. A
/// later step can undo an earlier condition, so only the last condition is certain to hold.
fn status(table: &str, cases: &[&Case]) -> u32 {
    let setups: Vec<_> = cases.iter().map(|case| case.setup).collect();
    let mut scene = Scene::new(&setups);
    begin(&mut scene, table);
    for case in cases {
        match case.act {
            Act::Put(at, value) => scene.put32(at, value),
            Act::Run(act) => act(&mut scene),
        }
    }
    scene.send()
}

/// VPMU-D-6.3-1, VPMU-D-6.4-3.
#[test]
fn row_of_an_error_table_has_its_status() {
    let cases = cases();
    let known: BTreeSet<&str> = cases.iter().map(|case| case.row).collect();
    let rows = rows();
    let written: BTreeSet<&str> = rows.iter().map(|(row, _)| *row).collect();
    assert_eq!(written, known, "each row has a case");
    assert_eq!((rows.len(), cases.len()), (written.len(), known.len()));
    let mut wrong = Vec::new();
    let alternatives = alternatives::alternatives();
    for (index, case) in cases.iter().chain(&alternatives).enumerate() {
        let (row, expected) = rows.iter().find(|(row, _)| *row == case.row).expect("a row of SPEC.md");
        let status = status(table(row), &[case]);
        if status != *expected {
            wrong.push(format!("case {index}, {row}: {status}, not {expected}"));
        }
    }
    assert_eq!(wrong, Vec::<String>::new());
}

/// VPMU-D-6.3-1, VPMU-D-6.4-3.
#[test]
fn first_row_that_holds_decides() {
    let (cases, rows) = (cases(), rows());
    let find = |row: &str| cases.iter().find(|case| case.row == row).expect("there");
    let tables: BTreeSet<&str> = rows.iter().map(|(row, _)| table(row)).collect();
    let mut wrong = Vec::new();
    for of in tables {
        let general = if COMMANDS.contains(&of) { "COMMAND" } else { "REQ" };
        let in_order: Vec<_> =
            rows.iter().filter(|(row, _)| table(row) == of || table(row) == general && applies(row, of)).collect();
        for (index, (first, expected)) in in_order.iter().enumerate() {
            for (later, _) in &in_order[index + 1..] {
                let status = status(of, &[find(later), find(first)]);
                if status != *expected {
                    wrong.push(format!("{of}: {first} and {later}: {status}, not {expected}"));
                }
            }
        }
    }
    assert_eq!(wrong, Vec::<String>::new());
}

/// VPMU-D-6.3-2.
#[test]
fn request_without_any_of_the_errors_succeeds() {
    let tables: BTreeSet<&str> = cases().iter().map(|case| table(case.row)).collect();
    let failed: Vec<_> =
        tables.into_iter().filter_map(|of| Some((of, status(of, &[]))).filter(|(_, status)| *status != 0)).collect();
    assert_eq!(failed, []);
}

#[test]
fn status_codes_are_linuxs() {
    let linuxs = [
        ("EPERM", libc::EPERM),
        ("ENOENT", libc::ENOENT),
        ("EIO", libc::EIO),
        ("ENXIO", libc::ENXIO),
        ("E2BIG", libc::E2BIG),
        ("EACCES", libc::EACCES),
        ("EBUSY", libc::EBUSY),
        ("EEXIST", libc::EEXIST),
        ("EXDEV", libc::EXDEV),
        ("ENODEV", libc::ENODEV),
        ("EINVAL", libc::EINVAL),
        ("ENFILE", libc::ENFILE),
        ("EMFILE", libc::EMFILE),
        ("ENOSPC", libc::ENOSPC),
        ("EOVERFLOW", libc::EOVERFLOW),
        ("EOPNOTSUPP", libc::EOPNOTSUPP),
    ];
    let linuxs = linuxs.map(|(name, number)| (name, number.unsigned_abs()));
    assert_eq!(numbers(), BTreeMap::from(linuxs));
}

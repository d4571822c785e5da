//! Runs all operations concurrently. While vCPUs notify, mark, enter, leave, detach and attach, other threads send
//! requests, drain, flush, read metrics and reset the device. The test checks that threads do not deadlock, that locks
//! are taken in order, and that no event, counter or drain remains at the end.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use vm_memory::GuestMemoryMmap;
use vpmu::abi::*;
use vpmu::source::{Mode, Overflow};
use vpmu::{ExitReason, VcpuSession, Vpmu};
use vpmu_testkit::{
    ALL_FEATURES, At, CYCLES, Descriptor, DriverQueue, FAULTS, FakeHost, FakeMachine, Fields, Fixture, command, header,
    limits, make_queues, open_of,
};
use zerocopy::{FromBytes, IntoBytes};

use super::{Pending, aside};

/// Number of resets. The other threads run for [`BETWEEN`] between two resets.
const RESETS: u32 = 150;
const BETWEEN: Duration = Duration::from_millis(5);
/// Number of addresses for rings and areas. Several rings and areas can share an address.
const PLACES: u64 = 6;
const PAGES: u64 = 0x40_0000;

/// A pseudo-random sequence with a fixed seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) % limit
    }

    fn one<T: Copy>(&mut self, of: &[T]) -> T {
        let most = u64::try_from(of.len()).expect("few");
        of[usize::try_from(self.below(most)).expect("few")]
    }

    /// Chooses each of these flags with a probability of a quarter.
    fn flags(&mut self, of: &[u32]) -> u32 {
        let mut flags = 0;
        for flag in of {
            if self.below(4) == 0 {
                flags |= flag;
            }
        }
        flags
    }
}

/// State shared by all threads.
struct Storm {
    vpmu: Arc<Vpmu>,
    host: Arc<FakeHost>,
    memory: GuestMemoryMmap,
    interrupt: Arc<FakeMachine>,
    /// The driver's side of each queue. Each reset replaces them.
    queues: Vec<Mutex<DriverQueue>>,
    /// Events that were opened since the last reset.
    events: Mutex<Vec<u64>>,
    /// Serializes attaches, because [`FakeHost::be_thread`] sets the thread for the next attach.
    attaching: Mutex<()>,
    /// Set to end the threads that reset the device, send requests or make the VMM's calls.
    over: AtomicBool,
    /// Set after `over`, to end the vCPU threads. They must run longer than the other threads, because flushes wait for
    /// vCPUs.
    ended: AtomicBool,
}

impl Storm {
    fn queue(&self, index: usize) -> MutexGuard<'_, DriverQueue> {
        self.queues[index].lock().expect("no panic")
    }

    /// Returns the id of an event that this driver opened, or an arbitrary id if it has opened no event.
    fn event(&self, dice: &mut Dice) -> u64 {
        let events = self.events.lock().expect("no panic");
        match events.len() {
            0 => 7,
            _ => dice.one(&events),
        }
    }

    fn goes_on(&self) -> bool {
        !self.over.load(Ordering::Relaxed)
    }

    fn attach(&self, vcpu: u32) -> VcpuSession {
        let _alone = self.attaching.lock().expect("no panic");
        self.host.be_thread(vpmu_testkit::thread(vcpu));
        self.vpmu.attach(vcpu, vpmu_testkit::TSC_OFFSET).expect("free")
    }

    fn run_vcpu(&self, vcpu: u32) {
        let mut dice = Dice(0x1234_5678 + u64::from(vcpu));
        let mut session = self.attach(vcpu);
        let reasons = [ExitReason::Io, ExitReason::Mmio, ExitReason::Signal];
        while !self.ended.load(Ordering::Relaxed) {
            session.enter();
            match dice.below(4) {
                0 => self.host.work(vpmu_testkit::thread(vcpu), dice.below(300), 4),
                1 => self.host.record(
                    vpmu_testkit::thread(vcpu),
                    Overflow { tsc: self.host.now(), ip: dice.below(9), mode: Mode::Guest, period: 100 },
                ),
                2 => self.host.pass(dice.below(5_000_000)),
                _ => {}
            }
            session.leave(dice.one(&reasons), &mut At(dice.below(1000)));
            match dice.below(64) {
                // Drop the session as if the vCPU's thread ended, while the vCPU is inside or outside the guest.
                0 => {
                    if dice.below(2) == 0 {
                        session.enter();
                    }
                    drop(session);
                    session = self.attach(vcpu);
                }
                1..24 => {
                    let value = u32::try_from(dice.below(3)).expect("few");
                    session.mark(value, &mut At(5));
                }
                _ => {
                    // Notify mostly the vCPU's own queue.
                    let of = if dice.below(8) == 0 { 1 - vcpu } else { vcpu };
                    self.notify(&mut session, of, &mut dice);
                }
            }
        }
    }

    /// Offers commands in two buffers, and notifies.
    fn notify(&self, session: &mut VcpuSession, of: u32, dice: &mut Dice) {
        const OPS: [u32; 14] = [
            COMMAND_IN,
            COMMAND_IN,
            COMMAND_OUT,
            COMMAND_OUT,
            COMMAND_ENABLE,
            COMMAND_DISABLE,
            COMMAND_READ,
            COMMAND_RESET,
            COMMAND_PERIOD,
            COMMAND_REFRESH,
            COMMAND_FLUSH,
            COMMAND_AUX_BEGIN,
            COMMAND_AUX_END,
            COMMAND_PROMPT,
        ];
        let index = 2 + of as usize;
        let slot = 4 * u16::try_from(session.vcpu()).expect("few");
        let mut queue = self.queue(index);
        for slot in [slot, slot + 2] {
            let commands: Vec<Command> = (0..dice.below(8))
                .map(|_| {
                    let op = dice.one(&OPS);
                    let value = match op {
                        COMMAND_PERIOD | COMMAND_REFRESH => 1 + dice.below(200),
                        COMMAND_PROMPT => dice.below(2),
                        _ => 0,
                    };
                    Command { value: value.into(), ..command(op, self.event(dice)) }
                })
                .collect();
            let room = commands.len() * size_of::<Reply>();
            queue.request_at(slot, commands.as_bytes(), room);
        }
        drop(queue);
        session.kick(u16::try_from(index).expect("few"));
        let mut queue = self.queue(index);
        while queue.reclaim().is_some() {}
    }

    /// Sends a request. Returns its status and, if it opened an event, the event's id. Returns `None` if a reset came
    /// before the answer.
    fn ask(&self, request: &[u8]) -> Option<(u32, u64)> {
        let mut queue = self.queue(0);
        queue.request(request, size_of::<OpenReply>());
        let _ = self.vpmu.notify(QUEUE_CONTROL);
        let answer = queue.answer();
        drop(queue);
        if answer.is_none() {
            // The device was reset before it could answer. Let the resetting thread lock the queue, so that it can set
            // up the next driver.
            thread::sleep(Duration::from_micros(50));
        }
        let answer = answer?;
        let status = u32::from_le_bytes(*answer.first_chunk()?);
        let opened = OpenReply::read_from_bytes(&answer);
        Some((status, opened.map_or(0, |reply| reply.id.get())))
    }

    fn request(&self, dice: &mut Dice) {
        let event = self.event(dice);
        let about = |op| header(op, event);
        match dice.below(19) {
            0..5 => self.open(dice),
            5 | 16 | 17 => drop(self.ask(about(CONTROL_CLOSE).as_bytes())),
            6 => drop(self.ask(about(CONTROL_UNMAP).as_bytes())),
            7 => drop(self.ask(about(CONTROL_UNMAP_AUX).as_bytes())),
            8 | 9 => self.map(CONTROL_MAP, event, 3, dice),
            10 => self.map(CONTROL_MAP_AUX, event, 2, dice),
            11 | 12 => {
                let link = LinkRequest {
                    header: about(CONTROL_LINK),
                    target: self.event(dice).into(),
                    role: dice.one(&[LINK_STARTER, LINK_STOPPER]).into(),
                    reserved: 0.into(),
                };
                self.ask(link.as_bytes());
            }
            13 => {
                let target = if dice.below(4) == 0 { 0 } else { self.event(dice) };
                let redirect = RedirectRequest { header: about(CONTROL_REDIRECT), target: target.into() };
                self.ask(redirect.as_bytes());
            }
            14 => {
                let pause = PauseRequest {
                    header: about(CONTROL_PAUSE),
                    paused: u32::try_from(dice.below(2)).expect("few").into(),
                    reserved: 0.into(),
                };
                self.ask(pause.as_bytes());
            }
            18 => {
                let signal = SignalRequest {
                    header: about(CONTROL_SIGNAL),
                    own: u32::try_from(dice.below(2)).expect("few").into(),
                    reserved: 0.into(),
                };
                self.ask(signal.as_bytes());
            }
            _ => {
                let page = TaskPageRequest {
                    header: header(CONTROL_TASK_PAGE, 0),
                    vcpu: u32::try_from(dice.below(2)).expect("few").into(),
                    reserved: 0.into(),
                    address: 0x8000.into(),
                };
                self.ask(page.as_bytes());
            }
        }
    }

    fn open(&self, dice: &mut Dice) {
        let kinds = [
            CYCLES,
            FAULTS,
            (KIND_MARK, 1),
            (KIND_MARK, 1),
            (KIND_EXITS, EXIT_USER),
            (KIND_GUEST_TIME, 0),
            (KIND_EXIT_TRACE, EXIT_USER),
            (KIND_EXIT_TRACE, EXIT_ALL),
            (KIND_SAMPLE_TRACE, PACE_EXITS),
        ];
        let (kind, config) = dice.one(&kinds);
        let context = dice.one(&[CONTEXT_TASK, CONTEXT_TASK, 0, 1]);
        let other = |dice: &mut Dice, often| match dice.below(often) {
            0 => self.event(dice),
            _ => 0,
        };
        let samples = dice.below(2) == 0 && (kind, config) != FAULTS || kind == KIND_SAMPLE_TRACE;
        let traces = [KIND_EXIT_TRACE, KIND_SAMPLE_TRACE].contains(&kind);
        let flags = dice.flags(&[OPEN_PAUSED, OPEN_PERSISTENT, OPEN_INHERIT_STAT]);
        let request = open_of(kind, config, context)
            .period(if samples { 10 + dice.below(90) } else { 0 })
            .sample_type(if traces { 0 } else { 0x1_03c7_u64 })
            .flags(OPEN_ENABLED | flags)
            .leader(other(dice, 4))
            .parent(other(dice, 8))
            .wakeup(1)
            .engine(dice.one(&[ENGINE_ANY, ENGINE_EXIT]));
        if let Some((0, id)) = self.ask(request.as_bytes()) {
            self.events.lock().expect("no panic").push(id);
            if dice.below(2) == 0 {
                self.map(CONTROL_MAP, id, 3, dice);
            }
            if traces {
                self.map(CONTROL_MAP_AUX, id, 2, dice);
            }
        }
    }

    fn map(&self, op: u32, event: u64, pages: u32, dice: &mut Dice) {
        let flags = dice.flags(&[MAP_DRIVER_OWNED]);
        let driven = if op == CONTROL_MAP_AUX { flags } else { 0 };
        let request =
            MapRequest { header: header(op, event), pages: pages.into(), flags: (MAP_WRITABLE | driven).into() };
        let mut bytes = request.as_bytes().to_vec();
        let place = PAGES + dice.below(PLACES) * 0x1_0000;
        let first = place + if op == CONTROL_MAP { 0 } else { 0x8000 };
        for page in 0..u64::from(pages) {
            bytes.extend((first + page * 0x1000).to_le_bytes());
        }
        self.ask(&bytes);
    }

    /// Resets the device, and sets up a new driver.
    fn reset(&self) {
        self.vpmu.reset();
        // `events` holds only the ids of events that this driver opened. Persistent events remain on the device.
        self.events.lock().expect("no panic").clear();
        let mut queues: Vec<_> = (0..self.queues.len()).map(|at| self.queue(at)).collect();
        let (drivers, made) = make_queues(&self.memory);
        for (queue, driver) in queues.iter_mut().zip(drivers) {
            **queue = driver;
        }
        self.vpmu.activate(self.memory.clone(), ALL_FEATURES, &made, self.interrupt.clone()).expect("active");
        for slot in 0..8 {
            let address = queues[1].buffer(slot);
            queues[1].describe(slot, Descriptor { address, len: 16, writable: true, next: None });
            queues[1].offer(slot);
        }
        drop(queues);
        let _ = self.vpmu.notify(QUEUE_EVENT);
    }

    /// Makes one of the VMM's calls: drains, flushes, ends an event, or reads the metrics.
    fn host(&self, dice: &mut Dice) {
        match dice.below(5) {
            0 => self.vpmu.drain(),
            3 => drop(self.vpmu.end(self.event(dice))),
            1 => drop(self.vpmu.flush(None)),
            2 => drop(self.vpmu.flush(Some(self.event(dice)))),
            _ => {
                let metrics = self.vpmu.metrics();
                assert!(metrics.kicks.len() == 2 && self.vpmu.persistent().len() <= 64);
                assert!(!format!("{:?}", self.vpmu).is_empty());
            }
        }
    }
}

#[test]
fn concurrent_resets_requests_and_notifications_end_and_close_everything() {
    let limits = limits().with(|limits| limits.max_events = 64);
    let fixture = Fixture::with(limits, ALL_FEATURES);
    fixture.host.know_ips();
    (0..vpmu_testkit::VCPUS).for_each(|vcpu| fixture.vcpus.set(vcpu, None));
    let storm = Arc::new(Storm {
        vpmu: Arc::clone(&fixture.vpmu),
        host: Arc::clone(&fixture.host),
        memory: fixture.memory.clone(),
        interrupt: fixture.interrupt,
        queues: fixture.queues.into_iter().map(Mutex::new).collect(),
        events: Mutex::default(),
        attaching: Mutex::default(),
        over: AtomicBool::new(false),
        ended: AtomicBool::new(false),
    });
    let loops = |seed: u64, act: fn(&Storm, &mut Dice)| -> Pending<u64> {
        let storm = Arc::clone(&storm);
        aside(move || {
            let mut dice = Dice(seed);
            let mut rounds = 0;
            while storm.goes_on() {
                act(&storm, &mut dice);
                rounds += 1;
            }
            rounds
        })
    };
    let others = [loops(11, Storm::request), loops(12, Storm::host), loops(13, Storm::host)];
    let vcpus = [0, 1].map(|vcpu| {
        let storm = Arc::clone(&storm);
        aside(move || storm.run_vcpu(vcpu))
    });
    let resets = {
        let storm = Arc::clone(&storm);
        aside(move || {
            for _ in 0..RESETS {
                thread::sleep(BETWEEN);
                storm.reset();
            }
        })
    };
    resets.wait();
    storm.over.store(true, Ordering::Relaxed);
    let rounds = others.map(Pending::wait);
    storm.ended.store(true, Ordering::Relaxed);
    for vcpu in vcpus {
        vcpu.wait();
    }
    let metrics = storm.vpmu.metrics();
    eprintln!("requests and host calls {rounds:?}, {metrics:?}");
    assert!(metrics.commands > 1000 && metrics.events_opened > 100);

    let events = std::mem::take(&mut *storm.events.lock().expect("no panic"));
    for event in storm.vpmu.persistent() {
        storm.vpmu.end(event.id).expect("there");
    }
    for event in events {
        storm.ask(header(CONTROL_CLOSE, event).as_bytes());
    }
    assert_eq!(storm.vpmu.persistent().len(), 0);
    assert_eq!(storm.host.open_counters(), 0);
    // Check that throttling and drains have ended, and that the device is in its initial state.
    storm.vpmu.drain();
    assert!(!storm.host.draining());
    let mut session = storm.attach(0);
    let marks = open_of(KIND_MARK, 5, 0).flags(OPEN_ENABLED);
    let (status, event) = storm.ask(marks.as_bytes()).expect("no reset");
    assert_eq!(status, 0);
    (0..9).for_each(|_| session.mark(5, &mut At(1)));
    let mut queue = storm.queue(2);
    queue.request(command(COMMAND_READ, event).as_bytes(), size_of::<Reply>());
    session.kick(QUEUE_VCPU);
    let answer = queue.answer().expect("answered immediately");
    let reply = Reply::read_from_bytes(&answer).expect("a reply");
    assert_eq!((reply.status.get(), reply.value.get()), (0, 9));
}

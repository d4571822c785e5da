//! One device with its driver, host and operator, and the checks at the end of every execution.

use std::cell::RefCell;
use std::rc::Rc;

use libfuzzer_sys::arbitrary::{Result, Unstructured};
use serde::Deserialize;
use serde_json::Value;
use vm_memory::GuestMemoryAtomic;
use vpmu::abi::{F_AUX, F_RING, F_TASK_PAGE, F_WINDOW, KIND_MARK, KIND_TSC, QUEUE_CONTROL, QUEUE_EVENT, QUEUE_VCPU};
use vpmu::{
    AuxProducer, Engines, EventMatch, ExitReason, Limits, Policy, RestoreError, SavedState, Settings, Tier, VcpuSession,
};
use vpmu_testkit::{
    ALL_FEATURES, At, DriverQueue, Errno, Fixture, VCPUS, account_for_exits, account_for_samples, open_of, thread,
};

use super::layout::{self, Memory};
use super::rings::OwnRing;

thread_local! {
    /// All executions reuse this memory, because mapping it takes longer than most executions.
    static MEMORY: RefCell<Option<Rc<Memory>>> = const { RefCell::new(None) };
}

/// The VMM's own producer of AUX data.
const PRODUCER: AuxProducer = AuxProducer { name: "producer", counts: "words", format: 128 };

/// The event that the operator denies the guest.
const DENIED: EventMatch = EventMatch::one(KIND_MARK, u32::MAX as u64);

/// The smaller of the two values for [`Limits::max_pages`], the limit on guest pages in rings and areas.
const FEW_PAGES: u32 = 8;

/// A device in use.
pub(crate) struct Stage {
    pub(crate) memory: Rc<Memory>,
    pub(crate) fixture: Fixture,
    /// Ids of the events that the driver opened or the operator started. Some of the events may have ended.
    pub(crate) events: Vec<u64>,
    pub(crate) rings: Vec<OwnRing>,
    /// For each vCPU, whether its session is on this thread.
    attached: [bool; VCPUS as usize],
    /// Whether the sessions of vCPUs are on other threads, after [`Stage::take_vcpus`].
    threaded: bool,
    windowed: bool,
    /// Whether regions of guest memory can be removed and added.
    changing: bool,
    /// Whether a restored device can replace this device. False if a target keeps references to this device elsewhere.
    pub(crate) movable: bool,
    /// Whether the device was restored from a forged state, which may contain any addresses and numbers.
    pub(crate) forged: bool,
    /// Number of unshared pages that rings have received so far.
    own_pages: u64,
    /// Whether the host can no longer make the vCPUs leave the guest.
    pub(crate) stuck: bool,
    /// Marks placed by vCPUs.
    pub(crate) marks: u64,
}

/// Chooses the features of a driver: usually all.
pub(crate) fn features(input: &mut Unstructured<'_>) -> Result<u64> {
    let choices = [
        ALL_FEATURES | 1 << F_WINDOW,
        ALL_FEATURES | 1 << F_WINDOW,
        ALL_FEATURES,
        ALL_FEATURES & !(1 << F_RING),
        ALL_FEATURES & !(1 << F_AUX) & !(1 << F_TASK_PAGE),
    ];
    Ok(*input.choose(&choices)?)
}

fn limits(input: &mut Unstructured<'_>) -> Result<Limits> {
    let mut limits = Limits::default();
    limits.max_events = *input.choose(&[32, 32, 3])?;
    limits.max_ring_pages = *input.choose(&[16, 2])?;
    limits.max_pages = *input.choose(&[64, 64, FEW_PAGES])?;
    limits.max_persistent = *input.choose(&[6, 1])?;
    limits.max_samples = u32::MAX;
    limits.max_record_bytes = u64::MAX;
    limits.min_hardware_period = 1;
    limits.max_sample_rate = *input.choose(&[u32::MAX, 1000])?;
    if limits.max_sample_rate == 1000 {
        limits.max_active_counters = 2;
        limits.max_host_counters = 4;
        limits.max_samples = 3000;
        limits.max_record_bytes = 200_000;
        limits.max_window_pages = 8;
    }
    Ok(limits)
}

impl Stage {
    /// Creates a device configured by the first bytes of `input`, with attached vCPUs and without a driver.
    pub(crate) fn new(input: &mut Unstructured<'_>) -> Result<Self> {
        let engines = *input.choose(&[Engines::Auto, Engines::Batched, Engines::Exit])?;
        let limits = limits(input)?;
        // Derive this value from a limit. Reading it from the input would change the meaning of the existing seeds.
        let changing = limits.max_pages == FEW_PAGES;
        let settings = Settings::new(VCPUS, 1_000_000)
            .with_limits(limits)
            .with_engines(engines)
            .with_policy(Policy::new(Tier::Full.events(), vec![DENIED]));
        let memory = MEMORY.with_borrow_mut(|memory| {
            let memory = memory.get_or_insert_with(|| Rc::new(Memory::new()));
            Rc::clone(memory)
        });
        memory.clear();
        let windowed = input.ratio(7, 8)?;
        let window = windowed.then_some(&memory.window);
        let fixture = Fixture::with_memory(settings, window, memory.guest.clone());
        let fixture = fixture.with_producers(&[PRODUCER]);
        if input.ratio(1, 2)? {
            fixture.host.know_ips();
        }
        let mut stage = Self {
            memory,
            fixture,
            events: Vec::new(),
            rings: Vec::new(),
            attached: [false; VCPUS as usize],
            threaded: false,
            windowed,
            changing,
            movable: false,
            forged: false,
            own_pages: 0,
            stuck: false,
            marks: 0,
        };
        (0..VCPUS).for_each(|vcpu| stage.attach(vcpu, thread(vcpu)));
        Ok(stage)
    }

    fn guest_memory(&self) -> vpmu::Memory {
        let memory = self.fixture.memory.clone();
        if self.changing { vpmu::Memory::space(GuestMemoryAtomic::new(memory)) } else { memory.into() }
    }

    /// Starts a driver, replacing an earlier one.
    pub(crate) fn activate(&mut self, features: u64) {
        let (drivers, queues) = self.memory.queues();
        self.fixture.queues = drivers;
        let features = features & self.fixture.vpmu.features();
        self.fixture.set_transport(features, &queues);
        self.fixture
            .vpmu
            .activate(self.guest_memory(), features, &queues, self.fixture.interrupt.clone())
            .expect("features that were offered, and queues in memory");
    }

    /// Tries to start a driver with any features and at most `queues` queues. Checks that the device refuses features
    /// that it did not offer, and too few queues.
    pub(crate) fn activate_wrongly(&mut self, features: u64, queues: usize) {
        let (_, mut given) = self.memory.queues();
        given.truncate(queues);
        let complete = given.len() == self.fixture.vpmu.queue_count();
        let offered = features & !self.fixture.vpmu.features() == 0;
        let memory = self.guest_memory();
        self.fixture.set_transport(features, &given);
        let activated = self.fixture.vpmu.activate(memory, features, &given, self.fixture.interrupt.clone());
        assert!(
            activated.is_err() || complete && offered,
            "the device accepted features that it does not offer, or too few queues"
        );
    }

    /// The driver's side of a queue.
    pub(crate) fn queue(&mut self, index: usize) -> &mut DriverQueue {
        &mut self.fixture.queues[index]
    }

    /// Attaches a vCPU to `thread`.
    pub(crate) fn attach(&mut self, vcpu: u32, thread: Errno) {
        self.fixture.attach_as(vcpu, thread);
        self.attached[vcpu as usize] = true;
    }

    /// Pauses a vCPU and ends its thread.
    pub(crate) fn detach(&mut self, vcpu: u32) {
        if self.attached[vcpu as usize] {
            self.fixture.vcpus.with(vcpu, |session| drop(session.pause()));
        }
        self.fixture.vcpus.set(vcpu, None);
        self.attached[vcpu as usize] = false;
    }

    /// Takes the sessions and queues of all attached vCPUs, so that each vCPU can run on a thread of its own.
    pub(crate) fn take_vcpus(&mut self) -> Vec<(u32, VcpuSession, DriverQueue)> {
        self.threaded = true;
        let queues = self.fixture.queues.split_off(usize::from(QUEUE_VCPU));
        let vcpus = (0..VCPUS).zip(queues);
        let taken = vcpus.filter(|(vcpu, _)| std::mem::take(&mut self.attached[*vcpu as usize]));
        taken.map(|(vcpu, queue)| (vcpu, self.fixture.vcpus.take(vcpu), queue)).collect()
    }

    /// Takes a session back after its thread ended.
    pub(crate) fn give_back(&mut self, vcpu: u32, session: Option<VcpuSession>) {
        self.attached[vcpu as usize] = session.is_some();
        self.fixture.vcpus.set(vcpu, session);
        self.threaded = false;
    }

    /// Attaches a vCPU if necessary and possible. Returns whether the vCPU can act on this thread.
    pub(crate) fn can_run(&mut self, vcpu: u32) -> bool {
        if !self.runs(vcpu) && !self.threaded {
            self.attach(vcpu, thread(vcpu));
        }
        self.runs(vcpu)
    }

    /// Returns whether a vCPU can act on this thread.
    pub(crate) fn runs(&self, vcpu: u32) -> bool {
        self.attached[vcpu as usize]
    }

    /// Chooses a vCPU; `None` if the chosen vCPU cannot act on this thread.
    pub(crate) fn vcpu(&self, input: &mut Unstructured<'_>) -> Result<Option<u32>> {
        let vcpu = input.int_in_range(0..=VCPUS - 1)?;
        Ok(self.runs(vcpu).then_some(vcpu))
    }

    /// Chooses an event, usually an existing one.
    pub(crate) fn event(&self, input: &mut Unstructured<'_>) -> Result<u64> {
        let back = input.int_in_range(0..=15)?;
        match (back, self.events.len()) {
            (15, _) | (_, 0) => super::input::number(input),
            (back, len) => Ok(self.events[len - 1 - back % len]),
        }
    }

    /// Takes `count` pages that no other ring uses; `None` if there are too few left.
    pub(crate) fn own_pages(&mut self, count: u64) -> Option<Vec<u64>> {
        let first = self.own_pages;
        let pages: Option<Vec<u64>> = (first..first + count).map(layout::own).collect();
        pages.inspect(|_| self.own_pages += count)
    }

    /// Reads and checks all rings, like a guest program.
    pub(crate) fn read_rings(&mut self) {
        for ring in &mut self.rings {
            ring.read(&self.fixture.memory, self.threaded);
        }
    }

    /// Makes the vCPUs leave the guest, so that nothing waits for them.
    pub(crate) fn leave_all(&self) {
        for vcpu in (0..VCPUS).filter(|vcpu| self.runs(*vcpu)) {
            let mut nowhere = At(u64::MAX);
            self.fixture.vcpus.leave(vcpu, ExitReason::Signal, &mut nowhere);
        }
    }

    /// Saves the device. Its vCPUs must be outside the guest.
    pub(crate) fn save(&self) -> Value {
        let state = self.fixture.vpmu.save().expect("no vCPU is in the guest");
        serde_json::to_value(state).expect("plain data")
    }

    /// Restores `state` into a new device with the same settings on a new host. Returns the device and the result
    /// of the restore, or `None` if `state` does not have the structure of a saved state.
    pub(crate) fn successor(&self, state: &Value) -> Option<(Fixture, core::result::Result<(), RestoreError>)> {
        let state: SavedState = SavedState::deserialize(state).ok()?;
        let next = self.fixture.successor(
            self.fixture.settings(),
            self.fixture.memory.clone(),
            self.windowed.then_some(&self.memory.window),
        );
        let (features, queues) = if state.has_driver() { next.transport() } else { Default::default() };
        let memory = self.guest_memory();
        let restored = next.vpmu.restore(&state, memory, features, &queues, next.interrupt.clone());
        Some((next, restored))
    }

    /// Replaces the device with `next`, and attaches the vCPUs to `next`.
    pub(crate) fn go_on_as(&mut self, next: Fixture) {
        // Reset the old device, so that it no longer writes to guest memory: `next` uses the same memory.
        self.fixture.vpmu.reset();
        self.fixture = next;
        if self.stuck {
            // Like the old host, the new host must not be able to make the vCPUs leave the guest.
            self.fixture.host.be_stuck();
        }
        for vcpu in (0..VCPUS).filter(|vcpu| self.attached[*vcpu as usize]) {
            self.fixture.attach_as(vcpu, thread(vcpu));
            let known = |session: &mut VcpuSession| (session.vcpu(), session.exits());
            let exits = self.fixture.vpmu.exits(vcpu);
            assert_eq!(self.fixture.vcpus.with(vcpu, known), (vcpu, exits));
            self.fixture.vcpus.enter(vcpu);
        }
        let _ = self.fixture.vpmu.notify(QUEUE_CONTROL);
    }

    /// Notifies every queue, whatever its contents.
    pub(crate) fn notify_all(&self) {
        let vpmu = &self.fixture.vpmu;
        let _ = vpmu.notify(QUEUE_CONTROL);
        let _ = vpmu.notify(QUEUE_EVENT);
        for vcpu in (0..VCPUS).filter(|vcpu| self.runs(*vcpu)) {
            let mut nowhere = At(u64::MAX);
            self.fixture.vcpus.leave(vcpu, ExitReason::Mmio, &mut nowhere);
            let queue = u16::try_from(vcpu).map_or(QUEUE_VCPU, |vcpu| QUEUE_VCPU + vcpu);
            self.fixture.vcpus.kick(vcpu, queue);
            self.fixture.vcpus.enter(vcpu);
        }
    }

    /// Makes the vCPUs enter the guest.
    pub(crate) fn enter_all(&self) {
        for vcpu in (0..VCPUS).filter(|vcpu| self.runs(*vcpu)) {
            self.fixture.vcpus.enter(vcpu);
        }
    }

    /// Checks that the device accounts for new events, if it has a driver that can open them.
    pub(crate) fn account(&mut self) {
        let Some(vcpu) = (0..VCPUS).find(|vcpu| self.runs(*vcpu)) else {
            return;
        };
        if self.forged || self.fixture.queues.is_empty() {
            return;
        }
        self.fixture.vcpus.enter(vcpu);
        self.read_rings();
        if let Ok(newest) = self.fixture.open(&open_of(KIND_TSC, 0, vcpu)) {
            let mut named = self.rings.iter().flat_map(|ring| &ring.named);
            assert!(named.all(|id| (1..newest).contains(id)), "a record names an event that never existed");
            self.fixture.close(newest).expect("closed");
        }
        let before = self.fixture.vpmu.metrics().marks;
        let [ring, page, other, page_2, trace_ring, trace_page, areas @ ..] = layout::last();
        account_for_samples(&mut self.fixture, vcpu, &[[ring, page], [other, page_2]]);
        account_for_exits(&mut self.fixture, vcpu, &[trace_ring, trace_page], &areas);
        self.marks += self.fixture.vpmu.metrics().marks - before;
    }

    /// Checks the device, resets it, and checks that it writes nothing more and frees everything.
    pub(crate) fn finish(mut self) {
        if self.forged {
            self.end();
            return;
        }
        self.read_rings();
        self.memory.assert_neighbours_untouched();
        let vpmu = &self.fixture.vpmu;
        let metrics = vpmu.metrics();
        assert_eq!(metrics.marks, self.marks, "every mark is counted");
        let reported: u64 = self.rings.iter().map(|ring| ring.lost).sum();
        assert!(
            reported <= metrics.samples_lost,
            "records report {reported} lost samples, but only {} were lost",
            metrics.samples_lost
        );
        vpmu.reset();
        let heads = |stage: &Self| -> Vec<u64> {
            let rings = stage.rings.iter();
            rings.map(|ring| ring.head(&stage.fixture.memory)).collect()
        };
        let before = heads(&self);
        for vcpu in (0..VCPUS).filter(|vcpu| self.runs(*vcpu)) {
            self.fixture.host.work(thread(vcpu), 100, 4);
            self.fixture.mark(vcpu, 5, 1);
            self.fixture.exit(vcpu, ExitReason::Io, &mut At(1));
        }
        vpmu.drain();
        assert_eq!(heads(&self), before, "the device wrote to a ring after a reset");
        self.end();
    }

    /// Ends all events. Checks that no host counter is open, periodic drains are off, and the device does not need
    /// the registers of any vCPU.
    fn end(&self) {
        let vpmu = &self.fixture.vpmu;
        vpmu.reset();
        for event in vpmu.persistent() {
            vpmu.end(event.id).expect("it was listed");
        }
        // This drain finds nothing to collect, so the device turns periodic draining off.
        vpmu.drain();
        assert_eq!(self.fixture.host.open_counters(), 0, "host counters are still open");
        assert!(!self.fixture.host.draining(), "the drain is still on");
        for vcpu in (0..VCPUS).filter(|vcpu| self.runs(*vcpu)) {
            let wanted = self.fixture.vcpus.wants_registers(vcpu);
            assert!(!wanted, "the device still needs registers of vCPU {vcpu}");
        }
    }
}

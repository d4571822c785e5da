//! A device with a driver, and functions for the driver's requests and commands.

use std::sync::{Arc, Mutex};

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vpmu::abi::*;
use vpmu::{
    AuxProducer, Engines, Exit, ExitReason, Hardware, Limits, Policy, QueueState, Registers, SavedState, Settings,
    Turn, VcpuSession, Vpmu,
};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::fake_host::{At, FakeHost, FakeMachine, FakeSource};
use crate::queue::{Descriptor, DriverQueue, Layout, QUEUE_SIZE};
use crate::reader::Reader;
use crate::requests::{Errno, command, header, map_request, outcome, structs};

pub const VCPUS: u32 = 2;
pub const MEMORY_LEN: usize = 0x400_0000;
/// The first address that is not guest memory.
pub const MEMORY: u64 = MEMORY_LEN as u64;
pub const QUEUES: u64 = 0x1_0000;
const BUFFERS: u64 = 0x100_0000;
const RINGS: u64 = 0x10_0000;
pub const ALL_FEATURES: u64 = 1 << 32 | 0xf;
/// The guest's TSC minus the host's TSC, on each vCPU.
pub const TSC_OFFSET: u64 = 1000;

#[derive(Debug)]
pub struct Fixture {
    pub host: Arc<FakeHost>,
    pub vpmu: Arc<Vpmu>,
    pub vcpus: Vcpus,
    pub memory: GuestMemoryMmap,
    pub queues: Vec<DriverQueue>,
    /// The transport's interrupt, which records the signalled queues.
    pub interrupt: Arc<FakeMachine>,
    pub next_ring: u64,
    settings: Settings,
    window: Option<GuestMemoryMmap>,
    producers: Vec<AuxProducer>,
    /// The features and queues that the driver has set up.
    driver: Option<(u64, Vec<QueueState>)>,
}

/// The sessions of the vCPUs that have a thread.
#[derive(Debug)]
pub struct Vcpus(Vec<Mutex<Option<VcpuSession>>>);

impl Vcpus {
    /// vCPUs without threads.
    pub fn new() -> Self {
        Self((0..VCPUS).map(|_| Mutex::new(None)).collect())
    }

    /// Replaces the session of a vCPU and ends its previous session.
    pub fn set(&self, vcpu: u32, session: Option<VcpuSession>) {
        *self.0[vcpu as usize].lock().expect("no panic") = session;
    }

    /// Takes the session of a vCPU, for use on another thread.
    pub fn take(&self, vcpu: u32) -> VcpuSession {
        let mut session = self.0[vcpu as usize].lock().expect("no panic");
        session.take().expect("the vCPU has a thread")
    }

    pub fn with<T>(&self, vcpu: u32, act: impl FnOnce(&mut VcpuSession) -> T) -> T {
        let mut session = self.0[vcpu as usize].lock().expect("no panic");
        act(session.as_mut().expect("the vCPU has a thread"))
    }

    pub fn enter(&self, vcpu: u32) {
        self.with(vcpu, VcpuSession::enter);
    }

    pub fn leave(&self, vcpu: u32, exit: impl Into<Exit>, regs: &mut dyn Registers) {
        self.with(vcpu, |session| session.leave(exit, regs));
    }

    pub fn mark(&self, vcpu: u32, value: u32, regs: &mut dyn Registers) {
        self.with(vcpu, |session| session.mark(value, regs));
    }

    pub fn kick(&self, vcpu: u32, queue: u16) {
        self.with(vcpu, |session| session.kick(queue));
    }

    /// Continues an unfinished notification until it is done, as a VMM does before guest entry.
    pub fn resume(&self, vcpu: u32) {
        self.with(vcpu, |session| while session.resume() == Turn::Unfinished {});
    }

    pub fn wants_registers(&self, vcpu: u32) -> bool {
        self.with(vcpu, |session| session.wants_registers())
    }
}

/// The default limits, but without limits for the periods of hardware events, for the total samples and record bytes of
/// all events, and for the time that samples take.
pub fn limits() -> Limits {
    Limits::default().with(|limits| {
        limits.min_hardware_period = 1;
        limits.max_samples = u32::MAX;
        limits.max_record_bytes = u64::MAX;
        limits.max_sampling_percent = 100;
    })
}

/// Returns the id of the thread that runs vCPU `vcpu`.
pub fn thread(vcpu: u32) -> i32 {
    100 + i32::try_from(vcpu).expect("small")
}

impl Fixture {
    /// A device that does not throttle.
    pub fn new() -> Self {
        let limits = limits().with(|limits| limits.max_sample_rate = u32::MAX);
        Self::with(limits, ALL_FEATURES)
    }

    pub fn with(limits: Limits, features: u64) -> Self {
        Self::with_engines(Engines::Auto, limits, features)
    }

    pub fn with_engines(engines: Engines, limits: Limits, features: u64) -> Self {
        let mut fixture = Self::bare(engines, limits, None);
        (0..VCPUS).for_each(|vcpu| fixture.attach(vcpu));
        fixture.activate(features);
        fixture
    }

    /// Creates a device that has no driver and no vCPU threads.
    pub fn bare(engines: Engines, limits: Limits, window: Option<&GuestMemoryMmap>) -> Self {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY_LEN)]).expect("memory");
        let settings = Settings::new(VCPUS, 1_000_000).with_limits(limits).with_engines(engines);
        Self::with_memory(settings, window, memory)
    }

    /// Creates a device with these hardware settings from the operator.
    pub fn with_hardware(hardware: Hardware) -> Self {
        Self::with_policy(hardware, Policy::default())
    }

    /// Like [`Fixture::with_hardware`], with the operator's policy.
    pub fn with_policy(hardware: Hardware, policy: Policy) -> Self {
        let settings = |settings: Settings| settings.with_hardware(hardware).with_policy(policy);
        Self::with_settings(settings, ALL_FEATURES)
    }

    /// Creates a device with the usual settings after `other` has changed them, and with a driver that accepts
    /// `features`.
    pub fn with_settings(other: impl FnOnce(Settings) -> Settings, features: u64) -> Self {
        let memory = Self::bare(Engines::Auto, limits(), None).memory;
        let settings = other(Settings::new(VCPUS, 1_000_000).with_limits(limits()));
        let mut fixture = Self::with_memory(settings, None, memory);
        (0..VCPUS).for_each(|vcpu| fixture.attach(vcpu));
        fixture.activate(features);
        fixture
    }

    /// The configuration space.
    pub fn config(&self) -> Config {
        let mut config = Config::default();
        self.vpmu.read_config(0, config.as_mut_bytes());
        config
    }

    /// Creates a device whose VMM has these AUX producers.
    pub fn producing(producers: &[AuxProducer]) -> Self {
        let fixture = Self::bare(Engines::Auto, limits(), None);
        let mut fixture = fixture.with_producers(producers);
        (0..VCPUS).for_each(|vcpu| fixture.attach(vcpu));
        fixture.activate(ALL_FEATURES);
        fixture
    }

    /// Adds AUX producers to a device that is not in use yet.
    pub fn with_producers(mut self, producers: &[AuxProducer]) -> Self {
        let vpmu = Arc::into_inner(self.vpmu).expect("the only reference");
        let vpmu = vpmu.with_aux_producers(producers.to_vec());
        self.vpmu = Arc::new(vpmu.expect("producers"));
        self.producers = producers.to_vec();
        self
    }

    /// Creates a device that uses the caller's memory.
    pub fn with_memory(settings: Settings, window: Option<&GuestMemoryMmap>, memory: GuestMemoryMmap) -> Self {
        let host = Arc::new(FakeHost::default());
        let machine = Arc::new(FakeMachine(Arc::clone(&host)));
        let source = Box::new(FakeSource::new(&host, &settings.hardware.raw));
        let interrupt = Arc::clone(&machine);
        let mut vpmu = Vpmu::new(settings.clone(), machine, source).expect("a device");
        if let Some(window) = window {
            vpmu = vpmu.with_window(window.clone()).expect("a window");
        }
        Self {
            host,
            vpmu: Arc::new(vpmu),
            vcpus: Vcpus::new(),
            memory,
            queues: Vec::new(),
            interrupt,
            next_ring: RINGS,
            settings,
            window: window.cloned(),
            producers: Vec::new(),
            driver: None,
        }
    }

    /// Creates a new device on a new host. The new device can be restored from this device's state. It has no vCPU
    /// threads and no driver. `memory` and `window` have the same contents as this device's memory and window.
    pub fn successor(&self, settings: Settings, memory: GuestMemoryMmap, window: Option<&GuestMemoryMmap>) -> Self {
        let next = Self::with_memory(settings, window, memory.clone());
        // The new host's TSC continues from the old host's value, so the guest's TSC also continues. A real VMM sets
        // the guest's TSC.
        next.host.pass(self.host.now());
        let queues = self.queues.iter().map(|queue| queue.at(&memory)).collect();
        Self { queues, next_ring: self.next_ring, driver: self.driver.clone(), ..next.with_producers(&self.producers) }
    }

    pub fn settings(&self) -> Settings {
        self.settings.clone()
    }

    /// Sets the features and queues that the transport passes to a restored device.
    pub fn set_transport(&mut self, features: u64, queues: &[QueueState]) {
        self.driver = Some((features, queues.to_vec()));
    }

    /// The features and queues that the transport passes to a restored device.
    pub fn transport(&self) -> (u64, Vec<QueueState>) {
        self.driver.clone().unwrap_or_default()
    }

    /// Makes every vCPU leave the guest.
    pub fn halt(&self) {
        (0..VCPUS).for_each(|vcpu| self.vcpus.leave(vcpu, ExitReason::Signal, &mut At(1)));
    }

    /// Saves the device, and converts the state to JSON and back. All vCPUs must have left the guest.
    pub fn save(&self) -> SavedState {
        let state = self.vpmu.save().expect("saved");
        let file = serde_json::to_string(&state).expect("a file");
        let read: SavedState = serde_json::from_str(&file).expect("a state");
        assert_eq!(read, state);
        read
    }

    /// Saves the device, and continues with another device on another host.
    pub fn move_on(&mut self) {
        self.halt();
        let state = self.save();
        let mut next = self.successor(self.settings(), self.memory.clone(), self.window.as_ref());
        // Reset the old device so that it stops writing to the memory, because the new device uses this memory.
        self.vpmu.reset();
        next.resume(&state);
        *self = next;
    }

    /// Restores `state` into this device.
    pub fn resume(&mut self, state: &SavedState) {
        let (features, queues) = self.transport();
        let memory = self.memory.clone();
        let interrupt = self.interrupt.clone();
        let restored = self.vpmu.restore(state, memory, features, &queues, interrupt);
        restored.expect("restored");
        (0..VCPUS).for_each(|vcpu| self.attach(vcpu));
        let _ = self.vpmu.notify(QUEUE_CONTROL);
    }

    /// Attaches the thread of a vCPU.
    pub fn attach(&self, vcpu: u32) {
        self.attach_as(vcpu, thread(vcpu));
    }

    pub fn attach_as(&self, vcpu: u32, thread: i32) {
        self.vcpus.set(vcpu, None);
        self.host.be_thread(thread);
        let session = self.vpmu.attach(vcpu, TSC_OFFSET);
        self.vcpus.set(vcpu, Some(session.expect("the device has this vCPU")));
    }

    /// Sets up all queues again and activates the device.
    pub fn activate(&mut self, features: u64) {
        let queues = self.make_queues();
        self.set_transport(features, &queues);
        self.vpmu.activate(self.memory.clone(), features, &queues, self.interrupt.clone()).expect("active");
    }

    /// Sets up all queues anew.
    pub fn make_queues(&mut self) -> Vec<QueueState> {
        let (drivers, queues) = make_queues(&self.memory);
        self.queues = drivers;
        queues
    }

    /// Sends a control request with `room` bytes for its answer. Returns the answer.
    pub fn control_bytes(&mut self, request: &[u8], room: usize) -> Vec<u8> {
        self.queues[0].exchange(request, room, || {
            let _ = self.vpmu.notify(QUEUE_CONTROL);
        })
    }

    pub fn control(&mut self, request: &(impl IntoBytes + Immutable + ?Sized)) -> Result<(), Errno> {
        let answer = self.control_bytes(request.as_bytes(), size_of::<ControlReply>());
        let reply = ControlReply::read_from_bytes(&answer).expect("a reply");
        outcome(reply.status.get())
    }

    pub fn open(&mut self, request: &OpenRequest) -> Result<u64, Errno> {
        let reply = self.open_reply(request);
        outcome(reply.status.get()).map(|()| reply.id.get())
    }

    /// Opens an event that the device must not refuse. Returns the event's id.
    #[track_caller]
    pub fn opened(&mut self, request: &OpenRequest) -> u64 {
        self.open(request).unwrap_or_else(|errno| panic!("errno {errno} for {request:?}"))
    }

    pub fn open_reply(&mut self, request: &OpenRequest) -> OpenReply {
        let answer = self.control_bytes(request.as_bytes(), size_of::<OpenReply>());
        OpenReply::read_from_bytes(&answer).expect("a reply")
    }

    pub fn close(&mut self, event: u64) -> Result<(), Errno> {
        self.control(&header(CONTROL_CLOSE, event))
    }

    pub fn unmap(&mut self, event: u64) -> Result<(), Errno> {
        self.control(&header(CONTROL_UNMAP, event))
    }

    pub fn redirect(&mut self, event: u64, target: u64) -> Result<(), Errno> {
        self.control(&RedirectRequest { header: header(CONTROL_REDIRECT, event), target: target.into() })
    }

    pub fn pause(&mut self, event: u64, paused: u32) -> Result<(), Errno> {
        self.control(&PauseRequest { header: header(CONTROL_PAUSE, event), paused: paused.into(), reserved: 0.into() })
    }

    pub fn set_wakeup(&mut self, event: u64, every: u64, unit: u32) -> Result<(), Errno> {
        self.control(&WakeupRequest {
            header: header(CONTROL_WAKEUP, event),
            every: every.into(),
            unit: unit.into(),
            reserved: 0.into(),
        })
    }

    /// Gives the wakeups of an event's family notices of their own, or lets them share the ring's notices.
    pub fn set_own_notices(&mut self, event: u64, own: u32) -> Result<(), Errno> {
        self.control(&SignalRequest { header: header(CONTROL_SIGNAL, event), own: own.into(), reserved: 0.into() })
    }

    pub fn link(&mut self, event: u64, target: u64, role: u32) -> Result<(), Errno> {
        self.control(&LinkRequest {
            header: header(CONTROL_LINK, event),
            target: target.into(),
            role: role.into(),
            reserved: 0.into(),
        })
    }

    /// Sets a vCPU's task page, and makes the given task the vCPU's current task.
    pub fn runs(&mut self, vcpu: u32, pid: u32, tid: u32) {
        let address = 0x8000 + u64::from(vcpu) * 0x1000;
        self.control(&TaskPageRequest {
            header: header(CONTROL_TASK_PAGE, 0),
            vcpu: vcpu.into(),
            reserved: 0.into(),
            address: address.into(),
        })
        .expect("set");
        let task = TaskPage { pid: pid.into(), tid: tid.into(), ..TaskPage::default() };
        self.memory.write_slice(&task.as_bytes()[..8], GuestAddress(address)).expect("in memory");
    }

    pub fn map_pages(&mut self, event: u64, flags: u32, pages: &[u64]) -> Result<(), Errno> {
        self.map_as(CONTROL_MAP, event, flags, pages)
    }

    /// Maps pages as a ring or an area, according to `op`.
    pub fn map_as(&mut self, op: u32, event: u64, flags: u32, pages: &[u64]) -> Result<(), Errno> {
        self.control(map_request(op, event, flags, pages).as_slice())
    }

    /// Maps a new writable ring with `data` data pages. Returns the ring's reader.
    pub fn map(&mut self, event: u64, data: u64) -> Reader {
        self.try_map(event, data).expect("mapped")
    }

    pub fn try_map(&mut self, event: u64, data: u64) -> Result<Reader, Errno> {
        let pages: Vec<u64> = (0..=data).map(|page| self.next_ring + page * 0x1000).collect();
        self.map_pages(event, MAP_WRITABLE, &pages)?;
        self.next_ring += (data + 2) * 0x1000;
        Ok(Reader::new(&self.memory, &pages))
    }

    /// Sends commands in one buffer on the queue of `vcpu`. The same vCPU notifies the queue.
    pub fn commands(&mut self, vcpu: u32, commands: &[Command]) -> Vec<Reply> {
        self.commands_from(vcpu, vcpu, commands)
    }

    pub fn commands_from(&mut self, of: u32, by: u32, commands: &[Command]) -> Vec<Reply> {
        self.vcpus.leave(by, ExitReason::Mmio, &mut At(u64::MAX));
        let index = 2 + of as usize;
        let room = commands.len() * size_of::<Reply>();
        self.queues[index].request(commands.as_bytes(), room);
        self.vcpus.kick(by, u16::try_from(index).expect("small"));
        self.vcpus.resume(by);
        let answer = self.queues[index].answer();
        let answer = answer.expect("the device answers before the vCPU enters the guest");
        self.vcpus.enter(by);
        structs(&answer)
    }

    pub fn command(&mut self, vcpu: u32, op: u32, event: u64) -> Reply {
        self.commands(vcpu, &[command(op, event)])[0]
    }

    /// Sends a command with a value. Returns the command's status.
    pub fn valued(&mut self, vcpu: u32, op: u32, event: u64, value: u64) -> Errno {
        let command = Command { value: value.into(), ..command(op, event) };
        let reply = self.commands(vcpu, &[command])[0];
        i32::try_from(reply.status.get()).expect("an errno")
    }

    /// Flushes an event with a command from `vcpu`. Returns the command's status.
    pub fn flush(&mut self, vcpu: u32, event: u64) -> Errno {
        let reply = self.command(vcpu, COMMAND_FLUSH, event);
        i32::try_from(reply.status.get()).expect("an errno")
    }

    pub fn read(&mut self, vcpu: u32, event: u64) -> Reply {
        let reply = self.command(vcpu, COMMAND_READ, event);
        assert_eq!(reply.status.get(), 0, "{reply:?}");
        reply
    }

    pub fn value(&mut self, vcpu: u32, event: u64) -> u64 {
        self.read(vcpu, event).value.get()
    }

    /// Writes `value` to the doorbell, as if a guest program at `ip` did so.
    pub fn mark(&self, vcpu: u32, value: u32, ip: u64) {
        self.vcpus.leave(vcpu, ExitReason::Mmio, &mut At(ip));
        self.vcpus.mark(vcpu, value, &mut At(ip));
        self.vcpus.enter(vcpu);
    }

    pub fn exit(&self, vcpu: u32, reason: ExitReason, regs: &mut dyn Registers) {
        self.vcpus.leave(vcpu, reason, regs);
        self.vcpus.enter(vcpu);
    }

    /// Posts a buffer of `room` bytes for a notice.
    pub fn post_notice(&mut self, slot: u16, room: u32) {
        let queue = &mut self.queues[1];
        let descriptor = Descriptor { address: queue.buffer(slot), len: room, writable: true, next: None };
        queue.describe(slot, descriptor);
        queue.offer(slot);
        let _ = self.vpmu.notify(QUEUE_EVENT);
    }

    /// Takes the next notice. Returns its kind and event.
    pub fn notice(&mut self) -> Option<(u32, u64)> {
        let notice = self.whole_notice()?;
        Some((notice.kind.get(), notice.event.get()))
    }

    /// Takes the next notice. Returns its kind, event and count.
    pub fn counted_notice(&mut self) -> Option<(u32, u64, u32)> {
        let notice = self.whole_notice()?;
        Some((notice.kind.get(), notice.event.get(), notice.value.get()))
    }

    /// Takes the next notice.
    pub fn whole_notice(&mut self) -> Option<Notice> {
        let (slot, len) = self.queues[1].reclaim()?;
        assert_eq!(len as usize, size_of::<Notice>());
        let at = self.queues[1].buffer(u16::try_from(slot).expect("a slot"));
        let mut bytes = [0; size_of::<Notice>()];
        self.memory.read_slice(&mut bytes, GuestAddress(at)).expect("in memory");
        Some(Notice::read_from_bytes(&bytes).expect("a notice"))
    }

    pub fn catalogue(&mut self) -> Vec<CatalogueEntry> {
        let request = CatalogueRequest { header: header(CONTROL_CATALOGUE, 0), first: 0.into(), count: 1000.into() };
        let answer = self.control_bytes(request.as_bytes(), 0x1_0000);
        let (reply, entries) = ControlReply::read_from_prefix(&answer).expect("a reply");
        outcome(reply.status.get()).expect("a catalogue");
        let entries: Vec<CatalogueEntry> = structs(entries);
        assert_eq!(entries.len(), reply.value.get() as usize);
        entries
    }

    /// Returns all bytes of guest memory, so that a test can detect writes by the device.
    pub fn snapshot(&self) -> Vec<u8> {
        let mut bytes = vec![0; MEMORY_LEN];
        self.memory.read_slice(&mut bytes, GuestAddress(0)).expect("in memory");
        bytes
    }
}

/// Sets up all queues again in guest memory. Returns the driver's side and the device's side of each queue.
pub fn make_queues(memory: &GuestMemoryMmap) -> (Vec<DriverQueue>, Vec<QueueState>) {
    let layout = Layout { vcpus: VCPUS, rings: QUEUES, buffers: BUFFERS, slots: QUEUE_SIZE };
    let (drivers, queues) = layout.set_up(memory);
    for queue in &drivers[2..] {
        queue.want_no_interrupt();
    }
    (drivers, queues)
}

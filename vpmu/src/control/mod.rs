//! The control plane. It tracks all events, rings and persistent names, their owners, and the shard (one vCPU's part
//! of the device) of each event. It serves the control queue and the operator. If an event of one vCPU starts, stops
//! or otherwise affects an event of another vCPU, this module applies the change. Every number in a request comes from
//! the guest and is checked before use.

mod reply;
mod request;
mod saving;
mod sinks;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use vm_memory::GuestAddress;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, KnownLayout};

use self::reply::ReplyBuffer;
use self::request::{Maker, Terms, needs_guest_ips, period, steers};
pub(crate) use self::saving::Driver;
use self::sinks::{Extinct, Moved, Sinks};
use crate::abi::{
    COMMAND_IN, CONTEXT_TASK, CONTROL_ATTACH, CONTROL_CATALOGUE, CONTROL_CLOSE, CONTROL_DETACH, CONTROL_FEATURES,
    CONTROL_LINK, CONTROL_MAP, CONTROL_MAP_AUX, CONTROL_OPEN, CONTROL_PAUSE, CONTROL_PERSISTENT, CONTROL_REDIRECT,
    CONTROL_SIGNAL, CONTROL_TASK_PAGE, CONTROL_UNMAP, CONTROL_UNMAP_AUX, CONTROL_WAKEUP, CatalogueEntry,
    CatalogueRequest, Command, ControlHeader, DetachRequest, F_AUX, F_DOORBELL, F_FLUSH, F_LINKS, F_PERSISTENT, F_RING,
    F_TASK_PAGE, F_WINDOW, FeaturesRequest, KIND_VMM_TRACE, LINK_STARTER, LINK_STOPPER, LinkRequest, MAP_DRIVER_OWNED,
    MAP_WINDOW, MAP_WRITABLE, MapRequest, OPEN_BACKWARD, OPEN_ENABLED, OPEN_FREQ, OPEN_PERSISTENT, OPEN_PINNED,
    OPEN_WATERMARK, OpenRequest, PERSISTENT_NAME, PERSISTENT_OPERATOR, PauseRequest, PersistentEvent,
    PersistentRequest, QUEUE_CONTROL, QUEUE_EVENT, QUEUE_VCPU, RedirectRequest, Reply, SignalRequest, TaskPageRequest,
    WAKEUP_BYTES, WAKEUP_RECORDS, WakeupRequest,
};
use crate::area::Area;
use crate::backend::Backend;
use crate::errno::{Denied, Errno};
use crate::event::{Event, Group, GroupEvent, LastCounts, Persistent};
use crate::flush::Visit;
use crate::links::{Links, Refused, Role};
use crate::machine::Interrupt;
use crate::memory::Memory;
use crate::metrics::Metrics;
use crate::notices::{Notices, Pending, Woken};
use crate::persistent::{History, Name, Persist, PersistError, Persistence, PersistentStatus, spelled, whole};
use crate::producer::AuxError;
use crate::queues::{BadChain, Chain, DeviceQueue, QueueState};
use crate::record::{Layout, SAMPLE_READ, admits, read_size};
use crate::ring::{Ring, RingMode, Wakeup};
use crate::shard::{Core, Errand, Shard, State, View, event_command};
use crate::sink::{HeldBytes, Sink};
use crate::source::Rate;
use crate::spec::{Context, EventSpec};
use crate::tasks::Tasks;
use crate::window::{Holder, Run, Window};
use crate::work::{self, Turn, Work};

/// The device-specific feature bits that every device offers.
const FEATURES: u64 = 1 << F_RING | 1 << F_TASK_PAGE | 1 << F_AUX | 1 << F_PERSISTENT | 1 << F_LINKS | 1 << F_FLUSH;
/// The size, in bytes, of the longest request that has no list of pages.
const LONGEST_WITHOUT_PAGES: usize = size_of::<OpenRequest>();
/// Maximum size, in bytes, of a group's counts in a record, as in perf. The limit leaves space for the record's
/// other fields.
const LONGEST_READING: usize = 16 << 10;

/// The state that the control plane keeps for an event.
#[derive(Debug)]
struct Entry {
    spec: EventSpec,
    /// The context in the request that opened the event. For a task event, it does not contain the vCPU that runs the
    /// task.
    context: Context,
    /// The index of the event's shard.
    shard: u32,
    /// Whether the event has a period and can therefore overflow.
    samples: bool,
    leader: Option<u64>,
    /// The events of the group that this event leads, oldest first.
    members: Vec<u64>,
    /// For a leader, whether it is enabled and not in the error state.
    on: Arc<AtomicBool>,
    counts: Arc<LastCounts>,
    persistence: Option<Persistence>,
}

impl Entry {
    fn is_operators(&self) -> bool {
        let known = self.persistence.as_ref();
        known.is_some_and(|persistence| persistence.operator)
    }

    /// Whether the event samples or is a trace.
    fn makes_records(&self) -> bool {
        self.samples || self.spec.is_trace()
    }
}

/// A copy of an event's ring. It is parsed after the locks are released.
#[derive(Debug)]
pub(crate) struct HeldRecords {
    event: PersistentStatus,
    layout: Layout,
    bytes: Vec<u8>,
    newest_first: bool,
}

impl HeldRecords {
    /// Parses the copy into whole records.
    pub(crate) fn history(self) -> History {
        let is_own = |record: &[u8]| admits(&self.layout, record, self.event.id);
        History { records: whole(&self.bytes, self.newest_first, is_own), event: self.event }
    }
}

/// The window overlaps guest memory.
#[derive(Debug)]
pub(crate) struct Overlap;

/// The result of serving the control queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Served {
    /// Whether the driver wants an interrupt for the answers.
    pub(crate) interrupt: bool,
    /// Whether a request waits for [`Backend::ask_guest_ips`].
    pub(crate) needs_guest_ips: bool,
    pub(crate) turn: Turn,
}

impl Served {
    /// The queue for which the driver must be interrupted, if any.
    pub(crate) fn signals(&self) -> Option<u16> {
        self.interrupt.then_some(QUEUE_CONTROL)
    }
}

/// The control plane of one device. A reset drops everything that the driver set up. Without a driver, no
/// features are negotiated, and there are no queues and no guest memory.
#[derive(Debug)]
pub(crate) struct Control {
    backend: Arc<Backend>,
    shards: Arc<[Shard]>,
    notices: Arc<Notices>,
    features: u64,
    queue: DeviceQueue,
    /// The guest's RAM, as passed at activation.
    guest: Memory,
    events: BTreeMap<u64, Entry>,
    sinks: Sinks,
    persistent: BTreeSet<u64>,
    /// The events that start and stop other events.
    links: Links,
    /// The id of the next event. Ids are never reused.
    next_id: u64,
    /// Number of resets of the device. Each shard keeps the same number.
    resets: u64,
    metrics: Metrics,
    /// The metrics from the saved state that was restored into this device. Zero if no state was restored.
    before: Metrics,
}

impl Control {
    pub(crate) fn new(backend: &Arc<Backend>, shards: &Arc<[Shard]>, notices: &Arc<Notices>) -> Self {
        Self {
            backend: Arc::clone(backend),
            shards: Arc::clone(shards),
            notices: Arc::clone(notices),
            features: 0,
            queue: DeviceQueue::default(),
            guest: Memory::default(),
            events: BTreeMap::new(),
            sinks: Sinks::default(),
            persistent: BTreeSet::new(),
            links: Links::default(),
            next_id: 1,
            resets: 0,
            metrics: Metrics::default(),
            before: Metrics::default(),
        }
    }

    // The device's life.

    /// Sets the window, whose memory survives a reset. Must be called before the first activation.
    pub(crate) fn set_window(&mut self, window: Window) {
        self.sinks.set_window(window);
    }

    fn has_window(&self) -> bool {
        self.sinks.window().is_some()
    }

    /// The device-specific feature bits that this device offers.
    pub(crate) fn offered(&self) -> u64 {
        let doorbell = self.backend.settings.doorbell;
        FEATURES | u64::from(doorbell) << F_DOORBELL | u64::from(self.has_window()) << F_WINDOW
    }

    /// Activates the device for a driver. The caller must have checked `features` and `queues`.
    ///
    /// # Errors
    /// [`Overlap`]: the window overlaps `memory`.
    pub(crate) fn activate(
        &mut self,
        memory: Memory,
        features: u64,
        queues: &[QueueState],
        interrupt: Arc<dyn Interrupt>,
    ) -> Result<(), Overlap> {
        let window = self.sinks.window();
        if window.is_some_and(|window| window.overlaps(&memory.view())) {
            return Err(Overlap);
        }
        for (index, &queue) in (0..).zip(queues) {
            // Each descriptor chain holds a counted reference to guest memory. Give each queue its own reference count,
            // because the cache line of a shared count would bounce between CPUs at every notification.
            let memory = memory.apart();
            let queue = DeviceQueue::new(&memory, index, queue);
            match index {
                QUEUE_CONTROL => self.queue = queue,
                QUEUE_EVENT => self.notices.activate(queue, Some(Arc::clone(&interrupt))),
                _ => {
                    let shard = self.shards.get(usize::from(index - QUEUE_VCPU));
                    if let Some(shard) = shard {
                        shard.with(|state| state.activate(memory, queue));
                    }
                }
            }
        }
        self.guest = memory;
        self.features = features;
        Ok(())
    }

    /// The current state of each virtqueue.
    pub(crate) fn queue_states(&self) -> Vec<QueueState> {
        let vcpus = self.shards.iter();
        let vcpus = vcpus.map(|shard| shard.with(|state| state.queue_state()).0);
        [self.queue.state(), self.notices.queue_state()].into_iter().chain(vcpus).collect()
    }

    /// Drops the driver and its memory, without writing to that memory. Closes every event that depends on
    /// the driver or its memory.
    pub(crate) fn reset(&mut self) {
        self.resets += 1;
        self.features = 0;
        self.queue = DeviceQueue::default();
        let ids = self.events.keys().copied();
        let kept: BTreeSet<u64> = ids.filter(|&id| self.outlives(id)).collect();
        let mut errands = Vec::new();
        for shard in self.shards.iter() {
            let ((), more) = shard.with(|state| state.reset(|id| kept.contains(&id)));
            errands.extend(more);
        }
        let gone: Vec<u64> = self.events.keys().copied().collect();
        for id in gone.into_iter().filter(|id| !kept.contains(id)) {
            self.events.remove(&id);
            self.persistent.remove(&id);
            self.forget_links(id);
        }
        for &id in &kept {
            if let Some(entry) = self.events.get_mut(&id) {
                entry.spec.own_notices = false;
            }
            self.with_event(id, |state| state.forget_requests(id));
        }
        self.sinks.retain(&kept);
        self.notices.reset();
        self.name_rings();
        self.guest = Memory::default();
        self.run(errands);
    }

    /// Whether an event survives a reset. The event must be persistent. If it has a ring, the ring must be in the
    /// window and must not have an AUX area.
    fn outlives(&self, id: u64) -> bool {
        let in_window = self.sinks.window_page(id).is_some();
        let shape = self.sinks.shape(id);
        self.persistent.contains(&id) && shape.is_none_or(|shape| in_window && !shape.has_area)
    }

    /// Attaches `thread` to a vCPU. On this thread, the guest's TSC is the host's TSC plus `tsc_offset`.
    pub(crate) fn attach(&mut self, vcpu: u32, thread: i32, tsc_offset: u64) {
        for (index, shard) in (0..).zip(self.shards.iter()) {
            if index != vcpu {
                // Task events that ran on this vCPU may now be in another shard, but may still have counters on the
                // vCPU's previous thread.
                shard.with(|state| state.forget_thread(vcpu));
            }
        }
        self.on(vcpu, |state| state.attach(thread, tsc_offset));
    }

    /// Adds the control plane's own metrics.
    pub(crate) fn add_to(&self, metrics: &mut Metrics) {
        metrics.events_opened += self.metrics.events_opened;
        metrics.control_requests += self.metrics.control_requests;
        metrics.bad_requests += self.metrics.bad_requests;
        let turns = self.metrics.turns_unfinished;
        metrics.add_work((self.metrics.work, self.metrics.largest_turn, turns));
    }

    /// Adds the metrics of the restored state to `metrics`. Must be called after all other metrics have been added.
    pub(crate) fn add_before(&self, metrics: &mut Metrics) {
        metrics.add_before(&self.before);
    }

    // Between shards.

    /// Calls `act` on a shard, and then executes the work that the call deferred to other shards.
    fn on<T>(&mut self, shard: u32, act: impl FnOnce(&mut State) -> T) -> T {
        let (result, errands) = self.shards[shard as usize].with(act);
        self.run(errands);
        result
    }

    /// Like [`Control::on`], for the shard of the event `id`. Returns `None` if the event does not exist.
    fn with_event<T>(&mut self, id: u64, act: impl FnOnce(&mut State) -> T) -> Option<T> {
        let shard = self.events.get(&id)?.shard;
        Some(self.on(shard, act))
    }

    /// Like [`Control::with_event`], for an operation on the event that affects no other event.
    fn on_event<T>(&mut self, id: u64, act: impl FnOnce(&mut Core, &mut Event) -> T) -> Option<T> {
        self.with_event(id, |state| state.with(id, act))?
    }

    /// Executes work that shards deferred to other shards, and any further work that results from it.
    pub(crate) fn run(&mut self, errands: Vec<Errand>) {
        let mut errands = VecDeque::from(errands);
        while let Some(errand) = errands.pop_front() {
            let shard = match errand {
                Errand::Start(id) | Errand::Stop(id) | Errand::Trigger(id, _) => {
                    self.events.get(&id).map(|entry| entry.shard)
                }
                Errand::Release(vcpu, _) => Some(vcpu),
            };
            let Some(shard) = shard.and_then(|shard| self.shards.get(shard as usize)) else {
                continue;
            };
            let ((), more) = shard.with(|state| match errand {
                Errand::Start(id) => log_refused(id, state.events.start(id)),
                Errand::Stop(id) => {
                    // Write all pending samples first. Otherwise, earlier samples of other events would
                    // follow the last sample of this event.
                    state.events.flush_batched();
                    log_refused(id, state.stop_led(id));
                }
                Errand::Trigger(target, effect) => {
                    state.events.flush_batched();
                    state.events.apply(target, effect);
                }
                Errand::Release(_, lease) => state.release(lease),
            });
            errands.extend(more);
        }
    }

    /// Executes a command from the queue of the vCPU `of`, for an event that is not in that vCPU's shard. `by` is the
    /// vCPU that notified the queue. `resets` is the number of resets of the device when the notification began.
    pub(crate) fn command(&mut self, command: &Command, of: u32, by: u32, resets: u64) -> Reply {
        if resets != self.resets {
            // The driver that sent the command no longer exists.
            return Reply::default();
        }
        let id = command.event.get();
        let own = of == by;
        if own && command.op.get() == COMMAND_IN {
            self.bring(id, by);
        }
        let shard = self.events.get(&id).map_or(of, |entry| entry.shard);
        self.on(shard, |state| {
            if shard != of {
                state.events.flush_batched();
            }
            event_command(state, command, by, own)
        })
    }

    /// Moves a task event and the other events of its group to the shard of the vCPU `to`. Does not move an event that
    /// is currently scheduled in.
    fn bring(&mut self, id: u64, to: u32) {
        let Some(entry) = self.events.get(&id) else {
            return;
        };
        let leader = entry.leader.unwrap_or(id);
        for id in self.group(leader) {
            let Some(entry) = self.events.get_mut(&id).filter(|entry| entry.shard != to) else {
                continue;
            };
            let (given, _) = self.shards[entry.shard as usize].with(|state| state.give(id));
            if let Some(event) = given {
                self.shards[to as usize].with(|state| state.receive(event));
                entry.shard = to;
            }
        }
    }

    /// Finds the events that write to the same sink as the event `id`, and writes all pending batched samples of these
    /// events' vCPUs. If the event `id` is closed or has no sink, uses the sink that was mapped for `id` instead.
    fn flush_sink(&mut self, id: u64) {
        if !self.backend.is_draining() {
            return;
        }
        let entry = self.events.get(&id);
        let own = entry.and_then(|entry| self.sinks.of_family(entry.spec.owner));
        let writers = self.sinks.writers(own.map_or(id, |sink| sink.id()));
        let ids = writers.into_iter().chain([id]);
        let entries = ids.filter_map(|id| self.events.get(&id));
        let shards: BTreeSet<u32> = entries.map(|entry| entry.shard).collect();
        for shard in shards {
            self.on(shard, |state| state.events.flush_batched());
        }
    }

    // The control queue.

    /// Handles the requests in the control queue after a notification. Stops early if the turn's budget is used up,
    /// or if [`Backend::ask_guest_ips`] must be called before the next request can be handled.
    pub(crate) fn serve(&mut self) -> Served {
        let before = Work::so_far();
        self.queue.notified();
        let mut served = false;
        let mut needs_guest_ips = false;
        let mut turn = Turn::Done;
        for _ in 0..self.queue.bound() {
            if before.since().fills_a_turn() {
                turn = Turn::Unfinished;
                break;
            }
            let Some(chain) = self.queue.take() else {
                break;
            };
            work::charge(1);
            if self.backend.guest_ips().is_none() && self.waits_for_guest_ips(&chain) {
                self.queue.put_back();
                needs_guest_ips = true;
                break;
            }
            self.metrics.control_requests += 1;
            let len = self.answer(&chain).unwrap_or_else(|BadChain| {
                self.metrics.bad_requests += 1;
                0
            });
            self.queue.give_back(chain, len);
            served = true;
        }
        self.metrics.count_turn(before.since(), turn);
        Served { interrupt: served && self.queue.wants_interrupt(), needs_guest_ips, turn }
    }

    /// Whether the answer to a request depends on whether the host reports guest IPs.
    fn waits_for_guest_ips(&self, chain: &Chain) -> bool {
        let copied = chain.reader().and_then(|(_, mut reader)| copy_fixed(&mut reader));
        let request = copied.ok().and_then(|bytes| parse::<OpenRequest>(&bytes).ok());
        request.is_some_and(|request| {
            request.header.op.get() == CONTROL_OPEN && needs_guest_ips(&request, self.backend.settings.engines)
        })
    }

    /// Copies a request, but no more than the length of the longest valid request with the same operation.
    fn copy_request(&self, chain: &Chain) -> Result<Vec<u8>, BadChain> {
        let limits = &self.backend.settings.limits;
        let (len, mut reader) = chain.reader()?;
        let mut request = copy_fixed(&mut reader)?;
        let header = ControlHeader::read_from_prefix(&request);
        let pages = match header.map(|(header, _)| header.op.get()) {
            Ok(CONTROL_MAP) => limits.max_ring_pages as usize + 1,
            Ok(CONTROL_MAP_AUX) => limits.max_aux_pages as usize,
            _ => 0,
        };
        let longest = size_of::<MapRequest>() + pages * size_of::<U64>();
        let more = len.min(longest).saturating_sub(request.len());
        request.reserve_exact(more);
        let read = reader.take(more as u64).read_to_end(&mut request);
        work::charge_copied(read.map_err(|_| BadChain)?);
        Ok(request)
    }

    /// Executes one request. Returns the length of the answer in bytes.
    fn answer(&mut self, chain: &Chain) -> Result<u32, BadChain> {
        let request = self.copy_request(chain)?;
        let (bytes, writer) = chain.writer()?;
        let room = ReplyBuffer { bytes, writer };
        let header = ControlHeader::read_from_prefix(&request);
        let Some((header, _)) = header.ok().filter(|(header, _)| header.reserved.get() == 0) else {
            return room.simple(|| Err(Errno::EINVAL));
        };
        let event = header.event.get();
        if event != 0 {
            // Write the pending samples before the request can change the event's sink.
            self.flush_sink(event);
        }
        match header.op.get() {
            CONTROL_OPEN => room.opened(|| {
                let request = parse::<OpenRequest>(&request)?;
                self.open(&request, Maker::Guest)
            }),
            CONTROL_CATALOGUE => room.entries(|fit| self.catalogue(&request, fit)),
            CONTROL_PERSISTENT => room.entries(|fit| self.list(&request, fit)),
            op if changes(op) && self.is_operators(event) => room.simple(|| Err(Errno::EPERM)),
            CONTROL_DETACH => room.simple(|| self.detach(&request)),
            CONTROL_ATTACH => room.simple(|| self.reattach(event)),
            CONTROL_CLOSE => room.simple(|| self.close(event)),
            CONTROL_MAP => room.valued(|| self.map(&request)),
            CONTROL_UNMAP => room.simple(|| self.unmap(event)),
            CONTROL_REDIRECT => room.simple(|| self.redirect(&request)),
            CONTROL_PAUSE => room.simple(|| self.pause(&request)),
            CONTROL_MAP_AUX => room.simple(|| self.map_aux(&request)),
            CONTROL_UNMAP_AUX => room.simple(|| self.unmap_aux(event)),
            CONTROL_LINK => room.simple(|| self.link(&request)),
            CONTROL_WAKEUP => room.simple(|| self.set_wakeup(&request)),
            CONTROL_SIGNAL => room.simple(|| self.set_notices(&request)),
            CONTROL_TASK_PAGE => room.simple(|| self.task_page(&request)),
            CONTROL_FEATURES => room.simple(|| self.accept_features(&request)),
            _ => room.simple(|| Err(Errno::EOPNOTSUPP)),
        }
    }

    /// Returns the requested part of the catalogue, which has at most `fit` entries.
    fn catalogue(&self, request: &[u8], fit: usize) -> Result<Vec<CatalogueEntry>, Errno> {
        let request = parse::<CatalogueRequest>(request)?;
        if request.header.event.get() != 0 {
            return Err(Errno::EINVAL);
        }
        let first = request.first.get() as usize;
        let entries: Vec<_> = self.backend.guest_entries().collect();
        work::charge(entries.len() as u64);
        let count = fit.min(request.count.get() as usize);
        let part = entries.get(first..).ok_or(Errno::EINVAL)?.iter();
        Ok(part.take(count).map(|entry| entry.wire()).collect())
    }

    /// Accepts features for a driver that could not negotiate them, because its transport hides them.
    fn accept_features(&mut self, request: &[u8]) -> Result<(), Errno> {
        let request = parse::<FeaturesRequest>(request)?;
        let features = request.features.get();
        if request.header.event.get() != 0 || features & !self.offered() != 0 {
            return Err(Errno::EINVAL);
        }
        self.features |= features;
        Ok(())
    }

    fn task_page(&mut self, request: &[u8]) -> Result<(), Errno> {
        let request = parse::<TaskPageRequest>(request)?;
        if request.header.event.get() != 0 || request.reserved.get() != 0 {
            return Err(Errno::EINVAL);
        }
        if self.features & 1 << F_TASK_PAGE == 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        let vcpu = request.vcpu.get();
        let page = Some(GuestAddress(request.address.get())).filter(|page| page.0 != 0);
        if vcpu >= self.backend.settings.vcpus || page.is_some_and(|page| !self.guest.view().is_page(page)) {
            return Err(Errno::EINVAL);
        }
        self.on(vcpu, |state| {
            // Earlier samples refer to tasks in the previous task page.
            state.events.flush_batched();
            state.set_tasks(Tasks::new(page));
        });
        Ok(())
    }

    // Events.

    /// Opens an event. Returns its engine and its id.
    fn open(&mut self, request: &OpenRequest, maker: Maker) -> Result<(u32, u64), Denied> {
        let operators = matches!(maker, Maker::Operator(_));
        let backend = Arc::clone(&self.backend);
        let terms = Terms {
            catalogue: backend.catalogue(),
            policy: (!operators).then_some(&backend.settings.policy),
            settings: &backend.settings,
            // The operator can open events even before a driver has negotiated rings.
            has_rings: operators || self.has_rings(),
            has_areas: self.has_areas(),
            guest_ips: backend.guest_ips(),
        };
        let context = terms.check_context(request)?;
        let owner = self.owner(request)?;
        let leader = self.leader(request, context)?;
        let opening = terms.check(request)?;
        let id = self.next_id;
        if !operators {
            self.check_events()?;
        }
        let persistence = match maker {
            Maker::Guest if opening.persistent => Some(self.persistence(id)?),
            Maker::Guest => None,
            Maker::Operator(persistence) => Some(persistence),
        };
        let mut spec = opening.spec(request, id, owner);
        if let Some(parent) = owner.and_then(|owner| self.sinks.first_of_family(owner))
            && let Some(parent) = self.events.get(&parent)
        {
            // The wakeup interval of the family may have changed since the driver sent the request.
            spec.wakeup = parent.spec.wakeup;
            spec.own_notices = parent.spec.own_notices;
        }
        let mut event = Event::new(spec, context, period(request));
        event.persistent = persistence.as_ref().map(|known| match known.operator {
            true => Persistent::Operator,
            false => Persistent::Guest,
        });
        let persistent = event.persistent.is_some();
        event.set_enabled(opening.flags & OPEN_ENABLED != 0);
        event.sink = self.sinks.of_family(spec.owner).cloned();
        if let Some(leader) = leader {
            for role in opening.steers() {
                self.links.steer(id, leader, role);
            }
        }
        event.effects = self.links.effects(id).collect();
        let shard = self.first_shard(context);
        self.next_id += 1;
        self.events.insert(
            id,
            Entry {
                spec,
                context,
                shard,
                samples: event.period.is_some(),
                leader,
                members: Vec::new(),
                on: Arc::default(),
                counts: Arc::default(),
                persistence,
            },
        );
        if let Some(leader) = leader {
            event.join(self.grow_group(leader, id));
        }
        let opened = self.on(shard, |state| state.open(event));
        if let Err(denied) = opened {
            self.events.remove(&id);
            self.forget_links(id);
            if let Some(leader) = leader {
                self.leave_group(leader, id);
            }
            return Err(denied);
        }
        if persistent {
            self.persistent.insert(id);
        }
        self.sinks.join(spec.owner, id);
        self.metrics.events_opened += 1;
        Ok((opening.engine, id))
    }

    /// The shard for a new event: the shard of its vCPU or, for a task event without a vCPU, the first shard
    /// whose vCPU has a thread.
    fn first_shard(&self, context: Context) -> u32 {
        match context {
            Context::Vcpu(vcpu) | Context::Task(Some(vcpu)) => vcpu,
            Context::Task(None) => (0..)
                .zip(self.shards.iter())
                .find(|(_, shard)| shard.vcpu.thread().is_some())
                .map_or(0, |(index, _)| index),
        }
    }

    /// Checks that the guest is below the operator's limit on events.
    fn check_events(&self) -> Result<(), Errno> {
        let operators = self.persistent().filter(|&id| self.is_operators(id));
        let guests = self.events.len() - operators.count();
        match guests < self.backend.settings.limits.max_events as usize {
            true => Ok(()),
            false => Err(Errno::ENOSPC),
        }
    }

    /// Returns the owner of the family that a child joins. `None` if the request has no parent.
    fn owner(&self, request: &OpenRequest) -> Result<Option<u64>, Errno> {
        let parent = match request.parent.get() {
            0 => return Ok(None),
            parent => self.events.get(&parent).ok_or(Errno::EINVAL)?,
        };
        if parent.is_operators() {
            return Err(Errno::EPERM);
        }
        // With `SAMPLE_READ`, it would be undefined which event of the family a sample reads.
        if request.sample_type.get() & SAMPLE_READ != 0 {
            return Err(Errno::EINVAL);
        }
        Ok(Some(parent.spec.owner))
    }

    /// Returns the leader of the group that the new event joins, if any.
    fn leader(&self, request: &OpenRequest, context: Context) -> Result<Option<u64>, Errno> {
        let id = match request.leader.get() {
            0 if steers(request) => return Err(Errno::EINVAL),
            0 => return Ok(None),
            id => id,
        };
        let leader = self.events.get(&id).ok_or(Errno::EINVAL)?;
        if steers(request) && !leader.spec.is_trace() {
            return Err(Errno::EINVAL);
        }
        let format = request.read_format.get();
        let pinned = request.flags.get() & OPEN_PINNED != 0;
        let persistent = request.flags.get() & OPEN_PERSISTENT != 0 || leader.persistence.is_some();
        if persistent || leader.leader.is_some() || !leader.context.is_like(context) || pinned {
            return Err(Errno::EINVAL);
        }
        let group = self.group(id);
        let size = group.len() + 1;
        let led = group.iter().filter_map(|id| self.events.get(id));
        let mut formats = led.map(|event| event.spec.layout.read_format).chain([format]);
        if formats.any(|format| read_size(format, size) > LONGEST_READING) {
            return Err(Errno::E2BIG);
        }
        Ok(Some(id))
    }

    /// Returns the events of the group that `leader` leads: the leader, then its members, oldest first. Charges the
    /// examination of all of them.
    fn group(&self, leader: u64) -> Vec<u64> {
        let entry = self.events.get(&leader);
        let members = entry.map_or(&[][..], |entry| &entry.members);
        work::charge_examined(1 + members.len());
        [leader].iter().chain(members).copied().collect()
    }

    /// Adds a new event to the group of `leader`, and publishes the changed group to the events that were already in
    /// it.
    fn grow_group(&mut self, leader: u64, id: u64) -> Option<Arc<Group>> {
        if let Some(entry) = self.events.get_mut(&leader) {
            entry.members.push(id);
        }
        self.publish_group(leader, Some(id))
    }

    /// Removes an event from the group of `leader`.
    fn leave_group(&mut self, leader: u64, id: u64) {
        if let Some(entry) = self.events.get_mut(&leader) {
            entry.members.retain(|&member| member != id);
            self.publish_group(leader, None);
        }
    }

    /// Publishes the group of `leader` to all events of the group except `except`. Returns the group, or
    /// `None` if it has no members besides the leader.
    fn publish_group(&mut self, leader: u64, except: Option<u64>) -> Option<Arc<Group>> {
        let on = Arc::clone(&self.events.get(&leader)?.on);
        let ids = self.group(leader);
        let events = ids.iter().filter_map(|&id| {
            let entry = self.events.get(&id)?;
            Some(GroupEvent { id, owner: entry.spec.owner, counts: Arc::clone(&entry.counts) })
        });
        let group = Group { leader, on, events: events.collect() };
        let group = (ids.len() > 1).then(|| Arc::new(group));
        for &id in ids.iter().filter(|&&id| Some(id) != except) {
            let group = group.clone();
            self.with_event(id, |state| state.join(id, group));
        }
        group
    }

    /// Closes an event. If no other event writes to the event's sink, also removes the sink.
    fn close(&mut self, id: u64) -> Result<(), Errno> {
        let entry = self.events.get(&id).ok_or(Errno::ENOENT)?;
        if entry.persistence.is_some() {
            return Err(Errno::EBUSY);
        }
        self.end(id);
        Ok(())
    }

    /// Ends an event, persistent or not.
    fn end(&mut self, id: u64) {
        self.with_event(id, |state| state.end(id));
        let Some(entry) = self.events.remove(&id) else {
            return;
        };
        self.persistent.remove(&id);
        for member in entry.members {
            if let Some(entry) = self.events.get_mut(&member) {
                entry.leader = None;
            }
            self.with_event(member, |state| state.join(member, None));
        }
        if let Some(leader) = entry.leader {
            self.leave_group(leader, id);
        }
        self.forget_links(id);
        self.retire(id, entry.spec.owner);
    }

    /// Removes an ended event from the family of `owner`. If it was the family's last event, the family's
    /// pending wakeups pass to another family that writes to the sink.
    fn retire(&mut self, id: u64, owner: u64) {
        if let Some(Extinct { sink }) = self.sinks.leave(owner, id) {
            self.settle_wakeups(owner, sink);
        }
    }

    /// Keeps the pending wakeups after a change to the family of `owner`: it has a new sink, has notices of its own or
    /// no longer, or has ended. `before` is the sink to which the family wrote before the change, and which may be gone.
    /// The shards must already know the change, so that they do not add wakeups as before the change.
    fn settle_wakeups(&self, owner: u64, before: Option<u64>) {
        let sinks = &self.sinks;
        let lasts = sinks.has_family(owner);
        let now = sinks.of_family(owner).map(|sink| sink.id());
        let mut pending = self.notices.pending();
        let wake = |pending: &mut Pending, of: Option<Woken>, wakeups: u64| match of {
            Some(of) if wakeups > 0 => pending.wake(of, wakeups),
            // Either there are no wakeups, or nobody is left who could be woken.
            _ => {}
        };
        // The readers of a sink that the family has left.
        let others = |sink: u64| match sinks.named(sink) {
            Some(_) => Some(Woken::Ring(sink)),
            None => sinks.writing_family(sink).map(Woken::Family),
        };
        for sink in [before, now].into_iter().flatten() {
            if let Some(family) = sinks.named(sink) {
                pending.name_ring(sink, family);
            } else {
                let wakeups = pending.forget_ring(sink);
                let own = lasts.then_some(Woken::Family(owner));
                wake(&mut pending, others(sink).or(own), wakeups);
            }
        }
        let of = match lasts {
            true => Some(sinks.woken(owner)),
            false => before.and_then(others),
        };
        if of != Some(Woken::Family(owner)) {
            let wakeups = pending.take_wakeups(Woken::Family(owner));
            wake(&mut pending, of, wakeups);
        }
    }

    /// Names the wakeups of each sink.
    fn name_rings(&self) {
        let mut pending = self.notices.pending();
        for (sink, _) in self.sinks.sinks() {
            if let Some(family) = self.sinks.named(sink) {
                pending.name_ring(sink, family);
            }
        }
    }

    /// Links two events. From now on, overflows of the event in the request's header start or stop the target event.
    fn link(&mut self, request: &[u8]) -> Result<(), Errno> {
        let request = parse::<LinkRequest>(request)?;
        let role = match request.role.get() {
            LINK_STARTER => Role::Starter,
            LINK_STOPPER => Role::Stopper,
            _ => return Err(Errno::EINVAL),
        };
        if request.reserved.get() != 0 {
            return Err(Errno::EINVAL);
        }
        let (id, target) = (request.header.event.get(), request.target.get());
        self.check_link(id, target)?;
        let linked = self.links.link(id, target, role);
        linked.map_err(|refused| match refused {
            Refused::Linked => Errno::EEXIST,
            Refused::Taken => Errno::EBUSY,
        })?;
        self.publish_links(id);
        Ok(())
    }

    /// Checks that one event may start or stop another.
    fn check_link(&self, id: u64, target: u64) -> Result<(), Errno> {
        let trigger = self.events.get(&id).ok_or(Errno::ENOENT)?;
        let other = self.events.get(&target).ok_or(Errno::ENOENT)?;
        if other.is_operators() {
            return Err(Errno::EPERM);
        }
        // The device cannot compare the tasks of task events, because only the driver knows them.
        if id == target || !trigger.context.is_like(other.context) || !trigger.samples {
            return Err(Errno::EINVAL);
        }
        if trigger.spec.is_batched() {
            // By the time the device finds an overflow of a batched event, the guest has continued to run, so it is too
            // late to start or stop another event.
            return Err(Errno::EOPNOTSUPP);
        }
        Ok(())
    }

    /// Removes the links of an ended event.
    fn forget_links(&mut self, id: u64) {
        for trigger in self.links.forget(id) {
            self.publish_links(trigger);
        }
    }

    /// Updates the list of events that a trigger's overflows start, stop or toggle.
    fn publish_links(&mut self, trigger: u64) {
        let effects: Vec<_> = self.links.effects(trigger).collect();
        work::charge_examined(effects.len());
        self.on_event(trigger, |_, event| event.effects = effects);
    }

    // Rings and areas.

    fn has_rings(&self) -> bool {
        self.features & 1 << F_RING != 0
    }

    /// Rings report the data of areas, so areas need `F_RING`, too.
    fn has_areas(&self) -> bool {
        self.has_rings() && self.features & 1 << F_AUX != 0
    }

    /// Sets the new sink of each event in `moved`.
    fn publish_sink(&mut self, moved: &Moved) {
        for &id in &moved.events {
            let sink = moved.sink.clone();
            self.on_event(id, |core, event| core.set_sink(event, sink));
        }
    }

    /// Removes a sink. Afterwards, events no longer write to its pages.
    fn remove_sink(&mut self, id: u64) {
        let named = self.sinks.named(id);
        let moved = self.sinks.abandon(id);
        self.publish_sink(&moved);
        self.sinks.remove(id);
        if let Some(family) = named {
            self.settle_wakeups(family, Some(id));
        }
    }

    /// Maps a ring in guest RAM or in the window. Returns the number of the ring's first page in the window, or 0 if
    /// the ring is in guest RAM.
    fn map(&mut self, bytes: &[u8]) -> Result<u32, Errno> {
        let (request, rest) = MapRequest::read_from_prefix(bytes).map_err(|_| Errno::EINVAL)?;
        let flags = request.flags.get();
        let in_window = flags & MAP_WINDOW != 0;
        if flags & !(MAP_WRITABLE | MAP_WINDOW) != 0 {
            return Err(Errno::EINVAL);
        }
        if !self.has_rings() || in_window && self.features & 1 << F_WINDOW == 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        let id = request.header.event.get();
        let entry = self.events.get(&id).ok_or(Errno::ENOENT)?;
        let (spec, persistent) = (entry.spec, entry.persistence.is_some());
        if in_window && !persistent || spec.is_child() || self.sinks.is_redirected(id) || self.sinks.is_driven(id) {
            return Err(Errno::EINVAL);
        }
        let count = request.pages.get();
        self.check_size(count)?;
        let writable = flags & MAP_WRITABLE != 0;
        if in_window {
            if self.sinks.has_ring(id) {
                return Err(Errno::EBUSY);
            }
            return self.lay_in_window(&spec, count, writable, Holder::Guest);
        }
        let pages = self.check_addresses(count, rest)?;
        if self.sinks.has_ring(id) {
            return Err(Errno::EBUSY);
        }
        self.check_room(pages.len())?;
        let memory = self.guest.clone();
        self.lay(&spec, &memory, &pages, writable, None)?;
        Ok(0)
    }

    /// Creates an event's ring in the window with `count` pages, including the metadata page. Returns the number of the
    /// first page.
    fn lay_in_window(&mut self, spec: &EventSpec, count: u32, writable: bool, holder: Holder) -> Result<u32, Errno> {
        let run = self.sinks.take_pages(count, holder).ok_or(Errno::ENOSPC)?;
        let window = self.sinks.window().ok_or(Errno::ENOSPC)?;
        let memory = window.memory().clone();
        let first = run.first();
        let pages: Vec<GuestAddress> = run.addresses().collect();
        self.lay(spec, &memory, &pages, writable, Some(run))?;
        Ok(first)
    }

    /// Creates an event's ring in `pages` of `memory`. The caller must check the pages first. If they are in
    /// the window, `run` keeps them allocated.
    fn lay(
        &mut self,
        spec: &EventSpec,
        memory: &Memory,
        pages: &[GuestAddress],
        writable: bool,
        run: Option<Run>,
    ) -> Result<(), Errno> {
        let mode = RingMode { writable, backward: spec.has(OPEN_BACKWARD) };
        let ring = Ring::new(&memory.view(), pages, mode, self.backend.clock);
        let ring = ring.map_err(|_| Errno::EINVAL)?;
        let sink = Sink::new(spec.id);
        sink.set_ring(ring, memory);
        let moved = self.sinks.add(sink, run);
        self.publish_sink(&moved);
        self.settle_wakeups(spec.id, None);
        // Mapping succeeds even if this update puts the event in the error state.
        self.with_event(spec.id, |state| state.events.update(spec.id));
        Ok(())
    }

    /// Unmaps the ring that was mapped for an event. First writes the pending records that fit in the ring.
    fn unmap(&mut self, id: u64) -> Result<(), Errno> {
        if !self.sinks.has_ring(id) {
            return Err(self.not_mapped(id));
        }
        self.cut_traces(id);
        self.remove_sink(id);
        Ok(())
    }

    fn not_mapped(&self, id: u64) -> Errno {
        match self.events.contains_key(&id) {
            true => Errno::EINVAL,
            false => Errno::ENOENT,
        }
    }

    /// In each trace that writes to a sink, records the current exit of the trace's vCPU as cut. Returns an event that
    /// writes to the sink, so that the caller can close the sink's area through this event. Prefers a trace, then the
    /// event for which the sink was mapped. `None` if no event writes to the sink.
    fn cut_traces(&mut self, id: u64) -> Option<u64> {
        let writers = self.sinks.writers(id);
        let is_trace = |id: &u64| {
            let entry = self.events.get(id);
            entry.is_some_and(|entry| entry.spec.is_trace())
        };
        let traces: Vec<u64> = writers.iter().copied().filter(is_trace).collect();
        for &id in &traces {
            self.with_event(id, |state| state.events.cut(id));
        }
        let own = writers.iter().find(|&&writer| writer == id);
        traces.first().or(own).or_else(|| writers.first()).copied()
    }

    /// Redirects the records of an event and its children to the ring of another event.
    fn redirect(&mut self, request: &[u8]) -> Result<(), Errno> {
        let request = parse::<RedirectRequest>(request)?;
        let id = request.header.event.get();
        let target = request.target.get();
        let event = self.events.get(&id).ok_or(Errno::ENOENT)?;
        if self.is_operators(target) {
            return Err(Errno::EPERM);
        }
        let ring = match target {
            0 => None,
            target => {
                let target = self.events.get(&target).ok_or(Errno::ENOENT)?;
                if target.spec.id == id
                    || target.spec.is_child()
                    || !target.context.is_like(event.context)
                    || target.spec.has(OPEN_BACKWARD) != event.spec.has(OPEN_BACKWARD)
                {
                    return Err(Errno::EINVAL);
                }
                let sink = self.sinks.of_family(target.spec.owner);
                let sink = sink.map(|sink| sink.id());
                let ring = sink.filter(|&sink| self.sinks.has_ring(sink));
                Some(ring.ok_or(Errno::EINVAL)?)
            }
        };
        if self.sinks.has_ring(id) || event.persistence.is_some() || event.spec.is_child() || self.sinks.is_driven(id) {
            return Err(Errno::EINVAL);
        }
        self.reroute(id, ring);
        Ok(())
    }

    /// Redirects the family of `owner` to the ring that was mapped for the event `ring`. If `ring` is `None`, leaves
    /// the family without a ring.
    fn reroute(&mut self, owner: u64, ring: Option<u64>) {
        let before = self.sinks.of_family(owner).map(|sink| sink.id());
        let events = self.sinks.family(owner);
        let moved = self.sinks.move_family(owner, ring);
        self.publish_sink(&moved);
        for id in events {
            self.on_event(id, Core::begin_area);
        }
        if let Some(before) = before {
            self.sinks.remove_unused(before);
        }
        self.settle_wakeups(owner, before);
    }

    /// Pauses or resumes writing to the ring of an event.
    fn pause(&mut self, request: &[u8]) -> Result<(), Errno> {
        let request = parse::<PauseRequest>(request)?;
        let paused = match request.paused.get() {
            0 => false,
            1 => true,
            _ => return Err(Errno::EINVAL),
        };
        if request.reserved.get() != 0 {
            return Err(Errno::EINVAL);
        }
        let id = request.header.event.get();
        let event = self.events.get(&id).ok_or(Errno::ENOENT)?;
        let sink = self.sinks.of_family(event.spec.owner);
        let sink = sink.ok_or(Errno::EINVAL)?;
        if sink.shape().data_pages.unwrap_or(0) == 0 {
            return Err(Errno::EINVAL);
        }
        sink.pause(paused);
        Ok(())
    }

    /// Sets the wakeup interval of a family. The first interval begins now.
    fn set_wakeup(&mut self, request: &[u8]) -> Result<(), Errno> {
        let request = parse::<WakeupRequest>(request)?;
        let every = u32::try_from(request.every.get()).map_err(|_| Errno::EINVAL)?;
        let wakeup = match request.unit.get() {
            WAKEUP_RECORDS => Wakeup::Records(every),
            WAKEUP_BYTES => Wakeup::Bytes(every),
            _ => return Err(Errno::EINVAL),
        };
        if every == 0 || request.reserved.get() != 0 {
            return Err(Errno::EINVAL);
        }
        let id = request.header.event.get();
        let entry = self.events.get(&id).ok_or(Errno::ENOENT)?;
        if entry.spec.is_child() || !entry.makes_records() {
            return Err(Errno::EINVAL);
        }
        for member in self.sinks.family(id) {
            if let Some(entry) = self.events.get_mut(&member) {
                entry.spec.wakeup = wakeup;
            }
            self.on_event(member, |_, event| event.spec.wakeup = wakeup);
        }
        if let Some(sink) = self.sinks.of_family(id) {
            sink.restart_wakeups();
        }
        Ok(())
    }

    /// Gives the wakeups of a family notices of their own, or lets them share the notices of the family's sink.
    fn set_notices(&mut self, request: &[u8]) -> Result<(), Errno> {
        let request = parse::<SignalRequest>(request)?;
        let own = match request.own.get() {
            0 => false,
            1 => true,
            _ => return Err(Errno::EINVAL),
        };
        if request.reserved.get() != 0 {
            return Err(Errno::EINVAL);
        }
        let id = request.header.event.get();
        let entry = self.events.get(&id).ok_or(Errno::ENOENT)?;
        if entry.spec.is_child() || !entry.makes_records() {
            return Err(Errno::EINVAL);
        }
        if entry.spec.own_notices == own {
            return Ok(());
        }
        for member in self.sinks.family(id) {
            if let Some(entry) = self.events.get_mut(&member) {
                entry.spec.own_notices = own;
            }
            self.on_event(member, |_, event| event.spec.own_notices = own);
        }
        self.sinks.set_own_notices(id, own);
        let sink = self.sinks.of_family(id).map(|sink| sink.id());
        self.settle_wakeups(id, sink);
        Ok(())
    }

    /// Begins a VMM producer's write to the AUX area of a trace.
    ///
    /// # Errors
    /// [`AuxError`].
    pub(crate) fn claim(&mut self, id: u64, token: u64) -> Result<Arc<Sink>, AuxError> {
        let claimed = self.on_event(id, |core, event| core.claim_aux(event, token));
        claimed.ok_or(AuxError::NoEvent(id))?
    }

    /// Ends the producer's write, and publishes its first `size` bytes.
    ///
    /// # Errors
    /// [`AuxError`].
    pub(crate) fn release(&mut self, id: u64, sink: &Sink, token: u64, size: u64) -> Result<(), AuxError> {
        let released = self.on_event(id, |core, event| core.release_aux(event, sink, token, size));
        released.ok_or(AuxError::NoEvent(id))?
    }

    /// Adds `bytes` to a trace's number of lost bytes, for data that a producer could not write.
    pub(crate) fn lose_aux(&mut self, id: u64, bytes: u64) {
        self.on_event(id, |core, event| core.lose_aux(event, bytes));
    }

    /// Maps an AUX area in guest RAM for a trace. The trace must have a ring, unless the driver manages the area.
    fn map_aux(&mut self, bytes: &[u8]) -> Result<(), Errno> {
        let (request, rest) = MapRequest::read_from_prefix(bytes).map_err(|_| Errno::EINVAL)?;
        let flags = request.flags.get();
        if flags & !(MAP_WRITABLE | MAP_DRIVER_OWNED) != 0 {
            return Err(Errno::EINVAL);
        }
        if !self.has_areas() {
            return Err(Errno::EOPNOTSUPP);
        }
        let id = request.header.event.get();
        let spec = self.events.get(&id).ok_or(Errno::ENOENT)?.spec;
        if !spec.is_trace() {
            return Err(Errno::EOPNOTSUPP);
        }
        let driven = flags & MAP_DRIVER_OWNED != 0;
        if driven && spec.kind == KIND_VMM_TRACE {
            // A producer in the VMM cannot wait until the driver makes room in the area.
            return Err(Errno::EOPNOTSUPP);
        }
        let ring = self.sinks.has_ring(id);
        // If the driver manages the area, it also writes the records, so the event must not have a ring.
        let fits = match driven {
            true => !self.sinks.is_redirected(id) && !ring,
            false => ring,
        };
        if spec.is_child() || !fits {
            return Err(Errno::EINVAL);
        }
        let count = request.pages.get();
        if !count.is_power_of_two() || count > self.backend.settings.limits.max_aux_pages {
            return Err(Errno::EINVAL);
        }
        let pages = self.check_addresses(count, rest)?;
        let taken = self.sinks.get(id).map(|sink| sink.ring_addresses());
        let taken: BTreeSet<GuestAddress> = taken.into_iter().flatten().collect();
        work::charge_pages(taken.len());
        if pages.iter().any(|page| taken.contains(page)) {
            return Err(Errno::EINVAL);
        }
        let shape = self.sinks.shape(id);
        if shape.is_some_and(|shape| shape.has_area) {
            return Err(Errno::EBUSY);
        }
        self.check_room(pages.len())?;
        let writable = flags & MAP_WRITABLE != 0;
        let metadata = shape.and_then(|shape| shape.metadata);
        let memory = self.area_memory(id);
        let area = Area::new(&memory.view(), pages, metadata, writable, spec.aux_watermark);
        let area = area.map_err(|_| Errno::EINVAL)?;
        match self.sinks.get(id) {
            Some(sink) => sink.set_area(area, &memory),
            None => {
                let sink = Sink::new(id);
                sink.set_area(area, &memory);
                let moved = self.sinks.add(sink, None);
                self.publish_sink(&moved);
                self.settle_wakeups(id, None);
            }
        }
        for id in self.sinks.writers(id) {
            self.on_event(id, Core::begin_area);
        }
        Ok(())
    }

    /// The memory that contains an area and its ring's metadata page: guest RAM, plus the window if the ring is in
    /// the window.
    fn area_memory(&self, id: u64) -> Memory {
        let in_window = self.sinks.window_page(id).is_some();
        let window = self.sinks.window().filter(|_| in_window);
        window.map_or_else(|| self.guest.clone(), |window| window.beside(&self.guest))
    }

    /// Unmaps the area that was mapped for an event. First publishes the data that was written so far, and reports it
    /// in the ring if the records fit.
    fn unmap_aux(&mut self, id: u64) -> Result<(), Errno> {
        let shape = self.sinks.shape(id).filter(|shape| shape.has_area);
        let shape = shape.ok_or_else(|| self.not_mapped(id))?;
        if let Some(writer) = self.cut_traces(id) {
            self.on_event(writer, |core, event| core.close_area(event));
        }
        if shape.metadata.is_none() {
            self.remove_sink(id);
        }
        Ok(())
    }

    /// Checks that `more` additional pages of guest RAM stay within the operator's limit for rings and areas.
    fn check_room(&self, more: usize) -> Result<(), Errno> {
        let pages = self.sinks.guest_pages() + more;
        match pages > self.backend.settings.limits.max_pages as usize {
            true => Err(Errno::ENOSPC),
            false => Ok(()),
        }
    }

    /// Checks that a ring may have `count` pages, including the metadata page.
    fn check_size(&self, count: u32) -> Result<(), Errno> {
        let data = count.checked_sub(1).ok_or(Errno::EINVAL)?;
        let most = self.backend.settings.limits.max_ring_pages;
        if data != 0 && !data.is_power_of_two() || data > most {
            return Err(Errno::EINVAL);
        }
        Ok(())
    }

    /// Parses the addresses of `count` pages. Checks that each page is aligned, is in memory and is listed only once.
    fn check_addresses(&self, count: u32, addresses: &[u8]) -> Result<Vec<GuestAddress>, Errno> {
        let (addresses, _) =
            <[U64]>::ref_from_prefix_with_elems(addresses, count as usize).map_err(|_| Errno::EINVAL)?;
        work::charge_pages(addresses.len());
        let pages: Vec<GuestAddress> = addresses.iter().map(|a| GuestAddress(a.get())).collect();
        match self.are_pages(&pages) {
            true => Ok(pages),
            false => Err(Errno::EINVAL),
        }
    }

    /// Returns whether all of `pages` are pages of guest memory, and each is listed only once.
    fn are_pages(&self, pages: &[GuestAddress]) -> bool {
        let distinct: BTreeSet<_> = pages.iter().collect();
        let memory = self.guest.view();
        let usable = pages.iter().all(|&page| memory.is_page(page));
        distinct.len() == pages.len() && usable
    }

    // Persistent events.

    /// The ids of all persistent events, ascending. Charges the examination of all of them.
    fn persistent(&self) -> impl Iterator<Item = u64> {
        work::charge_examined(self.persistent.len());
        self.persistent.iter().copied()
    }

    /// Returns whether the operator owns an event. The guest can read such an event, but not change it.
    fn is_operators(&self, id: u64) -> bool {
        self.events.get(&id).is_some_and(Entry::is_operators)
    }

    /// Makes a guest event persistent under the name in the request. If the request has no name, an event that is
    /// already persistent keeps its name, and any other event gets its default name.
    fn detach(&mut self, request: &[u8]) -> Result<(), Errno> {
        let request = parse::<DetachRequest>(request)?;
        let name = match request.name.iter().all(|&byte| byte == 0) {
            true => None,
            false => Some(Name::from_wire(&request.name).ok_or(Errno::EINVAL)?),
        };
        let id = request.header.event.get();
        let entry = self.events.get(&id).ok_or(Errno::ENOENT)?;
        if entry.is_operators() {
            return Err(Errno::EPERM);
        }
        let alone = entry.leader.is_none() && entry.members.is_empty();
        let fits = alone && !entry.spec.is_child() && !self.sinks.is_redirected(id);
        let of_vcpu = matches!(entry.context, Context::Vcpu(_));
        let before = entry.persistence.as_ref().map(|known| known.name.clone());
        let fresh = before.is_none();
        let failed = self.on_event(id, |_, event| event.has_failed());
        if !of_vcpu || !fits || failed == Some(true) {
            return Err(Errno::EINVAL);
        }
        let name = name.or(before).unwrap_or_else(|| Name::of(id));
        self.check_name(id, &name)?;
        if fresh {
            self.check_persistent()?;
        }
        self.set_persistence(id, Some(Persistence { name, operator: false }));
        Ok(())
    }

    /// Makes a persistent event an ordinary event again, so that it can be closed.
    fn reattach(&mut self, id: u64) -> Result<(), Errno> {
        let entry = self.events.get(&id).ok_or(Errno::ENOENT)?;
        if entry.persistence.is_none() {
            return Err(Errno::EINVAL);
        }
        self.set_persistence(id, None);
        Ok(())
    }

    /// Sets or clears the persistence of a guest event.
    fn set_persistence(&mut self, id: u64, persistence: Option<Persistence>) {
        let persistent = persistence.as_ref().map(|_| Persistent::Guest);
        match persistent {
            Some(_) => self.persistent.insert(id),
            None => self.persistent.remove(&id),
        };
        if let Some(entry) = self.events.get_mut(&id) {
            entry.persistence = persistence;
        }
        self.on_event(id, |_, event| event.persistent = persistent);
    }

    /// Checks that the guest may have one more persistent event. Returns the [`Persistence`] of the guest's new event
    /// `id`, with the default name.
    fn persistence(&self, id: u64) -> Result<Persistence, Errno> {
        self.check_persistent()?;
        Ok(Persistence { name: Name::of(id), operator: false })
    }

    /// Checks that event `id` can have the name `name`. The name must not be reserved for another event or in use by
    /// another event.
    fn check_name(&self, id: u64, name: &Name) -> Result<(), Errno> {
        if name.is_reserved() && *name != Name::of(id) {
            return Err(Errno::EINVAL);
        }
        match self.named(name).is_some_and(|other| other != id) {
            true => Err(Errno::EEXIST),
            false => Ok(()),
        }
    }

    /// The persistent event with a name.
    fn named(&self, name: &Name) -> Option<u64> {
        self.persistent().find(|id| {
            let entry = self.events.get(id);
            let known = entry.and_then(|entry| entry.persistence.as_ref());
            known.is_some_and(|known| known.name == *name)
        })
    }

    /// Returns the name that the operator requested, or the default name of the next event. Checks that the name is
    /// valid and not reserved, and that no other event of the operator has it.
    fn operators_name(&self, asked: Option<&str>) -> Result<Name, PersistError> {
        let Some(text) = asked else {
            return Ok(Name::of(self.next_id));
        };
        let name = Name::new(text).ok_or_else(|| PersistError::BadName(text.to_owned()))?;
        if name.is_reserved() {
            return Err(PersistError::ReservedName(text.to_owned()));
        }
        match self.named(&name).is_some_and(|other| self.is_operators(other)) {
            true => Err(PersistError::NameTaken(text.to_owned())),
            false => Ok(name),
        }
    }

    /// Gives the guest event `id` its default name, because an event of the operator takes the old name.
    fn take_name(&mut self, id: u64) {
        self.set_persistence(id, Some(Persistence { name: Name::of(id), operator: false }));
        self.notices.pending().list(id);
    }

    /// Checks that the guest is below the operator's limit on persistent events.
    fn check_persistent(&self) -> Result<(), Errno> {
        let guests = self.persistent().filter(|&id| !self.is_operators(id));
        match guests.count() < self.backend.settings.limits.max_persistent as usize {
            true => Ok(()),
            false => Err(Errno::ENOSPC),
        }
    }

    /// Returns the requested persistent events, by ascending id. Returns at most `fit` events.
    fn list(&mut self, request: &[u8], fit: usize) -> Result<Vec<PersistentEvent>, Errno> {
        let request = parse::<PersistentRequest>(request)?;
        if request.header.event.get() != 0 || request.reserved.get() != 0 {
            return Err(Errno::EINVAL);
        }
        let most = fit.min(request.count.get() as usize);
        let after = request.after.get().saturating_add(1);
        let later = self.persistent.range(after..).copied();
        let ids: Vec<u64> = later.take(most).collect();
        let listed = ids.into_iter().filter_map(|id| {
            let view = self.with_event(id, |state| state.glance(id))??;
            self.listed(id, &view)
        });
        Ok(listed.collect())
    }

    fn listed(&self, id: u64, view: &View) -> Option<PersistentEvent> {
        let entry = self.events.get(&id)?;
        let (shape, page) = (self.sinks.shape(id), self.sinks.window_page(id));
        let flag = |on: bool, flag| if on { flag } else { 0 };
        let map = flag(shape.is_some_and(|shape| shape.writable), MAP_WRITABLE) | flag(page.is_some(), MAP_WINDOW);
        // The limit on ring pages is a u32.
        let pages = shape.and_then(|shape| u32::try_from(shape.ring_pages).ok());
        let name = entry.persistence.as_ref().map(|known| known.name.to_wire());
        Some(PersistentEvent {
            id: id.into(),
            open: open_request(entry, view),
            pages: pages.unwrap_or(0).into(),
            map: map.into(),
            window_page: page.unwrap_or(0).into(),
            flags: flag(entry.is_operators(), PERSISTENT_OPERATOR).into(),
            name: name.unwrap_or([0; PERSISTENT_NAME]),
        })
    }

    // The operator.

    /// Whether [`Backend::ask_guest_ips`] must be called before the request is executed.
    pub(crate) fn needs_guest_ips(&self, request: &OpenRequest) -> bool {
        needs_guest_ips(request, self.backend.settings.engines)
    }

    /// Opens a persistent event for the operator. Returns its id. `request` is the open request that `asked` describes.
    pub(crate) fn persist(&mut self, asked: &Persist, request: &OpenRequest) -> Result<u64, PersistError> {
        let pages = asked.pages;
        let name = self.operators_name(asked.name.as_deref())?;
        let most = self.backend.settings.limits.max_ring_pages;
        if pages != 0 && (!pages.is_power_of_two() || pages > most) {
            return Err(PersistError::Pages { pages, most });
        }
        if pages != 0 && !self.has_window() {
            return Err(PersistError::NoWindow);
        }
        let before = self.named(&name);
        let persistence = Persistence { name, operator: true };
        let opened = self.open(request, Maker::Operator(persistence));
        let (_, id) = opened.map_err(|denied| refused(asked, denied.errno))?;
        let spec = self.events.get(&id).map(|entry| entry.spec);
        if let Some(spec) = spec.filter(|_| pages != 0)
            && self.lay_in_window(&spec, pages + 1, false, Holder::Operator).is_err()
        {
            self.end(id);
            return Err(PersistError::NoRoom(pages + 1));
        }
        let enabled = self.with_event(id, |state| state.enable(id));
        if let Some(Err(errno)) = enabled {
            self.end(id);
            return Err(refused(asked, errno));
        }
        if let Some(guests) = before {
            self.take_name(guests);
        }
        self.notices.pending().list(id);
        Ok(id)
    }

    /// Ends a persistent event of the guest or the operator.
    pub(crate) fn end_persistent(&mut self, id: u64) -> Result<(), PersistError> {
        self.check_exists(id)?;
        self.flush_sink(id);
        self.end(id);
        self.notices.pending().list(id);
        Ok(())
    }

    /// The current status of every persistent event.
    pub(crate) fn statuses(&mut self) -> Vec<PersistentStatus> {
        let ids: Vec<u64> = self.persistent().collect();
        let statuses = ids.into_iter().filter_map(|id| self.status(id));
        statuses.collect()
    }

    /// Returns the current status of a persistent event, and a copy of its ring.
    pub(crate) fn held(&mut self, id: u64) -> Result<HeldRecords, PersistError> {
        self.check_exists(id)?;
        self.flush_sink(id);
        let event = self.status(id).ok_or(PersistError::NoSuch(id))?;
        let entry = self.events.get(&id).ok_or(PersistError::NoSuch(id))?;
        let held = self.sinks.get(id).and_then(|sink| sink.held());
        let HeldBytes { bytes, newest_first } = held.ok_or(PersistError::NoRing(id))?;
        Ok(HeldRecords {
            event,
            layout: entry.spec.layout,
            bytes: bytes.ok_or(PersistError::Unreadable(id))?,
            newest_first,
        })
    }

    fn check_exists(&self, id: u64) -> Result<(), PersistError> {
        match self.persistent.contains(&id) {
            true => Ok(()),
            false => Err(PersistError::NoSuch(id)),
        }
    }

    fn status(&mut self, id: u64) -> Option<PersistentStatus> {
        let view = self.with_event(id, |state| state.view(id))??;
        let entry = self.events.get(&id)?;
        let spec = &entry.spec;
        let enabled = if view.enabled { OPEN_ENABLED } else { 0 };
        let known = entry.persistence.as_ref();
        Some(PersistentStatus {
            id,
            name: known.map_or_else(String::new, |known| known.name.to_string()),
            event: spelled(self.backend.catalogue(), spec.kind, spec.config, spec.flags),
            operator: entry.is_operators(),
            vcpu: match entry.context {
                Context::Vcpu(vcpu) => vcpu,
                Context::Task(_) => entry.shard,
            },
            kind: spec.kind,
            config: spec.config,
            rate: view.rate,
            flags: spec.flags & !OPEN_ENABLED | enabled | OPEN_PERSISTENT,
            engine: spec.engine,
            sample_type: spec.layout.sample_type,
            read_format: spec.layout.read_format,
            regs_user: spec.layout.regs_user,
            regs_intr: spec.layout.regs_intr,
            stack_user: spec.layout.stack_user,
            state: view.state,
            count: view.counts.count,
            time_enabled: view.counts.time_enabled,
            time_running: view.counts.time_running,
            lost: view.lost,
            pages: self.sinks.shape(id).and_then(|shape| shape.data_pages),
            window: self.sinks.window_page(id).is_some(),
        })
    }

    // Flushes requested by the VMM.

    /// Returns the events to flush: either `event` or all persistent events. `None` if `event` does not exist.
    pub(crate) fn flushed(&self, event: Option<u64>) -> Option<Vec<u64>> {
        match event {
            Some(id) => self.events.contains_key(&id).then(|| vec![id]),
            None => Some(self.persistent().collect()),
        }
    }

    /// Begins a flush of the events `ids`. Skips every event for which the host cannot have pending overflows (see
    /// [`Event::may_hold`]). For each remaining event whose vCPU is outside the guest, writes the overflows now. For each
    /// remaining event whose vCPU is in the guest, adds the vCPU's current visit (the time from entry to exit) to the
    /// returned set.
    pub(crate) fn begin_flush(&mut self, ids: &[u64]) -> BTreeSet<Visit> {
        let mut inside = BTreeSet::new();
        for &id in ids {
            let visit = self.with_event(id, |state| {
                if !state.event(id).is_some_and(Event::may_hold) {
                    return None;
                }
                let (vcpu, visit) = (state.core().cpu.index, state.core().cpu.vcpu.visit());
                if visit.is_none() {
                    // The vCPU cannot enter the guest while the shard is locked.
                    state.events.write_held(id);
                }
                visit.map(|number| Visit { vcpu, number })
            });
            inside.extend(visit.flatten());
        }
        inside
    }

    /// Publishes everything that was written for an event, and wakes the event's reader.
    ///
    /// # Errors
    /// `EIO` or the host's error if the event is in the error state. `ENOENT` if the event was closed in the meantime.
    pub(crate) fn end_flush(&mut self, id: u64) -> Result<(), Errno> {
        let published = self.with_event(id, |state| {
            state.events.flush_batched();
            state.publish_all(id)
        });
        published.unwrap_or(Err(Errno::ENOENT))
    }
}

/// Copies the start of a request, up to the length of the longest request that has no list of pages.
fn copy_fixed(reader: &mut impl Read) -> Result<Vec<u8>, BadChain> {
    let mut request = Vec::with_capacity(LONGEST_WITHOUT_PAGES);
    let read = reader.take(LONGEST_WITHOUT_PAGES as u64).read_to_end(&mut request);
    read.map(|_| request).map_err(|_| BadChain)
}

/// Parses the fixed-size request at the start of `bytes`.
fn parse<T: FromBytes + KnownLayout + Immutable>(bytes: &[u8]) -> Result<T, Errno> {
    let parsed = T::read_from_prefix(bytes);
    parsed.map(|(request, _)| request).map_err(|_| Errno::EINVAL)
}

fn log_refused(id: u64, result: Result<(), Errno>) {
    if let Err(errno) = result {
        log::debug!("event {id} cannot start or stop with its leader: errno {}", errno.get());
    }
}

/// Whether a request with operation `op` changes the event that its header names.
fn changes(op: u32) -> bool {
    matches!(
        op,
        CONTROL_CLOSE
            | CONTROL_MAP
            | CONTROL_UNMAP
            | CONTROL_REDIRECT
            | CONTROL_PAUSE
            | CONTROL_MAP_AUX
            | CONTROL_UNMAP_AUX
            | CONTROL_DETACH
            | CONTROL_ATTACH
            | CONTROL_LINK
            | CONTROL_WAKEUP
            | CONTROL_SIGNAL
    )
}

/// Describes the current settings of a persistent event as an open request.
fn open_request(entry: &Entry, view: &View) -> OpenRequest {
    let spec = &entry.spec;
    let flag = |on: bool, flag| if on { flag } else { 0 };
    let flags = spec.flags & !(OPEN_ENABLED | OPEN_FREQ | OPEN_WATERMARK)
        | flag(view.enabled, OPEN_ENABLED)
        | flag(matches!(view.rate, Some(Rate::Frequency(_))), OPEN_FREQ)
        | flag(matches!(spec.wakeup, Wakeup::Bytes(_)), OPEN_WATERMARK)
        | OPEN_PERSISTENT;
    OpenRequest {
        kind: spec.kind.into(),
        context: match entry.context {
            Context::Vcpu(vcpu) => vcpu,
            Context::Task(_) => CONTEXT_TASK,
        }
        .into(),
        config: spec.config.into(),
        period: match view.rate {
            Some(Rate::Period(rate) | Rate::Frequency(rate)) => rate,
            None => 0,
        }
        .into(),
        sample_type: spec.layout.sample_type.into(),
        flags: flags.into(),
        wakeup: match spec.wakeup {
            Wakeup::Page => 0,
            Wakeup::Records(every) | Wakeup::Bytes(every) => every,
        }
        .into(),
        engine: spec.engine.into(),
        max_stack: spec.max_stack.into(),
        read_format: spec.layout.read_format.into(),
        regs_user: spec.layout.regs_user.into(),
        regs_intr: spec.layout.regs_intr.into(),
        stack_user: spec.layout.stack_user.into(),
        aux_watermark: spec.aux_watermark.into(),
        ..OpenRequest::default()
    }
}

fn refused(asked: &Persist, errno: Errno) -> PersistError {
    match errno {
        Errno::EOPNOTSUPP => PersistError::Refused {
            event: asked.event.clone(),
            why: "the configured engine cannot take the requested samples",
        },
        errno => PersistError::Host(io::Error::from(errno)),
    }
}

//! The control plane. It tracks all events, rings and persistent names, their owners, and the shard (one vCPU's part
//! of the device) of each event. It serves the control queue and the operator. If an event of one vCPU starts, stops
//! or otherwise affects an event of another vCPU, this module applies the change. Every number in a request comes from
//! the guest and is checked before use.

mod mapping;
mod persistents;
mod placement;
mod queue;
mod reply;
mod request;
mod restoring;
mod saving;
mod sinks;

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

use vm_memory::GuestAddress;
use zerocopy::FromBytes;

use self::mapping::Mapping;
pub(crate) use self::persistents::HeldRecords;
use self::persistents::PersistentEvents;
use self::placement::{Entry, Placement};
use self::queue::{copy_request, parse, peek_open};
use self::reply::ReplyBuffer;
use self::request::{Maker, Terms, needs_guest_ips, period, wakeup};
pub(crate) use self::restoring::Driver;
use crate::abi::{
    CONTROL_ATTACH, CONTROL_CATALOGUE, CONTROL_CLOSE, CONTROL_DETACH, CONTROL_FEATURES, CONTROL_LINK, CONTROL_MAP,
    CONTROL_MAP_AUX, CONTROL_OPEN, CONTROL_PAUSE, CONTROL_PERSISTENT, CONTROL_REDIRECT, CONTROL_SIGNAL,
    CONTROL_TASK_PAGE, CONTROL_UNMAP, CONTROL_UNMAP_AUX, CONTROL_WAKEUP, CatalogueEntry, CatalogueRequest, Command,
    ControlHeader, F_AUX, F_DOORBELL, F_FLUSH, F_LINKS, F_PERSISTENT, F_RING, F_TASK_PAGE, F_WINDOW, FeaturesRequest,
    LINK_STARTER, LINK_STOPPER, LinkRequest, OPEN_ENABLED, OpenRequest, QUEUE_CONTROL, QUEUE_EVENT, QUEUE_VCPU, Reply,
    TaskPageRequest,
};
use crate::backend::Backend;
use crate::errno::{Denied, Errno};
use crate::event::Event;
use crate::flush::Visit;
use crate::links::{Links, Refused, Role};
use crate::machine::Interrupt;
use crate::memory::Memory;
use crate::metrics::Metrics;
use crate::notices::Notices;
use crate::persistent::{Persist, PersistError, Persistence, PersistentStatus};
use crate::producer::AuxError;
use crate::queues::{BadChain, Chain, DeviceQueue, QueueState};
use crate::shard::{Errand, Shard};
use crate::sink::Sink;
use crate::tasks::Tasks;
use crate::window::{Holder, Window};
use crate::work::{self, Turn, Work};

/// The device-specific feature bits that every device offers.
const FEATURES: u64 = 1 << F_RING | 1 << F_TASK_PAGE | 1 << F_AUX | 1 << F_PERSISTENT | 1 << F_LINKS | 1 << F_FLUSH;

/// The features that the driver negotiated. None without a driver.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Features(u64);

impl Features {
    fn has(self, feature: u32) -> bool {
        self.0 & 1 << feature != 0
    }

    fn has_rings(self) -> bool {
        self.has(F_RING)
    }

    /// Rings report the data of areas, so areas need `F_RING`, too.
    fn has_areas(self) -> bool {
        self.has_rings() && self.has(F_AUX)
    }

    fn has_window(self) -> bool {
        self.has(F_WINDOW)
    }

    fn has_task_page(self) -> bool {
        self.has(F_TASK_PAGE)
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
    notices: Arc<Notices>,
    features: Features,
    queue: DeviceQueue,
    placement: Placement,
    mapping: Mapping,
    persistent: PersistentEvents,
    /// The events that start and stop other events. The trigger's event has a copy of its own links.
    links: Links,
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
            notices: Arc::clone(notices),
            features: Features::default(),
            queue: DeviceQueue::default(),
            placement: Placement::new(shards),
            mapping: Mapping::new(backend, notices),
            persistent: PersistentEvents::new(backend),
            links: Links::default(),
            resets: 0,
            metrics: Metrics::default(),
            before: Metrics::default(),
        }
    }

    // The device's life.

    /// Sets the window, whose memory survives a reset. Must be called before the first activation.
    pub(crate) fn set_window(&mut self, window: Window) {
        self.mapping.sinks_mut().set_window(window);
    }

    /// The device-specific feature bits that this device offers.
    pub(crate) fn offered(&self) -> u64 {
        let doorbell = self.backend.settings.doorbell;
        FEATURES | u64::from(doorbell) << F_DOORBELL | u64::from(self.mapping.has_window()) << F_WINDOW
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
        let window = self.mapping.sinks().window();
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
                    let shard = self.placement.shards().get(usize::from(index - QUEUE_VCPU));
                    if let Some(shard) = shard {
                        shard.with(|state| state.activate(memory, queue));
                    }
                }
            }
        }
        self.mapping.set_guest(memory);
        self.features = Features(features);
        Ok(())
    }

    /// The current state of each virtqueue.
    pub(crate) fn queue_states(&self) -> Vec<QueueState> {
        let vcpus = self.placement.shards().iter();
        let vcpus = vcpus.map(|shard| shard.with(|state| state.queue_state()).0);
        [self.queue.state(), self.notices.queue_state()].into_iter().chain(vcpus).collect()
    }

    /// Drops the driver and its memory, without writing to that memory. Closes every event that depends on
    /// the driver or its memory.
    pub(crate) fn reset(&mut self) {
        self.resets += 1;
        self.features = Features::default();
        self.queue = DeviceQueue::default();
        let (kept, gone): (BTreeSet<u64>, BTreeSet<u64>) =
            self.placement.ids().into_iter().partition(|&id| self.outlives(id));
        let mut errands = Vec::new();
        for shard in self.placement.shards() {
            let ((), more) = shard.with(|state| state.reset(|id| kept.contains(&id)));
            errands.extend(more);
        }
        for id in gone {
            self.placement.remove(id);
            self.persistent.remove(id);
            self.forget_links(id);
        }
        for &id in &kept {
            self.placement.with_event(id, |state| state.forget_requests(id));
        }
        self.mapping.reset(&kept);
        self.run(errands);
    }

    /// Whether an event survives a reset. The event must be persistent. If it has a ring, the ring must be in the
    /// window and must not have an AUX area.
    fn outlives(&self, id: u64) -> bool {
        self.persistent.contains(id) && self.mapping.survives_reset(id)
    }

    /// Attaches `thread` to a vCPU. On this thread, the guest's TSC is the host's TSC plus `tsc_offset`.
    pub(crate) fn attach(&mut self, vcpu: u32, thread: i32, tsc_offset: u64) {
        for (index, shard) in (0..).zip(self.placement.shards()) {
            if index != vcpu {
                // Task events that ran on this vCPU may now be in another shard, but may still have counters on the
                // vCPU's previous thread.
                shard.with(|state| state.forget_thread(vcpu));
            }
        }
        self.placement.on(vcpu, |state| state.attach(thread, tsc_offset));
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

    /// Executes work that shards deferred to other shards, and any further work that results from it.
    pub(crate) fn run(&self, errands: Vec<Errand>) {
        self.placement.run(errands);
    }

    /// Executes a command from the queue of the vCPU `of`, for an event that is not in that vCPU's shard. `by` is the
    /// vCPU that notified the queue. `resets` is the number of resets of the device when the notification began.
    pub(crate) fn command(&mut self, command: &Command, of: u32, by: u32, resets: u64) -> Reply {
        if resets != self.resets {
            // The driver that sent the command no longer exists.
            return Reply::default();
        }
        self.placement.command(command, of, by)
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
        peek_open(chain).is_some_and(|request| self.needs_guest_ips(&request))
    }

    /// Executes one request. Returns the length of the answer in bytes.
    fn answer(&mut self, chain: &Chain) -> Result<u32, BadChain> {
        let request = copy_request(chain, &self.backend.settings.limits)?;
        let (bytes, writer) = chain.writer()?;
        let room = ReplyBuffer { bytes, writer };
        let header = ControlHeader::read_from_prefix(&request);
        let Some((header, _)) = header.ok().filter(|(header, _)| header.reserved.get() == 0) else {
            return room.simple(|| Err(Errno::EINVAL));
        };
        let event = header.event.get();
        if event != 0 {
            // Write the pending samples before the request can change the event's sink.
            self.mapping.flush_sink(&mut self.placement, event);
        }
        let features = self.features;
        match header.op.get() {
            CONTROL_OPEN => room.opened(|| {
                let request = parse::<OpenRequest>(&request)?;
                self.open(&request, Maker::Guest)
            }),
            CONTROL_CATALOGUE => room.entries(|fit| self.catalogue(&request, fit)),
            CONTROL_PERSISTENT => {
                room.entries(|fit| self.persistent.list(&mut self.placement, &self.mapping, &request, fit))
            }
            op if changes(op) && self.placement.is_operators(event) => room.simple(|| Err(Errno::EPERM)),
            CONTROL_DETACH => room.simple(|| self.persistent.detach(&mut self.placement, &self.mapping, &request)),
            CONTROL_ATTACH => room.simple(|| self.persistent.reattach(&mut self.placement, event)),
            CONTROL_CLOSE => room.simple(|| self.close(event)),
            CONTROL_MAP => room.valued(|| self.mapping.map(&mut self.placement, features, &request)),
            CONTROL_UNMAP => room.simple(|| self.mapping.unmap(&mut self.placement, event)),
            CONTROL_REDIRECT => room.simple(|| self.mapping.redirect(&mut self.placement, &request)),
            CONTROL_PAUSE => room.simple(|| self.mapping.pause(&self.placement, &request)),
            CONTROL_MAP_AUX => room.simple(|| self.mapping.map_aux(&mut self.placement, features, &request)),
            CONTROL_UNMAP_AUX => room.simple(|| self.mapping.unmap_aux(&mut self.placement, event)),
            CONTROL_LINK => room.simple(|| self.link(&request)),
            CONTROL_WAKEUP => room.simple(|| self.mapping.set_wakeup(&mut self.placement, &request)),
            CONTROL_SIGNAL => room.simple(|| self.mapping.set_notices(&mut self.placement, &request)),
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
        self.features.0 |= features;
        Ok(())
    }

    fn task_page(&mut self, request: &[u8]) -> Result<(), Errno> {
        let request = parse::<TaskPageRequest>(request)?;
        if request.header.event.get() != 0 || request.reserved.get() != 0 {
            return Err(Errno::EINVAL);
        }
        if !self.features.has_task_page() {
            return Err(Errno::EOPNOTSUPP);
        }
        let vcpu = request.vcpu.get();
        let page = Some(GuestAddress(request.address.get())).filter(|page| page.0 != 0);
        if vcpu >= self.backend.settings.vcpus || page.is_some_and(|page| !self.mapping.guest().view().is_page(page)) {
            return Err(Errno::EINVAL);
        }
        self.placement.on(vcpu, |state| {
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
            has_rings: operators || self.features.has_rings(),
            has_areas: self.features.has_areas(),
            guest_ips: backend.guest_ips(),
        };
        let context = terms.check_context(request)?;
        let owner = self.placement.owner(request)?;
        let leader = self.placement.leader(request, context)?;
        let opening = terms.check(request)?;
        let id = self.placement.next_id();
        if !operators {
            self.persistent.check_events(&self.placement)?;
        }
        let persistence = match maker {
            Maker::Guest if opening.persistent => Some(self.persistent.begin(&self.placement, id)?),
            Maker::Guest => None,
            Maker::Operator(persistence) => Some(persistence),
        };
        let spec = opening.spec(request, id, owner);
        let owner = spec.owner;
        let wakeups = if self.mapping.sinks().has_family(owner) {
            // The wakeup interval of the family may have changed since the driver sent the request.
            self.mapping.sinks().wakeups(owner)
        } else {
            wakeup(request).into()
        };
        let mut event = Event::new(Arc::new(spec), wakeups, context, period(request));
        event.persistent = persistence.as_ref().map(Persistence::owner);
        let persistent = event.persistent.is_some();
        event.set_enabled(opening.flags & OPEN_ENABLED != 0);
        event.output.sink = self.mapping.sinks().of_family(owner).cloned();
        if let Some(leader) = leader {
            for role in opening.steers() {
                self.links.steer(id, leader, role);
            }
        }
        event.effects = self.links.effects(id).collect();
        let shard = self.placement.first_shard(context);
        self.placement.insert(id, Entry::new(&event, shard, leader, persistence));
        if let Some(leader) = leader {
            event.join(self.placement.grow_group(leader, id));
        }
        let opened = self.placement.on(shard, |state| state.open(event));
        if let Err(denied) = opened {
            self.placement.remove(id);
            self.forget_links(id);
            if let Some(leader) = leader {
                self.placement.leave_group(leader, id);
            }
            return Err(denied);
        }
        if persistent {
            self.persistent.insert(id);
        }
        let sinks = self.mapping.sinks_mut();
        sinks.join(owner, id);
        sinks.set_wakeup(owner, wakeups.every);
        self.metrics.events_opened += 1;
        Ok((opening.engine, id))
    }

    /// Closes an event. If no other event writes to the event's sink, also removes the sink.
    fn close(&mut self, id: u64) -> Result<(), Errno> {
        let entry = self.placement.get(id).ok_or(Errno::ENOENT)?;
        if entry.persistence.is_some() {
            return Err(Errno::EBUSY);
        }
        self.end(id);
        Ok(())
    }

    /// Ends an event, persistent or not.
    fn end(&mut self, id: u64) {
        self.placement.with_event(id, |state| state.end(id));
        let Some(entry) = self.placement.remove(id) else {
            return;
        };
        self.persistent.remove(id);
        self.placement.disband(id, &entry);
        self.forget_links(id);
        self.mapping.retire(id, entry.spec.owner);
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
        self.placement.check_link(id, target)?;
        let linked = self.links.link(id, target, role);
        linked.map_err(|refused| match refused {
            Refused::Linked => Errno::EEXIST,
            Refused::Taken => Errno::EBUSY,
        })?;
        self.publish_links(id);
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
        self.placement.on_event(trigger, |_, event| event.effects = effects);
    }

    // Producers in the VMM.

    /// Begins a VMM producer's write to the AUX area of a trace.
    ///
    /// # Errors
    /// [`AuxError`].
    pub(crate) fn claim(&self, id: u64, token: u64) -> Result<Arc<Sink>, AuxError> {
        let claimed = self.placement.on_event(id, |core, event| core.claim_aux(event, token));
        claimed.ok_or(AuxError::NoEvent(id))?
    }

    /// Ends the producer's write, and publishes its first `size` bytes.
    ///
    /// # Errors
    /// [`AuxError`].
    pub(crate) fn release(&self, id: u64, sink: &Arc<Sink>, token: u64, size: u64) -> Result<(), AuxError> {
        let released = self.placement.on_event(id, |core, event| core.release_aux(event, sink, token, size));
        released.ok_or(AuxError::NoEvent(id))?
    }

    /// Adds `bytes` to a trace's number of lost bytes, for data that a producer could not write.
    pub(crate) fn lose_aux(&self, id: u64, bytes: u64) {
        self.placement.on_event(id, |core, event| core.lose_aux(event, bytes));
    }

    // The operator.

    /// Whether [`Backend::ask_guest_ips`] must be called before the request is executed.
    pub(crate) fn needs_guest_ips(&self, request: &OpenRequest) -> bool {
        needs_guest_ips(request, self.backend.settings.engines)
    }

    /// Opens a persistent event for the operator. Returns its id. `request` is the open request that `asked` describes.
    pub(crate) fn persist(&mut self, asked: &Persist, request: &OpenRequest) -> Result<u64, PersistError> {
        let pages = asked.pages;
        let name = self.persistent.operators_name(&self.placement, asked.name.as_deref())?;
        let most = self.backend.settings.limits.max_ring_pages;
        if pages != 0 && (!pages.is_power_of_two() || pages > most) {
            return Err(PersistError::Pages { pages, most });
        }
        if pages != 0 && !self.mapping.has_window() {
            return Err(PersistError::NoWindow);
        }
        let before = self.persistent.named(&self.placement, &name);
        let persistence = Persistence { name, operator: true };
        let opened = self.open(request, Maker::Operator(persistence));
        let (_, id) = opened.map_err(|denied| refused(asked, denied.errno))?;
        let spec = self.placement.get(id).map(|entry| Arc::clone(&entry.spec));
        if let Some(spec) = spec.filter(|_| pages != 0)
            && self.mapping.lay_in_window(&mut self.placement, &spec, pages + 1, false, Holder::Operator).is_err()
        {
            self.end(id);
            return Err(PersistError::NoRoom(pages + 1));
        }
        let enabled = self.placement.with_event(id, |state| state.enable(id));
        if let Some(Err(errno)) = enabled {
            self.end(id);
            return Err(refused(asked, errno));
        }
        if let Some(guests) = before {
            // The guest's event gets its default name, because the operator's event takes the old name.
            let persistence = PersistentEvents::guests(guests);
            self.persistent.set(&mut self.placement, guests, Some(persistence));
            self.notices.pending().list(guests);
        }
        self.notices.pending().list(id);
        Ok(id)
    }

    /// Ends a persistent event of the guest or the operator.
    pub(crate) fn end_persistent(&mut self, id: u64) -> Result<(), PersistError> {
        self.persistent.check_exists(id)?;
        self.mapping.flush_sink(&mut self.placement, id);
        self.end(id);
        self.notices.pending().list(id);
        Ok(())
    }

    /// The current status of every persistent event.
    pub(crate) fn statuses(&mut self) -> Vec<PersistentStatus> {
        self.persistent.statuses(&mut self.placement, &self.mapping)
    }

    /// Returns the current status of a persistent event, and a copy of its ring.
    pub(crate) fn held(&mut self, id: u64) -> Result<HeldRecords, PersistError> {
        self.persistent.held(&mut self.placement, &self.mapping, id)
    }

    // Flushes requested by the VMM.

    /// Returns the events to flush: either `event` or all persistent events. `None` if `event` does not exist.
    pub(crate) fn flushed(&self, event: Option<u64>) -> Option<Vec<u64>> {
        match event {
            Some(id) => self.placement.get(id).map(|_| vec![id]),
            None => Some(self.persistent.iter().collect()),
        }
    }

    /// See [`Placement::begin_flush`].
    pub(crate) fn begin_flush(&self, ids: &[u64]) -> BTreeSet<Visit> {
        self.placement.begin_flush(ids)
    }

    /// See [`Placement::end_flush`].
    pub(crate) fn end_flush(&self, id: u64) -> Result<(), Errno> {
        self.placement.end_flush(id)
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

fn refused(asked: &Persist, errno: Errno) -> PersistError {
    match errno {
        Errno::EOPNOTSUPP => PersistError::Refused {
            event: asked.event.clone(),
            why: "the configured engine cannot take the requested samples",
        },
        errno => PersistError::Host(io::Error::from(errno)),
    }
}

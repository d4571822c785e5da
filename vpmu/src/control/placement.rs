//! Where each event is: its entry, the shard that holds it, and the group in which it counts.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::request::steers;
use crate::abi::{COMMAND_IN, Command, OPEN_PERSISTENT, OPEN_PINNED, OpenRequest, Reply};
use crate::errno::Errno;
use crate::event::{Event, Group, GroupEvent, LastCounts};
use crate::flush::Visit;
use crate::persistent::Persistence;
use crate::record::{SAMPLE_READ, read_size};
use crate::shard::{Core, Errand, Shard, State, event_command};
use crate::spec::{Context, EventSpec};
use crate::work;

/// Maximum size, in bytes, of a group's counts in a record, as in perf. The limit leaves space for the record's
/// other fields.
const LONGEST_READING: usize = 16 << 10;

/// The state that the control plane keeps for an event.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) spec: Arc<EventSpec>,
    /// The context in the request that opened the event. For a task event, it does not contain the vCPU that runs the
    /// task.
    pub(super) context: Context,
    /// The index of the event's shard.
    pub(super) shard: u32,
    /// Whether the event has a period and can therefore overflow.
    pub(super) samples: bool,
    pub(super) leader: Option<u64>,
    /// The events of the group that this event leads, oldest first.
    pub(super) members: Vec<u64>,
    /// For a leader, whether it is enabled and not in the error state.
    pub(super) on: Arc<AtomicBool>,
    pub(super) counts: Arc<LastCounts>,
    pub(super) persistence: Option<Persistence>,
}

impl Entry {
    pub(super) fn new(event: &Event, shard: u32, leader: Option<u64>, persistence: Option<Persistence>) -> Self {
        Self {
            spec: Arc::clone(&event.spec),
            context: match event.schedule.context {
                Context::Task(_) => Context::Task(None),
                of_vcpu => of_vcpu,
            },
            shard,
            samples: event.overflows.period().is_some(),
            leader,
            members: Vec::new(),
            on: Arc::default(),
            counts: Arc::default(),
            persistence,
        }
    }

    pub(super) fn is_operators(&self) -> bool {
        let known = self.persistence.as_ref();
        known.is_some_and(|persistence| persistence.operator)
    }

    /// Whether the event samples or is a trace.
    pub(super) fn makes_records(&self) -> bool {
        self.samples || self.spec.is_trace()
    }
}

/// All events, and the shards that hold them.
#[derive(Debug)]
pub(super) struct Placement {
    shards: Arc<[Shard]>,
    /// An entry for each event. The event itself is in the entry's shard. The leader of a member's group has the member
    /// among its own members.
    events: BTreeMap<u64, Entry>,
    /// The id of the next event. Ids are never reused.
    next_id: u64,
}

impl Placement {
    pub(super) fn new(shards: &Arc<[Shard]>) -> Self {
        Self { shards: Arc::clone(shards), events: BTreeMap::new(), next_id: 1 }
    }

    pub(super) fn shards(&self) -> &[Shard] {
        &self.shards
    }

    // Entries.

    pub(super) fn get(&self, id: u64) -> Option<&Entry> {
        self.events.get(&id)
    }

    /// Only for changes to the event's persistence.
    pub(super) fn get_mut(&mut self, id: u64) -> Option<&mut Entry> {
        self.events.get_mut(&id)
    }

    /// Ids of all events, ascending.
    pub(super) fn ids(&self) -> Vec<u64> {
        self.events.keys().copied().collect()
    }

    /// Number of events.
    pub(super) fn len(&self) -> usize {
        self.events.len()
    }

    pub(super) fn next_id(&self) -> u64 {
        self.next_id
    }

    /// Sets the id of the next event. Only for a restore.
    pub(super) fn set_next_id(&mut self, id: u64) {
        self.next_id = id;
    }

    /// Adds an entry. The event must then be added to the entry's shard.
    pub(super) fn insert(&mut self, id: u64, entry: Entry) {
        self.next_id = self.next_id.max(id + 1);
        self.events.insert(id, entry);
    }

    /// Removes the entry of an event that is no longer in a shard. The caller must leave the group.
    pub(super) fn remove(&mut self, id: u64) -> Option<Entry> {
        self.events.remove(&id)
    }

    /// Whether the operator owns an event. The guest can read such an event, but not change it.
    pub(super) fn is_operators(&self, id: u64) -> bool {
        self.get(id).is_some_and(Entry::is_operators)
    }

    /// The error for a request that needs a ring or an area of an event that has none.
    pub(super) fn not_mapped(&self, id: u64) -> Errno {
        if self.events.contains_key(&id) { Errno::EINVAL } else { Errno::ENOENT }
    }

    // Shards.

    /// Calls `act` on a shard, and then executes the work that the call deferred to other shards.
    pub(super) fn on<T>(&self, shard: u32, act: impl FnOnce(&mut State) -> T) -> T {
        let (result, errands) = self.shards[shard as usize].with(act);
        self.run(errands);
        result
    }

    /// Like [`Placement::on`], for the shard of the event `id`. Returns `None` if the event does not exist.
    pub(super) fn with_event<T>(&self, id: u64, act: impl FnOnce(&mut State) -> T) -> Option<T> {
        let shard = self.events.get(&id)?.shard;
        Some(self.on(shard, act))
    }

    /// Like [`Placement::with_event`], for an operation on the event that affects no other event.
    pub(super) fn on_event<T>(&self, id: u64, act: impl FnOnce(&mut Core, &mut Event) -> T) -> Option<T> {
        self.with_event(id, |state| state.with(id, act))?
    }

    /// Executes work that shards deferred to other shards, and any further work that results from it.
    pub(super) fn run(&self, errands: Vec<Errand>) {
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
    /// vCPU that notified the queue.
    pub(super) fn command(&mut self, command: &Command, of: u32, by: u32) -> Reply {
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

    /// The shard for a new event: the shard of its vCPU or, for a task event without a vCPU, the first shard
    /// whose vCPU has a thread.
    pub(super) fn first_shard(&self, context: Context) -> u32 {
        match context {
            Context::Vcpu(vcpu) | Context::Task(Some(vcpu)) => vcpu,
            Context::Task(None) => (0..)
                .zip(self.shards.iter())
                .find(|(_, shard)| shard.vcpu.thread().is_some())
                .map_or(0, |(index, _)| index),
        }
    }

    // Families and groups.

    /// Returns the owner of the family that a child joins. `None` if the request has no parent.
    pub(super) fn owner(&self, request: &OpenRequest) -> Result<Option<u64>, Errno> {
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
    pub(super) fn leader(&self, request: &OpenRequest, context: Context) -> Result<Option<u64>, Errno> {
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
        let mut formats = led.map(|event| event.spec.request.layout.read_format).chain([format]);
        if formats.any(|format| read_size(format, size) > LONGEST_READING) {
            return Err(Errno::E2BIG);
        }
        Ok(Some(id))
    }

    /// Returns the events of the group that `leader` leads: the leader, then its members, oldest first. Charges the
    /// examination of all of them.
    pub(super) fn group(&self, leader: u64) -> Vec<u64> {
        let entry = self.events.get(&leader);
        let members = entry.map_or(&[][..], |entry| &entry.members);
        work::charge_examined(1 + members.len());
        [leader].iter().chain(members).copied().collect()
    }

    /// Adds a new event to the group of `leader`, and publishes the changed group to the events that were already in
    /// it.
    pub(super) fn grow_group(&mut self, leader: u64, id: u64) -> Option<Arc<Group>> {
        if let Some(entry) = self.events.get_mut(&leader) {
            entry.members.push(id);
        }
        self.publish_group(leader, Some(id))
    }

    /// Removes an event from the group of `leader`.
    pub(super) fn leave_group(&mut self, leader: u64, id: u64) {
        if let Some(entry) = self.events.get_mut(&leader) {
            entry.members.retain(|&member| member != id);
            self.publish_group(leader, None);
        }
    }

    /// Removes an ended event from its group. If it led the group, its members leave the group, too.
    pub(super) fn disband(&mut self, id: u64, entry: &Entry) {
        for &member in &entry.members {
            if let Some(entry) = self.events.get_mut(&member) {
                entry.leader = None;
            }
            self.with_event(member, |state| state.join(member, None));
        }
        if let Some(leader) = entry.leader {
            self.leave_group(leader, id);
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

    /// Checks that one event may start or stop another.
    pub(super) fn check_link(&self, id: u64, target: u64) -> Result<(), Errno> {
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

    // Flushes requested by the VMM.

    /// Begins a flush of the events `ids`. Skips every event for which the host cannot have pending overflows (see
    /// [`Event::may_hold`]). For each remaining event whose vCPU is outside the guest, writes the overflows now. For each
    /// remaining event whose vCPU is in the guest, adds the vCPU's current visit (the time from entry to exit) to the
    /// returned set.
    pub(super) fn begin_flush(&self, ids: &[u64]) -> BTreeSet<Visit> {
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
    pub(super) fn end_flush(&self, id: u64) -> Result<(), Errno> {
        let published = self.with_event(id, |state| {
            state.events.flush_batched();
            state.publish_all(id)
        });
        published.unwrap_or(Err(Errno::ENOENT))
    }
}

fn log_refused(id: u64, result: Result<(), Errno>) {
    if let Err(errno) = result {
        log::debug!("event {id} cannot start or stop with its leader: errno {}", errno.get());
    }
}

//! The counts in records: those of an event, or of its whole group.

use std::io;
use std::sync::Arc;

use super::core::Core;
use super::map::{ById, EventMap};
use crate::event::{Group, GroupEvent};
use crate::record::{Member, Reading};
use crate::work;
use vpmu_perf::field::FORMAT_GROUP;

/// The counts of an event or of its group at one moment. The leader's count is first.
#[derive(Debug, Default)]
pub(super) struct Counts {
    time_enabled: u64,
    time_running: u64,
    members: Arc<[Member]>,
}

/// The events whose counters the host has revoked, with the host's errors. The caller must put them in the error state.
pub(super) type Revoked = Vec<(u64, io::Error)>;

impl Counts {
    pub(super) fn reading(&self) -> Reading<'_> {
        Reading { time_enabled: self.time_enabled, time_running: self.time_running, members: &self.members }
    }
}

/// The counts of groups, by leader, that were read for records of the current exit. Later records of the exit use the
/// same counts, because the time to read a group is proportional to the group's size.
#[derive(Debug, Default)]
pub(super) struct GroupCounts(ById<Arc<[Member]>>);

impl GroupCounts {
    /// Forgets all counts, because they are out of date.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Returns the current counts for a record of an event: the event's own counts or, if `read_format` requires it,
    /// the counts of its whole group. If `keeps`, later calls for the same group return the same counts.
    pub(super) fn read(&mut self, core: &mut Core, map: &mut EventMap, id: u64, keeps: bool) -> (Counts, Revoked) {
        let mut revoked = Vec::new();
        let Some(event) = map.get(id) else {
            return (Counts::default(), revoked);
        };
        let grouped = event.spec.request.layout.read_format & FORMAT_GROUP != 0;
        let (owner, group) = (event.spec.owner, event.membership.group().cloned());
        let members = match group.filter(|_| grouped) {
            Some(group) => self.group(core, map, &group, keeps, &mut revoked),
            None => read_event(core, map, id, owner, &mut revoked).into_iter().collect(),
        };
        let clock = core.cpu.backend.clock;
        let times = map.get(id).map(|event| event.counts(clock));
        let counts = Counts {
            time_enabled: times.map_or(0, |times| times.time_enabled),
            time_running: times.map_or(0, |times| times.time_running),
            members,
        };
        (counts, revoked)
    }

    /// Returns the counts of a group. The leader's count is first. The counts of members in other shards are the counts
    /// at their last update.
    fn group(
        &mut self,
        core: &mut Core,
        map: &mut EventMap,
        group: &Group,
        keeps: bool,
        revoked: &mut Revoked,
    ) -> Arc<[Member]> {
        if let Some(members) = self.0.get(&group.leader) {
            return Arc::clone(members);
        }
        let read = |event: &GroupEvent| {
            let elsewhere = || {
                work::charge(1);
                let (value, lost) = event.counts.get();
                let id = event.owner;
                Member { value, id, lost }
            };
            let here = read_event(core, map, event.id, event.owner, revoked);
            here.unwrap_or_else(elsewhere)
        };
        let members: Arc<[Member]> = group.events.iter().map(read).collect();
        if keeps {
            self.0.insert(group.leader, Arc::clone(&members));
        }
        members
    }
}

/// Returns the current count of an event. `None` if the event is not in this shard.
fn read_event(core: &mut Core, map: &mut EventMap, id: u64, owner: u64, revoked: &mut Revoked) -> Option<Member> {
    let clock = core.cpu.backend.clock;
    let event = map.get_mut(id)?;
    let updated = event.update(&mut core.cpu);
    let member = Member { value: event.counts(clock).count, id: owner, lost: event.lost() };
    revoked.extend(updated.err().map(|error| (id, error)));
    Some(member)
}

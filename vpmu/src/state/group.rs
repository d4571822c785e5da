//! Groups: events that count while their leader is enabled, and are read as one.

use super::State;
use crate::event::Host;
use crate::record::{Member, Reading, SAMPLE_READ};

/// perf's `PERF_FORMAT_GROUP`.
const FORMAT_GROUP: u64 = 1 << 3;

/// The counts of an event or of its group at one moment, leader first.
#[derive(Debug, Default)]
pub(crate) struct Snapshot {
    time_enabled: u64,
    time_running: u64,
    members: Vec<Member>,
}

impl Snapshot {
    pub(crate) fn reading(&self) -> Reading<'_> {
        Reading {
            time_enabled: self.time_enabled,
            time_running: self.time_running,
            members: &self.members,
        }
    }
}

impl State {
    /// Whether an event has no leader, or one that is on.
    pub(super) fn is_led_on(&self, id: u64) -> bool {
        let leader = self.events.get(&id).and_then(|event| event.leader);
        leader.is_none_or(|leader| {
            let leader = self.events.get(&leader);
            leader.is_some_and(|leader| leader.enabled && !leader.has_failed())
        })
    }

    /// Starts those of a leader's that are enabled; one that cannot be is in error by itself.
    pub(super) fn start_members(&mut self, host: &Host<'_>, leader: u64) {
        for id in self.members(leader) {
            if let Err(errno) = self.start(host, id) {
                log::debug!("event {id} of group {leader}: errno {}", errno.get());
            }
        }
    }

    /// Stops those that a leader leads; one that cannot be is in error by itself.
    pub(super) fn stop_members(&mut self, host: &Host<'_>, leader: u64) {
        for id in self.members(leader) {
            if let Err(errno) = self.stop(host, id) {
                log::debug!("event {id} of group {leader}: errno {}", errno.get());
            }
        }
    }

    /// Makes the members of a leader that goes events of their own.
    pub(super) fn disband(&mut self, host: &Host<'_>, leader: u64) {
        let members = self.members(leader);
        for id in &members {
            if let Some(event) = self.events.get_mut(id) {
                event.leader = None;
            }
        }
        for id in members {
            if let Err(errno) = self.start(host, id) {
                log::debug!("event {id}, on its own now: errno {}", errno.get());
            }
        }
    }

    /// The counts that a record of an event holds, as they are now: its group's, all read at this
    /// exit, where its `read_format` says so.
    pub(super) fn snapshot(&mut self, host: &Host<'_>, id: u64) -> Snapshot {
        let Some(event) = self.events.get(&id) else {
            return Snapshot::default();
        };
        let mut ids = vec![id];
        if event.facts.layout.read_format & FORMAT_GROUP != 0 {
            let leader = event.leader.unwrap_or(id);
            ids = vec![leader];
            ids.extend(self.members(leader));
        }
        let mut snapshot = Snapshot::default();
        let mut broken = Vec::new();
        for member in ids {
            let Some(event) = self.events.get_mut(&member) else {
                continue;
            };
            if let Err(error) = event.update(host) {
                broken.push((member, error));
            }
            let face = event.face(self.clock);
            if member == id {
                snapshot.time_enabled = face.time_enabled;
                snapshot.time_running = face.time_running;
            }
            snapshot.members.push(Member {
                value: face.count,
                id: event.facts.owner,
                lost: event.lost(),
            });
        }
        for (member, error) in broken {
            self.fail(host, member, error);
        }
        snapshot
    }

    /// As [`State::snapshot`], if the samples of the event hold such.
    pub(super) fn sampled_snapshot(&mut self, host: &Host<'_>, id: u64) -> Snapshot {
        match self.events.get(&id) {
            Some(event) if event.facts.layout.has(SAMPLE_READ) => self.snapshot(host, id),
            _ => Snapshot::default(),
        }
    }

    /// Those that an event leads, oldest first.
    pub(crate) fn members(&self, leader: u64) -> Vec<u64> {
        let led = self
            .events
            .range(leader..)
            .filter(|(_, event)| event.leader == Some(leader));
        led.map(|(&id, _)| id).collect()
    }
}

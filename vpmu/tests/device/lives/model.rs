//! What becomes of events that persist, start and stop each other, in the fewest words that say it.
//! They count marks, so that each step has one outcome.

use std::collections::{BTreeMap, BTreeSet};

use vpmu::abi::*;

use crate::rig::Errno;

/// Most persistent events of the guest's.
pub(super) const MOST: usize = 3;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Event {
    pub(super) vcpu: u32,
    /// The mark that it counts, or `MARK_ANY`.
    pub(super) config: u64,
    /// Zero: it only counts.
    pub(super) period: u64,
    pub(super) enabled: bool,
    pub(super) paused: bool,
    pub(super) count: u64,
    /// What of its period is over.
    pub(super) progress: u64,
    /// Overflows until it is off; zero: no limit.
    pub(super) limit: u64,
    pub(super) lost: u64,
    /// Of a persistent one.
    pub(super) name: Option<String>,
    pub(super) operator: bool,
    pub(super) ring: Option<Ring>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Ring {
    pub(super) window: bool,
    /// Where each recorded mark was placed.
    pub(super) records: Vec<u64>,
}

/// Starter or stopper.
type Role = u32;

#[derive(Debug, Default)]
pub(super) struct Model {
    pub(super) events: BTreeMap<u64, Event>,
    /// Trigger, target.
    links: BTreeSet<(u64, u64, Role)>,
}

impl Model {
    pub(super) fn open(&mut self, id: u64, event: Event) {
        self.events.insert(id, event);
    }

    /// Why one more persistent event cannot be.
    pub(super) fn most(&self) -> Result<(), Errno> {
        let guests = |event: &&Event| event.name.is_some() && !event.operator;
        match self.events.values().filter(guests).count() < MOST {
            true => Ok(()),
            false => Err(libc::ENOSPC),
        }
    }

    pub(super) fn detach(&mut self, id: u64, name: Option<&str>) -> Result<(), Errno> {
        let event = self.guests(id)?.clone();
        let name = name.map(str::to_owned).or_else(|| event.name.clone());
        let name = name.unwrap_or_else(|| format!("event{id}"));
        let mut others = self.events.iter().filter(|(other, _)| **other != id);
        if others.any(|(_, other)| other.name.as_ref() == Some(&name)) {
            return Err(libc::EEXIST);
        }
        if event.name.is_none() {
            self.most()?;
        }
        self.guests(id)?.name = Some(name);
        Ok(())
    }

    pub(super) fn attach(&mut self, id: u64) -> Result<(), Errno> {
        self.guests(id)?.name.take().map(drop).ok_or(libc::EINVAL)
    }

    pub(super) fn close(&mut self, id: u64) -> Result<(), Errno> {
        if self.guests(id)?.name.is_some() {
            return Err(libc::EBUSY);
        }
        self.keep(|event, _| event != id);
        Ok(())
    }

    /// The operator ends one, whoever's.
    pub(super) fn end(&mut self, id: u64) -> bool {
        let ends = self
            .events
            .get(&id)
            .is_some_and(|event| event.name.is_some());
        self.keep(|event, _| event != id || !ends);
        ends
    }

    /// The driver goes: what persists and has no pages of the guest's stays as it is.
    pub(super) fn reset(&mut self) {
        self.keep(|_, event| {
            event.name.is_some() && event.ring.as_ref().is_none_or(|ring| ring.window)
        });
    }

    pub(super) fn map(&mut self, id: u64, window: bool) -> Result<(), Errno> {
        let event = self.guests(id)?;
        if window && event.name.is_none() {
            return Err(libc::EINVAL);
        }
        if event.ring.is_some() {
            return Err(libc::EBUSY);
        }
        event.ring = Some(Ring {
            window,
            records: Vec::new(),
        });
        Ok(())
    }

    pub(super) fn unmap(&mut self, id: u64) -> Result<(), Errno> {
        self.guests(id)?.ring.take().map(drop).ok_or(libc::EINVAL)
    }

    pub(super) fn link(&mut self, trigger: u64, target: u64, role: Role) -> Result<(), Errno> {
        let one = self.guests(trigger)?.clone();
        let other = self.guests(target)?;
        if trigger == target || one.vcpu != other.vcpu || one.period == 0 {
            return Err(libc::EINVAL);
        }
        let so = |&&(_, to, by): &&(u64, u64, Role)| (to, by) == (target, role);
        match self.links.iter().find(so) {
            Some(&(by, _, _)) if by == trigger => Err(libc::EEXIST),
            Some(_) => Err(libc::EBUSY),
            None => {
                self.links.insert((trigger, target, role));
                Ok(())
            }
        }
    }

    pub(super) fn command(&mut self, op: u32, id: u64, value: u64) -> Result<(), Errno> {
        let event = self.guests(id)?;
        match op {
            COMMAND_ENABLE => event.enabled = true,
            COMMAND_DISABLE => event.enabled = false,
            COMMAND_RESET => event.count = 0,
            COMMAND_REFRESH if value == 0 || event.period == 0 => return Err(libc::EINVAL),
            COMMAND_REFRESH => {
                event.limit += value;
                event.enabled = true;
            }
            other => panic!("command {other}"),
        }
        Ok(())
    }

    /// A flush by vCPU `vcpu`: nothing that it could show is ever held back here.
    pub(super) fn flush(&self, vcpu: u32, id: u64) -> Result<(), Errno> {
        match self.events.get(&id) {
            _ if id == 0 => Ok(()),
            None => Err(libc::ENOENT),
            Some(event) if event.enabled && event.vcpu != vcpu => Err(libc::EXDEV),
            Some(_) => Ok(()),
        }
    }

    /// First everything counts, then overflows act, then they are written.
    pub(super) fn mark(&mut self, vcpu: u32, value: u64, place: u64) {
        let mut overflowed = Vec::new();
        for (&id, event) in &mut self.events {
            let counts = event.enabled && !event.paused && event.vcpu == vcpu;
            if counts && [value, MARK_ANY].contains(&event.config) {
                event.count += 1;
                event.progress += 1;
                if event.progress == event.period {
                    event.progress = 0;
                    overflowed.push(id);
                }
            }
        }
        for id in overflowed {
            self.act(id);
            let Some(event) = self.events.get_mut(&id) else {
                continue;
            };
            match &mut event.ring {
                Some(ring) => ring.records.push(place),
                None => event.lost += 1,
            }
            if event.limit > 0 {
                event.limit -= 1;
                event.enabled &= event.limit > 0;
            }
        }
    }

    fn act(&mut self, trigger: u64) {
        for (&target, event) in &mut self.events {
            let linked = |role| self.links.contains(&(trigger, target, role));
            if event.enabled {
                event.paused = match (linked(LINK_STARTER), linked(LINK_STOPPER)) {
                    (true, true) => !event.paused,
                    (true, false) => false,
                    (false, true) => true,
                    (false, false) => event.paused,
                };
            }
        }
    }

    /// An event that the guest may change.
    fn guests(&mut self, id: u64) -> Result<&mut Event, Errno> {
        match self.events.get_mut(&id) {
            None => Err(libc::ENOENT),
            Some(event) if event.operator => Err(libc::EPERM),
            Some(event) => Ok(event),
        }
    }

    fn keep(&mut self, stays: impl Fn(u64, &Event) -> bool) {
        self.events.retain(|&id, event| stays(id, event));
        let events = &self.events;
        let has = |id: &u64| events.contains_key(id);
        self.links
            .retain(|(trigger, target, _)| has(trigger) && has(target));
    }
}

//! A minimal model of persistent events, and of events that start and stop each other. All of them count marks, so
//! that each step has exactly one correct outcome.

use std::collections::{BTreeMap, BTreeSet};

use vpmu::abi::*;
use vpmu_testkit::Errno;

/// The guest's limit of persistent events.
pub(super) const MOST: usize = 3;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Event {
    pub(super) context: Context,
    /// The event's leader, while the leader is open.
    pub(super) leader: Option<u64>,
    /// The value of the marks that the event counts, or `MARK_ANY`.
    pub(super) config: u64,
    /// Zero for a counting event.
    pub(super) period: u64,
    pub(super) enabled: bool,
    pub(super) paused: bool,
    pub(super) count: u64,
    /// The count since the last overflow.
    pub(super) progress: u64,
    /// The event is disabled after this number of further overflows. Zero means that there is no limit.
    pub(super) limit: u64,
    pub(super) lost: u64,
    /// The name of a persistent event.
    pub(super) name: Option<String>,
    pub(super) operator: bool,
    pub(super) ring: Option<Ring>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Context {
    Vcpu(u32),
    /// A task event. The field is the vCPU on which the event is scheduled in, if any.
    Task(Option<u32>),
}

impl Context {
    fn is_like(self, other: Self) -> bool {
        match (self, other) {
            (Self::Task(_), Self::Task(_)) => true,
            (one, other) => one == other,
        }
    }
}

impl Event {
    /// Returns the vCPU whose marks the event can count, or `None` for a task event that is scheduled out.
    fn place(&self) -> Option<u32> {
        match self.context {
            Context::Vcpu(vcpu) => Some(vcpu),
            Context::Task(vcpu) => vcpu,
        }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Ring {
    pub(super) window: bool,
    /// The address of each recorded mark.
    pub(super) records: Vec<u64>,
}

/// Starter or stopper.
type Role = u32;

#[derive(Debug, Default)]
pub(super) struct Model {
    pub(super) events: BTreeMap<u64, Event>,
    /// Trigger, target, role.
    links: BTreeSet<(u64, u64, Role)>,
}

impl Model {
    /// Returns the vCPU on which an event is active.
    pub(super) fn active_on(&self, id: u64) -> Option<u32> {
        let event = self.events.get(&id)?;
        let leader = event.leader.and_then(|leader| self.events.get(&leader));
        let led_on = leader.is_none_or(|leader| leader.enabled);
        event.place().filter(|_| event.enabled && led_on)
    }

    pub(super) fn state(&self, id: u64) -> i32 {
        let enabled = self.events.get(&id).is_some_and(|event| event.enabled);
        match (enabled, self.active_on(id)) {
            (false, _) => STATE_OFF,
            (true, None) => STATE_INACTIVE,
            (true, Some(_)) => STATE_ACTIVE,
        }
    }

    /// Returns whether a new event like `event` can have `leader` as its leader.
    pub(super) fn can_lead(&self, leader: u64, event: &Event) -> bool {
        self.events.get(&leader).is_some_and(|leader| {
            leader.leader.is_none()
                && leader.name.is_none()
                && event.name.is_none()
                && leader.context.is_like(event.context)
        })
    }

    fn is_grouped(&self, id: u64) -> bool {
        let led = |event: &Event| event.leader == Some(id);
        let own = self.events.get(&id).and_then(|event| event.leader);
        own.is_some() || self.events.values().any(led)
    }

    /// Schedules a task event in or out on a vCPU.
    pub(super) fn schedule(&mut self, id: u64, vcpu: u32, into: bool) -> Result<(), Errno> {
        let event = self.events.get_mut(&id).ok_or(libc::ENOENT)?;
        let (from, to) = if into { (None, Some(vcpu)) } else { (Some(vcpu), None) };
        if event.context != Context::Task(from) {
            return Err(libc::EINVAL);
        }
        event.context = Context::Task(to);
        Ok(())
    }

    pub(super) fn open(&mut self, id: u64, event: Event) {
        self.events.insert(id, event);
    }

    /// Checks the limit of persistent events.
    pub(super) fn most(&self) -> Result<(), Errno> {
        let guests = |event: &&Event| event.name.is_some() && !event.operator;
        if self.events.values().filter(guests).count() < MOST { Ok(()) } else { Err(libc::ENOSPC) }
    }

    pub(super) fn detach(&mut self, id: u64, name: Option<&str>) -> Result<(), Errno> {
        let event = self.guests(id)?.clone();
        if matches!(event.context, Context::Task(_)) || self.is_grouped(id) {
            return Err(libc::EINVAL);
        }
        let own = format!("event{id}");
        if name.is_some_and(|name| name.starts_with("event") && name != own) {
            return Err(libc::EINVAL);
        }
        let name = name.map(str::to_owned).or_else(|| event.name.clone());
        let name = name.unwrap_or(own);
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

    /// Makes the operator end a persistent event of the guest or of the operator. Returns false if no such event
    /// exists.
    pub(super) fn end(&mut self, id: u64) -> bool {
        let ends = self.events.get(&id).is_some_and(|event| event.name.is_some());
        self.keep(|event, _| event != id || !ends);
        ends
    }

    /// Resets the device and activates it again. Only persistent events without guest pages remain.
    pub(super) fn reset(&mut self) {
        self.keep(|_, event| event.name.is_some() && event.ring.as_ref().is_none_or(|ring| ring.window));
    }

    pub(super) fn map(&mut self, id: u64, window: bool) -> Result<(), Errno> {
        let event = self.guests(id)?;
        if window && event.name.is_none() {
            return Err(libc::EINVAL);
        }
        if event.ring.is_some() {
            return Err(libc::EBUSY);
        }
        event.ring = Some(Ring { window, records: Vec::new() });
        Ok(())
    }

    pub(super) fn unmap(&mut self, id: u64) -> Result<(), Errno> {
        self.guests(id)?.ring.take().map(drop).ok_or(libc::EINVAL)
    }

    pub(super) fn link(&mut self, trigger: u64, target: u64, role: Role) -> Result<(), Errno> {
        let one = self.guests(trigger)?.clone();
        let other = self.guests(target)?;
        if trigger == target || !one.context.is_like(other.context) || one.period == 0 {
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
            other => panic!("the model lacks command {other}"),
        }
        Ok(())
    }

    /// A flush by vCPU `vcpu`. It changes nothing in this model, because samples of marks are written immediately.
    pub(super) fn flush(&self, vcpu: u32, id: u64) -> Result<(), Errno> {
        match self.events.get(&id) {
            _ if id == 0 => Ok(()),
            None => Err(libc::ENOENT),
            Some(_) if self.active_on(id).is_some_and(|on| on != vcpu) => Err(libc::EXDEV),
            Some(_) => Ok(()),
        }
    }

    /// First, all events count the mark. Then each event that overflowed starts and stops its targets, and writes its
    /// record.
    pub(super) fn mark(&mut self, vcpu: u32, value: u64, place: u64) {
        let mut overflowed = Vec::new();
        let ids: Vec<u64> = self.events.keys().copied().collect();
        for id in ids {
            let active = self.active_on(id) == Some(vcpu);
            let Some(event) = self.events.get_mut(&id).filter(|_| active) else {
                continue;
            };
            if !event.paused && [value, MARK_ANY].contains(&event.config) {
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
        let ids: Vec<u64> = self.events.keys().copied().collect();
        for target in ids {
            let linked = |role| self.links.contains(&(trigger, target, role));
            let active = self.active_on(target).is_some();
            if let Some(event) = self.events.get_mut(&target).filter(|_| active) {
                event.paused = match (linked(LINK_STARTER), linked(LINK_STOPPER)) {
                    (true, true) => !event.paused,
                    (true, false) => false,
                    (false, true) => true,
                    (false, false) => event.paused,
                };
            }
        }
    }

    /// Returns event `id` if the guest may change it, and an errno otherwise.
    fn guests(&mut self, id: u64) -> Result<&mut Event, Errno> {
        match self.events.get_mut(&id) {
            None => Err(libc::ENOENT),
            Some(event) if event.operator => Err(libc::EPERM),
            Some(event) => Ok(event),
        }
    }

    fn keep(&mut self, stays: impl Fn(u64, &Event) -> bool) {
        self.events.retain(|&id, event| stays(id, event));
        let left: BTreeSet<u64> = self.events.keys().copied().collect();
        let has = |id: &u64| left.contains(id);
        for event in self.events.values_mut() {
            event.leader = event.leader.filter(has);
        }
        self.links.retain(|(trigger, target, _)| has(trigger) && has(target));
    }
}

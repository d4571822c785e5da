//! Links between events. An overflow of one event, the trigger, starts or stops other events, the targets. This module
//! knows events only by their ids.

use std::collections::BTreeMap;

use crate::saved::saved;
use crate::work;

/// Whether an event starts or stops another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub(crate) enum Role {
    Starter,
    Stopper,
}

/// The effect of an overflow on a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effect {
    Start,
    Stop,
    /// The trigger is both starter and stopper. Its overflow pauses a running target, and resumes a paused target.
    Toggle,
}

/// Errors of linking two events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refused {
    #[error("already linked")]
    Linked,
    #[error("the target already has an event in the same role (starter or stopper)")]
    Taken,
}

#[derive(Debug, Clone, Copy, Default)]
struct Link {
    /// Whether the trigger is the target's starter. A target has at most one starter and one
    /// stopper.
    starts: bool,
    stops: bool,
    /// The role that [`Links::steer`] gave the trigger. The target is then the leader of the trigger's group. Any
    /// number of the group's members may have the same role.
    steers: Option<Role>,
}

impl Link {
    /// Whether [`Links::link`] gave the trigger this role.
    fn takes(self, role: Role) -> bool {
        match role {
            Role::Starter => self.starts,
            Role::Stopper => self.stops,
        }
    }

    fn has(self, role: Role) -> bool {
        self.takes(role) || self.steers == Some(role)
    }

    fn take(&mut self, role: Role) {
        match role {
            Role::Starter => self.starts = true,
            Role::Stopper => self.stops = true,
        }
    }
}

saved! {
    /// An event that starts or stops another.
    pub(crate) struct SavedLink {
        pub(crate) trigger: u64,
        pub(crate) target: u64,
        pub(crate) role: Role,
    }
}

/// All links of a device.
#[derive(Debug, Default)]
pub(crate) struct Links {
    /// Keyed by trigger (the event that overflows), then target.
    links: BTreeMap<(u64, u64), Link>,
}

impl Links {
    /// Makes `trigger` the starter or stopper of `target`. A target can have one starter and one stopper.
    ///
    /// # Errors
    /// [`Refused`]; the links are then unchanged.
    pub(crate) fn link(&mut self, trigger: u64, target: u64, role: Role) -> Result<(), Refused> {
        if self.links.get(&(trigger, target)).is_some_and(|link| link.has(role)) {
            return Err(Refused::Linked);
        }
        work::charge_examined(self.links.len());
        let taken = |(&(_, other), link): (&(u64, u64), &Link)| other == target && link.takes(role);
        if self.links.iter().any(taken) {
            return Err(Refused::Taken);
        }
        self.links.entry((trigger, target)).or_default().take(role);
        Ok(())
    }

    /// Makes `member`, an event in the group of `leader`, pause or resume the leader. Any number of
    /// members may do so.
    pub(crate) fn steer(&mut self, member: u64, leader: u64, role: Role) {
        let link = self.links.entry((member, leader)).or_default();
        link.steers = Some(role);
    }

    /// Returns the links made by [`Links::link`]. Each has a trigger, a target and a role.
    pub(crate) fn asked(&self) -> impl Iterator<Item = (u64, u64, Role)> {
        let roles = [Role::Starter, Role::Stopper];
        self.links.iter().flat_map(move |(&(trigger, target), &link)| {
            let taken = roles.into_iter().filter(move |&role| link.takes(role));
            taken.map(move |role| (trigger, target, role))
        })
    }

    /// Returns the targets of `trigger`, and the effect that an overflow has on each target.
    pub(crate) fn effects(&self, trigger: u64) -> impl Iterator<Item = (u64, Effect)> {
        let of_trigger = self.links.range((trigger, 0)..=(trigger, u64::MAX));
        of_trigger.filter_map(|(&(_, target), link)| {
            let effect = match (link.has(Role::Starter), link.has(Role::Stopper)) {
                (true, true) => Effect::Toggle,
                (true, false) => Effect::Start,
                (false, true) => Effect::Stop,
                (false, false) => return None,
            };
            Some((target, effect))
        })
    }

    /// Removes all links of a closed event, whether the event was the trigger or the target. Returns the triggers that
    /// had the event as their target.
    pub(crate) fn forget(&mut self, event: u64) -> Vec<u64> {
        work::charge_examined(self.links.len());
        let ends = self.links.keys();
        let triggers = ends.filter(|&&(_, target)| target == event);
        let triggers = triggers.map(|&(trigger, _)| trigger).collect();
        self.links.retain(|&(trigger, target), _| trigger != event && target != event);
        triggers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn effects(links: &Links, trigger: u64) -> Vec<(u64, Effect)> {
        links.effects(trigger).collect()
    }

    #[test]
    fn target_has_one_of_each_role() {
        let mut links = Links::default();
        assert_eq!(links.link(1, 9, Role::Starter), Ok(()));
        assert_eq!(links.link(1, 9, Role::Starter), Err(Refused::Linked));
        assert_eq!(links.link(2, 9, Role::Starter), Err(Refused::Taken));
        assert_eq!(links.link(2, 9, Role::Stopper), Ok(()));
        assert_eq!(links.link(1, 9, Role::Stopper), Err(Refused::Taken));
        assert_eq!(effects(&links, 1), [(9, Effect::Start)]);
        assert_eq!(effects(&links, 2), [(9, Effect::Stop)]);
    }

    #[test]
    fn both_roles_toggle_and_one_event_has_many_targets() {
        let mut links = Links::default();
        for (target, role) in [(7, Role::Starter), (8, Role::Starter), (8, Role::Stopper), (6, Role::Stopper)] {
            assert_eq!(links.link(1, target, role), Ok(()));
        }
        let all = [(6, Effect::Stop), (7, Effect::Start), (8, Effect::Toggle)];
        assert_eq!(effects(&links, 1), all);
        assert_eq!(effects(&links, 2), []);
    }

    #[test]
    fn members_that_steer_take_no_role() {
        let mut links = Links::default();
        links.steer(1, 9, Role::Stopper);
        links.steer(2, 9, Role::Stopper);
        assert_eq!(links.link(1, 9, Role::Stopper), Err(Refused::Linked));
        assert_eq!(links.link(3, 9, Role::Stopper), Ok(()));
        for trigger in 1..=3 {
            assert_eq!(effects(&links, trigger), [(9, Effect::Stop)]);
        }
    }

    #[test]
    fn members_that_steer_are_starters_and_stoppers_like_others() {
        let mut links = Links::default();
        links.steer(1, 9, Role::Stopper);
        assert_eq!(links.link(1, 9, Role::Starter), Ok(()));
        assert_eq!(effects(&links, 1), [(9, Effect::Toggle)]);
        assert_eq!(links.link(2, 9, Role::Starter), Err(Refused::Taken));
    }

    #[test]
    fn links_go_with_either_end() {
        let mut links = Links::default();
        for (trigger, target) in [(1, 2), (2, 3), (3, 1)] {
            assert_eq!(links.link(trigger, target, Role::Starter), Ok(()));
        }
        links.forget(2);
        assert_eq!(effects(&links, 1), []);
        assert_eq!(effects(&links, 2), []);
        assert_eq!(effects(&links, 3), [(1, Effect::Start)]);
        assert_eq!(links.link(1, 3, Role::Starter), Ok(()), "free again");
    }
}

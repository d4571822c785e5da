//! The events that a guest may open, according to the operator's lists.

use crate::abi::{
    EXIT_HLT, EXIT_IO, EXIT_MMIO, EXIT_OTHER, EXIT_SIGNAL, EXIT_USER, KIND_EXIT_TRACE, KIND_EXITS, KIND_GUEST_TIME,
    KIND_HALTS, KIND_HARDWARE, KIND_HW_CACHE, KIND_MARK, KIND_RAW, KIND_SAMPLE_TRACE, KIND_SOFTWARE, KIND_TSC,
    KIND_VMM_TRACE,
};
use crate::kind::{Kind, Pace};

/// Matches the events of one kind whose config equals `config` in the bits of `mask`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct EventMatch {
    /// One of `KIND_*`.
    pub kind: u32,
    /// The config to match, in the bits of `mask`.
    pub config: u64,
    /// The bits to compare. Zero matches every event of the kind.
    pub mask: u64,
}

impl EventMatch {
    /// Matches one config.
    #[must_use]
    pub const fn one(kind: u32, config: u64) -> Self {
        Self { kind, config, mask: u64::MAX }
    }

    /// Matches every event of a kind.
    #[must_use]
    pub const fn kind(kind: u32) -> Self {
        Self { kind, config: 0, mask: 0 }
    }

    /// Whether `self` matches every event that `other` matches.
    #[must_use]
    pub fn covers(&self, other: &Self) -> bool {
        self.kind == other.kind && self.mask & !other.mask == 0 && (self.config ^ other.config) & self.mask == 0
    }

    /// The events that `self` and `other` have in common, if any.
    fn meet(&self, other: &Self) -> Option<Self> {
        let both = self.mask & other.mask;
        let meets = self.kind == other.kind && (self.config ^ other.config) & both == 0;
        meets.then_some(Self {
            kind: self.kind,
            config: self.config & self.mask | other.config & other.mask,
            mask: self.mask | other.mask,
        })
    }
}

/// Predefined lists of events, for operators.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Tier {
    /// Clocks, marks, and those kinds of exits that the VMM counts. This tier excludes hardware counters, traces, and
    /// the host's other software events and statistics.
    Clocks,
    /// [`Tier::Clocks`], plus the CPU's generic and cache events, the host's software events and statistics,
    /// and traces.
    #[default]
    Standard,
    /// [`Tier::Standard`], plus raw events: all events that the host counts.
    Full,
}

const CLOCKS: [EventMatch; 11] = [
    // PERF_COUNT_SW_CPU_CLOCK and PERF_COUNT_SW_TASK_CLOCK.
    EventMatch::one(KIND_SOFTWARE, 0),
    EventMatch::one(KIND_SOFTWARE, 1),
    EventMatch::kind(KIND_TSC),
    EventMatch::kind(KIND_GUEST_TIME),
    EventMatch::kind(KIND_MARK),
    EventMatch::one(KIND_EXITS, EXIT_USER),
    EventMatch::one(KIND_EXITS, EXIT_IO),
    EventMatch::one(KIND_EXITS, EXIT_MMIO),
    EventMatch::one(KIND_EXITS, EXIT_HLT),
    EventMatch::one(KIND_EXITS, EXIT_SIGNAL),
    EventMatch::one(KIND_EXITS, EXIT_OTHER),
];

const STANDARD: [EventMatch; 11] = [
    EventMatch::kind(KIND_HARDWARE),
    EventMatch::kind(KIND_SOFTWARE),
    EventMatch::kind(KIND_HW_CACHE),
    EventMatch::kind(KIND_TSC),
    EventMatch::kind(KIND_EXITS),
    EventMatch::kind(KIND_HALTS),
    EventMatch::kind(KIND_GUEST_TIME),
    EventMatch::kind(KIND_MARK),
    EventMatch::kind(KIND_EXIT_TRACE),
    EventMatch::kind(KIND_SAMPLE_TRACE),
    EventMatch::kind(KIND_VMM_TRACE),
];

impl Tier {
    /// Returns the events of the tier. A host may be unable to count some of them.
    #[must_use]
    pub fn events(self) -> Vec<EventMatch> {
        match self {
            Self::Clocks => CLOCKS.to_vec(),
            Self::Standard => STANDARD.to_vec(),
            Self::Full => [STANDARD.as_slice(), &[EventMatch::kind(KIND_RAW)]].concat(),
        }
    }
}

/// Which of the host's events a guest may open. A policy restricts only the guest. The operator can make any event
/// persistent, and the guest may then read that event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    allowed: Vec<EventMatch>,
    denied: Vec<EventMatch>,
}

impl Default for Policy {
    /// All events of the host.
    fn default() -> Self {
        Self::new(Tier::Full.events(), Vec::new())
    }
}

impl Policy {
    /// Permits events that are `allowed` and not `denied`.
    #[must_use]
    pub const fn new(allowed: Vec<EventMatch>, denied: Vec<EventMatch>) -> Self {
        Self { allowed, denied }
    }

    /// Whether the guest may open this event. A trace is also denied if its packets contain a denied event's data, or
    /// if the overflows of a denied event trigger its samples.
    #[must_use]
    pub fn allows(&self, kind: u32, config: u64) -> bool {
        self.allows_some(&EventMatch::one(kind, config))
    }

    /// Whether the guest may open any of the events that `of` matches.
    #[must_use]
    pub fn allows_some(&self, of: &EventMatch) -> bool {
        let met = self.allowed.iter().filter_map(|allowed| allowed.meet(of));
        let mut left = met.filter(|met| !self.denies(met));
        left.any(|met| shown(&met).is_none_or(|shown| !self.denies(&shown)))
    }

    /// Whether the guest may open any event that needs a hardware counter.
    #[must_use]
    pub fn allows_hardware(&self) -> bool {
        let kinds = [KIND_HARDWARE, KIND_HW_CACHE, KIND_RAW].map(EventMatch::kind);
        let by_hardware = |pace: &Pace| pace.host_event().is_some_and(|event| event.kind.is_hardware());
        let paced = Pace::EACH.into_iter().filter(by_hardware);
        let paced = paced.map(|pace| EventMatch::one(KIND_SAMPLE_TRACE, pace.config()));
        kinds.into_iter().chain(paced).any(|of| self.allows_some(&of))
    }

    fn denies(&self, events: &EventMatch) -> bool {
        self.denied.iter().any(|denied| denied.covers(events))
    }
}

/// For a trace of exits, returns the event that counts these exits. For a trace of samples, returns the event whose
/// overflows trigger the samples. Denying the returned event also denies the trace.
fn shown(events: &EventMatch) -> Option<EventMatch> {
    if events.mask != u64::MAX {
        return None;
    }
    let (kind, config) = match Kind::parse(events.kind, events.config)? {
        Kind::ExitTrace(exits) => (KIND_EXITS, exits.config()),
        Kind::SampleTrace(Pace::Exits) => (KIND_EXITS, EXIT_USER),
        Kind::SampleTrace(pace) => pace.host_event()?.wire(),
        Kind::Host(_)
        | Kind::Tsc
        | Kind::GuestTime
        | Kind::Halts
        | Kind::Mark(_)
        | Kind::Exits(_)
        | Kind::VmmTrace(_) => return None,
    };
    Some(EventMatch::one(kind, config))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{EXIT_ALL, MARK_ANY, PACE_CPU_CLOCK, PACE_CYCLES, PACE_EXITS};
    use crate::kind::{Exits, HostEvent, HostKind};

    #[test]
    fn match_covers_what_agrees_in_the_bits_of_its_mask() {
        let family = EventMatch { kind: KIND_RAW, config: 0x11, mask: 0xff };
        assert!(family.covers(&EventMatch::one(KIND_RAW, 0x4311)));
        assert!(!family.covers(&EventMatch::one(KIND_RAW, 0x12)));
        assert!(!family.covers(&EventMatch::one(KIND_HARDWARE, 0x11)));
        assert!(!family.covers(&EventMatch::kind(KIND_RAW)));
        assert!(EventMatch::kind(KIND_RAW).covers(&family));
    }

    #[test]
    fn allowed_event_is_open_unless_denied() {
        let family = EventMatch { kind: KIND_RAW, config: 0x11, mask: 0xff };
        let policy = Policy::new(vec![family], vec![EventMatch::one(KIND_RAW, 0x111)]);
        assert!(policy.allows(KIND_RAW, 0x211));
        assert!(!policy.allows(KIND_RAW, 0x111));
        assert!(!policy.allows(KIND_RAW, 0x12));
        assert!(policy.allows_some(&EventMatch::kind(KIND_RAW)));
        let none = Policy::new(vec![family], vec![EventMatch::kind(KIND_RAW)]);
        assert!(!none.allows_some(&EventMatch::kind(KIND_RAW)));
    }

    #[test]
    fn trace_is_denied_with_what_it_shows_or_is_paced_by() {
        let without = |kind, config| Policy::new(Tier::Standard.events(), vec![EventMatch::one(kind, config)]);
        for (denied, trace) in [
            ((KIND_EXITS, EXIT_IO), (KIND_EXIT_TRACE, EXIT_IO)),
            ((KIND_EXITS, EXIT_ALL), (KIND_EXIT_TRACE, EXIT_ALL)),
            ((KIND_EXITS, EXIT_USER), (KIND_SAMPLE_TRACE, PACE_EXITS)),
            ((KIND_HARDWARE, 0), (KIND_SAMPLE_TRACE, PACE_CYCLES)),
            ((KIND_SOFTWARE, 0), (KIND_SAMPLE_TRACE, PACE_CPU_CLOCK)),
        ] {
            let policy = without(denied.0, denied.1);
            assert!(!policy.allows(trace.0, trace.1), "{denied:?}: {trace:?}");
            let other = without(KIND_TSC, 0);
            assert!(other.allows(trace.0, trace.1), "{trace:?}");
        }
        // Unlisted events are not denied.
        let alone = Policy::new(vec![EventMatch::one(KIND_SAMPLE_TRACE, PACE_CYCLES)], vec![]);
        assert!(alone.allows(KIND_SAMPLE_TRACE, PACE_CYCLES) && alone.allows_hardware());
    }

    #[test]
    fn tiers_grow_from_clocks_to_full() {
        let allows = |tier: Tier, kind, config| Policy::new(tier.events(), vec![]).allows(kind, config);
        for (kind, config, tiers) in [
            (KIND_TSC, 0, [true, true, true]),
            (KIND_SOFTWARE, 1, [true, true, true]),
            (KIND_MARK, MARK_ANY, [true, true, true]),
            (KIND_EXITS, EXIT_OTHER, [true, true, true]),
            (KIND_EXITS, EXIT_ALL, [false, true, true]),
            (KIND_SOFTWARE, 2, [false, true, true]),
            (KIND_HARDWARE, 0, [false, true, true]),
            (KIND_HW_CACHE, 0, [false, true, true]),
            (KIND_SAMPLE_TRACE, PACE_CPU_CLOCK, [false, true, true]),
            (KIND_RAW, 0x11, [false, false, true]),
        ] {
            let found = [Tier::Clocks, Tier::Standard, Tier::Full].map(|tier| allows(tier, kind, config));
            assert_eq!(found, tiers, "{kind:#x} {config:#x}");
        }
        let hardware = |tier: Tier| Policy::new(tier.events(), vec![]).allows_hardware();
        assert!(!hardware(Tier::Clocks) && hardware(Tier::Standard));
    }

    /// The lowest tier that includes an event. A new kind does not compile here until it has one.
    fn lowest_tier(kind: Kind) -> Tier {
        match kind {
            Kind::Tsc | Kind::GuestTime | Kind::Mark(_) | Kind::Exits(Exits::Reported(_)) => Tier::Clocks,
            Kind::Host(HostEvent { kind: HostKind::Software, config: 0 | 1 }) => Tier::Clocks,
            Kind::Host(HostEvent { kind: HostKind::Raw, .. }) => Tier::Full,
            Kind::Host(_)
            | Kind::Halts
            | Kind::Exits(Exits::All)
            | Kind::ExitTrace(_)
            | Kind::SampleTrace(_)
            | Kind::VmmTrace(_) => Tier::Standard,
        }
    }

    #[test]
    fn tier_includes_a_kind_from_its_lowest_tier_on() {
        let kinds = [1, 3, 4, 6].into_iter().chain(KIND_TSC..=KIND_VMM_TRACE);
        let configs = [0, 1, 2, 3, 4, 5, 6, 0x43, MARK_ANY];
        let mut parsed = 0;
        for (kind, config) in kinds.flat_map(|kind| configs.map(|config| (kind, config))) {
            let Some(known) = Kind::parse(kind, config) else {
                continue;
            };
            parsed += 1;
            let order = [Tier::Clocks, Tier::Standard, Tier::Full];
            let lowest = order.iter().position(|&tier| tier == lowest_tier(known));
            for (at, tier) in order.into_iter().enumerate() {
                let allows = Policy::new(tier.events(), vec![]).allows(kind, config);
                assert_eq!(allows, Some(at) >= lowest, "{known:?} {tier:?}");
            }
        }
        assert!(parsed > 50, "{parsed}");
    }

    #[test]
    fn named_events_differ_in_name_and_in_what_they_match() {
        let named = EventMatch::named();
        let names: std::collections::BTreeSet<_> = named.iter().map(|(name, _)| name).collect();
        let matches: std::collections::BTreeSet<_> = named.iter().map(|(_, event)| event).collect();
        assert_eq!((names.len(), matches.len()), (named.len(), named.len()));
        assert!(named.contains(&("instructions".to_owned(), EventMatch::one(KIND_HARDWARE, 1))));
        assert!(named.contains(&("marks".to_owned(), EventMatch::one(KIND_MARK, MARK_ANY))));
    }
}

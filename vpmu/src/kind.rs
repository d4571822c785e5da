//! Kinds of events. [`Kind::parse`] turns the two numbers of a request into a type once, and everything that depends
//! on the kind is a match that the compiler checks: a new kind does not compile until each of these places knows it.

use crate::abi::{
    EXIT_ALL, EXIT_HLT, EXIT_IO, EXIT_MMIO, EXIT_OTHER, EXIT_SIGNAL, EXIT_USER, FORMAT_EXITS, FORMAT_SAMPLES,
    FORMAT_VMM, KIND_EXIT_TRACE, KIND_EXITS, KIND_GUEST_TIME, KIND_HALTS, KIND_HARDWARE, KIND_HOST_TRACE,
    KIND_HW_CACHE, KIND_MARK, KIND_RAW, KIND_SAMPLE_TRACE, KIND_SOFTWARE, KIND_TSC, KIND_VMM_TRACE, MARK_ANY,
    PACE_CPU_CLOCK, PACE_CYCLES, PACE_EXITS, PACE_INSTRUCTIONS,
};
use crate::machine::ExitReason;

/// The subject of an event's count or trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Counted by a perf event of the host.
    Host(HostEvent),
    Tsc,
    GuestTime,
    Halts,
    Mark(Mark),
    Exits(Exits),
    ExitTrace(Exits),
    SampleTrace(Pace),
    /// The trace of the producer with this number.
    VmmTrace(u64),
}

/// A perf event of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HostEvent {
    pub(crate) kind: HostKind,
    pub(crate) config: u64,
}

/// perf's type of a host event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HostKind {
    Hardware,
    Software,
    HwCache,
    Raw,
}

/// Marks that an event counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mark {
    Any,
    Value(u32),
}

/// Exits that an event counts or traces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exits {
    /// Every exit, including those that the host's kernel handles by itself.
    All,
    Reported(Reported),
}

/// Exits that reach the VMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reported {
    Any,
    Only(ExitReason),
}

/// The event whose overflows trigger the samples of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pace {
    CpuClock,
    /// Exits that reach the VMM.
    Exits,
    Cycles,
    Instructions,
}

impl Kind {
    /// Returns the kind that a request names. `None` if there is no such kind, or if the kind has no such config.
    pub(crate) fn parse(kind: u32, config: u64) -> Option<Self> {
        let alone = |kind: Self| (config == 0).then_some(kind);
        match kind {
            KIND_TSC => alone(Self::Tsc),
            KIND_GUEST_TIME => alone(Self::GuestTime),
            KIND_HALTS => alone(Self::Halts),
            KIND_MARK if config == MARK_ANY => Some(Self::Mark(Mark::Any)),
            KIND_MARK => u32::try_from(config).ok().map(|value| Self::Mark(Mark::Value(value))),
            KIND_EXITS => Exits::parse(config).map(Self::Exits),
            KIND_EXIT_TRACE => Exits::parse(config).map(Self::ExitTrace),
            KIND_SAMPLE_TRACE => Pace::parse(config).map(Self::SampleTrace),
            KIND_VMM_TRACE => Some(Self::VmmTrace(config)),
            _ => HostKind::parse(kind).map(|kind| Self::Host(HostEvent { kind, config })),
        }
    }

    /// The host event that counts the event, or that paces the trace. `None` if the device counts it, and for a trace of
    /// exits, which is no perf event of the host, even if the host records it.
    pub(crate) fn host_event(self) -> Option<HostEvent> {
        match self {
            Self::Host(event) => Some(event),
            Self::SampleTrace(pace) => pace.host_event(),
            Self::Tsc
            | Self::GuestTime
            | Self::Halts
            | Self::Mark(_)
            | Self::Exits(_)
            | Self::ExitTrace(_)
            | Self::VmmTrace(_) => None,
        }
    }

    /// The kind and the config of the counter that the event has on the host. `None` if it has none there.
    pub(crate) fn counter(self) -> Option<(u32, u64)> {
        match self {
            Self::ExitTrace(Exits::All) => Some((KIND_EXIT_TRACE, EXIT_ALL)),
            other => other.host_event().map(HostEvent::wire),
        }
    }

    /// The format of the packets that the event writes to an AUX area. `None` if the event is not a trace.
    pub(crate) fn format(self) -> Option<u16> {
        match self {
            Self::ExitTrace(_) => Some(FORMAT_EXITS),
            Self::SampleTrace(_) => Some(FORMAT_SAMPLES),
            // The catalogue has the producer's own format.
            Self::VmmTrace(_) => Some(FORMAT_VMM),
            Self::Host(_) | Self::Tsc | Self::GuestTime | Self::Halts | Self::Mark(_) | Self::Exits(_) => None,
        }
    }

    /// The exits that the event's own count or its packets depend on, one by one, as they reach the VMM.
    pub(crate) fn counted_exits(self) -> Option<Reported> {
        match self {
            Self::Exits(Exits::Reported(exits)) => Some(exits),
            Self::SampleTrace(Pace::Exits) => Some(Reported::Any),
            Self::Exits(Exits::All)
            | Self::Host(_)
            | Self::Tsc
            | Self::GuestTime
            | Self::Halts
            | Self::Mark(_)
            | Self::ExitTrace(_)
            | Self::SampleTrace(Pace::CpuClock | Pace::Cycles | Pace::Instructions)
            | Self::VmmTrace(_) => None,
        }
    }

    /// The exits that the event traces as they reach the VMM.
    pub(crate) fn traced_exits(self) -> Option<Reported> {
        match self {
            Self::ExitTrace(Exits::Reported(exits)) => Some(exits),
            _ => None,
        }
    }
}

impl HostKind {
    fn parse(kind: u32) -> Option<Self> {
        match kind {
            KIND_HARDWARE => Some(Self::Hardware),
            KIND_SOFTWARE => Some(Self::Software),
            KIND_HW_CACHE => Some(Self::HwCache),
            KIND_RAW => Some(Self::Raw),
            _ => None,
        }
    }

    fn wire(self) -> u32 {
        match self {
            Self::Hardware => KIND_HARDWARE,
            Self::Software => KIND_SOFTWARE,
            Self::HwCache => KIND_HW_CACHE,
            Self::Raw => KIND_RAW,
        }
    }

    /// Whether the CPU's PMU counts events of this kind.
    pub(crate) fn is_hardware(self) -> bool {
        match self {
            Self::Hardware | Self::HwCache | Self::Raw => true,
            Self::Software => false,
        }
    }
}

impl HostEvent {
    /// The kind and the config in a request.
    pub(crate) fn wire(self) -> (u32, u64) {
        (self.kind.wire(), self.config)
    }
}

impl Mark {
    pub(crate) fn includes(self, value: u32) -> bool {
        match self {
            Self::Any => true,
            Self::Value(own) => own == value,
        }
    }
}

impl Exits {
    fn parse(config: u64) -> Option<Self> {
        if config == EXIT_ALL {
            return Some(Self::All);
        }
        let mut reported = Reported::EACH.into_iter();
        reported.find(|reported| reported.config() == config).map(Self::Reported)
    }

    /// The `EXIT_*` value.
    pub(crate) fn config(self) -> u64 {
        match self {
            Self::All => EXIT_ALL,
            Self::Reported(reported) => reported.config(),
        }
    }
}

impl Reported {
    /// In the order of the catalogue.
    pub(crate) const EACH: [Self; 6] = [
        Self::Any,
        Self::Only(ExitReason::Io),
        Self::Only(ExitReason::Mmio),
        Self::Only(ExitReason::Hlt),
        Self::Only(ExitReason::Signal),
        Self::Only(ExitReason::Other),
    ];

    /// The `EXIT_*` value.
    pub(crate) fn config(self) -> u64 {
        match self {
            Self::Any => EXIT_USER,
            Self::Only(ExitReason::Io) => EXIT_IO,
            Self::Only(ExitReason::Mmio) => EXIT_MMIO,
            Self::Only(ExitReason::Hlt) => EXIT_HLT,
            Self::Only(ExitReason::Signal) => EXIT_SIGNAL,
            Self::Only(ExitReason::Other) => EXIT_OTHER,
        }
    }

    pub(crate) fn includes(self, reason: ExitReason) -> bool {
        match self {
            Self::Any => true,
            Self::Only(own) => own == reason,
        }
    }
}

impl Pace {
    /// In the order of the catalogue.
    pub(crate) const EACH: [Self; 4] = [Self::CpuClock, Self::Exits, Self::Cycles, Self::Instructions];

    fn parse(config: u64) -> Option<Self> {
        Self::EACH.into_iter().find(|pace| pace.config() == config)
    }

    /// The `PACE_*` value.
    pub(crate) fn config(self) -> u64 {
        match self {
            Self::CpuClock => PACE_CPU_CLOCK,
            Self::Exits => PACE_EXITS,
            Self::Cycles => PACE_CYCLES,
            Self::Instructions => PACE_INSTRUCTIONS,
        }
    }

    /// The host event that paces the trace. `None` for exits, because the device counts exits itself.
    pub(crate) fn host_event(self) -> Option<HostEvent> {
        let (kind, config) = match self {
            Self::Exits => return None,
            // PERF_COUNT_SW_CPU_CLOCK, PERF_COUNT_HW_CPU_CYCLES and PERF_COUNT_HW_INSTRUCTIONS.
            Self::CpuClock => (HostKind::Software, 0),
            Self::Cycles => (HostKind::Hardware, 0),
            Self::Instructions => (HostKind::Hardware, 1),
        };
        Some(HostEvent { kind, config })
    }
}

/// Whether events of a kind write packets to an AUX area. This includes the kind of traces that the device refuses.
pub(crate) fn is_trace(kind: u32) -> bool {
    matches!(kind, KIND_EXIT_TRACE | KIND_SAMPLE_TRACE | KIND_HOST_TRACE | KIND_VMM_TRACE)
}

/// Whether the CPU's PMU counts events of this kind.
pub(crate) fn is_hardware(kind: u32) -> bool {
    HostKind::parse(kind).is_some_and(HostKind::is_hardware)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_config_of_exits_and_paces_parses_to_itself() {
        for reported in Reported::EACH {
            let config = reported.config();
            assert_eq!(Kind::parse(KIND_EXITS, config), Some(Kind::Exits(Exits::Reported(reported))));
            assert_eq!(Kind::parse(KIND_EXIT_TRACE, config), Some(Kind::ExitTrace(Exits::Reported(reported))));
        }
        for pace in Pace::EACH {
            assert_eq!(Kind::parse(KIND_SAMPLE_TRACE, pace.config()), Some(Kind::SampleTrace(pace)));
        }
        assert_eq!(Kind::parse(KIND_EXITS, EXIT_ALL), Some(Kind::Exits(Exits::All)));
        assert_eq!(Kind::parse(KIND_MARK, MARK_ANY), Some(Kind::Mark(Mark::Any)));
        assert_eq!(Kind::parse(KIND_MARK, 7), Some(Kind::Mark(Mark::Value(7))));
    }

    #[test]
    fn unknown_kinds_and_configs_do_not_parse() {
        let unknown = [
            (KIND_TSC, 1),
            (KIND_EXITS, EXIT_OTHER + 1),
            (KIND_EXIT_TRACE, u64::MAX),
            (KIND_SAMPLE_TRACE, PACE_INSTRUCTIONS + 1),
            (KIND_MARK, MARK_ANY + 1),
            (KIND_HOST_TRACE, 0),
            (KIND_VMM_TRACE + 1, 0),
            (u32::MAX, 0),
        ];
        for (kind, config) in unknown {
            assert_eq!(Kind::parse(kind, config), None, "{kind:#x} {config:#x}");
        }
    }
}

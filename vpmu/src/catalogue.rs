//! The list of events that the guest can open. Events of the [`Source`] are listed only after a test has shown that the
//! host can count them.

use crate::abi::{
    CATALOGUE_ANY_CONFIG, CATALOGUE_AUX, CATALOGUE_EXCLUDES, CATALOGUE_FORMAT_SHIFT, CATALOGUE_GUEST_ONLY,
    CATALOGUE_SAMPLES, CatalogueEntry, EXIT_ALL, FORMAT_EXITS, FORMAT_SAMPLES, KIND_EXIT_TRACE, KIND_EXITS,
    KIND_GUEST_TIME, KIND_HALTS, KIND_MARK, KIND_SAMPLE_TRACE, KIND_TSC, KIND_VMM_TRACE, MARK_ANY,
};
use crate::arch;
use crate::host;
use crate::kind::{HostEvent, Pace, Reported, is_hardware};
use crate::machine::{ExitReason, Machine};
use crate::policy::{EventMatch, Policy};
use crate::producer::AuxProducer;
use crate::settings::{CountMode, Settings};
use crate::source::{Offer, Source};

const DEVICE: &str = "device";
const VMM: &str = "vmm";
const STATISTICS: &str = "hypervisor statistics";
const TSC: &str = "tsc";
const EXITS: &str = "exits";
const HALTS: &str = "halts";
const GUEST_TIME: &str = "guest-time";
const MARKS: &str = "marks";
const MARK: &str = "mark";
const TRACEPOINTS: &str = "host perf: tracepoints kvm_exit, kvm_entry";

/// The shortest period of events that the device counts itself.
const ANY_PERIOD: Option<u64> = Some(1);

/// One event that can be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) kind: u32,
    pub(crate) config: u64,
    pub(crate) any_config: bool,
    pub(crate) shortest_period: Option<u64>,
    pub(crate) excludes: bool,
    /// For a trace, one of `FORMAT_*`.
    pub(crate) format: Option<u16>,
    guest_only: bool,
    name: String,
    unit: &'static str,
    source: String,
    counts: String,
}

impl Entry {
    fn device(
        kind: u32,
        config: u64,
        name: &str,
        source: &str,
        shortest_period: Option<u64>,
        counts: &'static str,
    ) -> Self {
        Self {
            kind,
            config,
            any_config: false,
            shortest_period,
            excludes: false,
            format: None,
            guest_only: true,
            name: name.to_owned(),
            unit: "",
            source: source.to_owned(),
            counts: counts.to_owned(),
        }
    }

    /// Sets the properties of a trace that writes packets of `format`.
    fn tracing(self, format: u16) -> Self {
        Self { excludes: true, format: Some(format), unit: "bytes", ..self }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Whether the event's count is in nanoseconds.
    pub(crate) fn is_clock(&self) -> bool {
        self.unit == "ns"
    }

    /// The events that can be opened through this entry.
    fn events(&self) -> EventMatch {
        match (self.any_config, self.kind) {
            (false, _) => EventMatch::one(self.kind, self.config),
            (true, KIND_MARK) => MARK_OF_A_VALUE,
            (true, _) => EventMatch::kind(self.kind),
        }
    }

    /// Returns the entry in wire format. Texts that are too long for their fields are cut.
    pub(crate) fn wire(&self) -> CatalogueEntry {
        let flag = |on: bool, flag| if on { flag } else { 0 };
        CatalogueEntry {
            kind: self.kind.into(),
            flags: (flag(self.shortest_period.is_some(), CATALOGUE_SAMPLES)
                | flag(self.guest_only, CATALOGUE_GUEST_ONLY)
                | flag(self.any_config, CATALOGUE_ANY_CONFIG)
                | flag(self.excludes, CATALOGUE_EXCLUDES)
                | flag(self.format.is_some(), CATALOGUE_AUX)
                | u32::from(self.format.unwrap_or(0)) << CATALOGUE_FORMAT_SHIFT)
                .into(),
            config: self.config.into(),
            name: text(&self.name),
            unit: text(self.unit),
            source: text(&self.source),
            counts: text(&self.counts),
        }
    }
}

/// All [`Entry`]s of one device. The list does not change during the device's lifetime.
#[derive(Debug)]
pub(crate) struct Catalogue(Vec<Entry>);

impl Catalogue {
    /// Collects the events that `source`, `machine` and the device can count on every vCPU. The traces of
    /// the VMM's `producers` come last.
    pub(crate) fn new(
        source: &dyn Source,
        machine: &dyn Machine,
        settings: &Settings,
        producers: &[AuxProducer],
    ) -> Self {
        let vcpus = settings.vcpus;
        let floor = settings.limits.min_hardware_period;
        let mode = settings.hardware.count_mode;
        // A remote device has only the batched engine, which drops overflows that are not the guest's.
        let samples = !settings.remote || machine.reports_guest_ips();
        let mut entries: Vec<Entry> = offers(source, settings)
            .map(|offer| Entry {
                kind: offer.kind,
                config: offer.config,
                any_config: offer.any_config,
                shortest_period: shortest_period(offer, floor).filter(|_| samples),
                excludes: offer.excludes,
                format: (offer.kind == KIND_EXIT_TRACE).then_some(FORMAT_EXITS),
                guest_only: offer.guest_only && !(counts_host(mode) && is_hardware(offer.kind)),
                name: offer.name.clone(),
                unit: offer.unit,
                source: match offer.kind {
                    KIND_EXIT_TRACE => TRACEPOINTS.to_owned(),
                    _ => format!("host perf: {}", offer.name),
                },
                counts: counts(offer, mode),
            })
            .collect();
        let tsc = Entry::device(
            KIND_TSC,
            0,
            TSC,
            DEVICE,
            None,
            "ticks of the guest's TSC while the event is active, whatever the vCPU does",
        );
        entries.push(Entry { unit: "ticks", guest_only: false, ..tsc });
        if (0..vcpus).all(|vcpu| machine.exits(vcpu).is_some()) {
            entries.push(Entry::device(
                KIND_EXITS,
                EXIT_ALL,
                EXITS,
                STATISTICS,
                None,
                "every VM exit, including those that the host's kernel handles by itself",
            ));
        }
        if !settings.remote {
            entries.extend(reachable().map(|exits| {
                let (name, counts) = exits_text(exits);
                let entry = Entry::device(KIND_EXITS, exits.config(), name, DEVICE, ANY_PERIOD, counts);
                Entry { excludes: true, ..entry }
            }));
        }
        if (0..vcpus).all(|vcpu| machine.halts(vcpu).is_some()) {
            entries.push(Entry::device(KIND_HALTS, 0, HALTS, STATISTICS, None, "times that the vCPU halted"));
        }
        if !settings.remote && source.thread_time().is_some() {
            let time = Entry::device(
                KIND_GUEST_TIME,
                0,
                GUEST_TIME,
                "device, thread CPU clock",
                None,
                "CPU time of the vCPU's thread inside the run call, including its time in the \
                 host's kernel",
            );
            entries.push(Entry { unit: "ns", guest_only: false, ..time });
        }
        if settings.doorbell {
            // To exclude a mode, the device must know the mode of a mark.
            entries.extend(marks().map(|entry| Entry { excludes: entry.excludes && !settings.remote, ..entry }));
        }
        if !settings.remote {
            entries.extend(reachable().map(|exits| {
                let (name, counts) = exit_trace_text(exits);
                let entry = Entry::device(KIND_EXIT_TRACE, exits.config(), name, DEVICE, None, counts);
                entry.tracing(FORMAT_EXITS)
            }));
            entries.extend(sample_traces(source, settings));
        }
        entries.extend((0..).zip(producers).map(|(number, producer)| Entry {
            format: Some(producer.format.into()),
            unit: "bytes",
            ..Entry::device(KIND_VMM_TRACE, number, producer.name, VMM, None, producer.counts)
        }));
        Self(entries)
    }

    /// The entries of events that a guest may open.
    pub(crate) fn entries<'a>(&'a self, policy: &'a Policy) -> impl Iterator<Item = &'a Entry> {
        let allowed = |entry: &&Entry| policy.allows_some(&entry.events());
        self.0.iter().filter(allowed)
    }

    /// The entry with this name.
    pub(crate) fn named(&self, name: &str) -> Option<&Entry> {
        self.0.iter().find(|entry| entry.name == name)
    }

    /// The entry that counts `config` of `kind`.
    pub(crate) fn find(&self, kind: u32, config: u64) -> Option<&Entry> {
        self.0.iter().find(|entry| entry.kind == kind && (entry.any_config || entry.config == config))
    }
}

/// The exits that can occur on this architecture.
fn reachable() -> impl Iterator<Item = Reported> {
    let reachable = |exits: &Reported| !arch::UNREACHABLE_EXITS.contains(&exits.config());
    Reported::EACH.into_iter().filter(reachable)
}

/// The name and the description of an event that counts exits.
fn exits_text(exits: Reported) -> (&'static str, &'static str) {
    match exits {
        Reported::Any => ("exits-user", "VM exits that reached the VMM, whatever the reason"),
        Reported::Only(ExitReason::Io) => ("exits-io", "port accesses that reached the VMM"),
        Reported::Only(ExitReason::Mmio) => {
            ("exits-mmio", "memory-mapped accesses that reached the VMM, including commands to this device")
        }
        Reported::Only(ExitReason::Hlt) => ("exits-hlt", "HLT that reached the VMM"),
        Reported::Only(ExitReason::Signal) => {
            ("exits-signal", "returns to the VMM because of a signal, such as the signal for an overflow")
        }
        Reported::Only(ExitReason::Other) => ("exits-other", "VM exits that reached the VMM for any other reason"),
    }
}

/// The name and the description of a trace of exits.
fn exit_trace_text(exits: Reported) -> (&'static str, &'static str) {
    match exits {
        Reported::Any => {
            ("exit-trace-user", "packets of format 1 (exits): each VM exit that reached the VMM, whatever the reason")
        }
        Reported::Only(ExitReason::Io) => {
            ("exit-trace-io", "packets of format 1 (exits): port accesses that reached the VMM")
        }
        Reported::Only(ExitReason::Mmio) => {
            ("exit-trace-mmio", "packets of format 1 (exits): memory-mapped accesses that reached the VMM")
        }
        Reported::Only(ExitReason::Hlt) => {
            ("exit-trace-hlt", "packets of format 1 (exits): each HLT that reached the VMM")
        }
        Reported::Only(ExitReason::Signal) => {
            ("exit-trace-signal", "packets of format 1 (exits): returns to the VMM because of a signal")
        }
        Reported::Only(ExitReason::Other) => {
            ("exit-trace-other", "packets of format 1 (exits): VM exits that reached the VMM for any other reason")
        }
    }
}

/// The name and the description of a trace of samples.
fn sample_trace_text(pace: Pace) -> (&'static str, &'static str) {
    match pace {
        Pace::CpuClock => (
            "sample-trace-cpu-clock",
            "packets of format 2 (samples): the registers after each period of the host's cpu-clock",
        ),
        Pace::Exits => {
            ("sample-trace-exits", "packets of format 2 (samples): the registers after each period of exits to the VMM")
        }
        Pace::Cycles => {
            ("sample-trace-cycles", "packets of format 2 (samples): the registers after each period of cycles")
        }
        Pace::Instructions => (
            "sample-trace-instructions",
            "packets of format 2 (samples): the registers after each period of instructions",
        ),
    }
}

/// The entries for marks. The first entry is for marks of any value, and its config is [`MARK_ANY`]. The second entry
/// is for marks with the value in the event's config, so it matches every config. The order matters, because
/// [`Catalogue::find`] returns the first match.
fn marks() -> [Entry; 2] {
    let any = Entry::device(
        KIND_MARK,
        MARK_ANY,
        MARKS,
        DEVICE,
        ANY_PERIOD,
        "marks of any value placed by guest programs; the address of a sample is the value of its mark",
    );
    let one = Entry::device(
        KIND_MARK,
        0,
        MARK,
        DEVICE,
        ANY_PERIOD,
        "marks placed by guest programs, with the value in config",
    );
    [(any, false), (one, true)].map(|(entry, any_config)| Entry { any_config, excludes: true, ..entry })
}

/// Matches an event for marks of one value, whatever the value is. A value has 32 bits, so this does not match
/// [`MARK_ANY`].
const MARK_OF_A_VALUE: EventMatch = EventMatch { kind: KIND_MARK, config: 0, mask: !(u32::MAX as u64) };

impl EventMatch {
    /// Returns the event names that a host's catalogue can contain. Each name has the [`EventMatch`] that selects the
    /// events of that name. Raw events and the VMM's traces are omitted.
    #[must_use]
    pub fn named() -> Vec<(String, Self)> {
        let of_host = host::candidates().map(|offer| {
            let event = Self::one(offer.kind, offer.config);
            (offer.name, event)
        });
        let exits = Reported::EACH.map(|exits| (KIND_EXITS, exits.config(), exits_text(exits).0));
        let exit_traces = Reported::EACH.map(|exits| (KIND_EXIT_TRACE, exits.config(), exit_trace_text(exits).0));
        let sample_traces = Pace::EACH.map(|pace| (KIND_SAMPLE_TRACE, pace.config(), sample_trace_text(pace).0));
        let of_device = exits
            .into_iter()
            .chain(exit_traces)
            .chain(sample_traces)
            .chain([
                (KIND_TSC, 0, TSC),
                (KIND_EXITS, EXIT_ALL, EXITS),
                (KIND_HALTS, 0, HALTS),
                (KIND_GUEST_TIME, 0, GUEST_TIME),
                (KIND_MARK, MARK_ANY, MARKS),
            ])
            .map(|(kind, config, name)| (name.to_owned(), Self::one(kind, config)));
        let mark = [(MARK.to_owned(), MARK_OF_A_VALUE)];
        of_host.chain(of_device).chain(mark).collect()
    }
}

/// The events that `source` offers and that the operator permits.
fn offers<'a>(source: &'a dyn Source, settings: &Settings) -> impl Iterator<Item = &'a Offer> {
    let hardware = settings.hardware.events;
    let permitted = move |offer: &&Offer| hardware || !is_hardware(offer.kind);
    source.offers().iter().filter(permitted)
}

/// Whether hardware events also count the host's work for the vCPU.
fn counts_host(mode: CountMode) -> bool {
    mode == CountMode::Vcpu
}

/// Returns the catalogue's description of what the event of `offer` counts in `mode`.
fn counts(offer: &Offer, mode: CountMode) -> String {
    let whose = match is_hardware(offer.kind) {
        false => "",
        true if counts_host(mode) => ", including host work for the vCPU unless the event samples",
        true => " while the guest runs",
    };
    format!("{}{whose}", offer.counts)
}

/// Returns the shortest period of a host event. `None` if the event cannot sample. For hardware events, the period is
/// at least `floor`, because the guest can make these events happen at any rate and each overflow interrupts the host.
fn shortest_period(offer: &Offer, floor: u64) -> Option<u64> {
    let floor = if is_hardware(offer.kind) { floor } else { 0 };
    offer.shortest_period.map(|shortest| shortest.max(floor))
}

/// The sample traces that can run on this host. Each trace is paced by an event that the device itself counts, or by a
/// host event that `source` can sample.
fn sample_traces(source: &dyn Source, settings: &Settings) -> impl Iterator<Item = Entry> {
    let floor = settings.limits.min_hardware_period;
    Pace::EACH.into_iter().filter_map(move |pace| {
        let (name, counts) = sample_trace_text(pace);
        let trace = |shortest: Option<u64>| {
            let entry = Entry::device(KIND_SAMPLE_TRACE, pace.config(), name, DEVICE, shortest, counts);
            entry.tracing(FORMAT_SAMPLES)
        };
        let Some(paced_by) = pace.host_event().map(HostEvent::wire) else {
            return Some(trace(ANY_PERIOD));
        };
        let paced = |offer: &&Offer| (offer.kind, offer.config) == paced_by;
        let offer = offers(source, settings).find(paced)?;
        shortest_period(offer, floor).map(|shortest| Entry {
            excludes: offer.excludes,
            guest_only: offer.guest_only,
            source: format!("host perf: {}", offer.name),
            ..trace(Some(shortest))
        })
    })
}

/// Returns `text`, padded with zeros to `N` bytes. A longer text is cut between two characters.
fn text<const N: usize>(text: &str) -> [u8; N] {
    let len = (0..=N.min(text.len())).rev().find(|&len| text.is_char_boundary(len)).unwrap_or(0);
    let mut field = [0; N];
    field[..len].copy_from_slice(&text.as_bytes()[..len]);
    field
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_cut_between_characters() {
        assert_eq!(text::<4>("ab"), *b"ab\0\0");
        assert_eq!(text::<4>("abcdef"), *b"abcd");
        assert_eq!(text::<4>("abc\u{fc}"), *b"abc\0");
    }

    #[test]
    fn no_text_of_the_device_is_cut() {
        let exits = Reported::EACH.into_iter().flat_map(|exits| [exits_text(exits), exit_trace_text(exits)]);
        for (name, counts) in exits.chain(Pace::EACH.map(sample_trace_text)) {
            assert!(name.len() < 40 && counts.len() < 128, "{name}");
        }
    }
}

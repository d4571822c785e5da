//! The events that this host can count, each found to work: what is not here cannot be opened.

use crate::abi::{
    CATALOGUE_ANY_CONFIG, CATALOGUE_EXCLUDES, CATALOGUE_GUEST_ONLY, CATALOGUE_SAMPLES,
    CatalogueEntry, EXIT_ALL, EXIT_HLT, EXIT_IO, EXIT_MMIO, EXIT_OTHER, EXIT_SIGNAL, EXIT_USER,
    KIND_EXITS, KIND_GUEST_TIME, KIND_HALTS, KIND_MARK, KIND_TSC,
};
use crate::machine::Machine;
use crate::source::Source;

const DEVICE: &str = "device";
const STATISTICS: &str = "hypervisor statistics";

/// The shortest period of what the device counts itself.
const ANY_PERIOD: Option<u64> = Some(1);

/// One event that can be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) kind: u32,
    pub(crate) config: u64,
    pub(crate) any_config: bool,
    pub(crate) shortest_period: Option<u64>,
    pub(crate) excludes: bool,
    guest_only: bool,
    name: String,
    unit: &'static str,
    source: String,
    counts: &'static str,
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
            guest_only: true,
            name: name.to_owned(),
            unit: "",
            source: source.to_owned(),
            counts,
        }
    }

    /// As the guest reads it. Texts too long for their field are cut.
    pub(crate) fn wire(&self) -> CatalogueEntry {
        let flag = |on: bool, flag| if on { flag } else { 0 };
        CatalogueEntry {
            kind: self.kind.into(),
            flags: (flag(self.shortest_period.is_some(), CATALOGUE_SAMPLES)
                | flag(self.guest_only, CATALOGUE_GUEST_ONLY)
                | flag(self.any_config, CATALOGUE_ANY_CONFIG)
                | flag(self.excludes, CATALOGUE_EXCLUDES))
            .into(),
            config: self.config.into(),
            name: text(&self.name),
            unit: text(self.unit),
            source: text(&self.source),
            counts: text(self.counts),
        }
    }
}

/// Every [`Entry`] of one device; it does not change while the device lives.
#[derive(Debug)]
pub(crate) struct Catalogue(Vec<Entry>);

impl Catalogue {
    /// Asks `source` and `machine` what they can count on vCPUs `0..vcpus`.
    pub(crate) fn new(source: &dyn Source, machine: &dyn Machine, vcpus: u32) -> Self {
        let mut entries: Vec<Entry> = source
            .offers()
            .iter()
            .map(|offer| Entry {
                kind: offer.kind,
                config: offer.config,
                any_config: false,
                shortest_period: offer.shortest_period,
                excludes: offer.excludes,
                guest_only: offer.guest_only,
                name: offer.name.clone(),
                unit: offer.unit,
                source: format!("host perf: {}", offer.name),
                counts: offer.counts,
            })
            .collect();
        let tsc = Entry::device(
            KIND_TSC,
            0,
            "tsc",
            DEVICE,
            None,
            "ticks of the guest's TSC while the event is active, whatever the vCPU does",
        );
        entries.push(Entry {
            unit: "ticks",
            guest_only: false,
            ..tsc
        });
        if (0..vcpus).all(|vcpu| machine.exits(vcpu).is_some()) {
            entries.push(Entry::device(
                KIND_EXITS,
                EXIT_ALL,
                "exits",
                STATISTICS,
                None,
                "every VM exit, those that the host's kernel handles by itself included",
            ));
        }
        entries.extend(USER_EXITS.map(|(config, name, counts)| Entry {
            excludes: true,
            ..Entry::device(KIND_EXITS, config, name, DEVICE, ANY_PERIOD, counts)
        }));
        if (0..vcpus).all(|vcpu| machine.halts(vcpu).is_some()) {
            entries.push(Entry::device(
                KIND_HALTS,
                0,
                "halts",
                STATISTICS,
                None,
                "times that the vCPU halted",
            ));
        }
        if source.thread_time().is_some() {
            let time = Entry::device(
                KIND_GUEST_TIME,
                0,
                "guest-time",
                "device, thread CPU clock",
                None,
                "time for which the vCPU's thread had a CPU inside the run call, the host's \
                 kernel part of it included",
            );
            entries.push(Entry {
                unit: "ns",
                guest_only: false,
                ..time
            });
        }
        let mark = Entry::device(
            KIND_MARK,
            0,
            "mark",
            DEVICE,
            ANY_PERIOD,
            "marks of this value placed by guest programs",
        );
        entries.push(Entry {
            any_config: true,
            excludes: true,
            ..mark
        });
        Self(entries)
    }

    pub(crate) fn entries(&self) -> &[Entry] {
        &self.0
    }

    /// The entry that counts `config` of `kind`.
    pub(crate) fn find(&self, kind: u32, config: u64) -> Option<&Entry> {
        self.0
            .iter()
            .find(|entry| entry.kind == kind && (entry.any_config || entry.config == config))
    }
}

const USER_EXITS: [(u64, &str, &str); 6] = [
    (
        EXIT_USER,
        "exits-user",
        "VM exits that reached the VMM, whatever the reason",
    ),
    (EXIT_IO, "exits-io", "port accesses that reached the VMM"),
    (
        EXIT_MMIO,
        "exits-mmio",
        "memory-mapped accesses that reached the VMM, the commands of this device included",
    ),
    (EXIT_HLT, "exits-hlt", "HLT that reached the VMM"),
    (
        EXIT_SIGNAL,
        "exits-signal",
        "returns to the VMM because of a signal, such as an overflow",
    ),
    (
        EXIT_OTHER,
        "exits-other",
        "VM exits that reached the VMM for any other reason",
    ),
];

/// `text` padded with zeros, or cut between two characters.
fn text<const N: usize>(text: &str) -> [u8; N] {
    let len = (0..=N.min(text.len()))
        .rev()
        .find(|&len| text.is_char_boundary(len))
        .unwrap_or(0);
    let mut field = [0; N];
    field[..len].copy_from_slice(&text.as_bytes()[..len]);
    field
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_between_characters() {
        assert_eq!(text::<4>("ab"), *b"ab\0\0");
        assert_eq!(text::<4>("abcdef"), *b"abcd");
        assert_eq!(text::<4>("abc\u{fc}"), *b"abc\0");
    }

    #[test]
    fn no_text_of_the_device_is_cut() {
        for (_, name, counts) in USER_EXITS {
            assert!(name.len() < 40 && counts.len() < 128, "{name}");
        }
    }
}

//! Finds the events of this host by opening each candidate.

use std::io;

use super::counter::attr;
use super::pmus::CpuPmu;
use super::sys;
use super::trial::Trials;
use crate::abi::{KIND_HARDWARE, KIND_HW_CACHE, KIND_RAW, KIND_SOFTWARE};
use crate::kind::is_hardware;
use crate::refusal::Refusal;
use crate::settings::{Hardware, RawEvents};
use crate::source::{Engine, Offer, Rate, Request, Sampling};

/// The shortest period of software clocks. If an event requested a shorter period, the kernel's timer would still use
/// this period, but each sample would contain the requested one.
const SHORTEST_CLOCK_PERIOD: u64 = 10_000;
const CPU_CLOCK: u64 = 0;
const TASK_CLOCK: u64 = 1;

const HARDWARE: [(u64, &str); 10] = [
    (0, "cycles"),
    (1, "instructions"),
    (2, "cache-references"),
    (3, "cache-misses"),
    (4, "branches"),
    (5, "branch-misses"),
    (6, "bus-cycles"),
    (7, "stalled-cycles-frontend"),
    (8, "stalled-cycles-backend"),
    (9, "ref-cycles"),
];

const SOFTWARE: [(u64, &str, &str, &str); 5] = [
    (
        CPU_CLOCK,
        "cpu-clock",
        "ns",
        "CPU time of the vCPU's thread by the host's clock, including host work for the vCPU",
    ),
    (TASK_CLOCK, "task-clock", "ns", "CPU time of the vCPU's thread, including host work for the vCPU"),
    (2, "page-faults", "", "page faults of the vCPU's thread on the host, such as first touches of guest memory"),
    (3, "context-switches", "", "number of times that the host took the CPU from the vCPU's thread"),
    (4, "cpu-migrations", "", "number of times that the host moved the vCPU's thread to another CPU"),
];

const CACHES: [(u64, &str); 7] =
    [(0, "l1-dcache"), (1, "l1-icache"), (2, "llc"), (3, "dtlb"), (4, "itlb"), (5, "branch"), (6, "node")];
const CACHE_OPERATIONS: [(u64, &str); 3] = [(0, "load"), (1, "store"), (2, "prefetch")];

/// Whether the event counts nanoseconds with a host timer.
pub(super) fn is_clock(kind: u32, config: u64) -> bool {
    kind == KIND_SOFTWARE && [CPU_CLOCK, TASK_CLOCK].contains(&config)
}

/// The result of probing.
#[derive(Debug)]
pub(super) struct Probed {
    /// Every candidate that the host opens, and counts as far as a trial shows.
    pub(super) offers: Vec<Offer>,
    /// The kinds for which the host opened no candidate, each with the reason. [`KIND_HW_CACHE`] and
    /// [`KIND_RAW`] are left out.
    pub(super) refusals: Vec<(u32, Refusal)>,
}

/// Opens each candidate. Candidates of the CPU's PMU are opened only if `hardware` permits them, and offered only if
/// they count.
pub(super) fn probe(hardware: &Hardware, pmu: Result<CpuPmu, Refusal>) -> Probed {
    let mut offers = Vec::new();
    let mut refusals = Vec::new();
    let has_pmu = hardware.events && pmu.is_ok();
    if let (true, Err(refusal)) = (hardware.events, pmu) {
        refusals.push((KIND_HARDWARE, refusal));
    }
    let pmu = pmu.unwrap_or_default();
    let candidates = candidates().chain(raw(&hardware.raw, pmu));
    let tried = candidates.filter(|offer| has_pmu || !is_hardware(offer.kind));
    let mut trials = Trials::new(pmu);
    for offer in tried {
        let Offer { kind, config, .. } = offer;
        if trials.is_silent(kind, config) {
            log::info!("{} is not offered: the host opens it, but never counts it", offer.name);
            continue;
        }
        match probed(offer, pmu) {
            Ok(offer) => offers.push(offer),
            // Report only the error of the first event of a kind, which is the simplest event.
            Err(error) if kind != KIND_RAW && refusals.iter().all(|&(of, _)| of != kind) => {
                refusals.push((kind, Refusal::of(&error)));
            }
            Err(error) if kind == KIND_RAW => {
                log::warn!("the host does not count raw event {config:#x}: {error}");
            }
            Err(_) => {}
        }
    }
    refusals.retain(|&(kind, _)| {
        // Missing cache events are common, so their refusal is not reported.
        kind != KIND_HW_CACHE && offers.iter().all(|offer| offer.kind != kind)
    });
    Probed { offers, refusals }
}

pub(super) fn candidates() -> impl Iterator<Item = Offer> {
    let hardware = HARDWARE.iter().map(|&(config, name)| {
        let counts = "the CPU's event of this name on the vCPU's thread";
        on_cpu(KIND_HARDWARE, config, name.to_owned(), counts)
    });
    let software = SOFTWARE.iter().map(|&(config, name, unit, counts)| Offer {
        kind: KIND_SOFTWARE,
        config,
        any_config: false,
        name: name.to_owned(),
        unit,
        counts,
        shortest_period: is_clock(KIND_SOFTWARE, config).then_some(SHORTEST_CLOCK_PERIOD),
        guest_only: false,
        excludes: false,
    });
    let caches = CACHES.iter().flat_map(|&(cache, cache_name)| {
        CACHE_OPERATIONS.iter().flat_map(move |&(operation, name)| {
            [(0, ""), (1, "-misse")].map(|(result, suffix)| {
                let config = cache | operation << 8 | result << 16;
                let counts = "the CPU's cache event of this name on the vCPU's thread";
                let plural = if suffix.is_empty() && operation == 2 { "es" } else { "s" };
                on_cpu(KIND_HW_CACHE, config, format!("{cache_name}-{name}{suffix}{plural}"), counts)
            })
        })
    });
    hardware.chain(software).chain(caches)
}

/// Returns offers for the raw events that the operator lists, or one offer that represents all raw events.
fn raw(events: &RawEvents, pmu: CpuPmu) -> Vec<Offer> {
    let counts = "the CPU's raw event of this number on the vCPU's thread";
    let offer = |config, name| on_cpu(KIND_RAW, config, name, counts);
    let listed = match events {
        RawEvents::Listed(configs) => configs,
        RawEvents::All => {
            return vec![Offer { any_config: true, ..offer(0, "raw".to_owned()) }];
        }
    };
    let (fit, others): (Vec<u64>, Vec<u64>) = listed.iter().partition(|&&c| pmu.takes(c));
    for config in others {
        log::warn!(
            "raw event {config:#x} is not offered: it has bits outside this PMU's fields for event and unit mask"
        );
    }
    let named = |config| offer(config, format!("raw-{config:#x}"));
    fit.into_iter().map(named).collect()
}

fn on_cpu(kind: u32, config: u64, name: String, counts: &'static str) -> Offer {
    Offer {
        kind,
        config,
        any_config: false,
        name,
        unit: "",
        counts,
        shortest_period: Some(1),
        guest_only: true,
        excludes: true,
    }
}

/// Opens the event of `offer`. Returns the offer without sampling or exclusions if this host does not support them
/// for the event.
///
/// # Errors
/// The host's error, if the event does not open at all.
fn probed(offer: Offer, pmu: CpuPmu) -> io::Result<Offer> {
    let opens = |sampling, excludes: bool| {
        let request = Request {
            kind: offer.kind,
            config: offer.config,
            sampling,
            exclude_user: false,
            exclude_kernel: excludes,
            // One test suffices, because an event that opens while excluding the host's work also opens while including
            // it.
            exclude_host: offer.guest_only,
            pinned: false,
        };
        sys::open(&attr(&request, pmu), 0).map(drop)
    };
    // The period is long enough to be valid on any host. The event never runs.
    let sampling = Sampling { rate: Rate::Period(1_000_000), engine: Engine::Exit };
    let samples = offer.shortest_period.is_some() && opens(Some(sampling), false).is_ok();
    let excludes = offer.excludes && opens(None, true).is_ok();
    if !samples && !excludes {
        opens(None, false)?;
    }
    Ok(Offer { shortest_period: offer.shortest_period.filter(|_| samples), excludes, ..offer })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hardware_is_not_tried_where_its_pmu_is_not_known() {
        let hardware = Hardware { raw: RawEvents::All, ..Hardware::default() };
        let probed = probe(&hardware, Err(Refusal::SeveralPmus));
        assert!(probed.offers.iter().all(|offer| offer.kind == KIND_SOFTWARE));
        assert!(!probed.offers.is_empty());
        assert_eq!(probed.refusals, [(KIND_HARDWARE, Refusal::SeveralPmus)]);
        // If the operator disables hardware events, an unknown PMU is not reported.
        let without = Hardware { events: false, ..hardware };
        let probed = probe(&without, Err(Refusal::SeveralPmus));
        assert_eq!(probed.refusals, []);
    }

    #[test]
    fn raw_candidates_are_those_of_the_list_that_fit_the_pmu() {
        let listed = RawEvents::Listed([0x11, 0x8, 1 << 21].into());
        let names = |events| -> Vec<(String, u64, bool)> {
            let offers = raw(events, CpuPmu::default()).into_iter();
            offers.map(|offer| (offer.name, offer.config, offer.any_config)).collect()
        };
        let fit = [("raw-0x8".to_owned(), 0x8, false), ("raw-0x11".to_owned(), 0x11, false)];
        assert_eq!(names(&listed), fit);
        assert_eq!(names(&RawEvents::All), [("raw".to_owned(), 0, true)]);
        assert_eq!(names(&RawEvents::default()), []);
    }
}

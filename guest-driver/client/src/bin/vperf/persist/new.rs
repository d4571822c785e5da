//! `vperf persist new`: makes persistent events.

use clap::Args;
use vpmu_client::attr::{
    SAMPLE_ADDR, SAMPLE_CPU, SAMPLE_IDENTIFIER, SAMPLE_IP, SAMPLE_PERIOD, SAMPLE_TID, SAMPLE_TIME,
};
use vpmu_client::{Error, Event, EventAttr, History, Vpmu};

use super::{PersistError, list};
use crate::events::{Chosen, EventArgs};
use crate::period::PeriodArgs;
use crate::sampling::SamplingError;
use crate::target::CpuArgs;

const PAGE: u32 = 4096;
/// Sample fields. `SAMPLE_IDENTIFIER` identifies the event of each record when recordings are
/// merged.
const FIELDS: u64 = SAMPLE_IDENTIFIER | SAMPLE_IP | SAMPLE_TID | SAMPLE_TIME | SAMPLE_CPU | SAMPLE_PERIOD;

/// Make persistent events, which count and sample until they are ended.
///
/// Makes each event once on each CPU. A full ring keeps the newest samples; with --until-full it
/// keeps the unread samples, and further samples are lost and counted.
///
/// Examples:
///   vperf persist new -e task-clock -F 100 --name flight
///   vperf persist new -e mark=7 -C 0 --size 64K --name signposts
///   vperf persist new -e exits-io -C 0 --size 0               counts only
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(super) struct NewArgs {
    #[command(flatten)]
    events: EventArgs,
    #[command(flatten)]
    period: PeriodArgs,
    #[command(flatten)]
    cpus: CpuArgs,
    /// Name of the event: lower-case letters, digits, - and _, with a letter first. On several
    /// CPUs, each event's name gets a hyphen and its CPU's number as a suffix, as in flight-0.
    /// [default: `event` followed by its id]
    #[arg(long)]
    name: Option<String>,
    /// Bytes of each ring, 4K times a power of two, or 0 to only count. [default: 256K, or the
    /// device's limit]
    #[arg(long, value_name = "SIZE", value_parser = ring_size)]
    size: Option<u32>,
    /// Keep unread samples instead of the newest.
    #[arg(long)]
    until_full: bool,
    /// Record call chains, found by frame pointers. Each sample then causes a VM exit.
    #[arg(short = 'g', long)]
    call_graph: bool,
    /// Print the new events as one JSON array.
    #[arg(long)]
    json: bool,
}

/// Parses a ring's size in bytes; returns its number of data pages, or zero for an event without a
/// ring.
fn ring_size(text: &str) -> Result<u32, String> {
    if text == "0" {
        return Ok(0);
    }
    let pages_log2 = crate::tracing::area_size(text)?;
    1u32.checked_shl(pages_log2).ok_or_else(|| "larger than any ring".into())
}

/// Returns the number of data pages of a ring: `asked`, or the default. Fails if `asked` exceeds
/// `most`, the device's limit.
fn data_pages(asked: Option<u32>, most: u32) -> Result<u32, SamplingError> {
    const DEFAULT: u32 = 64;
    match asked {
        Some(asked) if asked > most => Err(SamplingError::Pages(most)),
        Some(asked) => Ok(asked),
        None => Ok(DEFAULT.min(most)),
    }
}

impl NewArgs {
    /// Attributes of each event.
    fn attr(&self, vpmu: &Vpmu, event: &Chosen, pages: u32) -> Result<EventAttr, SamplingError> {
        let attr = event.attr.clone().persistent();
        if event.leader.is_some() {
            return Err(SamplingError::Group(event.name.clone()));
        }
        if pages == 0 {
            return Ok(attr);
        }
        if event.entry.trace.is_some() {
            return Err(SamplingError::Trace(event.name.clone()));
        }
        if !event.entry.samples {
            return Err(SamplingError::NoSamples(event.name.clone()));
        }
        let unit = &event.entry.unit;
        let attr = self.period.apply(attr, &event.name, unit, vpmu.info())?;
        let value = if event.name.starts_with("mark") {
            // A mark's value is in the address field.
            SAMPLE_ADDR
        } else {
            0
        };
        let attr = attr.with(|attr| {
            attr.sample_type = FIELDS | value;
            attr.sample_id_all = true;
            attr.backward = !self.until_full;
            attr.wakeup = pages.saturating_mul(PAGE / 4);
            attr.watermark = true;
        });
        Ok(if self.call_graph { attr.with_call_chains(0) } else { attr })
    }

    fn name(&self, cpu: u32, cpus: usize) -> String {
        match &self.name {
            Some(name) if cpus > 1 => format!("{name}-{cpu}"),
            Some(name) => name.clone(),
            None => String::new(),
        }
    }

    /// Opens, maps, names and enables the event; returns its id.
    fn make(&self, vpmu: &Vpmu, attr: &EventAttr, name: &str, pages: u32) -> Result<u64, Error> {
        let event = vpmu.open_event(attr)?;
        let made = || -> Result<u64, Error> {
            let overwrites = !self.until_full;
            // The first mapping creates the ring. The ring remains after it is unmapped.
            if pages > 0 && overwrites {
                History::map(&event, pages, overwrites)?;
            } else if pages > 0 {
                event.map(pages.ilog2())?;
            }
            let id = event.detach(name)?;
            event.enable()?;
            Ok(id)
        };
        made().inspect_err(|_| end(&event))
    }
}

/// Ends a new event after a later step has failed. Ignores errors, because the caller reports the failed step.
fn end(event: &Event) {
    let _ = event.attach();
}

pub(super) fn run(args: &NewArgs) -> Result<(), PersistError> {
    let vpmu = Vpmu::open()?;
    let chosen = args.events.to_sample(&vpmu).map_err(SamplingError::from)?;
    if chosen.is_empty() {
        return Err(SamplingError::NoDefault.into());
    }
    if let (Some(name), 2..) = (&args.name, chosen.len()) {
        return Err(PersistError::Names(name.clone()));
    }
    let cpus = args.cpus.list()?;
    let pages = data_pages(args.size, vpmu.info().max_ring_pages)?;
    let mut ids = Vec::new();
    for event in &chosen {
        let attr = args.attr(&vpmu, event, pages)?;
        for &cpu in &cpus {
            let name = args.name(cpu, cpus.len());
            let on_cpu = attr.clone().on_cpu(i32::try_from(cpu).unwrap_or(i32::MAX));
            match args.make(&vpmu, &on_cpu, &name, pages) {
                Ok(id) => ids.push(id),
                Err(source) => {
                    take_back(&vpmu, &ids);
                    return Err(PersistError::New { name: event.name.clone(), cpu, source });
                }
            }
        }
    }
    let mut events = vpmu.persistent()?;
    events.retain(|event| ids.contains(&event.id));
    list::show(&vpmu, &events, args.json)
}

fn take_back(vpmu: &Vpmu, ids: &[u64]) {
    let events = vpmu.persistent().unwrap_or_default();
    for event in events.iter().filter(|event| ids.contains(&event.id)) {
        if let Ok(event) = vpmu.reopen(event) {
            end(&event);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_are_powers_of_two_or_none() {
        assert_eq!(ring_size("0"), Ok(0));
        assert_eq!(ring_size("4096"), Ok(1));
        assert_eq!(ring_size("64K"), Ok(16));
        for wrong in ["1", "12K", "", "x", "-4K", "64T"] {
            assert!(ring_size(wrong).is_err(), "{wrong}");
        }
        assert!(matches!(data_pages(None, 1024), Ok(64)));
        assert!(matches!(data_pages(None, 16), Ok(16)));
        assert!(matches!(data_pages(Some(0), 16), Ok(0)));
        assert!(matches!(data_pages(Some(17), 16), Err(SamplingError::Pages(16))));
    }
}

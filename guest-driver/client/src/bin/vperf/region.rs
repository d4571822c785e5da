//! Regions of interest: events count and sample only between two marks that the measured programs
//! place. Starters and stoppers on the host switch the events on and off.

use clap::Args;
use vpmu_client::trigger::TriggerError;
use vpmu_client::{Event, EventAttr, Vpmu};

use crate::format::grouped;
use crate::target::{Opened, Target};

#[derive(Debug, Clone, Args)]
pub(crate) struct RegionArgs {
    /// Measure only from this mark on: a number that the program places (0 to 4294967295, or
    /// 0x and hexadecimal digits).
    ///
    /// The host starts the events at the instruction after the mark. With --to it stops them at the
    /// mark that ends the region; the VM exit that this mark causes is still counted. Marks, exits
    /// and other events of the device are exact; events that a host counter counts are late by the
    /// counter's skid. Each thread begins outside the region, and enters and leaves it by its own
    /// marks; with -a and -C each CPU does so by the marks placed on it. Without --to the region
    /// has no end. If --from and --to are the same mark, the first enters the region, the next
    /// leaves it.
    #[arg(long, value_name = "MARK", value_parser = mark)]
    from: Option<u32>,
    /// Measure only up to this mark; without --from, from the beginning to the first such mark.
    #[arg(long, value_name = "MARK", value_parser = mark)]
    to: Option<u32>,
}

fn mark(text: &str) -> Result<u32, String> {
    let value = match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    };
    value.ok_or_else(|| "not a mark: a number from 0 to 4294967295".into())
}

/// An error of measuring a region.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RegionError {
    #[error("cannot open mark {mark}, which --from and --to need")]
    Open { mark: u32, source: vpmu_client::Error },
    #[error("cannot link mark {mark} to the measured events")]
    Link { mark: u32, source: TriggerError },
    #[error("cannot read how often the region was entered and left")]
    Read(#[source] vpmu_client::event::EventError),
}

/// The marks that delimit a region, and how often the measured tasks or CPUs entered and left it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Passages {
    from: Option<u32>,
    to: Option<u32>,
    /// Number of start marks placed outside the region.
    entered: Option<u64>,
    /// Number of end marks placed inside the region.
    left: Option<u64>,
}

/// The events that delimit a region, and the events that count how often it is entered and left. Each event is opened
/// on all measured tasks or CPUs.
#[derive(Debug, Default)]
pub(crate) struct Region {
    from: Option<u32>,
    to: Option<u32>,
    /// Counts start marks, while outside the region.
    entered: Vec<Opened>,
    /// Counts end marks, while inside the region.
    left: Vec<Opened>,
    stoppers: Vec<Opened>,
    /// Empty if `from` and `to` are the same mark: then the stoppers are also the starters.
    starters: Vec<Opened>,
}

impl RegionArgs {
    /// Formats the region for a heading: `, from mark 7 to mark 8`; empty without a region.
    pub(crate) fn place(&self) -> String {
        let ends = [("from", self.from), ("to", self.to)];
        let named = ends.iter().filter_map(|(word, mark)| Some((word, (*mark)?)));
        let words: String = named.map(|(word, mark)| format!(" {word} mark {mark}")).collect();
        if words.is_empty() { words } else { format!(",{words}") }
    }

    /// Restricts `attr` to the region.
    pub(crate) fn apply(&self, attr: EventAttr) -> EventAttr {
        if self.from.is_some() { attr.enabled_on_starter() } else { attr }
    }

    /// Opens the events of the region's marks and links them to all of `targets`; `None` without a
    /// region.
    pub(crate) fn open(&self, vpmu: &Vpmu, target: &Target, targets: &[Opened]) -> Result<Option<Region>, RegionError> {
        let (from, to) = (self.from, self.to);
        if from.or(to).is_none() {
            return Ok(None);
        }
        let open = |mark: Option<u32>, make: &dyn Fn(EventAttr) -> EventAttr| match mark {
            Some(mark) => open_mark(vpmu, target, mark, make),
            None => Ok(Vec::new()),
        };
        let trigger = |attr: EventAttr| attr.triggering(1);
        let region = Region {
            from,
            to,
            entered: open(from, &|attr| attr)?,
            left: open(to, &|attr| self.apply(attr))?,
            stoppers: open(to, &trigger)?,
            starters: open(from.filter(|_| from != to), &trigger)?,
        };
        region.link(targets)?;
        Ok(Some(region))
    }
}

/// Opens a mark's event on all measured tasks or CPUs.
fn open_mark(
    vpmu: &Vpmu,
    target: &Target,
    mark: u32,
    make: &dyn Fn(EventAttr) -> EventAttr,
) -> Result<Vec<Opened>, RegionError> {
    let error = |source| RegionError::Open { mark, source };
    let attr = make(vpmu.attr(&format!("mark={mark}")).map_err(error)?);
    let opened = target.open(0, &attr, |_, attr| vpmu.open_event(attr));
    opened.map_err(error)
}

impl Region {
    /// Makes the targets and the counter of end marks count only inside the region, and the counter
    /// of start marks only outside it. So only the marks that enter or leave the region are
    /// counted.
    fn link(&self, targets: &[Opened]) -> Result<(), RegionError> {
        let inside = || targets.iter().chain(&self.left);
        if let Some(mark) = self.from {
            let triggers = if self.from == self.to { &self.stoppers } else { &self.starters };
            let error = |source| RegionError::Link { mark, source };
            link(triggers, inside(), Event::set_starter_of).map_err(error)?;
            link(triggers, &self.entered, Event::set_stopper_of).map_err(error)?;
        }
        if let Some(mark) = self.to {
            let error = |source| RegionError::Link { mark, source };
            link(&self.stoppers, inside(), Event::set_stopper_of).map_err(error)?;
            link(&self.stoppers, &self.entered, Event::set_starter_of).map_err(error)?;
        }
        Ok(())
    }

    /// The events in the order in which to enable them, after the targets. Starters come last, so
    /// that all their targets are enabled before their first overflow.
    pub(crate) fn events(&self) -> impl Iterator<Item = &Opened> {
        let counters = self.entered.iter().chain(&self.left);
        counters.chain(&self.stoppers).chain(&self.starters)
    }

    /// Reads how often the region was entered and left.
    pub(crate) fn passages(&self) -> Result<Passages, RegionError> {
        let sum = |events: &[Opened]| -> Result<u64, RegionError> {
            let counts = events.iter().map(|opened| opened.event.read());
            let sum = counts.map(|count| count.map(|count| count.value)).sum();
            let sum: Result<u64, _> = sum;
            sum.map_err(RegionError::Read)
        };
        let of = |mark: Option<u32>, events| mark.map(|_| sum(events)).transpose();
        Ok(Passages {
            from: self.from,
            to: self.to,
            entered: of(self.from, &self.entered)?,
            left: of(self.to, &self.left)?,
        })
    }
}

/// Links each trigger with the `targets` on the same task or CPU.
fn link<'a>(
    triggers: &[Opened],
    targets: impl IntoIterator<Item = &'a Opened> + Clone,
    link: fn(&Event, &Event) -> Result<(), TriggerError>,
) -> Result<(), TriggerError> {
    for trigger in triggers {
        let targets = targets.clone().into_iter();
        for target in targets.filter(|target| target.place == trigger.place) {
            link(&trigger.event, &target.event)?;
        }
    }
    Ok(())
}

impl Passages {
    /// Text for the summary.
    pub(crate) fn describe(&self) -> String {
        let times = |count: u64| match count {
            1 => "once".to_owned(),
            count => format!("{} times", grouped(count)),
        };
        let mut parts = Vec::new();
        parts.extend(self.entered.map(|count| format!("entered {}", times(count))));
        parts.extend(self.left.map(|count| format!("left {}", times(count))));
        let nothing = match (self.entered, self.from) {
            (Some(0), Some(mark)) => {
                format!(": the measured tasks did not place mark {mark}")
            }
            _ => String::new(),
        };
        format!("region {}{nothing}", parts.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_numbers_of_32_bits() {
        assert_eq!(mark("0"), Ok(0));
        assert_eq!(mark("4294967295"), Ok(u32::MAX));
        assert_eq!(mark("0xff"), Ok(255));
        for wrong in ["", "-1", "4294967296", "0x", "begin", "+", "0x100000000"] {
            assert!(mark(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn event_of_region_opens_paused() {
        let apply = |from, to| RegionArgs { from, to }.apply(EventAttr::new(9, 7));
        assert!(apply(Some(1), Some(2)).enable_on_starter);
        assert!(apply(Some(1), None).enable_on_starter);
        assert!(!apply(None, Some(2)).enable_on_starter);
        assert!(!apply(None, None).enable_on_starter);
    }

    #[test]
    fn heading_names_region_marks() {
        let place = |from, to| RegionArgs { from, to }.place();
        assert_eq!(place(Some(7), Some(8)), ", from mark 7 to mark 8");
        assert_eq!(place(Some(7), None), ", from mark 7");
        assert_eq!(place(None, Some(8)), ", to mark 8");
        assert_eq!(place(None, None), "");
    }

    #[test]
    fn passages_are_counted_by_side() {
        let describe = |from: Option<u64>, left| {
            let passages = Passages { from: from.map(|_| 7), to: None, entered: from, left };
            passages.describe()
        };
        assert_eq!(describe(Some(10_000), Some(1)), "region entered 10,000 times, left once");
        assert_eq!(describe(Some(0), None), "region entered 0 times: the measured tasks did not place mark 7");
        assert_eq!(describe(None, Some(2)), "region left 2 times");
    }
}

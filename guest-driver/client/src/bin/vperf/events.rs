//! Selection of events: `-e`, or defaults suitable for this host.

use clap::Args;
use vpmu_client::{Catalogue, Entry, Error, EventAttr, Vpmu};

/// The default events of stat, in order; events that the host lacks are omitted.
const TO_COUNT: [&str; 16] = [
    "task-clock",
    "cycles",
    "instructions",
    "context-switches",
    "cpu-migrations",
    "page-faults",
    "tsc",
    "guest-time",
    "exits",
    "exits-user",
    "exits-io",
    "exits-mmio",
    "exits-hlt",
    "exits-signal",
    "exits-other",
    "halts",
];

/// The default events of record: the first that can sample is used.
const TO_SAMPLE: [&str; 3] = ["cycles", "task-clock", "cpu-clock"];

#[derive(Debug, Args)]
pub(crate) struct EventArgs {
    /// Events, as `vperf list` names them; may be given several times.
    ///
    /// `mark=7` counts marks with the value 7; `cycles:u` counts user mode only, `cycles:k` the
    /// kernel only, if the event's source can exclude modes. `{a,b}` is a group: its events count
    /// over the same time.
    #[arg(short = 'e', long = "event", value_name = "EVENT,...", value_delimiter = ',')]
    pub(crate) specs: Vec<String>,
}

/// An event to open, with its specification and catalogue entry.
#[derive(Debug)]
pub(crate) struct Chosen {
    pub(crate) name: String,
    pub(crate) entry: Entry,
    pub(crate) attr: EventAttr,
    /// Index of the group leader; `None` if this event leads a group or is in no group.
    pub(crate) leader: Option<usize>,
}

/// An error of the selection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EventsError {
    #[error(transparent)]
    Client(#[from] Error),
    #[error("-e {0}: write a group as {{a,b}}; groups do not nest")]
    Braces(String),
}

impl EventArgs {
    /// Whether the user named the events. If so, a refused event is an error.
    pub(crate) fn explicit(&self) -> bool {
        !self.specs.is_empty()
    }

    /// The events of stat.
    pub(crate) fn to_count(&self, vpmu: &Vpmu) -> Result<Vec<Chosen>, EventsError> {
        let defaults = TO_COUNT.iter().copied();
        self.resolve(vpmu, defaults.filter(|name| vpmu.catalogue().get(name).is_some()))
    }

    /// The events of record.
    pub(crate) fn to_sample(&self, vpmu: &Vpmu) -> Result<Vec<Chosen>, EventsError> {
        self.resolve(vpmu, first_that_samples(vpmu.catalogue()))
    }

    fn resolve<'a>(
        &'a self,
        vpmu: &Vpmu,
        defaults: impl IntoIterator<Item = &'a str>,
    ) -> Result<Vec<Chosen>, EventsError> {
        let named = self.specs.iter().map(String::as_str);
        let specs: Vec<&str> = if self.explicit() { named.collect() } else { defaults.into_iter().collect() };
        let mut chosen = Vec::new();
        for (spec, leader) in grouped(&specs)? {
            chosen.push(choose(vpmu, spec, leader)?);
        }
        Ok(chosen)
    }
}

/// Removes the braces. Returns each spec with the index of its group's leader; `None` if the event
/// leads a group or is in none.
fn grouped<'a>(specs: &[&'a str]) -> Result<Vec<(&'a str, Option<usize>)>, EventsError> {
    let wrong = || EventsError::Braces(specs.join(","));
    let mut open = None;
    let mut bare = Vec::new();
    for (index, &spec) in specs.iter().enumerate() {
        let (begins, rest) = match spec.strip_prefix('{') {
            Some(rest) => (true, rest),
            None => (false, spec),
        };
        let (ends, name) = match rest.strip_suffix('}') {
            Some(name) => (true, name),
            None => (false, rest),
        };
        let member = match open {
            Some(_) if begins => return Err(wrong()),
            None if ends && !begins => return Err(wrong()),
            open => open,
        };
        if name.contains(['{', '}']) {
            return Err(wrong());
        }
        bare.push((name, member));
        if begins {
            open = Some(index);
        }
        if ends {
            open = None;
        }
    }
    if open.is_some() { Err(wrong()) } else { Ok(bare) }
}

fn first_that_samples(catalogue: &Catalogue) -> Option<&'static str> {
    let samples = |name: &&str| catalogue.get(name).is_some_and(|entry| entry.samples);
    TO_SAMPLE.into_iter().find(samples)
}

/// Selects the event that `spec` names.
pub(crate) fn choose(vpmu: &Vpmu, spec: &str, leader: Option<usize>) -> Result<Chosen, EventsError> {
    let attr = vpmu.attr(spec)?;
    let entry = vpmu.catalogue().entry(spec).map_err(Error::from)?;
    let entry = entry.clone();
    Ok(Chosen { name: spec.into(), entry, attr, leader })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(line: &str) -> Option<Vec<(String, Option<usize>)>> {
        let specs: Vec<&str> = line.split(',').collect();
        let specs = grouped(&specs).ok()?;
        Some(specs.iter().map(|&(s, l)| (s.to_owned(), l)).collect())
    }

    #[test]
    fn braces_make_groups() {
        let part = |name: &str, leader| (name.to_owned(), leader);
        assert_eq!(
            parts("a,{b,c,d},{e},f"),
            Some(vec![
                part("a", None),
                part("b", None),
                part("c", Some(1)),
                part("d", Some(1)),
                part("e", None),
                part("f", None),
            ])
        );
        for wrong in ["{a", "a}", "{a,{b}}", "{{a}}", "a,b}", "{a,b", "a{b}"] {
            assert_eq!(parts(wrong), None, "{wrong}");
        }
    }
}

//! Which events a person means: `-e`, or what is sensible on this host.

use clap::Args;
use vpmu_client::{Catalogue, Entry, Error, EventAttr, Vpmu};

/// The events of stat where nobody names any, in this order, as far as the host has them.
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

/// The event of record where nobody names any: the first that samples.
const TO_SAMPLE: [&str; 3] = ["cycles", "task-clock", "cpu-clock"];

#[derive(Debug, Args)]
pub(crate) struct EventArgs {
    /// Events, as `vperf list` names them; may be given several times.
    ///
    /// `mark=7` counts marks of the value 7; `cycles:u` counts user mode only, `cycles:k`
    /// the kernel only, where the list's source can tell them apart.
    #[arg(
        short = 'e',
        long = "event",
        value_name = "EVENT,...",
        value_delimiter = ','
    )]
    pub(crate) specs: Vec<String>,
}

/// An event to open: as asked for, what the catalogue says of it, and how to open it.
#[derive(Debug)]
pub(crate) struct Chosen {
    pub(crate) name: String,
    pub(crate) entry: Entry,
    pub(crate) attr: EventAttr,
}

impl EventArgs {
    /// A person named them: what cannot be done then is an error, not a gap.
    pub(crate) fn explicit(&self) -> bool {
        !self.specs.is_empty()
    }

    /// The events of stat.
    pub(crate) fn to_count(&self, vpmu: &Vpmu) -> Result<Vec<Chosen>, Error> {
        let defaults = TO_COUNT.iter().copied();
        self.resolve(
            vpmu,
            defaults.filter(|name| vpmu.catalogue().get(name).is_some()),
        )
    }

    /// The events of record.
    pub(crate) fn to_sample(&self, vpmu: &Vpmu) -> Result<Vec<Chosen>, Error> {
        self.resolve(vpmu, first_that_samples(vpmu.catalogue()))
    }

    fn resolve<'a>(
        &'a self,
        vpmu: &Vpmu,
        defaults: impl IntoIterator<Item = &'a str>,
    ) -> Result<Vec<Chosen>, Error> {
        let named = self.specs.iter().map(String::as_str);
        let specs: Vec<&str> = if self.explicit() {
            named.collect()
        } else {
            defaults.into_iter().collect()
        };
        specs.into_iter().map(|spec| choose(vpmu, spec)).collect()
    }
}

fn first_that_samples(catalogue: &Catalogue) -> Option<&'static str> {
    let samples = |name: &&str| catalogue.get(name).is_some_and(|entry| entry.samples);
    TO_SAMPLE.into_iter().find(samples)
}

fn choose(vpmu: &Vpmu, spec: &str) -> Result<Chosen, Error> {
    let attr = vpmu.attr(spec)?;
    let entry = vpmu.catalogue().entry(spec)?.clone();
    Ok(Chosen {
        name: spec.into(),
        entry,
        attr,
    })
}

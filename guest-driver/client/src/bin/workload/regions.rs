//! Work between marks, a known number of times: what `vperf stat --from --to` measures.

use std::thread;

use clap::Args;
use vpmu_client::{Marks, Vpmu, error};

use crate::arch::Port;

/// Begin and end regions by marks, with the same work in each.
///
/// A region is the mark --from, so many port writes, so many marks, and the mark --to.
#[derive(Debug, Args)]
pub(crate) struct RegionsArgs {
    /// How many regions each thread makes.
    count: u64,
    /// The mark that begins one.
    #[arg(long, default_value_t = 1)]
    from: u32,
    /// The mark that ends one.
    #[arg(long, default_value_t = 2)]
    to: u32,
    /// Writes to port 0x80 in each: a VM exit each.
    #[arg(long, default_value_t = 0)]
    ports: u64,
    /// Marks in each.
    #[arg(long, default_value_t = 0)]
    marks: u64,
    /// Of which value.
    #[arg(long, default_value_t = 3)]
    value: u32,
    /// Do the same work once more between regions.
    #[arg(long)]
    outside: bool,
    /// How many threads do so at once.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: u16,
}

/// Does the work and says how its marks were placed.
pub(crate) fn run(args: &RegionsArgs) -> Result<(), String> {
    let vpmu = Vpmu::open().map_err(|error| error::chain(&error))?;
    let marks = vpmu.marks().map_err(|error| error::chain(&error))?;
    let port = match args.ports {
        0 => None,
        // Before the threads, which inherit the permission.
        _ => Some(Port::open()?),
    };
    let work = Work {
        args,
        marks: &marks,
        port: port.as_ref(),
    };
    thread::scope(|scope| {
        let more: Vec<_> = (1..args.threads)
            .map(|_| scope.spawn(|| work.regions()))
            .collect();
        more.into_iter()
            .map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|_| Err("a thread panicked".into()))
            })
            .fold(work.regions(), Result::and)
    })?;
    let how = match marks.refusal() {
        None => "a store".to_owned(),
        Some(refusal) => format!("a system call (mapping the doorbell: {refusal})"),
    };
    println!(
        "regions: {} in {} threads, each mark by {how}",
        args.count, args.threads
    );
    Ok(())
}

struct Work<'a> {
    args: &'a RegionsArgs,
    marks: &'a Marks,
    port: Option<&'a Port>,
}

impl Work<'_> {
    fn regions(&self) -> Result<(), String> {
        for _ in 0..self.args.count {
            self.mark(self.args.from)?;
            self.inside()?;
            self.mark(self.args.to)?;
            if self.args.outside {
                self.inside()?;
            }
        }
        Ok(())
    }

    fn inside(&self) -> Result<(), String> {
        if let Some(port) = self.port {
            (0..self.args.ports).for_each(|_| port.write());
        }
        (0..self.args.marks).try_for_each(|_| self.mark(self.args.value))
    }

    fn mark(&self, value: u32) -> Result<(), String> {
        self.marks
            .place(value)
            .map_err(|error| error::chain(&error))
    }
}

//! Repeats the same work a known number of times, each time between two marks, for
//! `vperf stat --from --to`.

use std::thread;

use clap::Args;
use vpmu_client::{Marks, Vpmu, error};

use crate::arch::Port;

/// Place marks around regions of equal work.
///
/// A region consists of a mark with the value of --from, the port writes (--ports), more marks (--marks),
/// and a mark with the value of --to, in this order.
#[derive(Debug, Args)]
pub(crate) struct RegionsArgs {
    /// Regions per thread.
    count: u64,
    /// The mark that begins a region.
    #[arg(long, default_value_t = 1)]
    from: u32,
    /// The mark that ends a region.
    #[arg(long, default_value_t = 2)]
    to: u32,
    /// Port writes in each region, as in `workload ports`; each causes a VM exit.
    #[arg(long, default_value_t = 0)]
    ports: u64,
    /// Marks in each region.
    #[arg(long, default_value_t = 0)]
    marks: u64,
    /// Value of those marks.
    #[arg(long, default_value_t = 3)]
    value: u32,
    /// Repeat the same work between regions.
    #[arg(long)]
    outside: bool,
    /// Threads that do this at the same time.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: u16,
}

/// Does the work and prints the method of placing marks.
pub(crate) fn run(args: &RegionsArgs) -> Result<(), String> {
    let vpmu = Vpmu::open().map_err(|error| error::chain(&error))?;
    let marks = vpmu.marks().map_err(|error| error::chain(&error))?;
    let port = match args.ports {
        0 => None,
        // Open the port before the threads start: they inherit the permission.
        _ => Some(Port::open()?),
    };
    let work = Work { args, marks: &marks, port: port.as_ref() };
    thread::scope(|scope| {
        let more: Vec<_> = (1..args.threads).map(|_| scope.spawn(|| work.regions())).collect();
        more.into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err("a thread panicked".into())))
            .fold(work.regions(), Result::and)
    })?;
    let how = match marks.refusal() {
        None => "a store".to_owned(),
        Some(refusal) => format!("a system call (mapping the doorbell: {refusal})"),
    };
    println!("regions: {} in each of {} threads, each mark by {how}", args.count, args.threads);
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
        self.marks.place(value).map_err(|error| error::chain(&error))
    }
}

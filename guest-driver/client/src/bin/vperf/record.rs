//! `vperf record`: copies samples from the rings to a file.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use vpmu_client::device::DeviceError;
use vpmu_client::{EventAttr, Vpmu};

use crate::events::EventArgs;
use crate::os::SNAPSHOT;
use crate::recording::{self, Recording, RecordingError, Sources};
use crate::region::{Region, RegionArgs, RegionError};
use crate::sampling::{SamplingArgs, SamplingError};
use crate::session::Session;
use crate::target::{TargetArgs, TargetError};
use crate::tracing::{self, AreaChoice, TracingError};
use crate::workload::WorkloadError;

/// Sample where an event occurs in a command, in tasks, or on CPUs.
///
/// After each period of the event (-c), the host writes a sample to a ring in this machine's
/// memory. vperf copies the samples to a file that perf reads, too. When a ring is full,
/// further samples are lost, and vperf reports their number. If so, give the ring more pages (-m)
/// or the event a longer period (-c).
///
/// With -g each sample has its callers, found by frame pointers (Rust: -C force-frame-pointers=yes,
/// C: -fno-omit-frame-pointer). Few distributions build their kernel with frame pointers; in other
/// kernels only the innermost function is known.
///
/// With --aux a trace of the same command, tasks or CPUs is recorded beside the samples: in the file,
/// each packet of the trace is a sample. `vperf exits report` shows a trace of exits. If an AUX area has no room for a packet, the packet is lost, and
/// vperf reports the number of lost bytes. With --snapshot only the newest packets in the areas are
/// written, at the end and on each SIGUSR2.
///
/// Examples:
///   vperf record -- make -j2
///   vperf record -g -- workload tree
///   vperf record -e task-clock -F 2000 -- workload hot
///   vperf record -e exits-io -c 1 -a -o io.data -- sleep 5
///   vperf record --from 7 --to 8 -- program     samples between its marks 7 and 8
///   vperf record --aux exit-trace-user -- dd if=/dev/vda of=/dev/null
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct RecordArgs {
    #[command(flatten)]
    events: EventArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Record call chains. HOW selects how callers are found: only fp, by frame pointers, is
    /// supported.
    #[arg(short = 'g', long, value_enum, value_name = "HOW", num_args = 0..=1,
          require_equals = true, default_missing_value = "fp")]
    call_graph: Option<CallGraph>,
    /// Maximum number of addresses in a call chain.
    #[arg(long, value_name = "N", requires = "call_graph",
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    max_stack: Option<u16>,
    /// Also record these traces. `vperf list` shows their names. May be given several times. -c and
    /// -F also apply to a trace of samples.
    #[arg(long, value_name = "TRACE,...", value_delimiter = ',')]
    aux: Vec<String>,
    /// Bytes of each trace's AUX area, a power of two such as 64K or 4M. [default: 4M, or the
    /// device's limit]
    #[arg(long, value_name = "SIZE", value_parser = tracing::area_size, requires = "aux")]
    aux_size: Option<u32>,
    /// Keep only the newest packets of traces, and write them at the end and on each SIGUSR2.
    #[arg(long, requires = "aux")]
    snapshot: bool,
    /// The file to write; an existing one is kept as FILE.old.
    #[arg(short, long, value_name = "FILE", default_value = "perf.data")]
    output: PathBuf,
    #[command(flatten)]
    region: RegionArgs,
    #[command(flatten)]
    pub(crate) target: TargetArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum CallGraph {
    /// By frame pointers.
    Fp,
}

/// An error of recording.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    #[error(transparent)]
    Tracing(#[from] TracingError),
    #[error(transparent)]
    Workload(WorkloadError),
    #[error(transparent)]
    Target(TargetError),
    #[error(transparent)]
    Recording(#[from] RecordingError),
    #[error(transparent)]
    Region(#[from] RegionError),
}

impl From<TargetError> for RecordError {
    fn from(error: TargetError) -> Self {
        match error {
            TargetError::Workload(error) => Self::Workload(error),
            error => Self::Target(error),
        }
    }
}

pub(crate) fn run(args: &RecordArgs) -> Result<u8, RecordError> {
    let vpmu = Vpmu::open()?;
    let sampled = args.sampling.choose(&args.events, &vpmu, |attr| args.region.apply(args.with_chains(attr)))?;
    let mut traced = tracing::choose(&vpmu, &args.aux, args.sampling.period())?;
    for trace in &mut traced {
        trace.attr = args.region.apply(trace.attr.clone());
    }
    let areas = AreaChoice { pages: args.aux_size, snapshot: args.snapshot };
    let signals: &[i32] = if args.snapshot { &[SNAPSHOT] } else { &[] };
    let target = args.target.prepare_catching(signals)?;
    let (mut opened, rings) = args.sampling.open(&vpmu, &target, &sampled)?;
    opened.extend(areas.open(&vpmu, &target, &traced, sampled.len())?);
    let region = args.region.open(&vpmu, &target, &opened)?;
    let sources = Sources {
        sampled: &sampled,
        rings,
        traced: &traced,
        buffers: areas.map(&vpmu, &traced, &opened, sampled.len())?,
        snapshot: args.snapshot,
    };
    let info = *vpmu.info();
    let mut recording = Recording::begin(&args.output, sources, info, &target)?;
    let marks = region.iter().flat_map(Region::events);
    let mut session = Session::start(target, opened.iter().chain(marks))?;
    recording.follow(&opened, &mut session)?;
    let code = recording.finish(&opened, session)?;
    if let Some(region) = &region {
        recording::say(&region.passages()?.describe());
    }
    Ok(code)
}

impl RecordArgs {
    fn with_chains(&self, attr: EventAttr) -> EventAttr {
        match self.call_graph {
            None => attr,
            // Omit the frames of an excluded mode. Users who may not see kernel addresses can
            // sample only user mode, and only if the chains omit the kernel's frames.
            Some(CallGraph::Fp) => attr.with_call_chains(self.max_stack.unwrap_or(0)).with(|attr| {
                attr.exclude_callchain_kernel = attr.exclude_kernel;
                attr.exclude_callchain_user = attr.exclude_user;
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use vpmu_client::attr::SAMPLE_CALLCHAIN;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: RecordArgs,
    }

    fn attr(line: &str) -> EventAttr {
        let line = Line::try_parse_from(line.split(' ')).unwrap();
        assert_eq!(line.args.target.command, ["true", "-g"]);
        line.args.with_chains(EventAttr::new(0, 0))
    }

    #[test]
    fn chains_are_recorded_when_asked_for_and_never_eat_the_command() {
        assert_eq!(attr("record true -g").sample_type, 0);
        for line in
            ["record -g true -g", "record --call-graph true -g", "record --call-graph=fp --max-stack 16 true -g"]
        {
            let attr = attr(line);
            assert_eq!(attr.sample_type, SAMPLE_CALLCHAIN, "{line}");
            assert_eq!(attr.max_stack, if line.contains("16") { 16 } else { 0 });
        }
        for wrong in [
            "record --call-graph=dwarf true",
            "record --max-stack 16 true",
            "record -g --max-stack 1025 true",
            "record --engine quick true",
            "record -c 1 -F 1 true",
        ] {
            assert!(Line::try_parse_from(wrong.split(' ')).is_err(), "{wrong}");
        }
    }
}

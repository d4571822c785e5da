//! `vmm export` and `vperf export`: write a recording in the format of another profiler. Only the sources of names differ
//! between the host and the guest.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, IsTerminal};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
pub use vpmu_profile::Names;
use vpmu_profile::{
    By, ExportError as FormatError, Format, NamesError, Options, Profile, ReadError, Selection, SelectionError, Weight,
};

/// The command's arguments.
#[derive(Debug, Clone, Args)]
pub struct ExportArgs {
    /// The recording: a file of 'vmm run --recording', 'vmm ctl dump', 'vperf record' or 'perf record'
    #[arg(value_name = "FILE.data")]
    pub file: PathBuf,

    /// The format to write
    #[arg(long, value_name = "FORMAT")]
    pub to: To,

    /// File to write [default: standard output]
    #[arg(short, long, value_name = "OUT")]
    pub output: Option<PathBuf>,

    /// Event to show [default: the first that is neither marks nor exits]
    #[arg(long, value_name = "NAME")]
    pub event: Option<String>,

    /// The threads of 'firefox' and 'perfetto'
    #[arg(long, default_value = "task")]
    pub by: Threads,

    /// How much a sample weighs; 'pprof' has both weights
    #[arg(long, default_value = "samples")]
    pub weight: Weigh,

    /// Names of the kernel's functions: an unstripped vmlinux, a System.map, or a copy of /proc/kallsyms
    #[arg(long, value_name = "FILE")]
    pub vmlinux: Option<PathBuf>,

    /// Names of programs' functions: a directory with the programs at their paths, or with .build-id in it. Only files
    /// with the recorded build ids are used
    #[arg(long, value_name = "DIR")]
    pub symfs: Option<PathBuf>,
}

/// Formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum To {
    /// One line for each stack, for flamegraph.pl, inferno and speedscope
    Folded,
    /// A flame graph for a browser: click to zoom, Ctrl-F to search
    Svg,
    /// For profiler.firefox.com: threads, with marks, exits and panics as markers
    Firefox,
    /// For 'go tool pprof' and pprof.me
    Pprof,
    /// For ui.perfetto.dev: every sample, mark and exit on the track of its task or vCPU
    Perfetto,
}

/// Meanings of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Threads {
    /// A task; a vCPU where the task is unknown
    Task,
    /// A vCPU
    Vcpu,
}

/// Weights of a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Weigh {
    /// Each sample counts once
    Samples,
    /// A sample counts with its period: nanoseconds of a clock, or events
    Period,
}

/// Errors of the command.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The recording cannot be opened.
    #[error("cannot open {path}")]
    Open {
        /// The path.
        path: PathBuf,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
    /// The recording is not a file.
    #[error("{0} is not a regular file: it must be a recording")]
    NotFile(PathBuf),
    /// The recording cannot be read.
    #[error("cannot export {path}")]
    Read {
        /// The path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: ReadError,
    },
    /// A file with names cannot be read.
    #[error(transparent)]
    Names(#[from] NamesError),
    /// The recording does not contain what was asked for.
    #[error("cannot export {path}")]
    Selection {
        /// The path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: SelectionError,
    },
    /// The output is the recording.
    #[error("{0} is the recording itself: choose another file with --output")]
    SameFile(PathBuf),
    /// The output cannot be created.
    #[error("cannot create {path}: choose another file with --output")]
    Create {
        /// The path.
        path: PathBuf,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
    /// Compressed bytes would go to a terminal.
    #[error("'pprof' is a binary format: choose a file with --output")]
    Terminal,
    /// The profile cannot be written.
    #[error(transparent)]
    Write(#[from] FormatError),
}

impl From<To> for Format {
    fn from(to: To) -> Self {
        match to {
            To::Folded => Self::Folded,
            To::Svg => Self::Svg,
            To::Firefox => Self::Firefox,
            To::Pprof => Self::Pprof,
            To::Perfetto => Self::Perfetto,
        }
    }
}

impl ExportArgs {
    fn options(&self) -> Options {
        Options {
            event: self.event.clone(),
            by: match self.by {
                Threads::Task => By::Task,
                Threads::Vcpu => By::Cpu,
            },
            weight: match self.weight {
                Weigh::Samples => Weight::Samples,
                Weigh::Period => Weight::Period,
            },
        }
    }
}

/// Writes a recording in another format. `names` names functions that neither the recording nor the arguments name.
/// Returns notes on what is missing from the profile, each a line for the user.
///
/// # Errors
/// [`ExportError`].
pub fn run(args: &ExportArgs, names: Names) -> Result<Vec<String>, ExportError> {
    let path = || args.file.clone();
    let file = File::open(&args.file).map_err(|source| ExportError::Open { path: path(), source })?;
    let metadata = file.metadata().map_err(|source| ExportError::Open { path: path(), source })?;
    if !metadata.is_file() {
        return Err(ExportError::NotFile(path()));
    }
    let names = names.with(args.vmlinux.as_deref(), args.symfs.as_deref())?;
    let profile = Profile::read(file, names).map_err(|source| ExportError::Read { path: path(), source })?;
    let selection =
        Selection::new(&profile, &args.options()).map_err(|source| ExportError::Selection { path: path(), source })?;
    let format = Format::from(args.to);
    match &args.output {
        Some(output) => {
            let create = |source| ExportError::Create { path: output.clone(), source };
            // Don't truncate the file before it is known to be another one.
            let out = OpenOptions::new().write(true).create(true).truncate(false).open(output).map_err(create)?;
            let of_output = out.metadata().map_err(create)?;
            if (of_output.dev(), of_output.ino()) == (metadata.dev(), metadata.ino()) {
                return Err(ExportError::SameFile(output.clone()));
            }
            if of_output.is_file() {
                out.set_len(0).map_err(create)?;
            }
            format.write(&selection, &mut BufWriter::new(out))?;
        }
        None => {
            let out = io::stdout().lock();
            if format == Format::Pprof && out.is_terminal() {
                return Err(ExportError::Terminal);
            }
            match format.write(&selection, &mut BufWriter::new(out)) {
                // The reader closed the output early.
                Err(error) if is_broken_pipe(&error) => {}
                written => written?,
            }
        }
    }
    Ok(notes(&profile, &selection, args))
}

fn is_broken_pipe(error: &FormatError) -> bool {
    let kind = match error {
        FormatError::Write(error) => Some(error.kind()),
        FormatError::Json(error) => error.io_error_kind(),
    };
    kind == Some(io::ErrorKind::BrokenPipe)
}

/// Notes on missing samples and names, and how to get them.
fn notes(profile: &Profile, selection: &Selection<'_>, args: &ExportArgs) -> Vec<String> {
    let mut notes = Vec::new();
    let others: Vec<&str> = selection.others().collect();
    if args.event.is_none() && !others.is_empty() && args.to != To::Perfetto {
        notes.push(format!("shows `{}`; --event selects one of: {}", selection.event(), others.join(", ")));
    }
    let lost = profile.events.iter().fold(profile.lost, |lost, event| lost.saturating_add(event.lost));
    if lost > 0 {
        notes.push(format!("the recording lacks {lost} samples that were lost"));
    }
    let (kernel, user) = profile.nameless;
    if kernel > 0 {
        let remedy = if args.vmlinux.is_some() { "does --vmlinux match the kernel?" } else { "pass --vmlinux" };
        notes.push(format!("{kernel} frames of the kernel have no name: {remedy}"));
    }
    if user > 0 {
        let remedy =
            if args.symfs.is_some() { "their files are not in --symfs, or have no build id" } else { "pass --symfs" };
        notes.push(format!("{user} frames of programs have no name: {remedy}"));
    }
    notes
}

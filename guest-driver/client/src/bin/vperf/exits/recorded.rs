//! Exits of a recording. A recording may have many exits, so they are read from the file on demand. A first pass reads
//! the lines that describe processes, which are spread over the whole file.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use vpmu_client::Packet;
use vpmu_client::trace::{Exit, Format, Packets};

use crate::data::{self, DataError, Kernel, Line, Process, Task, TraceLine};
use crate::names::{Key, Names, Spot};
use crate::symbols::Programs;

/// An error of reading the recording.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordedError {
    #[error("{}{}", path.display(), hint(source))]
    Data { path: PathBuf, source: DataError },
    #[error(
        "{}: the recording has no trace of exits: record one with `vperf exits record -- COMMAND` or `vperf record --aux exit-trace-user`", .0.display()
    )]
    NoTrace(PathBuf),
}

fn hint(error: &DataError) -> &'static str {
    match error {
        DataError::Open(error) if error.kind() == std::io::ErrorKind::NotFound => {
            " (record one with `vperf exits record -- COMMAND`, or name it with -i)"
        }
        _ => "",
    }
}

/// The contents of a recording, except its exits.
#[derive(Debug, Default)]
pub(super) struct Recorded {
    path: PathBuf,
    pub(super) target: String,
    pub(super) traces: Vec<Trace>,
    /// Whether the recording is complete, not truncated.
    pub(super) complete: bool,
    pub(super) elapsed_ns: u64,
    /// Approximate time of the earliest packet: the origin of a time axis.
    pub(super) began: u64,
    processes: Vec<Process>,
    tasks: Vec<Task>,
    kernel: Kernel,
}

/// A trace's totals, in bytes.
#[derive(Debug, Default)]
pub(super) struct Trace {
    pub(super) line: TraceLine,
    pub(super) produced: u64,
    pub(super) lost: u64,
    pub(super) written: u64,
    /// Pages of the area in which a packet is malformed.
    pub(super) unreadable: u64,
}

impl Trace {
    /// Whether the trace records exits.
    pub(super) fn has_exits(&self) -> bool {
        self.line.format == Format::Exits
    }
}

impl Recorded {
    /// Reads everything in `path` except the exits.
    pub(super) fn read(path: &Path) -> Result<Self, RecordedError> {
        let mut recorded = Self { path: path.into(), began: u64::MAX, ..Self::default() };
        // Lost bytes, as counted in each event's last sync packet. The key is the trace, the number
        // of the task or CPU, and the event.
        let mut losses = HashMap::new();
        let cut = read_lines(path, |line| recorded.add(line, &mut losses))?;
        recorded.complete &= !cut;
        if !recorded.complete {
            // A truncated recording lacks the lines with the traces' totals, which are at the end.
            // Add up the counts of the last sync packets instead.
            for ((trace, ..), lost) in losses {
                if let Some(trace) = recorded.traces.get_mut(trace) {
                    trace.lost = trace.lost.saturating_add(lost);
                    trace.produced = trace.written.saturating_add(trace.lost);
                }
            }
        }
        if !recorded.traces.iter().any(Trace::has_exits) {
            return Err(RecordedError::NoTrace(path.into()));
        }
        Ok(recorded)
    }

    fn add(&mut self, line: Line, losses: &mut HashMap<(usize, usize, u64), u64>) {
        match line {
            Line::Header(header) => self.target = header.target,
            Line::Process(process) => self.processes.push(process),
            Line::Task(task) => self.tasks.push(task),
            Line::Kernel(kernel) => self.kernel = kernel,
            Line::Trace(line) => self.traces.push(Trace { line, ..Trace::default() }),
            Line::Aux(aux) => {
                let Some(trace) = self.traces.get_mut(aux.trace) else {
                    return;
                };
                trace.written = trace.written.saturating_add(aux.bytes);
                for packet in Packets::new(aux.position, &aux.data) {
                    match packet {
                        Ok(Packet::Sync(sync)) => {
                            self.began = self.began.min(sync.time());
                            losses.insert((aux.trace, aux.place, sync.event()), sync.lost());
                        }
                        Ok(_) => {}
                        Err(_) => trace.unreadable += 1,
                    }
                }
            }
            Line::Traced(traced) => {
                if let Some(trace) = self.traces.get_mut(traced.trace) {
                    trace.produced = trace.produced.saturating_add(traced.produced);
                    trace.lost = trace.lost.saturating_add(traced.lost);
                }
            }
            Line::End(end) => {
                self.complete = true;
                self.elapsed_ns = end.elapsed_ns;
            }
            Line::Event(_) | Line::Sample(_) | Line::Lost(_) | Line::Throttle(_) => {}
        }
    }

    /// Whether the kernel hid its addresses during the recording.
    pub(super) fn kernel_is_hidden(&self) -> bool {
        self.kernel.hidden
    }

    /// Passes all exits to `each`, with their trace's index; the exits of one CPU are in order.
    pub(super) fn exits(&self, mut each: impl FnMut(usize, &Exit)) -> Result<(), RecordedError> {
        read_lines(&self.path, |line| {
            let Line::Aux(aux) = line else {
                return;
            };
            for packet in Packets::new(aux.position, &aux.data) {
                if let Ok(Packet::Exit(exit)) = packet
                    && aux.trace < self.traces.len()
                {
                    each(aux.trace, exit);
                }
            }
        })
        .map(|_| ())
    }

    /// Labels for the recording's exits.
    pub(super) fn labels<'a>(&'a self, programs: &'a mut Programs) -> Labels<'a> {
        Labels { names: Names::new(&self.processes, &self.tasks, &self.kernel, programs), known: HashMap::new() }
    }
}

fn read_lines(path: &Path, each: impl FnMut(Line)) -> Result<bool, RecordedError> {
    data::read(path, each).map_err(|source| RecordedError::Data { path: path.into(), source })
}

/// Names of the tasks and functions that caused exits. The same functions cause many exits, so each name is looked up
/// only once.
#[derive(Debug)]
pub(super) struct Labels<'a> {
    names: Names<'a>,
    /// Labels by sort key, pid, index of the process's state, address, and whether the address is
    /// in user mode.
    known: HashMap<(Key, u32, usize, Option<u64>, bool), String>,
}

impl Labels<'_> {
    /// Returns the label of an exit for `key`: the task or the symbol.
    pub(super) fn of(&mut self, exit: &Exit, key: Key) -> &str {
        let (pid, time, user) = (exit.pid(), exit.time(), exit.user());
        let ip = exit.ip().filter(|_| key == Key::Symbol);
        let spot = Spot { pid, time, cpu: exit.vcpu(), ip: ip.unwrap_or(0), user };
        let names = &mut self.names;
        let version = names.version(pid, time);
        self.known.entry((key, pid, version, ip, user)).or_insert_with(|| {
            if key == Key::Symbol && ip.is_none() { "[unknown]".into() } else { names.of(&spot, key) }
        })
    }
}

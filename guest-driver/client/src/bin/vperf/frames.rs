//! Collects the samples of one frame at a time, so that memory use is bounded, no matter how long the view is open.

use std::collections::HashMap;
use std::path::Path;

use vpmu_client::tasks::{Clocks, TasksError};
use vpmu_client::{Record, Sample};
use vpmu_profile::{Mode, Names, Resolver};

use crate::labels::{self, Key};
use crate::processes::{Change, Process, Processes};
use crate::profile::{Row, Sums};

/// Maximum number of distinct positions ([`Spot`]) in one frame; samples at further positions are
/// counted in one row.
const MOST_SPOTS: usize = 1 << 16;
/// Maximum number of processes looked up in one frame.
const MOST_PROCESSES: usize = 1 << 12;
/// Maximum number of programs with cached symbols.
const MOST_PROGRAMS: usize = 64;

/// Label of the row that counts the samples at all positions beyond the first [`MOST_SPOTS`].
const OTHERS: &str = "[others]";

/// An instruction address with its task and CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Spot {
    pid: u32,
    tid: u32,
    cpu: u32,
    ip: u64,
    user: bool,
}

/// Samples since the last frame.
#[derive(Debug, Default)]
struct Since {
    spots: HashMap<Spot, (u64, u64)>,
    others: (u64, u64),
    processes: Vec<Process>,
    samples: u64,
    lost: u64,
    throttled: u64,
}

/// One refresh of the view.
#[derive(Debug, serde::Serialize)]
pub(crate) struct Frame {
    pub(crate) samples: u64,
    pub(crate) lost: u64,
    pub(crate) throttled: u64,
    pub(crate) rows: Vec<Row>,
}

/// Collects samples into frames.
#[derive(Debug)]
pub(crate) struct FrameCollector {
    since: Since,
    processes: Processes,
    resolver: Resolver,
}

fn processes() -> Processes {
    Processes::new(Path::new("/proc"), Vec::new())
}

impl FrameCollector {
    pub(crate) fn new() -> Self {
        Self { since: Since::default(), processes: processes(), resolver: Resolver::new(Names::here()) }
    }

    /// Whether the kernel hides its addresses from this user.
    pub(crate) fn kernel_is_hidden(&self) -> bool {
        !self.resolver.names_kernel()
    }

    /// Adds one record.
    pub(crate) fn record(&mut self, record: &Record) {
        match record {
            Record::Sample(sample) => self.sample(sample),
            Record::Lost { lost, .. } => self.since.lost = self.since.lost.saturating_add(*lost),
            Record::Throttle(_) => self.since.throttled += 1,
            _ => {}
        }
    }

    fn sample(&mut self, sample: &Sample) {
        self.since.samples += 1;
        let &Sample { pid, tid, cpu, ip, user, .. } = sample;
        let spot = Spot { pid, tid, cpu, ip, user };
        let is_known = self.since.spots.contains_key(&spot);
        let sums = if is_known || self.since.spots.len() < MOST_SPOTS {
            self.since.spots.entry(spot).or_default()
        } else {
            &mut self.since.others
        };
        sums.0 += 1;
        sums.1 = sums.1.saturating_add(sample.period);
        if self.since.processes.len() < MOST_PROCESSES {
            self.processes.saw(sample.pid, 0);
        }
    }

    /// Looks up the names of the processes in the samples added since the last call. Call it after
    /// each read of the rings, because the name of a process cannot be found after the process has
    /// exited.
    pub(crate) fn look(&mut self) -> Result<(), TasksError> {
        // The clocks convert the times of the kernel's task notices. This view gets no notices, so
        // the default clocks suffice.
        let changes = self.processes.news(&Clocks::default())?;
        let room = MOST_PROCESSES.saturating_sub(self.since.processes.len());
        let processes = changes.into_iter().filter_map(|change| match change {
            Change::State(process, _) => Some(process),
            Change::Notice(_) => None,
        });
        self.since.processes.extend(processes.take(room));
        Ok(())
    }

    /// Returns the samples since the last frame and clears them. A process has the newest name that it had in this frame:
    /// after an exec, the new program's name.
    pub(crate) fn frame(&mut self, keys: &[Key]) -> Frame {
        let since = std::mem::take(&mut self.since);
        self.processes = processes();
        if self.resolver.programs() > MOST_PROGRAMS {
            self.resolver = Resolver::new(Names::here());
        }
        self.resolver.clear();
        for process in &since.processes {
            process.apply(&mut self.resolver);
        }
        let mut sums = Sums::default();
        for (spot, (samples, period)) in &since.spots {
            let mode = if spot.user { Mode::User } else { Mode::Kernel };
            let frame = self.resolver.frame(spot.pid.cast_signed(), mode, spot.ip);
            let cell = |&key: &Key| match key {
                Key::Comm => self.resolver.task_name(spot.pid, spot.tid, spot.cpu),
                Key::Object => labels::object(&frame).to_owned(),
                Key::Symbol => labels::symbol(&frame),
                Key::Cpu => spot.cpu.to_string(),
                Key::Pid => spot.pid.to_string(),
            };
            sums.add_many(keys.iter().map(cell).collect(), *samples, *period);
        }
        if since.others.0 > 0 {
            let cells = vec![OTHERS.to_owned(); keys.len()];
            sums.add_many(cells, since.others.0, since.others.1);
        }
        Frame { samples: since.samples, lost: since.lost, throttled: since.throttled, rows: sums.rows(keys, false) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(ip: u64) -> Record {
        let pid = std::process::id();
        Record::Sample(Sample { ip, pid, tid: pid, period: 10, user: true, ..Sample::default() })
    }

    #[test]
    fn frame_holds_samples_since_last_frame() {
        let mut collector = FrameCollector::new();
        for _ in 0..3 {
            collector.record(&sample(0x10));
        }
        collector.record(&Record::Lost { id: 1, lost: 5, who: None });
        collector.record(&Record::Throttle(vpmu_client::Throttle::default()));
        collector.look().unwrap();
        let frame = collector.frame(&[Key::Comm, Key::Symbol]);
        assert_eq!((frame.samples, frame.lost, frame.throttled), (3, 5, 1));
        assert_eq!(frame.rows.len(), 1);
        assert_eq!((frame.rows[0].samples, frame.rows[0].period), (3, 30));
        let own = std::fs::read_to_string("/proc/self/comm").unwrap();
        assert_eq!(frame.rows[0].cells, [own.trim_end(), "[.] [unknown]"]);
        let empty = collector.frame(&[Key::Comm]);
        assert_eq!((empty.samples, empty.lost, empty.rows.len()), (0, 0, 0));
    }

    #[inline(never)]
    fn a_function_of_this_program(value: u64) -> u64 {
        std::hint::black_box(value) + 1
    }

    #[test]
    fn functions_of_this_very_program_are_named() {
        assert_eq!(a_function_of_this_program(1), 2);
        let function: fn(u64) -> u64 = a_function_of_this_program;
        let mut collector = FrameCollector::new();
        collector.record(&sample(function as *const () as u64));
        collector.look().unwrap();
        let frame = collector.frame(&[Key::Symbol]);
        assert!(frame.rows[0].cells[0].ends_with("a_function_of_this_program"), "{frame:?}");
    }

    #[test]
    fn places_beyond_the_limit_are_counted_as_others() {
        let mut collector = FrameCollector::new();
        for ip in 0..MOST_SPOTS as u64 + 7 {
            collector.record(&sample(ip << 12));
        }
        collector.record(&sample(0));
        assert_eq!(collector.since.spots.len(), MOST_SPOTS);
        let frame = collector.frame(&[Key::Pid]);
        let others = frame.rows.iter().find(|row| row.cells == [OTHERS]);
        assert_eq!(others.map(|row| row.samples), Some(7));
        let all: u64 = frame.rows.iter().map(|row| row.samples).sum();
        assert_eq!(all, frame.samples);
    }
}

//! Collects the samples of one frame at a time, so that memory use is bounded, no matter how long the view is open.

use std::collections::HashMap;
use std::path::Path;

use vpmu_client::tasks::{Clocks, TasksError};
use vpmu_client::{Record, Sample};

use crate::data::{Line, Process};
use crate::names::{Key, Names, Spot};
use crate::processes::Processes;
use crate::profile::{Row, Sums};
use crate::symbols::{KALLSYMS, KernelFunctions, Programs};

/// Maximum number of distinct positions ([`Spot`]) in one frame; samples at further positions are
/// counted in one row.
const MOST_SPOTS: usize = 1 << 16;
/// Maximum number of processes looked up in one frame.
const MOST_PROCESSES: usize = 1 << 12;
/// Maximum number of programs with cached symbols.
const MOST_PROGRAMS: usize = 64;

/// Label of the row that counts the samples at all positions beyond the first [`MOST_SPOTS`].
const OTHERS: &str = "[others]";

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
    kernel: KernelFunctions,
    programs: Programs,
}

fn processes() -> Processes {
    Processes::new(Path::new("/proc"), Vec::new())
}

impl FrameCollector {
    pub(crate) fn new() -> Self {
        Self {
            since: Since::default(),
            processes: processes(),
            kernel: KernelFunctions::read(Path::new(KALLSYMS)),
            programs: Programs::default(),
        }
    }

    /// Whether the kernel hides its addresses from this user.
    pub(crate) fn kernel_is_hidden(&self) -> bool {
        self.kernel.are_hidden()
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
        let spot = Spot {
            pid: sample.pid,
            // A process keeps one name for the whole frame.
            time: 0,
            cpu: sample.cpu,
            ip: sample.ip,
            user: sample.user,
        };
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
        let lines = self.processes.news(&Clocks::default())?;
        let room = MOST_PROCESSES.saturating_sub(self.since.processes.len());
        let processes = lines.into_iter().filter_map(|line| match line {
            Line::Process(process) => Some(process),
            _ => None,
        });
        self.since.processes.extend(processes.take(room));
        Ok(())
    }

    /// Returns the samples since the last frame and clears them.
    pub(crate) fn frame(&mut self, keys: &[Key]) -> Frame {
        let since = std::mem::take(&mut self.since);
        self.processes = processes();
        if self.programs.len() > MOST_PROGRAMS {
            self.programs = Programs::default();
        }
        let kernel_ips: Vec<u64> = since.spots.keys().filter(|spot| !spot.user).map(|spot| spot.ip).collect();
        let kernel = self.kernel.of(&kernel_ips);
        let mut names = Names::new(&since.processes, &[], &kernel, &mut self.programs);
        let mut sums = Sums::default();
        for (spot, (samples, period)) in &since.spots {
            // Use the newest name that the process had in this frame: after an exec, the new
            // program's name.
            let spot = Spot { time: u64::MAX, ..*spot };
            let cells = keys.iter().map(|&key| names.of(&spot, key)).collect();
            sums.add_many(cells, *samples, *period);
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
        Record::Sample(Sample { ip, pid: std::process::id(), period: 10, user: true, ..Sample::default() })
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
        assert_eq!(frame.rows[0].cells, [own.trim_end(), "[.] 0x0-0xfff"]);
        let empty = collector.frame(&[Key::Comm]);
        assert_eq!((empty.samples, empty.lost, empty.rows.len()), (0, 0, 0));
    }

    #[test]
    fn places_beyond_the_limit_are_counted_as_others() {
        let mut collector = FrameCollector::new();
        for ip in 0..MOST_SPOTS as u64 + 7 {
            collector.record(&sample(ip << 12));
        }
        collector.record(&sample(0));
        assert_eq!(collector.since.spots.len(), MOST_SPOTS);
        let frame = collector.frame(&[Key::Symbol]);
        let others = frame.rows.iter().find(|row| row.cells == [OTHERS]);
        assert_eq!(others.map(|row| row.samples), Some(7));
        let all: u64 = frame.rows.iter().map(|row| row.samples).sum();
        assert_eq!(all, frame.samples);
    }
}

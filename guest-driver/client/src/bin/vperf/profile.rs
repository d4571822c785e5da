//! A recording, added up: for each event, how much of it fell to which function.

use std::collections::{BTreeMap, HashMap};

use crate::data::{EventLine, Kernel, Line, Lost, Process, Sample, Task};
use crate::names::{Key, Names, name};

/// The samples that are alike in all keys.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub(crate) struct Row {
    /// In the order of the keys.
    #[serde(skip)]
    pub(crate) cells: Vec<String>,
    #[serde(flatten)]
    pub(crate) named: BTreeMap<&'static str, String>,
    pub(crate) samples: u64,
    /// Of the event.
    pub(crate) period: u64,
    pub(crate) percent: f64,
}

/// One event's.
#[derive(Debug, serde::Serialize)]
pub(crate) struct Profile {
    pub(crate) event: String,
    pub(crate) unit: String,
    pub(crate) source: String,
    pub(crate) guest_only: bool,
    pub(crate) every: u64,
    pub(crate) samples: u64,
    pub(crate) lost: u64,
    pub(crate) period: u64,
    pub(crate) rows: Vec<Row>,
}

/// What a recording holds.
#[derive(Debug, Default)]
pub(crate) struct Recording {
    pub(crate) target: String,
    events: Vec<EventLine>,
    samples: Vec<Sample>,
    lost: Vec<Lost>,
    processes: Vec<Process>,
    tasks: Vec<Task>,
    kernel: Kernel,
    /// It has its end.
    pub(crate) complete: bool,
}

impl Recording {
    /// Takes the next line of the file.
    pub(crate) fn add(&mut self, line: Line) {
        match line {
            Line::Header(header) => self.target = header.target,
            Line::Event(event) => self.events.push(event),
            Line::Process(process) => self.processes.push(process),
            Line::Task(task) => self.tasks.push(task),
            Line::Sample(sample) => self.samples.push(sample),
            Line::Lost(lost) => self.lost.push(lost),
            Line::Kernel(mut kernel) => {
                kernel.symbols.sort_by_key(|symbol| symbol.start);
                self.kernel = kernel;
            }
            Line::End(_) => self.complete = true,
        }
    }

    /// The kernel hid its addresses while this was recorded.
    pub(crate) fn kernel_is_hidden(&self) -> bool {
        self.kernel.hidden
    }

    /// Samples of all events.
    pub(crate) fn sample_count(&self) -> usize {
        self.samples.len()
    }

    /// Every event's profile, its rows by descending share.
    pub(crate) fn profiles(&self, keys: &[Key]) -> Vec<Profile> {
        let mut names = Names::new(&self.processes, &self.tasks, &self.kernel);
        let events = self.events.iter().enumerate();
        events
            .map(|(index, event)| self.profile(index, event, keys, &mut names))
            .collect()
    }

    fn profile(
        &self,
        index: usize,
        event: &EventLine,
        keys: &[Key],
        names: &mut Names<'_>,
    ) -> Profile {
        let mut sums: HashMap<Vec<String>, (u64, u64)> = HashMap::new();
        let (mut samples, mut total) = (0, 0u64);
        for sample in self.samples.iter().filter(|sample| sample.0 == index) {
            let cells = keys.iter().map(|&key| names.of(sample, key)).collect();
            let sum = sums.entry(cells).or_default();
            sum.0 += 1;
            sum.1 = sum.1.saturating_add(sample.6);
            samples += 1;
            total = total.saturating_add(sample.6);
        }
        let heads: Vec<&'static str> = keys.iter().map(|&key| name(key)).collect();
        let mut rows: Vec<Row> = sums
            .into_iter()
            .map(|(cells, (samples, period))| Row {
                named: heads.iter().copied().zip(cells.iter().cloned()).collect(),
                cells,
                samples,
                period,
                percent: share(period, total),
            })
            .collect();
        rows.sort_by(|a, b| (b.period, &a.cells).cmp(&(a.period, &b.cells)));
        let lost = self.lost.iter().filter(|lost| lost.event == index);
        Profile {
            event: event.name.clone(),
            unit: event.unit.clone(),
            source: event.source.clone(),
            guest_only: event.guest_only,
            every: event.period,
            samples,
            lost: lost.fold(0, |sum, lost| sum.saturating_add(lost.lost)),
            period: total,
            rows,
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "a share in percent, for people")]
fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        0.0
    } else {
        part as f64 * 100.0 / whole as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Map, Symbol};

    fn recording() -> Recording {
        let mut recording = Recording::default();
        recording.add(Line::Event(EventLine {
            name: "task-clock".into(),
            unit: "ns".into(),
            period: 1000,
            source: "a source".into(),
            guest_only: false,
        }));
        let map = |path: &str| Map {
            start: 0x1000,
            end: 0x3000,
            offset: 0,
            path: path.into(),
        };
        for (time, comm) in [(100, "sh"), (200, "work")] {
            let maps = vec![map(comm)];
            recording.add(Line::Process(Process {
                pid: 7,
                comm: comm.into(),
                time,
                maps,
            }));
        }
        let kernel = Symbol {
            start: 0xf000,
            end: 0xf100,
            name: "do_work".into(),
        };
        recording.add(Line::Kernel(Kernel {
            symbols: vec![kernel],
            hidden: false,
        }));
        let mut sample = |ip, pid, time, user| {
            recording.add(Line::Sample(Sample(0, ip, pid, pid, time, 1, 1000, user)));
        };
        sample(0x1234, 7, 50, true);
        sample(0x1234, 7, 150, true);
        sample(0x1234, 7, 250, true);
        sample(0x1fff, 7, 250, true);
        sample(0xf0ff, 7, 250, false);
        sample(0xf100, 0, 250, false);
        sample(0x9000, 9, 250, true);
        recording.add(Line::Lost(Lost { event: 0, lost: 3 }));
        recording.add(Line::Lost(Lost { event: 0, lost: 2 }));
        recording
    }

    #[test]
    fn samples_fall_to_who_ran_at_their_time() {
        let profiles = recording().profiles(&[Key::Comm, Key::Object, Key::Symbol]);
        let rows: Vec<(String, u64)> = profiles[0]
            .rows
            .iter()
            .map(|row| (row.cells.join(" "), row.samples))
            .collect();
        let expected = [
            ("sh sh [.] 0x1000-0x1fff", 2),
            ("work work [.] 0x1000-0x1fff", 2),
            ("[idle] [kernel] [k] 0xf000-0xffff", 1),
            ("[pid 9] [unknown] [.] 0x9000-0x9fff", 1),
            ("work [kernel] [k] do_work", 1),
        ];
        assert_eq!(
            rows,
            expected.map(|(row, samples)| (row.to_owned(), samples))
        );
        assert_eq!((profiles[0].samples, profiles[0].lost), (7, 5));
    }

    #[test]
    fn shares_are_of_the_event_and_sum_up() {
        let mut recording = recording();
        recording.add(Line::Sample(Sample(0, 0, 9, 9, 0, 0, 93_000, true)));
        let profile = recording.profiles(&[Key::Pid]).remove(0);
        assert_eq!(profile.rows[0].cells, ["9"]);
        assert!((profile.rows[0].percent - 94.0).abs() < 1e-9);
        let sum: f64 = profile.rows.iter().map(|row| row.percent).sum();
        assert!((sum - 100.0).abs() < 1e-9);
    }

    #[test]
    fn samples_of_no_event_are_nobodys() {
        let mut recording = Recording::default();
        recording.add(Line::Sample(Sample(5, 1, 1, 1, 1, 1, 1, true)));
        assert!(recording.profiles(&[Key::Symbol]).is_empty());
    }
}

//! A recording, added up: for each event, how much of it fell to which function.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::calls::{Call, Direction, Tree, share};
use crate::data::{EventLine, Kernel, Line, Lost, Process, Sample, Task, Throttle};
use crate::names::{Key, Names, Spot, name};
use crate::symbols::Programs;

/// What a profile shall show beside where the samples lie.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct View {
    /// To every row, what was called from there.
    pub(crate) children: bool,
    /// The call tree.
    pub(crate) calls: Option<Direction>,
}

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
    /// What was called from there included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) children_percent: Option<f64>,
}

/// One event's.
#[derive(Debug, serde::Serialize)]
pub(crate) struct Profile {
    pub(crate) event: String,
    pub(crate) unit: String,
    pub(crate) source: String,
    pub(crate) guest_only: bool,
    /// A sample every so many, or with `freq` so many a second.
    pub(crate) every: u64,
    pub(crate) freq: bool,
    pub(crate) samples: u64,
    pub(crate) lost: u64,
    /// How many times the device stopped sampling for a while.
    pub(crate) throttled: u64,
    pub(crate) period: u64,
    pub(crate) rows: Vec<Row>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) calls: Option<Vec<Call>>,
}

/// What a recording holds.
#[derive(Debug, Default)]
pub(crate) struct Recording {
    pub(crate) target: String,
    events: Vec<EventLine>,
    samples: Vec<Sample>,
    lost: Vec<Lost>,
    throttles: Vec<Throttle>,
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
            Line::Throttle(throttle) => self.throttles.push(throttle),
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

    /// Samples have the chains of their callers.
    pub(crate) fn has_chains(&self) -> bool {
        self.samples.iter().any(|sample| sample.8.has_callers())
    }

    /// Every event's profile, its rows by descending share.
    pub(crate) fn profiles(&self, keys: &[Key], view: View) -> Vec<Profile> {
        let mut programs = Programs::default();
        let mut names = Names::new(&self.processes, &self.tasks, &self.kernel, &mut programs);
        let events = self.events.iter().enumerate();
        events
            .map(|(index, event)| self.profile(index, event, keys, view, &mut names))
            .collect()
    }

    fn profile(
        &self,
        index: usize,
        event: &EventLine,
        keys: &[Key],
        view: View,
        names: &mut Names<'_>,
    ) -> Profile {
        let mut sums = Sums::default();
        let mut tree = Tree::default();
        let samples = || self.samples.iter().filter(|sample| sample.0 == index);
        for sample in samples() {
            let spots = names.chain(sample);
            let mut cells = |spot: &Spot| -> Vec<String> {
                keys.iter().map(|&key| names.of(spot, key)).collect()
            };
            sums.add(cells(&Spot::from(sample)), sample.6);
            if view.children {
                sums.add_callers(spots.iter().map(&mut cells).collect(), sample.6);
            }
            if let Some(direction) = view.calls {
                let path = path(spots, direction, names);
                let own = match direction {
                    Direction::Down => path.len().saturating_sub(1),
                    // Right after the process.
                    Direction::Up => 1,
                };
                tree.add(path, own, sample.6);
            }
        }
        let lost = self.lost.iter().filter(|lost| lost.event == index);
        let throttles = self.throttles.iter().filter(|line| line.event == index);
        Profile {
            event: event.name.clone(),
            unit: event.unit.clone(),
            source: event.source.clone(),
            guest_only: event.guest_only,
            every: event.period,
            freq: event.freq,
            samples: samples().count() as u64,
            lost: lost.fold(0, |sum, lost| sum.saturating_add(lost.lost)),
            throttled: throttles.count() as u64,
            period: sums.total,
            rows: sums.rows(keys, view.children),
            calls: view.calls.map(|_| tree.calls()),
        }
    }
}

/// The process, and the functions on the way to the sample or from it.
fn path(mut spots: Vec<Spot>, direction: Direction, names: &mut Names<'_>) -> Vec<String> {
    if direction == Direction::Down {
        spots.reverse();
    }
    let process = spots.first().map(|spot| names.of(spot, Key::Comm));
    let functions = spots.iter().map(|spot| names.of(spot, Key::Symbol));
    process.into_iter().chain(functions).collect()
}

/// What fell to each combination of names.
#[derive(Debug, Default)]
pub(crate) struct Sums {
    sums: HashMap<Vec<String>, Sum>,
    total: u64,
}

#[derive(Debug, Default)]
struct Sum {
    samples: u64,
    period: u64,
    with_children: u64,
}

impl Sums {
    /// Adds a sample that stands for `period`.
    pub(crate) fn add(&mut self, cells: Vec<String>, period: u64) {
        self.add_many(cells, 1, period);
    }

    /// Adds `samples` that together stand for `period`.
    pub(crate) fn add_many(&mut self, cells: Vec<String>, samples: u64, period: u64) {
        let sum = self.sums.entry(cells).or_default();
        sum.samples = sum.samples.saturating_add(samples);
        sum.period = sum.period.saturating_add(period);
        self.total = self.total.saturating_add(period);
    }

    /// Adds the sample's period to all who are on its chain, to each once.
    fn add_callers(&mut self, callers: HashSet<Vec<String>>, period: u64) {
        for cells in callers {
            let sum = self.sums.entry(cells).or_default();
            sum.with_children = sum.with_children.saturating_add(period);
        }
    }

    /// By descending share, of their children too if those count.
    pub(crate) fn rows(self, keys: &[Key], children: bool) -> Vec<Row> {
        let total = self.total;
        let heads: Vec<&'static str> = keys.iter().map(|&key| name(key)).collect();
        let mut rows: Vec<(u64, Row)> = self
            .sums
            .into_iter()
            .map(|(cells, sum)| {
                let named = heads.iter().copied().zip(cells.iter().cloned()).collect();
                let row = Row {
                    named,
                    cells,
                    samples: sum.samples,
                    period: sum.period,
                    percent: share(sum.period, total),
                    children_percent: children.then(|| share(sum.with_children, total)),
                };
                (sum.with_children, row)
            })
            .collect();
        rows.sort_by(|(a_with, a), (b_with, b)| {
            (b_with, b.period, &a.cells).cmp(&(a_with, a.period, &b.cells))
        });
        rows.into_iter().map(|(_, row)| row).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Chain, Map, Symbol};

    fn recording() -> Recording {
        let mut recording = Recording::default();
        recording.add(Line::Event(EventLine {
            name: "task-clock".into(),
            unit: "ns".into(),
            period: 1000,
            freq: false,
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
            recording.add(Line::Sample(Sample(
                0,
                ip,
                pid,
                pid,
                time,
                1,
                1000,
                user,
                Chain::default(),
            )));
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
        let profiles =
            recording().profiles(&[Key::Comm, Key::Object, Key::Symbol], View::default());
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
        recording.add(Line::Sample(Sample(
            0,
            0,
            9,
            9,
            0,
            0,
            93_000,
            true,
            Chain::default(),
        )));
        let profile = recording.profiles(&[Key::Pid], View::default()).remove(0);
        assert_eq!(profile.rows[0].cells, ["9"]);
        assert!((profile.rows[0].percent - 94.0).abs() < 1e-9);
        let sum: f64 = profile.rows.iter().map(|row| row.percent).sum();
        assert!((sum - 100.0).abs() < 1e-9);
    }

    #[test]
    fn samples_of_no_event_are_nobodys() {
        let mut recording = Recording::default();
        recording.add(Line::Sample(Sample(
            5,
            1,
            1,
            1,
            1,
            1,
            1,
            true,
            Chain::default(),
        )));
        assert!(
            recording
                .profiles(&[Key::Symbol], View::default())
                .is_empty()
        );
    }

    /// `work`, 0x1100, calls 0x2100 from two places, of which one is at its very end, and
    /// the kernel once.
    fn chains() -> Recording {
        let mut recording = recording();
        recording.samples.clear();
        // 0x9000 is no code: what wrote it there kept no frame pointer.
        let mut sample = |kernel: &[u64], user: &[u64], period| {
            let is_user = kernel.is_empty();
            let ip = if is_user { user[0] } else { kernel[0] };
            let chain = Chain(kernel.to_vec(), user.to_vec());
            recording.add(Line::Sample(Sample(
                0, ip, 7, 7, 250, 1, period, is_user, chain,
            )));
        };
        sample(&[], &[0x2100, 0x1180, 0x9000, 0x1300], 600);
        sample(&[], &[0x2108, 0x2000], 200);
        sample(&[0xf010], &[0x1190], 200);
        recording
    }

    #[test]
    fn a_call_tree_joins_what_was_called_alike() {
        let view = |direction| View {
            children: false,
            calls: Some(direction),
        };
        let lines = |direction| -> Vec<String> {
            let profile = chains().profiles(&[Key::Symbol], view(direction)).remove(0);
            let calls = profile.calls.unwrap();
            calls
                .iter()
                .map(|call| format!("{} {} {}", call.depth, call.name, call.percent))
                .collect()
        };
        assert_eq!(
            lines(Direction::Down),
            [
                "0 work 100",
                "1 [.] 0x1000-0x1fff 100",
                "2 [.] 0x2000-0x2fff 80",
                "2 [k] do_work 20",
            ],
            "a return to 0x2000 is a call from the page before"
        );
        assert_eq!(
            lines(Direction::Up),
            [
                "0 work 100",
                "1 [.] 0x2000-0x2fff 80",
                "2 [.] 0x1000-0x1fff 80",
                "1 [k] do_work 20",
                "2 [.] 0x1000-0x1fff 20",
            ]
        );
        assert!(chains().has_chains() && !recording().has_chains());
    }

    #[test]
    fn callers_share_what_they_call() {
        let view = View {
            children: true,
            calls: None,
        };
        let profile = chains().profiles(&[Key::Symbol], view).remove(0);
        let rows: Vec<_> = profile
            .rows
            .iter()
            .map(|row| (row.cells[0].as_str(), row.percent, row.children_percent))
            .collect();
        assert_eq!(
            rows,
            [
                ("[.] 0x1000-0x1fff", 0.0, Some(100.0)),
                ("[.] 0x2000-0x2fff", 80.0, Some(80.0)),
                ("[k] do_work", 20.0, Some(20.0)),
            ]
        );
    }
}

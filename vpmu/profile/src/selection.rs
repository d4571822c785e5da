//! A selection for an exporter: one event, its weights, and the meaning of a thread.

use std::collections::BTreeMap;

use crate::model::{EventKind, Profile, Sample};
use crate::stacks::StackId;

/// The meaning of a thread in the exported profile.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum By {
    /// A task, or a vCPU where the task is unknown.
    #[default]
    Task,
    /// A vCPU.
    Cpu,
}

/// The weight of a sample.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Weight {
    /// Each sample counts once.
    #[default]
    Samples,
    /// A sample counts with its period.
    Period,
}

/// Wishes of the operator.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Options {
    /// The event; by default the first event that samples.
    pub event: Option<String>,
    /// The meaning of a thread.
    pub by: By,
    /// The weight of a sample.
    pub weight: Weight,
}

/// Errors of a selection.
#[derive(Debug, thiserror::Error)]
pub enum SelectionError {
    /// The recording does not have the event.
    #[error("the recording has no samples of `{wanted}`; it has samples of: {}", known.join(", "))]
    NoEvent {
        /// The event's name.
        wanted: String,
        /// Names of the events with samples.
        known: Vec<String>,
    },
    /// The recording has no samples.
    #[error("the recording has no samples ({lost} lost): record for a longer time or with a higher frequency")]
    Empty {
        /// Number of lost samples.
        lost: u64,
    },
}

/// A part of a profile.
#[derive(Debug, Clone, Copy)]
pub struct Selection<'a> {
    pub(crate) profile: &'a Profile,
    event: usize,
    by: By,
    weight: Weight,
}

/// A thread of the exported profile.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Thread {
    /// The process; zero for vCPUs and their idle tasks.
    pub(crate) pid: u32,
    pub(crate) process: String,
    /// The thread; for vCPUs and their idle tasks the number of the vCPU.
    pub(crate) tid: u32,
    pub(crate) name: String,
}

impl<'a> Selection<'a> {
    /// Selects what `options` want.
    ///
    /// # Errors
    /// [`SelectionError`].
    pub fn new(profile: &'a Profile, options: &Options) -> Result<Self, SelectionError> {
        let events = || profile.events.iter().enumerate().filter(|(_, event)| event.samples > 0);
        let mut all = events();
        let event = match &options.event {
            Some(wanted) => all.find(|(_, event)| event.name == *wanted).ok_or_else(|| {
                let known = events().map(|(_, event)| event.name.clone()).collect();
                SelectionError::NoEvent { wanted: wanted.clone(), known }
            }),
            None => {
                let sampled = events().find(|(_, event)| event.kind == EventKind::Sampled);
                let lost = profile.events.iter().fold(profile.lost, |lost, event| lost.saturating_add(event.lost));
                sampled.or_else(|| all.next()).ok_or(SelectionError::Empty { lost })
            }
        };
        let (event, _) = event?;
        Ok(Self { profile, event, by: options.by, weight: options.weight })
    }

    /// Returns the selected event's name.
    #[must_use]
    pub fn event(&self) -> &'a str {
        self.profile.events.get(self.event).map_or("", |event| &event.name)
    }

    /// Returns the names of the other events with samples.
    pub fn others(&self) -> impl Iterator<Item = &'a str> {
        let others = self.profile.events.iter().enumerate().filter(|&(index, _)| index != self.event);
        others.filter(|(_, event)| event.samples > 0).map(|(_, event)| event.name.as_str())
    }

    pub(crate) fn event_index(&self) -> usize {
        self.event
    }

    /// Returns the unit of the weights.
    pub(crate) fn unit(&self) -> &'static str {
        let is_time = self.profile.events.get(self.event).is_some_and(|event| event.is_time);
        match self.weight {
            Weight::Samples => "samples",
            Weight::Period if is_time => "nanoseconds",
            Weight::Period => "events",
        }
    }

    pub(crate) fn samples(&self) -> impl Iterator<Item = &'a Sample> {
        let event = self.event;
        self.profile.samples.iter().filter(move |sample| sample.event == event)
    }

    pub(crate) fn weight(&self, sample: &Sample) -> u64 {
        match self.weight {
            Weight::Samples => 1,
            Weight::Period => sample.period,
        }
    }

    /// Returns the sum of the weights of each task's name and stack.
    pub(crate) fn totals(&self) -> BTreeMap<(&'a str, Option<StackId>), u64> {
        let mut totals: BTreeMap<(&str, Option<StackId>), u64> = BTreeMap::new();
        for sample in self.samples() {
            let label = self.profile.tasks.get(sample.task).map_or("", |task| &task.name);
            let total = totals.entry((label, sample.stack)).or_default();
            *total = total.saturating_add(self.weight(sample));
        }
        totals
    }

    /// Returns the thread of a sample.
    pub(crate) fn thread(&self, sample: &Sample) -> Thread {
        let task = self.profile.tasks.get(sample.task).filter(|_| self.by == By::Task);
        let cpu = sample.cpu.unwrap_or(u32::MAX);
        let process = if self.profile.is_guest { "vCPUs" } else { "CPUs" }.to_owned();
        match task.map(|task| (task, task.pid, task.tid)) {
            Some((task, Some(pid), Some(tid))) if tid != 0 => {
                Thread { pid, process: task.name.clone(), tid, name: task.name.clone() }
            }
            Some((task, _, Some(_))) => Thread { pid: 0, process, tid: cpu, name: task.name.clone() },
            _ => Thread { pid: 0, process, tid: cpu, name: self.profile.cpu_name(sample.cpu) },
        }
    }
}

//! Totals of the device's work, for the operator's report.

use crate::work::{Turn, Work};

/// Exits that reached the VMM, by reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct ExitCounts {
    /// Port I/O.
    pub io: u64,
    /// Memory-mapped I/O.
    pub mmio: u64,
    /// HLT.
    pub hlt: u64,
    /// Signals to the vCPU thread.
    pub signal: u64,
    /// Any other exit.
    pub other: u64,
}

impl ExitCounts {
    /// The sum of all counts.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.io + self.mmio + self.hlt + self.signal + self.other
    }
}

/// Totals since the device was created. A reset does not zero them, and a restore adds the saved totals to them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct Metrics {
    /// Events opened.
    pub events_opened: u64,
    /// Requests taken from the control queue.
    pub control_requests: u64,
    /// Commands taken from vCPU queues.
    pub commands: u64,
    /// Number of notifications of each vCPU queue. The guest sends a notification to have its commands executed. Each
    /// notification is an exit.
    pub kicks: Vec<u64>,
    /// Sample records written to guest rings.
    pub samples_written: u64,
    /// Sample records lost because the ring was full or missing.
    pub samples_lost: u64,
    /// Overflows for which no sample was made, because a sampling limit was exceeded. `samples_written` and
    /// `samples_lost` do not include these overflows.
    pub samples_throttled: u64,
    /// Overflows that exceeded the budget shared by all of the guest's events. Each of them throttled its event.
    /// `samples_throttled` includes these overflows, and also the later overflows of the throttled events.
    pub samples_over_budget: u64,
    /// vCPU time that the exit engine spent on the guest's samples, in nanoseconds.
    pub sampling_time: u64,
    /// Number of times that a vCPU's samples were throttled because they had taken too much of the vCPU's time.
    pub sampling_throttles: u64,
    /// Number of times that an event had to wait because its vCPU had reached the limit on host counters, or the
    /// limit on the total rate of its clocks.
    pub counter_waits: u64,
    /// Highest number of host counters that the guest's sampling events had open at once.
    pub host_counters: u32,
    /// Overflows that occurred while a vCPU's thread did host work. The device writes no samples for these overflows.
    pub host_overflows: u64,
    /// Number of times that the host throttled an event because the event overflowed too often
    /// (`PERF_RECORD_THROTTLE`).
    pub host_throttles: u64,
    /// Samples and traced exits whose task is unknown, because the guest's history of task switches does not go back
    /// far enough.
    pub samples_unnamed: u64,
    /// Drains of the host's records.
    pub drains: u64,
    /// Exits that were caused by a signal and after which the device found overflows of host counters.
    pub overflow_exits: u64,
    /// Used-buffer interrupts raised.
    pub interrupts: u64,
    /// Notices delivered on the event queue.
    pub notices: u64,
    /// Marks placed.
    pub marks: u64,
    /// Number of times that the device woke a reader of a ring or area.
    pub wakeups: u64,
    /// Bytes that traces wrote to AUX areas.
    pub aux_written: u64,
    /// Bytes that traces lost because their area had no room or was missing.
    pub aux_lost: u64,
    /// Number of AUX records. Each of them reports a chunk of an AUX area.
    pub aux_records: u64,
    /// Malformed guest requests that could not be answered, and unusable buffers of the event queue.
    pub bad_requests: u64,
    /// The cost of the guest's requests, marks and exits.
    pub work: Work,
    /// For each field of [`Work`], the largest value in any turn. A turn is the work for one exit, for one mark, or for
    /// a series of requests of one notification that the device serves without a break.
    pub largest_turn: Work,
    /// Number of turns that ended before all requests of their notification were served.
    pub turns_unfinished: u64,
}

impl Metrics {
    /// Adds a thread's work.
    pub(crate) fn add_work(&mut self, (work, largest, unfinished): (Work, Work, u64)) {
        self.work = self.work + work;
        self.largest_turn = self.largest_turn.max(largest);
        self.turns_unfinished += unfinished;
    }

    /// Adds the totals from a restored state.
    pub(crate) fn add_before(&mut self, before: &Self) {
        let Self {
            events_opened,
            control_requests,
            commands,
            kicks,
            samples_written,
            samples_lost,
            samples_throttled,
            samples_over_budget,
            sampling_time,
            sampling_throttles,
            counter_waits,
            host_counters,
            host_overflows,
            host_throttles,
            samples_unnamed,
            drains,
            overflow_exits,
            interrupts,
            notices,
            marks,
            wakeups,
            aux_written,
            aux_lost,
            aux_records,
            bad_requests,
            work,
            largest_turn,
            turns_unfinished,
        } = self;
        // The saved totals are untrusted, so the sums saturate.
        for (sum, more) in [
            (events_opened, before.events_opened),
            (control_requests, before.control_requests),
            (commands, before.commands),
            (samples_written, before.samples_written),
            (samples_lost, before.samples_lost),
            (samples_throttled, before.samples_throttled),
            (samples_over_budget, before.samples_over_budget),
            (sampling_time, before.sampling_time),
            (sampling_throttles, before.sampling_throttles),
            (counter_waits, before.counter_waits),
            (host_overflows, before.host_overflows),
            (host_throttles, before.host_throttles),
            (samples_unnamed, before.samples_unnamed),
            (drains, before.drains),
            (overflow_exits, before.overflow_exits),
            (interrupts, before.interrupts),
            (notices, before.notices),
            (marks, before.marks),
            (wakeups, before.wakeups),
            (aux_written, before.aux_written),
            (aux_lost, before.aux_lost),
            (aux_records, before.aux_records),
            (bad_requests, before.bad_requests),
            (turns_unfinished, before.turns_unfinished),
        ] {
            *sum = sum.saturating_add(more);
        }
        for (kicks, more) in kicks.iter_mut().zip(&before.kicks) {
            *kicks = kicks.saturating_add(*more);
        }
        *host_counters = (*host_counters).max(before.host_counters);
        *work = work.saturating_add(before.work);
        *largest_turn = largest_turn.max(before.largest_turn);
    }

    /// Adds one turn.
    pub(crate) fn count_turn(&mut self, work: Work, turn: Turn) {
        self.add_work((work, work, u64::from(turn == Turn::Unfinished)));
    }
}

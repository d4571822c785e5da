//! Totals of the device's work, for the operator's report.

use crate::work::{Turn, Work};

/// Exits that reached the VMM, by reason, since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(deny_unknown_fields)
)]
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

/// Totals since the start; a reset does not zero them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(deny_unknown_fields)
)]
pub struct Metrics {
    /// Events opened.
    pub events_opened: u64,
    /// Requests taken from the control queue.
    pub control_requests: u64,
    /// Commands taken from vCPU queues.
    pub commands: u64,
    /// Notifications of each vCPU queue: exits caused by commands.
    pub kicks: Vec<u64>,
    /// Sample records written to guest rings.
    pub samples_written: u64,
    /// Sample records lost because the ring was full or missing.
    pub samples_lost: u64,
    /// Overflows beyond the sample rate: neither written nor lost.
    pub samples_throttled: u64,
    /// Of these, overflows at which the budget of all events together was used up: each throttled its event. The
    /// event's overflows until the throttling ended are not included.
    pub samples_over_budget: u64,
    /// Nanoseconds of vCPU time spent on the guest's samples by the exit engine.
    pub sampling_time: u64,
    /// Times that a vCPU's samples were throttled for their cost.
    pub sampling_throttles: u64,
    /// Times that an event waited because its vCPU had reached the limit of a vCPU's host counters, or the
    /// limit of the sum of its clocks' rates.
    pub counter_waits: u64,
    /// Maximum number of host counters that the guest's sampling events held open at once.
    pub host_counters: u32,
    /// Overflows during a vCPU thread's host work, which make no samples.
    pub host_overflows: u64,
    /// Times that the host suspended an event's overflows because they were too many.
    pub host_throttles: u64,
    /// Samples whose task was no longer in the guest's history of switches.
    pub samples_unnamed: u64,
    /// Drains of the host's records.
    pub drains: u64,
    /// Exits for a signal at which overflows of host counters were found.
    pub overflow_exits: u64,
    /// Used-buffer interrupts raised.
    pub interrupts: u64,
    /// Notices delivered on the event queue.
    pub notices: u64,
    /// Marks placed.
    pub marks: u64,
    /// Wakeups of the readers of rings and areas.
    pub wakeups: u64,
    /// Bytes that traces wrote to AUX areas.
    pub aux_written: u64,
    /// Bytes that traces lost for lack of room or of an area.
    pub aux_lost: u64,
    /// Records that announce spans of AUX areas.
    pub aux_records: u64,
    /// Malformed guest requests that could not be answered, and unusable buffers of the event queue.
    pub bad_requests: u64,
    /// Work for the guest's requests, marks and exits.
    pub work: Work,
    /// The largest work of one turn: of an exit, of a mark, or of a notification's requests that
    /// were served without a break.
    pub largest_turn: Work,
    /// Turns that ended with requests of their notification left.
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

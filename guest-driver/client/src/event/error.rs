//! Errors of calls on an open event, with remedies.

use std::io;

/// An error of a call on an open event.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EventError {
    /// Enabling failed.
    #[error("cannot enable the event")]
    Enable(#[source] io::Error),
    /// Disabling failed.
    #[error("cannot disable the event")]
    Disable(#[source] io::Error),
    /// Resetting failed.
    #[error("cannot reset the event")]
    Reset(#[source] io::Error),
    /// The period is zero, or the event does not sample.
    #[error("cannot set the event's period")]
    Period(#[source] io::Error),
    /// The interval is zero, or the event makes no records.
    #[error("cannot set the event's wakeup interval")]
    Wakeup(#[source] io::Error),
    /// The id cannot be read.
    #[error("cannot read the event's id")]
    Id(#[source] io::Error),
    /// `PERF_EVENT_IOC_REFRESH` failed: the event does not sample, or was opened with
    /// [`EventAttr::inherit`](crate::EventAttr::inherit).
    #[error("cannot grant the event more overflows")]
    Refresh(#[source] io::Error),
    /// The records cannot be redirected.
    #[error("cannot redirect the event's records to another event's ring{}", output_hint(.0))]
    Output(#[source] io::Error),
    /// The event has no ring to pause.
    #[error("cannot pause the ring of the event")]
    Pause(#[source] io::Error),
    /// An attribute cannot change.
    #[error("cannot change the event's attributes")]
    Modify(#[source] io::Error),
    /// The engine cannot be queried.
    #[error("cannot query the event's sampling engine")]
    Engine(#[source] io::Error),
    /// An engine unknown to this library.
    #[error("the event's sampling engine has the unknown number {0}")]
    UnknownEngine(u32),
    /// Pending samples could not be written.
    #[error("cannot flush the event{}", flush_hint(.0))]
    Flush(#[source] io::Error),
    /// Reading failed.
    #[error("cannot read the event")]
    Read(#[source] io::Error),
    /// The event is in the error state: it no longer counts, and its count is lost.
    #[error("the event's counter on the host was lost: close the event and open it again")]
    Dead,
    /// The kernel returned fewer bytes than the read format needs.
    #[error("cannot read the event: got {got} bytes, but its read format needs {expected}")]
    ShortRead {
        /// Bytes read.
        got: usize,
        /// Bytes that the read format needs; for a group, a lower bound.
        expected: usize,
    },
    /// `read` was called for an event with a group's read format, or `read_group` for an event
    /// without one.
    #[error("the event's read format is {}", if *.group { "a group's: call `read_group`" } else { "not a group's: call `read`" })]
    Format {
        /// Whether the event has a group's read format.
        group: bool,
    },
    /// Waiting failed.
    #[error("cannot wait for the event")]
    Poll(#[source] io::Error),
}

fn output_hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EINVAL) => {
            " (the target must have a ring, measure the same task or CPU and write in the same direction, and this event must not have a ring)"
        }
        Some(libc::EBADF) => " (the target is not a vPMU event)",
        _ => "",
    }
}

fn flush_hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EIO) => " (its counter on the host was lost; earlier samples are in the ring)",
        _ => "",
    }
}

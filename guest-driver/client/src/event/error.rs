//! Why a call on an open event failed, and what to do about it.

use std::io;

/// What the driver refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EventError {
    /// Enabling failed.
    #[error("enabling the event")]
    Enable(#[source] io::Error),
    /// Disabling failed.
    #[error("disabling the event")]
    Disable(#[source] io::Error),
    /// Resetting failed.
    #[error("resetting the event")]
    Reset(#[source] io::Error),
    /// A period of zero, or of an event that does not sample.
    #[error("setting the event's period")]
    Period(#[source] io::Error),
    /// An interval of zero, or of an event that makes no records.
    #[error("setting how often the event's records wake")]
    Wakeup(#[source] io::Error),
    /// The id cannot be asked for.
    #[error("asking for the event's id")]
    Id(#[source] io::Error),
    /// No more overflows can be granted: the event does not sample, or is inherited.
    #[error("granting the event more overflows")]
    Refresh(#[source] io::Error),
    /// The records cannot go there.
    #[error("sending the event's records to another's ring{}", output_hint(.0))]
    Output(#[source] io::Error),
    /// The event has no ring to pause.
    #[error("pausing the ring of the event")]
    Pause(#[source] io::Error),
    /// What these attributes change cannot change.
    #[error("changing the event's attributes")]
    Modify(#[source] io::Error),
    /// The engine cannot be asked for.
    #[error("asking which engine samples the event")]
    Engine(#[source] io::Error),
    /// An engine of which this library does not know.
    #[error("the event is sampled by an engine of number {0}, which is unknown here")]
    UnknownEngine(u32),
    /// What was held back could not be written.
    #[error("flushing the event{}", flush_hint(.0))]
    Flush(#[source] io::Error),
    /// Reading failed.
    #[error("reading the event")]
    Read(#[source] io::Error),
    /// The event is in error: it counts no more, and what it had counted is not to be had.
    #[error("what counted the event on the host was lost: close it and open it again")]
    Dead,
    /// The answer has not the size that the read format gives it.
    #[error("reading the event: {got} bytes where its read format has {expected}")]
    ShortRead {
        /// Bytes read.
        got: usize,
        /// Bytes that the format says.
        expected: usize,
    },
    /// The read format is of one event, or of a group.
    #[error("the event's read format is {} group's: read it so", if *.group { "a" } else { "not a" })]
    Format {
        /// It is a group's.
        group: bool,
    },
    /// Waiting failed.
    #[error("waiting for the event")]
    Poll(#[source] io::Error),
}

fn output_hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EINVAL) => {
            " (the other must have a ring, measure the same task or CPU and write in the same direction, and this one must have none)"
        }
        Some(libc::EBADF) => " (the other is no event of the vPMU)",
        _ => "",
    }
}

fn flush_hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EIO) => " (what counted it on the host was lost; what it had sampled is there)",
        _ => "",
    }
}

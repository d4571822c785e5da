//! An open event, from /dev/vpmu or perf_event_open(2): enable, read, map, wait.

mod error;

pub use error::EventError;

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::PollFlags;

use crate::area::{Area, AreaError, Snapshot};
use crate::attr::{Engine, EventAttr, FORMAT_GROUP};
use crate::history::{History, HistoryError};
use crate::overwrite::{Overwrite, OverwriteError};
use crate::persistent::{self, PersistentError};
use crate::reading::{self, Reading};
use crate::record::Layout;
use crate::ring::{Ring, RingError};
use crate::sys::{self, Role};
use crate::trigger::TriggerError;
use vpmu_perf::call::{self, Scope};
use vpmu_perf::record::Words;

/// Maximum size of a group's reading: 1 MiB, enough for tens of thousands of events.
const MOST_BYTES: usize = 1 << 20;

/// The result of a wait.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ready {
    /// The ring has crossed its wakeup watermark since the last wait.
    pub readable: bool,
    /// The event makes no more records: its task exited, the host lost its counter, or it has no
    /// ring.
    pub closed: bool,
}

impl Ready {
    fn from_revents(revents: PollFlags) -> Self {
        Self {
            readable: revents.contains(PollFlags::IN),
            closed: revents.intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL),
        }
    }
}

/// The interval between an event's wakeups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wakeup {
    /// In records.
    Records(u32),
    /// In bytes of records.
    Bytes(u32),
}

/// An open event; dropping it closes it.
#[derive(Debug)]
pub struct Event {
    file: File,
    layout: Layout,
    backward: bool,
}

impl Event {
    pub(crate) fn new(fd: OwnedFd, attr: &EventAttr) -> Self {
        Self { file: fd.into(), layout: attr.into(), backward: attr.backward }
    }

    /// Starts or continues counting.
    ///
    /// # Errors
    /// [`EventError::Enable`].
    pub fn enable(&self) -> Result<(), EventError> {
        call::enable(self, Scope::Event).map_err(EventError::Enable)
    }

    /// Stops counting; the count remains.
    ///
    /// # Errors
    /// [`EventError::Disable`].
    pub fn disable(&self) -> Result<(), EventError> {
        call::disable(self, Scope::Event).map_err(EventError::Disable)
    }

    /// Sets the count to zero; the times remain.
    ///
    /// # Errors
    /// [`EventError::Reset`].
    pub fn reset(&self) -> Result<(), EventError> {
        call::reset(self, Scope::Event).map_err(EventError::Reset)
    }

    /// Like [`Event::enable`], for every event in the group.
    ///
    /// # Errors
    /// [`EventError::Enable`].
    pub fn enable_group(&self) -> Result<(), EventError> {
        call::enable(self, Scope::Group).map_err(EventError::Enable)
    }

    /// Like [`Event::disable`], for every event in the group.
    ///
    /// # Errors
    /// [`EventError::Disable`].
    pub fn disable_group(&self) -> Result<(), EventError> {
        call::disable(self, Scope::Group).map_err(EventError::Disable)
    }

    /// Like [`Event::reset`], for every event in the group.
    ///
    /// # Errors
    /// [`EventError::Reset`].
    pub fn reset_group(&self) -> Result<(), EventError> {
        call::reset(self, Scope::Group).map_err(EventError::Reset)
    }

    /// Enables the event for `overflows` more overflows; the last of them disables it. If
    /// `overflows` is zero, enables the event for the overflows that remain from earlier calls, or
    /// without a limit if none remain.
    ///
    /// # Errors
    /// [`EventError::Refresh`], with `EINVAL` if the event does not sample or was opened with
    /// [`EventAttr::inherit`].
    pub fn refresh(&self, overflows: u32) -> Result<(), EventError> {
        call::refresh(self, overflows).map_err(EventError::Refresh)
    }

    /// Redirects records to the ring of `target`. `None` ends the redirection: the event then has
    /// no ring until one is mapped through it.
    ///
    /// # Errors
    /// [`EventError::Output`], with `EINVAL` if the two events cannot share a ring.
    pub fn set_output(&self, target: Option<&Event>) -> Result<(), EventError> {
        call::set_output(self, target.map(AsFd::as_fd)).map_err(EventError::Output)
    }

    /// Pauses or resumes writing to the ring. Overflows during the pause are lost.
    ///
    /// # Errors
    /// [`EventError::Pause`], with `EINVAL` if the event has no ring.
    pub fn pause_output(&self, paused: bool) -> Result<(), EventError> {
        call::pause_output(self, paused).map_err(EventError::Pause)
    }

    /// Changes the open event's attributes to those in `attr`, as far as the kernel supports that.
    ///
    /// # Errors
    /// [`EventError::Modify`], always for an event of the vPMU: perf modifies only breakpoints.
    pub fn modify(&self, attr: &EventAttr) -> Result<(), EventError> {
        call::modify(self, &attr.to_raw()).map_err(EventError::Modify)
    }

    /// Returns the engine that samples the event: [`Engine::Any`] if the event only counts.
    ///
    /// # Errors
    /// [`EventError::Engine`], always for an event opened with `perf_event_open(2)`.
    pub fn engine(&self) -> Result<Engine, EventError> {
        let number = sys::engine(self.as_fd()).map_err(EventError::Engine)?;
        Engine::of(number).ok_or(EventError::UnknownEngine(number))
    }

    /// Makes the device write all pending samples of the event to its ring or, for a trace, all pending
    /// packets to its area, and wakes the readers. Returns when all this is done.
    ///
    /// # Errors
    /// [`EventError::Flush`], with `EIO` if the event is in the error state and `ENOTTY` for an event opened
    /// with `perf_event_open(2)`: see [`crate::Vpmu::flush_perf`].
    pub fn flush(&self) -> Result<(), EventError> {
        sys::flush(self.as_fd(), Scope::Event).map_err(EventError::Flush)
    }

    /// Like [`Event::flush`], for every event in the group.
    ///
    /// # Errors
    /// [`EventError::Flush`].
    pub fn flush_group(&self) -> Result<(), EventError> {
        sys::flush(self.as_fd(), Scope::Group).map_err(EventError::Flush)
    }

    /// Sets the period, or the frequency if the event was opened with one. Takes effect immediately.
    ///
    /// # Errors
    /// [`EventError::Period`], with `EINVAL` if the period is zero or the event does not sample.
    pub fn set_period(&self, period: u64) -> Result<(), EventError> {
        call::set_period(self, period).map_err(EventError::Period)
    }

    /// Sets the wakeup interval of the event and of the events that tasks inherited from it. The
    /// new interval begins with this call.
    ///
    /// # Errors
    /// [`EventError::Wakeup`], with `EINVAL` if the interval is zero or the event makes no records,
    /// and `ENOTTY` for an event opened with `perf_event_open(2)`.
    pub fn set_wakeup(&self, wakeup: Wakeup) -> Result<(), EventError> {
        let (every, unit) = match wakeup {
            Wakeup::Records(every) => (every, vpmu_abi::WAKEUP_RECORDS),
            Wakeup::Bytes(every) => (every, vpmu_abi::WAKEUP_BYTES),
        };
        sys::set_wakeup(self.as_fd(), every, unit).map_err(EventError::Wakeup)
    }

    /// Returns the id that this event's records carry.
    ///
    /// # Errors
    /// [`EventError::Id`].
    pub fn id(&self) -> Result<u64, EventError> {
        call::id(self).map_err(EventError::Id)
    }

    /// Reads the count and the times, including those of inherited events.
    ///
    /// # Errors
    /// [`EventError::Read`]; [`EventError::Dead`] for an event in the error state; [`EventError::Format`] for
    /// an event with a group's read format.
    pub fn read(&self) -> Result<Reading, EventError> {
        if self.reads_group() {
            return Err(EventError::Format { group: true });
        }
        let expected = reading::single_size(self.layout.read_format);
        // The buffer has space for every field: read(2) fails with ENOSPC if it is too small for the format.
        let (readings, got) = self.read_words(5 * 8)?;
        let reading = readings.and_then(|mut readings| readings.pop());
        reading.ok_or(EventError::ShortRead { got, expected })
    }

    /// Reads the counts of the whole group at one moment. The leader's count is first.
    ///
    /// # Errors
    /// See [`Event::read`]; [`EventError::Format`] without [`FORMAT_GROUP`].
    pub fn read_group(&self) -> Result<Vec<Reading>, EventError> {
        if !self.reads_group() {
            return Err(EventError::Format { group: false });
        }
        let mut room = 4096;
        loop {
            match self.read_words(room) {
                Err(EventError::Read(error)) if error.raw_os_error() == Some(libc::ENOSPC) && room < MOST_BYTES => {
                    room *= 4;
                }
                Err(error) => return Err(error),
                Ok((Some(readings), _)) => return Ok(readings),
                Ok((None, got)) => {
                    return Err(EventError::ShortRead { got, expected: got + 8 });
                }
            }
        }
    }

    /// Reads the event and discards the result. The read makes the device publish all data that it has
    /// written. Works for every read format.
    pub(crate) fn read_any(&self) -> Result<(), EventError> {
        if self.reads_group() { self.read_group().map(drop) } else { self.read().map(drop) }
    }

    fn reads_group(&self) -> bool {
        self.layout.read_format & FORMAT_GROUP != 0
    }

    /// Reads at most `room` bytes and returns their number. The readings are `None` if the bytes do
    /// not match the read format.
    fn read_words(&self, room: usize) -> Result<(Option<Vec<Reading>>, usize), EventError> {
        let mut bytes = vec![0; room];
        let got = (&self.file).read(&mut bytes).map_err(EventError::Read)?;
        if got == 0 {
            return Err(EventError::Dead);
        }
        let words: Vec<u64> =
            bytes[..got].chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_ne_bytes)).collect();
        let readings = reading::parse(self.layout.read_format, &mut Words::new(&words));
        Ok((readings, got))
    }

    /// Maps the metadata page and 2^`pages_log2` data pages as a ring. Reading a record consumes it.
    ///
    /// # Errors
    /// [`RingError::Map`], with `EINVAL` if the event is mapped with another size;
    /// [`RingError::TooLarge`].
    pub fn map(&self, pages_log2: u32) -> Result<Ring, RingError> {
        let pages = 1usize.checked_shl(pages_log2).ok_or(RingError::TooLarge(pages_log2))?;
        Ring::new(self.as_fd(), pages, self.layout)
    }

    /// Maps the metadata page and `data_pages` data pages. With 0 data pages, only counts can be read.
    /// The kernel checks `data_pages`; this method does not, so that tests can pass invalid numbers.
    ///
    /// # Errors
    /// See [`Event::map`].
    pub fn map_pages(&self, data_pages: usize) -> Result<Ring, RingError> {
        Ring::new(self.as_fd(), data_pages, self.layout)
    }

    /// Maps the metadata page and 2^`pages_log2` data pages of an event opened with
    /// [`EventAttr::backward`], to keep the newest records for a snapshot.
    ///
    /// # Errors
    /// See [`Event::map`]; [`OverwriteError::Forward`].
    pub fn map_overwrite(&self, pages_log2: u32) -> Result<Overwrite<'_>, OverwriteError> {
        if !self.backward {
            return Err(OverwriteError::Forward);
        }
        let pages = 1usize.checked_shl(pages_log2).ok_or(RingError::TooLarge(pages_log2))?;
        Ok(Overwrite::new(self, pages, self.layout)?)
    }

    /// Maps a ring of `data_pages` data pages to copy its records while the writer and other
    /// readers continue: nothing is paused or consumed. `overwrites` is true if the ring is in
    /// overwrite mode; for a persistent event, pass [`crate::Persistent::overwrites`].
    ///
    /// # Errors
    /// See [`Event::map`]; [`HistoryError::Forward`]; [`HistoryError::Backward`].
    pub fn map_history(&self, data_pages: u32, overwrites: bool) -> Result<History<'_>, HistoryError> {
        History::new(self, data_pages, self.layout, (overwrites, self.backward))
    }

    /// Maps an AUX area of 2^`pages_log2` pages for a trace whose ring is `ring`. Reading the area
    /// frees its space.
    ///
    /// # Errors
    /// [`AreaError::Map`], with `EOPNOTSUPP` if the event is not a trace and `EINVAL` if its area
    /// has another size; [`AreaError::TooLarge`].
    pub fn map_aux(&self, ring: &Ring, pages_log2: u32) -> Result<Area, AreaError> {
        Area::new(self.as_fd(), ring, pages_log2)
    }

    /// Like [`Event::map_aux`], in overwrite mode: the area keeps the newest part of the trace for
    /// a snapshot.
    ///
    /// # Errors
    /// See [`Event::map_aux`].
    pub fn map_aux_snapshot(&self, ring: &Ring, pages_log2: u32) -> Result<Snapshot<'_>, AreaError> {
        Snapshot::new(self, ring, pages_log2)
    }

    /// Waits until the ring crosses its wakeup watermark, without a time limit if `timeout` is `None`. If a signal or
    /// the timeout ends the wait, nothing is ready.
    ///
    /// # Errors
    /// [`EventError::Poll`].
    pub fn poll(&self, timeout: Option<Duration>) -> Result<Ready, EventError> {
        Ok(poll(&[self.as_fd()], timeout)?.into_iter().next().unwrap_or_default())
    }

    /// Makes the event outlive its handles and returns the id that reopens it. If the event was
    /// persistent already, it keeps its id. If `name` is empty, the event keeps its name or, if it has
    /// none, is named `event` followed by the id.
    ///
    /// # Errors
    /// [`PersistentError::Detach`], with `EPERM` without CAP_PERFMON, and `EINVAL` if the event counts a
    /// task, is in a group, or writes to the ring of another event. [`PersistentError::Name`] if
    /// the name is not valid.
    pub fn detach(&self, name: &str) -> Result<u64, PersistentError> {
        persistent::detach(name, |bytes| sys::detach(self.as_fd(), bytes))
    }

    /// Makes the event end when its last handle is closed.
    ///
    /// # Errors
    /// [`PersistentError::Attach`], with `EINVAL` if the event is not persistent, and `EPERM`
    /// without CAP_PERFMON or if the event belongs to the operator.
    pub fn attach(&self) -> Result<(), PersistentError> {
        sys::attach(self.as_fd()).map_err(PersistentError::Attach)
    }

    /// Makes each overflow of this event start `target` before the guest's next instruction, if
    /// `target` is paused. It is paused if it was opened with
    /// [`crate::EventAttr::enable_on_starter`], or if a stopper stopped it.
    ///
    /// # Errors
    /// [`TriggerError::Starter`], with
    /// - `EEXIST` if this event is already the starter of `target`;
    /// - `EBUSY` if `target` has another starter;
    /// - `EINVAL` if `target` is this event or measures another task or CPU, or if this event does not
    ///   sample;
    /// - `EOPNOTSUPP` if the batched engine samples this event.
    pub fn set_starter_of(&self, target: &Event) -> Result<(), TriggerError> {
        sys::link(self.as_fd(), Role::Starter, target.as_fd()).map_err(TriggerError::Starter)
    }

    /// Makes each overflow of this event stop `target` before the guest's next instruction. If
    /// this event is both the starter and the stopper of `target`, each overflow toggles `target`.
    ///
    /// # Errors
    /// [`TriggerError::Stopper`]; see [`Event::set_starter_of`].
    pub fn set_stopper_of(&self, target: &Event) -> Result<(), TriggerError> {
        sys::link(self.as_fd(), Role::Stopper, target.as_fd()).map_err(TriggerError::Stopper)
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Waits like [`Event::poll`] for any of `fds`, which may also be descriptors of other files.
/// Returns the results in the order of `fds`.
///
/// # Errors
/// [`EventError::Poll`].
pub fn poll(fds: &[BorrowedFd<'_>], timeout: Option<Duration>) -> Result<Vec<Ready>, EventError> {
    let revents = sys::poll(fds, timeout).map_err(EventError::Poll)?;
    Ok(revents.into_iter().map(Ready::from_revents).collect())
}

#[cfg(test)]
#[path = "event_tests.rs"]
mod tests;

//! An open event: enable, read, map, wait.

mod error;

pub use error::EventError;

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rustix::event::PollFlags;

use crate::attr::{Engine, EventAttr, FORMAT_GROUP};
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

/// The ring that the host writes.
#[derive(Debug)]
struct HostRing {
    device: Arc<File>,
    fd: OnceLock<OwnedFd>,
    /// The event is persistent: perf core does not schedule it, so calls that change it go to the ring's descriptor.
    persistent: AtomicBool,
}

/// An open event; dropping it closes it.
#[derive(Debug)]
pub struct Event {
    file: File,
    host: Option<HostRing>,
    layout: Layout,
    backward: bool,
}

impl Event {
    /// An event whose samples perf core writes to its own ring.
    pub(crate) fn of_perf(fd: OwnedFd, attr: &EventAttr) -> Self {
        Self { file: fd.into(), host: None, layout: attr.into(), backward: attr.backward }
    }

    /// An event whose records the host writes.
    pub(crate) fn of_host(fd: OwnedFd, device: &Arc<File>, attr: &EventAttr, persistent: bool) -> Self {
        let host =
            HostRing { device: Arc::clone(device), fd: OnceLock::new(), persistent: AtomicBool::new(persistent) };
        Self { host: Some(host), ..Self::of_perf(fd, attr) }
    }

    /// The descriptor of the event's ring: one of the driver's if the host writes the ring, else the event's own.
    ///
    /// # Errors
    /// The error of `VPMU_IOC_RING`.
    pub(crate) fn ring_fd(&self) -> io::Result<BorrowedFd<'_>> {
        let Some(host) = &self.host else {
            return Ok(self.file.as_fd());
        };
        if let Some(fd) = host.fd.get() {
            return Ok(fd.as_fd());
        }
        let fd = sys::ring(host.device.as_fd(), self.file.as_fd())?;
        Ok(host.fd.get_or_init(|| fd).as_fd())
    }

    /// The descriptor for calls that change the event. A persistent event is changed through its ring.
    fn control_fd(&self) -> io::Result<BorrowedFd<'_>> {
        match &self.host {
            Some(host) if host.persistent.load(Ordering::Relaxed) => self.ring_fd(),
            _ => Ok(self.file.as_fd()),
        }
    }

    /// The descriptor through which the ring is mapped.
    pub(crate) fn map_fd(&self, pages: usize) -> Result<BorrowedFd<'_>, RingError> {
        self.ring_fd().map_err(|source| RingError::Map { pages, source })
    }

    /// The layout of the event's records.
    pub(crate) fn layout(&self) -> Layout {
        self.layout
    }

    /// Whether the event's ring is written backwards.
    pub(crate) fn is_backward(&self) -> bool {
        self.backward
    }

    /// Makes one of the driver's own calls for the event, through the device file.
    fn on_device<T>(&self, call: impl FnOnce(BorrowedFd<'_>, BorrowedFd<'_>) -> io::Result<T>) -> io::Result<T> {
        match &self.host {
            Some(host) => call(host.device.as_fd(), self.file.as_fd()),
            None => call(File::open(crate::device::PATH)?.as_fd(), self.file.as_fd()),
        }
    }

    /// Starts or continues counting.
    ///
    /// # Errors
    /// [`EventError::Enable`].
    pub fn enable(&self) -> Result<(), EventError> {
        self.control_fd().and_then(|fd| call::enable(fd, Scope::Event)).map_err(EventError::Enable)
    }

    /// Stops counting; the count remains.
    ///
    /// # Errors
    /// [`EventError::Disable`].
    pub fn disable(&self) -> Result<(), EventError> {
        self.control_fd().and_then(|fd| call::disable(fd, Scope::Event)).map_err(EventError::Disable)
    }

    /// Sets the count to zero, also in the ring's records and metadata page; the times remain.
    ///
    /// # Errors
    /// [`EventError::Reset`].
    pub fn reset(&self) -> Result<(), EventError> {
        self.ring_fd().and_then(|fd| call::reset(fd, Scope::Event)).map_err(EventError::Reset)
    }

    /// Like [`Event::enable`], for every event in the group.
    ///
    /// # Errors
    /// [`EventError::Enable`].
    pub fn enable_group(&self) -> Result<(), EventError> {
        call::enable(&self.file, Scope::Group).map_err(EventError::Enable)
    }

    /// Like [`Event::disable`], for every event in the group.
    ///
    /// # Errors
    /// [`EventError::Disable`].
    pub fn disable_group(&self) -> Result<(), EventError> {
        call::disable(&self.file, Scope::Group).map_err(EventError::Disable)
    }

    /// Sets the counts of all events in the group to zero. Later records still contain the counts since the events
    /// were opened, or since [`Event::reset`].
    ///
    /// # Errors
    /// [`EventError::Reset`].
    pub fn reset_group(&self) -> Result<(), EventError> {
        call::reset(&self.file, Scope::Group).map_err(EventError::Reset)
    }

    /// Enables the event for `overflows` more overflows; the last of them disables it. If
    /// `overflows` is zero, enables the event for the overflows that remain from earlier calls, or
    /// without a limit if none remain.
    ///
    /// # Errors
    /// [`EventError::Refresh`], with `EINVAL` if the event does not sample or was opened with
    /// [`EventAttr::inherit`].
    pub fn refresh(&self, overflows: u32) -> Result<(), EventError> {
        self.ring_fd().and_then(|fd| call::refresh(fd, overflows)).map_err(EventError::Refresh)
    }

    /// Redirects records to the ring of `target`. `None` ends the redirection: the event then has
    /// no ring until one is mapped through it.
    ///
    /// # Errors
    /// [`EventError::Output`], with `EINVAL` if the two events cannot share a ring.
    pub fn set_output(&self, target: Option<&Event>) -> Result<(), EventError> {
        let redirect = || call::set_output(self.ring_fd()?, target.map(Event::ring_fd).transpose()?);
        redirect().map_err(EventError::Output)
    }

    /// Pauses or resumes writing to the ring. Overflows during the pause are lost.
    ///
    /// # Errors
    /// [`EventError::Pause`], with `EINVAL` if the event has no ring.
    pub fn pause_output(&self, paused: bool) -> Result<(), EventError> {
        self.ring_fd().and_then(|fd| call::pause_output(fd, paused)).map_err(EventError::Pause)
    }

    /// Changes the open event's attributes to those in `attr`, as far as the kernel supports that.
    ///
    /// # Errors
    /// [`EventError::Modify`], always for an event of the vPMU: perf modifies only breakpoints.
    pub fn modify(&self, attr: &EventAttr) -> Result<(), EventError> {
        call::modify(&self.file, &attr.to_raw(self.host.is_some())).map_err(EventError::Modify)
    }

    /// Returns the engine that samples the event: [`Engine::Any`] if the event only counts.
    ///
    /// # Errors
    /// [`EventError::Engine`].
    pub fn engine(&self) -> Result<Engine, EventError> {
        let number = self.on_device(sys::event).map_err(EventError::Engine)?.engine;
        Engine::of(number).ok_or(EventError::UnknownEngine(number))
    }

    /// Makes the device write all pending samples of the event to its ring or, for a trace, all pending
    /// packets to its area, and wakes the readers. Returns when all this is done. If perf core writes the ring, readers
    /// wake only at perf's own watermark.
    ///
    /// # Errors
    /// [`EventError::Flush`], with `EIO` if the event is in the error state, and `EBADF` if it is not an event of the
    /// vPMU.
    pub fn flush(&self) -> Result<(), EventError> {
        self.on_device(sys::flush_event).map_err(EventError::Flush)
    }

    /// Sets the period, or the frequency if the event was opened with one. Takes effect immediately.
    ///
    /// # Errors
    /// [`EventError::Period`], with `EINVAL` if the period is zero or the event does not sample.
    pub fn set_period(&self, period: u64) -> Result<(), EventError> {
        self.control_fd().and_then(|fd| call::set_period(fd, period)).map_err(EventError::Period)
    }

    /// Sets the wakeup interval of the event and of the events that tasks inherited from it. The
    /// new interval begins with this call.
    ///
    /// # Errors
    /// [`EventError::Wakeup`], with `EINVAL` if the interval is zero or the event makes no records,
    /// and `ENOTTY` if perf core writes the ring.
    pub fn set_wakeup(&self, wakeup: Wakeup) -> Result<(), EventError> {
        let (every, unit) = match wakeup {
            Wakeup::Records(every) => (every, vpmu_abi::WAKEUP_RECORDS),
            Wakeup::Bytes(every) => (every, vpmu_abi::WAKEUP_BYTES),
        };
        self.ring_fd().and_then(|fd| sys::set_wakeup(fd, every, unit)).map_err(EventError::Wakeup)
    }

    /// Returns the id that this event's records carry. Readings carry perf's own id: [`Event::perf_id`].
    ///
    /// # Errors
    /// [`EventError::Id`].
    pub fn id(&self) -> Result<u64, EventError> {
        let id =
            if self.host.is_some() { self.on_device(sys::event).map(|event| event.id) } else { call::id(&self.file) };
        id.map_err(EventError::Id)
    }

    /// Returns perf core's id of the event, which readings carry.
    ///
    /// # Errors
    /// [`EventError::Id`].
    pub fn perf_id(&self) -> Result<u64, EventError> {
        call::id(&self.file).map_err(EventError::Id)
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
        Ring::new(self.map_fd(pages)?, pages, self.layout)
    }

    /// Maps the metadata page and `data_pages` data pages. With 0 data pages, only counts can be read.
    /// The kernel checks `data_pages`; this method does not, so that tests can pass invalid numbers.
    ///
    /// # Errors
    /// See [`Event::map`].
    pub fn map_pages(&self, data_pages: usize) -> Result<Ring, RingError> {
        Ring::new(self.map_fd(data_pages)?, data_pages, self.layout)
    }

    /// Waits until the ring crosses its wakeup watermark, without a time limit if `timeout` is `None`. If a signal or
    /// the timeout ends the wait, nothing is ready.
    ///
    /// # Errors
    /// [`EventError::Poll`].
    pub fn poll(&self, timeout: Option<Duration>) -> Result<Ready, EventError> {
        let fd = self.ring_fd().map_err(EventError::Poll)?;
        Ok(poll(&[fd], timeout)?.into_iter().next().unwrap_or_default())
    }

    /// The descriptor from perf_event_open(2).
    #[must_use]
    pub fn perf_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
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
        let id = persistent::detach(name, |bytes| self.on_device(|device, event| sys::detach(device, event, bytes)))?;
        if let Some(host) = &self.host {
            host.persistent.store(true, Ordering::Relaxed);
        }
        Ok(id)
    }

    /// Makes the event end when its last handle is closed.
    ///
    /// # Errors
    /// [`PersistentError::Attach`], with `EINVAL` if the event is not persistent, and `EPERM`
    /// without CAP_PERFMON or if the event belongs to the operator.
    pub fn attach(&self) -> Result<(), PersistentError> {
        self.on_device(sys::attach).map_err(PersistentError::Attach)
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
        let link =
            |device: BorrowedFd<'_>, event: BorrowedFd<'_>| sys::link(device, event, Role::Starter, target.perf_fd());
        self.on_device(link).map_err(TriggerError::Starter)
    }

    /// Makes each overflow of this event stop `target` before the guest's next instruction. If
    /// this event is both the starter and the stopper of `target`, each overflow toggles `target`.
    ///
    /// # Errors
    /// [`TriggerError::Stopper`]; see [`Event::set_starter_of`].
    pub fn set_stopper_of(&self, target: &Event) -> Result<(), TriggerError> {
        let link =
            |device: BorrowedFd<'_>, event: BorrowedFd<'_>| sys::link(device, event, Role::Stopper, target.perf_fd());
        self.on_device(link).map_err(TriggerError::Stopper)
    }
}

/// The descriptor to wait for: that of the ring, once it is open. An event that samples or traces opens its ring at once.
impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.host.as_ref().and_then(|host| host.fd.get()).map_or_else(|| self.file.as_fd(), AsFd::as_fd)
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

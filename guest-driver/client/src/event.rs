//! An open event, whichever door it came through: switching, reading, mapping, waiting.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use crate::attr::{EventAttr, FORMAT_ID, FORMAT_TIME_ENABLED, FORMAT_TIME_RUNNING};
use crate::ring::{Ring, RingError};
use crate::sys::{self, Switch};

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
    /// The id cannot be asked for.
    #[error("asking for the event's id")]
    Id(#[source] io::Error),
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
    /// Waiting failed.
    #[error("waiting for the event")]
    Poll(#[source] io::Error),
}

/// A count, as it was at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Reading {
    /// The count.
    pub value: u64,
    /// Nanoseconds enabled with its task (or CPU) running; zero unless the read format asks.
    pub time_enabled: u64,
    /// Nanoseconds of those in which it was counted; zero unless the read format asks.
    pub time_running: u64,
    /// The event's id; zero unless the read format asks.
    pub id: u64,
}

impl Reading {
    /// Takes the words of a read(2) apart; `None` if there are fewer than the format says.
    fn from_words(read_format: u64, words: &[u64]) -> Option<Self> {
        let mut words = words.iter().copied();
        let value = words.next()?;
        let mut field = |bit| {
            if read_format & bit == 0 {
                Some(0)
            } else {
                words.next()
            }
        };
        Some(Self {
            value,
            time_enabled: field(FORMAT_TIME_ENABLED)?,
            time_running: field(FORMAT_TIME_RUNNING)?,
            id: field(FORMAT_ID)?,
        })
    }
}

/// What a wait came back with.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ready {
    /// The ring has crossed its wakeup mark since the last wait.
    pub readable: bool,
    /// Nothing will come any more: the task has gone or the backing was lost.
    pub closed: bool,
}

impl Ready {
    fn from_revents(revents: i16) -> Self {
        Self {
            readable: revents & libc::POLLIN != 0,
            closed: revents & (libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) != 0,
        }
    }
}

/// An open event; dropping it closes it.
#[derive(Debug)]
pub struct Event {
    file: File,
    read_format: u64,
    sample_type: u64,
}

impl Event {
    pub(crate) fn new(fd: OwnedFd, attr: &EventAttr) -> Self {
        Self {
            file: fd.into(),
            read_format: attr.read_format,
            sample_type: attr.sample_type,
        }
    }

    /// Begins to count, or goes on.
    ///
    /// # Errors
    /// [`EventError::Enable`].
    pub fn enable(&self) -> Result<(), EventError> {
        sys::switch(self.as_fd(), Switch::Enable).map_err(EventError::Enable)
    }

    /// Ceases to count; the count stays.
    ///
    /// # Errors
    /// [`EventError::Disable`].
    pub fn disable(&self) -> Result<(), EventError> {
        sys::switch(self.as_fd(), Switch::Disable).map_err(EventError::Disable)
    }

    /// The count becomes zero; the times stay.
    ///
    /// # Errors
    /// [`EventError::Reset`].
    pub fn reset(&self) -> Result<(), EventError> {
        sys::switch(self.as_fd(), Switch::Reset).map_err(EventError::Reset)
    }

    /// A new period, from this moment.
    ///
    /// # Errors
    /// [`EventError::Period`], with `EINVAL` if it is zero or the event does not sample.
    pub fn set_period(&self, period: u64) -> Result<(), EventError> {
        sys::set_period(self.as_fd(), period).map_err(EventError::Period)
    }

    /// The id that this event's records carry.
    ///
    /// # Errors
    /// [`EventError::Id`].
    pub fn id(&self) -> Result<u64, EventError> {
        sys::id(self.as_fd()).map_err(EventError::Id)
    }

    /// The count and the times, inherited events' included.
    ///
    /// # Errors
    /// [`EventError::Read`]; [`EventError::Dead`] for an event in error.
    pub fn read(&self) -> Result<Reading, EventError> {
        let mut bytes = [0; 32];
        let got = (&self.file).read(&mut bytes).map_err(EventError::Read)?;
        if got == 0 {
            return Err(EventError::Dead);
        }
        let mut words = [0; 4];
        for (word, bytes) in words.iter_mut().zip(bytes[..got].chunks_exact(8)) {
            *word = bytes.try_into().map_or(0, u64::from_ne_bytes);
        }
        Reading::from_words(self.read_format, &words[..got / 8]).ok_or_else(|| {
            let fields = FORMAT_TIME_ENABLED | FORMAT_TIME_RUNNING | FORMAT_ID;
            let expected = 8 + 8 * (self.read_format & fields).count_ones() as usize;
            EventError::ShortRead { got, expected }
        })
    }

    /// Maps the metadata page and 2^`pages_log2` data pages, to be read and given back.
    ///
    /// # Errors
    /// [`RingError::Map`], with `EINVAL` if it is mapped in another size already, and
    /// [`RingError::TooLarge`].
    pub fn map(&self, pages_log2: u32) -> Result<Ring, RingError> {
        let pages = 1usize
            .checked_shl(pages_log2)
            .ok_or(RingError::TooLarge(pages_log2))?;
        Ring::new(self.as_fd(), pages, self.sample_type)
    }

    /// Maps `data_pages` data pages after the metadata page: none for an event whose count
    /// alone is of interest, and any number for whoever wants to see a wrong one refused.
    ///
    /// # Errors
    /// As [`Event::map`].
    pub fn map_pages(&self, data_pages: usize) -> Result<Ring, RingError> {
        Ring::new(self.as_fd(), data_pages, self.sample_type)
    }

    /// Waits until the ring has crossed its wakeup mark; `None` waits without end. A signal
    /// or the timeout ends the wait with nothing ready.
    ///
    /// # Errors
    /// [`EventError::Poll`].
    pub fn poll(&self, timeout: Option<Duration>) -> Result<Ready, EventError> {
        Ok(poll(&[self.as_fd()], timeout)?
            .into_iter()
            .next()
            .unwrap_or_default())
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Waits for any of `fds`, events or others; as [`Event::poll`], in the order of `fds`.
///
/// # Errors
/// [`EventError::Poll`].
pub fn poll(fds: &[BorrowedFd<'_>], timeout: Option<Duration>) -> Result<Vec<Ready>, EventError> {
    let revents = sys::poll(fds, timeout).map_err(EventError::Poll)?;
    Ok(revents.into_iter().map(Ready::from_revents).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attr::FORMAT_ALL;
    use std::io::{Seek, Write};

    fn event(content: &[u8], read_format: u64) -> Event {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(content).unwrap();
        file.rewind().unwrap();
        Event {
            file,
            read_format,
            sample_type: 0,
        }
    }

    #[test]
    fn a_reading_follows_its_format() {
        let words: Vec<u8> = [7u64, 100, 50, 3]
            .iter()
            .flat_map(|w| w.to_ne_bytes())
            .collect();
        let all = Reading {
            value: 7,
            time_enabled: 100,
            time_running: 50,
            id: 3,
        };
        assert_eq!(event(&words, FORMAT_ALL).read().unwrap(), all);
        assert_eq!(
            event(&words, 0).read().unwrap(),
            Reading {
                value: 7,
                ..Reading::default()
            }
        );
        let id = event(&words, FORMAT_ID).read().unwrap();
        assert_eq!(
            id,
            Reading {
                value: 7,
                id: 100,
                ..Reading::default()
            }
        );
    }

    #[test]
    fn a_short_answer_is_an_error() {
        assert!(matches!(
            event(&[], FORMAT_ALL).read(),
            Err(EventError::Dead)
        ));
        for got in [7, 24] {
            let error = event(&[0; 24][..got], FORMAT_ALL).read().unwrap_err();
            assert!(
                matches!(error, EventError::ShortRead { got: g, expected: 32 } if g == got),
                "{error}"
            );
        }
    }
}

//! The errors that the device returns to a guest, as positive Linux errnos.

use std::io;

use libc::c_int;

use crate::refusal::Refusal;

/// A positive Linux errno in wire format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Errno(u32);

impl Errno {
    pub(crate) const E2BIG: Self = Self::of(libc::E2BIG);
    pub(crate) const EBUSY: Self = Self::of(libc::EBUSY);
    pub(crate) const EEXIST: Self = Self::of(libc::EEXIST);
    pub(crate) const EINVAL: Self = Self::of(libc::EINVAL);
    pub(crate) const EIO: Self = Self::of(libc::EIO);
    pub(crate) const ENOENT: Self = Self::of(libc::ENOENT);
    pub(crate) const ENOSPC: Self = Self::of(libc::ENOSPC);
    pub(crate) const EOPNOTSUPP: Self = Self::of(libc::EOPNOTSUPP);
    pub(crate) const EOVERFLOW: Self = Self::of(libc::EOVERFLOW);
    pub(crate) const EPERM: Self = Self::of(libc::EPERM);
    pub(crate) const EXDEV: Self = Self::of(libc::EXDEV);

    const fn of(number: c_int) -> Self {
        Self(number.unsigned_abs())
    }

    /// The host's errno, or `EIO` if the error has no errno.
    pub(crate) fn from_raw(error: &io::Error) -> Self {
        error.raw_os_error().map_or(Self::EIO, Self::of)
    }

    pub(crate) fn get(self) -> u32 {
        self.0
    }
}

/// Why an event could not be opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Denied {
    pub(crate) errno: Errno,
    /// The host's reason for refusing the event. `None` if the device refused it.
    pub(crate) refusal: Option<Refusal>,
}

impl From<Errno> for Denied {
    fn from(errno: Errno) -> Self {
        Self { errno, refusal: None }
    }
}

impl From<io::Error> for Errno {
    fn from(error: io::Error) -> Self {
        Self::from_raw(&error)
    }
}

impl From<Errno> for io::Error {
    fn from(errno: Errno) -> Self {
        Self::from_raw_os_error(errno.0.cast_signed())
    }
}

/// The wire's status word for a result.
pub(crate) fn status<T>(result: &Result<T, Errno>) -> u32 {
    result.as_ref().map_or_else(|errno| errno.get(), |_| 0)
}

//! Descriptors that whoever started this process left open in it.

#![expect(unsafe_code, reason = "closing descriptors by their numbers")]

use std::fs;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// Standard input, output and error, which stay.
const STANDARD: RawFd = 3;

/// The descriptors above standard error that were open at the start. They are closed when everything
/// that a path names is open, for a path may name one of them: `/dev/fd/3`.
#[derive(Debug)]
#[must_use]
pub struct Inherited(Vec<RawFd>);

impl Inherited {
    /// Finds them. To be called before this process opens anything.
    pub fn find() -> Self {
        let Ok(entries) = fs::read_dir("/proc/self/fd") else {
            // Then there is no `/dev/fd` either, and nothing of ours is open yet.
            close_all();
            return Self(Vec::new());
        };
        let numbers = entries
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let numbers: Vec<RawFd> = numbers.filter(|&number| number >= STANDARD).collect();
        // The directory's own descriptor is closed by now.
        Self(
            numbers
                .into_iter()
                .filter(|&number| is_open(number))
                .collect(),
        )
    }

    /// Closes them.
    pub(super) fn close(self) {
        for number in self.0 {
            // SAFETY: it was open before this process opened anything, so it is none of ours, and
            // nobody else closes it.
            drop(unsafe { OwnedFd::from_raw_fd(number) });
        }
    }
}

fn is_open(number: RawFd) -> bool {
    // SAFETY: asks about a number, which may be closed.
    unsafe { libc::fcntl(number, libc::F_GETFD) >= 0 }
}

fn close_all() {
    let first = STANDARD.unsigned_abs();
    // SAFETY: nothing of this process is open above standard error: it has just started. A kernel
    // without the call has them stay, and what they are is known nowhere.
    unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, 0) };
}

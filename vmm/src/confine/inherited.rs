//! Descriptors that this process inherited.

#![expect(unsafe_code, reason = "closing descriptors by their numbers")]

use std::fs;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// The first descriptor after standard input, output and error. These three stay open.
const STANDARD: RawFd = 3;

/// The descriptors above standard error that were open at the start. They are closed once every configured path is
/// open, because a path may name one of them, such as `/dev/fd/3`.
#[derive(Debug)]
#[must_use]
pub struct Inherited(Vec<RawFd>);

impl Inherited {
    /// Lists the inherited descriptors. Call this before this process opens anything.
    pub fn find() -> Self {
        let Ok(entries) = fs::read_dir("/proc/self/fd") else {
            // Without /proc, a configured path cannot name a descriptor, so close all descriptors now. This process
            // has not opened anything yet.
            close_all();
            return Self(Vec::new());
        };
        let numbers = entries
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let numbers: Vec<RawFd> = numbers.filter(|&number| number >= STANDARD).collect();
        // The list includes the descriptor of the directory itself. That descriptor is closed by now, so leave it out.
        Self(
            numbers
                .into_iter()
                .filter(|&number| is_open(number))
                .collect(),
        )
    }

    /// Closes the listed descriptors.
    pub(super) fn close(self) {
        for number in self.0 {
            // SAFETY: the descriptor was open before this process opened anything, so this process does
            // not use it and nothing else closes it.
            drop(unsafe { OwnedFd::from_raw_fd(number) });
        }
    }
}

fn is_open(number: RawFd) -> bool {
    // SAFETY: the call only reads the descriptor's flags, and returns an error if the descriptor is closed.
    unsafe { libc::fcntl(number, libc::F_GETFD) >= 0 }
}

fn close_all() {
    let first = STANDARD.unsigned_abs();
    // SAFETY: this process has just started and opened nothing above standard error. A kernel
    // without this system call leaves the descriptors open.
    unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, 0) };
}

//! Gives up inherited resources: open descriptors, and the PID namespace.

#![expect(unsafe_code, reason = "closing descriptors by their numbers")]

use std::fs;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use super::namespace::Namespace;
use super::{ConfineError, Options};

/// The first descriptor after standard input, output and error. These three stay open.
const STANDARD: RawFd = 3;

/// The inherited resources that this process gives up.
#[derive(Debug)]
#[must_use]
pub struct Inherited {
    /// The descriptors above standard error that were open at the start. They are closed once every configured path is
    /// open, because a path may name one of them, such as `/dev/fd/3`.
    descriptors: Vec<RawFd>,
    /// The process's own PID namespace, if it has left the inherited one.
    pub(super) namespace: Option<Namespace>,
}

impl Inherited {
    /// Lists the inherited descriptors. Call this before this process opens anything.
    pub fn find() -> Self {
        let Ok(entries) = fs::read_dir("/proc/self/fd") else {
            // Without /proc, a configured path cannot name a descriptor, so close all descriptors now. This process
            // has not opened anything yet.
            close_all();
            return Self::from(Vec::new());
        };
        let numbers = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let numbers: Vec<RawFd> = numbers.filter(|&number| number >= STANDARD).collect();
        // The list includes the descriptor of the directory itself. That descriptor is closed by now, so leave it out.
        let open = numbers.into_iter().filter(|&number| is_open(number));
        Self::from(open.collect::<Vec<_>>())
    }

    /// Leaves the inherited PID namespace for a new one, if the host allows it: this process forks, the child returns
    /// from this function, and the parent waits for the child and ends like it. Call this before the process starts a
    /// thread or opens a file.
    ///
    /// # Errors
    /// [`ConfineError::Namespace`].
    pub fn leave_namespace(self, options: &Options) -> Result<Self, ConfineError> {
        let namespace = Namespace::enter(options.user).map_err(ConfineError::Namespace)?;
        Ok(Self { namespace, ..self })
    }

    /// Closes the listed descriptors.
    pub(super) fn close(&mut self) {
        for number in std::mem::take(&mut self.descriptors) {
            // SAFETY: the descriptor was open before this process opened anything, so this process does
            // not use it and nothing else closes it.
            drop(unsafe { OwnedFd::from_raw_fd(number) });
        }
    }
}

impl From<Vec<RawFd>> for Inherited {
    fn from(descriptors: Vec<RawFd>) -> Self {
        Self { descriptors, namespace: None }
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

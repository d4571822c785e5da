//! Marks placed from user mode. A mark is one store to the device's doorbell. It causes one VM exit and needs no system
//! call.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use crate::register::Register;
use crate::sys;

/// An error of marks.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MarksError {
    /// The device's descriptor cannot be duplicated.
    #[error("cannot keep the vPMU open for marks")]
    Keep(#[source] io::Error),
    /// A mark was refused.
    #[error("cannot place a mark")]
    Place(#[source] io::Error),
}

/// The method of placing marks.
#[derive(Debug)]
enum Way {
    /// A store to the doorbell page.
    Page(Register),
    /// A system call, because mapping the page failed with this error.
    Call(File, io::Error),
}

/// Places marks from any thread. Each mark is counted for the task that places it, and for the CPU
/// that the task runs on.
#[derive(Debug)]
pub struct Marks(Way);

impl Marks {
    /// See [`Vpmu::marks`](crate::Vpmu::marks).
    pub(crate) fn on(device: BorrowedFd<'_>) -> Result<Self, MarksError> {
        Ok(Self(match Register::new(device) {
            Ok(page) => Way::Page(page),
            Err(refusal) => {
                let file = device.try_clone_to_owned().map_err(MarksError::Keep)?;
                Way::Call(file.into(), refusal)
            }
        }))
    }

    /// Places the mark `value`.
    ///
    /// # Errors
    /// [`MarksError::Place`] if marks are placed by system calls and the device supports no marks.
    pub fn place(&self, value: u32) -> Result<(), MarksError> {
        match &self.0 {
            Way::Page(page) => page.store(value),
            Way::Call(file, _) => sys::mark(file.as_fd(), value).map_err(MarksError::Place)?,
        }
        Ok(())
    }

    /// The reason why each mark takes a system call; `None` if marks are stores.
    #[must_use]
    pub fn refusal(&self) -> Option<&io::Error> {
        match &self.0 {
            Way::Page(_) => None,
            Way::Call(_, refusal) => Some(refusal),
        }
    }
}

//! Marks placed from user mode: one store to the device's doorbell, one VM exit, no system
//! call.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use crate::Error;
use crate::device::{DeviceError, Vpmu};
use crate::map::Register;
use crate::sys;

/// Why marks cannot be placed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MarksError {
    /// The device's descriptor cannot be kept.
    #[error("keeping the vPMU open for marks")]
    Keep(#[source] io::Error),
}

/// How a mark reaches the device.
#[derive(Debug)]
enum Way {
    /// By a store.
    Page(Register),
    /// By a system call, and why not by a store.
    Call(File, io::Error),
}

/// A place to put marks, for any thread. Each counts on the CPU, and for the task, that places
/// it.
#[derive(Debug)]
pub struct Marks(Way);

impl Vpmu {
    /// Maps the doorbell; where that is refused, marks go by a system call each.
    ///
    /// # Errors
    /// [`MarksError`].
    pub fn marks(&self) -> Result<Marks, Error> {
        Ok(Marks(match Register::new(self.as_fd()) {
            Ok(page) => Way::Page(page),
            Err(refusal) => {
                let file = self
                    .as_fd()
                    .try_clone_to_owned()
                    .map_err(MarksError::Keep)?;
                Way::Call(file.into(), refusal)
            }
        }))
    }
}

impl Marks {
    /// Places the mark `value`.
    ///
    /// # Errors
    /// [`Error::Device`] if it went by a call, and the device takes no marks.
    pub fn place(&self, value: u32) -> Result<(), Error> {
        match &self.0 {
            Way::Page(page) => page.store(value),
            Way::Call(file, _) => sys::mark(file.as_fd(), value).map_err(DeviceError::Mark)?,
        }
        Ok(())
    }

    /// Why each mark takes a system call; `None` if it takes none.
    #[must_use]
    pub fn refusal(&self) -> Option<&io::Error> {
        match &self.0 {
            Way::Page(_) => None,
            Way::Call(_, refusal) => Some(refusal),
        }
    }
}

//! Marks placed from user mode: one store to the device's doorbell, one VM exit, without a system
//! call.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use crate::Error;
use crate::device::{DeviceError, Vpmu};
use crate::register::Register;
use crate::sys;

/// An error of setting up marks.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MarksError {
    /// The device's descriptor cannot be duplicated.
    #[error("keeping the vPMU open for marks")]
    Keep(#[source] io::Error),
}

/// The method of placing marks.
#[derive(Debug)]
enum Way {
    /// A store to the doorbell page.
    Page(Register),
    /// A system call, with the error of mapping the page.
    Call(File, io::Error),
}

/// Places marks from any thread. Each counts on the CPU and for the task that places it.
#[derive(Debug)]
pub struct Marks(Way);

impl Vpmu {
    /// Maps the doorbell; if the kernel refuses, each mark takes a system call.
    ///
    /// # Errors
    /// [`Error::Marks`].
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
    /// [`Error::Device`] if the mark took a system call and the device takes no marks.
    pub fn place(&self, value: u32) -> Result<(), Error> {
        match &self.0 {
            Way::Page(page) => page.store(value),
            Way::Call(file, _) => sys::mark(file.as_fd(), value).map_err(DeviceError::Mark)?,
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

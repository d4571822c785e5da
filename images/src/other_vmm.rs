//! The VMM that runs a guest while the device is in a process of its own.

use std::fmt;
use std::process::Command;

use crate::boot::Carrier;
use crate::cache::Cache;
use crate::cloud_hypervisor::{self, CloudHypervisor};
use crate::error::BootError;
use crate::stock_qemu::{self, Machine, StockQemu};
use crate::unpacked::Files;

/// A VMM beside the device's process.
#[derive(Clone, Debug)]
pub(crate) enum OtherVmm {
    Qemu(StockQemu),
    CloudHypervisor(CloudHypervisor),
}

impl OtherVmm {
    /// The VMM that runs guests of `carrier`. QEMU is fetched when it is first needed.
    ///
    /// # Errors
    /// [`BootError`].
    pub(crate) fn get(cache: &Cache, carrier: &Carrier) -> Result<Self, BootError> {
        Ok(match carrier {
            Carrier::BesideCloudHypervisor(program) => {
                Self::CloudHypervisor(CloudHypervisor::at(program).map_err(BootError::CloudHypervisor)?)
            }
            _ => Self::Qemu(StockQemu::get(cache)?),
        })
    }

    /// The command that runs `machine`.
    pub(crate) fn command(&self, machine: &Machine<'_>) -> Command {
        match self {
            Self::Qemu(qemu) => qemu.command(machine),
            Self::CloudHypervisor(program) => program.command(machine),
        }
    }

    /// The command line of `machine`, to be typed where the VMM is installed.
    pub(crate) fn typed(&self, machine: &Machine<'_>) -> String {
        match self {
            Self::Qemu(_) => stock_qemu::typed(machine),
            Self::CloudHypervisor(_) => cloud_hypervisor::typed(machine),
        }
    }

    /// The files of the program for the lab's host, where [`OtherVmm::typed`] runs it.
    ///
    /// # Errors
    /// [`BootError`].
    pub(crate) fn files(&self) -> Result<Files, BootError> {
        match self {
            Self::Qemu(qemu) => Ok(qemu.files()?),
            Self::CloudHypervisor(program) => program.files().map_err(BootError::Libraries),
        }
    }
}

impl fmt::Display for OtherVmm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Qemu(qemu) => write!(f, "stock QEMU {}", qemu.version()),
            Self::CloudHypervisor(program) => write!(f, "Cloud Hypervisor {}", program.version()),
        }
    }
}

//! The guest's boot images. Every boot loads them into guest memory again, so their files stay open.

use std::fs::File;
use std::path::{Path, PathBuf};

use vm_memory::GuestMemoryMmap;

use super::VmError;
use crate::arch::{boot, kernel};
use crate::config::Config;
use crate::machine::Machine;

/// The image files and the boot parameters.
#[derive(Debug)]
pub(super) struct Images {
    kernel: Option<File>,
    path: PathBuf,
    initramfs: Option<File>,
    cmdline: String,
    machine: Machine,
}

/// Opens the regular file `path`, which serves as `what`.
///
/// # Errors
/// [`VmError::Open`], [`VmError::NotFile`].
pub(super) fn open(what: &'static str, path: &Path) -> Result<File, VmError> {
    let error = |source| VmError::Open { what, path: path.to_owned(), source };
    let file = File::open(path).map_err(error)?;
    if !file.metadata().map_err(error)?.is_file() {
        return Err(VmError::NotFile { what, path: path.to_owned() });
    }
    Ok(file)
}

impl Images {
    /// Opens the files that `config` names.
    ///
    /// # Errors
    /// [`VmError::Open`], [`VmError::NotFile`].
    pub(super) fn open(config: &Config) -> Result<Self, VmError> {
        let kernel = config.kernel.as_deref();
        let path = kernel.unwrap_or_else(|| Path::new("")).to_owned();
        let kernel = kernel.map(|path| open("kernel", path)).transpose()?;
        let initramfs = config.initramfs.as_deref().map(|path| open("initramfs", path)).transpose()?;
        Ok(Self { kernel, path, initramfs, cmdline: config.cmdline.clone(), machine: config.into() })
    }

    /// Loads the images into `memory`, which must be zeroed. Returns the kernel's entry point.
    ///
    /// # Errors
    /// [`VmError`]: an invalid kernel, or images that do not fit.
    pub(super) fn load(&mut self, memory: &GuestMemoryMmap) -> Result<u64, VmError> {
        let file = self.kernel.as_mut().ok_or(VmError::NothingToBoot)?;
        let kernel =
            kernel::load(memory, file).map_err(|source| VmError::Kernel { path: self.path.clone(), source })?;
        let initramfs = self.initramfs.as_mut();
        boot::write(memory, &kernel, initramfs, &self.cmdline, &self.machine)?;
        Ok(kernel.entry)
    }
}

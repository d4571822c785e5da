//! Packs the initramfs of guests and of the lab. The large part is cached. The files of one run are in a small
//! archive that follows the large part, so the kernel unpacks them last.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::arch::Arch;
use crate::busybox::{self, BusyboxError};
use crate::cache::{Cache, CacheError};
use crate::cpio::{self, Archive, CpioError};
use crate::digest::{DigestError, Key};
use crate::file_error::FileError;
use crate::kernel::Kernel;
use crate::kmod::{self, KmodError, Module};
use crate::module;
use crate::programs::{ProgramError, Programs};
use crate::progress::Step;

const GUEST_INIT: &str = include_str!("../guest/init.sh");
const LAB_INIT: &str = include_str!("../guest/lab.sh");
const FILE: &str = "initramfs.cpio";

/// Errors of packing an initramfs.
#[derive(Debug, Error)]
pub enum InitramfsError {
    /// The shell and tools are missing.
    #[error(transparent)]
    Busybox(#[from] BusyboxError),
    /// The cache cannot be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A part could not be read.
    #[error(transparent)]
    Digest(#[from] DigestError),
    /// A kernel module is missing or cannot be unpacked.
    #[error(transparent)]
    Kmod(#[from] KmodError),
    /// A program is missing.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// A file cannot be put into the archive.
    #[error(transparent)]
    Cpio(#[from] CpioError),
    /// A file could not be read or written.
    #[error(transparent)]
    File(#[from] FileError),
}

/// Packs the guest's initramfs: shell and tools, the driver and the modules that it needs, our programs.
///
/// # Errors
/// [`InitramfsError`].
pub fn guest(
    cache: &Cache,
    kernel: &Kernel,
    driver: &Path,
    programs: &Programs,
    tests: &[String],
) -> Result<PathBuf, InitramfsError> {
    let mut files: BTreeMap<String, PathBuf> = BTreeMap::new();
    for (name, file) in programs.guest(tests) {
        files.insert(format!("bin/{name}"), file.to_owned());
    }
    let modules = || -> Result<Vec<Module>, InitramfsError> {
        let mut modules = match &kernel.modules {
            Some(directory) => kmod::collect(directory, kernel.arch.guest_modules())?,
            None => Vec::new(),
        };
        let bytes = fs::read(driver).map_err(FileError::at(driver))?;
        modules.push(Module { name: module::NAME.trim_end_matches(".ko").to_owned(), bytes });
        Ok(modules)
    };
    let key = Key::new("guest initramfs").text("kernel", &kernel.id).file("driver", driver)?;
    let key = key.text("modules", &kernel.arch.guest_modules().join(" "));
    pack(cache, kernel.arch, "initramfs", key, GUEST_INIT, &files, modules)
}

/// Packs the lab's initramfs: shell and tools, KVM, the VMM, the guest's kernel.
///
/// # Errors
/// [`InitramfsError`].
pub fn lab(cache: &Cache, host: &Kernel, guest: &Kernel, programs: &Programs) -> Result<PathBuf, InitramfsError> {
    // The compressed image is faster here: the emulated processor copies fewer bytes, and the guest unpacks the image
    // only once.
    let mut files = BTreeMap::from([("guest/kernel".to_owned(), guest.bzimage.clone())]);
    files.insert("bin/vmm".to_owned(), programs.vmm()?.to_owned());
    if let Ok(program) = programs.one("outb") {
        files.insert("bin/outb".to_owned(), program.to_owned());
    }
    let modules = || -> Result<Vec<Module>, InitramfsError> {
        match &host.modules {
            Some(directory) => Ok(kmod::collect(directory, host.arch.lab_modules())?),
            None => Ok(Vec::new()),
        }
    };
    let key = Key::new("lab initramfs").text("kernel", &host.id);
    pack(cache, host.arch, "lab", key, LAB_INIT, &files, modules)
}

fn pack(
    cache: &Cache,
    arch: Arch,
    kind: &str,
    mut key: Key,
    init: &str,
    files: &BTreeMap<String, PathBuf>,
    modules: impl FnOnce() -> Result<Vec<Module>, InitramfsError>,
) -> Result<PathBuf, InitramfsError> {
    let busybox = busybox::get(cache, arch)?;
    key = key.text("recipe", "1").text("init", init).file("busybox", &busybox)?;
    for (name, file) in files {
        key = key.file(name, file)?;
    }
    let place = cache.get(&arch.kind(kind), &key.hex(), |dir| {
        let step = Step::new(format!("packing the {kind} archive"));
        let mut archive = Archive::new();
        for directory in ["dev", "proc", "root", "run", "sys", "tmp"] {
            archive.directory(directory)?;
        }
        // The kernel opens /dev/console for /init before anything is mounted, so the archive must contain the device.
        archive.device("dev/console", 5, 1)?;
        // On a machine without ports, /init writes to the VMM through /dev/mem.
        if !arch.is_native() {
            archive.device("dev/mem", 1, 1)?;
        }
        archive.file("init", 0o755, init.as_bytes())?;
        add(&mut archive, "bin/busybox", &busybox)?;
        for applet in busybox::applets(&busybox)? {
            archive.link(&format!("bin/{applet}"), "busybox")?;
        }
        let mut order = String::new();
        for module in modules()? {
            let name = format!("{}.ko", module.name);
            archive.file(&format!("lib/modules/{name}"), 0o644, &module.bytes)?;
            order.push_str(&name);
            order.push('\n');
        }
        archive.file("etc/modules", 0o644, order.as_bytes())?;
        for (name, file) in files {
            add(&mut archive, name, file)?;
        }
        let path = dir.join(FILE);
        fs::write(&path, archive.finish()?).map_err(FileError::at(&path))?;
        step.done();
        Ok::<_, InitramfsError>(())
    })?;
    Ok(place.join(FILE))
}

fn add(archive: &mut Archive, name: &str, file: &Path) -> Result<(), InitramfsError> {
    let bytes = fs::read(file).map_err(FileError::at(file))?;
    Ok(archive.file(name, 0o755, &bytes)?)
}

/// Concatenates archives, `last` after the others; the kernel unpacks them in this order.
///
/// # Errors
/// [`InitramfsError::File`].
pub fn concatenate(archives: &[&Path], last: &[u8]) -> Result<Vec<u8>, InitramfsError> {
    let mut bytes = Vec::new();
    for archive in archives {
        bytes.extend(fs::read(archive).map_err(FileError::at(archive))?);
        cpio::pad(&mut bytes);
    }
    bytes.extend_from_slice(last);
    Ok(bytes)
}

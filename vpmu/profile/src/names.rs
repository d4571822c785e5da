//! Names of functions that a recording does not contain: from files that the operator provides, or from the machine that
//! was recorded.
//!
//! A program's file is found by the build id that the recording has for it. The path in the recording is only a hint:
//! a file with another build id is not used.

use std::cell::OnceCell;
use std::fmt::Write;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Component, Path, PathBuf};

use vpmu_symbols::{Elf, ElfError, Functions, Segments, kallsyms, printable};

use crate::bounds::number;

/// Maximum size of a file with symbols, in bytes.
const MOST_BYTES: u64 = 1 << 30;
/// Maximum number of characters of a name.
pub(crate) const NAME_MAX: usize = 1024;
/// The kernel's list of its own functions.
const KALLSYMS: &str = "/proc/kallsyms";
/// The kernel's ELF notes, one of which is its build id.
const KERNEL_NOTES: &str = "/sys/kernel/notes";
/// ELF's `NT_GNU_BUILD_ID`.
const NOTE_BUILD_ID: u64 = 3;
/// Symbols that perf may use as the reference for the kernel's address.
const REFERENCES: [&str; 2] = ["_text", "_stext"];

/// Errors of files with names.
#[derive(Debug, thiserror::Error)]
pub enum NamesError {
    /// A file or directory cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The path.
        path: PathBuf,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
    /// The directory is not a directory.
    #[error("{0} is not a directory: it must be the root of the guest's files, or a directory with .build-id in it")]
    NotDirectory(PathBuf),
    /// The ELF file is damaged.
    #[error("cannot parse the ELF file {path}")]
    Elf {
        /// The path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: ElfError,
    },
    /// The file has no functions.
    #[error(
        "{0} has no function symbols: it must be an unstripped vmlinux, a System.map, or a copy of /proc/kallsyms made as root"
    )]
    None(PathBuf),
}

/// Sources of names.
#[derive(Debug, Default)]
pub struct Names {
    kernel: Kernel,
    programs: Programs,
}

/// Where the names of the kernel's functions are.
#[derive(Debug, Default)]
enum Kernel {
    #[default]
    Nowhere,
    /// In a file of the operator.
    File(KernelFile),
    /// In the running kernel, whose long list is read when it is needed; `None` if the kernel hides it from this user.
    Running(OnceCell<Option<KernelFile>>),
}

/// Where the files of programs are.
#[derive(Debug, Default)]
enum Programs {
    #[default]
    Nowhere,
    /// In a directory of the operator.
    Directory(PathBuf),
    /// At their paths on this machine.
    Here,
}

/// A kernel's functions.
#[derive(Debug)]
struct KernelFile {
    functions: Functions<(String, Option<String>)>,
    /// Addresses of [`REFERENCES`].
    references: [Option<u64>; 2],
}

/// A program's functions.
#[derive(Debug)]
pub(crate) struct Program {
    segments: Vec<Segments>,
    functions: Functions<String>,
}

impl Names {
    /// Uses only the names in the recording.
    #[must_use]
    pub fn none() -> Self {
        Self::default()
    }

    /// Uses the kernel and the files of this machine, for recordings that were made here. If the kernel hides its
    /// functions from this user, they have no names.
    #[must_use]
    pub fn here() -> Self {
        Self { kernel: Kernel::Running(OnceCell::new()), programs: Programs::Here }
    }

    /// Uses the files that the operator provides, where there are any: `vmlinux`, which can also be a `System.map` or a
    /// copy of `/proc/kallsyms`, and `symfs`, a directory with the programs' files.
    ///
    /// # Errors
    /// [`NamesError`].
    pub fn with(mut self, vmlinux: Option<&Path>, symfs: Option<&Path>) -> Result<Self, NamesError> {
        if let Some(symfs) = symfs {
            let read = |source| NamesError::Read { path: symfs.to_owned(), source };
            if !fs::metadata(symfs).map_err(read)?.is_dir() {
                return Err(NamesError::NotDirectory(symfs.to_owned()));
            }
            self.programs = Programs::Directory(symfs.to_owned());
        }
        if let Some(vmlinux) = vmlinux {
            self.kernel = Kernel::File(KernelFile::open(vmlinux)?);
        }
        Ok(self)
    }

    /// Whether there are names for the kernel's functions.
    #[must_use]
    pub fn have_kernel(&self) -> bool {
        self.kernel_file().is_some()
    }

    fn kernel_file(&self) -> Option<&KernelFile> {
        match &self.kernel {
            Kernel::Nowhere => None,
            Kernel::File(file) => Some(file),
            Kernel::Running(file) => file.get_or_init(|| KernelFile::open(Path::new(KALLSYMS)).ok()).as_ref(),
        }
    }

    /// Forgets the running kernel's functions if the recorded kernel is another one.
    pub(crate) fn recorded_kernel(&mut self, build_id: &[u8]) {
        if matches!(self.kernel, Kernel::Running(_)) {
            let running = fs::read(KERNEL_NOTES).ok().and_then(|notes| kernel_build_id(&notes));
            if running.is_some_and(|running| running != build_id) {
                self.kernel = Kernel::Nowhere;
            }
        }
    }

    /// Returns how far the recorded kernel is from the addresses of the file, if its symbol `reference` is at
    /// `address`. Kernels move at each boot (KASLR).
    pub(crate) fn slide(&self, reference: &str, address: u64) -> Option<u64> {
        let kernel = self.kernel_file()?;
        let index = REFERENCES.iter().position(|&name| name == reference)?;
        Some(address.wrapping_sub((*kernel.references.get(index)?)?))
    }

    /// Returns the function, and its module, at an address of the file.
    pub(crate) fn kernel(&self, address: u64) -> Option<(&str, Option<&str>)> {
        let ((name, module), _) = self.kernel_file()?.functions.at(address)?;
        Some((name, module.as_deref()))
    }

    /// Reads the program with this build id; `None` if there is no such file. If the recording was made on this machine,
    /// a program without a recorded build id is read from its path.
    pub(crate) fn program(&self, path: &str, build_id: Option<&[u8]>) -> Option<Program> {
        let files = match (&self.programs, build_id) {
            (Programs::Here, _) if path.starts_with('/') => vec![PathBuf::from(path)],
            (Programs::Directory(symfs), Some(build_id)) => candidates(symfs, path, build_id),
            _ => return None,
        };
        let mut program = Program { segments: Vec::new(), functions: std::iter::empty().collect() };
        for file in files {
            let Some(bytes) = regular(&file) else {
                continue;
            };
            let is_recorded = |elf: &Elf<'_>| build_id.is_none_or(|id| elf.build_id() == Some(id));
            let Some(elf) = Elf::parse(&bytes).ok().filter(is_recorded) else {
                continue;
            };
            program.segments.push(elf.segments());
            if program.functions.is_empty() {
                program.functions = elf.functions().rename(|name| {
                    let name = rustc_demangle::demangle(name);
                    printable(format_args!("{name:#}"), NAME_MAX)
                });
            }
        }
        Some(program).filter(|program| !program.functions.is_empty())
    }
}

impl KernelFile {
    fn open(path: &Path) -> Result<Self, NamesError> {
        let read = |source| NamesError::Read { path: path.to_owned(), source };
        let mut bytes = Vec::new();
        File::open(path).and_then(|file| file.take(MOST_BYTES).read_to_end(&mut bytes)).map_err(read)?;
        let name = |name: &str| printable(name, NAME_MAX);
        let (functions, references) = if Elf::is(&bytes) {
            let elf = Elf::parse(&bytes).map_err(|source| NamesError::Elf { path: path.to_owned(), source })?;
            let references = REFERENCES.map(|reference| elf.address_of(reference));
            (elf.functions().rename(|function| (name(function), None)), references)
        } else {
            let text = String::from_utf8_lossy(&bytes);
            let references = REFERENCES.map(|reference| address_of(&text, reference));
            (kallsyms(&text).rename(|function| (name(function.function), function.module.map(name))), references)
        };
        if functions.is_empty() {
            return Err(NamesError::None(path.to_owned()));
        }
        Ok(Self { functions, references })
    }
}

impl Program {
    /// Returns the function at an offset in the file.
    pub(crate) fn at(&self, offset: u64) -> Option<&str> {
        let address = self.segments.iter().find_map(|segments| segments.address(offset))?;
        self.functions.at(address).map(|(name, _)| name.as_str())
    }
}

/// Returns the address of a symbol in the text of `System.map` or `/proc/kallsyms`.
fn address_of(text: &str, symbol: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let address = words.next()?;
        (words.nth(1)? == symbol).then(|| u64::from_str_radix(address, 16).ok())?
    })
}

/// Returns where the file of a program can be. A file with more symbols comes first.
fn candidates(symfs: &Path, path: &str, build_id: &[u8]) -> Vec<PathBuf> {
    let hex = build_id.iter().fold(String::new(), |mut hex, byte| {
        // Writing to a string does not fail.
        let _ = write!(hex, "{byte:02x}");
        hex
    });
    let (first, rest) = hex.split_at_checked(2).unwrap_or_default();
    let mut candidates = Vec::new();
    for directory in [".build-id", "usr/lib/debug/.build-id"] {
        let directory = symfs.join(directory).join(first);
        candidates.extend([
            directory.join(format!("{rest}.debug")),
            // perf's own cache.
            directory.join(rest).join("debug"),
            directory.join(rest).join("elf"),
            directory.join(rest),
        ]);
    }
    // The path is the guest's: it must not leave the directory.
    let parts = Path::new(path).components().filter(|part| *part != Component::RootDir);
    if parts.clone().all(|part| matches!(part, Component::Normal(_))) {
        candidates.push(symfs.join(parts.collect::<PathBuf>()));
    }
    candidates
}

/// Reads a regular file; `None` for other files. A recorded process chose the path: reading a FIFO would block, and
/// reading /dev/zero would never end.
fn regular(path: &Path) -> Option<Vec<u8>> {
    let mut options = File::options();
    let file = options.read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
    let metadata = file.metadata().ok()?;
    if !metadata.is_file() || metadata.len() > MOST_BYTES {
        return None;
    }
    let mut bytes = Vec::new();
    file.take(MOST_BYTES).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

/// Finds the build id in a kernel's ELF notes.
fn kernel_build_id(mut notes: &[u8]) -> Option<Vec<u8>> {
    loop {
        let size = |at| usize::try_from(number::<4>(notes, at)?).ok();
        let (name, length) = (size(0)?, size(4)?);
        let kind = number::<4>(notes, 8)?;
        let at = 12 + name.next_multiple_of(4);
        let contents = notes.get(at..)?.get(..length)?;
        if kind == NOTE_BUILD_ID && notes.get(12..)?.starts_with(b"GNU\0") {
            return Some(contents.to_vec());
        }
        notes = notes.get(at + length.next_multiple_of(4)..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_build_id_is_found_behind_other_notes() {
        let note = |name: &[u8], kind: u32, contents: &[u8]| {
            let size = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap().to_le_bytes().to_vec();
            let padded = |bytes: &[u8]| {
                let mut bytes = bytes.to_vec();
                bytes.resize(bytes.len().next_multiple_of(4), 0);
                bytes
            };
            [size(name), size(contents), kind.to_le_bytes().to_vec(), padded(name), padded(contents)].concat()
        };
        let id = note(b"GNU\0", 3, &[7; 20]);
        let notes = [note(b"Xen\0", 3, &[1; 5]), note(b"Linux\0", 257, &[0; 3]), id.clone()].concat();
        assert_eq!(kernel_build_id(&notes), Some(vec![7; 20]));
        for length in 0..id.len() {
            assert_eq!(kernel_build_id(&id[..length]), None, "{length}");
        }
        assert_eq!(kernel_build_id(&[0xff; 64]), None);
    }

    #[test]
    fn only_regular_files_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let fifo = directory.path().join("fifo");
        let made = std::process::Command::new("mkfifo").arg(&fifo).status().unwrap();
        assert!(made.success());
        let large = directory.path().join("large");
        let file = File::create(&large).unwrap();
        file.set_len(MOST_BYTES + 1).unwrap();
        for path in [Path::new("/dev/zero"), &fifo, &large, directory.path()] {
            assert_eq!(regular(path), None, "{path:?}");
        }
        file.set_len(3).unwrap();
        assert_eq!(regular(&large), Some(vec![0; 3]));
    }
}

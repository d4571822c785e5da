//! Names of functions that a recording does not contain, from files that the operator provides.
//!
//! A program's file is found by the build id that the recording has for it. The path in the recording is only a hint:
//! a file with another build id is not used.

use std::fmt::Write;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};

use vpmu_symbols::{Elf, ElfError, Functions, Segments, kallsyms, printable};

/// Maximum size of a file with symbols, in bytes.
const MOST_BYTES: u64 = 2 << 30;
/// Maximum number of characters of a name.
pub(crate) const NAME_MAX: usize = 1024;
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

/// Files with names.
#[derive(Debug, Default)]
pub struct Names {
    kernel: Option<KernelFile>,
    symfs: Option<PathBuf>,
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

    /// Opens the files that the operator provides: `vmlinux`, which can also be a `System.map` or a copy of
    /// `/proc/kallsyms`, and `symfs`, a directory with the programs' files.
    ///
    /// # Errors
    /// [`NamesError`].
    pub fn open(vmlinux: Option<&Path>, symfs: Option<&Path>) -> Result<Self, NamesError> {
        if let Some(symfs) = symfs {
            let read = |source| NamesError::Read { path: symfs.to_owned(), source };
            if !fs::metadata(symfs).map_err(read)?.is_dir() {
                return Err(NamesError::NotDirectory(symfs.to_owned()));
            }
        }
        let kernel = vmlinux.map(KernelFile::open).transpose()?;
        Ok(Self { kernel, symfs: symfs.map(Path::to_owned) })
    }

    /// Returns how far the recorded kernel is from the addresses of the file, if its symbol `reference` is at
    /// `address`. Kernels move at each boot (KASLR).
    pub(crate) fn slide(&self, reference: &str, address: u64) -> Option<u64> {
        let kernel = self.kernel.as_ref()?;
        let index = REFERENCES.iter().position(|&name| name == reference)?;
        Some(address.wrapping_sub((*kernel.references.get(index)?)?))
    }

    /// Returns the function, and its module, at an address of the file.
    pub(crate) fn kernel(&self, address: u64) -> Option<(&str, Option<&str>)> {
        let ((name, module), _) = self.kernel.as_ref()?.functions.at(address)?;
        Some((name, module.as_deref()))
    }

    /// Reads the program with this build id; `None` if the directory does not have it.
    pub(crate) fn program(&self, path: &str, build_id: &[u8]) -> Option<Program> {
        let symfs = self.symfs.as_ref()?;
        let mut program = Program { segments: Vec::new(), functions: std::iter::empty().collect() };
        for path in candidates(symfs, path, build_id) {
            let Some(bytes) = regular(&path) else {
                continue;
            };
            let Some(elf) = Elf::parse(&bytes).ok().filter(|elf| elf.build_id() == Some(build_id)) else {
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

/// Reads a regular file; `None` for other files, because reading a FIFO or a device could block.
fn regular(path: &Path) -> Option<Vec<u8>> {
    let metadata = fs::metadata(path).ok()?;
    if !metadata.is_file() || metadata.len() > MOST_BYTES {
        return None;
    }
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(MOST_BYTES).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

//! Names of the guest kernel's functions, read from a file that the operator provides: a `System.map`, a copy
//! of `/proc/kallsyms`, or a `vmlinux` with symbols.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::path::{Path, PathBuf};

use vpmu_symbols::{Elf, ElfError, kallsyms, printable};

/// Errors of a file of symbols.
#[derive(Debug, thiserror::Error)]
pub enum SymbolsError {
    /// The file cannot be read.
    #[error("cannot read symbols from {path}")]
    Read {
        /// The path.
        path: PathBuf,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
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
        "{0} has no function symbols: use a System.map, a copy of the guest's /proc/kallsyms, or an \
         unstripped vmlinux"
    )]
    None(PathBuf),
    /// All addresses are zero: the kernel shows zeros to unprivileged users.
    #[error("{0} has no addresses: copy the guest's /proc/kallsyms as root")]
    Hidden(PathBuf),
}

/// A function of the guest's kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Function {
    pub(crate) start: u64,
    /// Size in bytes.
    pub(crate) size: u32,
    pub(crate) name: String,
}

/// Maximum number of characters of a name.
const NAME_MAX: usize = 255;

/// A symbol file. It stays open and is read again for each recording, because a recording needs only a few of a
/// kernel's hundred thousand symbols.
#[derive(Debug)]
pub struct Symbols {
    path: PathBuf,
    file: File,
}

impl Symbols {
    /// Opens a file and checks that it has functions.
    ///
    /// # Errors
    /// [`SymbolsError`].
    pub fn open(path: &Path) -> Result<Self, SymbolsError> {
        let file = File::open(path).map_err(|source| SymbolsError::Read { path: path.to_owned(), source })?;
        let symbols = Self { path: path.to_owned(), file };
        symbols.covering(&BTreeSet::new())?;
        Ok(symbols)
    }

    /// Returns the functions that contain any of `addresses`, ordered by start address.
    ///
    /// # Errors
    /// [`SymbolsError`].
    pub(crate) fn covering(&self, addresses: &BTreeSet<u64>) -> Result<Vec<Function>, SymbolsError> {
        let read = |source| SymbolsError::Read { path: self.path.clone(), source };
        let mut bytes = Vec::new();
        let mut file = &self.file;
        file.rewind().map_err(read)?;
        file.read_to_end(&mut bytes).map_err(read)?;
        let text;
        let functions = if Elf::is(&bytes) {
            let elf = Elf::parse(&bytes).map_err(|source| SymbolsError::Elf { path: self.path.clone(), source })?;
            elf.functions()
        } else {
            text = String::from_utf8_lossy(&bytes);
            kallsyms(&text).rename(|name| name.function)
        };
        if functions.are_hidden() {
            return Err(SymbolsError::Hidden(self.path.clone()));
        }
        if functions.is_empty() {
            return Err(SymbolsError::None(self.path.clone()));
        }
        let covering = functions.covering(addresses.iter().copied());
        let named = covering.into_iter().map(|function| Function {
            start: function.start,
            size: u32::try_from(function.end - function.start).unwrap_or(u32::MAX),
            name: printable(function.name, NAME_MAX),
        });
        Ok(named.collect())
    }
}

#[cfg(test)]
#[path = "symbols_tests.rs"]
mod tests;

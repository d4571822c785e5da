//! Names of the guest kernel's functions, from the operator's `System.map`, copy of
//! `/proc/kallsyms`, or `vmlinux` with symbols.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::path::{Path, PathBuf};

use object::{Object, ObjectSymbol, SymbolKind};

/// Errors of a file of symbols.
#[derive(Debug, thiserror::Error)]
pub enum SymbolsError {
    /// The file cannot be read.
    #[error("cannot read the symbols {path}")]
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
        source: object::Error,
    },
    /// The file has no functions.
    #[error(
        "{0} has no function symbols: use a System.map, a copy of the guest's /proc/kallsyms, or an \
         unstripped vmlinux"
    )]
    None(PathBuf),
    /// All addresses are zero, as the kernel shows them to unprivileged users.
    #[error("{0} has no addresses: copy the guest's /proc/kallsyms as root")]
    Hidden(PathBuf),
}

/// A function of the guest's kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Function {
    pub(crate) start: u64,
    /// Bytes.
    pub(crate) size: u32,
    pub(crate) name: String,
}

/// Most characters of a name.
const NAME_MAX: usize = 255;
/// The assumed size of the last function of a file.
const LAST_SIZE: u64 = 4096;

/// A file of symbols. It stays open and is read again for each recording: a kernel has a hundred thousand
/// symbols, a recording needs a few.
#[derive(Debug)]
pub struct Symbols {
    path: PathBuf,
    file: File,
}

/// An address in the kernel with a name.
#[derive(Debug)]
struct Place<'a> {
    start: u64,
    /// `None`: it extends to the start of the next.
    size: Option<u64>,
    /// `None`: not code.
    name: Option<&'a str>,
}

impl Symbols {
    /// Opens a file and checks that it has functions.
    ///
    /// # Errors
    /// [`SymbolsError`].
    pub fn open(path: &Path) -> Result<Self, SymbolsError> {
        let file = File::open(path).map_err(|source| SymbolsError::Read {
            path: path.to_owned(),
            source,
        })?;
        let symbols = Self {
            path: path.to_owned(),
            file,
        };
        symbols.covering(&BTreeSet::new())?;
        Ok(symbols)
    }

    /// The functions that contain `addresses`, by start address.
    ///
    /// # Errors
    /// [`SymbolsError`].
    pub(crate) fn covering(
        &self,
        addresses: &BTreeSet<u64>,
    ) -> Result<Vec<Function>, SymbolsError> {
        let read = |source| SymbolsError::Read {
            path: self.path.clone(),
            source,
        };
        let mut bytes = Vec::new();
        let mut file = &self.file;
        file.rewind().map_err(read)?;
        file.read_to_end(&mut bytes).map_err(read)?;
        let text = (!bytes.starts_with(b"\x7fELF")).then(|| String::from_utf8_lossy(&bytes));
        let mut places: Vec<Place<'_>> = match &text {
            Some(text) => text.lines().filter_map(text_place).collect(),
            None => elf_places(&bytes).map_err(|source| SymbolsError::Elf {
                path: self.path.clone(),
                source,
            })?,
        };
        // The first of several names for one address counts.
        places.sort_by_key(|place| place.start);
        let functions = || places.iter().filter(|place| place.name.is_some());
        match functions().next_back() {
            None => Err(SymbolsError::None(self.path.clone())),
            Some(last) if last.start == 0 => Err(SymbolsError::Hidden(self.path.clone())),
            Some(_) => Ok(covering(&places, addresses)),
        }
    }
}

/// Parses `address type name`, with an optional `[module]`.
fn text_place(line: &str) -> Option<Place<'_>> {
    let mut words = line.split_ascii_whitespace();
    let start = u64::from_str_radix(words.next()?, 16).ok()?;
    let is_code = matches!(words.next()?, "t" | "T" | "w" | "W");
    let name = words.next()?;
    Some(Place {
        start,
        size: None,
        name: is_code.then_some(name),
    })
}

fn elf_places(bytes: &[u8]) -> Result<Vec<Place<'_>>, object::Error> {
    let file = object::File::parse(bytes)?;
    let places = file.symbols().filter_map(|symbol| {
        let is_code = symbol.kind() == SymbolKind::Text;
        symbol.is_definition().then(|| Place {
            start: symbol.address(),
            // Assembler functions often lack a size.
            size: Some(symbol.size()).filter(|&size| size > 0),
            name: symbol.name().ok().filter(|_| is_code),
        })
    });
    Ok(places.collect())
}

/// The `places` that contain `addresses`, each once.
fn covering(places: &[Place<'_>], addresses: &BTreeSet<u64>) -> Vec<Function> {
    let mut found: Vec<Function> = Vec::new();
    for &address in addresses {
        let function = around(places, address);
        let is_new = |function: &Function| found.last() != Some(function);
        found.extend(function.filter(is_new));
    }
    found
}

fn around(places: &[Place<'_>], address: u64) -> Option<Function> {
    let after = places.partition_point(|place| place.start <= address);
    let start = places.get(after.checked_sub(1)?)?.start;
    let first = places.partition_point(|place| place.start < start);
    let here = places.get(first..after)?;
    let place = here.iter().find(|place| place.name.is_some())?;
    let next = places.get(after).map(|next| next.start - start);
    let size = match (place.size, next) {
        (Some(size), Some(next)) => size.min(next),
        (Some(size), None) | (None, Some(size)) => size,
        (None, None) => LAST_SIZE,
    };
    let name: String = place.name?.chars().filter(|c| !c.is_control()).collect();
    (address - start < size).then(|| Function {
        start,
        size: u32::try_from(size).unwrap_or(u32::MAX),
        name: name.chars().take(NAME_MAX).collect(),
    })
}

#[cfg(test)]
#[path = "symbols_tests.rs"]
mod tests;

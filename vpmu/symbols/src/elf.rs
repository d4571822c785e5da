//! Reads functions and loadable segments from ELF files: programs, libraries, and kernels with symbols.

use std::io::{Read, Seek};

use object::{File, Object, ObjectSegment, ObjectSymbol, ReadCache, SymbolKind};

use crate::{Functions, Symbol};

/// Errors of an ELF file.
#[derive(Debug, thiserror::Error)]
pub enum ElfError {
    /// The file does not begin with the ELF magic.
    #[error("not an ELF file")]
    NotElf,
    /// The file's headers or tables are inconsistent.
    #[error(transparent)]
    Damaged(#[from] object::Error),
}

/// An ELF file in memory.
#[derive(Debug)]
pub struct Elf<'a>(File<'a>);

impl<'a> Elf<'a> {
    /// Returns whether `bytes` begin with the ELF magic.
    #[must_use]
    pub fn is(bytes: &[u8]) -> bool {
        bytes.starts_with(b"\x7fELF")
    }

    /// Parses a file's headers.
    ///
    /// # Errors
    /// [`ElfError`].
    pub fn parse(bytes: &'a [u8]) -> Result<Self, ElfError> {
        if !Self::is(bytes) {
            return Err(ElfError::NotElf);
        }
        Ok(Self(File::parse(bytes)?))
    }

    /// Returns the functions in the symbol tables `.symtab` and `.dynsym`.
    #[must_use]
    pub fn functions(&self) -> Functions<&'a str> {
        let symbols = self.0.symbols().chain(self.0.dynamic_symbols());
        symbols
            .filter(ObjectSymbol::is_definition)
            .filter_map(|symbol| {
                let name = match symbol.kind() {
                    SymbolKind::Text => Some(symbol.name().ok()?),
                    SymbolKind::Data => None,
                    // Labels: they may lie inside a function.
                    _ => return None,
                };
                Some(Symbol {
                    address: symbol.address(),
                    // Assembler functions often lack a size.
                    size: Some(symbol.size()).filter(|&size| size > 0),
                    name,
                })
            })
            .collect()
    }

    /// Returns the address of the symbol `name`, which can also be a label, such as `_text`.
    #[must_use]
    pub fn address_of(&self, name: &str) -> Option<u64> {
        let mut symbols = self.0.symbols().chain(self.0.dynamic_symbols());
        symbols.find(|symbol| symbol.is_definition() && symbol.name() == Ok(name)).map(|symbol| symbol.address())
    }

    /// Returns the build id; `None` if the file has none.
    #[must_use]
    pub fn build_id(&self) -> Option<&'a [u8]> {
        self.0.build_id().ok()?
    }

    /// Returns the loadable segments.
    #[must_use]
    pub fn segments(&self) -> Segments {
        let segments = self.0.segments().map(|segment| {
            let (offset, length) = segment.file_range();
            Segment { offset, length, address: segment.address() }
        });
        Segments(segments.collect())
    }
}

/// Returns the build id of an ELF file, of which only the headers and notes are read; `None` if the file has none, or is
/// not an ELF file.
#[must_use]
pub fn build_id(file: impl Read + Seek) -> Option<Vec<u8>> {
    let cache = ReadCache::new(file);
    let file = File::parse(&cache).ok()?;
    file.build_id().ok()?.map(<[u8]>::to_vec)
}

#[derive(Debug, Clone, Copy)]
struct Segment {
    offset: u64,
    length: u64,
    address: u64,
}

/// File offsets and addresses of a file's loadable segments.
#[derive(Debug, Clone)]
pub struct Segments(Vec<Segment>);

impl Segments {
    /// Converts a file offset to the address that the file's symbols use; `None` outside the segments.
    #[must_use]
    pub fn address(&self, offset: u64) -> Option<u64> {
        self.0.iter().find_map(|segment| {
            let inside = offset.checked_sub(segment.offset)?;
            let address = segment.address.checked_add(inside)?;
            (inside < segment.length).then_some(address)
        })
    }
}

#[cfg(test)]
#[path = "elf_tests.rs"]
mod tests;

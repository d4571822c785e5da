//! The table of a kernel, read from its ELF file.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io::{Read, Seek};
use std::ops::Range;

use object::elf::SHF_EXECINSTR;
use object::{Architecture, File, FileKind, Object, ObjectSection, ReadCache, SectionFlags};

use crate::format::{ENTRY, Format, Rule};

const ADDRESSES: &str = ".orc_unwind_ip";
const ENTRIES: &str = ".orc_unwind";
const HEADER: &str = ".orc_header";

/// Errors of a file with ORC tables.
#[derive(Debug, thiserror::Error)]
pub enum OrcError {
    /// The file is not an ELF file, for example a bzImage.
    #[error("not an ELF file: extract the vmlinux from a bzImage")]
    NotElf,
    /// The ELF file's headers are inconsistent.
    #[error("cannot parse the ELF file")]
    Elf(#[from] object::Error),
    /// A kernel of another architecture.
    #[error("not a kernel for x86-64: kernels of other architectures have no ORC tables and need none")]
    Machine,
    /// The file lacks the tables.
    #[error("no sections .orc_unwind_ip and .orc_unwind: use the vmlinux of a kernel with CONFIG_UNWINDER_ORC")]
    NoTables,
    /// The tables' definition has changed since this crate was written.
    #[error(
        "the ORC tables have an unknown format: use the vmlinux of a kernel with the tables of Linux 6.1, 6.12 or 7.3"
    )]
    Format,
    /// The tables' lengths or addresses are wrong.
    #[error("the ORC tables are damaged: {0}")]
    Damaged(&'static str),
}

/// The ORC tables of one kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OrcTable {
    /// Addresses of the kernel's code.
    code: Vec<Range<u64>>,
    /// The lowest address of `starts`.
    base: u64,
    /// The address at which each entry begins, minus `base`. An entry ends where the next one begins.
    starts: Vec<u32>,
    /// Each entry's index in `rules`.
    indices: Vec<u16>,
    /// Distinct rules: a kernel has half a million entries, but only some hundred rules.
    rules: Vec<Rule>,
}

impl OrcTable {
    /// Reads the tables of a `vmlinux`. Of the file, reads only headers and these tables.
    ///
    /// # Errors
    /// [`OrcError`].
    pub fn read(file: impl Read + Seek) -> Result<Self, OrcError> {
        let cache = ReadCache::new(file);
        if FileKind::parse(&cache).ok() != Some(FileKind::Elf64) {
            return Err(OrcError::NotElf);
        }
        let file = File::parse(&cache)?;
        if file.architecture() != Architecture::X86_64 || !file.is_little_endian() {
            return Err(OrcError::Machine);
        }
        let section = |name| file.section_by_name(name);
        let (Some(addresses), Some(entries)) = (section(ADDRESSES), section(ENTRIES)) else {
            return Err(OrcError::NoTables);
        };
        let header = section(HEADER).map(|header| header.data()).transpose()?;
        let format = Format::of(header).ok_or(OrcError::Format)?;
        let code = file.sections().filter_map(|section| {
            let SectionFlags::Elf { sh_flags, .. } = section.flags() else {
                return None;
            };
            let end = section.address().checked_add(section.size())?;
            sh_flags.contains(SHF_EXECINSTR).then_some(section.address()..end)
        });
        Self::new(format, (addresses.address(), addresses.data()?), entries.data()?, code.collect())
    }

    /// `addresses` are the contents and the address of `.orc_unwind_ip`, whose words are relative to their own address.
    fn new(
        format: Format,
        (at, addresses): (u64, &[u8]),
        entries: &[u8],
        code: Vec<Range<u64>>,
    ) -> Result<Self, OrcError> {
        let (addresses, rest) = addresses.as_chunks::<4>();
        let (entries, more) = entries.as_chunks::<ENTRY>();
        if addresses.len() != entries.len() || !rest.is_empty() || !more.is_empty() {
            return Err(OrcError::Damaged("the lengths of .orc_unwind_ip and .orc_unwind do not match"));
        }
        let address = |index: usize, word: [u8; 4]| {
            let offset = i64::from(i32::from_le_bytes(word));
            at.wrapping_add(index as u64 * 4).wrapping_add_signed(offset)
        };
        let Some(&first) = addresses.first() else {
            return Err(OrcError::NoTables);
        };
        let base = address(0, first);
        let mut table = Self { code, base, starts: Vec::new(), indices: Vec::new(), rules: Vec::new() };
        let mut known = HashMap::new();
        let mut before = base;
        for (index, (&word, &entry)) in addresses.iter().zip(entries).enumerate() {
            let start = address(index, word);
            // Since 5.6, the build sorts the tables.
            if start < before {
                return Err(OrcError::Damaged("the entries are not sorted by address"));
            }
            before = start;
            let start =
                u32::try_from(start - base).map_err(|_| OrcError::Damaged("the entries' addresses differ too much"))?;
            let index = match known.entry(entry) {
                Entry::Occupied(index) => *index.get(),
                Entry::Vacant(place) => {
                    let rule = format.decode(entry);
                    let rule = rule.ok_or(OrcError::Damaged("an entry has an unknown type or register"))?;
                    let index = u16::try_from(table.rules.len());
                    let index = index.map_err(|_| OrcError::Damaged("there are too many distinct entries"))?;
                    table.rules.push(rule);
                    *place.insert(index)
                }
            };
            // Of two entries with the same address, the second counts. The first one only ends a section.
            if table.starts.last() == Some(&start) {
                table.starts.pop();
                table.indices.pop();
            }
            if table.indices.last() != Some(&index) {
                table.starts.push(start);
                table.indices.push(index);
            }
        }
        table.starts.shrink_to_fit();
        table.indices.shrink_to_fit();
        Ok(table)
    }

    /// Returns a table with the given rules for the kernel at `code`: for tests, which describe their own kernels. Each
    /// rule comes with the address at which it begins. The addresses ascend, and there are at most 65,536 rules.
    #[must_use]
    pub fn from_rules(code: Range<u64>, rules: impl IntoIterator<Item = (u64, Rule)>) -> Self {
        let base = code.start;
        let mut table = Self { code: vec![code], base, starts: Vec::new(), indices: Vec::new(), rules: Vec::new() };
        for (index, (start, rule)) in (0..=u16::MAX).zip(rules) {
            table.starts.push(u32::try_from(start.saturating_sub(base)).unwrap_or(u32::MAX));
            table.indices.push(index);
            table.rules.push(rule);
        }
        table
    }

    /// The lowest address of the kernel's code, as linked.
    #[must_use]
    pub fn start(&self) -> u64 {
        self.code.iter().map(|code| code.start).min().unwrap_or(self.base)
    }

    /// Whether `address` is in the kernel's code, which includes code that runs only during the boot.
    #[must_use]
    pub fn contains(&self, address: u64) -> bool {
        self.code.iter().any(|code| code.contains(&address))
    }

    /// The rule for the instruction that contains `address`. `None` outside the kernel's code, for example in a module.
    #[must_use]
    pub fn rule(&self, address: u64) -> Option<Rule> {
        if !self.contains(address) {
            return None;
        }
        let offset = u32::try_from(address.checked_sub(self.base)?).ok()?;
        let entry = self.starts.partition_point(|&start| start <= offset).checked_sub(1)?;
        self.rules.get(usize::from(*self.indices.get(entry)?)).copied()
    }
}

#[cfg(test)]
mod tests;

//! Addresses to names: the kernel's from /proc/kallsyms, programs' from their ELF files.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use object::{Object, ObjectSegment, ObjectSymbol, SymbolKind};

use crate::data::{Kernel, Map, Symbol};

/// The functions of `kallsyms` that contain `addresses`; a missing file also counts as hidden.
pub(crate) fn kernel(kallsyms: &Path, addresses: &[u64]) -> Kernel {
    if addresses.is_empty() {
        return Kernel::default();
    }
    KernelFunctions::read(kallsyms).of(addresses)
}

/// All functions of the kernel.
#[derive(Debug)]
pub(crate) struct KernelFunctions(Vec<(u64, String)>);

impl KernelFunctions {
    pub(crate) fn read(kallsyms: &Path) -> Self {
        let text = fs::read_to_string(kallsyms).unwrap_or_default();
        let mut functions: Vec<(u64, String)> = text.lines().filter_map(kernel_function).collect();
        functions.sort_by_key(|&(start, _)| start);
        Self(functions)
    }

    /// The kernel shows zero addresses to users without permission.
    pub(crate) fn are_hidden(&self) -> bool {
        self.0.last().is_none_or(|&(start, _)| start == 0)
    }

    /// The functions that contain `addresses`.
    pub(crate) fn of(&self, addresses: &[u64]) -> Kernel {
        let hidden = !addresses.is_empty() && self.are_hidden();
        let mut symbols: Vec<Symbol> = Vec::new();
        let mut addresses = addresses.to_vec();
        addresses.sort_unstable();
        for address in addresses {
            let is_known = symbols.last().is_some_and(|last| address < last.end);
            if !hidden && !is_known {
                symbols.extend(covering(&self.0, address));
            }
        }
        Kernel { symbols, hidden }
    }
}

/// Parses `address type name [module]`, for code only.
fn kernel_function(line: &str) -> Option<(u64, String)> {
    let (address, rest) = line.split_once(' ')?;
    let (kind, name) = rest.split_once(' ')?;
    let is_code = matches!(kind, "t" | "T" | "w" | "W");
    let address = u64::from_str_radix(address, 16).ok()?;
    is_code.then(|| (address, name.replace('\t', " ")))
}

/// The last function that begins at or before `address`, up to the next one. The length of the last
/// function is unknown, so it is limited: addresses far behind it have no function.
fn covering(functions: &[(u64, String)], address: u64) -> Option<Symbol> {
    let after = functions.partition_point(|&(start, _)| start <= address);
    let start = functions.get(after.checked_sub(1)?)?.0;
    // The first of several names for one address.
    let first = functions.partition_point(|&(other, _)| other < start);
    let (_, name) = functions.get(first)?;
    let end = functions
        .get(after)
        .map_or_else(|| start.saturating_add(4096), |&(next, _)| next);
    (address < end).then(|| Symbol {
        start,
        end,
        name: name.clone(),
    })
}

/// Segments and functions of an ELF file.
#[derive(Debug)]
struct Elf {
    /// File offset, length, address.
    segments: Vec<(u64, u64, u64)>,
    /// By start.
    functions: Vec<Symbol>,
}

impl Elf {
    fn read(path: &Path) -> Option<Self> {
        let bytes = fs::read(path).ok()?;
        let file = object::File::parse(bytes.as_slice()).ok()?;
        let segments = file.segments().map(|segment| {
            let (offset, length) = segment.file_range();
            (offset, length, segment.address())
        });
        let mut functions: Vec<Symbol> = file
            .symbols()
            .chain(file.dynamic_symbols())
            .filter(|symbol| symbol.is_definition() && symbol.kind() == SymbolKind::Text)
            .filter_map(|symbol| {
                let start = symbol.address();
                let name = format!("{:#}", rustc_demangle::demangle(symbol.name().ok()?));
                Some(Symbol {
                    start,
                    end: start.checked_add(symbol.size())?,
                    name,
                })
            })
            .collect();
        functions.sort_by(|a, b| (a.start, b.end).cmp(&(b.start, a.end)));
        functions.dedup_by_key(|function| function.start);
        // Assembler functions often lack sizes: then up to the next function.
        for index in 0..functions.len() {
            let next = functions.get(index + 1).map(|next| next.start);
            let function = &mut functions[index];
            if function.end == function.start {
                function.end = next.unwrap_or_else(|| function.start.saturating_add(4096));
            }
        }
        Some(Self {
            segments: segments.collect(),
            functions,
        })
    }

    /// The function at an offset of the file, independent of its load address.
    fn at(&self, offset: u64) -> Option<&str> {
        let in_segment = |&&(start, length, _): &&(u64, u64, u64)| {
            offset
                .checked_sub(start)
                .is_some_and(|inside| inside < length)
        };
        let &(start, _, base) = self.segments.iter().find(in_segment)?;
        let address = base.checked_add(offset - start)?;
        let after = self
            .functions
            .partition_point(|function| function.start <= address);
        let function = self.functions.get(after.checked_sub(1)?)?;
        (address < function.end).then_some(function.name.as_str())
    }
}

/// Programs read so far.
#[derive(Debug, Default)]
pub(crate) struct Programs(HashMap<String, Option<Elf>>);

impl Programs {
    /// Number of programs.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The function at `ip` of the mapped file; `None` if the file is gone or has no names.
    pub(crate) fn function(&mut self, map: &Map, ip: u64) -> Option<String> {
        let offset = ip.checked_sub(map.start)?.checked_add(map.offset)?;
        if !self.0.contains_key(&map.path) {
            let elf = map
                .path
                .starts_with('/')
                .then(|| Elf::read(Path::new(&map.path)))
                .flatten();
            self.0.insert(map.path.clone(), elf);
        }
        self.0
            .get(&map.path)?
            .as_ref()?
            .at(offset)
            .map(str::to_owned)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::processes::Processes;

    const KALLSYMS: &str = "\
ffffffff81000000 T _text
ffffffff81000000 T startup_64
ffffffff81000100 t helper
ffffffff81000180 D some_data
ffffffff81000200 W weak_one
ffffffffc0000000 t module_function\t[virtio_pmu]
";

    fn kallsyms(text: &str, addresses: &[u64]) -> Kernel {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        kernel(file.path(), addresses)
    }

    #[test]
    fn only_functions_with_samples_are_taken() {
        let base = 0xffff_ffff_8100_0000;
        let kernel = kallsyms(
            KALLSYMS,
            &[
                0xffff_ffff_c000_0010,
                base + 0x150,
                base + 0x1f0,
                base + 1,
                base - 1,
                u64::MAX,
            ],
        );
        let names: Vec<&str> = kernel.symbols.iter().map(|s| s.name.as_str()).collect();
        assert_eq!(names, ["_text", "helper", "module_function [virtio_pmu]"]);
        assert_eq!(
            (kernel.symbols[1].start, kernel.symbols[1].end),
            (base + 0x100, base + 0x200)
        );
        assert!(!kernel.hidden);
        assert_eq!(kallsyms(KALLSYMS, &[]), Kernel::default());
    }

    #[test]
    fn hidden_addresses_are_told() {
        let zeros = "0000000000000000 T _text\n0000000000000000 t helper\n";
        let hidden = Kernel {
            hidden: true,
            symbols: Vec::new(),
        };
        assert_eq!(kallsyms(zeros, &[1]), hidden);
        assert_eq!(kernel(Path::new("/nonexistent"), &[1]), hidden);
    }

    #[inline(never)]
    fn a_function_of_this_program(value: u64) -> u64 {
        std::hint::black_box(value) + 1
    }

    #[test]
    fn functions_of_this_very_program_are_found() {
        assert_eq!(a_function_of_this_program(1), 2);
        let function: fn(u64) -> u64 = a_function_of_this_program;
        let ip = function as *const () as u64;
        let own = Processes::new(Path::new("/proc"), Vec::new())
            .look(std::process::id(), 0)
            .unwrap();
        let map = own
            .maps
            .iter()
            .find(|map| (map.start..map.end).contains(&ip))
            .unwrap();
        let mut programs = Programs::default();
        let name = programs.function(map, ip).unwrap();
        assert!(name.ends_with("a_function_of_this_program"), "{name}");
        assert_eq!(programs.function(map, map.start - 1), None);
    }

    #[test]
    fn files_without_names_have_none() {
        let mut programs = Programs::default();
        for path in ["/nonexistent", "/etc/passwd", "[vdso]", "/bin/sh (deleted)"] {
            let map = Map {
                start: 0,
                end: 4096,
                offset: 0,
                path: path.into(),
            };
            assert_eq!(programs.function(&map, 16), None, "{path}");
        }
    }
}

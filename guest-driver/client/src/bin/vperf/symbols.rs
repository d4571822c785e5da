//! Resolves addresses to names: kernel functions from /proc/kallsyms, program functions from the
//! programs' ELF files.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use vpmu_symbols::{Elf, Functions, Segments, kallsyms, printable};

use crate::data::{Kernel, Map, Symbol};

/// The kernel's list of its functions.
pub(crate) const KALLSYMS: &str = "/proc/kallsyms";

/// Maximum length of a function's name, in characters, generic arguments included.
const NAME_MAX: usize = 4096;

/// Maximum size of a program file, in bytes; larger files are not read.
const LARGEST: u64 = 1 << 30;

/// The functions of `kallsyms` that contain `addresses`. If the file is missing, the addresses
/// are treated as hidden.
pub(crate) fn kernel(kallsyms: &Path, addresses: &[u64]) -> Kernel {
    if addresses.is_empty() {
        return Kernel::default();
    }
    KernelFunctions::read(kallsyms).of(addresses)
}

/// All functions of the kernel.
#[derive(Debug)]
pub(crate) struct KernelFunctions(Functions<String>);

impl KernelFunctions {
    pub(crate) fn read(path: &Path) -> Self {
        let bytes = fs::read(path).unwrap_or_default();
        let functions = kallsyms(&String::from_utf8_lossy(&bytes)).rename(|name| name.to_string());
        Self(functions)
    }

    /// Whether the kernel hides the addresses: users without permission read zeros instead.
    pub(crate) fn are_hidden(&self) -> bool {
        self.0.is_empty()
    }

    /// The functions that contain `addresses`.
    pub(crate) fn of(&self, addresses: &[u64]) -> Kernel {
        let functions = self.0.covering(addresses.iter().copied());
        let symbols = functions.into_iter().map(|function| Symbol {
            start: function.start,
            end: function.end,
            name: function.name.clone(),
        });
        Kernel { symbols: symbols.collect(), hidden: !addresses.is_empty() && self.are_hidden() }
    }
}

/// Segments and functions of a program.
#[derive(Debug)]
struct Program {
    segments: Segments,
    functions: Functions<String>,
}

impl Program {
    fn read(path: &Path) -> Option<Self> {
        let bytes = regular(path)?;
        let elf = Elf::parse(&bytes).ok()?;
        let functions = elf.functions().rename(|name| {
            let name = rustc_demangle::demangle(name);
            printable(format_args!("{name:#}"), NAME_MAX)
        });
        Some(Self { segments: elf.segments(), functions })
    }

    /// The function at an offset of the file, wherever the file is mapped.
    fn at(&self, offset: u64) -> Option<&str> {
        let address = self.segments.address(offset)?;
        let (name, _) = self.functions.at(address)?;
        Some(name)
    }
}

/// Reads a regular file; returns `None` for any other file. A measured process determines the path, through its
/// mappings: reading a FIFO would block, and reading /dev/zero would never end.
fn regular(path: &Path) -> Option<Vec<u8>> {
    let mut options = File::options();
    let file = options.read(true).custom_flags(libc::O_NONBLOCK);
    let file = file.open(path).ok()?;
    let status = file.metadata().ok()?;
    if !status.is_file() || status.len() > LARGEST {
        return None;
    }
    let mut bytes = Vec::new();
    file.take(LARGEST).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

/// Programs read so far.
#[derive(Debug, Default)]
pub(crate) struct Programs(HashMap<String, Option<Program>>);

impl Programs {
    /// Number of programs.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The function at `ip` of the mapped file; `None` if the file is gone or has no names.
    pub(crate) fn function(&mut self, map: &Map, ip: u64) -> Option<String> {
        let offset = ip.checked_sub(map.start)?.checked_add(map.offset)?;
        if !self.0.contains_key(&map.path) {
            let program = map.path.starts_with('/').then(|| Program::read(Path::new(&map.path))).flatten();
            self.0.insert(map.path.clone(), program);
        }
        self.0.get(&map.path)?.as_ref()?.at(offset).map(str::to_owned)
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
        let kernel =
            kallsyms(KALLSYMS, &[0xffff_ffff_c000_0010, base + 0x150, base + 0x1f0, base + 1, base - 1, u64::MAX]);
        let names: Vec<&str> = kernel.symbols.iter().map(|s| s.name.as_str()).collect();
        assert_eq!(names, ["_text", "helper", "module_function [virtio_pmu]"]);
        assert_eq!((kernel.symbols[1].start, kernel.symbols[1].end), (base + 0x100, base + 0x180));
        assert!(!kernel.hidden);
        assert_eq!(kallsyms(KALLSYMS, &[]), Kernel::default());
        let data = kallsyms(KALLSYMS, &[base + 0x180, base + 0x1ff]);
        assert_eq!(data, Kernel::default());
    }

    #[test]
    fn line_with_bytes_outside_utf8_hides_no_other_function() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = b"ffffffff81000000 T _text\nffffffff81000100 t \xff\n\xff\xfe\0\n";
        fs::write(file.path(), text).unwrap();
        let kernel = kernel(file.path(), &[0xffff_ffff_8100_0010]);
        assert_eq!(kernel.symbols.len(), 1);
        assert_eq!(kernel.symbols[0].name, "_text");
    }

    #[test]
    fn zero_addresses_count_as_hidden() {
        let zeros = "0000000000000000 T _text\n0000000000000000 t helper\n";
        let hidden = Kernel { hidden: true, symbols: Vec::new() };
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
        let own = Processes::new(Path::new("/proc"), Vec::new()).look(std::process::id(), 0).unwrap();
        let map = own.maps.iter().find(|map| (map.start..map.end).contains(&ip)).unwrap();
        let mut programs = Programs::default();
        let name = programs.function(map, ip).unwrap();
        assert!(name.ends_with("a_function_of_this_program"), "{name}");
        assert_eq!(programs.function(map, map.start - 1), None);
    }

    #[test]
    fn only_regular_files_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let fifo = directory.path().join("fifo");
        let mode = rustix::fs::Mode::RUSR;
        let kind = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, kind, mode, 0).unwrap();
        let large = directory.path().join("large");
        let file = File::create(&large).unwrap();
        file.set_len(LARGEST + 1).unwrap();
        for path in [Path::new("/dev/zero"), &fifo, &large, directory.path()] {
            assert_eq!(regular(path), None, "{path:?}");
        }
        file.set_len(3).unwrap();
        assert_eq!(regular(&large), Some(vec![0; 3]));
    }

    #[test]
    fn files_without_names_have_none() {
        let mut programs = Programs::default();
        for path in ["/nonexistent", "/etc/passwd", "[vdso]", "/bin/sh (deleted)"] {
            let map = Map { start: 0, end: 4096, offset: 0, path: path.into() };
            assert_eq!(programs.function(&map, 16), None, "{path}");
        }
    }
}

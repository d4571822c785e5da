//! Third-party programs that check the driver in a guest. They come from this host or, for another architecture, from
//! Debian. They are linked dynamically, so their libraries and the loader are added to the guest, too.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use thiserror::Error;

use crate::arch::Arch;
use crate::cache::{Cache, CacheError};
use crate::kernel::{Kernel, KernelError, Sources};
pub use crate::prerequisites::Prerequisite;
use crate::prerequisites::{self, PrerequisiteError};
use crate::process::{self, ProcessError};
use crate::qemu;
use crate::toolchain::{Toolchain, ToolchainError};
pub use crate::unpacked::Files;
use crate::unpacked::{self, UnpackedError};

/// Errors from adding a program to a guest.
#[derive(Debug, Error)]
pub enum ThirdPartyError {
    /// The host does not have a program of this name.
    #[error("this host has no program {0}: install it, or name its path")]
    NoProgram(String),
    /// The host does not have the program.
    #[error(transparent)]
    Prerequisite(#[from] PrerequisiteError),
    /// Its libraries cannot be listed.
    #[error("cannot list the libraries of {program}")]
    List {
        /// The program.
        program: PathBuf,
        /// The output of `ldd`.
        #[source]
        source: ProcessError,
    },
    /// A program does not compile.
    #[error("cannot compile {file}")]
    Compile {
        /// Its source.
        file: PathBuf,
        /// The compiler's output.
        #[source]
        source: ProcessError,
    },
    /// Debian for another architecture does not have the program.
    #[error(transparent)]
    Unpacked(#[from] UnpackedError),
    /// The cache cannot be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The compilers for another architecture are not available.
    #[error(transparent)]
    Toolchain(#[from] ToolchainError),
    /// The directory to compile in could not be made.
    #[error("cannot make a temporary directory")]
    Temporary(#[source] io::Error),
    /// The kernel is not available.
    #[error("cannot get the kernel that the guest is to start with kexec")]
    Kernel(#[source] KernelError),
    /// The host lacks one of the program's libraries.
    #[error("{program} lacks {library} on this host; reinstall the package that provides it")]
    Library {
        /// The program.
        program: PathBuf,
        /// The library's name.
        library: String,
    },
    /// A file could not be read.
    #[error("cannot read {path}")]
    File {
        /// The path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// The configuration of the guest's `perf`. By default, `perf record` fills a cache of build IDs before it exits: it
/// writes one copy of `/proc/kallsyms` for the kernel and one for each module. In a lab, that takes longer than the rest
/// of a short recording, and the cache is gone when the guest ends. `PERF_CONFIG=/dev/null` restores the defaults.
const PERF_CONFIG: &str = "[record]\n\tbuild-id = no-cache\n";

/// The distribution's `perf` for `arch`, which goes into the guest's /bin, and the configuration of this `perf`.
///
/// # Errors
/// [`ThirdPartyError`].
pub fn perf(arch: Arch) -> Result<Files, ThirdPartyError> {
    programs(arch, &["perf"])
}

/// The tools whose Debian packages are known, so that they can be installed.
const TOOLS: [Prerequisite; 7] = [
    Prerequisite::Perf,
    Prerequisite::Objdump,
    Prerequisite::Bpftrace,
    Prerequisite::Papi,
    Prerequisite::Strace,
    Prerequisite::StressNg,
    Prerequisite::TraceCmd,
];

/// Programs for the guest's /bin, each with its loader and its libraries: this host's, by name or by path. For another
/// architecture, they come from Debian's packages, which have the names of the programs if the package is not known.
///
/// # Errors
/// [`ThirdPartyError`].
pub fn programs(arch: Arch, names: &[&str]) -> Result<Files, ThirdPartyError> {
    // A library that several programs load is listed once.
    let mut files: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    for &name in names {
        let tool = TOOLS.into_iter().find(|tool| tool.what() == name);
        files.extend(if arch.is_native() {
            of_host(name, tool)?
        } else {
            unpacked(tool.map_or(name, |tool| tool.package()), name, arch)?
        });
        if tool == Some(Prerequisite::Perf) {
            files.insert("etc/perfconfig".to_owned(), PERF_CONFIG.into());
        }
    }
    Ok(files.into_iter().collect())
}

fn of_host(program: &str, tool: Option<Prerequisite>) -> Result<Files, ThirdPartyError> {
    prerequisites::ensure(tool.as_slice())?;
    let path = match (tool, program.contains('/')) {
        (Some(Prerequisite::Perf), _) => prerequisites::perf(),
        (_, true) => Some(PathBuf::from(program)),
        (_, false) => prerequisites::find(program),
    };
    let path = path.ok_or_else(|| ThirdPartyError::NoProgram(program.to_owned()))?;
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
    with_libraries(if tool.is_some() { program } else { &name }, &path)
}

/// The MiB of memory that files take in a guest, which holds the packed files and the root file system. The root file
/// system may use at most half of the memory that the packed files leave free.
#[must_use]
pub fn memory_mib(files: &Files) -> u32 {
    const MIB: usize = 1 << 20;
    let size: usize = files.iter().map(|(_, contents)| contents.len()).sum();
    u32::try_from(size.saturating_mul(3) / MIB).unwrap_or(u32::MAX)
}

/// Debian's QEMU for x86, and the firmware of its microvm in /firmware: a VMM to compare with this project's
/// VMM on the lab's KVM host.
///
/// # Errors
/// [`ThirdPartyError`].
pub fn microvm() -> Result<Files, ThirdPartyError> {
    let arch = Arch::X86_64;
    let mut files = unpacked("qemu-system-x86", "qemu-system-x86_64", arch)?;
    let [_, directory] = qemu::firmware(Cache::user()?)?;
    for name in ["bios-microvm.bin", "qboot.rom"] {
        files.push((format!("firmware/{name}"), read(&directory.join(name))?));
    }
    Ok(files)
}

/// A program from a Debian package for `arch`, which is unpacked, not installed.
fn unpacked(package: &str, name: &str, arch: Arch) -> Result<Files, ThirdPartyError> {
    Ok(unpacked::program(Cache::user()?, arch, package, name)?)
}

/// The kernel of `sources` as `boot/kernel`, for a guest that starts another kernel with kexec.
///
/// # Errors
/// [`ThirdPartyError`].
pub fn kernel(sources: &Sources) -> Result<Files, ThirdPartyError> {
    let kernel = Kernel::get(Cache::user()?, sources).map_err(ThirdPartyError::Kernel)?;
    Ok(vec![("boot/kernel".to_owned(), read(&kernel.bzimage)?)])
}

/// The C program `source` for `arch` as /bin/`name`, linked statically; the compiler searches `headers` for
/// header files.
///
/// # Errors
/// [`ThirdPartyError`].
pub fn compiled(arch: Arch, name: &str, source: &Path, headers: &Path) -> Result<Files, ThirdPartyError> {
    let include = ["-I".as_ref(), headers.as_os_str()];
    built(arch, name, source, &include)
}

/// The assembly program `source` for `arch` as /bin/`name`, without a C library.
///
/// # Errors
/// [`ThirdPartyError`].
pub(crate) fn assembled(arch: Arch, name: &str, source: &Path) -> Result<Files, ThirdPartyError> {
    built(arch, name, source, &["-nostdlib".as_ref()])
}

fn built(arch: Arch, name: &str, source: &Path, options: &[&OsStr]) -> Result<Files, ThirdPartyError> {
    let directory = tempfile::tempdir().map_err(ThirdPartyError::Temporary)?;
    let program = directory.path().join(name);
    let mut gcc = match Toolchain::get(Cache::user()?, arch)? {
        None => {
            prerequisites::ensure(&[Prerequisite::Gcc])?;
            Command::new("gcc")
        }
        Some(toolchain) => Command::new(toolchain.gnu("gcc")),
    };
    gcc.args(["-static", "-O2", "-Wall", "-Wextra", "-Werror"]);
    gcc.args(options).arg("-o").arg(&program).arg(source);
    process::output(&mut gcc).map_err(|error| ThirdPartyError::Compile { file: source.to_owned(), source: error })?;
    Ok(vec![(format!("bin/{name}"), read(&program)?)])
}

/// `program` as /bin/`name`, with its loader and its libraries.
///
/// # Errors
/// [`ThirdPartyError`].
pub fn with_libraries(name: &str, program: &Path) -> Result<Files, ThirdPartyError> {
    let mut files = vec![(format!("bin/{name}"), read(program)?)];
    let list = match process::output(Command::new("ldd").arg(program).env("LC_ALL", "C")) {
        // A script, or a program that is linked statically.
        Err(error) if error.to_string().contains("not a dynamic executable") => return Ok(files),
        list => list.map_err(|source| ThirdPartyError::List { program: program.to_owned(), source })?,
    };
    let libraries = libraries(&String::from_utf8_lossy(&list));
    for library in libraries.map_err(|library| ThirdPartyError::Library { program: program.to_owned(), library })? {
        let bytes = read(Path::new(&library))?;
        files.push((library.trim_start_matches('/').to_owned(), bytes));
    }
    Ok(files)
}

/// The paths in the output of `ldd`. If `ldd` did not find a library, returns that library's name as the error.
fn libraries(list: &str) -> Result<Vec<String>, String> {
    let mut paths = Vec::new();
    for line in list.lines().map(str::trim) {
        // A line is `name => path (address)`, or `path (address)` for the loader, or `name (address)` for the vDSO.
        let (name, rest) = line.split_once(" => ").unwrap_or(("", line));
        if rest == "not found" {
            return Err(name.to_owned());
        }
        if let Some((path, _)) = rest.rsplit_once(" (")
            && path.starts_with('/')
        {
            paths.push(path.to_owned());
        }
    }
    Ok(paths)
}

pub(crate) fn read(path: &Path) -> Result<Vec<u8>, ThirdPartyError> {
    fs::read(path).map_err(|source| ThirdPartyError::File { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_the_lines_with_a_path() {
        let list = "\tlinux-vdso.so.1 (0x00007ffd)\n\
            \tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f05)\n\
            \t/lib64/ld-linux-x86-64.so.2 (0x00007f06)\n";
        let expected = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"];
        assert_eq!(libraries(list).unwrap(), expected);
        assert_eq!(libraries("\tstatically linked\n").unwrap(), [""; 0]);
    }

    #[test]
    fn missing_library_is_named() {
        let list = "\tlibc.so.6 => /lib/libc.so.6 (0x1)\n\tlibgone.so.3 => not found\n";
        assert_eq!(libraries(list).unwrap_err(), "libgone.so.3");
    }

    #[test]
    fn dynamic_program_brings_libc_and_loader() {
        let files = with_libraries("shell", &prerequisites::find("sh").unwrap()).unwrap();
        let names: Vec<&str> = files.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names[0], "bin/shell");
        assert!(names.iter().any(|n| n.contains("libc.so")), "{names:?}");
        assert!(names.iter().any(|n| n.contains("ld-linux")), "{names:?}");
        assert!(names.iter().all(|n| !n.starts_with('/')), "{names:?}");
        assert!(files.iter().all(|(_, bytes)| !bytes.is_empty()));
    }

    #[test]
    fn c_program_compiles_to_one_file() {
        let directory = tempfile::tempdir().unwrap();
        let source = directory.path().join("x.c");
        fs::write(&source, "#include \"x.h\"\nint main(void) { return X; }\n").unwrap();
        let failed = compiled(Arch::default(), "x", &source, directory.path()).unwrap_err();
        assert!(failed.to_string().contains("x.c"), "{failed}");
        fs::write(directory.path().join("x.h"), "#define X 0\n").unwrap();
        let files = compiled(Arch::default(), "x", &source, directory.path()).unwrap();
        assert_eq!(files.len(), 1);
        assert_eq!(files[0].0, "bin/x");
        assert!(files[0].1.starts_with(b"\x7fELF"));
    }

    #[test]
    fn program_that_cannot_be_read_is_named() {
        let missing = with_libraries("x", Path::new("/no/such/program")).unwrap_err();
        assert_eq!(missing.to_string(), "cannot read /no/such/program");
        let unknown = programs(Arch::default(), &["no-such-program"]).unwrap_err();
        assert!(unknown.to_string().starts_with("this host has no program no-such-program: "), "{unknown}");
    }

    #[test]
    fn script_brings_no_libraries_and_path_gives_the_name() {
        let directory = tempfile::tempdir().unwrap();
        let script = directory.path().join("hello");
        fs::write(&script, "#!/bin/sh\necho hello\n").unwrap();
        let files = programs(Arch::default(), &[script.to_str().unwrap()]).unwrap();
        assert_eq!(files, [("bin/hello".to_owned(), fs::read(&script).unwrap())]);
        assert_eq!(memory_mib(&files), 0);
    }
}

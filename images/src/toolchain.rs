//! Compilers for an architecture other than this machine's, from Debian packages that are unpacked, not
//! installed. Each program has a wrapper that points the loader to the program's libraries.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Read as _};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use thiserror::Error;

use crate::apt::{Apt, AptError, Stale};
use crate::arch::Arch;
use crate::cache::{Cache, CacheError};
use crate::digest::Key;
use crate::file_error::FileError;
use crate::packages::{self, Package, PackageError};
use crate::progress::Step;

/// Debian's newest Rust, a package that exists to build browsers. Here it is unpacked, not installed, so it does not
/// conflict with an installed Rust.
const RUST: &str = "rustc-web";
/// Rust's standard library. Programs need the library for their own architecture.
const LIBRARY: &str = "libstd-rust-web-dev";
/// Packages that the compilers depend on, but that need not be fetched, because every host with a compiler has them.
const HOSTS: [&str; 9] =
    ["binutils", "debconf", "gcc", "libc-dev", "libc6", "libc6-dev", "libgcc-s1", "libstdc++6", "zlib1g"];
/// The wrapper of a program. It points the loader to the unpacked libraries.
const WRAPPER: &str = r#"#!/bin/sh
root=${0%/*}/..
export LD_LIBRARY_PATH="$root/usr/lib/x86_64-linux-gnu:$root/lib/x86_64-linux-gnu"
exec "$root/usr/bin/${0##*/}" "$@"
"#;

/// The wrapper of a program that may need a newer C library than this host's. It runs the program with its own release's
/// loader and libraries, and leaves other programs' libraries alone. `UP` is the path from the program to the root.
pub(crate) const LOADER: &str = r#"#!/bin/sh
root=${0%/*}/UP
libraries=$root/usr/lib/x86_64-linux-gnu
exec "$libraries/ld-linux-x86-64.so.2" --argv0 "$0" --library-path "$libraries" "$0.elf" "$@"
"#;

/// Errors of getting the compilers.
#[derive(Debug, Error)]
pub enum ToolchainError {
    /// Their packages could not be fetched.
    #[error(transparent)]
    Package(#[from] PackageError),
    /// The package lists could not be refreshed.
    #[error(transparent)]
    Apt(#[from] AptError),
    /// The cache cannot be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A file could not be read or written.
    #[error(transparent)]
    File(#[from] FileError),
}

impl Stale for ToolchainError {
    fn is_stale(&self) -> bool {
        match self {
            Self::Package(error) => error.is_stale(),
            Self::Apt(error) => error.is_stale(),
            _ => false,
        }
    }
}

/// The compilers for one architecture.
#[derive(Clone, Debug)]
pub struct Toolchain {
    arch: Arch,
    root: PathBuf,
    /// A digest of the packages.
    id: String,
}

impl Toolchain {
    /// Gets the compilers for `arch`. Returns `None` if `arch` is this machine's architecture: then this machine's own
    /// compilers are used.
    ///
    /// # Errors
    /// [`ToolchainError`].
    pub fn get(cache: &Cache, arch: Arch) -> Result<Option<Self>, ToolchainError> {
        if arch.is_native() {
            return Ok(None);
        }
        let apt = Apt::of(arch)?;
        let get = || Self::fetch(apt, cache);
        let toolchain = apt.native().refreshing(|| apt.refreshing(get))?;
        Ok(Some(toolchain))
    }

    fn fetch(apt: &Apt, cache: &Cache) -> Result<Self, ToolchainError> {
        let arch = apt.arch();
        let found = cached(apt, cache)?;
        let mut key = Key::new("toolchain").text("wrapper", WRAPPER);
        for package in &found {
            key = key.text(&package.name, &package.version);
        }
        let id = key.hex();
        let root = cache.get(&arch.kind("toolchain"), &id, |root| {
            let step = Step::new(format!("getting compilers for {arch}"));
            for package in &found {
                packages::unpack(apt.native(), package, root, &step)?;
                if package.name == LIBRARY {
                    packages::unpack(apt, package, root, &step)?;
                }
            }
            wrap(arch, root)?;
            step.done();
            Ok::<_, ToolchainError>(())
        })?;
        Ok(Self { arch, root, id })
    }

    /// Identifies the compilers in a key of the cache.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Rust's compiler.
    pub fn rustc(&self) -> PathBuf {
        self.bin().join("rustc")
    }

    /// The GNU tool of this name, such as `gcc-12` or `strip`.
    pub fn gnu(&self, name: &str) -> PathBuf {
        self.bin().join(format!("{}{name}", self.arch.gnu()))
    }

    /// Prepends the directory of the compilers to the PATH of `command`, so they take precedence over this machine's.
    pub fn lead<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        let mut path = OsString::from(self.bin());
        if let Some(others) = std::env::var_os("PATH") {
            path.push(":");
            path.push(others);
        }
        command.env("PATH", path)
    }

    fn bin(&self) -> PathBuf {
        self.root.join("bin")
    }
}

/// The packages and their versions in apt's lists.
fn cached(apt: &Apt, cache: &Cache) -> Result<Vec<Package>, ToolchainError> {
    let names = names(apt.arch());
    let key = Key::new("toolchain's packages").text("names", &names.join(" "));
    let key = apt.native().state(apt.state(key)?)?.hex();
    packages::keep(cache, &apt.arch().kind("compilers"), &key, || {
        let step = Step::new(format!("looking for compilers for {}", apt.arch()));
        let names = names.each_ref().map(String::as_str);
        let found = packages::closure(apt.native(), &names, &HOSTS)?;
        step.done();
        Ok(found)
    })
}

/// The packages that, with their dependencies, build programs for `arch`: Rust's compiler, GCC, and the C library.
/// GCC's package does not depend on the C library, but only recommends it.
fn names(arch: Arch) -> [String; 3] {
    [RUST.to_owned(), format!("gcc-{}", arch.gnu().trim_end_matches('-')), format!("libc6-dev-{}-cross", arch.debian())]
}

/// Makes a wrapper in `root/bin` for each of the programs.
fn wrap(arch: Arch, root: &Path) -> Result<(), ToolchainError> {
    let (bin, programs) = (root.join("bin"), root.join("usr/bin"));
    fs::create_dir_all(&bin).map_err(FileError::at(&bin))?;
    let entries = fs::read_dir(&programs).and_then(Iterator::collect::<io::Result<Vec<_>>>);
    for entry in entries.map_err(FileError::at(&programs))? {
        let name = entry.file_name();
        let text = name.to_string_lossy();
        if text == "rustc" || text.starts_with(arch.gnu()) {
            let path = bin.join(&name);
            let mode = fs::Permissions::from_mode(0o755);
            fs::write(&path, WRAPPER).and_then(|()| fs::set_permissions(&path, mode)).map_err(FileError::at(&path))?;
        }
    }
    Ok(())
}

/// Replaces each program below `directories` of `root` by a wrapper that runs it with the loader and the libraries in
/// `root`.
///
/// # Errors
/// [`FileError`].
pub(crate) fn wrap_with_loader(root: &Path, directories: &[&str]) -> Result<(), FileError> {
    let mut left: Vec<PathBuf> = directories.iter().map(|name| root.join(name)).collect();
    while let Some(directory) = left.pop() {
        let entries = fs::read_dir(&directory).and_then(Iterator::collect::<io::Result<Vec<_>>>);
        let depth = directory.strip_prefix(root).unwrap_or(&directory).components().count();
        let wrapper = LOADER.replace("UP", &vec![".."; depth].join("/"));
        for entry in entries.map_err(FileError::at(&directory))? {
            let path = entry.path();
            let kind = entry.file_type().map_err(FileError::at(&path))?;
            if kind.is_dir() {
                left.push(path);
            } else if kind.is_file() && is_program(&path).map_err(FileError::at(&path))? {
                let mut elf = path.clone().into_os_string();
                elf.push(".elf");
                let mode = fs::Permissions::from_mode(0o755);
                fs::rename(&path, elf).map_err(FileError::at(&path))?;
                fs::write(&path, &wrapper)
                    .and_then(|()| fs::set_permissions(&path, mode))
                    .map_err(FileError::at(&path))?;
            }
        }
    }
    Ok(())
}

/// Whether the file is an ELF program, and neither a library nor the loader.
fn is_program(path: &Path) -> io::Result<bool> {
    let library = path.file_name().is_some_and(|name| name.to_string_lossy().contains(".so"));
    if library || fs::metadata(path)?.permissions().mode() & 0o111 == 0 {
        return Ok(false);
    }
    let mut magic = Vec::new();
    fs::File::open(path)?.take(4).read_to_end(&mut magic)?;
    Ok(magic == *b"\x7fELF")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process;

    #[test]
    fn loader_wraps_programs_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let (loader, deep) = (root.join("usr/lib/x86_64-linux-gnu"), root.join("usr/lib/kbuild/scripts/basic"));
        for place in [&loader, &deep] {
            fs::create_dir_all(place).unwrap();
        }
        let put = |path: &Path, text: &str, mode: u32| {
            fs::write(path, text).unwrap();
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        };
        put(&loader.join("ld-linux-x86-64.so.2"), "#!/bin/sh\necho \"$@\"\n", 0o755);
        let others =
            [("library.so.1", "\x7fELF", 0o755), ("object.o", "\x7fELF", 0o644), ("script", "#!/bin/sh", 0o755)];
        for (name, text, mode) in others {
            put(&deep.join(name), text, mode);
        }
        let program = deep.join("fixdep");
        put(&program, "\x7fELF", 0o755);
        wrap_with_loader(root, &["usr/lib"]).unwrap();
        for (name, text, _) in others {
            assert_eq!(fs::read_to_string(deep.join(name)).unwrap(), text);
        }
        let output = process::output(Command::new(&program).arg("x y")).unwrap();
        let libraries = format!("{}/../../../../../usr/lib/x86_64-linux-gnu", deep.display());
        let program = program.display();
        let expected = format!("--argv0 {program} --library-path {libraries} {program}.elf x y\n");
        assert_eq!(String::from_utf8(output).unwrap(), expected);
    }

    #[test]
    fn wrapper_runs_its_program_with_the_libraries_before_others() {
        let directory = tempfile::tempdir().unwrap();
        let programs = directory.path().join("usr/bin");
        fs::create_dir_all(&programs).unwrap();
        let program = programs.join("aarch64-linux-gnu-ld");
        fs::write(&program, "#!/bin/sh\necho \"$1 $LD_LIBRARY_PATH\"\n").unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(programs.join("other"), "").unwrap();
        wrap(Arch::Aarch64, directory.path()).unwrap();
        let toolchain = Toolchain { arch: Arch::Aarch64, root: directory.path().to_owned(), id: String::new() };
        let output = process::output(Command::new(toolchain.gnu("ld")).arg("x y")).unwrap();
        let output = String::from_utf8(output).unwrap();
        let root = format!("{}/bin/..", directory.path().display());
        let path = format!("{root}/usr/lib/x86_64-linux-gnu:{root}/lib/x86_64-linux-gnu");
        assert_eq!(output, format!("x y {path}\n"));
        assert_eq!(fs::read_dir(toolchain.bin()).unwrap().count(), 1);
    }
}

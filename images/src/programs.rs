//! Our own programs, linked statically so that they run in any initramfs. Cargo builds them in a separate
//! target directory, and decides what to rebuild.

use std::collections::BTreeMap;
use std::env;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;
use thiserror::Error;

use crate::arch::Arch;
use crate::cache::Cache;
use crate::progress::Step;
use crate::sys;
use crate::toolchain::{Toolchain, ToolchainError};

const STATIC: &str = "-C target-feature=+crt-static";
/// The linker's option to encode relative relocations compactly. A static program relocates itself when it starts, and
/// reads all of its relocations: as plain entries, they are 300 KiB of the VMM's memory. GNU ld can do this only for x86.
const PACKED: &str = "-C link-arg=-Wl,-z,pack-relative-relocs";
/// The package that is built if any test program is wanted.
const TESTS: &str = "guest-tests";

/// Errors of building the programs.
#[derive(Debug, Error)]
pub enum ProgramError {
    /// Cargo could not be started.
    #[error("cannot start cargo; is Rust installed and in PATH?")]
    Start(#[source] io::Error),
    /// Cargo failed, and its messages are on stderr.
    #[error("cargo could not build the guest's programs: see its messages above")]
    Build,
    /// The compilers for the architecture are missing.
    #[error(transparent)]
    Toolchain(#[from] ToolchainError),
    /// Cargo's messages are not understood.
    #[error("cannot read cargo's messages")]
    Messages(#[source] serde_json::Error),
    /// The tests have no program of that name.
    #[error("the tests have no program {wanted}; they have: {known}")]
    Unknown {
        /// The requested name.
        wanted: String,
        /// The names of all programs.
        known: String,
    },
}

/// Built programs: names and files.
#[derive(Clone, Debug)]
pub struct Programs {
    files: BTreeMap<String, PathBuf>,
    tests: BTreeMap<String, PathBuf>,
}

/// The directory of this clone of the project.
fn root() -> &'static Path {
    let images = Path::new(env!("CARGO_MANIFEST_DIR"));
    images.parent().unwrap_or(images)
}

/// The directory for what is made from this clone's own sources, or concerns only this clone.
pub(crate) fn target() -> PathBuf {
    root().join("target")
}

#[derive(Deserialize)]
struct Message {
    #[serde(default)]
    target: Target,
    package_id: Option<String>,
    executable: Option<PathBuf>,
}

#[derive(Default, Deserialize)]
struct Target {
    name: String,
}

impl Programs {
    /// Builds the programs for `arch`, and the test programs if `tests` names any.
    ///
    /// # Errors
    /// [`ProgramError`].
    pub fn build(cache: &Cache, arch: Arch, tests: &[String]) -> Result<Self, ProgramError> {
        let toolchain = Toolchain::get(cache, arch)?;
        let step = Step::new("building static programs");
        let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args(["build", "--quiet", "--bins", "--profile", "guest"]);
        cargo.args(["--target", arch.target(), "--message-format", "json-render-diagnostics"]);
        cargo.arg("--target-dir").arg(target().join(arch.kind("static")));
        let packages = arch.packages().iter().chain((!tests.is_empty()).then_some(&TESTS));
        cargo.args(packages.flat_map(|package| ["--package", package]));
        for variable in ["RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS"] {
            cargo.env_remove(variable); // would override ours
        }
        let target = arch.target().to_uppercase().replace('-', "_");
        let setting = |name: &str| format!("CARGO_TARGET_{target}_{name}");
        if let Some(toolchain) = &toolchain {
            // Cargo also uses this rustc for build scripts and procedural macros, which run on this machine.
            cargo.env("RUSTC", toolchain.rustc());
            cargo.env(setting("LINKER"), toolchain.gnu("gcc"));
            for variable in ["RUSTC_WRAPPER", "RUSTC_WORKSPACE_WRAPPER"] {
                cargo.env_remove(variable); // meant for another compiler
            }
        }
        let flags = match arch {
            Arch::X86_64 => format!("{STATIC} {PACKED}"),
            Arch::Aarch64 => STATIC.to_owned(),
        };
        cargo.env(setting("RUSTFLAGS"), flags).current_dir(root());
        cargo.stdin(Stdio::null()).stderr(Stdio::inherit());
        let output = sys::dies_with_us(&mut cargo).output().map_err(ProgramError::Start)?;
        if !output.status.success() {
            return Err(ProgramError::Build);
        }
        let built = Self::read(&String::from_utf8_lossy(&output.stdout))?;
        for wanted in tests {
            if !built.tests.contains_key(wanted) {
                let known = built.tests.keys().cloned().collect::<Vec<_>>().join(", ");
                return Err(ProgramError::Unknown { wanted: wanted.clone(), known });
            }
        }
        step.done();
        Ok(built)
    }

    fn read(messages: &str) -> Result<Self, ProgramError> {
        let mut built = Self { files: BTreeMap::new(), tests: BTreeMap::new() };
        for line in messages.lines() {
            let message: Message = serde_json::from_str(line).map_err(ProgramError::Messages)?;
            let Some(file) = message.executable else {
                continue;
            };
            let package = message.package_id.unwrap_or_default();
            let is_test = package.contains("/tests/guest#");
            let list = if is_test { &mut built.tests } else { &mut built.files };
            list.insert(message.target.name, file);
        }
        Ok(built)
    }

    /// The VMM.
    ///
    /// # Errors
    /// [`ProgramError::Unknown`] if the workspace no longer has the program.
    pub fn vmm(&self) -> Result<&Path, ProgramError> {
        self.one("vmm")
    }

    /// The program `name`.
    ///
    /// # Errors
    /// [`ProgramError::Unknown`].
    pub fn one(&self, name: &str) -> Result<&Path, ProgramError> {
        let found = self.files.get(name).or_else(|| self.tests.get(name));
        found.map(PathBuf::as_path).ok_or_else(|| ProgramError::Unknown {
            wanted: name.to_owned(),
            known: self.files.keys().cloned().collect::<Vec<_>>().join(", "),
        })
    }

    /// The programs for a guest: every program except the VMM, plus the test programs named in `tests`.
    pub fn guest<'a>(&'a self, tests: &'a [String]) -> impl Iterator<Item = (&'a str, &'a Path)> {
        let ours = self.files.iter().filter(|(name, _)| *name != "vmm");
        let theirs = self.tests.iter().filter(|(name, _)| tests.contains(name));
        ours.chain(theirs).map(|(name, file)| (name.as_str(), file.as_path()))
    }

    /// All programs and where they are.
    pub fn all(&self) -> impl Iterator<Item = (&str, &Path)> {
        self.files.iter().chain(&self.tests).map(|(name, file)| (name.as_str(), file.as_path()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MESSAGES: &str = r#"{"reason":"compiler-artifact","package_id":"path+file:///p/vmm#0.1.0","target":{"name":"vmm"},"executable":"/t/vmm"}
{"reason":"compiler-artifact","package_id":"path+file:///p/guest-driver/client#vpmu-client@0.1.0","target":{"name":"vperf"},"executable":"/t/vperf"}
{"reason":"compiler-artifact","package_id":"path+file:///p/tests/guest#guest-tests@0.1.0","target":{"name":"probe"},"executable":"/t/probe"}
{"reason":"compiler-artifact","package_id":"registry+x#libc@0.2.0","target":{"name":"libc"},"executable":null}
{"reason":"build-finished","success":true}"#;

    #[test]
    fn cargos_messages_name_the_programs() {
        let built = Programs::read(MESSAGES).unwrap();
        assert_eq!(built.vmm().unwrap(), Path::new("/t/vmm"));
        let names = |tests: &[String]| built.guest(tests).map(|(name, _)| name.to_owned()).collect::<Vec<_>>();
        assert_eq!(names(&[]), ["vperf"]);
        assert_eq!(names(&["probe".to_owned()]), ["vperf", "probe"]);
        assert_eq!(built.one("probe").unwrap(), Path::new("/t/probe"));
        assert!(built.one("nothing").unwrap_err().to_string().contains("vperf"));
        assert!(matches!(Programs::read("garbage"), Err(ProgramError::Messages(_))));
    }
}

//! Finds a kernel's modules and the order in which to load them. Reads the modules themselves, because packages do not
//! contain an index of them.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use object::{Object, ObjectSection};
use thiserror::Error;

use crate::prerequisites::{self, Prerequisite, PrerequisiteError};
use crate::process::{self, ProcessError};

/// Errors from adding a module to an initramfs.
#[derive(Debug, Error)]
pub enum KmodError {
    /// The module is neither a file nor built in.
    #[error("{directory} has no module {name}, and it is not built in")]
    Missing {
        /// The module.
        name: String,
        /// The directory that was searched.
        directory: PathBuf,
    },
    /// The file is not a kernel module.
    #[error("{0} is not a kernel module")]
    NotModule(PathBuf),
    /// Something could not be read.
    #[error("cannot read {path}")]
    Read {
        /// The path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The host lacks the program that unpacks the module.
    #[error(transparent)]
    Prerequisite(#[from] PrerequisiteError),
    /// The module cannot be unpacked.
    #[error("cannot unpack {path}")]
    Unpack {
        /// The path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: ProcessError,
    },
}

/// A module, unpacked.
#[derive(Debug)]
pub struct Module {
    /// The module's name, such as `virtio_mmio`, with underscores for dashes.
    pub name: String,
    /// The ELF file.
    pub bytes: Vec<u8>,
}

/// Returns the modules `names` and their dependencies in loading order: each after its own dependencies.
/// Built-in modules are left out.
///
/// # Errors
/// [`KmodError`].
pub fn collect(directory: &Path, names: &[&str]) -> Result<Vec<Module>, KmodError> {
    let mut files = HashMap::new();
    index(directory, &mut files)?;
    let builtin = fs::read_to_string(directory.join("modules.builtin")).unwrap_or_default();
    let builtin: Vec<String> = builtin.lines().map(|line| stem(Path::new(line))).collect();
    let mut found = Vec::new();
    for name in names {
        visit(name, directory, &files, &builtin, &mut found)?;
    }
    Ok(found)
}

fn visit(
    name: &str,
    directory: &Path,
    files: &HashMap<String, PathBuf>,
    builtin: &[String],
    found: &mut Vec<Module>,
) -> Result<(), KmodError> {
    let name = name.replace('-', "_");
    if found.iter().any(|module| module.name == name) || builtin.contains(&name) {
        return Ok(());
    }
    let path =
        files.get(&name).ok_or_else(|| KmodError::Missing { name: name.clone(), directory: directory.to_owned() })?;
    let bytes = read(path)?;
    for dependency in depends(&bytes).ok_or_else(|| KmodError::NotModule(path.clone()))? {
        visit(&dependency, directory, files, builtin, found)?;
    }
    found.push(Module { name, bytes });
    Ok(())
}

/// The names of a module's dependencies; `None` if the file is not a module.
pub fn depends(bytes: &[u8]) -> Option<Vec<String>> {
    let file = object::File::parse(bytes).ok()?;
    let info = file.section_by_name(".modinfo")?.data().ok()?;
    let field = info.split(|&b| b == 0).find_map(|field| field.strip_prefix(b"depends="))?;
    let field = String::from_utf8_lossy(field).into_owned();
    Some(field.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect())
}

fn index(directory: &Path, files: &mut HashMap<String, PathBuf>) -> Result<(), KmodError> {
    let failed = |source| KmodError::Read { path: directory.to_owned(), source };
    for entry in fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let path = entry.path();
        // Don't follow links: `build` and `source` lead out of the tree.
        if entry.file_type().map_err(failed)?.is_dir() {
            index(&path, files)?;
        } else if entry.file_name().to_string_lossy().contains(".ko") {
            files.insert(stem(&path), path);
        }
    }
    Ok(())
}

fn stem(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.split(".ko").next().unwrap_or_default().replace('-', "_")
}

fn read(path: &Path) -> Result<Vec<u8>, KmodError> {
    let packer = match path.extension().and_then(|e| e.to_str()) {
        Some("xz") => Some(("xz", Some(Prerequisite::Xz))),
        Some("zst") => Some(("zstd", Some(Prerequisite::Zstd))),
        Some("gz") => Some(("gzip", None)),
        _ => None,
    };
    let Some((program, need)) = packer else {
        return fs::read(path).map_err(|source| KmodError::Read { path: path.to_owned(), source });
    };
    prerequisites::ensure(need.as_slice())?;
    process::output(Command::new(program).arg("-dc").arg(path))
        .map_err(|source| KmodError::Unpack { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_module_is_left_out_and_missing_one_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let builtin = directory.path().join("modules.builtin");
        fs::write(builtin, "kernel/drivers/virtio/virtio-mmio.ko\n").unwrap();
        assert!(collect(directory.path(), &["virtio_mmio"]).unwrap().is_empty());
        let error = collect(directory.path(), &["pvpanic"]).unwrap_err();
        assert!(error.to_string().contains("pvpanic"), "{error}");
    }

    #[test]
    fn file_that_is_not_a_module_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("a-b.ko"), "text").unwrap();
        let error = collect(directory.path(), &["a_b"]).unwrap_err();
        assert!(matches!(error, KmodError::NotModule(_)));
    }

    #[test]
    fn names_of_all_forms_are_one() {
        for name in ["x/kvm-amd.ko", "kvm_amd.ko.xz", "kvm-amd.ko.zst"] {
            assert_eq!(stem(Path::new(name)), "kvm_amd");
        }
    }
}

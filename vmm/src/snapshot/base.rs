//! Diffs: the snapshot that a diff is based on, and what `vmm ctl snapshot` asks a machine for.

use std::fs::File;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::id::Id;
use super::place::{Owners, Place};
use super::state_file::StateFile;
use super::{Facts, MEMORY, STATE, SnapshotError};

/// Maximum number of diffs on top of a full snapshot.
pub(crate) const MAX_DIFFS: u32 = 64;

/// The snapshot that a diff is based on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Base {
    pub(crate) id: Id,
    /// The name of its directory, which lies beside the diff's directory unless the operator names another one.
    pub(crate) directory: Name,
    /// SHA-256 of its state file.
    pub(crate) digest: String,
    /// Number of diffs on top of the full snapshot. This includes the diff that has this base.
    pub(crate) diffs: u32,
}

/// The name of a directory: one component of a path, not `..`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct Name(String);

/// A text that is not the name of a directory.
#[derive(Debug, thiserror::Error)]
#[error("the base of a diff is a name beside the diff, not a path")]
pub(crate) struct NameError;

impl Name {
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for Name {
    type Error = NameError;

    fn try_from(text: String) -> Result<Self, NameError> {
        let mut components = Path::new(&text).components();
        match (components.next(), components.next()) {
            (Some(Component::Normal(name)), None) if name == text.as_str() && !text.contains('\0') => Ok(Self(text)),
            _ => Err(NameError),
        }
    }
}

/// A snapshot that is requested from a machine. The machine may have been taken over, so its files are checked like the
/// files of a stranger.
#[derive(Debug)]
pub(crate) struct Wanted {
    pub(crate) id: Id,
    /// The base of a diff, and the facts of its machine.
    base: Option<(Base, Facts)>,
}

impl Wanted {
    /// A new snapshot. If `base` is given, a diff that is based on the snapshot in this directory.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub(crate) fn new(base: Option<&Path>, owners: Owners) -> Result<Self, SnapshotError> {
        Ok(Self { id: Id::random(), base: base.map(|base| read(base, owners)).transpose()? })
    }

    /// The base of a diff.
    pub(crate) fn base(&self) -> Option<&Base> {
        self.base.as_ref().map(|(base, _)| base)
    }

    /// Checks that `state` is the state of this snapshot, that `vmm run --restore` can parse it, and that `memory` is
    /// the memory that belongs to it. Both are for the directory `path`.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub(crate) fn check(&self, path: &Path, state: &[u8], memory: &File) -> Result<(), SnapshotError> {
        let file = StateFile::parse(path.join(STATE), state.to_vec())?;
        file.state()?;
        let differs = |what| Err(SnapshotError::NotRequested(path.to_owned(), what));
        if file.header.id != self.id {
            return differs("name");
        }
        if file.header.base.as_ref() != self.base() {
            return differs("base");
        }
        if let Some((_, facts)) = &self.base
            && file.header.machine != *facts
        {
            return differs("machine");
        }
        let path = path.join(MEMORY);
        let length = memory.metadata().map(|found| found.len());
        let length = length.map_err(|source| SnapshotError::Read { path: path.clone(), source })?;
        file.check_memory(path, memory, length)
    }
}

/// Reads the snapshot in `directory`, which is to become the base of a diff.
fn read(directory: &Path, owners: Owners) -> Result<(Base, Facts), SnapshotError> {
    let place = Place::open(directory, owners)?;
    let StateFile { header, digest, .. } = StateFile::read(&place)?;
    let diffs = header.base.map_or(0, |base| base.diffs);
    if diffs >= MAX_DIFFS {
        return Err(SnapshotError::TooManyDiffs(directory.to_owned()));
    }
    let name = place.name().map_err(|source| SnapshotError::Read { path: directory.to_owned(), source })?;
    let name = name.and_then(|name| name.into_string().ok());
    let name = name.and_then(|name| Name::try_from(name).ok());
    let base = Base {
        id: header.id,
        directory: name.ok_or_else(|| SnapshotError::BaseName(directory.to_owned()))?,
        digest,
        diffs: diffs + 1,
    };
    Ok((base, header.machine))
}

/// The snapshots that the operator names as bases. They need not lie beside their diffs.
#[derive(Debug)]
pub(crate) struct NamedBases(Vec<(Place, StateFile)>);

impl NamedBases {
    /// Opens the snapshots in `directories`.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub(crate) fn open(directories: &[PathBuf], owners: Owners) -> Result<Self, SnapshotError> {
        let opened = directories.iter().map(|directory| {
            let place = Place::open(directory, owners)?;
            let file = StateFile::read(&place)?;
            Ok((place, file))
        });
        let opened: Result<_, SnapshotError> = opened.collect();
        Ok(Self(opened?))
    }

    /// Takes the snapshot that has the name `id`.
    pub(crate) fn take(&mut self, id: Id) -> Option<(Place, StateFile)> {
        let index = self.0.iter().position(|(_, file)| file.header.id == id)?;
        Some(self.0.swap_remove(index))
    }

    /// Checks that every snapshot was taken.
    ///
    /// # Errors
    /// [`SnapshotError::UnusedBase`].
    pub(crate) fn check_used(&self) -> Result<(), SnapshotError> {
        match self.0.first() {
            Some((place, _)) => Err(SnapshotError::UnusedBase(place.path().to_owned())),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_is_one_component() {
        let name = |text: &str| Name::try_from(text.to_owned());
        for good in ["base", "a base", ".hidden", "..."] {
            assert_eq!(name(good).expect("a name").as_str(), good);
        }
        for wrong in ["", ".", "..", "/", "/base", "base/", "./base", "a/b", "../base", "a\0b"] {
            assert!(name(wrong).is_err(), "{wrong:?}");
        }
    }
}

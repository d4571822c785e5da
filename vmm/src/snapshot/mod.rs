//! Snapshots: machines that are saved in a directory. `vmm ctl snapshot` writes a snapshot while the machine runs, and
//! `vmm run --restore` continues from it. A snapshot can be restored any number of times.
//!
//! The directory has two files. `memory` has all of the guest's memory, with holes for zero pages, and then a page with
//! the snapshot's name. `state` has two lines of JSON: a header with the facts (properties of the machine that the
//! guest sees), and everything else. `state` is written last, so a directory without this file is not a snapshot.
//!
//! A diff is a snapshot that has only the pages written since an earlier snapshot, which is called its base. The base
//! may be a diff, too.
//!
//! A snapshot is data of one owner: its directory and its files belong to the user of the VMM, or to the machine's
//! user. Otherwise a stranger's directory could show the operator's files to the guest.

mod base;
pub(crate) mod directory;
pub(crate) mod dirty;
mod error;
mod id;
pub(crate) mod mailbox;
pub(crate) mod memory;
mod place;
pub(crate) mod state_file;

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use vm_memory::GuestMemoryMmap;

pub use self::base::Base;
pub use self::directory::DirectoryError;
pub use self::error::SnapshotError;
pub use self::id::{Id, IdError};

pub(crate) use self::base::Wanted;
pub(crate) use self::place::Owners;
pub(crate) use self::state_file::text;

use self::base::{MAX_DIFFS, NamedBases};
use self::memory::Run;
use self::place::Place;
use self::state_file::StateFile;
use crate::arch::state::{VcpuState, VmState};
use crate::devices::serial::SavedSerial;
use crate::devices::virtio_mmio::SavedTransport;

/// The file for everything but memory.
pub(crate) const STATE: &str = "state";
/// The file for memory.
pub(crate) const MEMORY: &str = "memory";

/// The properties of a machine that the guest sees.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Facts {
    pub(crate) vcpus: u8,
    pub(crate) memory_mib: u64,
    /// Size of the window in bytes.
    pub(crate) window: u64,
    pub(crate) vpmu: bool,
    pub(crate) guest_pmu: bool,
}

impl Facts {
    /// The length of the memory file in bytes.
    fn memory_bytes(&self) -> Option<u64> {
        let memory = self.memory_mib.checked_mul(1 << 20)?;
        memory.checked_add(self.window)?.checked_add(memory::TRAILER)
    }
}

/// The second line: everything except memory.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct State {
    pub(crate) vm: VmState,
    pub(crate) vcpus: Vec<VcpuState>,
    pub(crate) console: SavedSerial,
    pub(crate) pmu: Option<SavedPmu>,
    /// The pages of a diff. `None` for a full snapshot.
    pub(crate) changed: Option<Vec<Run>>,
}

/// The PMU device and its transport.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedPmu {
    pub(crate) transport: SavedTransport,
    pub(crate) device: vpmu::SavedState,
}

/// A saved machine without its memory, which is in a separate file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Taken {
    /// Bytes of memory.
    pub memory: u64,
    /// Bytes of memory that are not in holes of the file.
    pub written: u64,
    /// Number of nanoseconds for which the guest was stopped.
    pub paused_ns: u64,
}

/// The files of a snapshot that is being written.
#[derive(Debug)]
pub(crate) struct Files {
    pub(crate) memory: File,
    pub(crate) state: File,
}

impl Files {
    /// Writes `state` after the memory. When this function returns, both files are on disk. A state file on disk always
    /// has its memory beside it.
    ///
    /// # Errors
    /// The host's error.
    pub(crate) fn complete(&self, state: &str) -> io::Result<()> {
        self.memory.sync_all()?;
        (&self.state).write_all(state.as_bytes())?;
        self.state.sync_all()
    }
}

/// An open snapshot that has been checked as far as this is possible without KVM.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) id: Id,
    pub(crate) facts: Facts,
    pub(crate) state: State,
    /// The memory of the full snapshot.
    pub(crate) memory: File,
    /// The diffs on top of the full snapshot, oldest first.
    pub(crate) diffs: Vec<Diff>,
}

/// The memory file of a diff.
#[derive(Debug)]
pub(crate) struct Diff {
    path: PathBuf,
    file: File,
    changed: Vec<Run>,
}

impl Diff {
    /// Copies the diff's pages to `memories`.
    ///
    /// # Errors
    /// [`SnapshotError::Read`].
    pub(crate) fn apply(&self, memories: &[&GuestMemoryMmap]) -> Result<(), SnapshotError> {
        let applied = memory::apply(memories, &self.file, &self.changed);
        applied.map_err(|source| SnapshotError::Read { path: self.path.clone(), source })
    }
}

/// Reads the facts of the snapshot in `directory`, which must belong to one of `owners`.
///
/// # Errors
/// [`SnapshotError`].
pub(crate) fn facts(directory: &Path, owners: Owners) -> Result<Facts, SnapshotError> {
    let place = Place::open(directory, owners)?;
    Ok(StateFile::read(&place)?.header.machine)
}

/// Opens the snapshot in `directory`, and all its bases. A base is one of the snapshots in `named`, or lies beside the
/// diff that is based on it. All must belong to `owners`.
///
/// # Errors
/// [`SnapshotError`].
pub(crate) fn open(directory: &Path, named: &[PathBuf], owners: Owners) -> Result<Opened, SnapshotError> {
    let mut named = NamedBases::open(named, owners)?;
    let mut place = Place::open(directory, owners)?;
    let top = StateFile::read(&place)?;
    let mut state = top.state()?;
    let mut memory = top.memory(&place)?;
    let (id, facts) = (top.header.id, top.header.machine);
    let mut diffs = Vec::new();
    let mut below = top.header.base.zip(state.changed.take());
    while let Some((base, changed)) = below {
        if diffs.len() as u64 >= MAX_DIFFS.into() {
            return Err(SnapshotError::TooManyDiffs(place.path().to_owned()));
        }
        diffs.push(Diff { path: place.join(MEMORY), file: memory, changed });
        let file;
        (place, file) = find_base(&place, &base, &mut named, owners)?;
        if file.digest != base.digest || file.header.id != base.id || file.header.machine != facts {
            return Err(SnapshotError::OtherBase(place.path().to_owned()));
        }
        let state = file.state().map_err(|e| in_base(place.path(), e))?;
        memory = file.memory(&place).map_err(|e| in_base(place.path(), e))?;
        below = file.header.base.zip(state.changed);
    }
    named.check_used()?;
    diffs.reverse();
    Ok(Opened { id, facts, state, memory, diffs })
}

/// Finds the snapshot `base`, on which the diff in the directory `diff` is based.
fn find_base(
    diff: &Place,
    base: &Base,
    named: &mut NamedBases,
    owners: Owners,
) -> Result<(Place, StateFile), SnapshotError> {
    if let Some(found) = named.take(base.id) {
        return Ok(found);
    }
    let place = diff.beside(base.directory.as_str(), owners);
    let place = place.map_err(|error| match error {
        SnapshotError::Read { path, source } if source.kind() == ErrorKind::NotFound => SnapshotError::NoBase(path),
        error => error,
    })?;
    let file = StateFile::read(&place).map_err(|e| in_base(place.path(), e))?;
    Ok((place, file))
}

fn in_base(path: &Path, source: SnapshotError) -> SnapshotError {
    SnapshotError::Base { path: path.to_owned(), source: source.into() }
}

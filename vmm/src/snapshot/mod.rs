//! Snapshots: machines that are saved in a directory. `vmm ctl snapshot` writes a snapshot while the machine runs, and
//! `vmm run --restore` continues from it. A snapshot can be restored any number of times.
//!
//! The directory has two files. `memory` has all of the guest's memory, with holes for zero pages, and then a page with
//! the snapshot's name. `state` has two lines of JSON: a header with the facts (properties of the machine that the
//! guest sees), and everything else. `state` is written last, so a directory without this file is not a snapshot.
//!
//! A diff is a snapshot that has only the pages written since an earlier snapshot, which is called its base. The base
//! may be a diff, too.

pub(crate) mod directory;
pub(crate) mod dirty;
pub(crate) mod mailbox;
pub(crate) mod memory;

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use vm_memory::GuestMemoryMmap;

use self::memory::Run;
use crate::arch::state::{StateError, VcpuState, VmState};
use crate::devices::serial::SavedSerial;
use crate::devices::virtio_mmio::SavedTransport;

/// The file for everything but memory.
pub(crate) const STATE: &str = "state";
/// The file for memory.
pub(crate) const MEMORY: &str = "memory";

const FORMAT: &str = "vpmu machine snapshot";
const VERSION: u32 = 2;
/// Maximum length in bytes of a state file's first line. The facts and a path need less.
const MAX_HEADER: u64 = 16 << 10;
/// Maximum number of diffs on top of a full snapshot.
const MAX_DIFFS: u32 = 64;
/// Maximum number of bytes that are read from an untrusted state file. The state of the largest machine needs less.
const MAX_STATE: u64 = 64 << 20;

/// The reason why a snapshot cannot be restored here.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// A file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The host's error.
        #[source]
        source: io::Error,
    },
    /// The file is not a state file.
    #[error("{0} is not the state of a machine: give the directory that 'vmm ctl snapshot' wrote")]
    Foreign(PathBuf),
    /// A different version of this program wrote the file.
    #[error("{path} has format version {found}, but this VMM reads version {VERSION}")]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
    /// The machine has a different architecture.
    #[error("{path} is a snapshot of a {saved} machine, but this host is {own}", own = std::env::consts::ARCH)]
    Arch {
        /// The file.
        path: PathBuf,
        /// Its architecture.
        saved: String,
    },
    /// The digest does not match.
    #[error("{0} is damaged: its digest does not match")]
    Damaged(PathBuf),
    /// The JSON does not describe a machine.
    #[error("{path} is damaged")]
    Parse {
        /// The file.
        path: PathBuf,
        /// The position and the reason.
        #[source]
        source: serde_json::Error,
    },
    /// The memory file has the wrong length.
    #[error("{path} has {found} bytes and should have {expected}: it is damaged")]
    Length {
        /// The file.
        path: PathBuf,
        /// Its length.
        found: u64,
        /// The length according to the state file.
        expected: u64,
    },
    /// The memory belongs to a different snapshot.
    #[error("{0} and the state beside it belong to different snapshots")]
    OtherMemory(PathBuf),
    /// A base cannot be read.
    #[error("cannot read the snapshot's base {path}")]
    Base {
        /// The directory of the base.
        path: PathBuf,
        /// The reason why it cannot be read.
        #[source]
        source: Box<SnapshotError>,
    },
    /// The directory of a base contains a different snapshot, or the base has changed.
    #[error("{0} is not the snapshot that the diff is based on, or has changed since")]
    OtherBase(PathBuf),
    /// The base is already the last diff that is allowed on top of a full snapshot.
    #[error("{0} is the last of {MAX_DIFFS} possible diffs: make a snapshot without --diff")]
    TooManyDiffs(PathBuf),
    /// The facts describe an impossible machine.
    #[error("{0} describes an invalid machine")]
    Facts(PathBuf),
    /// A flag contradicts the snapshot.
    #[error("{flag} does not match the snapshot, which has {saved}: leave {flag} out")]
    Differs {
        /// The flag that differs.
        flag: &'static str,
        /// The snapshot's value.
        saved: String,
    },
    /// The snapshot was replaced while it was read.
    #[error("the snapshot changed while it was read")]
    Changed,
    /// KVM refuses the state.
    #[error("cannot restore the machine on this host")]
    State(#[from] StateError),
    /// The console refuses its state.
    #[error("the saved console is not valid: {0}")]
    Console(String),
    /// The PMU device refuses its state.
    #[error("cannot restore the PMU device")]
    Pmu(#[source] Box<dyn std::error::Error + Send + Sync>),
}

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
        memory
            .checked_add(self.window)?
            .checked_add(memory::TRAILER)
    }
}

/// The part of the state file's first line that all versions have in common.
#[derive(Debug, Deserialize)]
struct Format {
    format: String,
    version: u32,
}

/// The snapshot that a diff is based on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Base {
    pub(crate) id: String,
    /// The directory of this snapshot. It is an absolute path, or a name in the parent directory of the diff's
    /// directory.
    directory: PathBuf,
    /// SHA-256 of its state file.
    digest: String,
    /// Number of diffs on top of the full snapshot. This includes the diff that has this base.
    diffs: u32,
}

impl Base {
    /// Reads the snapshot in `directory`, which is to become the base of a diff. The diff's directory, `diff`, need not
    /// exist yet.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub(crate) fn read(directory: &Path, diff: &Path) -> Result<Self, SnapshotError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| SnapshotError::Read { path, source }
        };
        let file = StateFile::read(directory)?;
        let diffs = file.header.base.as_ref().map_or(0, |base| base.diffs);
        if diffs >= MAX_DIFFS {
            return Err(SnapshotError::TooManyDiffs(directory.to_owned()));
        }
        let directory = fs::canonicalize(directory).map_err(failed(directory))?;
        let diff = std::path::absolute(diff).map_err(failed(diff))?;
        let beside = diff
            .parent()
            .and_then(|parent| fs::canonicalize(parent).ok());
        let directory = match directory.file_name().map(OsStr::to_owned) {
            Some(name) if beside.is_some() && directory.parent() == beside.as_deref() => {
                PathBuf::from(name)
            }
            _ => directory,
        };
        Ok(Self {
            id: file.header.id,
            directory,
            digest: file.digest,
            diffs: diffs + 1,
        })
    }

    /// The path of the base's directory, if the diff is in the directory `diff`.
    fn place(&self, diff: &Path) -> PathBuf {
        if self.directory.is_absolute() {
            return self.directory.clone();
        }
        let diff = fs::canonicalize(diff).unwrap_or_else(|_| diff.to_owned());
        match diff.parent() {
            Some(parent) => parent.join(&self.directory),
            None => self.directory.clone(),
        }
    }
}

/// The first line of the state file.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    format: String,
    version: u32,
    arch: String,
    id: String,
    machine: Facts,
    /// The base of a diff. `None` for a full snapshot.
    base: Option<Base>,
    /// SHA-256 of the second line.
    digest: String,
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
    /// The text of the state file.
    pub state: String,
    /// Bytes of memory.
    pub memory: u64,
    /// Bytes of memory that are not in holes of the file.
    pub written: u64,
    /// Number of nanoseconds for which the guest was stopped.
    pub paused_ns: u64,
}

/// An open snapshot that has been checked as far as this is possible without KVM.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) id: String,
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
        applied.map_err(|source| SnapshotError::Read {
            path: self.path.clone(),
            source,
        })
    }
}

/// The text of a state file.
///
/// # Errors
/// The state cannot be written as JSON.
pub(crate) fn text(
    id: &str,
    facts: Facts,
    base: Option<Base>,
    state: &State,
) -> Result<String, serde_json::Error> {
    let body = serde_json::to_string(state)?;
    let header = Header {
        format: FORMAT.to_owned(),
        version: VERSION,
        arch: std::env::consts::ARCH.to_owned(),
        id: id.to_owned(),
        machine: facts,
        base,
        digest: digest(body.as_bytes()),
    };
    Ok(format!("{}\n{body}\n", serde_json::to_string(&header)?))
}

fn digest(bytes: &[u8]) -> String {
    let digits = Sha256::digest(bytes);
    digits.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Reads the facts of the snapshot in `directory`.
///
/// # Errors
/// [`SnapshotError`].
pub(crate) fn facts(directory: &Path) -> Result<Facts, SnapshotError> {
    Ok(StateFile::read(directory)?.header.machine)
}

/// Opens the snapshot in `directory`, and all its bases.
///
/// # Errors
/// [`SnapshotError`].
pub(crate) fn open(directory: &Path) -> Result<Opened, SnapshotError> {
    let top = StateFile::read(directory)?;
    let mut state = top.state()?;
    let mut memory = top.memory(directory)?;
    let StateFile { header, .. } = top;
    let (id, facts) = (header.id, header.machine);
    let mut diffs = Vec::new();
    let mut below = header.base.zip(state.changed.take());
    let mut directory = directory.to_owned();
    while let Some((base, changed)) = below {
        if diffs.len() as u64 >= MAX_DIFFS.into() {
            return Err(SnapshotError::TooManyDiffs(directory));
        }
        let place = base.place(&directory);
        diffs.push(Diff {
            path: directory.join(MEMORY),
            file: memory,
            changed,
        });
        let opened = open_base(&place, &base, &facts);
        (memory, below) = opened.map_err(|source| match source {
            SnapshotError::OtherBase(_) => source,
            source => SnapshotError::Base {
                path: place.clone(),
                source: source.into(),
            },
        })?;
        directory = place;
    }
    diffs.reverse();
    Ok(Opened {
        id,
        facts,
        state,
        memory,
        diffs,
    })
}

type Below = Option<(Base, Vec<Run>)>;

/// Opens the memory of `base`, which is the snapshot in `directory`. If this snapshot is itself a diff, also returns
/// the snapshot that it is based on, and the pages that it has.
fn open_base(directory: &Path, base: &Base, facts: &Facts) -> Result<(File, Below), SnapshotError> {
    let file = StateFile::read(directory)?;
    if file.digest != base.digest || file.header.id != base.id || file.header.machine != *facts {
        return Err(SnapshotError::OtherBase(directory.to_owned()));
    }
    let state = file.state()?;
    let memory = file.memory(directory)?;
    Ok((memory, file.header.base.zip(state.changed)))
}

/// Opens an untrusted file, without waiting for a writer if the file is a FIFO.
fn open_file(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_NONBLOCK).open(path)
}

/// A state file.
#[derive(Debug)]
struct StateFile {
    path: PathBuf,
    header: Header,
    /// The second line.
    body: Vec<u8>,
    /// SHA-256 of the whole file.
    digest: String,
}

impl StateFile {
    fn read(directory: &Path) -> Result<Self, SnapshotError> {
        let path = directory.join(STATE);
        let failed = |source| SnapshotError::Read {
            path: path.clone(),
            source,
        };
        let file = open_file(&path).map_err(failed)?;
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(SnapshotError::Foreign(path));
        }
        let mut text = Vec::new();
        let read = file.take(MAX_STATE).read_to_end(&mut text);
        let length = read.map_err(failed)? as u64;
        let digest = digest(&text);
        let end = text.iter().position(|byte| *byte == b'\n');
        let Some(end) = end.filter(|end| *end as u64 <= MAX_HEADER && length < MAX_STATE) else {
            return Err(SnapshotError::Foreign(path));
        };
        let mut body = text.split_off(end + 1);
        let line = text.as_slice();
        match serde_json::from_slice(line) {
            Ok(Format { format, version }) if format == FORMAT => match version {
                VERSION => {}
                found => return Err(SnapshotError::Version { path, found }),
            },
            _ => return Err(SnapshotError::Foreign(path)),
        }
        let header: Header =
            serde_json::from_slice(line).map_err(|source| SnapshotError::Parse {
                path: path.clone(),
                source,
            })?;
        if header.arch != std::env::consts::ARCH {
            return Err(SnapshotError::Arch {
                path,
                saved: header.arch,
            });
        }
        body.shrink_to_fit();
        Ok(Self {
            path,
            header,
            body,
            digest,
        })
    }

    /// Parses the second line.
    fn state(&self) -> Result<State, SnapshotError> {
        let body = self.body.strip_suffix(b"\n").unwrap_or(&self.body);
        if digest(body) != self.header.digest {
            return Err(SnapshotError::Damaged(self.path.clone()));
        }
        let state: State = serde_json::from_slice(body).map_err(|source| SnapshotError::Parse {
            path: self.path.clone(),
            source,
        })?;
        let facts = &self.header.machine;
        let pages = self.memory_bytes()?.saturating_sub(memory::TRAILER) / memory::PAGE as u64;
        let changed = state.changed.as_deref().unwrap_or_default();
        if state.vcpus.len() != usize::from(facts.vcpus)
            || state.pmu.is_some() != facts.vpmu
            || state.changed.is_some() != self.header.base.is_some()
            || !memory::are_valid(changed, pages)
        {
            return Err(SnapshotError::Facts(self.path.clone()));
        }
        Ok(state)
    }

    fn memory_bytes(&self) -> Result<u64, SnapshotError> {
        let bytes = self.header.machine.memory_bytes();
        bytes.ok_or_else(|| SnapshotError::Facts(self.path.clone()))
    }

    /// Opens the memory file that is in the same directory as the state file.
    fn memory(&self, directory: &Path) -> Result<File, SnapshotError> {
        let expected = self.memory_bytes()?;
        let path = directory.join(MEMORY);
        let failed = |source| SnapshotError::Read {
            path: path.clone(),
            source,
        };
        let memory = open_file(&path).map_err(failed)?;
        let found = memory.metadata().map_err(failed)?;
        if !found.is_file() || found.len() != expected {
            return Err(SnapshotError::Length {
                path,
                found: found.len(),
                expected,
            });
        }
        if memory::read_id(&memory, expected).map_err(failed)? != self.header.id {
            return Err(SnapshotError::OtherMemory(path));
        }
        Ok(memory)
    }
}

//! A machine in a directory: `vmm ctl snapshot` puts it there while it runs, `vmm run --restore` lets it go
//! on from there, any number of times.
//!
//! The directory has two files. `memory` is what the guest reaches, byte by byte, with holes for zeros, and
//! a last page that names the snapshot. `state` has a line of facts and a line with everything else, both
//! JSON; it comes last, so that a directory without it is no snapshot.

pub(crate) mod desk;
pub(crate) mod directory;
pub(crate) mod memory;

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::arch::state::{StateError, VcpuState, VmState};
use crate::config::Config;
use crate::devices::serial::SavedSerial;
use crate::devices::virtio_mmio::SavedTransport;

/// The file of everything but memory.
pub(crate) const STATE: &str = "state";
/// The file of memory.
pub(crate) const MEMORY: &str = "memory";

const FORMAT: &str = "vpmu machine snapshot";
const VERSION: u32 = 1;
/// More than the facts ever take.
const MAX_HEADER: u64 = 4096;
/// More than the largest machine's state, and a bound on the bytes that are read of a foreign file.
const MAX_STATE: u64 = 64 << 20;

/// Why a directory has no machine that could go on here.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// A file of it.
    #[error("cannot read {path}")]
    Read {
        /// Which file.
        path: PathBuf,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
    /// Something else has the name.
    #[error("{0} is not the state of a machine: give the directory of 'vmm ctl snapshot'")]
    Foreign(PathBuf),
    /// Another version of this program made it.
    #[error("{path} has version {found} of the format, this VMM reads version {VERSION}")]
    Version {
        /// Which file.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
    /// A machine of another architecture.
    #[error("{path} is a machine of {saved}, this host has {own}", own = std::env::consts::ARCH)]
    Arch {
        /// Which file.
        path: PathBuf,
        /// Its architecture.
        saved: String,
    },
    /// Bytes are missing or have changed.
    #[error("{0} is damaged: its bytes are not those that were written")]
    Damaged(PathBuf),
    /// It parses as something else than a machine.
    #[error("{path} is damaged")]
    Parse {
        /// Which file.
        path: PathBuf,
        /// Where and why.
        #[source]
        source: serde_json::Error,
    },
    /// Memory of another length.
    #[error("{path} has {found} bytes and should have {expected}: it is damaged")]
    Length {
        /// Which file.
        path: PathBuf,
        /// Its length.
        found: u64,
        /// Length by the state file.
        expected: u64,
    },
    /// Memory of another snapshot.
    #[error("{0} belongs to another snapshot than the state beside it")]
    OtherMemory(PathBuf),
    /// Facts that no machine has.
    #[error("{0} describes a machine that cannot be")]
    Facts(PathBuf),
    /// A machine of another shape.
    #[error("{flag}: the snapshot's machine has {saved}; leave {flag} out")]
    Differs {
        /// The flag that differs.
        flag: &'static str,
        /// The snapshot's value.
        saved: String,
    },
    /// Somebody put another one there.
    #[error("the snapshot has changed while it was read")]
    Changed,
    /// KVM does not take the state.
    #[error("this host cannot go on with the machine")]
    State(#[from] StateError),
    /// The console does not take its state.
    #[error("the saved console is not valid: {0}")]
    Console(String),
    /// The PMU does not take its state.
    #[error("the saved PMU device cannot go on")]
    Pmu(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// The parts of a machine that its guest sees.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Facts {
    pub(crate) vcpus: u8,
    pub(crate) memory_mib: u64,
    /// Bytes.
    pub(crate) window: u64,
    pub(crate) vpmu: bool,
    pub(crate) guest_pmu: bool,
}

impl From<&Config> for Facts {
    fn from(config: &Config) -> Self {
        Self {
            vcpus: config.vcpus,
            memory_mib: config.memory_mib,
            window: match config.vpmu {
                true => config.window,
                false => 0,
            },
            vpmu: config.vpmu,
            guest_pmu: config.guest_pmu,
        }
    }
}

impl Facts {
    /// Bytes of the memory file.
    fn memory_bytes(&self) -> Option<u64> {
        let memory = self.memory_mib.checked_mul(1 << 20)?;
        memory
            .checked_add(self.window)?
            .checked_add(memory::TRAILER)
    }
}

/// The first line of the state file, as far as every version has it.
#[derive(Debug, Deserialize)]
struct Format {
    format: String,
    version: u32,
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
    /// SHA-256 of the second line.
    digest: String,
}

/// The second line: everything that is not in memory.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct State {
    pub(crate) vm: VmState,
    pub(crate) vcpus: Vec<VcpuState>,
    pub(crate) console: SavedSerial,
    pub(crate) pmu: Option<SavedPmu>,
}

/// The PMU device and its transport.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedPmu {
    pub(crate) transport: SavedTransport,
    pub(crate) device: vpmu::SavedState,
}

/// A snapshot that is open, checked as far as that can be without KVM.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) facts: Facts,
    pub(crate) state: State,
    pub(crate) memory: File,
}

/// The text of a state file.
///
/// # Errors
/// The state cannot be written as JSON.
pub(crate) fn text(id: &str, facts: Facts, state: &State) -> Result<String, serde_json::Error> {
    let body = serde_json::to_string(state)?;
    let header = Header {
        format: FORMAT.to_owned(),
        version: VERSION,
        arch: std::env::consts::ARCH.to_owned(),
        id: id.to_owned(),
        machine: facts,
        digest: digest(body.as_bytes()),
    };
    Ok(format!("{}\n{body}\n", serde_json::to_string(&header)?))
}

fn digest(bytes: &[u8]) -> String {
    let digits = Sha256::digest(bytes);
    digits.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The facts of the snapshot in `directory`.
///
/// # Errors
/// [`SnapshotError`].
pub(crate) fn facts(directory: &Path) -> Result<Facts, SnapshotError> {
    let (_, header, _) = read_header(directory)?;
    Ok(header.machine)
}

/// Opens the snapshot in `directory`.
///
/// # Errors
/// [`SnapshotError`].
pub(crate) fn open(directory: &Path) -> Result<Opened, SnapshotError> {
    let (path, header, body) = read_header(directory)?;
    let body = body.strip_suffix(b"\n").unwrap_or(&body);
    if digest(body) != header.digest {
        return Err(SnapshotError::Damaged(path));
    }
    let state: State = serde_json::from_slice(body).map_err(|source| SnapshotError::Parse {
        path: path.clone(),
        source,
    })?;
    let facts = header.machine;
    if state.vcpus.len() != usize::from(facts.vcpus) || state.pmu.is_some() != facts.vpmu {
        return Err(SnapshotError::Facts(path));
    }
    let expected = facts.memory_bytes().ok_or(SnapshotError::Facts(path))?;
    let path = directory.join(MEMORY);
    let failed = |source| SnapshotError::Read {
        path: path.clone(),
        source,
    };
    let memory = File::open(&path).map_err(failed)?;
    let found = memory.metadata().map_err(failed)?;
    if !found.is_file() || found.len() != expected {
        return Err(SnapshotError::Length {
            path,
            found: found.len(),
            expected,
        });
    }
    if memory::read_id(&memory, expected).map_err(failed)? != header.id {
        return Err(SnapshotError::OtherMemory(path));
    }
    Ok(Opened {
        facts,
        state,
        memory,
    })
}

/// The state file: its path, its first line, and the rest of it.
fn read_header(directory: &Path) -> Result<(PathBuf, Header, Vec<u8>), SnapshotError> {
    let path = directory.join(STATE);
    let failed = |source| SnapshotError::Read {
        path: path.clone(),
        source,
    };
    let file = File::open(&path).map_err(failed)?;
    let mut text = Vec::new();
    let read = file.take(MAX_STATE).read_to_end(&mut text);
    let length = read.map_err(failed)? as u64;
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
    let header: Header = serde_json::from_slice(line).map_err(|source| SnapshotError::Parse {
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
    Ok((path, header, body))
}

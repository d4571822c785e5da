//! The state file: two lines of JSON. Nothing in it is trusted.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::base::Base;
use super::id::Id;
use super::place::Place;
use super::{Facts, MEMORY, STATE, SnapshotError, State, memory};

const FORMAT: &str = "vpmu machine snapshot";
pub(crate) const VERSION: u32 = 2;
/// Maximum length in bytes of a state file's first line. The facts and a name need less.
const MAX_HEADER: u64 = 16 << 10;
/// Maximum number of bytes that are read from an untrusted state file. The state of the largest machine needs less.
const MAX_STATE: u64 = 64 << 20;

/// The part of the state file's first line that all versions have in common.
#[derive(Debug, Deserialize)]
struct Format {
    format: String,
    version: u32,
}

/// The first line of the state file.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Header {
    format: String,
    version: u32,
    arch: String,
    pub(crate) id: Id,
    pub(crate) machine: Facts,
    /// The base of a diff. `None` for a full snapshot.
    pub(crate) base: Option<Base>,
    /// SHA-256 of the second line.
    digest: String,
}

/// Reads `file`, a state file, from its start. Reads at most [`MAX_STATE`] bytes, which no valid file has.
///
/// # Errors
/// The host's error.
pub(crate) fn read(file: &File) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    let mut file = file;
    file.rewind()?;
    file.take(MAX_STATE).read_to_end(&mut text)?;
    Ok(text)
}

/// The text of a state file.
///
/// # Errors
/// The state cannot be written as JSON.
pub(crate) fn text(id: Id, facts: Facts, base: Option<Base>, state: &State) -> Result<String, serde_json::Error> {
    let body = serde_json::to_string(state)?;
    let header = Header {
        format: FORMAT.to_owned(),
        version: VERSION,
        arch: std::env::consts::ARCH.to_owned(),
        id,
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

/// A state file whose first line has been checked.
#[derive(Debug)]
pub(crate) struct StateFile {
    path: PathBuf,
    pub(crate) header: Header,
    /// The second line.
    body: Vec<u8>,
    /// SHA-256 of the whole file.
    pub(crate) digest: String,
}

impl StateFile {
    /// Reads the state file in `place`.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub(crate) fn read(place: &Place) -> Result<Self, SnapshotError> {
        let path = place.join(STATE);
        let (file, _) = place.file(STATE)?;
        match read(&file) {
            Ok(text) => Self::parse(path, text),
            Err(source) => Err(SnapshotError::Read { path, source }),
        }
    }

    /// Parses the first line of `text`, the contents of a state file. `path` is for messages.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub(crate) fn parse(path: PathBuf, mut text: Vec<u8>) -> Result<Self, SnapshotError> {
        let length = text.len() as u64;
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
            serde_json::from_slice(line).map_err(|source| SnapshotError::Parse { path: path.clone(), source })?;
        if header.arch != std::env::consts::ARCH {
            return Err(SnapshotError::Arch { path, saved: header.arch });
        }
        body.shrink_to_fit();
        Ok(Self { path, header, body, digest })
    }

    /// Parses the second line.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub(crate) fn state(&self) -> Result<State, SnapshotError> {
        let body = self.body.strip_suffix(b"\n").unwrap_or(&self.body);
        if digest(body) != self.header.digest {
            return Err(SnapshotError::Damaged(self.path.clone()));
        }
        let state: State =
            serde_json::from_slice(body).map_err(|source| SnapshotError::Parse { path: self.path.clone(), source })?;
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

    /// Opens the memory file in `place`, the directory of this state file.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub(crate) fn memory(&self, place: &Place) -> Result<File, SnapshotError> {
        let (memory, found) = place.file(MEMORY)?;
        let length = u64::try_from(found.st_size).unwrap_or_default();
        self.check_memory(place.join(MEMORY), &memory, length)?;
        Ok(memory)
    }

    /// Checks that `memory`, a file of `length` bytes, is the memory of this snapshot. `path` is for messages.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub(crate) fn check_memory(&self, path: PathBuf, memory: &File, length: u64) -> Result<(), SnapshotError> {
        let expected = self.memory_bytes()?;
        if length != expected {
            return Err(SnapshotError::Length { path, found: length, expected });
        }
        match memory::read_id(memory, expected) {
            Ok(Some(id)) if id == self.header.id => Ok(()),
            Ok(Some(_)) => Err(SnapshotError::OtherMemory(path)),
            Ok(None) => Err(SnapshotError::NoName(path)),
            Err(source) => Err(SnapshotError::Read { path, source }),
        }
    }
}

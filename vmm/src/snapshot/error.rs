//! The errors of reading snapshots.

use std::io;
use std::path::PathBuf;

use super::base::MAX_DIFFS;
use super::state_file::VERSION;
use crate::arch::state::StateError;

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
    /// A directory or a file of the snapshot is a symbolic link.
    #[error("{0} is a symbolic link: must be a directory that has the snapshot's files itself")]
    Link(PathBuf),
    /// A file of the snapshot is not a regular file.
    #[error("{0} is not a regular file")]
    NoFile(PathBuf),
    /// The directory belongs to another user.
    #[error(
        "{path} belongs to user {found}, not to {owners}: if you trust that user, give the machine this \
         user with --user, or 'chown' the directory and its files"
    )]
    Owner {
        /// The directory.
        path: PathBuf,
        /// Its owner.
        found: u32,
        /// The permitted owners.
        owners: String,
    },
    /// A file and its directory belong to different users.
    #[error(
        "{path} belongs to user {found}, but its directory to user {directory}: 'chown' the snapshot's \
         directory and files to one user, if you trust them"
    )]
    MixedOwners {
        /// The file.
        path: PathBuf,
        /// Its owner.
        found: u32,
        /// The owner of its directory.
        directory: u32,
    },
    /// The file is not a state file.
    #[error("{0} is not the state of a machine: must be in a directory that 'vmm ctl snapshot' wrote")]
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
    /// The memory file does not end with the name of a snapshot.
    #[error("{0} does not end with the name of a snapshot: it is damaged, or is not a machine's memory")]
    NoName(PathBuf),
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
    /// There is no base beside the diff.
    #[error(
        "the snapshot's base {0} does not exist: put the base there, beside the diff, or name its directory \
         with --base"
    )]
    NoBase(PathBuf),
    /// The directory of a base contains a different snapshot, or the base has changed.
    #[error("{0} is not the snapshot that the diff is based on, or has changed since")]
    OtherBase(PathBuf),
    /// `--base` names a snapshot that none of the diffs is based on.
    #[error("the snapshot is not based on {0}: leave this --base out")]
    UnusedBase(PathBuf),
    /// The name of a base's directory cannot be in a diff.
    #[error("the directory {0} has no name that a diff can refer to: rename it, so that its name is text")]
    BaseName(PathBuf),
    /// The base is already the last diff that is allowed on top of a full snapshot.
    #[error("{0} is the last of {MAX_DIFFS} possible diffs: make a snapshot without --diff")]
    TooManyDiffs(PathBuf),
    /// The facts describe an impossible machine.
    #[error("{0} describes an invalid machine")]
    Facts(PathBuf),
    /// The state is not that of the snapshot that was requested.
    #[error("{0} is not the snapshot that was requested: its {1} differs")]
    NotRequested(PathBuf, &'static str),
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

//! Landlock: which files the threads can still reach by a path.
//!
//! A seccomp filter sees the directory that a call names, but not the path: an absolute path ignores the directory, and
//! `..` leaves it. Landlock checks the files themselves.

use std::io;
use std::os::fd::BorrowedFd;

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, LandlockStatus, PathBeneath, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetError, Scope,
};

/// The newest version of Landlock whose restrictions are used where the host has it. Older hosts get those that they
/// have.
const NEWEST: ABI = ABI::V6;
/// The first version that keeps signals, those of a perf event included, within the restricted process.
pub(crate) const SCOPES_SIGNALS: u32 = 6;

/// The directories in which files may be created, renamed and removed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Directories<'a> {
    /// Recordings are created and renamed here.
    pub(super) recordings: Option<BorrowedFd<'a>>,
    /// The control socket is removed from here.
    pub(super) socket: Option<BorrowedFd<'a>>,
}

/// Restricts the calling thread, and the threads that it starts later, to `directories`. Files that are open stay
/// usable. Also refuses TCP, and signals to other processes. With `reads`, files can still be read everywhere. Returns
/// the version of the host's Landlock, if it has one.
///
/// # Errors
/// The error of a step.
pub(super) fn restrict(directories: Directories<'_>, reads: bool) -> Result<Option<u32>, RulesetError> {
    let handled = if reads { AccessFs::from_write(NEWEST) } else { AccessFs::from_all(NEWEST) };
    // A move to another directory stays refused.
    let recordings = AccessFs::ReadFile
        | AccessFs::WriteFile
        | AccessFs::Truncate
        | AccessFs::MakeReg
        // A link at the path of a recording is renamed.
        | AccessFs::MakeSym
        | AccessFs::RemoveFile;
    let socket = BitFlags::from(AccessFs::RemoveFile);
    let given = [(directories.recordings, recordings), (directories.socket, socket)];
    let given = given.into_iter().filter_map(|(directory, access)| {
        let rule = PathBeneath::new(directory?, access & handled);
        Some(Ok::<_, RulesetError>(rule))
    });
    let status = Ruleset::default()
        .handle_access(handled)?
        .handle_access(AccessNet::from_all(NEWEST))?
        .scope(Scope::from_all(NEWEST))?
        .create()?
        .add_rules(given)?
        .restrict_self()?;
    Ok(version(status.landlock))
}

/// The version of the host's Landlock, if it has one. Restricts nothing.
pub(crate) fn version_of_host() -> Option<u32> {
    // The library tells the version only to a restricted thread, so a short-lived thread restricts itself.
    let thread = std::thread::Builder::new().spawn(|| {
        let nothing = Directories { recordings: None, socket: None };
        restrict(nothing, true).ok().flatten()
    });
    let version = thread.map(std::thread::JoinHandle::join);
    version
        .unwrap_or_else(|error: io::Error| {
            log::warn!("cannot start a thread: {error}");
            Ok(None)
        })
        .unwrap_or_default()
}

fn version(status: LandlockStatus) -> Option<u32> {
    match status {
        LandlockStatus::Available { effective_abi, kernel_abi } => {
            let newer = kernel_abi.and_then(|version| u32::try_from(version).ok());
            Some(newer.unwrap_or(effective_abi as u32))
        }
        _ => None,
    }
}

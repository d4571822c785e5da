//! The root directory, the user, capabilities and limits of the process.

use std::fmt;
use std::io;
use std::path::Path;
use std::str::FromStr;

use rustix::fs::{Gid, Uid};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit};
use rustix::thread::{CapabilitySet, CapabilitySets};
use serde::{Deserialize, Deserializer};
use vpmu::Settings;

use super::{ConfineError, Options};

/// A numeric user and group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct User {
    uid: u32,
    gid: u32,
}

/// An invalid user and group.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("must be two numbers, as in 1000:1000")]
pub struct UserError;

impl FromStr for User {
    type Err = UserError;

    fn from_str(text: &str) -> Result<Self, UserError> {
        let number = |text: &str| {
            let digits = text.bytes().all(|byte| byte.is_ascii_digit());
            let number = text.parse().ok().filter(|_| digits);
            // The kernel treats the highest number as "no change".
            number.filter(|&number| number != u32::MAX)
        };
        let (uid, gid) = text.split_once(':').ok_or(UserError)?;
        match (number(uid), number(gid)) {
            (Some(uid), Some(gid)) => Ok(Self { uid, gid }),
            _ => Err(UserError),
        }
    }
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.uid, self.gid)
    }
}

impl<'de> Deserialize<'de> for User {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

impl User {
    /// The user and group ids, as arguments for system calls.
    pub(crate) fn ids(self) -> (Uid, Gid) {
        (Uid::from_raw(self.uid), Gid::from_raw(self.gid))
    }
}

/// The user and group of this process.
pub(super) fn own_user() -> User {
    User { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw() }
}

/// Checks that this process has the privileges that `options` require, so that the operator sees an error immediately,
/// and not only after the preparations for the boot.
pub(super) fn check(options: &Options) -> Result<(), ConfineError> {
    let held = rustix::thread::capabilities(None).map_err(failed)?.effective;
    if let Some(directory) = &options.chroot
        && !held.contains(CapabilitySet::SYS_CHROOT)
    {
        return Err(chroot_refused(directory, Errno::PERM));
    }
    match options.user {
        Some(user) if !held.contains(CapabilitySet::SETUID | CapabilitySet::SETGID) => {
            Err(user_refused(user, Errno::PERM))
        }
        _ => Ok(()),
    }
}

/// Descriptors that a machine needs, apart from its PMU: two for each vCPU (the vCPU itself and its statistics), and
/// [`OTHER_DESCRIPTORS`] for everything else.
const DESCRIPTORS_OF_VCPU: u64 = 2;
const OTHER_DESCRIPTORS: u64 = 64;

/// Descriptors that the host counters of sampling events must leave free: [`OWN_DESCRIPTORS`] for the machine, and
/// [`COUNTING_DESCRIPTORS`] for the counting events of each vCPU.
const OWN_DESCRIPTORS: u64 = 72;
const COUNTING_DESCRIPTORS: u64 = 8;
/// Maximum number of descriptors reserved for the operator's events. If the limit on open descriptors is low, only an
/// eighth of the limit is reserved.
const OPERATORS_DESCRIPTORS: u64 = 64;

/// Lowers the device's limit on open host counters so that it fits the limit on open descriptors, and some descriptors
/// remain for the operator's events. `asked` is true if the user gave the limit on host counters.
///
/// # Errors
/// [`ConfineError::Descriptors`] if the user gave the limit on host counters, and the limit on open descriptors allows
/// fewer.
pub(super) fn fit_descriptors(settings: &mut Settings, asked: bool) -> Result<(), ConfineError> {
    let Some(limit) = rustix::process::getrlimit(Resource::Nofile).maximum else {
        return Ok(());
    };
    let vcpus = u64::from(settings.vcpus) * (DESCRIPTORS_OF_VCPU + COUNTING_DESCRIPTORS);
    let operators = OPERATORS_DESCRIPTORS.min(limit / 8);
    let left = limit.saturating_sub(OWN_DESCRIPTORS + vcpus + operators);
    let most = &mut settings.limits.max_host_counters;
    if u64::from(*most) <= left {
        return Ok(());
    }
    if asked {
        return Err(ConfineError::Descriptors { limit, asked: *most, left });
    }
    *most = u32::try_from(left).unwrap_or(*most);
    log::info!("{limit} descriptors leave room for {most} host counters");
    Ok(())
}

/// Lowers the process's limits to what the machine needs. If permitted, also raises the limit on locked memory to what
/// the machine needs, because rings of host events count as locked memory, and `CAP_IPC_LOCK`, which would lift the
/// limit, is dropped.
pub(super) fn limit(vcpus: u8, settings: Option<&Settings>) -> Result<(), ConfineError> {
    let machine = OTHER_DESCRIPTORS + DESCRIPTORS_OF_VCPU * u64::from(vcpus);
    let descriptors = machine + settings.map_or(0, vpmu::confine::descriptors);
    lower(Resource::Nofile, descriptors).map_err(|e| ConfineError::Limit("descriptors", e))?;
    // `madvise` excludes guest memory and the window from core dumps, but does not exclude copies of their contents in
    // the VMM's own memory.
    no_core_dump().map_err(|e| ConfineError::Limit("core dumps", e))?;
    let locked = settings.map_or(0, vpmu::confine::locked_memory);
    let set = match set(Resource::Memlock, locked) {
        // Only a privileged process may raise the limit.
        Err(Errno::PERM) => lower(Resource::Memlock, locked),
        other => other.map_err(io::Error::from),
    };
    set.map_err(|e| ConfineError::Limit("locked memory", e))
}

/// Turns core dumps of this process off.
pub(super) fn no_core_dump() -> io::Result<()> {
    lower(Resource::Core, 0)
}

/// Sets the limit to `most`, or to the hard limit if that is lower.
fn lower(resource: Resource, most: u64) -> io::Result<()> {
    let now = rustix::process::getrlimit(resource);
    Ok(set(resource, now.maximum.map_or(most, |allowed| allowed.min(most)))?)
}

fn set(resource: Resource, value: u64) -> Result<(), Errno> {
    let limit = Rlimit { current: Some(value), maximum: Some(value) };
    rustix::process::setrlimit(resource, limit)
}

/// Changes the root directory and the user of the calling thread, if `options` name them. Drops the thread's
/// capabilities except those in `kept` that it has. Neither this thread nor the threads that it starts later can undo
/// this. Returns the names of the remaining capabilities.
pub(super) fn drop_all(options: &Options, kept: CapabilitySet) -> Result<Vec<&'static str>, ConfineError> {
    if let Some(directory) = &options.chroot {
        change_root(directory)?;
    }
    let left = rustix::thread::capabilities(None).map_err(failed)?.permitted & kept;
    empty_bounding_set().map_err(failed)?;
    if let Some(user) = options.user {
        become_user(user)?;
    }
    keep_only(left).map_err(failed)?;
    let names = [(CapabilitySet::PERFMON, "perfmon"), (CapabilitySet::SYS_PTRACE, "sys_ptrace")];
    Ok(names.into_iter().filter(|(capability, _)| left.contains(*capability)).map(|(_, name)| name).collect())
}

/// Drops all capabilities of the calling thread except those of `left` that it has, and keeps programs that it starts
/// from gaining any.
pub(super) fn keep_only(left: CapabilitySet) -> Result<(), Errno> {
    let left = rustix::thread::capabilities(None)?.permitted & left;
    let sets = CapabilitySets { effective: left, permitted: left, inheritable: CapabilitySet::empty() };
    rustix::thread::set_capabilities(None, sets)?;
    rustix::thread::clear_ambient_capability_set()?;
    rustix::thread::set_no_new_privs(true)
}

fn failed(error: Errno) -> ConfineError {
    ConfineError::Privileges(error.into())
}

/// Uses `chroot` instead of a new mount namespace, because `pivot_root` does not work on an initramfs. To escape, the
/// process would need `CAP_SYS_CHROOT`, which is dropped, or an open directory outside the new root. The open
/// directories of recordings and of the control socket can be outside. Relative to these directories, the filters only
/// allow the process to create, rename and remove files, and `..` still leaves them. Landlock keeps the process inside
/// ([`files`](super::files)).
fn change_root(directory: &Path) -> Result<(), ConfineError> {
    let refused = |error| chroot_refused(directory, error);
    rustix::process::chroot(directory).map_err(refused)?;
    rustix::process::chdir("/").map_err(refused)
}

fn become_user(user: User) -> Result<(), ConfineError> {
    let refused = |error| user_refused(user, error);
    let (uid, gid) = user.ids();
    rustix::thread::set_thread_groups(&[]).map_err(refused)?;
    rustix::thread::set_thread_res_gid(gid, gid, gid).map_err(refused)?;
    // Keep the permitted capabilities when the user changes. The caller reduces them afterwards.
    rustix::thread::set_keep_capabilities(true).map_err(refused)?;
    rustix::thread::set_thread_res_uid(uid, uid, uid).map_err(refused)?;
    rustix::thread::set_keep_capabilities(false).map_err(refused)
}

fn chroot_refused(directory: &Path, error: Errno) -> ConfineError {
    ConfineError::Chroot {
        directory: directory.to_owned(),
        remedy: match error {
            Errno::PERM => "start as root to use --chroot",
            _ => "--chroot must be a directory",
        },
        source: error.into(),
    }
}

fn user_refused(user: User, error: Errno) -> ConfineError {
    ConfineError::User {
        user,
        remedy: match error {
            Errno::PERM => "start as root to use --user",
            _ => "--user must be valid in this user namespace",
        },
        source: error.into(),
    }
}

/// Empties the capability bounding set, so that programs started by this process cannot gain capabilities. This
/// requires `CAP_SETPCAP`. If the process lacks it, `no_new_privs` has the same effect.
fn empty_bounding_set() -> Result<(), Errno> {
    for number in 0..u64::BITS {
        let one = CapabilitySet::from_bits_retain(1 << number);
        match rustix::thread::remove_capability_from_bounding_set(one) {
            Ok(()) => {}
            Err(Errno::PERM) => return Ok(()),
            // This kernel has no capability with this number.
            Err(Errno::INVAL) if number > 0 => return Ok(()),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_is_two_numbers() {
        let user = User { uid: 7, gid: 100 };
        assert_eq!("7:100".parse(), Ok(user));
        assert_eq!(user.to_string(), "7:100");
        for wrong in ["", "7", "7:", ":7", "a:b", "-1:1", "+1:1", "1:1:1", "4294967295:1"] {
            assert_eq!(wrong.parse::<User>(), Err(UserError), "{wrong}");
        }
    }
}

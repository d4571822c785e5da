//! Reasons why a host refuses counters. The operator gets each reason as text with a remedy, and the guest gets it as a
//! number.

use std::io;

use crate::abi::{
    REFUSED_ABSENT, REFUSED_DESCRIPTORS, REFUSED_IN_USE, REFUSED_MEDIATED, REFUSED_NOT, REFUSED_OTHER,
    REFUSED_PERMISSION, REFUSED_POLICY, REFUSED_SEVERAL_PMUS,
};

/// The highest `REFUSED_*` number.
pub(crate) const LAST: u8 = REFUSED_MEDIATED;

/// Why the host refuses a counter. The text names a remedy for the operator, if there is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum Refusal {
    /// The host's counters are in exclusive use, for example by a VM with a mediated PMU.
    #[error(
        "the host's counters are in exclusive use, for example by a VM with a mediated PMU: end that VM, or run \
         this one on another host"
    )]
    InUse,
    /// The process lacks a permission.
    #[error(
        "no permission: set kernel.perf_event_paranoid=1, or give this process CAP_PERFMON; if only rings fail, \
         raise kernel.perf_event_mlock_kb"
    )]
    Permission,
    /// The process has reached its limit of file descriptors, or the host has reached its limit of open files.
    #[error("no file descriptor is left: raise 'ulimit -n' or fs.file-max")]
    Descriptors,
    /// The host has no such event, or no PMU.
    #[error("the host has no such event, or no PMU")]
    Absent,
    /// The operator has disabled events of this kind.
    #[error("disabled by the operator")]
    Policy,
    /// The CPUs that the process may run on belong to several core PMUs, or some of these CPUs belong to no core PMU.
    #[error(
        "the host has several core PMUs, or CPUs without one: keep the VMM on the CPUs of one PMU, for \
         example with taskset"
    )]
    SeveralPmus,
    /// The operator reserves the hardware counters for VMs with a mediated PMU, because such a VM cannot start
    /// while a hardware event is open.
    #[error(
        "the hardware counters are reserved for VMs with a mediated PMU, because Linux does not start such a VM \
         while a hardware event is open"
    )]
    Mediated,
    /// Any other reason.
    #[error("see the host's kernel log")]
    Other,
}

impl Refusal {
    /// Returns the reason why `perf_event_open(2)` failed with `error` for an event that its PMU supports.
    #[must_use]
    pub fn of(error: &io::Error) -> Self {
        match error.raw_os_error() {
            // Linux returns `EOPNOTSUPP` while a VM with a mediated PMU runs.
            Some(libc::EBUSY | libc::EOPNOTSUPP) => Self::InUse,
            Some(libc::EACCES | libc::EPERM) => Self::Permission,
            Some(libc::EMFILE | libc::ENFILE) => Self::Descriptors,
            Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => Self::Absent,
            _ => Self::Other,
        }
    }

    /// Returns the wire format of `refusal`, which is one of `REFUSED_*`. `None` means that the host does not refuse
    /// the counter.
    pub(crate) fn wire(refusal: Option<Self>) -> u8 {
        match refusal {
            None => REFUSED_NOT,
            Some(Self::InUse) => REFUSED_IN_USE,
            Some(Self::Permission) => REFUSED_PERMISSION,
            Some(Self::Descriptors) => REFUSED_DESCRIPTORS,
            Some(Self::Absent) => REFUSED_ABSENT,
            Some(Self::Policy) => REFUSED_POLICY,
            Some(Self::Mediated) => REFUSED_MEDIATED,
            Some(Self::SeveralPmus) => REFUSED_SEVERAL_PMUS,
            Some(Self::Other) => REFUSED_OTHER,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errno_of_the_host_has_its_reason() {
        for (errno, refusal) in [
            (libc::EBUSY, Refusal::InUse),
            (libc::EOPNOTSUPP, Refusal::InUse),
            (libc::EACCES, Refusal::Permission),
            (libc::EPERM, Refusal::Permission),
            (libc::EMFILE, Refusal::Descriptors),
            (libc::ENFILE, Refusal::Descriptors),
            (libc::ENOENT, Refusal::Absent),
            (libc::ENODEV, Refusal::Absent),
            (libc::EINVAL, Refusal::Other),
        ] {
            let error = io::Error::from_raw_os_error(errno);
            assert_eq!(Refusal::of(&error), refusal, "{error}");
        }
        let without = io::Error::other("no errno");
        assert_eq!(Refusal::of(&without), Refusal::Other);
    }
}

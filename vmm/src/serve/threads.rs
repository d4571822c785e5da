//! The threads of a VMM's vCPUs, found by the names that the VMM gives them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::process::Pid;

/// Errors from finding the threads.
#[derive(Debug, thiserror::Error)]
pub enum ThreadsError {
    /// The process has ended, or this process may not see its threads.
    #[error(
        "cannot list the threads of process {process}: run the daemon in the VMM's PID namespace, as its user or as root"
    )]
    List {
        /// The VMM's process.
        process: i32,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
    /// QEMU runs all vCPUs on one thread.
    #[error("QEMU runs all vCPUs on one thread: start it with -accel tcg,thread=multi, or with KVM")]
    OneForAll,
    /// No thread has the name of this vCPU's.
    #[error(
        "process {process} has no thread for vCPU {vcpu}: --vcpus must be the VMM's number of vCPUs, and QEMU must \
         name its threads (-name NAME,debug-threads=on)"
    )]
    Missing {
        /// The VMM's process.
        process: i32,
        /// The vCPU.
        vcpu: u32,
    },
    /// Two threads have the name of this vCPU's.
    #[error("process {process} has two threads named like that of vCPU {vcpu}: run one VM in each process")]
    Twice {
        /// The VMM's process.
        process: i32,
        /// The vCPU.
        vcpu: u32,
    },
    /// There are more vCPUs than queues.
    #[error("process {process} has a thread for vCPU {vcpu}: --vcpus must be the VMM's number of vCPUs")]
    Beyond {
        /// The VMM's process.
        process: i32,
        /// The vCPU.
        vcpu: u32,
    },
}

/// The VMM, and how it runs its vCPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Vmm {
    QemuKvm,
    /// QEMU without KVM.
    QemuTcg,
    CloudHypervisor,
}

/// The threads of all vCPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct VcpuThreads {
    pub(super) process: i32,
    pub(super) vmm: Vmm,
    /// The thread of each vCPU.
    pub(super) ids: Vec<i32>,
}

/// A thread's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Named {
    Vcpu(u32, Vmm),
    AllVcpus,
    Other,
}

impl From<&str> for Named {
    /// QEMU names the threads `CPU 0/KVM` and `CPU 0/TCG`, or `ALL CPUs/TCG`. Cloud Hypervisor names them `vcpu0`.
    fn from(name: &str) -> Self {
        let qemu = name.strip_prefix("CPU ").and_then(|rest| rest.split_once('/'));
        let named = match qemu {
            Some((number, "KVM")) => Some((number, Vmm::QemuKvm)),
            Some((number, "TCG")) => Some((number, Vmm::QemuTcg)),
            Some(_) => None,
            None if name.starts_with("ALL CPUs") => return Self::AllVcpus,
            None => name.strip_prefix("vcpu").map(|number| (number, Vmm::CloudHypervisor)),
        };
        let number = |text: &str| text.parse().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()));
        named.and_then(|(text, by)| Some(Self::Vcpu(number(text)?, by))).unwrap_or(Self::Other)
    }
}

impl VcpuThreads {
    /// Finds the threads of the `vcpus` vCPUs of `process`.
    ///
    /// # Errors
    /// [`ThreadsError`].
    pub(super) fn find(process: Pid, vcpus: u32) -> Result<Self, ThreadsError> {
        let process = process.as_raw_nonzero().get();
        let names = names(process).map_err(|source| ThreadsError::List { process, source })?;
        let names = names.iter().map(|(id, name)| (*id, name.as_str()));
        Self::among(process, vcpus, names)
    }

    fn among<'a>(process: i32, vcpus: u32, names: impl Iterator<Item = (i32, &'a str)>) -> Result<Self, ThreadsError> {
        let mut ids = vec![None; vcpus as usize];
        let mut vmm = Vmm::QemuKvm;
        for (id, name) in names {
            let (vcpu, by) = match Named::from(name) {
                Named::Vcpu(vcpu, by) => (vcpu, by),
                Named::AllVcpus => return Err(ThreadsError::OneForAll),
                Named::Other => continue,
            };
            let place = ids.get_mut(vcpu as usize).ok_or(ThreadsError::Beyond { process, vcpu })?;
            if place.replace(id).is_some() {
                return Err(ThreadsError::Twice { process, vcpu });
            }
            vmm = by;
        }
        let ids = (0..).zip(ids).map(|(vcpu, id)| id.ok_or(ThreadsError::Missing { process, vcpu }));
        Ok(Self { process, vmm, ids: ids.collect::<Result<_, _>>()? })
    }

    /// The file of a vCPU's thread in `/proc`.
    pub(super) fn file(&self, thread: i32, name: &str) -> PathBuf {
        tasks(self.process).join(thread.to_string()).join(name)
    }
}

fn tasks(process: i32) -> PathBuf {
    Path::new("/proc").join(process.to_string()).join("task")
}

/// The ids and names of a process's threads.
fn names(process: i32) -> io::Result<Vec<(i32, String)>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(tasks(process))? {
        let entry = entry?;
        let Ok(id) = entry.file_name().to_string_lossy().parse() else { continue };
        // A thread may have ended since the directory was read.
        if let Ok(name) = fs::read(entry.path().join("comm")) {
            names.push((id, String::from_utf8_lossy(&name).trim_end().to_owned()));
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn among(vcpus: u32, names: &[(i32, &str)]) -> Result<VcpuThreads, ThreadsError> {
        VcpuThreads::among(7, vcpus, names.iter().copied())
    }

    #[test]
    fn threads_are_in_the_order_of_their_vcpus() {
        let qemu = [(7, "qemu-system-x86"), (8, "call_rcu"), (12, "CPU 1/KVM"), (11, "CPU 0/KVM")];
        let found = among(2, &qemu).expect("found");
        assert_eq!((found.ids, found.vmm), (vec![11, 12], Vmm::QemuKvm));
        let tcg = among(1, &[(7, "main"), (9, "CPU 0/TCG")]).expect("found");
        assert_eq!(tcg.vmm, Vmm::QemuTcg);
        let cloud = [(7, "cloud-hypervisor"), (9, "vcpu0"), (8, "vcpu1"), (10, "vcpu-x")];
        let found = among(2, &cloud).expect("found");
        assert_eq!((found.ids, found.vmm), (vec![9, 8], Vmm::CloudHypervisor));
    }

    #[test]
    fn threads_that_cannot_be_told_apart_are_errors() {
        let one = (8, "CPU 0/KVM");
        assert!(matches!(among(2, &[one]), Err(ThreadsError::Missing { vcpu: 1, .. })));
        assert!(matches!(among(1, &[one, (9, "CPU 0/KVM")]), Err(ThreadsError::Twice { vcpu: 0, .. })));
        assert!(matches!(among(1, &[one, (9, "CPU 1/KVM")]), Err(ThreadsError::Beyond { vcpu: 1, .. })));
        assert!(matches!(among(1, &[(8, "ALL CPUs/TCG")]), Err(ThreadsError::OneForAll)));
        assert!(matches!(among(1, &[(8, "CPU +0/KVM"), (9, "CPU x/TCG")]), Err(ThreadsError::Missing { .. })));
    }

    #[test]
    fn own_threads_have_names() {
        let names = names(std::process::id().cast_signed()).expect("own threads");
        assert!(names.iter().any(|(_, name)| !name.is_empty()));
    }
}

//! Reads facts from the VMM's process: KVM's statistics of its vCPUs, the offsets of their TSCs, and which of its sockets is
//! connected to this process.

use std::fs;
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{getpeername, getsockname};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags};
use vpmu_kvm::Stats;

use crate::ctl;

/// KVM's directories about its VMs. Only root can read them.
const DEBUGFS: &str = "/sys/kernel/debug/kvm";

/// The name by which `/proc` lists a descriptor of a vCPU's statistics.
fn statistics_name(vcpu: usize) -> String {
    format!("anon_inode:kvm-vcpu-stats:{vcpu}")
}

/// Returns the statistics of each of the `vcpus` vCPUs of `process`, which must have their descriptors open, as QEMU does.
/// `None` for a vCPU whose descriptor is not there, or may not be taken.
pub(super) fn statistics(process: Pid, vcpus: usize) -> Vec<Option<Stats>> {
    let open = descriptors(process).unwrap_or_else(|error| {
        log::info!("no events of KVM's statistics: the VMM's descriptors cannot be listed: {error}");
        Vec::new()
    });
    let taken = (0..vcpus).map(|vcpu| {
        let name = statistics_name(vcpu);
        let (fd, _) = open.iter().find(|(_, target)| target.as_os_str() == name.as_str())?;
        let stats = take(process, *fd).map_err(io::Error::from).and_then(|file| Stats::from_file(file.into()));
        stats.inspect_err(|error| log::info!("no statistics of vCPU {vcpu}: {error}")).ok()
    });
    taken.collect()
}

/// Returns the descriptors by which `process` has the other end of `stream`, a connection to a socket of this process. A
/// process that has connected to several devices has such descriptors of each.
///
/// # Errors
/// The host's error: taking another process's descriptors takes the same user, or `CAP_SYS_PTRACE`.
pub(super) fn ends(process: Pid, stream: &UnixStream) -> io::Result<Vec<RawFd>> {
    let own = rustix::process::getpid().as_raw_nonzero().get();
    let name = getsockname(stream)?;
    let mut ends = Vec::new();
    for (fd, target) in descriptors(process)? {
        if !target.to_string_lossy().starts_with("socket:") {
            continue;
        }
        let taken = match take(process, fd) {
            Ok(taken) => UnixStream::from(taken),
            // It has been closed since it was listed.
            Err(Errno::BADF) => continue,
            Err(error) => return Err(error.into()),
        };
        // The name alone may be relative to a directory, and the process may have another connection to this one.
        let is_connected = getpeername(&taken).is_ok_and(|peer| peer.as_ref() == Some(&name));
        if is_connected && ctl::peer(&taken).is_ok_and(|peer| peer.pid == own) {
            ends.push(fd);
        }
    }
    if ends.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, "the VMM's process does not have the connection open"));
    }
    Ok(ends)
}

/// The descriptors that `process` has open, each with what `/proc` says of it.
fn descriptors(process: Pid) -> io::Result<Vec<(RawFd, PathBuf)>> {
    let directory = Path::new("/proc").join(process.as_raw_nonzero().to_string()).join("fd");
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        if let Ok(fd) = entry.file_name().to_string_lossy().parse() {
            found.push((fd, target));
        }
    }
    Ok(found)
}

fn take(process: Pid, fd: RawFd) -> Result<OwnedFd, Errno> {
    let process = rustix::process::pidfd_open(process, PidfdFlags::empty())?;
    rustix::process::pidfd_getfd(&process, fd, PidfdGetfdFlags::empty())
}

/// The guest's TSC minus the host's TSC on `vcpu` of `process`. `None` if KVM does not tell.
pub(super) fn tsc_offset(process: Pid, vcpu: usize) -> Option<u64> {
    let threads = Path::new("/proc").join(process.as_raw_nonzero().to_string()).join("task");
    offset_in(Path::new(DEBUGFS), &threads, vcpu)
}

/// KVM names a VM's directory by the thread that created the VM, `-`, and a descriptor. `threads` has an entry for each
/// thread of the process.
fn offset_in(debugfs: &Path, threads: &Path, vcpu: usize) -> Option<u64> {
    let entries = fs::read_dir(debugfs).ok()?.flatten();
    let mut vms = entries.filter(|entry| {
        let name = entry.file_name();
        let creator = name.to_str().and_then(|name| name.split_once('-')).map(|(thread, _)| thread);
        creator.is_some_and(|thread| thread.parse::<u32>().is_ok() && threads.join(thread).exists())
    });
    // A process with two VMs does not tell which of them has the device.
    let (vm, None) = (vms.next()?, vms.next()) else { return None };
    let text = fs::read_to_string(vm.path().join(format!("vcpu{vcpu}")).join("tsc-offset")).ok()?;
    text.trim().parse().ok().map(i64::cast_unsigned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offset_is_that_of_the_processes_only_vm() {
        let directory = tempfile::tempdir().expect("a directory");
        let vm = |name: &str, offset: &str| {
            let vcpu = directory.path().join(name).join("vcpu0");
            fs::create_dir_all(&vcpu).expect("a directory");
            fs::write(vcpu.join("tsc-offset"), offset).expect("written");
        };
        let threads = |process: &str| directory.path().join(process);
        for thread in ["process-6/6", "process-6/7", "process-8/8"] {
            fs::create_dir_all(threads(thread)).expect("a directory");
        }
        vm("kvm/70-11", "5\n");
        vm("kvm/7-12", "-17\n");
        let offset = |process, vcpu| offset_in(&directory.path().join("kvm"), &threads(process), vcpu);
        assert_eq!(offset("process-6", 0), Some((-17_i64).cast_unsigned()), "a thread of the process has created it");
        assert_eq!((offset("process-6", 1), offset("process-8", 0)), (None, None));
        vm("kvm/6-13", "1\n");
        assert_eq!(offset("process-6", 0), None, "two VMs");
    }

    #[test]
    fn process_without_vcpus_has_no_statistics() {
        let own = rustix::process::getpid();
        assert!(statistics(own, 2).iter().all(Option::is_none));
    }
}

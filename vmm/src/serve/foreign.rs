//! KVM's data about the vCPUs of another process: their statistics, and the offsets of their TSCs.

use std::fs::{self, File};
use std::io;
use std::os::fd::RawFd;
use std::path::Path;

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags};
use vpmu_kvm::Stats;

/// KVM's directories about its VMs. Only root can read them.
const DEBUGFS: &str = "/sys/kernel/debug/kvm";

/// The name by which `/proc` lists a descriptor of a vCPU's statistics.
fn statistics_name(vcpu: usize) -> String {
    format!("anon_inode:kvm-vcpu-stats:{vcpu}")
}

/// Returns the statistics of each of the `vcpus` vCPUs of `process`, which must have their descriptors open, as QEMU does.
/// `None` for a vCPU whose descriptor is not there, or may not be taken.
pub(super) fn statistics(process: Pid, vcpus: usize) -> Vec<Option<Stats>> {
    let found = descriptors(process, vcpus).unwrap_or_else(|error| {
        log::info!("no events of KVM's statistics: the VMM's descriptors cannot be listed: {error}");
        Vec::new()
    });
    let taken = (0..vcpus).map(|vcpu| {
        let (_, fd) = *found.iter().find(|(of, _)| *of == vcpu)?;
        let stats = take(process, fd).and_then(Stats::from_file);
        stats.inspect_err(|error| log::info!("no statistics of vCPU {vcpu}: {error}")).ok()
    });
    taken.collect()
}

/// The descriptors of statistics that `process` has open, each with its vCPU.
fn descriptors(process: Pid, vcpus: usize) -> io::Result<Vec<(usize, RawFd)>> {
    let directory = Path::new("/proc").join(process.as_raw_nonzero().to_string()).join("fd");
    let names: Vec<String> = (0..vcpus).map(statistics_name).collect();
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        let vcpu = names.iter().position(|name| target.as_os_str() == name.as_str());
        if let (Some(vcpu), Ok(fd)) = (vcpu, entry.file_name().to_string_lossy().parse()) {
            found.push((vcpu, fd));
        }
    }
    Ok(found)
}

fn take(process: Pid, fd: RawFd) -> io::Result<File> {
    let process = rustix::process::pidfd_open(process, PidfdFlags::empty())?;
    let taken = rustix::process::pidfd_getfd(&process, fd, PidfdGetfdFlags::empty())?;
    Ok(taken.into())
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

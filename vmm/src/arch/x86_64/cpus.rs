//! Creates the vCPUs of a VM, and sets their initial state.

use kvm_bindings::KVM_MAX_CPUID_ENTRIES;
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};

use super::{clock, cpuid, regs};
use crate::kvm::KvmError;
use crate::machine::Machine;

/// Errors from creating the vCPUs.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// KVM returns an error.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// KVM refuses a vCPU's initial state.
    #[error("cannot set up a vCPU")]
    Registers(#[from] regs::RegisterError),
    /// `--guest-pmu` was given, but KVM has no PMU for guests.
    #[error("--guest-pmu: this KVM has no PMU for guests: omit it, or load kvm-intel or kvm-amd with enable_pmu=1")]
    NoPmu,
    /// There are more CPUID leaves than KVM's interface can hold.
    #[error("cannot set up a vCPU's CPUID")]
    Cpuid(#[source] vmm_sys_util::fam::Error),
}

/// The vCPUs of a VM, and their interrupt controllers.
#[derive(Debug)]
pub struct Cpus {
    /// The vCPUs, by number.
    pub vcpus: Vec<VcpuFd>,
    /// Their interrupt controllers.
    pub controller: Controller,
}

/// The interrupt controllers of a VM. This type is empty: the ioctls of these controllers go to the VM's own file
/// descriptor.
#[derive(Debug)]
pub struct Controller(());

/// Creates the vCPUs of `machine` in `vm`. The memory of `vm` must be set up already.
///
/// # Errors
/// [`CpuError`].
pub fn create(kvm: &Kvm, vm: &VmFd, machine: &Machine) -> Result<Cpus, CpuError> {
    let supported = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(KvmError::refused("report its supported CPUID leaves"))?;
    if machine.pmu && !cpuid::has_pmu(&supported) {
        return Err(CpuError::NoPmu);
    }
    let tsc_deadline = kvm.check_extension(Cap::TscDeadlineTimer);
    let vcpus = (0..machine.vcpus)
        .map(|index| {
            let fd = vm.create_vcpu(u64::from(index)).map_err(KvmError::refused("create a vCPU"))?;
            let tsc_khz = clock::khz(&fd)?;
            let cpu = cpuid::Cpu { index, count: machine.vcpus, tsc_khz, tsc_deadline, pmu: machine.pmu };
            let leaves = cpuid::leaves(&supported, &cpu).map_err(CpuError::Cpuid)?;
            fd.set_cpuid2(&leaves).map_err(KvmError::refused("set a vCPU's CPUID leaves"))?;
            regs::prepare(&fd)?;
            Ok(fd)
        })
        .collect::<Result<_, CpuError>>()?;
    Ok(Cpus { vcpus, controller: Controller(()) })
}

/// Makes `first` the boot vCPU, which starts at `entry`.
///
/// # Errors
/// [`CpuError::Registers`].
pub fn enter(first: &VcpuFd, entry: u64) -> Result<(), CpuError> {
    Ok(regs::enter(first, entry)?)
}

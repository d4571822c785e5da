//! KVM as this VMM needs it: opened, checked, and a VM with its interrupt controllers.

use kvm_bindings::{
    CpuId, KVM_API_VERSION, KVM_CAP_PMU_CAPABILITY, KVM_CAP_SYNC_REGS, KVM_MAX_CPUID_ENTRIES,
    KVM_PMU_CAP_DISABLE, KVM_SYNC_X86_REGS, KVM_SYNC_X86_SREGS, kvm_enable_cap,
};
use kvm_ioctls::{Cap, Kvm, VmFd};

use crate::arch::layout;

/// Why there is no VM to be had.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    /// The device is not there.
    #[error(
        "there is no /dev/kvm: enable virtualisation in the firmware and load kvm-intel or kvm-amd; 'vmm check' tells more"
    )]
    Missing,
    /// It is there, but not for us.
    #[error(
        "no permission for /dev/kvm: run as root or join its group with 'usermod -aG kvm $USER'"
    )]
    Permission,
    /// It cannot be opened for another reason.
    #[error("cannot open /dev/kvm")]
    Open(#[source] kvm_ioctls::Error),
    /// Not the one interface that there has been since 2007.
    #[error("/dev/kvm speaks version {0} of its interface, not {KVM_API_VERSION}")]
    Version(i32),
    /// This KVM lacks something without which nothing works here.
    #[error("this KVM lacks {0}: a host kernel of version 5.10 or later has it")]
    Lacks(&'static str),
    /// A number of vCPUs that this host does not run.
    #[error("{asked} vCPUs are too many: this KVM runs at most {most}")]
    TooManyVcpus {
        /// What the configuration says.
        asked: u8,
        /// What KVM says.
        most: usize,
    },
    /// KVM refuses a step.
    #[error("KVM cannot {what}")]
    Refused {
        /// Which step.
        what: &'static str,
        /// KVM's reason.
        #[source]
        source: kvm_ioctls::Error,
    },
}

impl KvmError {
    /// Why /dev/kvm does not open, with the remedy where the reason is a known one.
    fn open(source: kvm_ioctls::Error) -> Self {
        match source.errno() {
            libc::ENOENT | libc::ENODEV | libc::ENXIO => Self::Missing,
            libc::EACCES | libc::EPERM => Self::Permission,
            _ => Self::Open(source),
        }
    }

    /// For `map_err`: KVM refuses to do `what`.
    pub fn refused(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> Self {
        move |source| Self::Refused { what, source }
    }
}

const NEEDED: [(Cap, &str); 7] = [
    (Cap::UserMemory, "user memory"),
    (Cap::SetTssAddr, "the TSS address"),
    (Cap::Irqchip, "the in-kernel interrupt controllers"),
    (Cap::Irqfd, "irqfd"),
    (Cap::Ioeventfd, "ioeventfd"),
    (Cap::ExtCpuid, "CPUID tables"),
    (Cap::ImmediateExit, "immediate exit"),
];

/// Opens /dev/kvm and checks that it can carry `vcpus` vCPUs of ours.
///
/// # Errors
/// [`KvmError`], each with its remedy where there is one.
pub fn open(vcpus: u8) -> Result<Kvm, KvmError> {
    let kvm = Kvm::new().map_err(KvmError::open)?;
    let version = kvm.get_api_version();
    if u32::try_from(version) != Ok(KVM_API_VERSION) {
        return Err(KvmError::Version(version));
    }
    if let Some((_, what)) = NEEDED.iter().find(|(cap, _)| !kvm.check_extension(*cap)) {
        return Err(KvmError::Lacks(what));
    }
    let most = kvm.get_max_vcpus();
    if usize::from(vcpus) > most {
        return Err(KvmError::TooManyVcpus { asked: vcpus, most });
    }
    Ok(kvm)
}

/// A VM with its interrupt controllers and without a hardware PMU.
///
/// # Errors
/// [`KvmError::Refused`].
pub fn create(kvm: &Kvm) -> Result<VmFd, KvmError> {
    let vm = kvm.create_vm().map_err(KvmError::refused("create a VM"))?;
    vm.set_identity_map_address(layout::KVM_IDENTITY_MAP)
        .map_err(KvmError::refused("place its identity map"))?;
    vm.set_tss_address(layout::KVM_TSS)
        .map_err(KvmError::refused("place its TSS"))?;
    vm.create_irq_chip()
        .map_err(KvmError::refused("create interrupt controllers"))?;
    let capability = kvm.check_extension_raw(u64::from(KVM_CAP_PMU_CAPABILITY));
    if u32::try_from(capability).is_ok_and(|bits| bits & KVM_PMU_CAP_DISABLE != 0) {
        let mut disable = kvm_enable_cap {
            cap: KVM_CAP_PMU_CAPABILITY,
            ..Default::default()
        };
        disable.args[0] = u64::from(KVM_PMU_CAP_DISABLE);
        vm.enable_cap(&disable)
            .map_err(KvmError::refused("switch its hardware PMU off"))?;
    }
    Ok(vm)
}

/// What KVM offers a guest's processor to say of itself.
///
/// # Errors
/// [`KvmError::Refused`].
pub fn supported_cpuid(kvm: &Kvm) -> Result<CpuId, KvmError> {
    kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(KvmError::refused("tell what processors it offers"))
}

/// Whether KVM can leave registers in the run page.
#[must_use]
pub fn syncs_registers(kvm: &Kvm) -> bool {
    let sets = kvm.check_extension_raw(u64::from(KVM_CAP_SYNC_REGS));
    let needed = KVM_SYNC_X86_REGS | KVM_SYNC_X86_SREGS;
    u32::try_from(sets).is_ok_and(|sets| sets & needed == needed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_does_not_open_comes_with_its_remedy() {
        let told = |errno| KvmError::open(kvm_ioctls::Error::new(errno)).to_string();
        assert!(told(libc::ENOENT).contains("load kvm-intel or kvm-amd"));
        assert!(told(libc::EACCES).contains("usermod -aG kvm"));
        assert_eq!(told(libc::EMFILE), "cannot open /dev/kvm");
    }
}

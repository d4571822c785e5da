//! Exits that only this architecture has: accesses that KVM does not decode.

use kvm_bindings::{KVM_CAP_ARM_NISV_TO_USER, KVM_EXIT_ARM_NISV, kvm_enable_cap, kvm_vcpu_events};
use kvm_ioctls::{VcpuExit, VcpuFd, VmFd};
use vpmu::Access;

use crate::bus::{Bus, Caller};

/// Handles nothing and returns `exit`, because this architecture has no exits for ports.
pub(crate) fn serve<'a>(
    exit: VcpuExit<'a>,
    _access: Option<Access>,
    _caller: &mut Caller<'_>,
    _ports: &Bus,
) -> Option<VcpuExit<'a>> {
    Some(exit)
}

/// Makes KVM pass [undecoded](is_undecoded) accesses to the VMM. If this KVM cannot do so, `KVM_RUN` fails when the
/// guest makes such an access.
pub(crate) fn ask_for_undecoded(vm: &VmFd) {
    let capability = kvm_enable_cap { cap: KVM_CAP_ARM_NISV_TO_USER, ..Default::default() };
    if let Err(error) = vm.enable_cap(&capability) {
        log::warn!("KVM cannot pass undecoded accesses to the VMM ({error}): such an access ends the machine");
    }
}

/// Whether the guest made an access outside guest memory for which the processor provided no valid syndrome. This is so
/// if the instruction uses a register pair, a vector register, or writeback of the address register.
pub(crate) fn is_undecoded(exit: &VcpuExit<'_>) -> bool {
    matches!(exit, VcpuExit::Unsupported(KVM_EXIT_ARM_NISV))
}

/// Injects an external abort for an [undecoded](is_undecoded) access, as hardware does at an address without
/// a device.
///
/// # Errors
/// KVM's error.
pub(crate) fn refuse_undecoded(vcpu: &VcpuFd) -> Result<(), kvm_ioctls::Error> {
    let mut events = kvm_vcpu_events::default();
    events.exception.ext_dabt_pending = 1;
    vcpu.set_vcpu_events(&events)
}

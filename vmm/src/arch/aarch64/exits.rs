//! Exits that only this architecture has: accesses that KVM does not decode.

use kvm_bindings::{KVM_CAP_ARM_NISV_TO_USER, KVM_EXIT_ARM_NISV, kvm_enable_cap, kvm_vcpu_events};
use kvm_ioctls::{VcpuExit, VcpuFd, VmFd};
use vpmu::Access;

use super::emulation::VcpuEmulation;
use crate::bus::{Bus, Caller};

/// Returns `exit` unhandled, because this architecture has no exits for ports or emulated registers.
pub(crate) fn serve<'a>(
    exit: VcpuExit<'a>,
    _access: Option<Access>,
    _caller: &mut Caller<'_>,
    _emulation: Option<&mut VcpuEmulation>,
    _ports: &Bus,
) -> Option<VcpuExit<'a>> {
    Some(exit)
}

/// Makes KVM pass [undecoded](is_undecoded) accesses to the VMM. If KVM cannot, the run call fails at such an access.
pub(crate) fn ask_for_undecoded(vm: &VmFd) {
    let capability = kvm_enable_cap {
        cap: KVM_CAP_ARM_NISV_TO_USER,
        ..Default::default()
    };
    if let Err(error) = vm.enable_cap(&capability) {
        log::warn!(
            "KVM cannot pass undecoded accesses to the VMM ({error}): such an access ends the machine"
        );
    }
}

/// Whether the exit is an access outside guest memory without a valid syndrome. The processor provides no syndrome if
/// the instruction uses a register pair, a vector register, or writeback of the address register.
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

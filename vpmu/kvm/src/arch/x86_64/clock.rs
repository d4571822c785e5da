//! The offset of a vCPU's time stamp counter.
#![expect(unsafe_code, reason = "two requests that kvm-ioctls does not wrap for a vCPU")]

use kvm_bindings::{KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, kvm_device_attr};
use kvm_ioctls::VcpuFd;
use vmm_sys_util::ioctl::ioctl_with_ref;

mod request {
    vmm_sys_util::ioctl_iow_nr!(KVM_SET_DEVICE_ATTR, kvm_bindings::KVMIO, 0xe1, kvm_bindings::kvm_device_attr);
    vmm_sys_util::ioctl_iow_nr!(KVM_GET_DEVICE_ATTR, kvm_bindings::KVMIO, 0xe2, kvm_bindings::kvm_device_attr);
}

/// Describes the vCPU attribute `KVM_VCPU_TSC_OFFSET`, whose value is guest TSC minus host TSC. `KVM_SET_DEVICE_ATTR`
/// reads the value from `offset`, and `KVM_GET_DEVICE_ATTR` writes the value to `offset`.
fn attribute(offset: *mut u64) -> kvm_device_attr {
    kvm_device_attr { group: KVM_VCPU_TSC_CTRL, attr: u64::from(KVM_VCPU_TSC_OFFSET), addr: offset as u64, flags: 0 }
}

/// Returns guest TSC minus host TSC.
///
/// # Errors
/// The error of `KVM_GET_DEVICE_ATTR`. Before Linux 5.16, KVM does not report the offset.
pub fn clock_offset(vcpu: &VcpuFd) -> Result<u64, kvm_ioctls::Error> {
    let mut offset = 0u64;
    let attribute = attribute(&raw mut offset);
    // SAFETY: the kernel reads `attribute`, and writes 64 bits to the address in `attribute.addr`, which points to
    // `offset`.
    if unsafe { ioctl_with_ref(vcpu, request::KVM_GET_DEVICE_ATTR(), &attribute) } < 0 {
        return Err(kvm_ioctls::Error::last());
    }
    Ok(offset)
}

/// Sets guest TSC minus host TSC to `offset`. The vCPU must not have run yet.
///
/// # Errors
/// The error of `KVM_SET_DEVICE_ATTR`. Before Linux 5.16, KVM does not have this attribute.
pub fn set_clock_offset(vcpu: &VcpuFd, mut offset: u64) -> Result<(), kvm_ioctls::Error> {
    let attribute = attribute(&raw mut offset);
    // SAFETY: the kernel reads `attribute`, and 64 bits at the address in `attribute.addr`, which points to `offset`.
    if unsafe { ioctl_with_ref(vcpu, request::KVM_SET_DEVICE_ATTR(), &attribute) } < 0 {
        return Err(kvm_ioctls::Error::last());
    }
    Ok(())
}

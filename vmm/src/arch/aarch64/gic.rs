//! The interrupt controller, a GICv3 that KVM emulates.

use kvm_bindings::{
    KVM_DEV_ARM_VGIC_CTRL_INIT, KVM_DEV_ARM_VGIC_GRP_ADDR, KVM_DEV_ARM_VGIC_GRP_CTRL,
    KVM_DEV_ARM_VGIC_GRP_NR_IRQS, KVM_VGIC_V3_ADDR_TYPE_DIST, KVM_VGIC_V3_ADDR_TYPE_REDIST,
    kvm_create_device, kvm_device_attr, kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V3,
};
use kvm_ioctls::VmFd;

use super::layout;
use crate::kvm::KvmError;

/// Adds the controller to `vm`, which has all of its vCPUs. It lives as long as the VM.
///
/// # Errors
/// [`KvmError::Refused`].
pub(super) fn create(vm: &VmFd) -> Result<(), KvmError> {
    let mut device = kvm_create_device {
        type_: kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V3,
        fd: 0,
        flags: 0,
    };
    let gic = vm.create_device(&mut device).map_err(KvmError::refused(
        "create a GICv3, which this host may lack",
    ))?;
    let interrupts = layout::INTERRUPTS;
    let (distributor, redistributors) = (layout::GIC_DISTRIBUTOR, layout::GIC_REDISTRIBUTORS);
    let places = [
        (
            KVM_DEV_ARM_VGIC_GRP_ADDR,
            KVM_VGIC_V3_ADDR_TYPE_DIST,
            &raw const distributor as u64,
        ),
        (
            KVM_DEV_ARM_VGIC_GRP_ADDR,
            KVM_VGIC_V3_ADDR_TYPE_REDIST,
            &raw const redistributors as u64,
        ),
        (
            KVM_DEV_ARM_VGIC_GRP_NR_IRQS,
            0,
            &raw const interrupts as u64,
        ),
        (KVM_DEV_ARM_VGIC_GRP_CTRL, KVM_DEV_ARM_VGIC_CTRL_INIT, 0),
    ];
    for (group, attr, addr) in places {
        let attribute = kvm_device_attr {
            group,
            attr: attr.into(),
            addr,
            flags: 0,
        };
        gic.set_device_attr(&attribute)
            .map_err(KvmError::refused("set its interrupt controller up"))?;
    }
    Ok(())
}

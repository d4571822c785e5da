//! The interrupt controller, a GICv3 that KVM emulates. It is created with the vCPUs, saved while the vCPUs are
//! stopped, and restored into a new VM.
#![expect(unsafe_code, reason = "KVM writes a register to an address")]

use kvm_bindings::{
    KVM_DEV_ARM_VGIC_CTRL_INIT, KVM_DEV_ARM_VGIC_GRP_ADDR, KVM_DEV_ARM_VGIC_GRP_CPU_SYSREGS, KVM_DEV_ARM_VGIC_GRP_CTRL,
    KVM_DEV_ARM_VGIC_GRP_DIST_REGS, KVM_DEV_ARM_VGIC_GRP_LEVEL_INFO, KVM_DEV_ARM_VGIC_GRP_NR_IRQS,
    KVM_DEV_ARM_VGIC_GRP_REDIST_REGS, KVM_DEV_ARM_VGIC_V3_MPIDR_SHIFT, KVM_VGIC_V3_ADDR_TYPE_DIST,
    KVM_VGIC_V3_ADDR_TYPE_REDIST, kvm_create_device, kvm_device_attr, kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V3,
};
use kvm_ioctls::{DeviceFd, VmFd};
use serde::{Deserialize, Serialize};

use super::cpus::mpidr;
use super::layout;
use super::state::StateError;
use crate::kvm::KvmError;

/// The interrupt controller of a VM.
#[derive(Debug)]
pub(super) struct Gic {
    fd: DeviceFd,
    vcpus: u8,
}

/// The saved controller. The functions below list the registers, in the order in which they must be restored.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SavedGic {
    distributor: Vec<u32>,
    /// Levels of the shared interrupts' lines.
    levels: Vec<u32>,
    /// One element per vCPU. `private_levels` and `interfaces` also have one element per vCPU.
    redistributors: Vec<Vec<u32>>,
    /// Levels of the private interrupts' lines.
    private_levels: Vec<u32>,
    interfaces: Vec<Vec<u64>>,
}

/// Number of private interrupts of each vCPU. Their registers are in the vCPU's redistributor.
const PRIVATE: u32 = 32;
/// Size in bits of a register of the distributor or a redistributor.
const BITS: u32 = 32;
/// Offset of a redistributor's second frame, which has the registers of the private interrupts.
const PRIVATE_PAGE: u32 = 0x1_0000;

/// The parts of the controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The registers of the shared interrupts, which all vCPUs share.
    Distributor,
    /// The registers of one vCPU's private interrupts.
    Redistributor,
    /// The system registers of a vCPU.
    Interface,
    /// The levels of interrupt lines.
    Levels,
}

impl Part {
    fn group(self) -> u32 {
        match self {
            Self::Distributor => KVM_DEV_ARM_VGIC_GRP_DIST_REGS,
            Self::Redistributor => KVM_DEV_ARM_VGIC_GRP_REDIST_REGS,
            Self::Interface => KVM_DEV_ARM_VGIC_GRP_CPU_SYSREGS,
            Self::Levels => KVM_DEV_ARM_VGIC_GRP_LEVEL_INFO,
        }
    }
}

impl std::fmt::Display for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Distributor => "distributor",
            Self::Redistributor => "redistributor",
            Self::Interface => "CPU interface",
            Self::Levels => "interrupt lines",
        })
    }
}

/// Registers of the distributor. The revision (IIDR) comes first, because KVM adapts its behaviour to the revision. The
/// route, priority and trigger of the interrupts come before their enabled, active and pending states.
fn distributor() -> Vec<u32> {
    const IIDR: u32 = 0x8;
    const CTLR: u32 = 0x0;
    const STATUSR: u32 = 0x10;
    const IROUTER: u32 = 0x6000;
    let mut registers = vec![IIDR, CTLR, STATUSR];
    // The offset, and the number of bits for each interrupt.
    for (base, bits) in
        [(IGROUPR, 1), (IROUTER, 64), (IPRIORITYR, 8), (ICFGR, 2), (ISENABLER, 1), (ISACTIVER, 1), (ISPENDR, 1)]
    {
        let words = PRIVATE * bits / BITS..layout::INTERRUPTS * bits / BITS;
        registers.extend(words.map(|word| base + 4 * word));
    }
    registers
}

/// Registers of a redistributor. As in [`distributor`], the priority and trigger of the interrupts come before their
/// enabled, active and pending states. PROPBASER and PENDBASER are for message-based interrupts, which this machine
/// does not have. They are included because a guest can write to them.
fn redistributor() -> Vec<u32> {
    const CTLR: u32 = 0x0;
    const STATUSR: u32 = 0x10;
    const WAKER: u32 = 0x14;
    const PROPBASER: u32 = 0x70;
    const PENDBASER: u32 = 0x78;
    let mut registers = vec![STATUSR, WAKER];
    registers.extend([PROPBASER, PROPBASER + 4, PENDBASER, PENDBASER + 4, CTLR]);
    for (base, bits) in [(IGROUPR, 1), (IPRIORITYR, 8), (ICFGR, 2), (ISENABLER, 1), (ISACTIVER, 1), (ISPENDR, 1)] {
        let words = 0..PRIVATE * bits / BITS;
        registers.extend(words.map(|word| PRIVATE_PAGE + base + 4 * word));
    }
    registers
}

const IGROUPR: u32 = 0x80;
const ISENABLER: u32 = 0x100;
const ICENABLER: u32 = 0x180;
const ISPENDR: u32 = 0x200;
const ISACTIVER: u32 = 0x300;
const IPRIORITYR: u32 = 0x400;
const ICFGR: u32 = 0xc00;

const fn system(op1: u32, crn: u32, crm: u32, op2: u32) -> u32 {
    3 << 14 | op1 << 11 | crn << 7 | crm << 3 | op2
}

const ICC_CTLR: u32 = system(0, 12, 12, 4);
/// System registers that every vCPU has: SRE, CTLR, IGRPEN0, IGRPEN1, PMR, BPR0 and BPR1. CTLR determines how many
/// active-priority registers the vCPU has.
const INTERFACE: [u32; 7] = [
    system(0, 12, 12, 5),
    ICC_CTLR,
    system(0, 12, 12, 6),
    system(0, 12, 12, 7),
    system(0, 4, 6, 0),
    system(0, 12, 8, 3),
    system(0, 12, 12, 3),
];
/// Index of CTLR in [`INTERFACE`].
const CTLR: usize = 1;

/// The system registers of a vCPU whose CTLR has the value `ctlr`: first the registers in [`INTERFACE`], then the
/// active-priority registers. The latter have one bit for each preemption level.
fn interface(ctlr: u64) -> impl Iterator<Item = u32> {
    let priority_bits = (ctlr >> 8 & 0x7) + 1;
    let count = match priority_bits {
        ..=5 => 1,
        6 => 2,
        _ => 4,
    };
    let active = move |first| (0..count).map(move |number| first + number);
    let group_0 = active(system(0, 12, 8, 4));
    let group_1 = active(system(0, 12, 9, 0));
    INTERFACE.into_iter().chain(group_0).chain(group_1)
}

/// Pairs each of `registers` with the element of `values` at the same index.
///
/// # Errors
/// [`StateError::Malformed`] with `what`, if `registers` and `values` differ in length.
fn pairs<'a, T: Copy + Into<u64>>(
    registers: &'a [u32],
    values: &'a [T],
    what: &'static str,
) -> Result<impl Iterator<Item = (u32, u64)> + 'a, StateError> {
    if registers.len() != values.len() {
        return Err(StateError::Malformed(what));
    }
    let values = values.iter().map(|value| (*value).into());
    Ok(registers.iter().copied().zip(values))
}

/// Adds the controller to `vm`. All vCPUs of the VM must exist already, and `vcpus` is their number. KVM keeps the
/// controller until the VM is destroyed.
///
/// # Errors
/// [`KvmError::Refused`].
pub(super) fn create(vm: &VmFd, vcpus: u8) -> Result<Gic, KvmError> {
    let mut device = kvm_create_device { type_: kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V3, fd: 0, flags: 0 };
    let gic = vm.create_device(&mut device).map_err(KvmError::refused("create a GICv3, which this host may lack"))?;
    let interrupts = layout::INTERRUPTS;
    let (distributor, redistributors) = (layout::GIC_DISTRIBUTOR, layout::GIC_REDISTRIBUTORS);
    let places = [
        (KVM_DEV_ARM_VGIC_GRP_ADDR, KVM_VGIC_V3_ADDR_TYPE_DIST, &raw const distributor as u64),
        (KVM_DEV_ARM_VGIC_GRP_ADDR, KVM_VGIC_V3_ADDR_TYPE_REDIST, &raw const redistributors as u64),
        (KVM_DEV_ARM_VGIC_GRP_NR_IRQS, 0, &raw const interrupts as u64),
        (KVM_DEV_ARM_VGIC_GRP_CTRL, KVM_DEV_ARM_VGIC_CTRL_INIT, 0),
    ];
    for (group, attr, addr) in places {
        let attribute = kvm_device_attr { group, attr: attr.into(), addr, flags: 0 };
        gic.set_device_attr(&attribute).map_err(KvmError::refused("set up the interrupt controller"))?;
    }
    Ok(Gic { fd: gic, vcpus })
}

impl Gic {
    /// Saves the controller; every vCPU must be stopped.
    ///
    /// # Errors
    /// [`StateError::Gic`].
    pub(super) fn save(&self) -> Result<SavedGic, StateError> {
        let each = || 0..self.vcpus;
        let redistributors = each().map(|vcpu| {
            let registers = redistributor().into_iter();
            let values = registers.map(|register| self.word(Part::Redistributor, vcpu, register));
            values.collect()
        });
        let interfaces = each().map(|vcpu| {
            let ctlr = self.get(Part::Interface, vcpu, ICC_CTLR)?;
            let values = interface(ctlr).map(|register| self.get(Part::Interface, vcpu, register));
            values.collect()
        });
        let distributor = distributor().into_iter();
        let distributor = distributor.map(|register| self.word(Part::Distributor, 0, register));
        let levels = shared().into_iter();
        let levels = levels.map(|first| self.word(Part::Levels, 0, first));
        let private_levels = each().map(|vcpu| self.word(Part::Levels, vcpu, 0));
        Ok(SavedGic {
            distributor: distributor.collect::<Result<_, _>>()?,
            levels: levels.collect::<Result<_, _>>()?,
            redistributors: redistributors.collect::<Result<_, _>>()?,
            private_levels: private_levels.collect::<Result<_, _>>()?,
            interfaces: interfaces.collect::<Result<_, _>>()?,
        })
    }

    /// Restores `saved`; call this before the first vCPU runs.
    ///
    /// # Errors
    /// [`StateError::Gic`], [`StateError::Malformed`].
    pub(super) fn restore(&self, saved: &SavedGic) -> Result<(), StateError> {
        let vcpus = usize::from(self.vcpus);
        if [saved.redistributors.len(), saved.interfaces.len()] != [vcpus; 2] {
            return Err(StateError::Malformed("set of interrupt controllers"));
        }
        let registers = distributor();
        let what = "set of distributor registers";
        for (register, value) in pairs(&registers, &saved.distributor, what)? {
            self.set(Part::Distributor, 0, register, value)?;
        }
        let registers = redistributor();
        for (vcpu, values) in (0..self.vcpus).zip(&saved.redistributors) {
            let pairs = pairs(&registers, values, "set of redistributor registers")?;
            // A new vCPU's software-generated interrupts are enabled, and a zero in ISENABLER does not
            // disable them: disable all interrupts first.
            let disable = PRIVATE_PAGE + ICENABLER;
            self.set(Part::Redistributor, vcpu, disable, u32::MAX.into())?;
            for (register, value) in pairs {
                self.set(Part::Redistributor, vcpu, register, value)?;
            }
        }
        for (vcpu, values) in (0..self.vcpus).zip(&saved.interfaces) {
            let ctlr = values.get(CTLR).copied().unwrap_or_default();
            let registers: Vec<u32> = interface(ctlr).collect();
            let what = "set of CPU interface registers";
            for (register, value) in pairs(&registers, values, what)? {
                self.set(Part::Interface, vcpu, register, value)?;
            }
        }
        // Set the levels last, because a high line makes its interrupt pending.
        let what = "set of interrupt lines";
        for (first, value) in pairs(&shared(), &saved.levels, what)? {
            self.set(Part::Levels, 0, first, value)?;
        }
        let private = vec![0; vcpus];
        let private = pairs(&private, &saved.private_levels, what)?;
        for (vcpu, (first, value)) in (0..self.vcpus).zip(private) {
            self.set(Part::Levels, vcpu, first, value)?;
        }
        Ok(())
    }

    /// Reads a register of 32 bits.
    fn word(&self, part: Part, vcpu: u8, register: u32) -> Result<u32, StateError> {
        let value = self.get(part, vcpu, register)?;
        Ok(u32::try_from(value).unwrap_or_default())
    }

    /// Reads a register of `part`. If the part is the distributor, `vcpu` has no effect.
    fn get(&self, part: Part, vcpu: u8, register: u32) -> Result<u64, StateError> {
        let mut value = 0u64;
        let mut attribute = attribute(part, vcpu, register, &raw mut value as u64);
        // SAFETY: KVM writes 32 or 64 bits to `value`, which has 64 bits.
        let got = unsafe { self.fd.get_device_attr(&mut attribute) };
        got.map_err(failed("save", part, register))?;
        Ok(value)
    }

    fn set(&self, part: Part, vcpu: u8, register: u32, value: u64) -> Result<(), StateError> {
        // KVM reads as many low bits of `value` as the register has.
        let attribute = attribute(part, vcpu, register, &raw const value as u64);
        let set = self.fd.set_device_attr(&attribute);
        set.map_err(failed("restore", part, register))
    }
}

/// The first shared interrupt of each group of 32. KVM transfers the line levels of one group together.
fn shared() -> Vec<u32> {
    let step = usize::try_from(BITS).unwrap_or(usize::MAX);
    (PRIVATE..layout::INTERRUPTS).step_by(step).collect()
}

fn attribute(part: Part, vcpu: u8, register: u32, addr: u64) -> kvm_device_attr {
    kvm_device_attr {
        group: part.group(),
        attr: mpidr(vcpu) << KVM_DEV_ARM_VGIC_V3_MPIDR_SHIFT | u64::from(register),
        addr,
        flags: 0,
    }
}

fn failed(action: &'static str, part: Part, register: u32) -> impl FnOnce(kvm_ioctls::Error) -> StateError {
    move |source| StateError::Gic { action, part, register, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_of_shared_interrupts_begin_at_the_first_shared_one() {
        let found = distributor();
        assert_eq!(found[..4], [0x8, 0x0, 0x10, 0x84]);
        // 32 interrupts, each with a route of two words.
        assert_eq!(found[4..68], (0x6100..0x6200).step_by(4).collect::<Vec<_>>());
        assert_eq!(found[68..76], (0x420..0x440).step_by(4).collect::<Vec<_>>());
        assert_eq!(found[76..], [0xc08, 0xc0c, 0x104, 0x304, 0x204]);
        assert_eq!(shared(), [32]);
    }

    #[test]
    fn control_register_decides_how_many_active_priorities_there_are() {
        for (bits, count) in [(5, 1), (6, 2), (7, 4)] {
            let registers: Vec<u32> = interface(0x8800 | (bits - 1) << 8).collect();
            assert_eq!(registers.len(), INTERFACE.len() + 2 * count);
            assert_eq!(registers[CTLR], ICC_CTLR);
            assert_eq!(registers[INTERFACE.len()], 0xc644);
            assert_eq!(registers[INTERFACE.len() + count], 0xc648);
        }
    }
}

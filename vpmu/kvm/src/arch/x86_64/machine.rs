//! The vCPU of a micro machine: starts in long mode, in ring 0 or 3.

use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, Msrs, kvm_dtable, kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs};
use kvm_ioctls::{Kvm, SyncReg, VcpuFd, VmFd};

use super::{clock, code};
use crate::micro::{Machine, MachineError, Ring};

const MSR_EFER: u32 = 0xc000_0080;
const MSR_STAR: u32 = 0xc000_0081;
const MSR_LSTAR: u32 = 0xc000_0082;
const MSR_SFMASK: u32 = 0xc000_0084;
/// Address of the pages that KVM uses for its own TSS. They are above the guest's memory.
const KVM_TSS: usize = 0xfeff_d000;
/// EFER: SCE, LME, LMA.
const EFER: u64 = 1 | 1 << 8 | 1 << 10;

/// Creates a VM without vCPUs and without an interrupt controller, so that HLT exits to the VMM.
pub(crate) fn create_vm(kvm: &Kvm) -> Result<VmFd, kvm_ioctls::Error> {
    let vm = kvm.create_vm()?;
    vm.set_tss_address(KVM_TSS)?;
    Ok(vm)
}

/// Creates the VM's vCPU, with all CPUID features that KVM supports.
pub(crate) fn create_vcpu(kvm: &Kvm, vm: &VmFd) -> Result<VcpuFd, MachineError> {
    let vcpu = vm.create_vcpu(0).map_err(MachineError::kvm("KVM_CREATE_VCPU"))?;
    let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(MachineError::kvm("KVM_GET_SUPPORTED_CPUID"))?;
    vcpu.set_cpuid2(&cpuid).map_err(MachineError::kvm("KVM_SET_CPUID2"))?;
    Ok(vcpu)
}

impl Machine {
    /// Sets the registers to run the program in `ring`.
    pub(crate) fn enter(&mut self, ring: Ring) -> Result<(), MachineError> {
        let mut sregs = self.sregs()?;
        long_mode(&mut sregs, ring);
        self.vcpu.set_sregs(&sregs).map_err(MachineError::kvm("KVM_SET_SREGS"))?;
        set_syscall_msrs(&self.vcpu)?;
        self.set_regs(|regs| {
            regs.rip = code::PROGRAM;
            regs.rdi = code::WINDOW;
            regs.rflags = 2;
            regs.rsp = match ring {
                Ring::Kernel => code::STACK_KERNEL,
                Ring::User => code::STACK_USER,
            };
        })
    }

    /// Calls `change` to change general registers for the next run.
    ///
    /// # Errors
    /// KVM refuses the registers.
    pub fn set_regs(&mut self, change: impl FnOnce(&mut kvm_regs)) -> Result<(), MachineError> {
        let mut regs = self.regs()?;
        change(&mut regs);
        self.vcpu.set_regs(&regs).map_err(MachineError::kvm("KVM_SET_REGS"))
    }

    /// Reads the general registers by `KVM_GET_REGS`.
    ///
    /// # Errors
    /// The error of `KVM_GET_REGS`.
    pub fn regs(&self) -> Result<kvm_regs, MachineError> {
        self.vcpu.get_regs().map_err(MachineError::kvm("KVM_GET_REGS"))
    }

    /// Returns the ring that the vCPU is in.
    ///
    /// # Errors
    /// The error of `KVM_GET_SREGS`.
    pub fn cpl(&self) -> Result<u8, MachineError> {
        Ok(self.sregs()?.ss.dpl)
    }

    fn sregs(&self) -> Result<kvm_sregs, MachineError> {
        self.vcpu.get_sregs().map_err(MachineError::kvm("KVM_GET_SREGS"))
    }

    /// Makes KVM copy the general registers to the run page at every exit, for [`Machine::synced_rip`].
    pub fn sync_regs(&mut self) {
        self.vcpu.set_sync_valid_reg(SyncReg::Register);
    }

    /// Returns the instruction pointer that KVM copied to the run page at the last exit.
    #[must_use]
    pub fn synced_rip(&self) -> u64 {
        self.vcpu.sync_regs().regs.rip
    }

    /// Returns guest TSC minus host TSC, as KVM reports it. Returns `None` on kernels before 5.16.
    #[must_use]
    pub fn tsc_offset(&self) -> Option<u64> {
        clock::clock_offset(&self.vcpu).ok()
    }
}

/// Sets up long mode, with paging, flat segments at the privilege level of `ring`, and the tables from [`code`].
fn long_mode(sregs: &mut kvm_sregs, ring: Ring) {
    let (code_selector, data_selector, dpl) = match ring {
        Ring::Kernel => (code::KERNEL_CS, code::KERNEL_SS, 0),
        Ring::User => (code::USER_CS, code::USER_SS, 3),
    };
    let data = kvm_segment {
        limit: u32::MAX,
        selector: data_selector,
        type_: 3,
        present: 1,
        dpl,
        db: 1,
        s: 1,
        g: 1,
        ..Default::default()
    };
    sregs.cs = kvm_segment { selector: code_selector, type_: 11, db: 0, l: 1, ..data };
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.tr = kvm_segment {
        base: code::TSS,
        limit: code::TSS_LIMIT,
        selector: code::TASK,
        type_: 11,
        present: 1,
        ..Default::default()
    };
    sregs.gdt = kvm_dtable { base: code::GDT, limit: code::GDT_LIMIT, ..Default::default() };
    sregs.idt = kvm_dtable { base: code::IDT, limit: code::IDT_LIMIT, ..Default::default() };
    // PG, AM, WP, NE, ET, MP, PE.
    sregs.cr0 = 0x8005_0033;
    sregs.cr3 = code::PML4;
    // OSXMMEXCPT, OSFXSR, PAE.
    sregs.cr4 = 0x620;
    sregs.efer = EFER;
}

fn set_syscall_msrs(vcpu: &VcpuFd) -> Result<(), MachineError> {
    let entries = [(MSR_EFER, EFER), (MSR_STAR, code::STAR), (MSR_LSTAR, code::SYSCALL), (MSR_SFMASK, 0x200)]
        .map(|(index, data)| kvm_msr_entry { index, data, ..Default::default() });
    let failed = |e| MachineError::Kvm("KVM_SET_MSRS", e);
    let refused = || failed(kvm_ioctls::Error::new(libc::EINVAL));
    let msrs = Msrs::from_entries(&entries).map_err(|_| refused())?;
    // KVM stops at the first MSR that it refuses, and returns how many MSRs it has set.
    if vcpu.set_msrs(&msrs).map_err(failed)? < entries.len() {
        return Err(refused());
    }
    Ok(())
}

//! A machine of one vCPU and 2 MiB, in long mode from its first instruction.
//!
//! It has no firmware, no devices and no interrupt controller: a halt is an exit. Knows how to
//! run a few bytes of code and say how that ended, not what the code is to prove.

#![expect(unsafe_code, reason = "registers memory with KVM")]

use super::super::clock;
use super::code;
use crate::check::{Ring, Watch};
use kvm_bindings::{
    KVM_MAX_CPUID_ENTRIES, Msrs, kvm_dtable, kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, SyncReg, VcpuExit, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

const MSR_EFER: u32 = 0xc000_0080;
const MSR_STAR: u32 = 0xc000_0081;
const MSR_LSTAR: u32 = 0xc000_0082;
const MSR_SFMASK: u32 = 0xc000_0084;
/// Long mode, enabled and active, with `syscall`.
const EFER: u64 = 1 | 1 << 8 | 1 << 10;
/// Three pages that KVM on Intel wants outside guest memory.
const KVM_TSS: usize = 0xfffb_d000;

/// Why a machine could not be built or run.
#[derive(Debug, thiserror::Error)]
pub(super) enum MachineError {
    /// KVM refused a step of building it.
    #[error("{0} failed")]
    Kvm(&'static str, #[source] kvm_ioctls::Error),
    /// Its memory could not be mapped.
    #[error("cannot map 2 MiB of guest memory")]
    Map(#[source] vm_memory::mmap::FromRangesError),
    /// Its memory could not be filled.
    #[error("cannot fill guest memory")]
    Fill(#[source] vm_memory::GuestMemoryError),
    /// The bound on its time could not be set.
    #[error("KVM_SET_SIGNAL_MASK failed")]
    Guard(#[source] std::io::Error),
}

/// How one run ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Exit {
    /// A write of these bytes to a port.
    Port(u16, Vec<u8>),
    /// A store into the device window: offset and value.
    Store(u64, u64),
    /// `hlt`.
    Halt,
    /// The probe's time was over.
    Stopped,
    /// Anything else, in words.
    Other(String),
}

impl Exit {
    /// In words, for a finding.
    pub(super) fn describe(&self) -> String {
        match self {
            Exit::Port(port, data) => format!("wrote {data:x?} to port {port:#x}"),
            Exit::Store(code::EXCEPTION, vector) => format!("raised exception {vector}"),
            Exit::Store(offset, value) => format!("stored {value:#x} at offset {offset:#x}"),
            Exit::Halt => "halted".into(),
            Exit::Stopped => "was still running when its time was over".into(),
            Exit::Other(what) => format!("ended in {what}"),
        }
    }
}

/// One vCPU with its VM. The fields drop in this order: KVM lets go of the memory first.
#[derive(Debug)]
pub(super) struct Machine {
    vcpu: VcpuFd,
    _vm: VmFd,
    _memory: GuestMemoryMmap,
    watch: Watch,
}

impl Machine {
    /// A machine about to execute `program` in `ring`, bounded by `watch`.
    pub(super) fn new(
        kvm: &Kvm,
        watch: &Watch,
        ring: Ring,
        program: &[u8],
    ) -> Result<Self, MachineError> {
        let step = |name| move |e| MachineError::Kvm(name, e);
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), code::RAM)])
            .map_err(MachineError::Map)?;
        for (at, bytes) in code::tables() {
            memory
                .write_slice(&bytes, GuestAddress(at))
                .map_err(MachineError::Fill)?;
        }
        memory
            .write_slice(program, GuestAddress(code::PROGRAM))
            .map_err(MachineError::Fill)?;

        let vm = kvm.create_vm().map_err(step("KVM_CREATE_VM"))?;
        vm.set_tss_address(KVM_TSS)
            .map_err(step("KVM_SET_TSS_ADDR"))?;
        let host = memory
            .get_host_address(GuestAddress(0))
            .map_err(MachineError::Fill)?;
        let region = kvm_userspace_memory_region {
            memory_size: code::RAM as u64,
            userspace_addr: host as u64,
            ..Default::default()
        };
        // SAFETY: the region is the whole of a mapping that the machine owns and unmaps only
        // after the VM is gone.
        unsafe { vm.set_user_memory_region(region) }.map_err(step("KVM_SET_USER_MEMORY_REGION"))?;

        let vcpu = vm.create_vcpu(0).map_err(step("KVM_CREATE_VCPU"))?;
        watch.guard(&vcpu).map_err(MachineError::Guard)?;
        let cpuid = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(step("KVM_GET_SUPPORTED_CPUID"))?;
        vcpu.set_cpuid2(&cpuid).map_err(step("KVM_SET_CPUID2"))?;

        let mut sregs = vcpu.get_sregs().map_err(step("KVM_GET_SREGS"))?;
        long_mode(&mut sregs, ring);
        vcpu.set_sregs(&sregs).map_err(step("KVM_SET_SREGS"))?;
        set_syscall_msrs(&vcpu)?;
        let mut machine = Machine {
            vcpu,
            _vm: vm,
            _memory: memory,
            watch: watch.clone(),
        };
        machine.set_regs(|regs| {
            regs.rip = code::PROGRAM;
            regs.rdi = code::WINDOW;
            regs.rflags = 2;
            regs.rsp = match ring {
                Ring::Kernel => code::STACK_KERNEL,
                Ring::User => code::STACK_USER,
            };
        })?;
        Ok(machine)
    }

    /// Changes general registers before the next run.
    pub(super) fn set_regs(
        &mut self,
        change: impl FnOnce(&mut kvm_regs),
    ) -> Result<(), MachineError> {
        let mut regs = self.regs()?;
        change(&mut regs);
        self.vcpu
            .set_regs(&regs)
            .map_err(|e| MachineError::Kvm("KVM_SET_REGS", e))
    }

    /// General registers, by system call.
    pub(super) fn regs(&self) -> Result<kvm_regs, MachineError> {
        self.vcpu
            .get_regs()
            .map_err(|e| MachineError::Kvm("KVM_GET_REGS", e))
    }

    /// The ring that the vCPU is in.
    pub(super) fn cpl(&self) -> Result<u8, MachineError> {
        let sregs = self
            .vcpu
            .get_sregs()
            .map_err(|e| MachineError::Kvm("KVM_GET_SREGS", e))?;
        Ok(sregs.ss.dpl)
    }

    /// Asks for the registers to come with every exit, for [`Machine::synced_rip`].
    pub(super) fn sync_regs(&mut self) {
        self.vcpu.set_sync_valid_reg(SyncReg::Register);
    }

    /// The instruction pointer as it came with the last exit.
    pub(super) fn synced_rip(&self) -> u64 {
        self.vcpu.sync_regs().regs.rip
    }

    /// What KVM says it adds to the host's time-stamp counter; `None` on kernels before 5.16.
    pub(super) fn tsc_offset(&self) -> Option<u64> {
        clock::offset(&self.vcpu).ok()
    }

    /// Runs the guest to its next exit, or until its time is over.
    pub(super) fn run(&mut self) -> Exit {
        self.run_until(|| false)
    }

    /// The same, but no longer than until `done`, which is asked at the start and after each signal.
    pub(super) fn run_until(&mut self, mut done: impl FnMut() -> bool) -> Exit {
        loop {
            if self.watch.over() || done() {
                return Exit::Stopped;
            }
            return match self.vcpu.run() {
                Ok(VcpuExit::IoOut(port, data)) => Exit::Port(port, data.to_vec()),
                Ok(VcpuExit::MmioWrite(at, data)) if at >= code::WINDOW => {
                    let mut value = [0; 8];
                    let length = data.len().min(8);
                    value[..length].copy_from_slice(&data[..length]);
                    Exit::Store(at - code::WINDOW, u64::from_le_bytes(value))
                }
                Ok(VcpuExit::Hlt) => Exit::Halt,
                Ok(VcpuExit::InternalError) => Exit::Other("a KVM internal error".into()),
                Ok(VcpuExit::Shutdown) => Exit::Other("a triple fault".into()),
                Ok(other) => Exit::Other(format!("{other:?}")),
                // Someone else's signal, unless the watch says otherwise.
                Err(e) if e.errno() == libc::EINTR => {
                    self.watch.take_signals();
                    continue;
                }
                Err(e) => Exit::Other(format!("KVM_RUN: {e}")),
            };
        }
    }
}

/// Flat 64-bit segments of `ring`, paging on, tables where [`code`] puts them.
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
    sregs.cs = kvm_segment {
        selector: code_selector,
        type_: 11,
        db: 0,
        l: 1,
        ..data
    };
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.tr = kvm_segment {
        base: code::TSS,
        limit: code::TSS_LIMIT,
        selector: code::TASK,
        type_: 11,
        present: 1,
        ..Default::default()
    };
    sregs.gdt = kvm_dtable {
        base: code::GDT,
        limit: code::GDT_LIMIT,
        ..Default::default()
    };
    sregs.idt = kvm_dtable {
        base: code::IDT,
        limit: code::IDT_LIMIT,
        ..Default::default()
    };
    // Protection, paging, native FPU errors, write protection.
    sregs.cr0 = 0x8005_0033;
    sregs.cr3 = code::PML4;
    // Physical address extension, SSE.
    sregs.cr4 = 0x620;
    sregs.efer = EFER;
}

fn set_syscall_msrs(vcpu: &VcpuFd) -> Result<(), MachineError> {
    let entries = [
        (MSR_EFER, EFER),
        (MSR_STAR, code::STAR),
        (MSR_LSTAR, code::SYSCALL),
        (MSR_SFMASK, 0x200),
    ]
    .map(|(index, data)| kvm_msr_entry {
        index,
        data,
        ..Default::default()
    });
    let failed = |e| MachineError::Kvm("KVM_SET_MSRS", e);
    let refused = || failed(kvm_ioctls::Error::new(libc::EINVAL));
    let msrs = Msrs::from_entries(&entries).map_err(|_| refused())?;
    // KVM stops at the first register that it does not take and returns how many it took.
    if vcpu.set_msrs(&msrs).map_err(failed)? < entries.len() {
        return Err(refused());
    }
    Ok(())
}

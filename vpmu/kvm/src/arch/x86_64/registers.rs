//! A vCPU's instruction pointer, mode and other registers at an exit, read on demand.
#![expect(unsafe_code, reason = "ioctls and reads of the run page, because kvm-ioctls borrows the vCPU during an exit")]

use std::os::fd::BorrowedFd;

use kvm_bindings::{KVM_CAP_SYNC_REGS, KVM_SYNC_X86_REGS, KVM_SYNC_X86_SREGS, kvm_regs, kvm_sregs};
use kvm_ioctls::{Kvm, SyncReg, VcpuFd};
use vmm_sys_util::ioctl::ioctl_with_mut_ref;
use vpmu::{CpuState, GuestRegs, Registers};

use crate::run_page::{self, RunPage};

mod request {
    vmm_sys_util::ioctl_ior_nr!(KVM_GET_REGS, kvm_bindings::KVMIO, 0x81, kvm_bindings::kvm_regs);
    vmm_sys_util::ioctl_ior_nr!(KVM_GET_SREGS, kvm_bindings::KVMIO, 0x83, kvm_bindings::kvm_sregs);
}

/// The privilege level of guest user mode.
const USER_LEVEL: u8 = 3;

/// Returns whether KVM can copy registers to the run page.
#[must_use]
pub fn syncs_registers(kvm: &Kvm) -> bool {
    let sets = kvm.check_extension_raw(u64::from(KVM_CAP_SYNC_REGS));
    let needed = KVM_SYNC_X86_REGS | KVM_SYNC_X86_SREGS;
    u32::try_from(sets).is_ok_and(|sets| sets & needed == needed)
}

/// Makes KVM copy the registers to the run page at every exit if `wanted`. Otherwise makes KVM stop copying them.
pub(crate) fn sync(vcpu: &mut VcpuFd, wanted: bool) {
    for set in [SyncReg::Register, SyncReg::SystemRegister] {
        if wanted {
            vcpu.set_sync_valid_reg(set);
        } else {
            vcpu.clear_sync_valid_reg(set);
        }
    }
}

/// Returns the registers of `vcpu`, which must be outside its run call.
#[must_use]
pub fn registers(vcpu: &VcpuFd) -> ExitRegisters<'_> {
    ExitRegisters::new(run_page::descriptor(vcpu), None)
}

/// The registers at one exit.
#[derive(Debug)]
pub struct ExitRegisters<'a> {
    vcpu: BorrowedFd<'a>,
    /// The run page if KVM copied the registers to it at the exit, otherwise `None`.
    synced: Option<&'a RunPage>,
    known: Option<GuestRegs>,
}

impl<'a> ExitRegisters<'a> {
    pub(crate) fn new(vcpu: BorrowedFd<'a>, synced: Option<&'a RunPage>) -> Self {
        Self { vcpu, synced, known: None }
    }

    fn fetch(&self) -> Option<(kvm_regs, kvm_sregs)> {
        if let Some(page) = self.synced {
            let run = page.as_ptr();
            // SAFETY: computes an address inside the mapping.
            let both = unsafe { &raw const (*run).s.regs };
            // SAFETY: KVM copied the registers to this member at the exit.
            let both = unsafe { both.read() };
            return Some((both.regs, both.sregs));
        }
        let (mut regs, mut sregs) = (kvm_regs::default(), kvm_sregs::default());
        // SAFETY: the kernel writes one `kvm_regs` to `regs`.
        let got = unsafe { ioctl_with_mut_ref(&self.vcpu, request::KVM_GET_REGS(), &mut regs) };
        // SAFETY: the kernel writes one `kvm_sregs` to `sregs`.
        let more = unsafe { ioctl_with_mut_ref(&self.vcpu, request::KVM_GET_SREGS(), &mut sregs) };
        (got == 0 && more == 0).then_some((regs, sregs))
    }
}

impl Registers for ExitRegisters<'_> {
    fn registers(&mut self) -> Option<GuestRegs> {
        if self.known.is_none() {
            let (regs, sregs) = self.fetch()?;
            self.known = Some(locate(&regs, &sregs));
        }
        self.known
    }

    fn state(&mut self) -> Option<CpuState> {
        let (regs, sregs) = self.fetch()?;
        Some(everything(&regs, &sregs))
    }
}

fn locate(regs: &kvm_regs, sregs: &kvm_sregs) -> GuestRegs {
    // 64-bit code ignores the base of the code segment.
    let base = if sregs.cs.l == 1 { 0 } else { sregs.cs.base };
    GuestRegs { ip: base.wrapping_add(regs.rip), user: sregs.ss.dpl == USER_LEVEL }
}

fn everything(regs: &kvm_regs, sregs: &kvm_sregs) -> CpuState {
    CpuState {
        general: [
            regs.rax,
            regs.rbx,
            regs.rcx,
            regs.rdx,
            regs.rsi,
            regs.rdi,
            regs.rbp,
            regs.rsp,
            regs.rip,
            regs.rflags,
            sregs.cs.selector.into(),
            sregs.ss.selector.into(),
            sregs.ds.selector.into(),
            sregs.es.selector.into(),
            sregs.fs.selector.into(),
            sregs.gs.selector.into(),
            regs.r8,
            regs.r9,
            regs.r10,
            regs.r11,
            regs.r12,
            regs.r13,
            regs.r14,
            regs.r15,
        ],
        user: locate(regs, sregs).user,
        code64: sregs.cs.l == 1,
        cr0: sregs.cr0,
        cr3: sregs.cr3,
        cr4: sregs.cr4,
        efer: sregs.efer,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_address_is_linear_and_its_mode_the_stack_segments() {
        let regs = kvm_regs { rip: 0x10, ..Default::default() };
        let mut sregs = kvm_sregs::default();
        sregs.cs.base = 0xffff_0000;
        let real = locate(&regs, &sregs);
        assert_eq!((real.ip, real.user), (0xffff_0010, false));
        sregs.cs.l = 1;
        sregs.ss.dpl = 3;
        let user = locate(&regs, &sregs);
        assert_eq!((user.ip, user.user), (0x10, true));
    }

    #[test]
    fn registers_are_indexed_by_perfs_numbers() {
        let regs = kvm_regs {
            rax: 0,
            rbx: 1,
            rcx: 2,
            rdx: 3,
            rsi: 4,
            rdi: 5,
            rbp: 6,
            rsp: 7,
            rip: 8,
            rflags: 9,
            r8: 16,
            r9: 17,
            r10: 18,
            r11: 19,
            r12: 20,
            r13: 21,
            r14: 22,
            r15: 23,
        };
        let mut sregs = kvm_sregs { cr0: 30, cr3: 33, cr4: 34, efer: 35, ..Default::default() };
        sregs.cs.selector = 10;
        sregs.cs.l = 1;
        sregs.ss.selector = 11;
        sregs.ss.dpl = USER_LEVEL;
        sregs.ds.selector = 12;
        sregs.es.selector = 13;
        sregs.fs.selector = 14;
        sregs.gs.selector = 15;
        let state = everything(&regs, &sregs);
        assert!((0..24).eq(state.general));
        assert_eq!([state.cr0, state.cr3, state.cr4, state.efer], [30, 33, 34, 35]);
        assert!(state.user && state.code64);
    }
}

//! A vCPU's instruction pointer, mode and other registers at an exit, read on demand.

use std::os::fd::BorrowedFd;

use kvm_ioctls::{Kvm, VcpuFd};
use vpmu::{CpuState, GENERAL_REGS, GuestRegs, Registers};

use super::reg;
use crate::run_page::{self, RunPage};

/// PSTATE.SP: the vCPU uses the stack pointer of its exception level, not `SP_EL0`.
const OWN_STACK: u64 = 1;
/// perf's register numbers for SP and PC. LR is X30.
const SP: usize = 31;
const PC: usize = 32;

/// Returns `false`, because KVM cannot copy registers to the run page on this architecture.
#[must_use]
pub fn syncs_registers(_kvm: &Kvm) -> bool {
    false
}

/// Does nothing, because KVM cannot copy registers to the run page on this architecture.
pub(crate) fn sync(_vcpu: &mut VcpuFd, _wanted: bool) {}

/// Returns the registers of `vcpu`, which must be outside its run call.
#[must_use]
pub fn registers(vcpu: &VcpuFd) -> ExitRegisters<'_> {
    ExitRegisters::new(run_page::descriptor(vcpu), None)
}

/// The registers at one exit.
#[derive(Debug)]
pub struct ExitRegisters<'a> {
    vcpu: BorrowedFd<'a>,
    known: Option<GuestRegs>,
}

impl<'a> ExitRegisters<'a> {
    pub(crate) fn new(vcpu: BorrowedFd<'a>, _synced: Option<&'a RunPage>) -> Self {
        Self { vcpu, known: None }
    }

    fn get(&self, number: u64) -> Option<u64> {
        reg::get(&self.vcpu, number).ok()
    }
}

impl Registers for ExitRegisters<'_> {
    fn registers(&mut self) -> Option<GuestRegs> {
        if self.known.is_none() {
            self.known = Some(GuestRegs { ip: self.get(reg::PC)?, user: CpuState::is_user(self.get(reg::PSTATE)?) });
        }
        self.known
    }

    fn state(&mut self) -> Option<CpuState> {
        let pstate = self.get(reg::PSTATE)?;
        let mut general = [0; GENERAL_REGS];
        for (n, register) in general[..SP].iter_mut().enumerate() {
            *register = self.get(reg::x(n))?;
        }
        let user = CpuState::is_user(pstate);
        let own_stack = !user && pstate & OWN_STACK != 0;
        general[SP] = self.get(if own_stack { reg::SP_EL1 } else { reg::SP_EL0 })?;
        general[PC] = self.get(reg::PC)?;
        Some(CpuState {
            general,
            pstate,
            user,
            code64: CpuState::is_code64(pstate),
            sctlr: self.get(reg::SCTLR_EL1)?,
            tcr: self.get(reg::TCR_EL1)?,
            ttbr0: self.get(reg::TTBR0_EL1)?,
            ttbr1: self.get(reg::TTBR1_EL1)?,
        })
    }
}

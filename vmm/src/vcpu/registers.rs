//! Where a vCPU was when it left the guest, fetched only when someone asks.

use kvm_bindings::{kvm_regs, kvm_sregs};
use kvm_ioctls::VcpuFd;
use vpmu::{GuestRegs, Registers};

/// The privilege level of guest user mode.
const USER_LEVEL: u8 = 3;

/// The registers at one exit.
#[derive(Debug)]
pub(super) struct ExitRegisters<'a> {
    fd: &'a VcpuFd,
    /// KVM left them in the run page.
    synced: bool,
    known: Option<GuestRegs>,
}

impl<'a> ExitRegisters<'a> {
    pub(super) fn new(fd: &'a VcpuFd, synced: bool) -> Self {
        Self {
            fd,
            synced,
            known: None,
        }
    }

    fn fetch(&self) -> Option<(kvm_regs, kvm_sregs)> {
        if self.synced {
            let both = self.fd.sync_regs();
            return Some((both.regs, both.sregs));
        }
        Some((self.fd.get_regs().ok()?, self.fd.get_sregs().ok()?))
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
}

fn locate(regs: &kvm_regs, sregs: &kvm_sregs) -> GuestRegs {
    // In 64-bit code the base of the code segment counts for nothing.
    let base = if sregs.cs.l == 1 { 0 } else { sregs.cs.base };
    GuestRegs {
        ip: base.wrapping_add(regs.rip),
        user: sregs.ss.dpl == USER_LEVEL,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_is_linear_and_the_mode_is_the_stack_segments() {
        let regs = kvm_regs {
            rip: 0x10,
            ..Default::default()
        };
        let mut sregs = kvm_sregs::default();
        sregs.cs.base = 0xffff_0000;
        let real = locate(&regs, &sregs);
        assert_eq!((real.ip, real.user), (0xffff_0010, false));
        sregs.cs.l = 1;
        sregs.ss.dpl = 3;
        let user = locate(&regs, &sregs);
        assert_eq!((user.ip, user.user), (0x10, true));
    }
}

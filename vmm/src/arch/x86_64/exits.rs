//! Exits that only this architecture has: accesses to ports and to model-specific registers.

use kvm_bindings::{KVM_EXIT_IO, KVM_EXIT_IO_OUT, KVM_EXIT_X86_RDMSR, KVM_EXIT_X86_WRMSR};
use vpmu::{Access, ExitReason};

use super::emulation::VcpuEmulation;
use crate::bus::{Bus, Caller};
use crate::vcpu::RunPage;

/// A port access; its data is in the run page.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PortAccess {
    port: u16,
    write: bool,
    /// Bytes of one access.
    size: usize,
    count: usize,
    offset: usize,
}

impl PortAccess {
    fn told(&self) -> Access {
        Access {
            address: self.port.into(),
            size: u8::try_from(self.size).unwrap_or(u8::MAX),
            write: self.write,
            count: u32::try_from(self.count).unwrap_or(u32::MAX),
        }
    }
}

/// The reason of an exit.
#[derive(Debug)]
pub(crate) enum Exit {
    Port(PortAccess),
    /// A read of a model-specific register that KVM does not emulate.
    ReadMsr(u32),
    /// The same for a write of this value.
    WriteMsr(u32, u64),
}

impl From<&Exit> for vpmu::Exit {
    fn from(exit: &Exit) -> Self {
        match exit {
            Exit::Port(access) => Self {
                reason: ExitReason::Io,
                access: Some(access.told()),
            },
            Exit::ReadMsr(_) | Exit::WriteMsr(..) => ExitReason::Other.into(),
        }
    }
}

/// The exit in `page`, if it is one that only this architecture has.
#[expect(
    unsafe_code,
    reason = "the exit reason says which member of a union KVM filled"
)]
pub(crate) fn decode(page: &RunPage) -> Option<Exit> {
    let run = page.run();
    Some(match run.exit_reason {
        KVM_EXIT_IO => {
            // SAFETY: the exit reason determines the member that KVM filled, here and below.
            let io = unsafe { run.__bindgen_anon_1.io };
            Exit::Port(PortAccess {
                port: io.port,
                write: u32::from(io.direction) == KVM_EXIT_IO_OUT,
                size: usize::from(io.size),
                count: usize::try_from(io.count).unwrap_or(0),
                offset: usize::try_from(io.data_offset).unwrap_or(usize::MAX),
            })
        }
        KVM_EXIT_X86_RDMSR => {
            // SAFETY: as above.
            Exit::ReadMsr(unsafe { run.__bindgen_anon_1.msr.index })
        }
        KVM_EXIT_X86_WRMSR => {
            // SAFETY: as above.
            let msr = unsafe { run.__bindgen_anon_1.msr };
            Exit::WriteMsr(msr.index, msr.data)
        }
        _ => return None,
    })
}

/// Handles `exit`.
pub(crate) fn serve(
    exit: Exit,
    page: &mut RunPage,
    caller: &mut Caller<'_>,
    emulation: Option<&mut VcpuEmulation>,
    ports: &Bus,
) {
    match exit {
        Exit::Port(access) => serve_port(access, page, caller, ports),
        Exit::ReadMsr(register) => {
            answer_msr(page, emulation.and_then(|msrs| msrs.read(register)));
        }
        Exit::WriteMsr(register, value) => {
            let taken = emulation.is_some_and(|msrs| msrs.write(register, value));
            answer_msr(page, taken.then_some(value));
        }
    }
}

/// A string instruction makes many accesses in one exit; devices see them one by one.
fn serve_port(access: PortAccess, page: &mut RunPage, caller: &mut Caller<'_>, ports: &Bus) {
    let port = u64::from(access.port);
    let len = access.size.saturating_mul(access.count);
    let data = page.data(access.offset, len);
    for data in data.chunks_exact_mut(access.size.max(1)) {
        if access.write {
            ports.write(port, data, caller);
        } else {
            ports.read(port, data);
        }
    }
}

impl RunPage {
    /// `len` bytes of the page at `offset`, where KVM exchanges the data of some exits; empty if they would
    /// lie outside the page.
    #[expect(
        unsafe_code,
        reason = "KVM exchanges data behind the structure of the page"
    )]
    fn data(&mut self, offset: usize, len: usize) -> &mut [u8] {
        match offset.checked_add(len) {
            Some(end) if end <= self.size => {
                // SAFETY: inside the mapping, as just checked, and borrowed exclusively.
                let start = unsafe { self.run.as_ptr().cast::<u8>().add(offset) };
                // SAFETY: as above; the kernel does not touch it between run calls.
                unsafe { std::slice::from_raw_parts_mut(start, len) }
            }
            _ => &mut [],
        }
    }
}

/// Completes an access to a model-specific register; `None` gives the guest a general protection fault.
#[expect(unsafe_code, reason = "a member of the run page's union")]
fn answer_msr(page: &mut RunPage, value: Option<u64>) {
    // SAFETY: called for an access to such a register, whose member this is.
    let msr = unsafe { &mut page.run_mut().__bindgen_anon_1.msr };
    msr.error = u8::from(value.is_none());
    msr.data = value.unwrap_or(0);
}

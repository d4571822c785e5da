//! What the device asks of the machine that carries it, and what it is told.

use std::fmt::Debug;
use std::io;

use crate::arch::CpuState;

/// Where a vCPU was when it left the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestRegs {
    /// Linear address of the next instruction.
    pub ip: u64,
    /// Whether the vCPU was in guest user mode.
    pub user: bool,
}

/// A vCPU just out of the guest, on its own thread.
///
/// Asked only when a record needs the registers, so that an exit without one costs nothing.
pub trait Registers {
    /// The registers at the exit; `None` when the hypervisor refuses to tell.
    fn registers(&mut self) -> Option<GuestRegs>;

    /// Everything at the exit; `None` when the hypervisor refuses to tell, and then records have
    /// no callers, registers or stacks.
    fn state(&mut self) -> Option<CpuState> {
        None
    }
}

/// Why a vCPU came back to the VMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExitReason {
    /// Port I/O.
    Io,
    /// Memory-mapped I/O.
    Mmio,
    /// HLT that the hypervisor does not handle by itself.
    Hlt,
    /// A signal was pending for the vCPU thread.
    Signal,
    /// Anything else.
    Other,
}

/// An exit to the VMM: why, and what the guest asked for with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit {
    /// Why.
    pub reason: ExitReason,
    /// Which access it was, of I/O.
    pub access: Option<Access>,
}

/// An access that the VMM is to carry out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    /// The port, or the guest-physical address.
    pub address: u64,
    /// Bytes of one access.
    pub size: u8,
    /// Whether the guest writes.
    pub write: bool,
    /// How many accesses: string instructions make several in one exit.
    pub count: u32,
}

impl From<ExitReason> for Exit {
    fn from(reason: ExitReason) -> Self {
        Self {
            reason,
            access: None,
        }
    }
}

/// The interrupts of a virtio transport.
pub trait Interrupt: Send + Sync + Debug {
    /// Reports used buffers in `queues`, by their indices: one, or two that fell due together. A transport
    /// with one interrupt for all raises it once; one with a vector for each queue raises theirs. Called
    /// without a lock of the device's, from any thread that works for it; it may be called once more
    /// while [`Vpmu::reset`](crate::Vpmu::reset) takes the driver away.
    ///
    /// # Errors
    /// The transport's; the device logs it and goes on.
    fn used(&self, queues: &[u16]) -> io::Result<()>;
}

/// The services that the device asks of the machine that carries it.
///
/// An implementation must not call back into [`Vpmu`](crate::Vpmu) or a
/// [`VcpuSession`](crate::VcpuSession), not even for metrics: the device calls
/// [`exits`](Machine::exits), [`halts`](Machine::halts) and [`draining`](Machine::draining) with locks
/// held, which those take.
pub trait Machine: Send + Sync + Debug {
    /// Every exit of the vCPU so far, from the hypervisor's statistics, only growing, over a restart of
    /// the machine too; `None` when it cannot tell, and then the catalogue has no such event.
    fn exits(&self, vcpu: u32) -> Option<u64>;
    /// Times that the vCPU halted so far; `None` as for [`Machine::exits`].
    fn halts(&self, vcpu: u32) -> Option<u64>;
    /// Whether samples that the host takes of a vCPU's thread while it runs the guest carry the
    /// guest's instruction pointer and mode, kernel and user. Asked once, when an event is opened
    /// for which it matters, and without a lock of the device's: finding it out may take a while.
    ///
    /// By default they do not, and every sample costs an exit.
    fn reports_guest_ips(&self) -> bool {
        false
    }
    /// Starts or stops periodic draining. While it is on, call [`Vpmu::drain`](crate::Vpmu::drain)
    /// about every ten milliseconds from a thread that is no vCPU's.
    ///
    /// By default nobody calls it; samples of the batched engine then come to the guest when it
    /// stops or reads their event, and one that is throttled goes on when its vCPU leaves the guest.
    fn draining(&self, wanted: bool) {
        let _ = wanted;
    }
    /// Makes a vCPU leave the guest that is in its run call, or between
    /// [`VcpuSession::enter`](crate::VcpuSession::enter) and it. No effect on a vCPU that is elsewhere.
    /// Called without a lock of the device's, by the thread that calls
    /// [`Vpmu::flush`](crate::Vpmu::flush), which then waits for
    /// [`VcpuSession::leave`](crate::VcpuSession::leave).
    ///
    /// # Errors
    /// The host's, and by default that it cannot be done; the vCPU is not waited for then.
    fn kick(&self, vcpu: u32) -> io::Result<()> {
        let _ = vcpu;
        Err(io::ErrorKind::Unsupported.into())
    }
}

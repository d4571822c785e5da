//! What the device asks of the machine that carries it, and what it is told.

use std::fmt::Debug;
use std::io;

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

/// What the device asks of the machine that carries it.
///
/// Called with the device's lock held: an implementation must not call back into
/// [`Vpmu`](crate::Vpmu), except for its metrics.
pub trait Machine: Send + Sync + Debug {
    /// Raises the used-buffer interrupt.
    ///
    /// # Errors
    /// The transport's; the device counts it and goes on.
    fn interrupt(&self) -> io::Result<()>;
    /// Every exit of the vCPU so far, from the hypervisor's statistics; `None` when it cannot
    /// tell, and then the catalogue has no such event.
    fn exits(&self, vcpu: u32) -> Option<u64>;
    /// Times that the vCPU halted so far; `None` as for [`Machine::exits`].
    fn halts(&self, vcpu: u32) -> Option<u64>;
}

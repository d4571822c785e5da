//! The services that the VMM provides to the device, and the exits that it reports.

use std::fmt::Debug;
use std::io;

use crate::arch::CpuState;

/// The guest's position at an exit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestRegs {
    /// Linear address of the next instruction.
    pub ip: u64,
    /// Whether the vCPU was in guest user mode.
    pub user: bool,
}

/// A vCPU's registers just after an exit, read on the vCPU's thread.
///
/// The device calls these methods only when a record needs registers, so exits without such a record cost
/// nothing.
pub trait Registers {
    /// The registers at the exit; `None` if the hypervisor does not provide them.
    fn registers(&mut self) -> Option<GuestRegs>;

    /// The whole state at the exit; `None` if the hypervisor does not provide it: records then have
    /// no callers, registers or stacks.
    fn state(&mut self) -> Option<CpuState> {
        None
    }
}

/// Exit reasons.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExitReason {
    /// Port I/O.
    Io,
    /// Memory-mapped I/O.
    Mmio,
    /// HLT that the hypervisor does not handle itself.
    Hlt,
    /// A signal was pending for the vCPU thread.
    Signal,
    /// Any other exit.
    Other,
}

/// An exit to the VMM with its reason and access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit {
    /// The cause.
    pub reason: ExitReason,
    /// The access, for I/O.
    pub access: Option<Access>,
}

/// An access that the VMM must emulate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    /// The port, or the guest-physical address.
    pub address: u64,
    /// Bytes of one access.
    pub size: u8,
    /// Whether the guest writes.
    pub write: bool,
    /// Number of accesses: string instructions make several in one exit.
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
    /// Reports used buffers in `queues`, by their indices: one queue, or two at once. A transport with one interrupt
    /// for all queues raises it once; a transport with a vector for each queue raises the vector of each. Called
    /// without the device's locks, from any thread that works for the device; it may be called once more while
    /// [`Vpmu::reset`](crate::Vpmu::reset) removes the driver.
    ///
    /// # Errors
    /// The transport's error; the device logs it and continues.
    fn used(&self, queues: &[u16]) -> io::Result<()>;
}

/// The services that the VMM provides to the device.
///
/// An implementation must not call back into [`Vpmu`](crate::Vpmu) or a [`VcpuSession`](crate::VcpuSession), not even
/// for metrics: the device calls [`exits`](Machine::exits), [`halts`](Machine::halts) and
/// [`draining`](Machine::draining) while it holds locks that those types take.
pub trait Machine: Send + Sync + Debug {
    /// The number of the vCPU's exits so far, from the hypervisor's statistics. It never decreases, not even
    /// across a restart of the machine. `None` if the machine cannot read it; the catalogue then has no such
    /// event.
    fn exits(&self, vcpu: u32) -> Option<u64>;
    /// Halts of the vCPU so far; `None` as for [`Machine::exits`].
    fn halts(&self, vcpu: u32) -> Option<u64>;
    /// Whether the host's samples of a vCPU's thread in guest mode have the guest's instruction
    /// pointer and mode, kernel and user. Called at most once, when an event that depends on it is
    /// opened or restored, without the device's locks: finding out may take a while.
    ///
    /// Returns `false` by default; every sample then costs an exit.
    fn reports_guest_ips(&self) -> bool {
        false
    }
    /// Starts or stops periodic draining. While it is on, call [`Vpmu::drain`](crate::Vpmu::drain)
    /// about every ten milliseconds from a thread other than a vCPU's.
    ///
    /// Without draining, which is the default, samples of the batched engine reach the guest only at the
    /// guest's commands or at overflows of the vCPU's other events. A throttled event resumes when its vCPU
    /// leaves the guest, or, if it is an event of the batched engine, at the next such command or overflow.
    fn draining(&self, wanted: bool) {
        let _ = wanted;
    }
    /// Makes a vCPU leave the guest if it is in its run call, or between
    /// [`VcpuSession::enter`](crate::VcpuSession::enter) and the run call. Has no effect otherwise. Called
    /// without the device's locks, on the thread that calls [`Vpmu::flush`](crate::Vpmu::flush), which then waits for
    /// [`VcpuSession::leave`](crate::VcpuSession::leave).
    ///
    /// # Errors
    /// The host's error; by default `Unsupported`. The flush then does not wait for the vCPU.
    fn kick(&self, vcpu: u32) -> io::Result<()> {
        let _ = vcpu;
        Err(io::ErrorKind::Unsupported.into())
    }
}

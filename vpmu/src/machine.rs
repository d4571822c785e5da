//! The services that the VMM provides to the device, and the exits that the VMM reports.

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

impl GuestRegs {
    /// Start of the kernel's half of the address space.
    const KERNEL_HALF: u64 = 1 << 63;

    /// The registers of a guest whose host recorded only `ip` while the vCPU kept running. The mode is derived from the
    /// IP: kernel mode in the upper half of the address space, user mode below.
    pub(crate) const fn at(ip: u64) -> Self {
        Self { ip, user: ip < Self::KERNEL_HALF }
    }
}

/// A vCPU's registers just after an exit, read on the vCPU's thread.
///
/// The device calls these methods only when a record needs registers, so exits without such a record cost
/// nothing.
pub trait Registers {
    /// The registers at the exit. `None` if the hypervisor does not provide them.
    fn registers(&mut self) -> Option<GuestRegs>;

    /// The vCPU's whole state at the exit. `None` if the hypervisor does not provide it. Records then have
    /// no call chains, registers or stacks.
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
    /// An HLT instruction that the hypervisor does not handle itself.
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
    /// Number of accesses. A string instruction makes several accesses in one exit.
    pub count: u32,
}

impl From<ExitReason> for Exit {
    fn from(reason: ExitReason) -> Self {
        Self { reason, access: None }
    }
}

/// The interrupts of a virtio transport.
pub trait Interrupt: Send + Sync + Debug {
    /// Reports used buffers to the driver. `queues` contains one or two queue indices. A transport with one interrupt
    /// for all queues raises this interrupt once. A transport with one vector per queue raises the vector of each queue
    /// in `queues`. The device calls this without holding its locks, on any thread that calls into the device. While
    /// [`Vpmu::reset`](crate::Vpmu::reset) removes the driver, the device may still make one such call.
    ///
    /// # Errors
    /// The transport's error. The device logs it and continues.
    fn used(&self, queues: &[u16]) -> io::Result<()>;
}

/// The services that the VMM provides to the device.
///
/// An implementation must not call back into [`Vpmu`](crate::Vpmu) or a [`VcpuSession`](crate::VcpuSession), not even
/// to read metrics. The device calls [`exits`](Machine::exits), [`halts`](Machine::halts) and
/// [`draining`](Machine::draining) while it holds locks that the methods of those types take.
pub trait Machine: Send + Sync + Debug {
    /// How many exits the vCPU has had so far, according to the hypervisor's statistics. The number must never
    /// decrease, not even when the guest restarts. `None` if the VMM cannot read the number. If this is `None` for any
    /// vCPU, the catalogue lacks the event `exits`.
    fn exits(&self, vcpu: u32) -> Option<u64>;
    /// How many times the vCPU has halted so far. `None` if the VMM cannot read the number. If this is `None` for any
    /// vCPU, the catalogue lacks the event `halts`.
    fn halts(&self, vcpu: u32) -> Option<u64>;
    /// Whether the host can sample guest code. When such a host samples a vCPU's thread that runs guest code, it marks
    /// the sample as a guest sample and stores the guest's instruction pointer in it. Called at most once, when an
    /// event that depends on the result is opened or restored. The device holds no locks during the call, because an
    /// implementation may take a while. A remote device ([`Settings::remote`](crate::Settings::remote)) also calls this
    /// when it makes its list of events; without guest addresses, it samples no host counters.
    ///
    /// By default, returns `false`. Every sample then costs an exit.
    fn reports_guest_ips(&self) -> bool {
        false
    }
    /// Switches periodic draining on or off. While draining is on, call [`Vpmu::drain`](crate::Vpmu::drain) about every
    /// ten milliseconds on a thread that runs no vCPU.
    ///
    /// Without draining, which is the default, samples of the batched engine reach the guest only when the guest sends
    /// a command, or when another event of the vCPU overflows. A throttled event of the batched engine resumes at the
    /// next such command or overflow. Other throttled events resume at the next exit of their vCPU.
    fn draining(&self, wanted: bool) {
        let _ = wanted;
    }
    /// Makes a vCPU leave the guest if it is in its run call, or between
    /// [`VcpuSession::enter`](crate::VcpuSession::enter) and the run call. Has no effect otherwise. Called without
    /// holding the device's locks, on the thread that calls [`Vpmu::flush`](crate::Vpmu::flush). The flush then waits
    /// until the vCPU's thread has called [`VcpuSession::leave`](crate::VcpuSession::leave).
    ///
    /// # Errors
    /// The host's error, or `Unsupported` in the default implementation. After an error, the flush does not wait for
    /// the vCPU.
    fn kick(&self, vcpu: u32) -> io::Result<()> {
        let _ = vcpu;
        Err(io::ErrorKind::Unsupported.into())
    }
}

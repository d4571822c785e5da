//! The packets of a trace. Each is a view of bytes that were copied from the area only once. Does not trust their
//! contents.

use vpmu_abi::{
    DETAIL_COUNT_SHIFT, DETAIL_WRITE, EXIT_HLT, EXIT_IO, EXIT_MMIO, EXIT_OTHER, EXIT_SIGNAL, ExitPacket,
    PACKET_COLLISION, PACKET_CUT, PACKET_HARDWARE, PACKET_IP, PACKET_REGS, PACKET_USER, SYNC_LOSS, SYNC_MAGIC,
    SYNC_PAGE, SYNC_RESUME, SYNC_START, SamplePacket, SyncPacket,
};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use crate::arch::packet_register;

/// Alignment of packets; their sizes are multiples of it.
pub const ALIGN: usize = vpmu_abi::PACKET_ALIGN;

/// Cause of a VM exit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// Port I/O emulated by a host program.
    Io,
    /// Memory-mapped I/O emulated by a host program.
    Mmio,
    /// A HLT emulated by a host program.
    Hlt,
    /// A signal to the thread that runs the vCPU.
    Signal,
    /// Another exit that the host's kernel could not handle itself.
    Other,
    /// A hardware exit reason: VMX's or SVM's number, from the processor's manual.
    Hardware(u16),
    /// An unknown number.
    Unknown(u16),
}

/// The access that the host emulated at an exit, where it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Access {
    /// The port or, if [`Access::memory`], the guest-physical address.
    pub address: u64,
    /// Whether the access is to memory.
    pub memory: bool,
    /// Whether the guest writes; otherwise it reads.
    pub write: bool,
    /// Bytes per repetition.
    pub size: u8,
    /// Repetitions: more than one for string instructions.
    pub count: u32,
}

/// One exit of a vCPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(transparent)]
pub struct Exit(ExitPacket);

impl Exit {
    /// The cause.
    #[must_use]
    pub fn reason(&self) -> Reason {
        let number = self.0.reason.get();
        if self.0.flags & PACKET_HARDWARE != 0 {
            return Reason::Hardware(number);
        }
        match u64::from(number) {
            EXIT_IO => Reason::Io,
            EXIT_MMIO => Reason::Mmio,
            EXIT_HLT => Reason::Hlt,
            EXIT_SIGNAL => Reason::Signal,
            EXIT_OTHER => Reason::Other,
            _ => Reason::Unknown(number),
        }
    }

    /// The access, for port and memory-mapped I/O where it is known.
    #[must_use]
    pub fn access(&self) -> Option<Access> {
        let (memory, count) = match self.reason() {
            Reason::Io => (false, self.0.detail.get() >> DETAIL_COUNT_SHIFT),
            Reason::Mmio => (true, 1),
            _ => return None,
        };
        let [size, ..] = self.0.detail.get().to_le_bytes();
        if size == 0 {
            return None;
        }
        Some(Access {
            address: self.0.qualification.get(),
            memory,
            write: self.0.detail.get() & DETAIL_WRITE != 0,
            size,
            count: u32::try_from(count).unwrap_or(u32::MAX),
        })
    }

    /// The vCPU.
    #[must_use]
    pub fn vcpu(&self) -> u32 {
        self.0.vcpu.get()
    }

    /// Time of the exit, in nanoseconds of the guest's clock.
    #[must_use]
    pub fn time(&self) -> u64 {
        self.0.time.get()
    }

    /// The guest's instruction pointer, where it is known.
    #[must_use]
    pub fn ip(&self) -> Option<u64> {
        (self.0.flags & PACKET_IP != 0).then_some(self.0.ip.get())
    }

    /// Whether the guest was in user mode.
    #[must_use]
    pub fn user(&self) -> bool {
        self.0.flags & PACKET_USER != 0
    }

    /// Nanoseconds from the exit until the vCPU re-entered the guest. If [`Exit::is_cut`], the host
    /// knows only part of this time, and the value can be 0.
    #[must_use]
    pub fn outside(&self) -> u64 {
        self.0.outside.get()
    }

    /// Whether the end of the exit is unknown, because the trace ended or was paused before the vCPU
    /// re-entered the guest, or because the host did not record the re-entry.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        self.0.flags & PACKET_CUT != 0
    }

    /// The packet's first detail word; for a hardware exit, the exit qualification (VMX) or EXITINFO1
    /// (SVM), without the bits that describe the host.
    #[must_use]
    pub fn qualification(&self) -> u64 {
        self.0.qualification.get()
    }

    /// The packet's second detail word; for a hardware exit, the IDT-vectoring information (VMX) or
    /// EXITINFO2 (SVM), without the bits that describe the host.
    #[must_use]
    pub fn detail(&self) -> u64 {
        self.0.detail.get()
    }

    /// The running process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.0.pid.get()
    }

    /// The running thread.
    #[must_use]
    pub fn tid(&self) -> u32 {
        self.0.tid.get()
    }

    /// The packet's sequence number in the trace. Lost packets have numbers, too.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.0.sequence.get()
    }
}

/// One sample with registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(transparent)]
pub struct TraceSample(SamplePacket);

impl TraceSample {
    /// The vCPU.
    #[must_use]
    pub fn vcpu(&self) -> u32 {
        self.0.vcpu.get()
    }

    /// Time of the sample, in nanoseconds of the guest's clock.
    #[must_use]
    pub fn time(&self) -> u64 {
        self.0.time.get()
    }

    /// The next instruction's address, where it is known.
    #[must_use]
    pub fn ip(&self) -> Option<u64> {
        (self.0.flags & PACKET_IP != 0).then_some(self.0.ip.get())
    }

    /// Whether the guest was in user mode.
    #[must_use]
    pub fn user(&self) -> bool {
        self.0.flags & PACKET_USER != 0
    }

    /// Events that the sample represents.
    #[must_use]
    pub fn period(&self) -> u64 {
        self.0.period.get()
    }

    /// Whether the sample represents several overflows.
    #[must_use]
    pub fn is_collision(&self) -> bool {
        self.0.flags & PACKET_COLLISION != 0
    }

    /// The running process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.0.pid.get()
    }

    /// The running thread.
    #[must_use]
    pub fn tid(&self) -> u32 {
        self.0.tid.get()
    }

    /// The packet's sequence number in the trace. Lost packets have numbers, too.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.0.sequence.get()
    }

    /// The value of register `number`, numbered as in the kernel's `asm/perf_regs.h`; `None` if the
    /// packet lacks the register.
    #[must_use]
    pub fn register(&self, number: u32) -> Option<u64> {
        let register = self.0.regs.get(packet_register(number)?)?;
        (self.0.flags & PACKET_REGS != 0).then_some(register.get())
    }
}

/// A position where a reader can begin. Contains the number of bytes that were lost before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(transparent)]
pub struct Sync(SyncPacket);

impl Sync {
    /// Whether the trace begins here, or resumes after it was disabled.
    #[must_use]
    pub fn is_start(&self) -> bool {
        self.0.flags & SYNC_START != 0
    }

    /// Whether packets right before this sync were lost.
    #[must_use]
    pub fn is_loss(&self) -> bool {
        self.0.flags & SYNC_LOSS != 0
    }

    /// Whether the trace was paused before this sync.
    #[must_use]
    pub fn is_resume(&self) -> bool {
        self.0.flags & SYNC_RESUME != 0
    }

    /// Whether this sync begins a page of the area.
    #[must_use]
    pub fn is_page(&self) -> bool {
        self.0.flags & SYNC_PAGE != 0
    }

    /// The device's number for the trace's packet format.
    #[must_use]
    pub fn format(&self) -> u16 {
        self.0.format.get()
    }

    /// The vCPU of the packets that follow.
    #[must_use]
    pub fn vcpu(&self) -> u32 {
        self.0.vcpu.get()
    }

    /// The traced event's id, as returned by [`crate::Event::id`].
    #[must_use]
    pub fn event(&self) -> u64 {
        self.0.event.get()
    }

    /// Time of the sync, in nanoseconds of the guest's clock.
    #[must_use]
    pub fn time(&self) -> u64 {
        self.0.time.get()
    }

    /// The guest's TSC at that time.
    #[must_use]
    pub fn tsc(&self) -> u64 {
        self.0.tsc.get()
    }

    /// Sequence number of the next packet.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.0.sequence.get()
    }

    /// Bytes of the trace lost so far.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.0.lost.get()
    }

    /// The event's config.
    #[must_use]
    pub fn config(&self) -> u64 {
        self.0.config.get()
    }

    pub(super) fn has_magic(&self) -> bool {
        self.0.magic.get() == SYNC_MAGIC
    }
}

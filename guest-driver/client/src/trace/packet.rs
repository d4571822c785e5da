//! The packets of a trace, as the host writes them: views of bytes that were copied once.
//! Trusts no byte of them, and knows nothing of areas.

use vpmu_abi::{
    DETAIL_COUNT_SHIFT, DETAIL_WRITE, EXIT_HLT, EXIT_IO, EXIT_MMIO, EXIT_OTHER, EXIT_SIGNAL,
    ExitPacket, PACKET_COLLISION, PACKET_CUT, PACKET_HARDWARE, PACKET_IP, PACKET_REGS, PACKET_USER,
    SYNC_LOSS, SYNC_MAGIC, SYNC_PAGE, SYNC_RESUME, SYNC_START, SamplePacket, SyncPacket,
};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use crate::arch::packet_register;

/// Packets begin at multiples of this, and are as long.
pub const ALIGN: usize = vpmu_abi::PACKET_ALIGN;

/// What made the CPU leave the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// Port I/O that a program of the host had to do.
    Io,
    /// Memory-mapped I/O that a program of the host had to do.
    Mmio,
    /// A HLT that a program of the host had to do.
    Hlt,
    /// A signal to the thread that runs the vCPU.
    Signal,
    /// Anything else that the host's kernel could not do by itself.
    Other,
    /// By the processor's own number, as its manual has it: VMX's or SVM's.
    Hardware(u16),
    /// A number that is unknown here.
    Unknown(u16),
}

/// What an exit was to do on the guest's behalf, where it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Access {
    /// The port, or with [`Access::memory`] the guest-physical address.
    pub address: u64,
    /// It is of memory.
    pub memory: bool,
    /// To the device; else from it.
    pub write: bool,
    /// Bytes at a time.
    pub size: u8,
    /// How many times: more than once for string instructions.
    pub count: u32,
}

/// One exit of a vCPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(transparent)]
pub struct Exit(ExitPacket);

impl Exit {
    /// Why.
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

    /// Of port and memory-mapped I/O, where it is known.
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

    /// Which vCPU.
    #[must_use]
    pub fn vcpu(&self) -> u32 {
        self.0.vcpu.get()
    }

    /// When: nanoseconds of the guest's clock.
    #[must_use]
    pub fn time(&self) -> u64 {
        self.0.time.get()
    }

    /// The instruction that the vCPU stood at, where it is known.
    #[must_use]
    pub fn ip(&self) -> Option<u64> {
        (self.0.flags & PACKET_IP != 0).then_some(self.0.ip.get())
    }

    /// The guest was in user mode.
    #[must_use]
    pub fn user(&self) -> bool {
        self.0.flags & PACKET_USER != 0
    }

    /// Nanoseconds until it was back in the guest; of a cut one, those up to the trace's end.
    #[must_use]
    pub fn outside(&self) -> u64 {
        self.0.outside.get()
    }

    /// The trace ended before the vCPU was back in the guest.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        self.0.flags & PACKET_CUT != 0
    }

    /// As it stands in the packet: of the hardware's exits what the processor says first.
    #[must_use]
    pub fn qualification(&self) -> u64 {
        self.0.qualification.get()
    }

    /// As it stands in the packet: of the hardware's exits what the processor says second.
    #[must_use]
    pub fn detail(&self) -> u64 {
        self.0.detail.get()
    }

    /// The process that ran.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.0.pid.get()
    }

    /// The thread that ran.
    #[must_use]
    pub fn tid(&self) -> u32 {
        self.0.tid.get()
    }

    /// Its number in its trace; what was lost has had numbers, too.
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
    /// Which vCPU.
    #[must_use]
    pub fn vcpu(&self) -> u32 {
        self.0.vcpu.get()
    }

    /// When: nanoseconds of the guest's clock.
    #[must_use]
    pub fn time(&self) -> u64 {
        self.0.time.get()
    }

    /// The instruction that comes next, where it is known.
    #[must_use]
    pub fn ip(&self) -> Option<u64> {
        (self.0.flags & PACKET_IP != 0).then_some(self.0.ip.get())
    }

    /// The guest was in user mode.
    #[must_use]
    pub fn user(&self) -> bool {
        self.0.flags & PACKET_USER != 0
    }

    /// How much it stands for.
    #[must_use]
    pub fn period(&self) -> u64 {
        self.0.period.get()
    }

    /// It stands for several overflows.
    #[must_use]
    pub fn is_collision(&self) -> bool {
        self.0.flags & PACKET_COLLISION != 0
    }

    /// The process that ran.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.0.pid.get()
    }

    /// The thread that ran.
    #[must_use]
    pub fn tid(&self) -> u32 {
        self.0.tid.get()
    }

    /// Its number in its trace; what was lost has had numbers, too.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.0.sequence.get()
    }

    /// The register of the kernel's number `number` for it, if the packet has registers.
    #[must_use]
    pub fn register(&self, number: u32) -> Option<u64> {
        let register = self.0.regs.get(packet_register(number)?)?;
        (self.0.flags & PACKET_REGS != 0).then_some(register.get())
    }
}

/// Where a reader can begin, and what is missing before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(transparent)]
pub struct Sync(SyncPacket);

impl Sync {
    /// The trace begins, or goes on after it was disabled.
    #[must_use]
    pub fn is_start(&self) -> bool {
        self.0.flags & SYNC_START != 0
    }

    /// What came right before it was lost.
    #[must_use]
    pub fn is_loss(&self) -> bool {
        self.0.flags & SYNC_LOSS != 0
    }

    /// The trace was paused before it.
    #[must_use]
    pub fn is_resume(&self) -> bool {
        self.0.flags & SYNC_RESUME != 0
    }

    /// A page of the area begins.
    #[must_use]
    pub fn is_page(&self) -> bool {
        self.0.flags & SYNC_PAGE != 0
    }

    /// What packets the trace has, by the device's number.
    #[must_use]
    pub fn format(&self) -> u16 {
        self.0.format.get()
    }

    /// The vCPU that the trace goes on with.
    #[must_use]
    pub fn vcpu(&self) -> u32 {
        self.0.vcpu.get()
    }

    /// The event whose trace it is, by [`crate::Event::id`].
    #[must_use]
    pub fn event(&self) -> u64 {
        self.0.event.get()
    }

    /// When: nanoseconds of the guest's clock.
    #[must_use]
    pub fn time(&self) -> u64 {
        self.0.time.get()
    }

    /// The guest's TSC at that time.
    #[must_use]
    pub fn tsc(&self) -> u64 {
        self.0.tsc.get()
    }

    /// The number of the packet that comes next.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.0.sequence.get()
    }

    /// Bytes of the trace that were lost so far.
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

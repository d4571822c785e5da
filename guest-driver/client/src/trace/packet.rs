//! The packets of a trace, as the host writes them: views of bytes that were copied once.
//! Trusts no byte of them, and knows nothing of areas.

use crate::arch::packet_register;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

/// Packets begin at multiples of this, and are as long.
pub const ALIGN: usize = 64;

pub(super) const PADDING: u8 = 0;
pub(super) const EXIT: u8 = 1;
pub(super) const SAMPLE: u8 = 2;
pub(super) const SYNC: u8 = 3;
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"VPMUSYNC");

const USER: u8 = 1 << 0;
const IP: u8 = 1 << 1;
const CUT: u8 = 1 << 2;
const HARDWARE: u8 = 1 << 3;
const REGS: u8 = 1 << 4;
const COLLISION: u8 = 1 << 5;

const WRITE: u64 = 1 << 8;
const COUNT_SHIFT: u32 = 32;

const SYNC_START: u8 = 1 << 0;
const SYNC_LOSS: u8 = 1 << 1;
const SYNC_RESUME: u8 = 1 << 2;
const SYNC_PAGE: u8 = 1 << 3;

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
#[repr(C)]
pub struct Exit {
    kind: u8,
    flags: u8,
    reason: U16,
    vcpu: U32,
    time: U64,
    ip: U64,
    outside: U64,
    qualification: U64,
    detail: U64,
    pid: U32,
    tid: U32,
    sequence: U64,
}

impl Exit {
    /// Why.
    #[must_use]
    pub fn reason(&self) -> Reason {
        let number = self.reason.get();
        if self.flags & HARDWARE != 0 {
            return Reason::Hardware(number);
        }
        match number {
            2 => Reason::Io,
            3 => Reason::Mmio,
            4 => Reason::Hlt,
            5 => Reason::Signal,
            6 => Reason::Other,
            _ => Reason::Unknown(number),
        }
    }

    /// Of port and memory-mapped I/O, where it is known.
    #[must_use]
    pub fn access(&self) -> Option<Access> {
        let (memory, count) = match self.reason() {
            Reason::Io => (false, self.detail.get() >> COUNT_SHIFT),
            Reason::Mmio => (true, 1),
            _ => return None,
        };
        let [size, ..] = self.detail.get().to_le_bytes();
        if size == 0 {
            return None;
        }
        Some(Access {
            address: self.qualification.get(),
            memory,
            write: self.detail.get() & WRITE != 0,
            size,
            count: u32::try_from(count).unwrap_or(u32::MAX),
        })
    }

    /// Which vCPU.
    #[must_use]
    pub fn vcpu(&self) -> u32 {
        self.vcpu.get()
    }

    /// When: nanoseconds of the guest's clock.
    #[must_use]
    pub fn time(&self) -> u64 {
        self.time.get()
    }

    /// The instruction that the vCPU stood at, where it is known.
    #[must_use]
    pub fn ip(&self) -> Option<u64> {
        (self.flags & IP != 0).then_some(self.ip.get())
    }

    /// The guest was in user mode.
    #[must_use]
    pub fn user(&self) -> bool {
        self.flags & USER != 0
    }

    /// Nanoseconds until it was back in the guest; of a cut one, those up to the trace's end.
    #[must_use]
    pub fn outside(&self) -> u64 {
        self.outside.get()
    }

    /// The trace ended before the vCPU was back in the guest.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        self.flags & CUT != 0
    }

    /// As it stands in the packet: of the hardware's exits what the processor says first.
    #[must_use]
    pub fn qualification(&self) -> u64 {
        self.qualification.get()
    }

    /// As it stands in the packet: of the hardware's exits what the processor says second.
    #[must_use]
    pub fn detail(&self) -> u64 {
        self.detail.get()
    }

    /// The process that ran.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid.get()
    }

    /// The thread that ran.
    #[must_use]
    pub fn tid(&self) -> u32 {
        self.tid.get()
    }

    /// Its number in its trace; what was lost has had numbers, too.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.sequence.get()
    }
}

/// One sample with registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct TraceSample {
    kind: u8,
    flags: u8,
    reserved: U16,
    vcpu: U32,
    time: U64,
    ip: U64,
    period: U64,
    pid: U32,
    tid: U32,
    sequence: U64,
    reserved_1: [U64; 2],
    regs: [U64; 24],
}

impl TraceSample {
    /// Which vCPU.
    #[must_use]
    pub fn vcpu(&self) -> u32 {
        self.vcpu.get()
    }

    /// When: nanoseconds of the guest's clock.
    #[must_use]
    pub fn time(&self) -> u64 {
        self.time.get()
    }

    /// The instruction that comes next, where it is known.
    #[must_use]
    pub fn ip(&self) -> Option<u64> {
        (self.flags & IP != 0).then_some(self.ip.get())
    }

    /// The guest was in user mode.
    #[must_use]
    pub fn user(&self) -> bool {
        self.flags & USER != 0
    }

    /// How much it stands for.
    #[must_use]
    pub fn period(&self) -> u64 {
        self.period.get()
    }

    /// It stands for several overflows.
    #[must_use]
    pub fn is_collision(&self) -> bool {
        self.flags & COLLISION != 0
    }

    /// The process that ran.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid.get()
    }

    /// The thread that ran.
    #[must_use]
    pub fn tid(&self) -> u32 {
        self.tid.get()
    }

    /// Its number in its trace; what was lost has had numbers, too.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.sequence.get()
    }

    /// The register of the kernel's number `number` for it, if the packet has registers.
    #[must_use]
    pub fn register(&self, number: u32) -> Option<u64> {
        let register = self.regs.get(packet_register(number)?)?;
        (self.flags & REGS != 0).then_some(register.get())
    }
}

/// Where a reader can begin, and what is missing before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Sync {
    kind: u8,
    flags: u8,
    format: U16,
    vcpu: U32,
    magic: U64,
    event: U64,
    time: U64,
    tsc: U64,
    sequence: U64,
    lost: U64,
    config: U64,
}

impl Sync {
    /// The trace begins, or goes on after it was disabled.
    #[must_use]
    pub fn is_start(&self) -> bool {
        self.flags & SYNC_START != 0
    }

    /// What came right before it was lost.
    #[must_use]
    pub fn is_loss(&self) -> bool {
        self.flags & SYNC_LOSS != 0
    }

    /// The trace was paused before it.
    #[must_use]
    pub fn is_resume(&self) -> bool {
        self.flags & SYNC_RESUME != 0
    }

    /// A page of the area begins.
    #[must_use]
    pub fn is_page(&self) -> bool {
        self.flags & SYNC_PAGE != 0
    }

    /// What packets the trace has, by the device's number.
    #[must_use]
    pub fn format(&self) -> u16 {
        self.format.get()
    }

    /// The vCPU that the trace goes on with.
    #[must_use]
    pub fn vcpu(&self) -> u32 {
        self.vcpu.get()
    }

    /// The event whose trace it is, by [`crate::Event::id`].
    #[must_use]
    pub fn event(&self) -> u64 {
        self.event.get()
    }

    /// When: nanoseconds of the guest's clock.
    #[must_use]
    pub fn time(&self) -> u64 {
        self.time.get()
    }

    /// The guest's TSC at that time.
    #[must_use]
    pub fn tsc(&self) -> u64 {
        self.tsc.get()
    }

    /// The number of the packet that comes next.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.sequence.get()
    }

    /// Bytes of the trace that were lost so far.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost.get()
    }

    /// The event's config.
    #[must_use]
    pub fn config(&self) -> u64 {
        self.config.get()
    }

    pub(super) fn has_magic(&self) -> bool {
        self.magic.get() == MAGIC
    }
}

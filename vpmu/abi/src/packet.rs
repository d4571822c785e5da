//! Packets of AUX areas. Each type of packet has a fixed size. Packets are aligned to [`PACKET_ALIGN`] bytes.

use zerocopy::little_endian::{U16, U32, U64};

/// Alignment of packets, counted from the beginning of the area.
pub const PACKET_ALIGN: usize = 64;

/// Format of a trace: [`ExitPacket`], [`SyncPacket`].
pub const FORMAT_EXITS: u16 = 1;
/// Format of a trace: [`SamplePacket`], [`SyncPacket`].
pub const FORMAT_SAMPLES: u16 = 2;
/// First trace format of the VMM's producers ([`KIND_VMM_TRACE`](super::KIND_VMM_TRACE)). The producers use the
/// formats 128 to 255.
pub const FORMAT_VMM: u16 = 128;

/// First byte of a packet: padding. Readers skip [`PACKET_ALIGN`] bytes.
pub const PACKET_PADDING: u8 = 0;
/// First byte of a packet: [`ExitPacket`].
pub const PACKET_EXIT: u8 = 1;
/// First byte of a packet: [`SamplePacket`].
pub const PACKET_SAMPLE: u8 = 2;
/// First byte of a packet: [`SyncPacket`].
pub const PACKET_SYNC: u8 = 3;

/// [`SyncPacket::magic`]: `VPMUSYNC`.
pub const SYNC_MAGIC: u64 = 0x434e_5953_554d_5056;
/// [`SyncPacket::flags`]: the trace begins, or was off until now.
pub const SYNC_START: u8 = 1 << 0;
/// [`SyncPacket::flags`]: packets right before this one were lost.
pub const SYNC_LOSS: u8 = 1 << 1;
/// [`SyncPacket::flags`]: the trace was paused before this packet.
pub const SYNC_RESUME: u8 = 1 << 2;
/// [`SyncPacket::flags`]: a page of the area begins here.
pub const SYNC_PAGE: u8 = 1 << 3;

wire! {
    /// A packet from which a reader can start to decode. The device writes one where the trace begins, where it
    /// resumes, after lost packets, and at the beginning of each page of the area. 64 bytes.
    pub struct SyncPacket {
        /// [`PACKET_SYNC`].
        pub kind: u8,
        /// `SYNC_*`.
        pub flags: u8,
        /// One of `FORMAT_*`.
        pub format: U16,
        /// The vCPU of the packets that follow.
        pub vcpu: U32,
        /// [`SYNC_MAGIC`].
        pub magic: U64,
        /// The id of the trace's event.
        pub event: U64,
        /// Guest time, nanoseconds.
        pub time: U64,
        /// The guest's TSC at `time`.
        pub tsc: U64,
        /// Number of the packet that follows; see [`ExitPacket::sequence`].
        pub sequence: U64,
        /// Bytes of the trace lost so far.
        pub lost: U64,
        /// The event's config.
        pub config: U64,
    }
}

/// [`ExitPacket::flags`], [`SamplePacket::flags`]: the vCPU was in guest user mode.
pub const PACKET_USER: u8 = 1 << 0;
/// [`ExitPacket::flags`], [`SamplePacket::flags`]: `ip` and the mode are known.
pub const PACKET_IP: u8 = 1 << 1;
/// [`ExitPacket::flags`]: the trace ended, or the vCPU stopped, before guest re-entry, so `outside` is
/// incomplete.
pub const PACKET_CUT: u8 = 1 << 2;
/// [`ExitPacket::flags`]: `reason` is the hardware's exit reason (VMX, SVM), and `qualification` and `detail`
/// hold the hardware's exit information. Without this flag, `reason` is one of `EXIT_*`.
pub const PACKET_HARDWARE: u8 = 1 << 3;
/// [`SamplePacket::flags`]: the registers are known.
pub const PACKET_REGS: u8 = 1 << 4;
/// [`SamplePacket::flags`]: the packet represents several overflows that the device found at one exit.
pub const PACKET_COLLISION: u8 = 1 << 5;

wire! {
    /// One exit of a vCPU. It lasts from the guest's last instruction before the exit to the guest's first
    /// instruction after it. 64 bytes.
    pub struct ExitPacket {
        /// [`PACKET_EXIT`].
        pub kind: u8,
        /// `PACKET_*`.
        pub flags: u8,
        /// The exit reason.
        pub reason: U16,
        /// The vCPU.
        pub vcpu: U32,
        /// Guest time at the exit, nanoseconds.
        pub time: U64,
        /// Linear address of the instruction at the exit.
        pub ip: U64,
        /// Nanoseconds until guest re-entry.
        pub outside: U64,
        /// Port I/O: the port. Memory-mapped I/O: the guest-physical address.
        pub qualification: U64,
        /// Port and memory-mapped I/O: bits 0 to 7 hold the size of an access in bytes, and [`DETAIL_WRITE`] is
        /// set for a write. Port I/O: bits 32 to 63 hold the number of accesses.
        pub detail: U64,
        /// The running process.
        pub pid: U32,
        /// The running thread.
        pub tid: U32,
        /// Number of the packet in its trace, starting at zero. Lost packets are numbered too, so a gap
        /// reveals a loss. Sync packets and padding are not numbered.
        pub sequence: U64,
    }
}

/// [`ExitPacket::detail`]: the guest wrote.
pub const DETAIL_WRITE: u64 = 1 << 8;
/// [`ExitPacket::detail`] of port I/O: shift of the number of accesses.
pub const DETAIL_COUNT_SHIFT: u32 = 32;

wire! {
    /// One sample with registers. 256 bytes.
    pub struct SamplePacket {
        /// [`PACKET_SAMPLE`].
        pub kind: u8,
        /// `PACKET_*`.
        pub flags: u8,
        /// Zero.
        pub reserved: U16,
        /// The vCPU.
        pub vcpu: U32,
        /// Guest time, nanoseconds.
        pub time: U64,
        /// Linear address of the next instruction.
        pub ip: U64,
        /// Count of the event that `PACE_*` selects, from the previous sample to this one.
        pub period: U64,
        /// See [`ExitPacket::pid`].
        pub pid: U32,
        /// See [`ExitPacket::tid`].
        pub tid: U32,
        /// See [`ExitPacket::sequence`].
        pub sequence: U64,
        /// Zero.
        pub reserved_1: [U64; 2],
        /// The vCPU's registers. On x86-64, in the order of perf's register numbers: AX to SS, DS to GS, R8
        /// to R15. On aarch64: X0 to X8, X19 to X29, LR, SP, PC, PSTATE.
        pub regs: [U64; 24],
    }
}

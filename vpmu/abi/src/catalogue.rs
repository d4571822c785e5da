//! Event kinds and the catalogue.

use zerocopy::little_endian::{U32, U64};

use super::ControlHeader;

/// Event kind: generic hardware events; config is perf's `PERF_COUNT_HW_*`. No kind is 0, so that a program that leaves
/// out the kind opens nothing.
pub const KIND_HARDWARE: u32 = 6;
/// Event kind: the host's software events on the vCPU thread; config is perf's `PERF_COUNT_SW_*`.
pub const KIND_SOFTWARE: u32 = 1;
/// Event kind: hardware cache events; config encodes the cache, the operation and the result, as for perf's
/// `PERF_TYPE_HW_CACHE`.
pub const KIND_HW_CACHE: u32 = 3;
/// Event kind: raw hardware events, where the operator allows them; config is the raw event code of the
/// host's PMU.
pub const KIND_RAW: u32 = 4;
/// Event kind: guest TSC ticks that pass while the event is active; config is zero.
pub const KIND_TSC: u32 = 0x100;
/// Event kind: VM exits; config is one of `EXIT_*`.
pub const KIND_EXITS: u32 = 0x101;
/// Event kind: halts of the vCPU; config is zero.
pub const KIND_HALTS: u32 = 0x102;
/// Event kind: nanoseconds that the vCPU thread ran on a CPU inside the run call (`KVM_RUN`); config is zero.
pub const KIND_GUEST_TIME: u32 = 0x103;
/// Event kind: marks written to the doorbell; config is the value of the marks to count, or [`MARK_ANY`].
pub const KIND_MARK: u32 = 0x104;

/// Event kind: a trace of VM exits, written to the AUX area; config is one of `EXIT_*`. The count is the number
/// of bytes traced, including lost bytes.
pub const KIND_EXIT_TRACE: u32 = 0x105;
/// Event kind: a trace of samples with registers, written to the AUX area; config is one of `PACE_*` and
/// selects the event whose overflows trigger the samples. The count is in bytes, as for [`KIND_EXIT_TRACE`].
pub const KIND_SAMPLE_TRACE: u32 = 0x106;
/// Event kind: a trace that the host's PMU writes, such as Intel PT. Reserved: the device refuses this kind,
/// because no host can confine such a trace to one guest.
pub const KIND_HOST_TRACE: u32 = 0x107;
/// Event kind: a trace written by a producer in the VMM; config is the producer's number. The count is
/// in bytes. The device opens such a trace only if the catalogue lists its producer.
pub const KIND_VMM_TRACE: u32 = 0x108;

/// [`KIND_SAMPLE_TRACE`] config: the period is in nanoseconds of perf's `cpu-clock` on the vCPU thread.
pub const PACE_CPU_CLOCK: u64 = 0;
/// [`KIND_SAMPLE_TRACE`] config: the period is a number of exits that reached the VMM.
pub const PACE_EXITS: u64 = 1;
/// [`KIND_SAMPLE_TRACE`] config: the period is a number of CPU cycles.
pub const PACE_CYCLES: u64 = 2;
/// [`KIND_SAMPLE_TRACE`] config: the period is a number of instructions.
pub const PACE_INSTRUCTIONS: u64 = 3;

/// [`KIND_MARK`] config: marks of any value.
pub const MARK_ANY: u64 = 1 << 32;

/// [`KIND_EXITS`], [`KIND_EXIT_TRACE`] config: every exit, including exits that the host kernel
/// handles itself.
pub const EXIT_ALL: u64 = 0;
/// [`KIND_EXITS`], [`KIND_EXIT_TRACE`] config: every exit that reached the VMM.
pub const EXIT_USER: u64 = 1;
/// [`KIND_EXITS`], [`KIND_EXIT_TRACE`] config: port I/O that reached the VMM.
pub const EXIT_IO: u64 = 2;
/// [`KIND_EXITS`], [`KIND_EXIT_TRACE`] config: memory-mapped I/O that reached the VMM.
pub const EXIT_MMIO: u64 = 3;
/// [`KIND_EXITS`], [`KIND_EXIT_TRACE`] config: HLT that reached the VMM.
pub const EXIT_HLT: u64 = 4;
/// [`KIND_EXITS`], [`KIND_EXIT_TRACE`] config: exits caused by a signal to the vCPU thread.
pub const EXIT_SIGNAL: u64 = 5;
/// [`KIND_EXITS`], [`KIND_EXIT_TRACE`] config: exits that reached the VMM for any reason other than
/// [`EXIT_IO`] to [`EXIT_SIGNAL`].
pub const EXIT_OTHER: u64 = 6;

wire! {
    /// The request of [`CONTROL_CATALOGUE`](super::CONTROL_CATALOGUE).
    pub struct CatalogueRequest {
        /// `event` is zero.
        pub header: ControlHeader,
        /// First entry to read.
        pub first: U32,
        /// Maximum number of entries to read. The device returns fewer if the writable buffer is too small.
        pub count: U32,
    }
}

wire! {
    /// One event that this host can count. Texts are UTF-8, padded with zeros.
    pub struct CatalogueEntry {
        /// One of `KIND_*`.
        pub kind: U32,
        /// `CATALOGUE_*`.
        pub flags: U32,
        /// The config that opens the event.
        pub config: U64,
        /// The name for `vperf -e`: lower-case letters, digits and dashes.
        pub name: [u8; 40],
        /// Unit of the count: empty for plain numbers, else `ns`, `ticks` or `bytes`.
        pub unit: [u8; 16],
        /// Source of the count, such as `host perf: task-clock`.
        pub source: [u8; 56],
        /// Text that describes the counted events.
        pub counts: [u8; 128],
    }
}

/// [`CatalogueEntry::flags`]: the event can sample.
pub const CATALOGUE_SAMPLES: u32 = 1 << 0;
/// [`CatalogueEntry::flags`]: the count excludes host work for the vCPU.
pub const CATALOGUE_GUEST_ONLY: u32 = 1 << 1;
/// [`CatalogueEntry::flags`]: the entry covers every config of its kind, not only
/// [`CatalogueEntry::config`]: marks of any value, or raw events with any event code.
pub const CATALOGUE_ANY_CONFIG: u32 = 1 << 2;
/// [`CatalogueEntry::flags`]: `exclude_user` and `exclude_kernel` are honoured.
pub const CATALOGUE_EXCLUDES: u32 = 1 << 3;
/// [`CatalogueEntry::flags`]: the event writes packets to an AUX area; the eight bits starting at
/// [`CATALOGUE_FORMAT_SHIFT`] hold the packet format.
pub const CATALOGUE_AUX: u32 = 1 << 4;
/// [`CatalogueEntry::flags`]: number of the lowest of the eight bits that hold the packet format, one of `FORMAT_*`.
pub const CATALOGUE_FORMAT_SHIFT: u32 = 16;

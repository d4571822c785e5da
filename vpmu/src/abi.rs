//! The wire: every number and layout that the guest sees, and no logic.
//!
//! `SPEC.md` gives the meaning; this module is the source of truth for sizes, offsets and
//! values. `guest-driver/linux/vpmu_abi.h` is its C twin, compared field by field by
//! `tests/abi.rs`. All integers are little-endian; reserved fields are zero.

use zerocopy::little_endian::{I32, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The virtio device id; unassigned by the virtio specification.
pub const DEVICE_ID: u32 = 63;
/// What a page is, everywhere in this interface.
pub const PAGE_SIZE: usize = 4096;
/// The version of this interface, in [`Config::version`].
pub const VERSION: u32 = 1;

/// Feature bit: the device writes samples into rings in guest memory.
pub const F_RING: u32 = 0;
/// Feature bit: the device reads who is running from a page per vCPU ([`TaskPage`]).
pub const F_TASK_PAGE: u32 = 1;
/// Feature bit: shared memory region [`SHM_DOORBELL`] exists.
pub const F_DOORBELL: u32 = 2;

/// Virtqueue index of the control queue.
pub const QUEUE_CONTROL: u16 = 0;
/// Virtqueue index of the event queue (device to driver, [`Notice`]).
pub const QUEUE_EVENT: u16 = 1;
/// Virtqueue index of vCPU 0's queue; vCPU n has `QUEUE_VCPU + n`.
pub const QUEUE_VCPU: u16 = 2;

/// Shared memory region id of the doorbell page: a 32-bit write at its offset 0 is a mark
/// with the written value on the writing vCPU.
pub const SHM_DOORBELL: u8 = 0;

/// The device's configuration space.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct Config {
    /// [`VERSION`].
    pub version: U32,
    /// Number of vCPUs, and so of vCPU queues.
    pub vcpus: U32,
    /// Most events open at once in this VM.
    pub max_events: U32,
    /// Most data pages of one ring, a power of two.
    pub max_ring_pages: U32,
    /// Number of entries in the catalogue.
    pub catalogue_len: U32,
    /// Whose work a count holds where the backing can tell: [`COUNT_GUEST`] or [`COUNT_VCPU`].
    pub count_mode: U32,
    /// Added to the scaled TSC, in nanoseconds.
    pub time_zero: U64,
    /// Record time = `time_zero + ((guest_tsc * time_mult) >> time_shift)` nanoseconds, the
    /// product taken in 128 bits.
    pub time_mult: U32,
    /// See [`Config::time_mult`].
    pub time_shift: U16,
    /// Zero.
    pub reserved: U16,
    /// Guest TSC frequency in kHz.
    pub tsc_khz: U32,
    /// Zero.
    pub reserved2: U32,
}

/// [`Config::count_mode`]: only while the guest runs.
pub const COUNT_GUEST: u32 = 0;
/// [`Config::count_mode`]: host work for the vCPU included.
pub const COUNT_VCPU: u32 = 1;

/// Event kind: generic hardware events; config is perf's `PERF_COUNT_HW_*`.
pub const KIND_HARDWARE: u32 = 0;
/// Event kind: the host's software events on the vCPU thread; config is `PERF_COUNT_SW_*`.
pub const KIND_SOFTWARE: u32 = 1;
/// Event kind: hardware cache events; config as for perf's `PERF_TYPE_HW_CACHE`.
pub const KIND_HW_CACHE: u32 = 3;
/// Event kind: raw hardware events, where the operator allows them.
pub const KIND_RAW: u32 = 4;
/// Event kind: guest TSC ticks that pass while the event is active; config is zero.
pub const KIND_TSC: u32 = 0x100;
/// Event kind: VM exits; config is one of `EXIT_*`.
pub const KIND_EXITS: u32 = 0x101;
/// Event kind: times that the vCPU halted; config is zero.
pub const KIND_HALTS: u32 = 0x102;
/// Event kind: nanoseconds that the vCPU thread had a CPU inside the run call; config is zero.
pub const KIND_GUEST_TIME: u32 = 0x103;
/// Event kind: marks placed through the doorbell; config is the value to count.
pub const KIND_MARK: u32 = 0x104;

/// [`KIND_EXITS`] config: every exit, those that the host kernel handles by itself included.
pub const EXIT_ALL: u64 = 0;
/// [`KIND_EXITS`] config: every exit that reached the VMM.
pub const EXIT_USER: u64 = 1;
/// [`KIND_EXITS`] config: port I/O that reached the VMM.
pub const EXIT_IO: u64 = 2;
/// [`KIND_EXITS`] config: memory-mapped I/O that reached the VMM.
pub const EXIT_MMIO: u64 = 3;
/// [`KIND_EXITS`] config: HLT that reached the VMM.
pub const EXIT_HLT: u64 = 4;
/// [`KIND_EXITS`] config: a signal to the vCPU thread.
pub const EXIT_SIGNAL: u64 = 5;
/// [`KIND_EXITS`] config: any other exit that reached the VMM.
pub const EXIT_OTHER: u64 = 6;

/// First words of a control request; which struct follows depends on the operation.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct ControlHeader {
    /// One of `CONTROL_*`.
    pub op: U32,
    /// Zero.
    pub reserved: U32,
    /// The event meant; zero where the operation has none.
    pub event: U64,
}

/// Control operation: open an event; [`OpenRequest`], [`OpenReply`].
pub const CONTROL_OPEN: u32 = 1;
/// Control operation: close an event; header only, [`ControlReply`].
pub const CONTROL_CLOSE: u32 = 2;
/// Control operation: attach ring pages to an event; [`MapRequest`], [`ControlReply`].
pub const CONTROL_MAP: u32 = 3;
/// Control operation: detach them; once answered, the device writes there no more.
pub const CONTROL_UNMAP: u32 = 4;
/// Control operation: read the catalogue; [`CatalogueRequest`], then [`ControlReply`] and entries.
pub const CONTROL_CATALOGUE: u32 = 5;
/// Control operation: say where a vCPU's [`TaskPage`] lies; [`TaskPageRequest`], [`ControlReply`].
pub const CONTROL_TASK_PAGE: u32 = 6;

/// The answer to a control request that returns nothing but success.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct ControlReply {
    /// 0 or a positive Linux errno.
    pub status: U32,
    /// Operation-specific: entries returned for the catalogue, else zero.
    pub value: U32,
}

/// [`CONTROL_OPEN`].
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct OpenRequest {
    /// `event` is zero.
    pub header: ControlHeader,
    /// One of `KIND_*`.
    pub kind: U32,
    /// A vCPU index, or [`CONTEXT_TASK`].
    pub context: U32,
    /// Which event of the kind.
    pub config: U64,
    /// A sample every so many; zero counts only.
    pub period: U64,
    /// perf's `PERF_SAMPLE_*`, out of [`SAMPLE_ALLOWED`].
    pub sample_type: U64,
    /// `OPEN_*`.
    pub flags: U32,
    /// A wakeup every so many records, or bytes with [`OPEN_WATERMARK`]; zero: every full page.
    pub wakeup: U32,
    /// [`ENGINE_ANY`], [`ENGINE_EXIT`] or [`ENGINE_BATCHED`].
    pub engine: U32,
    /// Zero.
    pub reserved: U32,
    /// Zero, or the event whose ring this one writes to and whose id its records carry
    /// (inherited events).
    pub parent: U64,
}

/// [`OpenRequest::context`]: the driver schedules the event in and out on vCPU queues.
pub const CONTEXT_TASK: u32 = u32::MAX;

/// [`OpenRequest::flags`]: opens enabled.
pub const OPEN_ENABLED: u32 = 1 << 0;
/// [`OpenRequest::flags`]: guest user mode is not counted.
pub const OPEN_EXCLUDE_USER: u32 = 1 << 1;
/// [`OpenRequest::flags`]: guest kernel mode is not counted.
pub const OPEN_EXCLUDE_KERNEL: u32 = 1 << 2;
/// [`OpenRequest::flags`]: `wakeup` is in bytes.
pub const OPEN_WATERMARK: u32 = 1 << 3;

/// `PERF_SAMPLE_IP | TID | TIME | ID | CPU | PERIOD | STREAM_ID | IDENTIFIER`, with perf's values.
pub const SAMPLE_ALLOWED: u64 =
    1 << 0 | 1 << 1 | 1 << 2 | 1 << 6 | 1 << 7 | 1 << 8 | 1 << 9 | 1 << 16;

/// [`OpenRequest::engine`]: the device chooses.
pub const ENGINE_ANY: u32 = 0;
/// The overflow ends the run call and the registers are read: exact on any host.
pub const ENGINE_EXIT: u32 = 1;
/// The host samples and the device rewrites: no exit per sample.
pub const ENGINE_BATCHED: u32 = 2;

/// The answer to [`CONTROL_OPEN`].
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct OpenReply {
    /// 0 or a positive Linux errno.
    pub status: U32,
    /// The engine chosen; [`ENGINE_ANY`] for an event that only counts.
    pub engine: U32,
    /// The event's id: never zero, never used again while the VM lives.
    pub id: U64,
}

/// [`CONTROL_MAP`]; `pages` addresses (`U64`) follow in the same readable bytes: the metadata
/// page, then 2^n data pages or none.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct MapRequest {
    /// `event` names the event.
    pub header: ControlHeader,
    /// 1, or 1 + 2^n.
    pub pages: U32,
    /// `MAP_*`.
    pub flags: U32,
}

/// [`MapRequest::flags`]: the reader moves `data_tail`; without it the ring overwrites.
pub const MAP_WRITABLE: u32 = 1 << 0;

/// [`CONTROL_CATALOGUE`].
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct CatalogueRequest {
    /// `event` is zero.
    pub header: ControlHeader,
    /// First entry wanted.
    pub first: U32,
    /// Most entries wanted; the writable bytes bound it too.
    pub count: U32,
}

/// One event that this host can count. Texts are UTF-8, padded with zeros.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct CatalogueEntry {
    /// One of `KIND_*`.
    pub kind: U32,
    /// `CATALOGUE_*`.
    pub flags: U32,
    /// The config to open it with.
    pub config: U64,
    /// As written after `-e`: lower case, digits and dashes.
    pub name: [u8; 40],
    /// Of the count: empty for plain numbers, else `ns`, `ticks`.
    pub unit: [u8; 16],
    /// What counts it, in words for people: `host perf: task-clock`.
    pub source: [u8; 56],
    /// What exactly is counted.
    pub counts: [u8; 128],
}

/// [`CatalogueEntry::flags`]: can sample.
pub const CATALOGUE_SAMPLES: u32 = 1 << 0;
/// [`CatalogueEntry::flags`]: host work for the vCPU is left out.
pub const CATALOGUE_GUEST_ONLY: u32 = 1 << 1;
/// [`CatalogueEntry::flags`]: any config value may be given (`mark`).
pub const CATALOGUE_ANY_CONFIG: u32 = 1 << 2;
/// [`CatalogueEntry::flags`]: `exclude_user` and `exclude_kernel` are honoured.
pub const CATALOGUE_EXCLUDES: u32 = 1 << 3;

/// [`CONTROL_TASK_PAGE`].
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct TaskPageRequest {
    /// `event` is zero.
    pub header: ControlHeader,
    /// Whose page.
    pub vcpu: U32,
    /// Zero.
    pub reserved: U32,
    /// Guest-physical address, page-aligned; zero takes the page away.
    pub address: U64,
}

/// Who runs on a vCPU; the driver writes it at each task switch, the device reads it there.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct TaskPage {
    /// Process id; in one aligned 64-bit word with `tid`, written and read as one.
    pub pid: U32,
    /// Thread id.
    pub tid: U32,
    /// Guest TSC at the switch.
    pub since: U64,
}

/// One command on a vCPU queue. A buffer carries any number of them, then room for as many
/// [`Reply`]; the answers stand there when the notifying instruction has retired.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct Command {
    /// One of `COMMAND_*`.
    pub op: U32,
    /// Zero.
    pub reserved: U32,
    /// The event meant; zero for [`COMMAND_VCPU`].
    pub event: U64,
    /// The new period for [`COMMAND_PERIOD`], else zero.
    pub value: U64,
    /// Zero.
    pub reserved2: U64,
}

/// vCPU command: which vCPU notified; [`Reply::value`] is its index.
pub const COMMAND_VCPU: u32 = 1;
/// vCPU command: the event's state leaves *off*; its count goes on.
pub const COMMAND_ENABLE: u32 = 2;
/// vCPU command: the event's state becomes *off*.
pub const COMMAND_DISABLE: u32 = 3;
/// vCPU command: a task event's task begins to run here.
pub const COMMAND_IN: u32 = 4;
/// vCPU command: it ceases to.
pub const COMMAND_OUT: u32 = 5;
/// vCPU command: nothing but the answer.
pub const COMMAND_READ: u32 = 6;
/// vCPU command: the count becomes zero; the times stay.
pub const COMMAND_RESET: u32 = 7;
/// vCPU command: a new period, from this moment.
pub const COMMAND_PERIOD: u32 = 8;

/// The answer to a [`Command`]: the event as it is after it.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct Reply {
    /// 0 or a positive Linux errno.
    pub status: U32,
    /// One of `STATE_*`.
    pub state: I32,
    /// The count.
    pub value: U64,
    /// Nanoseconds enabled with its context scheduled in.
    pub time_enabled: U64,
    /// Nanoseconds of those in which the backing counted.
    pub time_running: U64,
}

/// [`Reply::state`]: its backing was lost; the count stands still.
pub const STATE_ERROR: i32 = -2;
/// [`Reply::state`]: disabled.
pub const STATE_OFF: i32 = -1;
/// [`Reply::state`]: enabled, its context not running.
pub const STATE_INACTIVE: i32 = 0;
/// [`Reply::state`]: counting.
pub const STATE_ACTIVE: i32 = 1;

/// What the device tells the driver, in buffers that the driver posts on the event queue.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct Notice {
    /// One of `NOTICE_*`.
    pub kind: U32,
    /// Zero.
    pub reserved: U32,
    /// The event meant.
    pub event: U64,
}

/// [`Notice::kind`]: the event's ring has crossed its wakeup mark.
pub const NOTICE_WAKEUP: u32 = 1;
/// [`Notice::kind`]: the event is in [`STATE_ERROR`].
pub const NOTICE_ERROR: u32 = 2;

/// The first page of a ring: Linux's `struct perf_event_mmap_page`, of which these fields are
/// written. Offsets and sizes are the kernel's.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Metadata {
    /// Version of this layout; zero.
    pub version: U32,
    /// Lowest version compatible; zero.
    pub compat_version: U32,
    /// Sequence lock: odd while the fields up to `time_zero` change.
    pub lock: U32,
    /// Hardware counter index; zero: no counter to read.
    pub index: U32,
    /// Added to the hardware counter; with index zero, the count.
    pub offset: U64,
    /// See [`Reply::time_enabled`].
    pub time_enabled: U64,
    /// See [`Reply::time_running`].
    pub time_running: U64,
    /// `cap_*` bits.
    pub capabilities: U64,
    /// Width of the hardware counter.
    pub pmc_width: U16,
    /// Shift of the conversion from TSC to time.
    pub time_shift: U16,
    /// Multiplier of it.
    pub time_mult: U32,
    /// Offset of it, for `time_enabled`.
    pub time_offset: U64,
    /// Offset of it, for record times.
    pub time_zero: U64,
    /// Bytes of this header that are used.
    pub size: U32,
    /// Zero.
    pub reserved_1: U32,
    /// Cycles when the conversion was set up.
    pub time_cycles: U64,
    /// Mask of the cycles.
    pub time_mask: U64,
    /// Zero.
    pub reserved: [u8; 928],
    /// Bytes produced so far; written by the device alone, never read back.
    pub data_head: U64,
    /// Bytes consumed so far; written by the reader.
    pub data_tail: U64,
    /// Where the data begins, from the start of this page.
    pub data_offset: U64,
    /// Bytes of data pages.
    pub data_size: U64,
    /// As `data_head`, of the AUX area.
    pub aux_head: U64,
    /// As `data_tail`, of the AUX area.
    pub aux_tail: U64,
    /// Where the AUX area begins.
    pub aux_offset: U64,
    /// Its size.
    pub aux_size: U64,
}

//! The first page of a ring, as Linux has it.

use zerocopy::little_endian::{U16, U32, U64};

wire! {
    /// The first page of a ring: Linux's `struct perf_event_mmap_page`, of which these fields are
    /// written. Offsets and sizes are the kernel's.
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
        /// See [`Reply::time_enabled`](super::Reply::time_enabled).
        pub time_enabled: U64,
        /// See [`Reply::time_running`](super::Reply::time_running).
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
}

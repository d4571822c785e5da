//! The first page of a ring, in Linux's layout.

use zerocopy::little_endian::{U16, U32, U64};

wire! {
    /// The first page of a ring: the fields of Linux's `struct perf_event_mmap_page` that the device writes.
    /// Each field has the same offset and size as in the kernel.
    pub struct Metadata {
        /// Version of this layout; zero.
        pub version: U32,
        /// Lowest compatible version; zero.
        pub compat_version: U32,
        /// Sequence lock: odd while the device updates any of the fields `offset` through `time_offset`.
        pub lock: U32,
        /// Hardware counter index; zero if there is no counter to read.
        pub index: U32,
        /// Value to add to the hardware counter; the whole count if `index` is zero.
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
        /// Multiplier of the conversion.
        pub time_mult: U32,
        /// Nanoseconds to add to the converted TSC to get the time since this page was written.
        pub time_offset: U64,
        /// Nanoseconds to add to the converted TSC to get the time of a record.
        pub time_zero: U64,
        /// Bytes of this header in use.
        pub size: U32,
        /// Zero.
        pub reserved_1: U32,
        /// For a clock narrower than 64 bits: the value of the clock when the conversion was set up.
        pub time_cycles: U64,
        /// Mask of the clock's bits.
        pub time_mask: U64,
        /// Zero.
        pub reserved: [u8; 928],
        /// Bytes produced so far. Only the device writes this field, and it never reads the field back.
        pub data_head: U64,
        /// Bytes consumed so far; written by the reader.
        pub data_tail: U64,
        /// Offset of the data from the start of this page.
        pub data_offset: U64,
        /// Bytes of data pages.
        pub data_size: U64,
        /// Like `data_head`, for the AUX area.
        pub aux_head: U64,
        /// Like `data_tail`, for the AUX area.
        pub aux_tail: U64,
        /// Offset at which programs map the AUX area.
        pub aux_offset: U64,
        /// Bytes of the AUX area.
        pub aux_size: U64,
    }
}

//! Parses the kernel's `struct perf_event_attr` of a listed persistent event, which another program
//! may have opened.

use vpmu_abi::uapi::{ATTR_SIZE, CONFIG1_AUX_PAUSE, CONFIG1_AUX_RESUME, CONFIG1_AUX_START_PAUSED};
use zerocopy::{FromBytes, Immutable, KnownLayout};

use super::{Engine, EventAttr};

/// `struct perf_event_attr` as of Linux 6.1.
#[derive(Debug, Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Raw {
    type_: u32,
    _size: u32,
    config: u64,
    period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup: u32,
    _bp_type: u32,
    config1: u64,
    _config2: u64,
    _branch_sample_type: u64,
    regs_user: u64,
    stack_user: u32,
    _clockid: i32,
    regs_intr: u64,
    aux_watermark: u32,
    max_stack: u16,
    _reserved: u16,
    _aux_sample_size: u32,
    _reserved_3: u32,
    _sig_data: u64,
}

const _: () = assert!(size_of::<Raw>() == ATTR_SIZE);

// Bit numbers in `flags`.
const DISABLED: u32 = 0;
const INHERIT: u32 = 1;
const PINNED: u32 = 2;
const EXCLUDE_USER: u32 = 4;
const EXCLUDE_KERNEL: u32 = 5;
const FREQ: u32 = 10;
const INHERIT_STAT: u32 = 11;
const ENABLE_ON_EXEC: u32 = 12;
const WATERMARK: u32 = 14;
const SAMPLE_ID_ALL: u32 = 18;
const EXCLUDE_CHAIN_KERNEL: u32 = 21;
const EXCLUDE_CHAIN_USER: u32 = 22;
const WRITE_BACKWARD: u32 = 27;

impl EventAttr {
    /// Parses the attributes of a persistent event that counts every task on `cpu`.
    pub(crate) fn from_bytes(bytes: &[u8; ATTR_SIZE], cpu: i32, engine: Engine) -> Self {
        let raw: Raw = zerocopy::transmute!(*bytes);
        let flag = |bit: u32| raw.flags >> bit & 1 != 0;
        Self {
            pmu_type: raw.type_,
            config: raw.config,
            pid: -1,
            cpu,
            period: raw.period,
            freq: flag(FREQ),
            sample_type: raw.sample_type,
            read_format: raw.read_format,
            wakeup: raw.wakeup,
            watermark: flag(WATERMARK),
            disabled: flag(DISABLED),
            inherit: flag(INHERIT),
            enable_on_exec: flag(ENABLE_ON_EXEC),
            exclude_user: flag(EXCLUDE_USER),
            exclude_kernel: flag(EXCLUDE_KERNEL),
            pinned: flag(PINNED),
            inherit_stat: flag(INHERIT_STAT),
            sample_id_all: flag(SAMPLE_ID_ALL),
            backward: flag(WRITE_BACKWARD),
            max_stack: raw.max_stack,
            exclude_callchain_kernel: flag(EXCLUDE_CHAIN_KERNEL),
            exclude_callchain_user: flag(EXCLUDE_CHAIN_USER),
            regs_user: raw.regs_user,
            regs_intr: raw.regs_intr,
            stack_user: raw.stack_user,
            aux_watermark: raw.aux_watermark,
            aux_start_paused: raw.config1 & CONFIG1_AUX_START_PAUSED != 0,
            aux_pause: raw.config1 & CONFIG1_AUX_PAUSE != 0,
            aux_resume: raw.config1 & CONFIG1_AUX_RESUME != 0,
            engine,
            persistent: true,
            enable_on_starter: false,
        }
    }
}

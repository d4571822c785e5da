//! Calls the driver without the client library: ioctls, mmap and plain words. Tests of the driver's rules must make
//! exactly the calls that they name, but the library would hide some calls or correct their arguments.

mod attrs;
mod device;
mod doorbell;
mod event;
mod persistent;

use std::io;
use std::os::fd::BorrowedFd;

pub(crate) use attrs::{
    AUX_PAUSE, AUX_RESUME, AUX_START_PAUSED, Later, aux_watermark, sampling, silent, waking, watermark, with_aux_action,
};
pub(crate) use device::{Device, IOC_MARK, kernels, kernels_own};
pub(crate) use doorbell::Doorbell;
pub(crate) use event::Event;
pub(crate) use persistent::{IN_WINDOW, OPERATORS, OVERWRITES};
pub(crate) use vpmu_abi::{
    ENGINE_ANY, ENGINE_BATCHED, ENGINE_EXIT, EXIT_ALL, EXIT_MMIO, EXIT_SIGNAL, EXIT_USER, MARK_ANY, PACE_CPU_CLOCK,
    PACE_EXITS,
};

pub(crate) const PAGE: usize = 4096;

/// Kinds, for `VPMU_CONFIG(kind, event)`.
pub(crate) const KIND_SOFTWARE: u64 = vpmu_abi::KIND_SOFTWARE as u64;
pub(crate) const KIND_TSC: u64 = vpmu_abi::KIND_TSC as u64;
pub(crate) const KIND_EXITS: u64 = vpmu_abi::KIND_EXITS as u64;
pub(crate) const KIND_MARK: u64 = vpmu_abi::KIND_MARK as u64;
pub(crate) const KIND_EXIT_TRACE: u64 = vpmu_abi::KIND_EXIT_TRACE as u64;
pub(crate) const KIND_SAMPLE_TRACE: u64 = vpmu_abi::KIND_SAMPLE_TRACE as u64;
pub(crate) const KIND_HOST_TRACE: u64 = vpmu_abi::KIND_HOST_TRACE as u64;
/// The exits of [`port_write`](crate::cpu::port_write).
pub(crate) const EXIT_PORT: u64 = crate::arch::EXIT_PORT;
pub(crate) const SW_CPU_CLOCK: u64 = 0;
pub(crate) const SW_TASK_CLOCK: u64 = 1;

/// perf's constants, converted to the types of the fields that hold them.
pub(crate) const FORMAT_ENABLED: u64 = 1 << 0;
pub(crate) const FORMAT_RUNNING: u64 = 1 << 1;
pub(crate) const FORMAT_ID: u64 = 1 << 2;
pub(crate) const FORMAT_GROUP: u64 = 1 << 3;
pub(crate) const FORMAT_LOST: u64 = 1 << 4;
pub(crate) const FLAG_NO_GROUP: u64 = 1 << 0;
/// Options of the driver's own, above perf's flags: bits of `config1`.
const FLAG_CONFIG1_SHIFT: u32 = 32;
pub(crate) const FLAG_PERSISTENT: u64 = vpmu_abi::uapi::CONFIG1_PERSISTENT << FLAG_CONFIG1_SHIFT;
pub(crate) const FLAG_ON_STARTER: u64 = vpmu_abi::uapi::CONFIG1_ENABLE_ON_STARTER << FLAG_CONFIG1_SHIFT;
/// The argument of an ioctl that means the whole group.
pub(crate) const WHOLE_GROUP: u64 = 1;

/// The task, CPU, group, engine and flags with which an event is opened. The engine and the driver's own options are put
/// into `config1`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct How<'a> {
    pub(crate) pid: i32,
    pub(crate) cpu: i32,
    pub(crate) group: Option<BorrowedFd<'a>>,
    pub(crate) engine: u32,
    pub(crate) flags: u64,
}

impl How<'_> {
    /// On the calling thread.
    pub(crate) const OWN: Self = Self { pid: 0, cpu: -1, group: None, engine: ENGINE_ANY, flags: 0 };

    /// Everything on a CPU.
    pub(crate) const fn on_cpu(cpu: i32) -> Self {
        Self { pid: -1, cpu, ..Self::OWN }
    }
}

impl How<'_> {
    /// The bits of `config1` for the engine and the driver's own options.
    fn config1(self) -> u64 {
        u64::from(self.engine) << vpmu_abi::uapi::CONFIG1_ENGINE_SHIFT | self.flags >> FLAG_CONFIG1_SHIFT
    }

    /// The flags of `perf_event_open(2)`.
    fn perf_flags(self) -> u64 {
        self.flags & ((1 << FLAG_CONFIG1_SHIFT) - 1)
    }
}

impl<'a> How<'a> {
    /// The same with that engine.
    pub(crate) const fn by(self, engine: u32) -> Self {
        Self { engine, ..self }
    }

    /// The same with these flags, too.
    pub(crate) const fn with(self, flags: u64) -> Self {
        Self { flags: self.flags | flags, ..self }
    }

    /// The same, but in the group of that leader.
    pub(crate) const fn led_by(self, leader: BorrowedFd<'a>) -> Self {
        Self { group: Some(leader), ..self }
    }
}

fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Returns the errno of a call, or `None` if the call succeeded.
pub(crate) fn refused<T>(result: io::Result<T>) -> Option<i32> {
    result.err().and_then(|error| error.raw_os_error())
}

//! The system interface as it is: ioctls, mmap and words, with nothing between a test and the
//! rule it tests. What the client library would hide or repair is in plain sight here.
#![expect(
    clippy::cast_possible_truncation,
    reason = "takes words apart; guests are 64-bit machines"
)]
#![expect(unsafe_code, reason = "the edge to the kernel")]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use perf_event_open_sys::bindings::{self, perf_event_attr};

pub(crate) const PAGE: usize = 4096;

/// What marks, exits and clocks are opened by: `VPMU_CONFIG(kind, event)`.
pub(crate) const KIND_SOFTWARE: u64 = 1;
pub(crate) const KIND_TSC: u64 = 0x100;
pub(crate) const KIND_EXITS: u64 = 0x101;
pub(crate) const KIND_MARK: u64 = 0x104;
pub(crate) const EXIT_IO: u64 = 2;
pub(crate) const EXIT_MMIO: u64 = 3;
pub(crate) const EXIT_SIGNAL: u64 = 5;
pub(crate) const SW_CPU_CLOCK: u64 = 0;
pub(crate) const SW_TASK_CLOCK: u64 = 1;

pub(crate) const ENGINE_ANY: u32 = 0;
pub(crate) const ENGINE_EXIT: u32 = 1;
pub(crate) const ENGINE_BATCHED: u32 = 2;

/// perf's numbers, in the width of the fields that hold them.
pub(crate) const FORMAT_ENABLED: u64 = 1 << 0;
pub(crate) const FORMAT_RUNNING: u64 = 1 << 1;
pub(crate) const FORMAT_ID: u64 = 1 << 2;
pub(crate) const FORMAT_GROUP: u64 = 1 << 3;
pub(crate) const FORMAT_LOST: u64 = 1 << 4;
pub(crate) const FLAG_NO_GROUP: u64 = 1 << 0;
pub(crate) const FLAG_OUTPUT: u64 = 1 << 1;
/// The argument of an ioctl that means the whole group.
pub(crate) const GROUP: u64 = 1;

const IOC_INFO: u64 = 0x8040_b600;
const IOC_OPEN: u64 = 0x4020_b601;
/// Also for the assembly that places marks with registers of its own.
pub(crate) const IOC_MARK: u64 = 0xb603;
const IOC_ENGINE: u64 = 0x8004_b604;

/// `struct vpmu_info`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Info {
    pub(crate) version: u32,
    pub(crate) vcpus: u32,
    pub(crate) max_events: u32,
    pub(crate) max_ring_pages: u32,
    pub(crate) catalogue_len: u32,
    pub(crate) count_mode: u32,
    pub(crate) time_zero: u64,
    pub(crate) time_mult: u32,
    pub(crate) time_shift: u32,
    pub(crate) pmu_type: u32,
    pub(crate) tsc_khz: u32,
    pub(crate) max_sample_rate: u32,
    pub(crate) reserved: [u32; 3],
}

/// `struct vpmu_open`.
#[repr(C)]
struct RawOpen {
    attr: u64,
    pid: i32,
    cpu: i32,
    group_fd: i32,
    engine: u32,
    flags: u64,
}

/// perf's attributes as some later kernel may have them.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Later {
    pub(crate) attr: perf_event_attr,
    pub(crate) more: [u64; 8],
}

/// Whose event, in which group, by which engine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct How<'a> {
    pub(crate) pid: i32,
    pub(crate) cpu: i32,
    pub(crate) group: Option<BorrowedFd<'a>>,
    pub(crate) engine: u32,
    pub(crate) flags: u64,
}

impl How<'_> {
    /// The calling thread's.
    pub(crate) const OWN: Self = Self {
        pid: 0,
        cpu: -1,
        group: None,
        engine: ENGINE_ANY,
        flags: 0,
    };

    /// Everything on a CPU.
    pub(crate) const fn on_cpu(cpu: i32) -> Self {
        Self {
            pid: -1,
            cpu,
            ..Self::OWN
        }
    }
}

fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// The errno of what must be refused, `None` if it was not.
pub(crate) fn refused<T>(result: io::Result<T>) -> Option<i32> {
    result.err().and_then(|error| error.raw_os_error())
}

/// `/dev/vpmu`.
#[derive(Debug)]
pub(crate) struct Device {
    file: File,
    pub(crate) info: Info,
}

impl Device {
    pub(crate) fn open() -> io::Result<Self> {
        let file = File::options().read(true).write(true).open("/dev/vpmu")?;
        let mut info = Info::default();
        // SAFETY: the request writes one Info, which `info` has room for.
        checked(unsafe { libc::ioctl(file.as_raw_fd(), IOC_INFO, &raw mut info) })?;
        Ok(Self { file, info })
    }

    /// An event of the PMU: disabled, counting, its reading the count alone.
    pub(crate) fn attr(&self, kind: u64, event: u64) -> perf_event_attr {
        let mut attr = perf_event_attr {
            type_: self.info.pmu_type,
            size: size_of::<perf_event_attr>() as u32,
            config: kind << 48 | event,
            ..perf_event_attr::default()
        };
        attr.set_disabled(1);
        attr
    }

    /// A sample of these fields every `period` marks of `value`.
    pub(crate) fn marks(&self, value: u64, period: u64, sample_type: u64) -> perf_event_attr {
        sampling(self.attr(KIND_MARK, value), period, sample_type)
    }

    /// Opens it; the kernel may write the attr's size.
    pub(crate) fn open_raw(&self, attr: &mut perf_event_attr, how: How<'_>) -> io::Result<Event> {
        self.open_at(ptr::from_mut(attr), how)
    }

    /// Opens by attributes that have more behind them, as a later kernel's may.
    pub(crate) fn open_later(&self, later: &mut Later) -> io::Result<Event> {
        self.open_at(ptr::from_mut(later).cast(), How::OWN)
    }

    /// `attr` may be written to, and what its size says is behind it may be read.
    fn open_at(&self, attr: *mut perf_event_attr, how: How<'_>) -> io::Result<Event> {
        let request = RawOpen {
            attr: attr.expose_provenance() as u64,
            pid: how.pid,
            cpu: how.cpu,
            group_fd: how.group.map_or(-1, |fd| fd.as_raw_fd()),
            engine: how.engine,
            flags: how.flags | u64::from(bindings::PERF_FLAG_FD_CLOEXEC),
        };
        // SAFETY: the driver reads the request and the attr, and may write the attr's size;
        // the callers' references to them live until it returns.
        let fd =
            checked(unsafe { libc::ioctl(self.file.as_raw_fd(), IOC_OPEN, &raw const request) })?;
        // SAFETY: a descriptor that the kernel has just given to this call alone.
        Ok(Event(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    pub(crate) fn open_event(&self, attr: &perf_event_attr, how: How<'_>) -> io::Result<Event> {
        self.open_raw(&mut { *attr }, how)
    }

    /// The same, enabled.
    pub(crate) fn start(&self, attr: &perf_event_attr, how: How<'_>) -> io::Result<Event> {
        let event = self.open_event(attr, how)?;
        event.enable(0)?;
        Ok(event)
    }

    pub(crate) fn mark(&self, value: u64) -> io::Result<()> {
        // SAFETY: the request takes its argument by value.
        checked(unsafe { libc::ioctl(self.file.as_raw_fd(), IOC_MARK, value) })?;
        Ok(())
    }

    /// Many of them.
    pub(crate) fn place(&self, value: u64, times: u64) -> io::Result<()> {
        (0..times).try_for_each(|_| self.mark(value))
    }

    /// Record time of a value of the TSC.
    pub(crate) fn time_of(&self, tsc: u64) -> u64 {
        let scaled = (u128::from(tsc) * u128::from(self.info.time_mult)) >> self.info.time_shift;
        self.info.time_zero.wrapping_add(scaled as u64)
    }
}

impl AsRawFd for Device {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

/// An attr that samples.
pub(crate) fn sampling(attr: perf_event_attr, period: u64, sample_type: u64) -> perf_event_attr {
    let mut attr = perf_event_attr {
        sample_type,
        ..attr
    };
    attr.__bindgen_anon_1 = bindings::perf_event_attr__bindgen_ty_1 {
        sample_period: period,
    };
    attr
}

/// A wakeup every so many records.
pub(crate) fn waking(mut attr: perf_event_attr, records: u32) -> perf_event_attr {
    attr.set_watermark(0);
    attr.__bindgen_anon_2 = bindings::perf_event_attr__bindgen_ty_2 {
        wakeup_events: records,
    };
    attr
}

/// A wakeup every so many bytes.
pub(crate) fn watermark(mut attr: perf_event_attr, bytes: u32) -> perf_event_attr {
    attr.set_watermark(1);
    attr.__bindgen_anon_2 = bindings::perf_event_attr__bindgen_ty_2 {
        wakeup_watermark: bytes,
    };
    attr
}

/// Never a wakeup before something is lost.
pub(crate) fn silent(attr: perf_event_attr) -> perf_event_attr {
    watermark(attr, u32::MAX)
}

/// perf's own event of the guest's kernel: what others' code makes of the same program.
pub(crate) fn kernels_own(attr: &perf_event_attr) -> io::Result<Event> {
    let flags = bindings::PERF_FLAG_FD_CLOEXEC.into();
    let mut attr = *attr;
    // SAFETY: the kernel reads the attr and may write its size; it lives until it returns.
    let fd =
        checked(unsafe { perf_event_open_sys::perf_event_open(&raw mut attr, 0, -1, -1, flags) })?;
    // SAFETY: as in `Device::open_raw`.
    Ok(Event(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// An open event.
#[derive(Debug)]
pub(crate) struct Event(OwnedFd);

impl Event {
    fn ioctl(&self, request: bindings::perf_event_ioctls, argument: u64) -> io::Result<i32> {
        // SAFETY: none of the requests that come here writes memory; those that read it get
        // an address that their caller below keeps alive.
        checked(unsafe { libc::ioctl(self.0.as_raw_fd(), u64::from(request), argument) })
    }

    pub(crate) fn enable(&self, flags: u64) -> io::Result<i32> {
        self.ioctl(bindings::ENABLE, flags)
    }

    pub(crate) fn disable(&self, flags: u64) -> io::Result<i32> {
        self.ioctl(bindings::DISABLE, flags)
    }

    pub(crate) fn reset(&self, flags: u64) -> io::Result<i32> {
        self.ioctl(bindings::RESET, flags)
    }

    pub(crate) fn refresh(&self, overflows: u64) -> io::Result<i32> {
        self.ioctl(bindings::REFRESH, overflows)
    }

    pub(crate) fn period(&self, period: u64) -> io::Result<i32> {
        let address = ptr::from_ref(&period).expose_provenance() as u64;
        self.ioctl(bindings::PERIOD, address)
    }

    /// Records go to `target`'s ring; -1: to its own again.
    pub(crate) fn output_to(&self, target: RawFd) -> io::Result<i32> {
        self.ioctl(bindings::SET_OUTPUT, i64::from(target).cast_unsigned())
    }

    pub(crate) fn pause(&self, paused: bool) -> io::Result<i32> {
        self.ioctl(bindings::PAUSE_OUTPUT, paused.into())
    }

    pub(crate) fn modify(&self, attr: &perf_event_attr) -> io::Result<i32> {
        let address = ptr::from_ref(attr).expose_provenance() as u64;
        self.ioctl(bindings::MODIFY_ATTRIBUTES, address)
    }

    pub(crate) fn id(&self) -> io::Result<u64> {
        let mut id = 0_u64;
        // SAFETY: the request writes one u64.
        checked(unsafe { libc::ioctl(self.0.as_raw_fd(), u64::from(bindings::ID), &raw mut id) })?;
        Ok(id)
    }

    pub(crate) fn engine(&self) -> io::Result<u32> {
        let mut engine = 0_u32;
        // SAFETY: the request writes one u32.
        checked(unsafe { libc::ioctl(self.0.as_raw_fd(), IOC_ENGINE, &raw mut engine) })?;
        Ok(engine)
    }

    /// read(2) with a buffer of `bytes`, as words.
    pub(crate) fn read_into(&self, bytes: usize) -> io::Result<Vec<u64>> {
        let mut words = vec![0_u64; bytes.div_ceil(8)];
        // SAFETY: the buffer has at least `bytes` bytes.
        let got = unsafe { libc::read(self.0.as_raw_fd(), words.as_mut_ptr().cast(), bytes) };
        let got = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
        words.truncate(got / 8);
        Ok(words)
    }

    /// All that a reading has.
    pub(crate) fn read(&self) -> io::Result<Vec<u64>> {
        self.read_into(1024)
    }

    /// The first word of a reading.
    pub(crate) fn count(&self) -> io::Result<u64> {
        let words = self.read()?;
        words
            .first()
            .copied()
            .ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    /// What poll(2) says within `millis`; zero if nothing.
    pub(crate) fn poll(&self, millis: i32) -> io::Result<i16> {
        let mut fd = libc::pollfd {
            fd: self.0.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one pollfd, alive until the call returns.
        checked(unsafe { libc::poll(&raw mut fd, 1, millis) })?;
        Ok(fd.revents)
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Event {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

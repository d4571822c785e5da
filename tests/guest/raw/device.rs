//! `/dev/vpmu`, and `perf_event_open(2)` beside it.
#![expect(clippy::cast_possible_truncation, reason = "splits words into fields; usize has 64 bits")]
#![expect(unsafe_code, reason = "system calls")]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::Arc;

use perf_event_open_sys::bindings::{self, perf_event_attr};
use vpmu_abi::uapi::{self, Info};

use super::{
    EXIT_PORT, Event, FLAG_PERSISTENT, How, KIND_EXITS, KIND_MARK, KIND_SOFTWARE, Later, MARK_ANY, checked, sampling,
};
use crate::arch::OWN_IN_USER_MODE;

/// The number of the ioctl that places a mark. Assembly code uses it, too.
pub(crate) const IOC_MARK: u64 = uapi::IOC_MARK as u64;

/// `/dev/vpmu`.
#[derive(Debug)]
pub(crate) struct Device {
    file: Arc<File>,
    pub(crate) info: Info,
}

impl Device {
    pub(crate) fn open() -> io::Result<Self> {
        let file = File::options().read(true).write(true).open("/dev/vpmu")?;
        let mut info = Info::default();
        // SAFETY: the request writes one Info, which `info` has room for.
        checked(unsafe { libc::ioctl(file.as_raw_fd(), uapi::IOC_INFO.into(), &raw mut info) })?;
        Ok(Self { file: Arc::new(file), info })
    }

    /// An attr of the PMU. The event starts disabled and does not sample, and reading it returns only its count.
    pub(crate) fn attr(&self, kind: u64, event: u64) -> perf_event_attr {
        let mut attr = perf_event_attr {
            type_: self.info.pmu_type,
            size: size_of::<perf_event_attr>() as u32,
            config: kind << uapi::CONFIG_KIND_SHIFT | event,
            ..perf_event_attr::default()
        };
        attr.set_disabled(1);
        attr
    }

    /// An attr that counts the exits of programs' port accesses.
    pub(crate) fn port_exits(&self) -> perf_event_attr {
        let mut attr = self.attr(KIND_EXITS, EXIT_PORT);
        attr.set_exclude_kernel(OWN_IN_USER_MODE.into());
        attr
    }

    /// An attr that takes a sample with these fields at every `period`th mark with value `value`.
    pub(crate) fn marks(&self, value: u64, period: u64, sample_type: u64) -> perf_event_attr {
        sampling(self.attr(KIND_MARK, value), period, sample_type)
    }

    /// Like [`Device::marks`], for marks of any value.
    pub(crate) fn any_marks(&self, period: u64, sample_type: u64) -> perf_event_attr {
        self.marks(MARK_ANY, period, sample_type)
    }

    /// Opens an event; the kernel may write the attr's size.
    pub(crate) fn open_raw(&self, attr: &mut perf_event_attr, how: How<'_>) -> io::Result<Event> {
        self.open_at(ptr::from_mut(attr), how)
    }

    /// Opens an event with attributes from a later kernel, which have additional fields.
    pub(crate) fn open_later(&self, later: &mut Later) -> io::Result<Event> {
        self.open_at(ptr::from_mut(later).cast(), How::OWN)
    }

    /// Opens an event whose records the host writes, and its ring. The kernel reads as many bytes as the size field of
    /// `attr` states, and may write that field.
    fn open_at(&self, attr: *mut perf_event_attr, how: How<'_>) -> io::Result<Event> {
        // SAFETY: the callers have a mutable reference to the attr.
        self.complete(unsafe { &mut *attr }, how);
        let perf = perf_event_open(attr, how)?;
        // SAFETY: the request takes its argument by value.
        let ring = checked(unsafe { libc::ioctl(self.file.as_raw_fd(), uapi::IOC_RING.into(), perf.as_raw_fd()) })?;
        // SAFETY: the kernel has just created this descriptor, and nothing else owns it.
        let ring = unsafe { OwnedFd::from_raw_fd(ring) };
        let persistent = how.flags & FLAG_PERSISTENT != 0 || self.is_reopened(attr);
        Ok(Event::of_host(perf, ring, &self.file, persistent))
    }

    fn is_reopened(&self, attr: *mut perf_event_attr) -> bool {
        // SAFETY: as in `open_at`.
        unsafe { (*attr).type_ == self.info.persistent_type }
    }

    /// Adds the driver's own options. The host's software events get the PMU's type, because perf's own type is that of
    /// the guest's events.
    fn complete(&self, attr: &mut perf_event_attr, how: How<'_>) {
        let ring = if self.is_reopened(attr) { 0 } else { uapi::CONFIG1_RING };
        // SAFETY: both members of the union are plain numbers.
        let before = unsafe { attr.__bindgen_anon_3.config1 };
        attr.__bindgen_anon_3.config1 = before | ring | how.config1();
        if attr.type_ == bindings::PERF_TYPE_SOFTWARE {
            attr.type_ = self.info.pmu_type;
            attr.config |= KIND_SOFTWARE << uapi::CONFIG_KIND_SHIFT;
        }
    }

    pub(crate) fn open_event(&self, attr: &perf_event_attr, how: How<'_>) -> io::Result<Event> {
        self.open_raw(&mut { *attr }, how)
    }

    /// Opens an event and enables it.
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

    /// Waits until the samples that an event of perf core has taken are in its ring.
    pub(crate) fn flush_perf(&self, event: &Event) -> io::Result<()> {
        let call = uapi::Perf { fd: event.as_raw_fd(), call: uapi::IOC_FLUSH, arg: 0 };
        // SAFETY: the kernel reads the structure during the call. The flush takes no further argument.
        checked(unsafe { libc::ioctl(self.file.as_raw_fd(), uapi::IOC_PERF.into(), &raw const call) })?;
        Ok(())
    }

    /// Places `times` marks.
    pub(crate) fn place(&self, value: u64, times: u64) -> io::Result<()> {
        (0..times).try_for_each(|_| self.mark(value))
    }

    /// Converts a value of the TSC to the time of records.
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

fn perf_event_open(attr: *mut perf_event_attr, how: How<'_>) -> io::Result<OwnedFd> {
    let flags = u64::from(bindings::PERF_FLAG_FD_CLOEXEC) | how.perf_flags();
    let group = how.group.map_or(-1, |fd| fd.as_raw_fd());
    // SAFETY: the kernel reads the attr and may write its size. The callers have a mutable reference to the attr.
    let fd = unsafe { perf_event_open_sys::perf_event_open(attr, how.pid, how.cpu, group, flags) };
    let fd = checked(fd)?;
    // SAFETY: the kernel has just created this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Calls `perf_event_open(2)` for an event whose records perf core writes.
pub(crate) fn kernels(attr: &perf_event_attr, how: How<'_>) -> io::Result<Event> {
    let mut attr = *attr;
    perf_event_open(&raw mut attr, how).map(Event::of_perf)
}

/// Calls `perf_event_open(2)` for an event of the calling thread.
pub(crate) fn kernels_own(attr: &perf_event_attr) -> io::Result<Event> {
    kernels(attr, How::OWN)
}

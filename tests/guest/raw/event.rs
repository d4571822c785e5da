//! An open event, and the requests that its descriptor accepts.
#![expect(unsafe_code, reason = "system calls")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr;

use perf_event_open_sys::bindings::{self, perf_event_attr};
use vpmu_abi::uapi;

use super::{Later, checked};

/// An open event.
#[derive(Debug)]
pub(crate) struct Event(pub(super) OwnedFd);

impl Event {
    fn ioctl(&self, request: bindings::perf_event_ioctls, argument: u64) -> io::Result<i32> {
        // SAFETY: a request accesses memory only at `argument`. The callers below make sure that this memory is valid
        // and large enough. `QUERY_BPF` writes only one word, because `ids_len` in its buffer is zero.
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

    /// Makes perf's request for the BPF programs that are attached to the event. The driver refuses this request.
    pub(crate) fn query_bpf(&self) -> io::Result<i32> {
        let mut query = [0_u32; 2];
        let address = query.as_mut_ptr().expose_provenance() as u64;
        self.ioctl(bindings::QUERY_BPF, address)
    }

    /// Redirects the event's records to `target`'s ring. With -1, the event writes to its own ring again.
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

    /// Like [`Event::modify`], but with attributes from a later kernel, which have additional fields.
    pub(crate) fn modify_later(&self, later: &Later) -> io::Result<i32> {
        let address = ptr::from_ref(later).expose_provenance() as u64;
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
        checked(unsafe { libc::ioctl(self.0.as_raw_fd(), uapi::IOC_ENGINE.into(), &raw mut engine) })?;
        Ok(engine)
    }

    /// Sets the number of records or bytes after which readers are woken. The arguments are the fields of `struct
    /// vpmu_wakeup`.
    pub(crate) fn wakeup(&self, every: u64, unit: u32, reserved: u32) -> io::Result<i32> {
        let request = [every, u64::from(reserved) << 32 | u64::from(unit)];
        // SAFETY: the request reads 16 bytes.
        checked(unsafe { libc::ioctl(self.0.as_raw_fd(), uapi::IOC_WAKEUP.into(), request.as_ptr()) })
    }

    /// Calls splice(2) to move some bytes of the event into a pipe.
    pub(crate) fn splice_to(&self, pipe: RawFd) -> io::Result<usize> {
        let (from, none) = (self.0.as_raw_fd(), ptr::null_mut());
        // SAFETY: both offsets are null, so the call accesses no memory of this process.
        let moved = unsafe { libc::splice(from, none, pipe, none, 4096, libc::SPLICE_F_NONBLOCK) };
        usize::try_from(moved).map_err(|_| io::Error::last_os_error())
    }

    /// Waits until all samples and packets of the event are in its mapped pages. With [`WHOLE_GROUP`](super::WHOLE_GROUP), also
    /// waits for the samples and packets of the event's group.
    pub(crate) fn flush(&self, flags: u64) -> io::Result<i32> {
        // SAFETY: the request takes its argument by value.
        checked(unsafe { libc::ioctl(self.0.as_raw_fd(), uapi::IOC_FLUSH.into(), flags) })
    }

    /// Makes this event the starter of the event behind descriptor `target`.
    pub(crate) fn starts(&self, target: RawFd) -> io::Result<i32> {
        // SAFETY: as above.
        checked(unsafe { libc::ioctl(self.0.as_raw_fd(), uapi::IOC_SET_STARTER.into(), target) })
    }

    /// Makes this event the stopper of the event behind descriptor `target`.
    pub(crate) fn stops(&self, target: RawFd) -> io::Result<i32> {
        // SAFETY: as above.
        checked(unsafe { libc::ioctl(self.0.as_raw_fd(), uapi::IOC_SET_STOPPER.into(), target) })
    }

    /// Calls read(2) with a buffer of `bytes` bytes. Returns the words that it read.
    pub(crate) fn read_into(&self, bytes: usize) -> io::Result<Vec<u64>> {
        let mut words = vec![0_u64; bytes.div_ceil(8)];
        // SAFETY: the buffer has at least `bytes` bytes.
        let got = unsafe { libc::read(self.0.as_raw_fd(), words.as_mut_ptr().cast(), bytes) };
        let got = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
        words.truncate(got / 8);
        Ok(words)
    }

    /// All words of a reading.
    pub(crate) fn read(&self) -> io::Result<Vec<u64>> {
        self.read_into(1024)
    }

    /// The first word of a reading.
    pub(crate) fn count(&self) -> io::Result<u64> {
        let words = self.read()?;
        words.first().copied().ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    /// Another descriptor of the same event.
    pub(crate) fn duplicate(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Calls poll(2) with `POLLIN` and this timeout. Returns the bits that poll(2) reports, or zero at the timeout.
    pub(crate) fn poll(&self, millis: i32) -> io::Result<i16> {
        let mut fd = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: the array has one pollfd, which is valid for the whole call.
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

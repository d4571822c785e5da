//! An open event, and the requests that its descriptor accepts.
#![expect(unsafe_code, reason = "system calls")]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use perf_event_open_sys::bindings::{self, perf_event_attr};
use vpmu_abi::uapi;

use super::{Later, checked};

/// The ring that the host writes for an event.
#[derive(Debug)]
struct Ring {
    fd: OwnedFd,
    device: Arc<File>,
    /// The event is persistent, so calls that change it go to the ring.
    persistent: AtomicBool,
}

/// An open event. Its descriptor is that of `perf_event_open(2)`.
#[derive(Debug)]
pub(crate) struct Event {
    perf: OwnedFd,
    ring: Option<Ring>,
}

impl Event {
    /// An event whose records perf core writes.
    pub(super) fn of_perf(perf: OwnedFd) -> Self {
        Self { perf, ring: None }
    }

    pub(super) fn of_host(perf: OwnedFd, ring: OwnedFd, device: &Arc<File>, persistent: bool) -> Self {
        let ring = Ring { fd: ring, device: Arc::clone(device), persistent: AtomicBool::new(persistent) };
        Self { perf, ring: Some(ring) }
    }

    /// The descriptor that maps the ring, waits for its records and gives signals.
    pub(crate) fn ring_fd(&self) -> BorrowedFd<'_> {
        self.ring.as_ref().map_or_else(|| self.perf.as_fd(), |ring| ring.fd.as_fd())
    }

    /// The number of [`Event::ring_fd`].
    pub(crate) fn ring(&self) -> RawFd {
        self.ring_fd().as_raw_fd()
    }

    /// The descriptor that changes the event.
    fn control(&self) -> RawFd {
        match &self.ring {
            Some(ring) if ring.persistent.load(Ordering::Relaxed) => ring.fd.as_raw_fd(),
            _ => self.perf.as_raw_fd(),
        }
    }

    pub(super) fn becomes_persistent(&self) {
        if let Some(ring) = &self.ring {
            ring.persistent.store(true, Ordering::Relaxed);
        }
    }

    fn ioctl(fd: RawFd, request: bindings::perf_event_ioctls, argument: u64) -> io::Result<i32> {
        // SAFETY: a request accesses memory only at `argument`. The callers below make sure that this memory is valid
        // and large enough. `QUERY_BPF` writes only one word, because `ids_len` in its buffer is zero.
        checked(unsafe { libc::ioctl(fd, u64::from(request), argument) })
    }

    /// Makes one of the driver's calls for the event. An event of perf core alone has no such calls.
    pub(super) fn call(&self, call: u32, arg: u64) -> io::Result<i32> {
        let device = self.ring.as_ref().map(|ring| &ring.device).ok_or(io::ErrorKind::Unsupported)?;
        let request = uapi::Perf { fd: self.perf.as_raw_fd(), call, arg };
        // SAFETY: the request reads one uapi::Perf. Its argument is a number, or an address that the callers lend.
        checked(unsafe { libc::ioctl(device.as_raw_fd(), uapi::IOC_PERF.into(), &raw const request) })
    }

    pub(crate) fn enable(&self, flags: u64) -> io::Result<i32> {
        Self::ioctl(self.control(), bindings::ENABLE, flags)
    }

    pub(crate) fn disable(&self, flags: u64) -> io::Result<i32> {
        Self::ioctl(self.control(), bindings::DISABLE, flags)
    }

    pub(crate) fn reset(&self, flags: u64) -> io::Result<i32> {
        // The ring also resets the counts in its records. A group is reset by perf core.
        let fd = if flags == 0 { self.ring() } else { self.perf.as_raw_fd() };
        Self::ioctl(fd, bindings::RESET, flags)
    }

    pub(crate) fn refresh(&self, overflows: u64) -> io::Result<i32> {
        Self::ioctl(self.ring(), bindings::REFRESH, overflows)
    }

    pub(crate) fn period(&self, period: u64) -> io::Result<i32> {
        let address = ptr::from_ref(&period).expose_provenance() as u64;
        Self::ioctl(self.control(), bindings::PERIOD, address)
    }

    /// Makes perf's request for the BPF programs that are attached to the event. The driver refuses this request.
    pub(crate) fn query_bpf(&self) -> io::Result<i32> {
        let mut query = [0_u32; 2];
        let address = query.as_mut_ptr().expose_provenance() as u64;
        Self::ioctl(self.perf.as_raw_fd(), bindings::QUERY_BPF, address)
    }

    /// Redirects the event's records to the ring with the descriptor `target`. With -1, the event writes to its own ring again.
    pub(crate) fn output_to(&self, target: RawFd) -> io::Result<i32> {
        Self::ioctl(self.ring(), bindings::SET_OUTPUT, i64::from(target).cast_unsigned())
    }

    pub(crate) fn pause(&self, paused: bool) -> io::Result<i32> {
        Self::ioctl(self.ring(), bindings::PAUSE_OUTPUT, paused.into())
    }

    pub(crate) fn modify(&self, attr: &perf_event_attr) -> io::Result<i32> {
        let address = ptr::from_ref(attr).expose_provenance() as u64;
        Self::ioctl(self.perf.as_raw_fd(), bindings::MODIFY_ATTRIBUTES, address)
    }

    /// Like [`Event::modify`], but with attributes from a later kernel, which have additional fields.
    pub(crate) fn modify_later(&self, later: &Later) -> io::Result<i32> {
        let address = ptr::from_ref(later).expose_provenance() as u64;
        Self::ioctl(self.perf.as_raw_fd(), bindings::MODIFY_ATTRIBUTES, address)
    }

    /// The id that the event's records contain.
    pub(crate) fn id(&self) -> io::Result<u64> {
        Self::id_of(self.ring())
    }

    /// The id that readings of the event contain.
    pub(crate) fn perf_id(&self) -> io::Result<u64> {
        Self::id_of(self.perf.as_raw_fd())
    }

    fn id_of(fd: RawFd) -> io::Result<u64> {
        let mut id = 0_u64;
        // SAFETY: the request writes one u64.
        checked(unsafe { libc::ioctl(fd, u64::from(bindings::ID), &raw mut id) })?;
        Ok(id)
    }

    pub(crate) fn engine(&self) -> io::Result<u32> {
        let mut state = uapi::EventState::default();
        self.call(uapi::IOC_EVENT, (&raw mut state).expose_provenance() as u64)?;
        Ok(state.engine)
    }

    /// Sets the number of records or bytes after which readers are woken. The arguments are the fields of `struct
    /// vpmu_wakeup`.
    pub(crate) fn wakeup(&self, every: u64, unit: u32, reserved: u32) -> io::Result<i32> {
        let request = [every, u64::from(reserved) << 32 | u64::from(unit)];
        // SAFETY: the request reads 16 bytes.
        checked(unsafe { libc::ioctl(self.ring(), uapi::IOC_WAKEUP.into(), request.as_ptr()) })
    }

    /// Calls splice(2) to move some bytes of the event into a pipe.
    pub(crate) fn splice_to(&self, pipe: RawFd) -> io::Result<usize> {
        let (from, none) = (self.ring(), ptr::null_mut());
        // SAFETY: both offsets are null, so the call accesses no memory of this process.
        let moved = unsafe { libc::splice(from, none, pipe, none, 4096, libc::SPLICE_F_NONBLOCK) };
        usize::try_from(moved).map_err(|_| io::Error::last_os_error())
    }

    /// Waits until all samples and packets of the event are in its mapped pages. The driver accepts only zero `flags`.
    pub(crate) fn flush(&self, flags: u64) -> io::Result<i32> {
        // SAFETY: the request takes its argument by value.
        checked(unsafe { libc::ioctl(self.ring(), uapi::IOC_FLUSH.into(), flags) })
    }

    /// Makes this event the starter of the event behind descriptor `target`.
    pub(crate) fn starts(&self, target: RawFd) -> io::Result<i32> {
        self.call(uapi::IOC_SET_STARTER, i64::from(target).cast_unsigned())
    }

    /// Makes this event the stopper of the event behind descriptor `target`.
    pub(crate) fn stops(&self, target: RawFd) -> io::Result<i32> {
        self.call(uapi::IOC_SET_STOPPER, i64::from(target).cast_unsigned())
    }

    /// Calls read(2) with a buffer of `bytes` bytes. Returns the words that it read.
    pub(crate) fn read_into(&self, bytes: usize) -> io::Result<Vec<u64>> {
        let mut words = vec![0_u64; bytes.div_ceil(8)];
        // SAFETY: the buffer has at least `bytes` bytes.
        let got = unsafe { libc::read(self.perf.as_raw_fd(), words.as_mut_ptr().cast(), bytes) };
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
        let ring = self.ring.as_ref().map(|ring| -> io::Result<Ring> {
            let persistent = AtomicBool::new(ring.persistent.load(Ordering::Relaxed));
            Ok(Ring { fd: ring.fd.try_clone()?, device: Arc::clone(&ring.device), persistent })
        });
        Ok(Self { perf: self.perf.try_clone()?, ring: ring.transpose()? })
    }

    /// Calls poll(2) with `POLLIN` and this timeout. Returns the bits that poll(2) reports, or zero at the timeout.
    pub(crate) fn poll(&self, millis: i32) -> io::Result<i16> {
        let mut fd = libc::pollfd { fd: self.ring(), events: libc::POLLIN, revents: 0 };
        // SAFETY: the array has one pollfd, which is valid for the whole call.
        checked(unsafe { libc::poll(&raw mut fd, 1, millis) })?;
        Ok(fd.revents)
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.perf.as_fd()
    }
}

impl AsRawFd for Event {
    fn as_raw_fd(&self) -> RawFd {
        self.perf.as_raw_fd()
    }
}

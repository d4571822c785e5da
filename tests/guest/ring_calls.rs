//! Ring descriptors: which descriptors have one, which calls it takes, and how long it keeps its event.
#![expect(unsafe_code, reason = "system calls")]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use perf_event_open_sys::bindings;
use vpmu_abi::uapi;

use crate::ensure::ensure_eq;
use crate::fields::TIME;
use crate::pages::{Pages, READ_WRITE};
use crate::raw::{Device, How, KIND_EXIT_TRACE, KIND_MARK, kernels, kernels_own, refused, sampling, silent};
use crate::{Outcome, cpu, os};

const GROUP: &str = "output";

const VALUE: u64 = 31;

/// Asks for the ring of a descriptor.
fn ring_of(device: &Device, fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: the request takes its argument by value.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), uapi::IOC_RING.into(), fd) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just created this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Makes a call, and returns its errno.
fn call(fd: RawFd, request: u32) -> Option<i32> {
    call_with(fd, request, 0)
}

fn call_with(fd: RawFd, request: u32, argument: u64) -> Option<i32> {
    // SAFETY: the calls below take their argument by value, or fail before they use it.
    let done = unsafe { libc::ioctl(fd, request.into(), argument) };
    (done < 0).then(|| io::Error::last_os_error().raw_os_error().unwrap_or(0))
}

#[apply(guest_test)]
fn only_events_with_a_ring_have_its_descriptor() -> Outcome {
    let device = Device::open()?;
    let replayed = kernels_own(&device.marks(VALUE, 1, TIME))?;
    ensure_eq!(refused(ring_of(&device, replayed.as_raw_fd())), Some(libc::EINVAL), "a replayed event");
    let clock =
        bindings::perf_event_attr { type_: bindings::PERF_TYPE_SOFTWARE, config: 0, ..device.attr(KIND_MARK, 0) };
    let clock = kernels_own(&clock)?;
    let event = device.open_event(&device.marks(VALUE, 1, TIME), How::OWN)?;
    let null = File::open("/dev/null")?;
    let others = [
        ("an event of the guest's kernel", clock.as_raw_fd()),
        ("a ring", event.ring()),
        ("the device", device.as_raw_fd()),
        ("another file", null.as_raw_fd()),
        ("no descriptor", -1),
        ("a closed descriptor", 1_000),
    ];
    for (what, fd) in others {
        ensure_eq!(refused(ring_of(&device, fd)), Some(libc::EBADF), "{what}");
    }
    Ok(())
}

#[apply(guest_test)]
fn ring_keeps_its_event_open() -> Outcome {
    let device = Device::open()?;
    let mut attr = silent(device.marks(VALUE, 1, TIME));
    attr.__bindgen_anon_3.config1 = uapi::CONFIG1_RING;
    attr.set_disabled(0);
    let event = kernels(&attr, How::OWN)?;
    let fd = ring_of(&device, event.as_raw_fd())?;
    let mut ring = Pages::map_fd(fd.as_raw_fd(), 1, READ_WRITE)?;
    device.place(VALUE, 3)?;
    drop(event);
    device.place(VALUE, 4)?;
    ensure_eq!(ring.take()?.len(), 7, "records after the event's own descriptor was closed");
    drop(fd);
    device.place(VALUE, 2)?;
    ensure_eq!(ring.take()?.len(), 2, "records with the mapping alone");
    Ok(())
}

#[apply(guest_test)]
fn ring_takes_its_own_calls_alone() -> Outcome {
    let device = Device::open()?;
    let event = device.open_event(&device.marks(VALUE, 1, TIME), How::OWN)?;
    let schedules = [bindings::ENABLE, bindings::DISABLE, bindings::PERIOD, bindings::SET_FILTER, uapi::IOC_DETACH];
    for request in schedules {
        ensure_eq!(call(event.ring(), request), Some(libc::ENOTTY), "errno for call {request:#x} on a ring");
    }
    for request in [bindings::RESET, uapi::IOC_FLUSH] {
        ensure_eq!(call(event.ring(), request), None, "errno for call {request:#x} on a ring");
    }
    ensure_eq!(call(event.ring(), bindings::PAUSE_OUTPUT), Some(libc::EINVAL), "resuming a ring that is not mapped");
    for request in [uapi::IOC_FLUSH, uapi::IOC_WAKEUP, uapi::IOC_DETACH] {
        ensure_eq!(call(event.as_raw_fd(), request), Some(libc::ENOTTY), "errno for call {request:#x} on an event");
    }
    Ok(())
}

#[apply(guest_test)]
fn options_without_meaning_are_refused() -> Outcome {
    let device = Device::open()?;
    let cases = [
        ("an unknown option", 1 << 8),
        ("a third engine", 3 << uapi::CONFIG1_ENGINE_SHIFT),
        ("a pause without a ring", uapi::CONFIG1_AUX_PAUSE),
        ("a paused trace without a ring", uapi::CONFIG1_AUX_START_PAUSED),
    ];
    for (what, config1) in cases {
        let mut attr = device.marks(VALUE, 1, TIME);
        attr.__bindgen_anon_3.config1 = config1;
        ensure_eq!(refused(kernels_own(&attr)), Some(libc::EINVAL), "errno for {what}");
    }
    let mut attr = device.attr(KIND_MARK, VALUE);
    attr.config2 = 1;
    ensure_eq!(refused(kernels_own(&attr)), Some(libc::EINVAL), "errno for config2");
    let trace = device.attr(KIND_EXIT_TRACE, 0);
    ensure_eq!(refused(kernels_own(&trace)), Some(libc::EOPNOTSUPP), "errno for a trace without a ring");
    Ok(())
}

/// The program that is signalled may enable the event again at once.
#[apply(guest_test)]
fn program_signalled_by_the_last_overflow_can_go_on() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    os::block_signal()?;
    let attr = silent(sampling(device.attr(KIND_MARK, VALUE), 1, TIME));
    for how in [How::OWN, How::on_cpu(1)] {
        let event = device.open_event(&attr, how)?;
        let mut ring = Pages::map(&event, 1, READ_WRITE)?;
        os::signal_from(event.ring_fd())?;
        for round in 0..50_u64 {
            event.refresh(1 + round % 3)?;
            device.place(VALUE, 5)?;
            let signal = os::wait_signal(Duration::from_secs(10))?;
            ensure_eq!(signal.map(|signal| signal.code), Some(os::POLL_HUP), "round {round}: the signal's code");
            ensure_eq!(ring.take()?.len() as u64, 1 + round % 3, "round {round}: records");
        }
        event.enable(0)?;
        device.place(VALUE, 5)?;
        ensure_eq!(ring.take()?.len(), 5, "records without a limit");
    }
    Ok(())
}

/// perf core does not tell the driver about the second call. The overflows that it allows begin when the first ones are
/// used up.
#[apply(guest_test)]
fn refresh_of_an_active_event_by_perf_adds_overflows() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    let attr = silent(sampling(device.attr(KIND_MARK, VALUE), 1, TIME));
    for how in [How::OWN, How::on_cpu(1)] {
        let event = device.open_event(&attr, how)?;
        let mut ring = Pages::map(&event, 1, READ_WRITE)?;
        for overflows in [2, 3] {
            let refused = call_with(event.as_raw_fd(), bindings::REFRESH, overflows);
            ensure_eq!(refused, None, "errno for {overflows} overflows");
        }
        let (mut records, mut polled) = (0, 0);
        let begin = Instant::now();
        while polled == 0 && begin.elapsed() < Duration::from_secs(10) {
            device.mark(VALUE)?;
            records += ring.take()?.len();
            polled = event.poll(0)?;
        }
        ensure_eq!((records, polled), (5, libc::POLLIN), "records and poll after the last overflow");
        device.place(VALUE, 20)?;
        ensure_eq!(ring.take()?.len(), 0, "records after the last overflow");
        event.enable(0)?;
        device.place(VALUE, 5)?;
        ensure_eq!(ring.take()?.len(), 5, "records without a limit");
    }
    Ok(())
}

//! The system calls that the perf source makes, for the lists of [`confine`](crate::confine).

use vpmu_perf::bindings::{DISABLE, ENABLE, PERF_FLAG_FD_CLOEXEC, PERIOD, SET_OUTPUT};

use crate::confine::{Argument, Call, call};

/// `fcntl` operations that `libc` does not define for every target.
const F_SETSIG: u32 = 10;
const F_SETOWN_EX: u32 = 15;
/// A counter follows its thread to any CPU.
const ANY_CPU: u32 = u32::MAX;

/// Calls that open, configure, start, stop and read host counters.
pub(crate) const COUNTERS: [Call; 11] = [
    call!(
        perf_event_open,
        SYS_perf_event_open,
        [
            Argument::int(2, ANY_CPU),
            Argument::int(4, PERF_FLAG_FD_CLOEXEC)
        ],
        "a host counter is opened on a vCPU's thread, never on a whole CPU"
    ),
    call!(
        ioctl,
        SYS_ioctl,
        [Argument::int(1, ENABLE)],
        "a host counter starts"
    ),
    call!(
        ioctl,
        SYS_ioctl,
        [Argument::int(1, DISABLE)],
        "a host counter stops"
    ),
    call!(
        ioctl,
        SYS_ioctl,
        [Argument::int(1, PERIOD)],
        "a host counter's rate changes"
    ),
    call!(
        ioctl,
        SYS_ioctl,
        [Argument::int(1, SET_OUTPUT)],
        "a trace of exits records VM entries in the same ring"
    ),
    call!(
        fcntl,
        SYS_fcntl,
        [Argument::int(1, F_SETOWN_EX)],
        "overflows of a host counter signal the vCPU's thread"
    ),
    call!(
        fcntl,
        SYS_fcntl,
        [Argument::int(1, F_SETSIG)],
        "overflows of a host counter use the VMM's signal"
    ),
    call!(
        fcntl,
        SYS_fcntl,
        [
            Argument::int(1, libc::F_SETFL.cast_unsigned()),
            Argument::int(2, (libc::O_ASYNC | libc::O_NONBLOCK).cast_unsigned())
        ],
        "overflows of a host counter send signals"
    ),
    call!(read, SYS_read, [], "the count of a host counter"),
    call!(
        prlimit64,
        SYS_prlimit64,
        [
            Argument::int(0, 0),
            Argument::int(1, RLIMIT_NOFILE),
            Argument::null(2)
        ],
        "the limit on descriptors is read, not changed"
    ),
    call!(
        gettid,
        SYS_gettid,
        [],
        "a check that a counter counts the calling thread"
    ),
];

const RLIMIT_NOFILE: u32 = libc::RLIMIT_NOFILE as _;

/// Calls that close host counters.
pub(crate) const CLOSING: [Call; 2] = [
    call!(
        ioctl,
        SYS_ioctl,
        [Argument::int(1, DISABLE)],
        "a host counter stops before it is closed"
    ),
    call!(munmap, SYS_munmap, [], "the ring of a host counter"),
];

#[cfg(test)]
mod tests {
    use crate::confine::{Thread, calls};

    #[test]
    fn only_the_closer_opens_nothing() {
        for thread in [Thread::Vcpu, Thread::Service, Thread::Drain, Thread::Closer] {
            let opens = calls(thread).any(|call| call.number == libc::SYS_perf_event_open);
            assert_eq!(opens, thread != Thread::Closer, "{thread:?}");
        }
    }
}

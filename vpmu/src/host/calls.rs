//! The system calls that the perf source makes, for the lists of [`confine`](crate::confine).

use libc::c_int;
use vpmu_perf::bindings::{DISABLE, ENABLE, PERF_FLAG_FD_CLOEXEC, PERIOD, SET_OUTPUT};

use crate::syscall::{Argument, Call, Process, call};

/// `fcntl` operations that `libc` does not define for every target.
const F_SETSIG: u32 = 10;
const F_SETOWN_EX: u32 = 15;
/// The thread that opens the counter.
const CALLING_THREAD: u32 = 0;
/// A counter follows its thread to any CPU.
const ANY_CPU: u32 = u32::MAX;

/// Calls that open, configure, start, stop and read host counters in the threads of `process`.
///
/// Each thread may open events on every vCPU's thread, because a request of one vCPU can open and start another vCPU's
/// events. To limit a vCPU's thread to itself would protect nothing: the threads share their memory, so a thread that a
/// guest has taken over reads the others without perf.
///
/// A filter cannot see what a pointer refers to: the type and the flags of an event, and the owner that `F_SETOWN_EX`
/// gives to it. What an event may show of its thread is bounded by `perf_event_paranoid` and `CAP_PERFMON` alone. Which
/// process gets the signal of an event is bounded by the user, the PID namespace, and Landlock's scope of signals.
pub(crate) fn counters(process: &Process) -> Vec<Call> {
    let counted = std::iter::once(CALLING_THREAD).chain(process.vcpus.iter().copied());
    let open = counted.map(|thread| {
        call!(
            perf_event_open,
            SYS_perf_event_open,
            [Argument::int(1, thread), Argument::int(2, ANY_CPU), Argument::int(4, PERF_FLAG_FD_CLOEXEC)],
            "a host counter is opened on a vCPU's thread, or for a probe on the calling thread; never on a whole CPU"
        )
    });
    let others = [
        call!(ioctl, SYS_ioctl, [Argument::int(1, ENABLE)], "a host counter starts"),
        call!(ioctl, SYS_ioctl, [Argument::int(1, DISABLE)], "a host counter stops"),
        call!(ioctl, SYS_ioctl, [Argument::int(1, PERIOD)], "a host counter's rate changes"),
        call!(ioctl, SYS_ioctl, [Argument::int(1, SET_OUTPUT)], "a trace of exits records VM entries in the same ring"),
        call!(read, SYS_read, [], "the count of a host counter"),
        call!(
            prlimit64,
            SYS_prlimit64,
            [Argument::int(0, 0), Argument::int(1, RLIMIT_NOFILE), Argument::null(2)],
            "the limit on descriptors is read, not changed"
        ),
        call!(gettid, SYS_gettid, [], "a check that a counter counts the calling thread"),
    ];
    open.chain(others).chain(process.signal.into_iter().flat_map(announcing)).collect()
}

/// Calls by which the host signals overflows.
fn announcing(signal: c_int) -> [Call; 3] {
    [
        call!(
            fcntl,
            SYS_fcntl,
            [Argument::int(1, F_SETOWN_EX)],
            "overflows of a host counter signal the vCPU's thread"
        ),
        call!(
            fcntl,
            SYS_fcntl,
            [Argument::int(1, F_SETSIG), Argument::int(2, signal.cast_unsigned())],
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
    ]
}

const RLIMIT_NOFILE: u32 = libc::RLIMIT_NOFILE as _;

/// Calls that close host counters.
pub(crate) fn closing() -> Vec<Call> {
    vec![
        call!(ioctl, SYS_ioctl, [Argument::int(1, DISABLE)], "a host counter stops before it is closed"),
        call!(munmap, SYS_munmap, [], "the ring of a host counter"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::confine::{Thread, calls};

    fn process() -> Process {
        Process { id: 7, vcpus: vec![8, 9], signal: Some(34) }
    }

    fn of(thread: Thread, number: libc::c_long) -> Vec<Call> {
        let calls = calls(thread, &process()).into_iter();
        calls.filter(|call| call.number == number).collect()
    }

    #[test]
    fn only_the_closer_opens_nothing() {
        for thread in [Thread::Vcpu, Thread::Service, Thread::Drain, Thread::Closer] {
            let opens = !of(thread, libc::SYS_perf_event_open).is_empty();
            assert_eq!(opens, thread != Thread::Closer, "{thread:?}");
        }
    }

    #[test]
    fn counter_counts_a_vcpus_thread_or_the_calling_thread() {
        for thread in [Thread::Vcpu, Thread::Service, Thread::Drain] {
            let opens = of(thread, libc::SYS_perf_event_open);
            let counted: Vec<Option<u64>> = opens.iter().map(|call| condition(call, 1)).collect();
            assert_eq!(counted, [Some(0), Some(8), Some(9)], "{thread:?}");
            for call in &opens {
                assert_eq!(condition(call, 2), Some(ANY_CPU.into()), "{thread:?}");
            }
        }
    }

    #[test]
    fn overflow_uses_the_signal_of_the_process_only() {
        let set = of(Thread::Vcpu, libc::SYS_fcntl).into_iter();
        let set: Vec<Option<u64>> =
            set.filter(|call| condition(call, 1) == Some(F_SETSIG.into())).map(|call| condition(&call, 2)).collect();
        assert_eq!(set, [Some(34)]);
    }

    #[test]
    fn process_without_a_signal_cannot_make_the_host_send_one() {
        let process = Process { signal: None, ..process() };
        for thread in [Thread::Vcpu, Thread::Service, Thread::Drain, Thread::Closer] {
            let sets =
                [F_SETOWN_EX, F_SETSIG, libc::F_SETFL.cast_unsigned()].map(|operation| Argument::int(1, operation));
            let set = |call: &Call| sets.iter().any(|operation| call.arguments.contains(operation));
            let of_fcntl = calls(thread, &process).into_iter().filter(|call| call.number == libc::SYS_fcntl);
            for call in of_fcntl {
                assert!(!call.arguments.is_empty() && !set(&call), "{thread:?} {call:?}");
            }
        }
    }

    /// The value that a call's `int` argument must have.
    fn condition(call: &Call, index: u8) -> Option<u64> {
        let mut arguments = call.arguments.iter();
        let argument = arguments.find(|argument| argument.index == index)?;
        assert_eq!(argument.mask, u64::from(u32::MAX), "{call:?}");
        Some(argument.value)
    }
}

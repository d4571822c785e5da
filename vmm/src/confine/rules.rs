//! The system calls that each thread may make, and the reasons for them. Any other call ends the process.

use std::os::fd::RawFd;

use libc::c_long;
use vpmu::confine::{Argument, Call, Process, Thread};

use super::ThreadKind;
use crate::arch::calls;
use crate::path_at;

/// Properties of the process and the machine that the filter rules use.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    /// This process, with its vCPUs' threads.
    pub(super) process: Process,
    /// Whether the machine has a PMU.
    pub(super) pmu: bool,
    /// Whether another process runs the machine's vCPUs.
    pub(super) remote: bool,
    /// Whether a guest that resets boots again.
    pub(super) restarts: bool,
    /// Whether the machine was restored with KVM's own PMU.
    pub(super) restored_pmu: bool,
    /// The directory of recordings.
    pub(super) recordings: Option<RawFd>,
    /// The directory of the control socket. `None` if there is no socket. Then no client can request a snapshot.
    pub(super) socket: Option<RawFd>,
}

impl Plan {
    /// This plan, for a process whose vCPUs run on the threads `vcpus`.
    pub(super) fn on(mut self, vcpus: Vec<u32>) -> Self {
        self.process.vcpus = vcpus;
        self
    }
}

/// A call that is allowed if its arguments satisfy all conditions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rule {
    pub(super) number: c_long,
    pub(super) name: &'static str,
    pub(super) arguments: Vec<Argument>,
    pub(super) reason: &'static str,
}

impl From<Call> for Rule {
    fn from(call: Call) -> Self {
        Self { number: call.number, name: call.name, arguments: call.arguments, reason: call.reason }
    }
}

const KVM_RUN: u32 = 0xae80;
const SET_FILTER: u32 = 0x4008_2406;
const KVM_IRQ_LINE: u32 = 0x4008_ae61;

/// Ioctls that set up a VM on every architecture. [`calls::BOOT`] has the ioctls that only this architecture needs.
const BOOT: [(u32, &str); 8] = [
    (0xae01, "KVM_CREATE_VM: a guest boots again in a new VM"),
    (0xae03, "KVM_CHECK_EXTENSION: KVM's capabilities"),
    (0xae04, "KVM_GET_VCPU_MMAP_SIZE: the size of run pages"),
    (0x4020_ae46, "KVM_SET_USER_MEMORY_REGION: the VM's memory"),
    (0xae41, "KVM_CREATE_VCPU: the VM's vCPUs"),
    (0xaece, "KVM_GET_STATS_FD: KVM's statistics of a vCPU"),
    (0x4020_ae76, "KVM_IRQFD: the interrupts of devices"),
    (0x4040_ae79, "KVM_IOEVENTFD: notifications of queues"),
];

/// Ioctl numbers that are defined here, because the type of their constants in `libc` depends on the target.
const TCGETS: u32 = 0x5401;
const TCSETS: u32 = 0x5402;
const FIONBIO: u32 = 0x5421;
/// [`TCGETS`] and [`TCSETS`] with `struct termios2`, which newer C libraries use.
const TCGETS2: u32 = 0x802c_542a;
const TCSETS2: u32 = 0x402c_542b;

macro_rules! call {
    ($number:ident, $name:ident) => {
        (libc::$number, stringify!($name))
    };
}

fn rule<const N: usize>(
    (number, name): (c_long, &'static str),
    arguments: [Argument; N],
    reason: &'static str,
) -> Rule {
    Rule { number, name, arguments: arguments.to_vec(), reason }
}

fn ioctl((request, reason): (u32, &'static str)) -> Rule {
    let arguments = [Argument::int(1, request)];
    rule(call!(SYS_ioctl, ioctl), arguments, reason)
}

/// Requires the `int` argument at `index` to be the descriptor `fd`.
fn is(index: u8, fd: RawFd) -> Argument {
    Argument::int(index, fd.cast_unsigned())
}

/// The rules for threads of `kind`. Rules for the same call are in the order in which they are tried.
pub(super) fn of(kind: ThreadKind, plan: &Plan) -> Vec<Rule> {
    let mut rules = match kind {
        ThreadKind::Main => main(plan),
        ThreadKind::Vcpu => vcpu(plan),
        ThreadKind::Drain => drain(plan),
        ThreadKind::Ctl => ctl(plan),
        ThreadKind::Service => service(plan),
        ThreadKind::Closer => Vec::new(),
    };
    rules.extend(device(kind, plan));
    rules.extend(crash());
    rules
}

fn vcpu(plan: &Plan) -> Vec<Rule> {
    let mut rules = vec![ioctl((KVM_RUN, "KVM_RUN: the guest"))];
    rules.extend(calls::VCPU.map(ioctl));
    if plan.socket.is_some() {
        rules.extend(calls::SAVE_VCPU.map(ioctl));
    }
    if plan.restored_pmu {
        rules.extend(calls::START_COUNTERS.map(ioctl));
    }
    rules.extend(machine(plan));
    rules.push(rule(calls::POLL, [], "waits for the reader of a full console"));
    rules
}

fn drain(plan: &Plan) -> Vec<Rule> {
    let mut rules = machine(plan);
    let why = "the timer of drains";
    rules.extend([rule(calls::POLL, [], why), rule(call!(SYS_read, read), [], why)]);
    rules
}

/// The rules for the thread that serves what no vCPU of another process waits for.
fn service(plan: &Plan) -> Vec<Rule> {
    let mut rules = machine(plan);
    rules.extend(waiting());
    rules.extend([
        rule(call!(SYS_read, read), [], "signals, event descriptors"),
        rule(call!(SYS_shutdown, shutdown), [], "a signal ends the connection to the VMM"),
    ]);
    rules
}

/// System calls of the machine's devices. Every thread except a [`ThreadKind::Closer`] may make them.
fn machine(plan: &Plan) -> Vec<Rule> {
    let mut rules = vec![
        rule(call!(SYS_write, write), [], "event descriptors; the console; messages"),
        rule(call!(SYS_pread64, pread64), [], "KVM's statistics of a vCPU; the system call of another process's vCPU"),
        rule(call!(SYS_timerfd_settime, timerfd_settime), [], "the timer of drains"),
    ];
    if plan.remote {
        return rules;
    }
    rules.push(ioctl((KVM_IRQ_LINE, "KVM_IRQ_LINE: the interrupt of the PMU")));
    // If the queue of real-time signals is full, the VMM sends SIGIO instead of the kick signal.
    rules.extend(plan.process.signal.into_iter().chain([libc::SIGIO]).map(|signal| {
        let arguments = [Argument::int(0, plan.process.id), Argument::int(2, signal.cast_unsigned())];
        rule(call!(SYS_tgkill, tgkill), arguments, "the kick of a vCPU")
    }));
    rules
}

fn main(plan: &Plan) -> Vec<Rule> {
    let mut rules = machine(plan);
    rules.extend(waiting());
    rules.extend([
        rule(calls::POLL, [], "waits for the reader of a full console"),
        rule(call!(SYS_read, read), [], "keys, signals, event descriptors; files that are open"),
        rule(call!(SYS_ftruncate, ftruncate), [], "the report replaces an older one"),
    ]);
    rules.extend(open_files());
    rules.extend(recording(plan));
    if plan.socket.is_some() {
        rules.extend(calls::SAVE_VM.map(ioctl));
        rules.push(rule(call!(SYS_pwrite64, pwrite64), [], "the guest's memory, to the file of a snapshot"));
        rules.push(synced());
    }
    if plan.remote {
        rules.extend([
            rule(call!(SYS_recvmsg, recvmsg), [], "a message of the VMM, with its files"),
            rule(call!(SYS_sendmsg, sendmsg), [], "an answer, with the window's file"),
            rule(call!(SYS_pwrite64, pwrite64), [], "an access of a VMM that does not map the window"),
            ioctl((SET_FILTER, "PERF_EVENT_IOC_SET_FILTER: the address at which the guest has put the doorbell")),
        ]);
    }
    if plan.restarts {
        rules.extend(BOOT.map(ioctl));
        rules.extend(calls::BOOT.map(ioctl));
    }
    rules
}

fn ctl(plan: &Plan) -> Vec<Rule> {
    let mut rules = machine(plan);
    rules.extend(waiting());
    rules.extend([
        rule(call!(SYS_accept4, accept4), [], "a client"),
        ioctl((FIONBIO, "a client that must not block")),
        rule(
            call!(SYS_getsockopt, getsockopt),
            [Argument::int(1, libc::SOL_SOCKET.cast_unsigned()), Argument::int(2, libc::SO_PEERCRED.cast_unsigned())],
            "the user of a client",
        ),
        rule(call!(SYS_geteuid, geteuid), [], "the user of the machine"),
        rule(call!(SYS_recvmsg, recvmsg), [], "a request, with its files"),
        rule(call!(SYS_sendto, sendto), [], "an answer"),
        rule(call!(SYS_read, read), [], "event descriptors"),
    ]);
    rules.extend(open_files());
    rules.extend(recording(plan));
    if let Some(directory) = plan.socket {
        rules.extend([
            synced(),
            rule(
                call!(SYS_newfstatat, newfstatat),
                [is(0, directory)],
                "a check that the control socket was not replaced",
            ),
            rule(
                call!(SYS_unlinkat, unlinkat),
                [is(0, directory), Argument::int(2, 0)],
                "the removal of the control socket",
            ),
        ]);
    }
    rules
}

fn synced() -> Rule {
    rule(call!(SYS_fsync, fsync), [], "the files of a snapshot are on disk before the machine replies")
}

/// System calls of an event loop, which selects the descriptors to watch and waits for events on them.
fn waiting() -> [Rule; 3] {
    let why = "the event loop";
    [
        rule(calls::EPOLL_WAIT, [], why),
        rule(call!(SYS_epoll_pwait, epoll_pwait), [], why),
        rule(call!(SYS_epoll_ctl, epoll_ctl), [], "watches input while the guest has room; watches clients"),
    ]
}

/// System calls on open files: the symbol file, the run's report and a recording.
fn open_files() -> [Rule; 2] {
    [
        rule(call!(SYS_lseek, lseek), [], "symbols are read again; the report replaces an older one"),
        rule(call!(SYS_statx, statx), [], "the type and size of an open file"),
    ]
}

/// System calls that write a recording. They can create a new file, and rename and remove files, but cannot open an
/// existing file. A relative path begins at the directory of recordings. An absolute path ignores this directory, and
/// `..` leaves it: only Landlock ([`files`](super::files)) and `--chroot` keep the calls from other files.
fn recording(plan: &Plan) -> Vec<Rule> {
    let Some(directory) = plan.recordings else {
        return Vec::new();
    };
    vec![
        rule(
            call!(SYS_openat, openat),
            [is(0, directory), Argument::int(2, path_at::CREATE.bits())],
            "a recording: a new file",
        ),
        rule(call!(SYS_newfstatat, newfstatat), [is(0, directory)], "a check for an older recording"),
        rule(
            call!(SYS_renameat, renameat),
            [is(0, directory), is(2, directory)],
            "the older recording gets the suffix .old; the new one gets its name",
        ),
        rule(
            call!(SYS_renameat2, renameat2),
            [is(0, directory), is(2, directory)],
            "the older and the new recording exchange their names",
        ),
        rule(
            call!(SYS_unlinkat, unlinkat),
            [is(0, directory), Argument::int(2, 0)],
            "the removal of a partial recording",
        ),
    ]
}

/// System calls of the PMU device, the standard library and the C library.
fn device(kind: ThreadKind, plan: &Plan) -> Vec<Rule> {
    let thread = match kind {
        ThreadKind::Vcpu => Thread::Vcpu,
        ThreadKind::Main | ThreadKind::Ctl | ThreadKind::Service => Thread::Service,
        ThreadKind::Drain => Thread::Drain,
        ThreadKind::Closer => Thread::Closer,
    };
    let calls =
        if plan.pmu { vpmu::confine::calls(thread, &plan.process) } else { vpmu::confine::runtime(plan.process.id) };
    calls.into_iter().map(Rule::from).collect()
}

/// System calls of the crash handler, which can run on any thread.
fn crash() -> [Rule; 4] {
    let why = "the crash handler restores the terminal";
    [TCGETS, TCSETS, TCGETS2, TCSETS2].map(|request| ioctl((request, why)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::signal;

    /// A machine with every option.
    fn all() -> Plan {
        Plan {
            process: Process { id: 7, vcpus: vec![17, 18], signal: Some(signal::kick_signal()) },
            pmu: true,
            remote: false,
            restarts: true,
            restored_pmu: true,
            recordings: Some(8),
            socket: Some(9),
        }
    }

    fn names(kind: ThreadKind, plan: &Plan) -> Vec<&'static str> {
        of(kind, plan).iter().map(|rule| rule.name).collect()
    }

    #[test]
    fn openat_is_for_recording_threads_and_creates_new_files_only() {
        for kind in ThreadKind::ALL {
            let opens: Vec<Rule> =
                of(kind, &all()).into_iter().filter(|rule| rule.number == libc::SYS_openat).collect();
            let records = [ThreadKind::Main, ThreadKind::Ctl].contains(&kind);
            assert_eq!(opens.len(), usize::from(records), "{kind:?}");
            for open in opens {
                let flags = open.arguments.iter().find(|argument| argument.index == 2);
                let flags = flags.expect("a condition").value;
                assert_ne!(flags & u64::from(libc::O_EXCL.cast_unsigned()), 0);
            }
        }
        let none = Plan { recordings: None, ..all() };
        assert!(!names(ThreadKind::Main, &none).contains(&"openat"));
    }

    #[test]
    fn every_directory_of_a_call_is_one_of_the_plans() {
        // The calls that take a path, with the indices of the directories at which it begins.
        let at: [(c_long, &[u8]); 5] = [
            (libc::SYS_openat, &[0]),
            (libc::SYS_newfstatat, &[0]),
            (libc::SYS_renameat, &[0, 2]),
            (libc::SYS_renameat2, &[0, 2]),
            (libc::SYS_unlinkat, &[0]),
        ];
        let plan = all();
        let directories = [plan.recordings, plan.socket].map(|fd| fd.expect("a directory"));
        let mut seen = 0;
        for kind in ThreadKind::ALL {
            for rule in of(kind, &plan) {
                let Some((_, indices)) = at.iter().find(|(number, _)| *number == rule.number) else {
                    continue;
                };
                for &index in *indices {
                    let bound = |&fd: &RawFd| rule.arguments.contains(&is(index, fd));
                    let bound = directories.iter().filter(|fd| bound(fd)).count();
                    assert_eq!(bound, 1, "{kind:?} {rule:?} {index}");
                    seen += 1;
                }
            }
        }
        // Seven on each of the two threads that record, and two more for the socket.
        assert_eq!(seen, 2 * 7 + 2);
    }

    #[test]
    fn signals_go_to_the_process_itself_only() {
        for kind in ThreadKind::ALL {
            for rule in of(kind, &all()) {
                if rule.name == "tgkill" {
                    assert!(rule.arguments.contains(&Argument::int(0, 7)), "{rule:?}");
                }
            }
        }
    }

    #[test]
    fn no_thread_makes_threads_programs_or_connections() {
        for kind in ThreadKind::ALL {
            for name in names(kind, &all()) {
                let made = ["clone", "clone3", "fork", "vfork", "execve", "execveat"];
                assert!(!made.contains(&name), "{kind:?} {name}");
                let more = ["socket", "connect", "bind", "ptrace", "prctl", "open", "kill"];
                assert!(!more.contains(&name), "{kind:?} {name}");
            }
        }
    }

    #[test]
    fn only_the_main_thread_creates_vms_and_only_with_restarts() {
        let creates = |kind, plan: &Plan| of(kind, plan).contains(&ioctl(BOOT[0]));
        assert!(creates(ThreadKind::Main, &all()));
        let once = Plan { restarts: false, ..all() };
        assert!(!creates(ThreadKind::Main, &once));
        assert!(!creates(ThreadKind::Vcpu, &all()));
    }

    #[test]
    fn state_is_read_only_where_a_machine_can_be_saved_and_set_only_for_a_restored_pmu() {
        for request in calls::START_COUNTERS.map(ioctl) {
            let restored = Plan { restored_pmu: true, socket: None, ..all() };
            assert!(of(ThreadKind::Vcpu, &restored).contains(&request));
            assert!(!of(ThreadKind::Vcpu, &Plan { restored_pmu: false, ..restored }).contains(&request));
        }
        let none = Plan { socket: None, ..all() };
        for request in calls::SAVE_VCPU.map(ioctl) {
            assert!(of(ThreadKind::Vcpu, &all()).contains(&request));
            assert!(!of(ThreadKind::Vcpu, &none).contains(&request));
        }
        for request in calls::SAVE_VM.map(ioctl) {
            assert!(of(ThreadKind::Main, &all()).contains(&request));
            assert!(!of(ThreadKind::Main, &none).contains(&request));
        }
    }

    #[test]
    fn perf_event_open_needs_a_pmu() {
        let without = Plan { pmu: false, ..all() };
        for kind in ThreadKind::ALL {
            let opens = |plan: &Plan| names(kind, plan).contains(&"perf_event_open");
            assert_eq!(opens(&all()), kind != ThreadKind::Closer, "{kind:?}");
            assert!(!opens(&without), "{kind:?}");
        }
    }

    #[test]
    fn kvm_run_is_the_first_rule_of_vcpu_threads_and_of_no_other() {
        let run = Argument::int(1, KVM_RUN);
        for kind in ThreadKind::ALL {
            let rules = of(kind, &all());
            let at = rules.iter().position(|rule| rule.arguments.contains(&run));
            let expected = (kind == ThreadKind::Vcpu).then_some(0);
            assert_eq!(at, expected, "{kind:?}");
        }
    }

    #[test]
    fn every_rule_has_a_reason() {
        for kind in ThreadKind::ALL {
            for rule in of(kind, &all()) {
                assert!(!rule.reason.is_empty(), "{kind:?} {}", rule.name);
            }
        }
    }
}

//! The confinement that this host offers to `vmm run`, for `vmm check`.

use serde::Serialize;

use super::{files, namespace};
use crate::probe::Check;

/// The actions of filters that the host's kernel knows.
const ACTIONS: &str = "/proc/sys/kernel/seccomp/actions_avail";

/// The restrictions that this host offers to `vmm run` with default options, started by this user.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Available {
    /// Whether each thread can have a seccomp filter.
    pub seccomp: bool,
    /// The version of the host's Landlock. `None` if the host has none.
    pub landlock_abi: Option<u32>,
    /// Whether a machine can have a PID namespace of its own.
    pub pid_namespace: bool,
    /// Capabilities that a machine keeps with each of its events.
    pub capabilities: Vec<&'static str>,
}

impl Available {
    /// Asks the host. `perfmon` is true if opening host counters here takes `CAP_PERFMON`.
    pub(crate) fn find(perfmon: bool) -> Self {
        let held = rustix::thread::capabilities(None);
        let perfmon = perfmon
            && held.is_ok_and(|held| {
                let perfmon = rustix::thread::CapabilitySet::PERFMON;
                held.permitted.contains(perfmon)
            });
        Self {
            seccomp: std::fs::read_to_string(ACTIONS).is_ok_and(|actions| actions.contains("trap")),
            landlock_abi: files::version_of_host(),
            pid_namespace: namespace::is_possible(None),
            capabilities: if perfmon { vec!["perfmon"] } else { Vec::new() },
        }
    }

    /// The lines of the table.
    pub(crate) fn checks(&self) -> [Check; 4] {
        [
            match self.seccomp {
                true => Check::new(
                    "confine.seccomp",
                    "present",
                    "each thread of `vmm run` can make only the system calls that it needs",
                ),
                false => Check::new(
                    "confine.seccomp",
                    "absent",
                    "`vmm run` needs --no-seccomp: build the host's kernel with CONFIG_SECCOMP_FILTER",
                ),
            },
            self.landlock(),
            match self.pid_namespace {
                true => Check::new(
                    "confine.pids",
                    "own namespace",
                    "a thread that a guest takes over has no id for a process outside its machine",
                ),
                false => Check::new(
                    "confine.pids",
                    "shared",
                    match self.scopes_signals() {
                        true => "Landlock keeps the signals of a thread that a guest takes over inside the machine",
                        false => {
                            "a thread that a guest takes over can signal other processes of its user: start `vmm \
                             run` as root, and give each machine a user of its own (--user)"
                        }
                    },
                ),
            },
            match &self.capabilities[..] {
                [] => Check::new("confine.capabilities", "none", "`vmm run` drops every capability"),
                kept => Check::new(
                    "confine.capabilities",
                    kept.join(", "),
                    "`vmm run` keeps it to open host counters; not needed at kernel.perf_event_paranoid=1 by a \
                     machine without exit traces",
                ),
            },
        ]
    }

    fn landlock(&self) -> Check {
        let name = "confine.landlock";
        match self.landlock_abi {
            Some(version) => Check::new(
                name,
                format!("version {version}"),
                "`vmm run` can create and remove files only beside recordings and the control socket",
            ),
            None => Check::new(
                name,
                "absent",
                "a thread that a guest takes over can create and remove files wherever its user can: use --user and \
                 --chroot, or enable Landlock in the host's kernel (5.13 or newer, with lsm=landlock,...)",
            ),
        }
    }

    fn scopes_signals(&self) -> bool {
        let version = self.landlock_abi;
        version.is_some_and(|version| version >= files::SCOPES_SIGNALS)
    }
}

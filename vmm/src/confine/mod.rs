//! Confinement of `vmm run` before the guest's first instruction.
//!
//! The process is confined in steps. At its start, it moves to a PID namespace of its own
//! ([`Inherited::leave_namespace`]). Then the VMM opens everything that has a path. Then
//! [`Confinement::drop_privileges`] closes inherited descriptors, changes the root directory and the user, drops
//! capabilities, and restricts the files that can be reached by a path. Threads that are started after this step inherit
//! its effects. Threads that were started earlier must end before the guest runs.
//!
//! The vCPUs' threads start next ([`Unfiltered::start_vcpus`]), because each filter names them: host counters are opened
//! on these threads only. After that, each thread installs its own seccomp filter when it starts
//! ([`Confinement::spawn`]). The main thread installs its filter last ([`Confinement::filter_main`]). A system call that
//! a filter refuses ends the process.
//!
//! `vmm check` and `vmm ctl` are short-lived programs of the operator and are not confined.

mod allocator;
mod available;
mod files;
mod inherited;
mod namespace;
mod privileges;
mod rules;
mod seccomp;

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use rustix::thread::CapabilitySet;
use serde::Serialize;
use vpmu::Settings;
use vpmu::confine::Process;

pub use self::available::Available;
use self::files::Directories;
pub use self::inherited::Inherited;
pub use self::privileges::{User, UserError};
use self::rules::Plan;
use self::seccomp::Filters;
use crate::signal;

/// Errors of the confinement.
#[derive(Debug, thiserror::Error)]
pub enum ConfineError {
    /// The root directory could not be changed.
    #[error("cannot make {directory} the root directory: {remedy}")]
    Chroot {
        /// The directory.
        directory: PathBuf,
        /// The remedy.
        remedy: &'static str,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
    /// The process could not change its user or groups.
    #[error("cannot become {user}: {remedy}")]
    User {
        /// The user.
        user: User,
        /// The remedy.
        remedy: &'static str,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
    /// A resource limit could not be set.
    #[error("cannot set the limit on {0}")]
    Limit(&'static str, #[source] io::Error),
    /// The user asked for more host counters than the limit on open descriptors allows.
    #[error(
        "--max-host-counters {asked}: a limit of {limit} descriptors leaves room for {left}; give fewer, or \
         start with a higher 'ulimit -Hn'"
    )]
    Descriptors {
        /// The limit.
        limit: u64,
        /// The requested number.
        asked: u32,
        /// The number that the limit allows.
        left: u64,
    },
    /// Capabilities could not be read or dropped, or no_new_privs could not be set.
    #[error("cannot drop privileges")]
    Privileges(#[source] io::Error),
    /// The process could not move to a PID namespace of its own.
    #[error("cannot move to a PID namespace of its own: raise the limit on processes, or start without CAP_SYS_ADMIN")]
    Namespace(#[source] io::Error),
    /// Landlock refused a rule.
    #[error("cannot restrict the files that the VMM can reach: choose another directory with --recording or --ctl")]
    Files(#[source] landlock::RulesetError),
    /// A mistake in the lists of system calls.
    #[error("cannot compile the seccomp filter of {thread} threads: this is a bug")]
    Filter {
        /// The kind of thread.
        thread: &'static str,
        /// The cause.
        #[source]
        source: seccompiler::BackendError,
    },
    /// The handler of refused calls could not be installed.
    #[error("cannot install the signal handler for refused system calls")]
    Handler(#[source] vmm_sys_util::errno::Error),
    /// The kernel refused the filter.
    #[error(
        "the host's kernel does not accept the seccomp filter: build it with CONFIG_SECCOMP_FILTER, or run with --no-seccomp"
    )]
    Install(#[source] seccompiler::Error),
    /// The thread could not be started.
    #[error("the host cannot start another thread")]
    Thread(#[source] io::Error),
}

/// The purpose of a thread. It determines which system calls the thread may make.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ThreadKind {
    /// Runs the event loop, and all work after the run.
    Main,
    /// Runs a vCPU.
    Vcpu,
    /// Moves pending host samples to the guest's rings ([`vpmu::Vpmu::drain`]).
    Drain,
    /// Serves the control socket.
    Ctl,
    /// Closes the PMU's host counters.
    Closer,
    /// Serves what no vCPU of another process waits for: control requests, signals, threads that end.
    Service,
}

impl ThreadKind {
    const ALL: [Self; 6] = [Self::Main, Self::Vcpu, Self::Drain, Self::Ctl, Self::Closer, Self::Service];

    fn name(self) -> &'static str {
        match self {
            Self::Main => "main",
            Self::Vcpu => "vCPU",
            Self::Drain => "drain",
            Self::Ctl => "ctl",
            Self::Closer => "closer",
            Self::Service => "service",
        }
    }
}

/// The operator's choices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// The user to run as, if changed.
    pub user: Option<User>,
    /// The root directory, if changed.
    pub chroot: Option<PathBuf>,
    /// Whether each thread has a seccomp filter.
    pub seccomp: bool,
}

/// Properties of a machine that determine the privileges and system calls that it needs.
#[derive(Debug)]
pub struct Needs<'a> {
    /// Number of its vCPUs.
    pub vcpus: u8,
    /// Whether a guest that resets boots again.
    pub restarts: bool,
    /// Whether it was restored with KVM's own PMU.
    pub restored_pmu: bool,
    /// Whether another process runs its vCPUs.
    pub remote: bool,
    /// Whether the system calls of that process's threads are read, which takes `CAP_SYS_PTRACE` or the same user.
    pub reads_calls: bool,
    /// The settings of its PMU, if it has one.
    pub settings: Option<&'a Settings>,
    /// Whether opening its host counters takes `CAP_PERFMON`.
    pub perfmon: bool,
    /// The directory of recordings, if there are any.
    pub recordings: Option<BorrowedFd<'a>>,
    /// The directory of the control socket, if there is one.
    pub socket: Option<BorrowedFd<'a>>,
}

/// The privileges that remain to a confined process, for the report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Confined {
    /// Whether each thread has a seccomp filter.
    pub seccomp: bool,
    /// Whether the process is prevented from gaining privileges.
    pub no_new_privs: bool,
    /// Capabilities in effect.
    pub capabilities: Vec<&'static str>,
    /// The version of Landlock that restricts which files can be reached. `None` if the host has no Landlock.
    pub landlock_abi: Option<u32>,
    /// Whether the process has a PID namespace of its own.
    pub pid_namespace: bool,
    /// The user and group of the process.
    pub user: String,
    /// The root directory, if it was changed.
    pub chroot: Option<PathBuf>,
}

impl Confined {
    /// Warnings about missing restrictions, each with the remedy: the operator has turned one off, or the host lacks one, so
    /// an attacker who takes over a thread can reach more than the machine. `is_root` is true if the process still runs as root.
    /// `hidden` is true if Landlock was left out because it would hide the vCPUs' threads.
    fn warnings(&self, is_root: bool, hidden: bool) -> Vec<&'static str> {
        let mut warnings = Vec::new();
        if !self.seccomp {
            warnings.push(
                "--no-seccomp: no system call is refused. A guest that takes over this process can attack the host's kernel through any system call",
            );
        }
        if hidden && is_root && self.chroot.is_none() {
            warnings.push(
                "Landlock would hide the vCPUs' threads, so it is not used. A VMM that takes over this process can create, replace and remove root's files: use --user and --chroot",
            );
        } else if self.landlock_abi.is_none() && is_root && self.chroot.is_none() {
            warnings.push(
                "this host has no Landlock. A guest that takes over this process can create, replace and remove root's files: use --user and --chroot, or enable Landlock in the host's kernel (5.13 or newer, with lsm=landlock,...)",
            );
        }
        warnings
    }
}

/// A process that has dropped its privileges. Its threads have no filters yet, because the filters name the vCPUs'
/// threads.
#[derive(Debug)]
pub struct Unfiltered {
    /// The plan of the filters, if threads get filters.
    plan: Option<Plan>,
    confined: Confined,
}

impl Unfiltered {
    /// Starts the vCPUs' threads, one for each of `bodies`, with its name. By the time this function returns, the
    /// threads have installed their filters.
    ///
    /// # Errors
    /// [`ConfineError::Thread`], [`ConfineError::Filter`], [`ConfineError::Install`].
    pub fn start_vcpus<F: FnOnce() + Send + 'static>(
        self,
        bodies: impl IntoIterator<Item = (String, F)>,
    ) -> Result<(Confinement, Vec<JoinHandle<()>>), ConfineError> {
        let mut started = Vec::new();
        for (name, body) in bodies {
            started.push(Started::new(name, body)?);
        }
        let ids = started.iter().map(|thread| thread.id).collect();
        let confinement = self.on_threads(ids)?;
        let threads = started.into_iter().map(|thread| thread.filter(&confinement, ThreadKind::Vcpu));
        let threads = threads.collect::<Result<_, _>>()?;
        Ok((confinement, threads))
    }

    /// Makes the filters for a machine whose vCPUs run on these threads.
    ///
    /// # Errors
    /// [`ConfineError::Filter`].
    pub fn on_threads(self, ids: Vec<u32>) -> Result<Confinement, ConfineError> {
        let filters = self.plan.map(|plan| Filters::prepare(&plan.on(ids)));
        Ok(Confinement { filters: filters.transpose()?.map(Arc::new), confined: self.confined })
    }
}

/// Installs a filter on the calling thread.
type Begin = Box<dyn FnOnce() -> Result<(), ConfineError> + Send>;

/// A thread that waits for its filter.
struct Started {
    id: u32,
    thread: JoinHandle<()>,
    give: SyncSender<Begin>,
    begun: Receiver<Result<(), ConfineError>>,
}

impl Started {
    fn new(name: String, body: impl FnOnce() + Send + 'static) -> Result<Self, ConfineError> {
        let (tell_id, id) = sync_channel(1);
        let (give, filter) = sync_channel::<Begin>(1);
        let (tell, begun) = sync_channel(1);
        let thread = thread::Builder::new().name(name).spawn(move || {
            // The receivers exist until the thread is filtered, or the start is given up.
            let _ = tell_id.send(rustix::thread::gettid());
            let Ok(begin) = filter.recv() else { return };
            let ready = begin();
            let goes_on = ready.is_ok();
            let _ = tell.send(ready);
            if goes_on {
                body();
            }
        });
        let thread = thread.map_err(ConfineError::Thread)?;
        let id = id.recv().map_err(|_| died())?;
        Ok(Self { id: id.as_raw_nonzero().get().unsigned_abs(), thread, give, begun })
    }

    /// Makes the thread install the filter of `kind` and run its body.
    fn filter(self, confinement: &Confinement, kind: ThreadKind) -> Result<JoinHandle<()>, ConfineError> {
        let begin = Box::new(confinement.begin(kind));
        self.give.send(begin).map_err(|_| died())?;
        self.begun.recv().map_err(|_| died())??;
        Ok(self.thread)
    }
}

fn died() -> ConfineError {
    ConfineError::Thread(io::Error::other("the thread panicked"))
}

/// The confinement of one machine's process.
#[derive(Debug)]
pub struct Confinement {
    filters: Option<Arc<Filters>>,
    confined: Confined,
}

impl Confinement {
    /// Prepares the process, and checks that it has the privileges to apply `options`. Call this
    /// before the process starts a thread.
    ///
    /// # Errors
    /// [`ConfineError::Chroot`], [`ConfineError::User`], [`ConfineError::Privileges`].
    pub fn prepare(options: &Options) -> Result<(), ConfineError> {
        allocator::use_one_arena();
        privileges::check(options)
    }

    /// Lowers a device's limit on host counters if the process's limit on open descriptors allows fewer. `asked` is
    /// true if the user gave the limit on host counters.
    ///
    /// # Errors
    /// [`ConfineError::Descriptors`] if the user gave the limit on host counters, and the limit on open descriptors
    /// allows fewer.
    pub fn fit_descriptors(settings: &mut Settings, asked: bool) -> Result<(), ConfineError> {
        privileges::fit_descriptors(settings, asked)
    }

    /// Drops all privileges except those that a machine with these `needs` requires. Changes the user and the root
    /// directory if `options` name them. Call this after everything that has a path has been opened. Threads that
    /// already run keep their privileges, so they must end before the guest's first instruction.
    ///
    /// # Errors
    /// [`ConfineError`]; some privileges may have been dropped.
    pub fn drop_privileges(
        options: &Options,
        needs: &Needs<'_>,
        mut inherited: Inherited,
    ) -> Result<Unfiltered, ConfineError> {
        inherited.close();
        privileges::limit(needs.vcpus, needs.settings)?;
        let kept = [(needs.perfmon, CapabilitySet::PERFMON), (needs.reads_calls, CapabilitySet::SYS_PTRACE)];
        let kept = kept.into_iter().filter_map(|(needed, capability)| needed.then_some(capability)).collect();
        let capabilities = privileges::drop_all(options, kept)?;
        if let Some(namespace) = &inherited.namespace {
            // The change of the user has undone this.
            let dies = namespace.die_with_parent();
            dies.map_err(ConfineError::Namespace)?;
        }
        let directories = Directories { recordings: needs.recordings, socket: needs.socket };
        // To print a backtrace, the process reads its own program. That takes system calls that the filters refuse.
        let reads = !options.seccomp;
        // Landlock would hide the threads of another process, which are then visible to CAP_PERFMON alone.
        let hidden = needs.remote && (needs.reads_calls || !capabilities.contains(&"perfmon"));
        let landlock_abi =
            if hidden { None } else { files::restrict(directories, reads).map_err(ConfineError::Files)? };
        let confined = Confined {
            seccomp: options.seccomp,
            no_new_privs: true,
            capabilities,
            landlock_abi,
            pid_namespace: inherited.namespace.is_some(),
            user: privileges::own_user().to_string(),
            chroot: options.chroot.clone(),
        };
        for warning in confined.warnings(rustix::process::geteuid().is_root(), hidden) {
            eprintln!("vmm: warning: {warning}");
        }
        let signal = (!needs.remote).then(signal::kick_signal);
        let plan = Plan {
            process: Process { id: std::process::id(), vcpus: Vec::new(), signal },
            pmu: needs.settings.is_some(),
            remote: needs.remote,
            restarts: needs.restarts,
            restored_pmu: needs.restored_pmu,
            recordings: needs.recordings.map(|directory| directory.as_raw_fd()),
            socket: needs.socket.map(|directory| directory.as_raw_fd()),
        };
        Ok(Unfiltered { plan: options.seccomp.then_some(plan), confined })
    }

    /// The remaining privileges.
    #[must_use]
    pub fn confined(&self) -> &Confined {
        &self.confined
    }

    /// Starts a thread of `kind`. By the time this function returns, the thread has installed its filter.
    ///
    /// # Errors
    /// [`ConfineError::Thread`], [`ConfineError::Install`].
    pub fn spawn(
        &self,
        kind: ThreadKind,
        name: String,
        body: impl FnOnce() + Send + 'static,
    ) -> Result<JoinHandle<()>, ConfineError> {
        Started::new(name, body)?.filter(self, kind)
    }

    /// Returns a function that installs the filter of `kind` on the calling thread. A thread that is not started by
    /// [`Self::spawn`] must call the returned function first.
    pub fn begin(&self, kind: ThreadKind) -> impl FnOnce() -> Result<(), ConfineError> + Send + 'static {
        let filters = self.filters.clone();
        move || match filters {
            Some(filters) => filters.install(kind),
            None => Ok(()),
        }
    }

    /// Installs the main thread's filter. Call this after all other threads have their filters, and before
    /// the guest's first instruction.
    ///
    /// # Errors
    /// [`ConfineError::Install`].
    pub fn filter_main(&self) -> Result<(), ConfineError> {
        self.begin(ThreadKind::Main)()
    }

    /// An unconfined process, for tests.
    #[cfg(test)]
    pub(crate) fn none() -> Self {
        Self {
            filters: None,
            confined: Confined {
                seccomp: false,
                no_new_privs: false,
                capabilities: Vec::new(),
                landlock_abi: None,
                pid_namespace: false,
                user: String::new(),
                chroot: None,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_without_landlock_and_without_a_root_directory_is_warned() {
        let confined = Confined { seccomp: true, chroot: None, ..Confinement::none().confined };
        let [warning] = confined.warnings(true, false)[..] else {
            panic!("one warning");
        };
        for word in ["Landlock", "--user", "--chroot"] {
            assert!(warning.contains(word), "{warning}");
        }
        assert!(confined.warnings(false, false).is_empty());
        let landlock = Confined { landlock_abi: Some(1), ..confined.clone() };
        assert!(landlock.warnings(true, false).is_empty());
        let chroot = Confined { chroot: Some("/empty".into()), ..confined };
        assert!(chroot.warnings(true, false).is_empty());
    }
}

//! Implements [`Source`] with the host's perf events. No other module of this crate opens perf events.

pub(crate) mod calls;
mod clock;
mod closer;
mod counter;
mod group;
mod pmc;
mod pmus;
mod probe;
mod readings;
pub mod records;
mod ring;
mod set;
mod sys;
mod timers;
pub(crate) mod tracepoint;
mod traces;
mod trial;

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use libc::c_int;

use self::clock::Clock;
use self::closer::{ClosedLater, Closer};
use self::pmus::CpuPmu;
use self::probe::Probed;
use self::ring::Pool;
use self::set::PerfSet;
use self::timers::Timers;
use self::tracepoint::{Paranoid, Recorder, Tracepoints};
pub use self::tracepoint::{Refusal as ExitsRefused, StoreTracepoint, Stores};
pub use self::traces::{HostTrace, host_traces};
use crate::abi::{KIND_EXIT_TRACE, KIND_RAW, KIND_SOFTWARE, PAGE_SIZE};
use crate::arch;
use crate::refusal::Refusal;
use crate::settings::Hardware;
use crate::source::{Counter, CounterSet, Offer, Request, Source};

/// Errors from creating the source.
#[derive(Debug, thiserror::Error)]
#[expect(clippy::error_impl_error, reason = "users write `host::Error`, like `std::io::Error`")]
pub enum Error {
    /// The signal is not a real-time signal.
    #[error("signal {0} cannot report overflows: use a real-time signal")]
    Signal(c_int),
    /// The thread that closes counters cannot start.
    #[error("cannot start the thread that closes counters")]
    Thread(#[source] io::Error),
}

/// Descriptions of events, read from the host's files. A VMM that confines itself must read the files
/// beforehand, while it can still reach their directories and runs as a user who may read them.
#[derive(Debug)]
pub struct HostFiles {
    tracepoints: Result<Tracepoints, ExitsRefused>,
    /// The operator's decision on hardware events.
    hardware: Hardware,
    /// The PMU that counts hardware events.
    pmu: Result<CpuPmu, Refusal>,
    paranoid: Paranoid,
}

impl HostFiles {
    /// Reads the files, and the CPU affinity of the calling thread. `hardware` must equal the device's
    /// [`Settings::hardware`](crate::Settings::hardware). Without [`Hardware::events`] the source opens no
    /// hardware events, not even to probe them.
    #[must_use]
    pub fn read(hardware: &Hardware) -> Self {
        if log::log_enabled!(log::Level::Info) {
            for HostTrace { pmu, refused } in host_traces() {
                log::info!("guests cannot use the trace of the host's PMU {pmu}: {refused}");
            }
        }
        Self {
            tracepoints: Tracepoints::find(),
            hardware: hardware.clone(),
            pmu: cpu_pmu(),
            paranoid: Paranoid::read(),
        }
    }

    /// Whether opening this host's events takes `CAP_PERFMON`. `exit_traces` is true if somebody may open a trace of
    /// exits. A VMM can drop the capability if this is false.
    #[must_use]
    pub fn need_capability(&self, exit_traces: bool) -> bool {
        let traces = exit_traces && self.tracepoints.is_ok();
        !self.paranoid.allows_kernel() || traces && !self.paranoid.allows_tracepoints()
    }
}

/// The host's perf events, which count on vCPU threads.
#[derive(Debug)]
pub struct PerfSource {
    /// The signal of overflows. `None` if the vCPUs' threads belong to another process, which must never get one.
    signal: Option<c_int>,
    clock: Arc<Clock>,
    pool: Arc<Pool>,
    timers: Timers,
    tracepoints: Option<Tracepoints>,
    closer: Arc<Closer>,
    /// The operator's decision on hardware events.
    hardware: Hardware,
    /// The PMU that counts hardware events.
    cpu_pmu: Result<CpuPmu, Refusal>,
    /// The events that this host can count. They are probed at the first use, so that a device without a driver
    /// does not open perf events.
    probed: OnceLock<Probed>,
}

impl PerfSource {
    /// Like [`PerfSource::confined`], but for an unconfined process and with default hardware settings.
    ///
    /// # Errors
    /// [`Error`].
    pub fn new(signal: c_int) -> Result<Self, Error> {
        Self::confined(HostFiles::read(&Hardware::default()), signal, || Ok(()))
    }

    /// Creates the source, and starts the crate's only thread. The thread first calls `begin`. After that, it
    /// makes only the system calls listed for [`Thread::Closer`](crate::confine::Thread::Closer).
    ///
    /// The host's events are probed later, when the guest's driver or the VMM first needs them. The thread
    /// that needs them opens each candidate, so that thread's capabilities determine which events open.
    ///
    /// The host sends `signal` to a vCPU's thread when one of the vCPU's events that use the exit engine
    /// overflows. The VMM's handler must make the run call return. Without a handler, the signal ends the
    /// process.
    ///
    /// # Errors
    /// [`Error::Signal`] if `signal` is not a real-time signal; [`Error::Thread`] if the thread cannot start or
    /// `begin` fails.
    pub fn confined(
        files: HostFiles,
        signal: c_int,
        begin: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> Result<Self, Error> {
        if !(libc::SIGRTMIN()..=libc::SIGRTMAX()).contains(&signal) {
            return Err(Error::Signal(signal));
        }
        Self::start(files, Some(signal), begin)
    }

    /// Like [`PerfSource::confined`], for vCPUs whose threads belong to another process. The source sends no signals, and
    /// refuses to sample with [`Engine::Exit`](crate::source::Engine::Exit), which needs one.
    ///
    /// # Errors
    /// [`Error::Thread`].
    pub fn remote(files: HostFiles, begin: impl FnOnce() -> io::Result<()> + Send + 'static) -> Result<Self, Error> {
        Self::start(files, None, begin)
    }

    fn start(
        files: HostFiles,
        signal: Option<c_int>,
        begin: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> Result<Self, Error> {
        let tracepoints = files
            .tracepoints
            .and_then(Tracepoints::permitted)
            .inspect_err(|refusal| log::info!("exits that KVM handles cannot be traced: {refusal}"))
            .ok();
        Ok(Self {
            signal,
            clock: Arc::new(Clock::new()),
            pool: Arc::new(Pool::new()),
            timers: Timers::default(),
            tracepoints,
            closer: Arc::new(Closer::start(begin).map_err(Error::Thread)?),
            hardware: files.hardware,
            cpu_pmu: files.pmu,
            probed: OnceLock::new(),
        })
    }

    fn probed(&self) -> &Probed {
        self.probed.get_or_init(|| {
            let mut probed = probe::probe(&self.hardware, self.cpu_pmu);
            for (kind, refusal) in &probed.refusals {
                log_refusal(*kind, *refusal);
            }
            let traces = self.tracepoints.as_ref().map(|_| tracepoint::offer());
            probed.offers.extend(traces);
            probed
        })
    }

    /// The PMU that counts hardware events, or the default if no PMU does. In the latter case the default has no
    /// effect, because the source offers no hardware events.
    fn pmu(&self) -> CpuPmu {
        self.cpu_pmu.unwrap_or_default()
    }
}

/// Logs why guests cannot use the events of one kind. Does not log a missing PMU as a warning, because many hosts have
/// no PMU.
fn log_refusal(kind: u32, refusal: Refusal) {
    let (events, level) = match (kind, refusal) {
        (KIND_SOFTWARE, _) => ("software", log::Level::Warn),
        (_, Refusal::Absent) => ("hardware", log::Level::Info),
        _ => ("hardware", log::Level::Warn),
    };
    log::log!(level, "guests cannot count {events} events: {refusal}");
}

/// The perf events that a host may offer, except raw events, whether or not this host can count them.
pub(crate) fn candidates() -> impl Iterator<Item = Offer> {
    probe::candidates().chain([tracepoint::offer()])
}

/// Tests, on the calling thread, whether this host's perf can trace exits that the host's kernel handles
/// itself.
///
/// # Errors
/// The reason why perf cannot trace them, with a remedy.
pub fn traces_exits() -> Result<(), ExitsRefused> {
    Tracepoints::find()?.permitted()?.probe()
}

/// Returns the maximum number of bytes that the host locks in memory. The host locks the rings of at most `counters`
/// sampling counters and of the operator's counters, and the metadata pages of the non-sampling counters on each of
/// `vcpus` threads.
pub(crate) fn locked_memory(vcpus: u32, counters: u32) -> u64 {
    let rings = ring::most_pages(u64::from(counters) + OPERATORS);
    let pages = u64::from(vcpus) * set::MOST_PAGES as u64;
    (rings + pages) * PAGE_SIZE as u64
}

/// Number of the operator's counters that [`locked_memory`] and [`descriptors`] take into account.
const OPERATORS: u64 = 64;
/// Maximum number of descriptors for the non-sampling counters of a thread. This covers a counter for each
/// event with each combination of exclusions, the leaders of their groups, and the leader of the thread's
/// sampling clocks.
const SHARED: u64 = 4 * 64;

/// Returns the maximum number of file descriptors. This covers at most `counters` sampling counters, the operator's
/// counters, the non-sampling counters on each of `vcpus` threads, and the VMM's other descriptors. A trace of exits
/// needs two descriptors, so each sampling counter and each counter of the operator is counted twice.
pub(crate) fn descriptors(vcpus: u32, counters: u32) -> u64 {
    2 * (u64::from(counters) + OPERATORS) + SHARED * u64::from(vcpus) + sys::LEFT_TO_OTHERS
}

/// Returns the PMU that counts on every CPU on which the calling thread may run. Threads that the calling thread starts
/// inherit these CPUs.
fn cpu_pmu() -> Result<CpuPmu, Refusal> {
    let affinity = sys::affinity().unwrap_or_else(|error| {
        log::warn!("cannot read the CPU affinity of this process: {error}");
        BTreeSet::new()
    });
    CpuPmu::find(Path::new(pmus::DEVICES), &affinity)
}

/// Returns the reason why [`PerfSource`] refuses hardware events even if the host would open them. The reason is that
/// the events would not count on some of the CPUs on which the calling thread may run. `None` if there is no such
/// reason.
#[must_use]
pub fn hardware_refusal() -> Option<Refusal> {
    cpu_pmu().err()
}

/// The error to return if an event does not open. For a raw event, `EINVAL` means that the PMU does not know the event,
/// so it becomes `ENOENT`.
fn unknown(what: &Request, error: io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(libc::EINVAL) if what.kind == KIND_RAW => io::Error::from_raw_os_error(libc::ENOENT),
        _ => error,
    }
}

impl Source for PerfSource {
    fn tsc(&self) -> u64 {
        arch::ticks()
    }

    fn thread(&self) -> i32 {
        sys::thread()
    }

    fn thread_time(&self) -> Option<u64> {
        sys::thread_time()
    }

    fn offers(&self) -> &[Offer] {
        &self.probed().offers
    }

    fn refusal(&self, kind: u32) -> Option<Refusal> {
        let mut refusals = self.probed().refusals.iter();
        refusals.find_map(|&(of, refusal)| (of == kind).then_some(refusal))
    }

    fn open(&self, what: &Request, thread: i32) -> io::Result<Box<dyn Counter>> {
        if what.kind == KIND_EXIT_TRACE {
            let tracepoints = self.tracepoints.as_ref();
            let tracepoints = tracepoints.ok_or(io::ErrorKind::Unsupported)?;
            let recorder = Recorder::open(tracepoints, thread, &self.clock, &self.pool)?;
            return Ok(Box::new(ClosedLater::new(recorder, &self.closer)));
        }
        self.pmu().check(what)?;
        counter::open(self, what, thread).map_err(|error| unknown(what, error))
    }

    fn hold(&self, thread: i32) {
        self.timers.hold(thread);
    }

    fn release(&self, thread: i32) -> io::Result<()> {
        self.timers.release(thread)
    }

    fn pause(&self, thread: i32) -> io::Result<()> {
        self.timers.pause(thread)
    }

    fn resume(&self, thread: i32) -> io::Result<()> {
        self.timers.resume(thread)
    }

    fn counters(&self, thread: i32) -> Box<dyn CounterSet> {
        Box::new(PerfSet::new(thread, self.pmu()))
    }
}

//! Sources of counts: the host's clocks and perf events. Because [`Source`] is a trait, tests can use sources with
//! exact counts.

use std::fmt::Debug;
use std::io;

use crate::refusal::Refusal;

/// The host's clocks and its counters on vCPU threads.
pub trait Source: Send + Sync + Debug {
    /// The host's time stamp counter now.
    fn tsc(&self) -> u64;
    /// The calling thread's id for [`Source::open`].
    fn thread(&self) -> i32;
    /// CPU time of the calling thread in nanoseconds; `None` if unavailable.
    fn thread_time(&self) -> Option<u64>;
    /// The events that the source can count. Each of them was tested.
    fn offers(&self) -> &[Offer];
    /// The reason why [`Source::offers`] has no event of `kind`, if the host refused all events of this kind. `None`
    /// by default.
    fn refusal(&self, kind: u32) -> Option<Refusal> {
        let _ = kind;
        None
    }
    /// Opens a counter on `thread`. The counter is stopped, and its count is zero.
    ///
    /// # Errors
    /// The host's error. For events in [`Source::offers`], the usual cause is a lack of descriptors, counters or
    /// lockable memory.
    fn open(&self, what: &Request, thread: i32) -> io::Result<Box<dyn Counter>>;
    /// Holds back the start of counters on `thread`. A counter that is started after this call may wait for
    /// [`Source::release`], so that all such counters start at the same time. A host that paces these counters with
    /// timers can then serve all of them with one interrupt. If a counter stops before the release, other running
    /// counters may pause until the release.
    ///
    /// By default, each counter starts and stops immediately.
    fn hold(&self, thread: i32) {
        let _ = thread;
    }
    /// Starts the counters that have been waiting since [`Source::hold`].
    ///
    /// # Errors
    /// The host's error.
    fn release(&self, thread: i32) -> io::Result<()> {
        let _ = thread;
        Ok(())
    }
    /// Stops the sampling clocks of `thread` until [`Source::resume`], including clocks that are opened or started
    /// during that time. Called when the vCPU is paused, because overflows must then not signal its thread.
    ///
    /// By default, the clocks continue.
    ///
    /// # Errors
    /// The host's error.
    fn pause(&self, thread: i32) -> io::Result<()> {
        let _ = thread;
        Ok(())
    }
    /// Ends a [`Source::pause`].
    ///
    /// # Errors
    /// The host's error.
    fn resume(&self, thread: i32) -> io::Result<()> {
        let _ = thread;
        Ok(())
    }
    /// A new, empty set for counters of `thread` that do not sample.
    fn counters(&self, thread: i32) -> Box<dyn CounterSet>;
}

/// An event that a source can count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// One of the perf kinds of [`abi`](crate::abi), such as
    /// [`KIND_HARDWARE`](crate::abi::KIND_HARDWARE).
    pub kind: u32,
    /// The event within the kind.
    pub config: u64,
    /// Whether the source offers not only `config`, but every config of this kind that the host can open.
    pub any_config: bool,
    /// The name of the event in the catalogue: lower case, digits and dashes, at most 40 bytes.
    pub name: String,
    /// Unit of the count. Empty for plain numbers.
    pub unit: &'static str,
    /// Description of the counted events.
    pub counts: &'static str,
    /// The shortest sampling period that the host allows; `None` if the event cannot sample.
    pub shortest_period: Option<u64>,
    /// Whether the count can exclude host work. For hardware events, [`Request::exclude_host`] does so.
    pub guest_only: bool,
    /// Whether the event can exclude guest user mode or guest kernel mode.
    pub excludes: bool,
}

/// A request for a counter. The default request counts in all modes and does not sample.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Request {
    /// See [`Offer::kind`].
    pub kind: u32,
    /// The event within the kind.
    pub config: u64,
    /// The sampling; `None` for a counter that only counts.
    pub sampling: Option<Sampling>,
    /// Exclude guest user mode.
    pub exclude_user: bool,
    /// Exclude guest kernel mode.
    pub exclude_kernel: bool,
    /// Exclude the host's work for the vCPU. Only for hardware events.
    pub exclude_host: bool,
    /// Pin the counter, as perf's `pinned` does: if the host cannot schedule the counter on the PMU, the counter
    /// enters the error state instead of being multiplexed.
    pub pinned: bool,
}

/// Sampling of a counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sampling {
    /// The rate of overflows.
    pub rate: Rate,
    /// The handling of an overflow.
    pub engine: Engine,
}

/// The rate of a counter's overflows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rate {
    /// One overflow each time the count has grown by this number. Must not be zero.
    Period(u64),
    /// About this many overflows per second. The host adapts the period to this rate. Must not be zero.
    Frequency(u64),
}

/// The engine that turns overflows into records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// The vCPU's thread makes the records. An overflow ends the thread's run call.
    Exit,
    /// The host kernel makes the records while the vCPU keeps running. [`Counter::drain`] returns them later, on any
    /// thread.
    Batched,
}

/// A host counter on one vCPU's thread. It is released when this value is dropped.
pub trait Counter: Send + Debug {
    /// Starts or continues counting.
    ///
    /// # Errors
    /// The host's error. The event is then in the error state.
    fn start(&mut self) -> io::Result<()>;
    /// Stops counting.
    ///
    /// # Errors
    /// See [`Counter::start`].
    fn stop(&mut self) -> io::Result<()>;
    /// The count since the counter was opened, and the counter's times.
    ///
    /// # Errors
    /// See [`Counter::start`].
    fn read(&mut self) -> io::Result<Reading>;
    /// Sets a new rate. A period must not replace a frequency, and a frequency must not replace a period.
    ///
    /// # Errors
    /// See [`Counter::start`].
    fn set_rate(&mut self, rate: Rate) -> io::Result<()>;
    /// Appends to `into` the overflows or exits since the last call, oldest first. While the counter runs, an
    /// unfinished exit is left for a later call.
    fn drain(&mut self, into: &mut Overflows);
}

/// The counters of one vCPU's thread that do not sample. They are read together. Dropping the set ends all its
/// counters.
///
/// A counter runs from its [`add`](CounterSet::add) to its [`remove`](CounterSet::remove). Counters that are read
/// together may share their `enabled` and `running` times. These times may include time before a counter was added, so
/// only the difference between two readings of a counter is meaningful.
pub trait CounterSet: Send + Debug {
    /// Starts a new counter for `what`, which must not sample. The count begins at zero. The caller may share the
    /// counter among events. This call also takes the counter's first reading.
    ///
    /// # Errors
    /// See [`Source::open`]. Also `EINVAL` if the request samples or traces.
    fn add(&mut self, what: &Request) -> io::Result<CounterKey>;
    /// Ends a counter. The source closes the counter's descriptor, unless it still reads other counters
    /// through that descriptor. An unknown key has no effect.
    fn remove(&mut self, key: CounterKey);
    /// Reads every counter. This takes one system call per perf group, or none for a group that the calling thread can
    /// read through its metadata pages.
    fn refresh(&mut self);
    /// The counter's reading at the last [`refresh`](CounterSet::refresh).
    ///
    /// # Errors
    /// `EIO` for an unknown key, or if the host could not read the counter, for example because a pinned counter has
    /// lost its hardware counter.
    fn reading(&self, key: CounterKey) -> io::Result<Reading>;
}

/// Identifies a counter in its [`CounterSet`]. The set assigns the number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CounterKey(pub u32);

/// A count and its times. None of these values ever decreases.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reading {
    /// The count.
    pub value: u64,
    /// Host nanoseconds during which the counter was enabled.
    pub enabled: u64,
    /// Host nanoseconds during which the counter counted.
    pub running: u64,
}

/// Overflows of a host counter.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Overflows {
    /// Overflows that the host recorded one by one.
    pub samples: Vec<Overflow>,
    /// Overflows that the host dropped.
    pub lost: u64,
    /// Number of times that the host throttled the counter.
    pub throttles: u64,
    /// Records of a trace of exits. For such a trace, the other fields are empty.
    pub exits: Vec<Recorded>,
}

/// An item of a trace of exits ([`KIND_EXIT_TRACE`](crate::abi::KIND_EXIT_TRACE)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recorded {
    /// An exit.
    Exit(HostExit),
    /// At this point of the trace, the given number of exits is missing.
    Lost(u64),
}

/// One exit of a vCPU, from the host's records. Contains no data about the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostExit {
    /// The host's time stamp counter at the exit.
    pub tsc: u64,
    /// The host's time stamp counter at the next guest entry; `None` if unknown, or if the trace stopped
    /// before that entry.
    pub back: Option<u64>,
    /// The guest's instruction pointer.
    pub ip: u64,
    /// The exit reason, as the hardware numbers it.
    pub reason: u16,
    /// The first information word of the exit: `info1` of `kvm:kvm_exit`. Bits that the guest must not see are zero.
    pub qualification: u64,
    /// The second information word of the exit: `info2` of `kvm:kvm_exit`. Bits that the guest must not see are zero.
    pub detail: u64,
}

/// One overflow from the host's records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overflow {
    /// The host's time stamp counter at the overflow.
    pub tsc: u64,
    /// The guest's instruction pointer, if the vCPU was in the guest.
    pub ip: u64,
    /// The mode of the vCPU's thread.
    pub mode: Mode,
    /// Growth of the count since the previous overflow.
    pub period: u64,
}

/// The mode of a vCPU's thread. It does not tell guest user mode from guest kernel mode, because Linux before 6.8
/// reports the guest mode in which the vCPU was last preempted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Running the guest.
    Guest,
    /// Doing the host's work, or unknown.
    Host,
}

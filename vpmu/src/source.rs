//! Sources of counts: the host's clocks and perf events. They are behind a trait, so that tests can use
//! sources with exact counts.

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
    /// The countable events, each tested.
    fn offers(&self) -> &[Offer];
    /// The reason for the absence of a kind in [`Source::offers`], if the host refused all of its
    /// events; `None` by default.
    fn refusal(&self, kind: u32) -> Option<Refusal> {
        let _ = kind;
        None
    }
    /// Opens a stopped counter on `thread`, at zero.
    ///
    /// # Errors
    /// The host's error; for events in [`Source::offers`] usually because descriptors, counters or
    /// lockable memory have run out.
    fn open(&self, what: &Request, thread: i32) -> io::Result<Box<dyn Counter>>;
    /// Begins to hold counters of `thread`. A counter that starts from now on may wait for
    /// [`Source::release`], so that all such counters start at one moment. If a counter stops before the
    /// release, other running counters may pause until then. A host whose timers pace these counters can then
    /// serve all of them with one interrupt.
    ///
    /// By default, each counter starts and stops immediately.
    fn hold(&self, thread: i32) {
        let _ = thread;
    }
    /// Starts the counters that have waited since [`Source::hold`].
    ///
    /// # Errors
    /// The host's error.
    fn release(&self, thread: i32) -> io::Result<()> {
        let _ = thread;
        Ok(())
    }
    /// Stops the sampling clocks of `thread` until [`Source::go_on`], including clocks opened or started meanwhile: the
    /// vCPU is paused, and overflows must not signal its thread.
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
    fn go_on(&self, thread: i32) -> io::Result<()> {
        let _ = thread;
        Ok(())
    }
    /// A new, empty set of counting counters of `thread`.
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
    /// Whether other configs are valid, too, if the host opens them.
    pub any_config: bool,
    /// Its catalogue name: lower case, digits and dashes, at most 40 bytes.
    pub name: String,
    /// Unit of the count: empty for plain numbers.
    pub unit: &'static str,
    /// Description of the counted events.
    pub counts: &'static str,
    /// The shortest sampling period of the host; `None` if the event cannot sample.
    pub shortest_period: Option<u64>,
    /// Whether the count can exclude host work; for hardware events, [`Request::exclude_host`] does that.
    pub guest_only: bool,
    /// Whether exclusions of guest modes are supported.
    pub excludes: bool,
}

/// A request for a counter. By default it only counts, in all modes.
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
    /// Exclude the host's work for the vCPU; for hardware events.
    pub exclude_host: bool,
    /// Pin the counter: it goes into error when it would have to share hardware with others.
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
    /// Each time the count has grown by this number; not zero.
    Period(u64),
    /// About this many overflows per second, with the period adapted by the host; not zero.
    Frequency(u64),
}

/// The engine that makes records of overflows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// The thread of the vCPU: the overflow ends its run call.
    Exit,
    /// The host, while the vCPU runs on; [`Counter::drain`] finds the records later, on any thread.
    Batched,
}

/// A host counter on one vCPU's thread. Dropping it releases it.
pub trait Counter: Send + Debug {
    /// Starts or continues counting.
    ///
    /// # Errors
    /// The host's error; the event is then in error.
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
    /// Sets the rate from now on; the kind of rate must not change.
    ///
    /// # Errors
    /// See [`Counter::start`].
    fn set_rate(&mut self, rate: Rate) -> io::Result<()>;
    /// Appends the overflows, or exits, since the last call, oldest first, to `into`. While the counter
    /// runs, an unfinished exit is left for a later call.
    fn drain(&mut self, into: &mut Overflows);
}

/// The counting counters of one vCPU's thread, read together. Dropping the set ends all its counters.
///
/// A counter runs from its [`add`](CounterSet::add) to its [`remove`](CounterSet::remove). Only the
/// difference between two readings of a counter is meaningful: counters that are read together may share
/// their times, which may have started before this counter.
pub trait CounterSet: Send + Debug {
    /// Starts counting `what`, which does not sample, from zero. Each call makes a new counter; the caller shares a
    /// counter among events. The counter's first reading is taken by this call.
    ///
    /// # Errors
    /// Like [`Source::open`]; `EINVAL` for a request that samples or traces.
    fn add(&mut self, what: &Request) -> io::Result<CounterKey>;
    /// Ends a counter. The source closes the counter's descriptor, unless it still reads other counters
    /// through that descriptor. An unknown key has no effect.
    fn remove(&mut self, key: CounterKey);
    /// Reads every counter: one system call per perf group, and no system call for a group that the calling thread can
    /// read through its metadata pages.
    fn refresh(&mut self);
    /// The counter's reading at the last [`refresh`](CounterSet::refresh).
    ///
    /// # Errors
    /// `EIO` for an unknown key, and if the host could not read the counter, such as a pinned one that lost its
    /// hardware counter.
    fn reading(&self, key: CounterKey) -> io::Result<Reading>;
}

/// Names a counter in its [`CounterSet`], which chooses the number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CounterKey(pub u32);

/// A count and its times, which never decrease.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reading {
    /// The count.
    pub value: u64,
    /// Host nanoseconds enabled.
    pub enabled: u64,
    /// Host nanoseconds counted.
    pub running: u64,
}

/// Overflows of a host counter.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Overflows {
    /// Overflows that the host recorded one by one.
    pub samples: Vec<Overflow>,
    /// Overflows that the host dropped.
    pub lost: u64,
    /// Times that the host suspended the counter's overflows because they were too many.
    pub throttles: u64,
    /// Records of a trace of exits; the other fields are then empty.
    pub exits: Vec<Recorded>,
}

/// An item of a trace of exits ([`KIND_EXIT_TRACE`](crate::abi::KIND_EXIT_TRACE)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recorded {
    /// An exit.
    Exit(HostExit),
    /// The given number of exits is missing here.
    Lost(u64),
}

/// One exit of a vCPU from the host's records, without data of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostExit {
    /// The host's time stamp counter at the exit.
    pub tsc: u64,
    /// The host's time stamp counter at the next guest entry; `None` if unknown, or if the trace stopped
    /// before that entry.
    pub back: Option<u64>,
    /// The guest's instruction pointer.
    pub ip: u64,
    /// The hardware's number of the exit.
    pub reason: u16,
    /// The first word of the hardware's information.
    pub qualification: u64,
    /// The second word of the hardware's information.
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

/// The mode of a vCPU's thread. The guest's own mode is not taken from the host: Linux before 6.8 reports the
/// guest mode in which the vCPU was last preempted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Running the guest.
    Guest,
    /// The host's work, or unknown.
    Host,
}

//! What counts: the host's clocks and its perf events, behind a trait so that tests have exact
//! ones.

use std::fmt::Debug;
use std::io;

use crate::refusal::Refusal;

/// The host's clocks and what it can count on a vCPU's thread.
pub trait Source: Send + Sync + Debug {
    /// The host's time stamp counter now.
    fn tsc(&self) -> u64;
    /// The calling thread's id, as [`Source::open`] takes it.
    fn thread(&self) -> i32;
    /// CPU time of the calling thread in nanoseconds; `None` when the host cannot tell.
    fn thread_time(&self) -> Option<u64>;
    /// What can be counted, each entry found to work.
    fn offers(&self) -> &[Offer];
    /// Why [`Source::offers`] lists no event of a kind, where the host refused all of them; `None` by
    /// default.
    fn refusal(&self, kind: u32) -> Option<Refusal> {
        let _ = kind;
        None
    }
    /// A counter on `thread`, stopped, at zero.
    ///
    /// # Errors
    /// The host's: none for what [`Source::offers`] lists, but descriptors and counters run out.
    fn open(&self, what: &Request, thread: i32) -> io::Result<Box<dyn Counter>>;
    /// Counters that were opened on `thread` and start from now on may wait for [`Source::release`], so
    /// that those start at one moment; if one stops meanwhile, others may stand still until then, too.
    /// A host whose timers pace such counters can then serve all by one interrupt.
    ///
    /// By default each starts and stops by itself.
    fn hold(&self, thread: i32) {
        let _ = thread;
    }
    /// Starts the counters that wait since [`Source::hold`].
    ///
    /// # Errors
    /// The host's.
    fn release(&self, thread: i32) -> io::Result<()> {
        let _ = thread;
        Ok(())
    }
    /// The counters of `thread` that only count; none yet.
    fn counters(&self, thread: i32) -> Box<dyn CounterSet>;
}

/// An event that a source can count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// One of the perf kinds of [`abi`](crate::abi), such as
    /// [`KIND_HARDWARE`](crate::abi::KIND_HARDWARE).
    pub kind: u32,
    /// Which event of the kind.
    pub config: u64,
    /// Any other config, too, as far as the host opens it.
    pub any_config: bool,
    /// As the catalogue names it: lower case, digits and dashes, at most 40 bytes.
    pub name: String,
    /// Unit of the count: empty for plain numbers.
    pub unit: &'static str,
    /// What exactly is counted.
    pub counts: &'static str,
    /// The shortest period that the host samples it with; `None`: it cannot sample.
    pub shortest_period: Option<u64>,
    /// Work of the host is left out, by [`Request::exclude_host`] if hardware counts it.
    pub guest_only: bool,
    /// The exclusions of guest modes are honoured.
    pub excludes: bool,
}

/// What to count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// As in [`Offer::kind`].
    pub kind: u32,
    /// Which event of the kind.
    pub config: u64,
    /// How it samples; `None` only counts.
    pub sampling: Option<Sampling>,
    /// Leave guest user mode out.
    pub exclude_user: bool,
    /// Leave guest kernel mode out.
    pub exclude_kernel: bool,
    /// Leave the host's work for the vCPU out; of events that hardware counts.
    pub exclude_host: bool,
    /// In error rather than sharing its counter with others.
    pub pinned: bool,
}

/// How a counter samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sampling {
    /// When it overflows.
    pub rate: Rate,
    /// What becomes of an overflow.
    pub engine: Engine,
}

/// When a counter overflows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rate {
    /// Each time that the count has grown by so much; not zero.
    Period(u64),
    /// About so many times a second, the host adapting the period; not zero.
    Frequency(u64),
}

/// Who takes an overflow to its record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// The vCPU: the overflow ends its run call.
    Exit,
    /// The host, while the vCPU runs on; [`Counter::drain`] finds it later, on any thread.
    Batched,
}

/// A host counter on one vCPU's thread. Dropping it gives it back.
pub trait Counter: Send + Debug {
    /// Goes on counting.
    ///
    /// # Errors
    /// The host's; the event is then in error.
    fn start(&mut self) -> io::Result<()>;
    /// Stands still.
    ///
    /// # Errors
    /// As [`Counter::start`].
    fn stop(&mut self) -> io::Result<()>;
    /// The count since it was opened, and how long it counted.
    ///
    /// # Errors
    /// As [`Counter::start`].
    fn read(&mut self) -> io::Result<Reading>;
    /// Another rate, from now; of the same kind as it was opened with.
    ///
    /// # Errors
    /// As [`Counter::start`].
    fn set_rate(&mut self, rate: Rate) -> io::Result<()>;
    /// Adds the overflows, or exits, since the last call, oldest first, to `into`. An exit that is
    /// not over stays behind while the counter runs.
    fn drain(&mut self, into: &mut Overflows);
}

/// The counters of one vCPU's thread that only count, read together. Dropping it ends them all.
///
/// A counter runs from its [`add`](CounterSet::add) to its [`remove`](CounterSet::remove). Users
/// subtract two of its readings; the times of a reading mean nothing else, as counters may share
/// them.
pub trait CounterSet: Send + Debug {
    /// Starts to count `what`, which does not sample, from zero. Each call makes a new counter;
    /// sharing one among events is the caller's task. The first reading is of this call.
    ///
    /// # Errors
    /// As [`Source::open`]; `EINVAL` for a request that samples or traces.
    fn add(&mut self, what: &Request) -> io::Result<CounterKey>;
    /// Ends a counter and closes its descriptor; the host may keep that open as long as counters
    /// that are read with this one. An unknown key changes nothing.
    fn remove(&mut self, key: CounterKey);
    /// Reads every counter as of now: one system call for all that the host keeps in one group,
    /// none for a group that the calling thread can read in its counter pages.
    fn refresh(&mut self);
    /// The counter as of the last [`refresh`](CounterSet::refresh).
    ///
    /// # Errors
    /// `EIO` if the host could not read the counter, such as a pinned one that lost its place, and
    /// for an unknown key.
    fn reading(&self, key: CounterKey) -> io::Result<Reading>;
}

/// Names a counter in its [`CounterSet`], which chooses the number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CounterKey(pub u32);

/// A count and its times, each only growing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reading {
    /// The count.
    pub value: u64,
    /// Host nanoseconds for which it was to count.
    pub enabled: u64,
    /// Host nanoseconds for which it did.
    pub running: u64,
}

/// Overflows that a host counter had.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Overflows {
    /// Those that the host recorded one by one.
    pub samples: Vec<Overflow>,
    /// Those that the host says it dropped.
    pub lost: u64,
    /// Times that the host suspended the counter's overflows for having too many of them.
    pub throttles: u64,
    /// Of a trace of exits, what it recorded, and nothing else of the above.
    pub exits: Vec<Recorded>,
}

/// What a trace of exits ([`KIND_EXIT_TRACE`](crate::abi::KIND_EXIT_TRACE)) recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recorded {
    /// An exit.
    Exit(HostExit),
    /// So many exits are missing here.
    Lost(u64),
}

/// One exit of a vCPU, as the host recorded it, without what is none of the guest's business.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostExit {
    /// The host's time stamp counter at the exit.
    pub tsc: u64,
    /// The same when the vCPU was about to run the guest again; `None`: the host does not say, or
    /// it was not before the trace stopped.
    pub back: Option<u64>,
    /// Where the vCPU was in the guest.
    pub ip: u64,
    /// The hardware's number of the exit.
    pub reason: u16,
    /// What the hardware says of it.
    pub qualification: u64,
    /// What it says besides.
    pub detail: u64,
}

/// One overflow, as the host recorded it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overflow {
    /// The host's time stamp counter at that moment.
    pub tsc: u64,
    /// Where the vCPU was, if it was in the guest.
    pub ip: u64,
    /// What the vCPU's thread was doing.
    pub mode: Mode,
    /// What the count had grown by since the overflow before.
    pub period: u64,
}

/// What a vCPU's thread was doing. Which mode the guest was in is not asked of the host: Linux before
/// 6.8 tells the one in which the vCPU was last preempted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Running the guest.
    Guest,
    /// Work of the host's, or nothing that the host can tell from it.
    Host,
}

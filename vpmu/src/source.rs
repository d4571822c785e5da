//! What counts: the host's clocks and its perf events, behind a trait so that tests have exact
//! ones.

use std::fmt::Debug;
use std::io;

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
    /// A counter on `thread`, stopped, at zero.
    ///
    /// # Errors
    /// The host's: none for what [`Source::offers`] lists, but descriptors and counters run out.
    fn open(&self, what: &Request, thread: i32) -> io::Result<Box<dyn Counter>>;
}

/// An event that a source can count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// One of the perf kinds of [`abi`](crate::abi), such as
    /// [`KIND_HARDWARE`](crate::abi::KIND_HARDWARE).
    pub kind: u32,
    /// Which event of the kind.
    pub config: u64,
    /// As the catalogue names it: lower case, digits and dashes, at most 40 bytes.
    pub name: String,
    /// Unit of the count: empty for plain numbers.
    pub unit: &'static str,
    /// What exactly is counted.
    pub counts: &'static str,
    /// The shortest period that the host samples it with; `None`: it cannot sample.
    pub shortest_period: Option<u64>,
    /// Work of the host is left out.
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
    /// An overflow every so many; zero only counts.
    pub period: u64,
    /// Leave guest user mode out.
    pub exclude_user: bool,
    /// Leave guest kernel mode out.
    pub exclude_kernel: bool,
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
    /// A new period, from now.
    ///
    /// # Errors
    /// As [`Counter::start`].
    fn set_period(&mut self, period: u64) -> io::Result<()>;
    /// Takes the overflows since the last call.
    fn drain(&mut self) -> Overflows;
}

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
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Overflows {
    /// Those that the host announced one by one.
    pub samples: u64,
    /// Those that the host says it dropped.
    pub lost: u64,
}

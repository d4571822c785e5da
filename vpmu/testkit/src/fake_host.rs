//! A simulated host and machine whose counts, times and errors the test sets.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Condvar, Mutex};

use vpmu::abi::{EXIT_ALL, KIND_EXIT_TRACE, KIND_HARDWARE, KIND_RAW, KIND_SOFTWARE};
use vpmu::source::{
    Counter, CounterKey, CounterSet, Engine, Mode, Offer, Overflow, Overflows, Rate, Reading, Recorded, Request,
    Sampling, Source,
};
use vpmu::{GuestRegs, Interrupt, Machine, RawEvents, Refusal, Registers};

/// An event of the simulated host that supports every option.
pub const CYCLES: (u32, u64) = (KIND_HARDWARE, 0);
/// An event of the simulated host that cannot sample.
pub const FAULTS: (u32, u64) = (KIND_SOFTWARE, 2);
/// The only raw event that the host counts.
pub const RAW: (u32, u64) = (KIND_RAW, 0x11);
/// The event that the simulated host uses to record exits.
const EXITS: (u32, u64) = (KIND_EXIT_TRACE, EXIT_ALL);
/// A clock, which counts nanoseconds.
pub const CLOCK: (u32, u64) = (KIND_SOFTWARE, 0);
/// The shortest period of `CYCLES`.
pub const SHORTEST: u64 = 10;

#[derive(Debug, Default)]
pub struct FakeHost {
    tsc: AtomicU64,
    thread: AtomicI32,
    thread_time: AtomicU64,
    counters: Mutex<Vec<Arc<Mutex<FakeCounter>>>>,
    broken: AtomicBool,
    /// The errno with which the host refuses to open counters, or zero if it opens them.
    denying: AtomicI32,
    /// Kinds of counters that the device requested.
    asked: Mutex<Vec<u32>>,
    /// The kinds of events that the host lacks, each with the reason.
    refusals: Mutex<Vec<(u32, Refusal)>>,
    /// Whether counters refuse to change their rate.
    refusing: AtomicBool,
    interrupts: AtomicU64,
    /// The queues for which interrupts were raised.
    signalled: Mutex<Vec<u16>>,
    exits: AtomicU64,
    knows_ips: AtomicBool,
    /// If set, the next caller of `reports_guest_ips` waits at this barrier twice. The test can act between these
    /// waits.
    trial: Mutex<Option<Arc<Barrier>>>,
    draining: AtomicBool,
    /// vCPUs that were kicked.
    kicks: Mutex<Vec<u32>>,
    kicked: Condvar,
    /// Whether kicks fail.
    stuck: AtomicBool,
    /// If set, the next kick waits at this barrier twice and then fails. The test can act between these waits.
    late: Mutex<Option<Arc<Barrier>>>,
}

#[derive(Debug)]
struct FakeCounter {
    kind: u32,
    thread: i32,
    running: bool,
    reading: Reading,
    period: u64,
    frequency: bool,
    engine: Option<Engine>,
    pinned: bool,
    host_excluded: bool,
    /// Whether the host has revoked the counter.
    lost: bool,
    left: u64,
    overflows: Overflows,
    /// Number of drains of the counter.
    drains: u64,
    /// Number of reads of the counter.
    reads: u64,
}

/// The device's handle to a counter. When the handle is dropped, the counter is removed from the simulated host.
#[derive(Debug)]
struct Handle {
    host: Arc<FakeHost>,
    counter: Arc<Mutex<FakeCounter>>,
}

/// A set of counters, with their last readings. Adding a counter to the set starts it.
#[derive(Debug)]
struct FakeSet {
    host: Arc<FakeHost>,
    thread: i32,
    counters: Vec<(CounterKey, Handle, Option<Reading>)>,
    /// Number of keys used so far. Keys are never reused.
    keys: u32,
}

#[derive(Debug)]
pub struct FakeSource {
    host: Arc<FakeHost>,
    offers: Vec<Offer>,
}

#[derive(Debug)]
pub struct FakeMachine(pub Arc<FakeHost>);

impl FakeHost {
    pub fn pass(&self, ticks: u64) {
        self.tsc.fetch_add(ticks, Ordering::Relaxed);
    }

    /// Returns the host's TSC without advancing it.
    pub fn now(&self) -> u64 {
        self.tsc.load(Ordering::Relaxed)
    }

    /// Number of counters that run on `thread`.
    pub fn running(&self, thread: i32) -> usize {
        let counters = self.counters.lock().expect("no panic");
        let running = counters.iter().filter(|counter| {
            let counter = counter.lock().expect("no panic");
            counter.running && counter.thread == thread
        });
        running.count()
    }

    /// Returns the periods of the counters that have a period.
    pub fn periods(&self) -> Vec<u64> {
        let counters = self.counters.lock().expect("no panic");
        let periods = counters.iter().filter_map(|counter| {
            let counter = counter.lock().expect("no panic");
            (counter.period != 0 && !counter.frequency).then_some(counter.period)
        });
        periods.collect()
    }

    /// Returns the frequencies of the counters that sample with a frequency.
    pub fn frequencies(&self) -> Vec<u64> {
        let counters = self.counters.lock().expect("no panic");
        let frequencies = counters.iter().filter_map(|counter| {
            let counter = counter.lock().expect("no panic");
            counter.frequency.then_some(counter.period)
        });
        frequencies.collect()
    }

    /// Returns the engines of the counters that sample.
    pub fn engines(&self) -> Vec<Engine> {
        let counters = self.counters.lock().expect("no panic");
        let engines = counters.iter().filter_map(|counter| counter.lock().expect("no panic").engine);
        engines.collect()
    }

    /// Number of pinned counters.
    pub fn pinned(&self) -> usize {
        let counters = self.counters.lock().expect("no panic");
        let pinned = counters.iter().filter(|counter| {
            let counter = counter.lock().expect("no panic");
            counter.pinned
        });
        pinned.count()
    }

    /// Returns, for each counter, whether it excludes the host's work.
    pub fn host_excluded(&self) -> Vec<bool> {
        let counters = self.counters.lock().expect("no panic");
        let excluded = counters.iter().map(|counter| counter.lock().expect("no panic").host_excluded);
        excluded.collect()
    }

    /// Makes the device see the calling thread as `thread`.
    pub fn be_thread(&self, thread: i32) {
        self.thread.store(thread, Ordering::Relaxed);
    }

    pub fn spend(&self, nanoseconds: u64) {
        self.thread_time.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    pub fn add_exits(&self, exits: u64) {
        self.exits.fetch_add(exits, Ordering::Relaxed);
    }

    pub fn break_host(&self) {
        self.broken.store(true, Ordering::Relaxed);
    }

    /// Makes the host refuse to open further counters, with this errno. Zero makes it open counters again.
    pub fn deny(&self, errno: i32) {
        self.denying.store(errno, Ordering::Relaxed);
    }

    /// Kinds of counters that the device requested.
    pub fn asked(&self) -> Vec<u32> {
        self.asked.lock().expect("no panic").clone()
    }

    /// Makes the host lack a kind of event for this reason.
    pub fn refuse_kind(&self, kind: u32, refusal: Refusal) {
        self.refusals.lock().expect("no panic").push((kind, refusal));
    }

    /// Makes the host revoke the open counters of `thread`.
    pub fn give_up(&self, thread: i32) {
        for counter in &*self.counters.lock().expect("no panic") {
            let mut counter = counter.lock().expect("no panic");
            counter.lost |= counter.thread == thread;
        }
    }

    /// Makes counters refuse further changes to their rate.
    pub fn refuse_rates(&self) {
        self.refusing.store(true, Ordering::Relaxed);
    }

    /// Returns the queues for which the device raised interrupts since the last call.
    pub fn take_signalled(&self) -> Vec<u16> {
        std::mem::take(&mut *self.signalled.lock().expect("no panic"))
    }

    pub fn interrupts(&self) -> u64 {
        self.interrupts.load(Ordering::Relaxed)
    }

    /// Makes host samples contain guest addresses.
    pub fn know_ips(&self) {
        self.knows_ips.store(true, Ordering::Relaxed);
    }

    /// Makes the next caller of `reports_guest_ips` wait twice for the test, at the returned barrier.
    pub fn try_slowly(&self) -> Arc<Barrier> {
        let barrier = Arc::new(Barrier::new(2));
        *self.trial.lock().expect("no panic") = Some(Arc::clone(&barrier));
        barrier
    }

    /// Makes all later kicks of vCPUs fail.
    pub fn be_stuck(&self) {
        self.stuck.store(true, Ordering::Relaxed);
    }

    /// Makes the next kick wait twice for the test, at the returned barrier, and then fail.
    pub fn kick_too_late(&self) -> Arc<Barrier> {
        let barrier = Arc::new(Barrier::new(2));
        *self.late.lock().expect("no panic") = Some(Arc::clone(&barrier));
        barrier
    }

    /// Waits for `times` kicks that the test has not taken yet. Takes these kicks and returns their vCPUs.
    pub fn await_kicks(&self, times: usize) -> Vec<u32> {
        let kicks = self.kicks.lock().expect("no panic");
        let enough = self.kicked.wait_while(kicks, |kicks| kicks.len() < times);
        enough.expect("no panic").drain(..times).collect()
    }

    /// Number of kicks of vCPUs that the test has not taken yet.
    pub fn kicks(&self) -> usize {
        self.kicks.lock().expect("no panic").len()
    }

    /// Whether the device currently requests periodic drains.
    pub fn draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Makes the host record an overflow of every counter that runs on `thread`.
    pub fn record(&self, thread: i32, overflow: Overflow) {
        for counter in &*self.counters.lock().expect("no panic") {
            let mut counter = counter.lock().expect("no panic");
            if counter.thread == thread && counter.running {
                counter.overflows.samples.push(overflow);
            }
        }
    }

    /// Makes the host record this exit or loss for every exit trace that runs on `thread`.
    pub fn record_exit(&self, thread: i32, recorded: Recorded) {
        for counter in &*self.counters.lock().expect("no panic") {
            let mut counter = counter.lock().expect("no panic");
            if (counter.kind, counter.thread) == (KIND_EXIT_TRACE, thread) && counter.running {
                counter.overflows.exits.push(recorded);
            }
        }
    }

    pub fn open_counters(&self) -> usize {
        self.counters.lock().expect("no panic").len()
    }

    /// Returns how often the open counters of `thread` were drained, and how often they were read.
    pub fn visits(&self, thread: i32) -> (u64, u64) {
        let counters = self.counters.lock().expect("no panic");
        let counters = counters.iter().map(|counter| {
            let counter = counter.lock().expect("no panic");
            if counter.thread == thread { (counter.drains, counter.reads) } else { (0, 0) }
        });
        counters.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    }

    /// Makes an event happen `events` times on `thread`. Of these occurrences, the thread's counters count only the
    /// fraction `seen` / 4.
    pub fn work(&self, thread: i32, events: u64, seen: u64) {
        for counter in &*self.counters.lock().expect("no panic") {
            let mut counter = counter.lock().expect("no panic");
            if counter.thread == thread && counter.running {
                counter.grow(events, seen);
            }
        }
    }

    /// Makes the host drop `lost` overflow records of `thread`.
    pub fn drop_overflows(&self, thread: i32, lost: u64) {
        for counter in &*self.counters.lock().expect("no panic") {
            let mut counter = counter.lock().expect("no panic");
            if counter.thread == thread {
                counter.overflows.lost += lost;
            }
        }
    }
}

impl FakeCounter {
    fn grow(&mut self, events: u64, seen: u64) {
        self.reading.value += events * seen / 4;
        self.reading.enabled += events;
        self.reading.running += events * seen / 4;
        for _ in 0..events * seen / 4 {
            if self.period == 0 {
                continue;
            }
            self.left -= 1;
            if self.left == 0 {
                self.left = self.period;
                self.overflows.samples.push(Overflow { tsc: 0, ip: 0, mode: Mode::Host, period: self.period });
            }
        }
    }
}

impl Handle {
    /// Opens a counter in the simulated host, but does not start it.
    fn open(host: &Arc<FakeHost>, what: &Request, thread: i32) -> io::Result<Self> {
        if host.broken.load(Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(libc::EMFILE));
        }
        host.asked.lock().expect("no panic").push(what.kind);
        if what.kind == KIND_RAW && (what.kind, what.config) != RAW {
            return Err(io::Error::from_raw_os_error(libc::ENOENT));
        }
        match host.denying.load(Ordering::Relaxed) {
            0 => {}
            errno => return Err(io::Error::from_raw_os_error(errno)),
        }
        let period = what.sampling.map_or(0, |sampling| match sampling.rate {
            Rate::Period(length) | Rate::Frequency(length) => length,
        });
        let counter = Arc::new(Mutex::new(FakeCounter {
            kind: what.kind,
            thread,
            running: false,
            reading: Reading::default(),
            period,
            frequency: matches!(what.sampling, Some(Sampling { rate: Rate::Frequency(_), .. })),
            engine: what.sampling.map(|sampling| sampling.engine),
            pinned: what.pinned,
            host_excluded: what.exclude_host,
            lost: false,
            left: period,
            overflows: Overflows::default(),
            drains: 0,
            reads: 0,
        }));
        let mut counters = host.counters.lock().expect("no panic");
        counters.push(Arc::clone(&counter));
        Ok(Self { host: Arc::clone(host), counter })
    }

    fn with<T>(&self, act: impl FnOnce(&mut FakeCounter) -> T) -> io::Result<T> {
        if self.host.broken.load(Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        Ok(act(&mut self.counter.lock().expect("no panic")))
    }
}

impl Counter for Handle {
    fn start(&mut self) -> io::Result<()> {
        self.with(|counter| counter.running = true)
    }

    fn stop(&mut self) -> io::Result<()> {
        self.with(|counter| counter.running = false)
    }

    fn read(&mut self) -> io::Result<Reading> {
        let reading = self.with(|counter| {
            counter.reads += 1;
            (!counter.lost).then_some(counter.reading)
        });
        reading?.ok_or_else(|| io::Error::from_raw_os_error(libc::EIO))
    }

    fn set_rate(&mut self, rate: Rate) -> io::Result<()> {
        let frequency = matches!(rate, Rate::Frequency(_));
        let (Rate::Period(period) | Rate::Frequency(period)) = rate;
        if self.host.refusing.load(Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        self.with(|counter| {
            assert_eq!(counter.frequency, frequency, "the device does not mix periods and frequencies");
            counter.period = period;
            counter.left = period;
        })
    }

    fn drain(&mut self, into: &mut Overflows) {
        let taken = self.with(|counter| {
            counter.drains += 1;
            std::mem::take(&mut counter.overflows)
        });
        if let Ok(mut taken) = taken {
            into.samples.append(&mut taken.samples);
            into.exits.append(&mut taken.exits);
            into.lost += taken.lost;
            into.throttles += taken.throttles;
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let mut counters = self.host.counters.lock().expect("no panic");
        counters.retain(|other| !Arc::ptr_eq(other, &self.counter));
    }
}

impl FakeSource {
    pub fn new(host: &Arc<FakeHost>, raw: &RawEvents) -> Self {
        let offer = |(kind, config), name: &str, shortest_period| Offer {
            kind,
            config,
            any_config: false,
            name: name.to_owned(),
            unit: "",
            counts: "events of the test",
            shortest_period,
            guest_only: true,
            excludes: shortest_period.is_some(),
        };
        let raw = match raw {
            RawEvents::All => Some(Offer { any_config: true, ..offer((KIND_RAW, 0), "raw", Some(SHORTEST)) }),
            listed => (listed.allow(RAW.1)).then(|| offer(RAW, "raw-0x11", Some(SHORTEST))),
        };
        let mut offers = vec![
            offer(CYCLES, "cycles", Some(SHORTEST)),
            offer(FAULTS, "page-faults", None),
            Offer { unit: "ns", ..offer(CLOCK, "clock", Some(1)) },
            Offer { unit: "bytes", ..offer(EXITS, "exit-trace", None) },
        ];
        offers.extend(raw);
        Self { host: Arc::clone(host), offers }
    }
}

impl Source for FakeSource {
    fn tsc(&self) -> u64 {
        // Each read of the clock advances it by a tick.
        self.host.tsc.fetch_add(1, Ordering::Relaxed)
    }

    fn thread(&self) -> i32 {
        self.host.thread.load(Ordering::Relaxed)
    }

    fn thread_time(&self) -> Option<u64> {
        Some(1 + self.host.thread_time.load(Ordering::Relaxed))
    }

    fn offers(&self) -> &[Offer] {
        &self.offers
    }

    fn refusal(&self, kind: u32) -> Option<Refusal> {
        let refusals = self.host.refusals.lock().expect("no panic");
        let mut of_kind = refusals.iter().filter(|(of, _)| *of == kind);
        of_kind.next().map(|&(_, refusal)| refusal)
    }

    fn open(&self, what: &Request, thread: i32) -> io::Result<Box<dyn Counter>> {
        Ok(Box::new(Handle::open(&self.host, what, thread)?))
    }

    fn counters(&self, thread: i32) -> Box<dyn CounterSet> {
        Box::new(FakeSet { host: Arc::clone(&self.host), thread, counters: Vec::new(), keys: 0 })
    }
}

impl CounterSet for FakeSet {
    fn add(&mut self, what: &Request) -> io::Result<CounterKey> {
        assert_eq!(what.sampling, None, "a counter of a set does not sample");
        let mut handle = Handle::open(&self.host, what, self.thread)?;
        handle.start()?;
        let key = CounterKey(self.keys);
        self.keys += 1;
        self.counters.push((key, handle, Some(Reading::default())));
        Ok(key)
    }

    fn remove(&mut self, key: CounterKey) {
        self.counters.retain(|(other, ..)| *other != key);
    }

    fn refresh(&mut self) {
        for (_, handle, last) in &mut self.counters {
            *last = handle.read().ok();
        }
    }

    fn reading(&self, key: CounterKey) -> io::Result<Reading> {
        let found = self.counters.iter().find(|(other, ..)| *other == key);
        let reading = found.and_then(|(.., last)| *last);
        reading.ok_or_else(|| io::Error::from_raw_os_error(libc::EIO))
    }
}

impl Interrupt for FakeMachine {
    fn used(&self, queues: &[u16]) -> io::Result<()> {
        self.0.interrupts.fetch_add(1, Ordering::Relaxed);
        let mut signalled = self.0.signalled.lock().expect("no panic");
        signalled.extend_from_slice(queues);
        Ok(())
    }
}

impl Machine for FakeMachine {
    fn exits(&self, _vcpu: u32) -> Option<u64> {
        Some(self.0.exits.load(Ordering::Relaxed))
    }

    fn halts(&self, _vcpu: u32) -> Option<u64> {
        None
    }

    fn reports_guest_ips(&self) -> bool {
        let trial = self.0.trial.lock().expect("no panic").take();
        if let Some(barrier) = trial {
            barrier.wait();
            barrier.wait();
        }
        self.0.knows_ips.load(Ordering::Relaxed)
    }

    fn kick(&self, vcpu: u32) -> io::Result<()> {
        let late = self.0.late.lock().expect("no panic").take();
        if let Some(barrier) = &late {
            barrier.wait();
            barrier.wait();
        }
        if late.is_some() || self.0.stuck.load(Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        self.0.kicks.lock().expect("no panic").push(vcpu);
        self.0.kicked.notify_all();
        Ok(())
    }

    fn draining(&self, wanted: bool) {
        let before = self.0.draining.swap(wanted, Ordering::Relaxed);
        assert_ne!(before, wanted, "the device requests a change once");
    }
}

/// The registers of a vCPU whose instruction pointer the test chooses.
#[derive(Debug, Clone, Copy)]
pub struct At(pub u64);

impl Registers for At {
    fn registers(&mut self) -> Option<GuestRegs> {
        Some(GuestRegs { ip: self.0, user: self.0 < 1 << 63 })
    }
}

/// A hypervisor that does not return registers.
#[derive(Debug)]
pub struct Nowhere;

impl Registers for Nowhere {
    fn registers(&mut self) -> Option<GuestRegs> {
        None
    }
}

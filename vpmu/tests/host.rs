//! Tests of `PerfSource` with real events, signals and clocks, on the machine that runs the tests.
#![expect(clippy::expect_used, reason = "tests fail by panicking")]

use std::fs;
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};
use vpmu::abi::{KIND_HARDWARE, KIND_SOFTWARE};
use vpmu::host::PerfSource;
use vpmu::source::{Counter, Engine, Mode, Overflows, Rate, Request, Sampling, Source};
use vpmu_testkit::alone;

const TASK_CLOCK: u64 = 1;
const PAGE_FAULTS: u64 = 2;

/// Number of signals for overflows so far.
static SIGNALS: AtomicU64 = AtomicU64::new(0);

extern "C" fn count(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    SIGNALS.fetch_add(1, Ordering::Relaxed);
}

fn source() -> PerfSource {
    register_signal_handler(SIGRTMIN(), count).expect("a handler");
    PerfSource::new(SIGRTMIN()).expect("a source")
}

fn request(kind: u32, config: u64, sampling: Option<Sampling>) -> Request {
    Request { kind, config, sampling, exclude_host: kind == KIND_HARDWARE, ..Request::default() }
}

fn every(period: u64, engine: Engine) -> Option<Sampling> {
    Some(Sampling { rate: Rate::Period(period), engine })
}

fn open(source: &PerfSource, config: u64, sampling: Option<Sampling>) -> Box<dyn Counter> {
    let request = request(KIND_SOFTWARE, config, sampling);
    source.open(&request, source.thread()).expect("perf_event_open: see /proc/sys/kernel/perf_event_paranoid")
}

fn drained(counter: &mut dyn Counter) -> Overflows {
    let mut overflows = Overflows::default();
    counter.drain(&mut overflows);
    overflows
}

fn spin(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        black_box(());
    }
}

/// Spins until this thread has spent `time` on a CPU, no matter how busy the machine is.
fn burn(source: &PerfSource, time: Duration) {
    let now = || Duration::from_nanos(source.thread_time().expect("a clock"));
    let start = now();
    while now() - start < time {
        black_box(());
    }
}

#[test]
fn task_clock_is_the_threads_cpu_time() {
    let _alone = alone();
    let source = source();
    let mut counter = open(&source, TASK_CLOCK, None);
    spin(Duration::from_millis(20));
    assert_eq!(counter.read().expect("read").value, 0, "a counter is stopped until it is started");
    let (begun, before) = (Instant::now(), source.thread_time().expect("a clock"));
    counter.start().expect("start");
    burn(&source, Duration::from_millis(200));
    counter.stop().expect("stop");
    let spent = source.thread_time().expect("a clock") - before;
    let most = u64::try_from(begun.elapsed().as_nanos()).expect("fits");
    let reading = counter.read().expect("read");
    // In a virtual machine, CPU time excludes the time that the hypervisor took from the thread, but the
    // task-clock includes it.
    assert!(
        (spent - spent / 20..=most).contains(&reading.value),
        "task-clock {}, CPU time {spent}, elapsed time {most} ns",
        reading.value
    );
    assert!(reading.running <= reading.enabled, "the counter ran longer than it was enabled: {reading:?}");
    spin(Duration::from_millis(20));
    assert_eq!(counter.read().expect("read"), reading, "a stopped counter does not count");
}

#[test]
fn every_overflow_is_announced_and_found() {
    let _alone = alone();
    let source = source();
    SIGNALS.store(0, Ordering::Relaxed);
    let period = 1_000_000;
    let mut counter = open(&source, TASK_CLOCK, every(period, Engine::Exit));
    counter.start().expect("start");
    let (mut samples, mut lost) = (0, 0);
    for _ in 0..20 {
        spin(Duration::from_millis(15));
        let overflows = drained(&mut *counter);
        samples += overflows.samples.len() as u64;
        lost += overflows.lost;
    }
    counter.stop().expect("stop");
    samples += drained(&mut *counter).samples.len() as u64;
    let spent = counter.read().expect("read").value;
    let signals = SIGNALS.load(Ordering::Relaxed);
    eprintln!("{samples} overflows, {signals} signals in {spent} ns of task-clock");
    assert_eq!(lost, 0);
    assert_eq!(samples, signals, "one signal for each overflow");
    // A busy host can skip periods, so there can be fewer overflows, but never more.
    let whole = spent / period;
    assert!((whole / 2..=whole + 1).contains(&samples), "{samples} overflows in {whole} periods");
    assert_eq!(drained(&mut *counter).samples, [], "each overflow is drained once");
}

#[test]
fn batched_overflows_are_found_later_in_order_and_without_a_signal() {
    let _alone = alone();
    let source = source();
    SIGNALS.store(0, Ordering::Relaxed);
    let rates = [Rate::Period(1_000_000), Rate::Frequency(1000)];
    for rate in rates {
        let sampling = Sampling { rate, engine: Engine::Batched };
        let mut counter = open(&source, TASK_CLOCK, Some(sampling));
        let from = source.tsc();
        counter.start().expect("start");
        let mut overflows = Overflows::default();
        for _ in 0..3 {
            spin(Duration::from_millis(50));
            counter.drain(&mut overflows);
        }
        counter.stop().expect("stop");
        counter.drain(&mut overflows);
        let until = source.tsc();
        let samples = &overflows.samples;
        eprintln!("{} overflows by {rate:?}", samples.len());
        assert!(samples.len() > 10 && overflows.lost == 0);
        assert!(samples.is_sorted_by_key(|sample| sample.tsc));
        assert!(samples.iter().all(|s| (from..=until).contains(&s.tsc)));
        // All samples are host samples, because this thread does not run a guest.
        assert!(samples.iter().all(|sample| sample.mode == Mode::Host));
        assert!(samples.iter().all(|sample| sample.period == 1_000_000));
        assert_eq!(drained(&mut *counter).samples, [], "each overflow is drained once");
    }
    assert_eq!(SIGNALS.load(Ordering::Relaxed), 0);
}

#[test]
fn overflows_beyond_a_full_host_ring_are_lost() {
    let _alone = alone();
    let source = source();
    let period = 20_000;
    let mut counter = open(&source, TASK_CLOCK, every(period, Engine::Batched));
    counter.start().expect("start");
    // The ring has room for 2,048 records.
    let mut overflows = Overflows::default();
    let mut rounds = 0;
    while overflows.lost == 0 {
        burn(&source, Duration::from_millis(100));
        counter.drain(&mut overflows);
        burn(&source, Duration::from_micros(100));
        counter.drain(&mut overflows);
        rounds += 1;
        assert!(rounds < 100, "{} overflows, none lost", overflows.samples.len());
    }
    eprintln!("{} overflows, {} lost", overflows.samples.len(), overflows.lost);
    assert!(overflows.samples.len() > 1000);
}

/// Returns the total size in bytes of this process's perf event mappings.
fn mapped() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("readable");
    let of_events = maps.lines().filter(|line| line.contains("[perf_event]"));
    let length = |line: &str| {
        let (start, end) = line.split_once(' ')?.0.split_once('-')?;
        let address = |text| usize::from_str_radix(text, 16).ok();
        Some(address(end)? - address(start)?)
    };
    of_events.filter_map(length).sum()
}

#[test]
fn many_host_rings_are_shorter_than_few() {
    const LONG: usize = 2048;
    let _alone = alone();
    let source = source();
    let sampling = every(1_000_000, Engine::Batched);
    let page = {
        let _short = open(&source, TASK_CLOCK, every(1_000_000, Engine::Exit));
        mapped() / 2
    };
    let one = {
        let _first = open(&source, TASK_CLOCK, sampling);
        mapped()
    };
    let many: Vec<_> = (0..200).map(|_| open(&source, TASK_CLOCK, sampling)).collect();
    let all = mapped();
    assert!(all <= (LONG + 2 * many.len()) * page, "{} pages mapped", all / page);
    drop(many);
    assert_eq!(mapped(), 0);
    let _again = open(&source, TASK_CLOCK, sampling);
    assert_eq!(mapped(), one, "after the other counters are closed, a new ring has the full length again");
}

#[test]
fn new_period_is_used() {
    let _alone = alone();
    let source = source();
    let mut counter = open(&source, TASK_CLOCK, every(1_000_000_000_000, Engine::Exit));
    counter.start().expect("start");
    spin(Duration::from_millis(50));
    assert_eq!(drained(&mut *counter).samples, [], "the first period of 1000 s has not ended");
    counter.set_rate(Rate::Period(1_000_000)).expect("set");
    spin(Duration::from_millis(100));
    counter.stop().expect("stop");
    assert!(drained(&mut *counter).samples.len() > 10);
}

/// Returns this thread's number of page faults, as counted by the kernel.
fn faults() -> u64 {
    let stat = fs::read_to_string("/proc/thread-self/stat").expect("procfs");
    let fields = stat.rsplit_once(')').expect("a command").1;
    let mut fields = fields.split_whitespace();
    // In proc(5), field 10 is `minflt` and field 12 is `majflt`. The first field after the command is field 3.
    let minor = fields.nth(7).expect("minor faults").parse::<u64>();
    let major = fields.nth(1).expect("major faults").parse::<u64>();
    minor.expect("a number") + major.expect("a number")
}

#[test]
fn page_faults_are_counted_exactly() {
    let _alone = alone();
    let source = source();
    let mut counter = open(&source, PAGE_FAULTS, None);
    counter.start().expect("start");
    let pages = 200;
    let fresh = || {
        let range = [(GuestAddress(0), pages * 4096)];
        GuestMemoryMmap::<()>::from_ranges(&range).expect("memory")
    };
    // `inner` is the number of faults between the two reads of the counter. `outer` also includes the faults of these
    // two reads, because they run code that may not be in memory yet. The counter therefore grows by at least `inner`
    // and at most `outer`.
    let mut touched = |memory: &GuestMemoryMmap| {
        let outer = faults();
        let before = counter.read().expect("read").value;
        let inner = faults();
        for page in 0..pages {
            memory.write_obj(1_u8, GuestAddress(page as u64 * 4096)).expect("in memory");
        }
        let inner = faults() - inner;
        let count = counter.read().expect("read").value - before;
        (inner, count, faults() - outer)
    };
    touched(&fresh());
    let (inner, count, outer) = touched(&fresh());
    assert!(inner >= pages as u64, "{inner} faults for {pages} pages");
    assert!((inner..=outer).contains(&count), "{count} faults counted, but {inner} to {outer} occurred");
}

/// The counter's value, and the clock before and after the counter was read.
type Look = (u64, Instant, Instant);

/// Returns the lowest and the highest frequency that a counter can have, computed from two readings. These bounds hold
/// even if the thread was preempted during a reading.
fn frequencies(first: Look, second: Look) -> (f64, f64) {
    let ticks = (second.0 - first.0) as f64;
    let longest = (second.2 - first.1).as_secs_f64();
    let shortest = (second.1 - first.2).as_secs_f64();
    (ticks / longest, ticks / shortest)
}

#[test]
fn tsc_ticks_with_the_clock() {
    let _alone = alone();
    let source = source();
    let look = || -> Look {
        let before = Instant::now();
        (source.tsc(), before, Instant::now())
    };
    let looks: [Look; 3] = std::array::from_fn(|_| {
        spin(Duration::from_millis(100));
        look()
    });
    let (one, two) = (frequencies(looks[0], looks[1]), frequencies(looks[1], looks[2]));
    eprintln!("{one:?} Hz, then {two:?} Hz");
    assert!(one.0 <= two.1 * 1.01 && two.0 <= one.1 * 1.01);
}

/// VPMU-D-6.2-2.
#[test]
fn offered_events_open_and_others_do_not() {
    let _alone = alone();
    let source = source();
    for offer in source.offers() {
        eprintln!("offered: {} (period from {:?})", offer.name, offer.shortest_period);
        let opens = |sampling| {
            let request = request(offer.kind, offer.config, sampling);
            source.open(&request, source.thread()).expect("offered");
        };
        opens(None);
        if offer.shortest_period.is_some() {
            opens(every(1_000_000, Engine::Exit));
            opens(every(1_000_000, Engine::Batched));
        }
    }
    for config in 0..10 {
        let offered = source.offers().iter().any(|offer| (offer.kind, offer.config) == (KIND_HARDWARE, config));
        let request = request(KIND_HARDWARE, config, None);
        let opens = source.open(&request, source.thread()).is_ok();
        assert_eq!(offered, opens, "hardware event {config}");
    }
}

#[test]
fn only_a_real_time_signal_announces() {
    for signal in [0, -1, libc::SIGSEGV, libc::SIGKILL, 65] {
        let refused = PerfSource::new(signal).expect_err("not a real-time signal");
        assert!(refused.to_string().contains("real-time"), "another error: {refused}");
    }
}

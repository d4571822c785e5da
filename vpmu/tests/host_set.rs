//! Sets of counters that belong to one thread and are read together, with real software events.
#![expect(unsafe_code, reason = "limits of a process have no safe wrapper")]
#![expect(clippy::expect_used, reason = "tests fail by panicking")]

mod syscalls;

use std::fs;
use std::io;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::signal::SIGRTMIN;
use vpmu::abi::{KIND_EXIT_TRACE, KIND_SOFTWARE};
use vpmu::host::PerfSource;
use vpmu::source::{CounterKey, CounterSet, Engine, Rate, Reading, Request, Sampling, Source};
use vpmu_testkit::alone;

const TASK_CLOCK: u64 = 1;
const PAGE_FAULTS: u64 = 2;
const CONTEXT_SWITCHES: u64 = 3;
/// Software events that every Linux kernel counts.
const EVENTS: [u64; 5] = [0, TASK_CLOCK, PAGE_FAULTS, CONTEXT_SWITCHES, 4];
/// Maximum number of counters in a group.
const MOST_IN_GROUP: usize = 64;

fn source() -> PerfSource {
    PerfSource::new(SIGRTMIN()).expect("a source")
}

/// Returns an empty set for counters of the calling thread.
fn set() -> Box<dyn CounterSet> {
    let source = source();
    source.counters(source.thread())
}

fn event(config: u64) -> Request {
    Request { kind: KIND_SOFTWARE, config, ..Request::default() }
}

fn add(set: &mut dyn CounterSet, config: u64) -> CounterKey {
    set.add(&event(config)).expect("perf_event_open: see /proc/sys/kernel/perf_event_paranoid")
}

/// Reads the set, and returns the readings of these counters.
fn readings<const N: usize>(set: &mut dyn CounterSet, keys: [CounterKey; N]) -> [Reading; N] {
    set.refresh();
    keys.map(|key| set.reading(key).expect("readable"))
}

fn values<const N: usize>(set: &mut dyn CounterSet, keys: [CounterKey; N]) -> [u64; N] {
    readings(set, keys).map(|reading| reading.value)
}

fn errno<T>(result: io::Result<T>) -> Option<i32> {
    result.err().and_then(|error| error.raw_os_error())
}

/// Memory that has not been touched.
struct Fresh(GuestMemoryMmap<()>);

impl Fresh {
    fn new(pages: usize) -> Self {
        let range = [(GuestAddress(0), pages * 4096)];
        Self(GuestMemoryMmap::from_ranges(&range).expect("memory"))
    }

    /// Takes a page fault for each page.
    fn touch(&self, pages: std::ops::Range<u64>) {
        for page in pages {
            let written = self.0.write_obj(1_u8, GuestAddress(page * 4096));
            written.expect("in memory");
        }
    }
}

/// Open descriptors of this process.
fn descriptors() -> Vec<u64> {
    let numbers = fs::read_dir("/proc/self/fd").expect("readable");
    let numbers = numbers.map(|entry| {
        let name = entry.expect("an entry").file_name();
        name.to_string_lossy().parse().expect("a number")
    });
    numbers.collect()
}

fn open_descriptors() -> usize {
    descriptors().len()
}

fn limits() -> libc::rlimit {
    let mut limits = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes one rlimit to `limits`.
    let got = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limits) };
    assert_eq!(got, 0);
    limits
}

/// A changed limit on file descriptors. Dropping it restores the previous limit.
struct Limit(libc::rlimit);

impl Limit {
    fn new(descriptors: u64) -> Self {
        let before = limits();
        Self::set(libc::rlimit { rlim_cur: descriptors, ..before });
        Self(before)
    }

    fn set(limits: libc::rlimit) {
        // SAFETY: the kernel reads one rlimit.
        let done = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limits) };
        assert_eq!(done, 0);
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        Self::set(self.0);
    }
}

#[test]
fn tracer_counts_the_calls_of_its_thread_alone() {
    let _alone = alone();
    let call = thread::yield_now;
    assert_eq!(syscalls::count(|| {}), 0);
    for times in [1, 2, 100] {
        assert_eq!(syscalls::count(|| (0..times).for_each(|_| call())), times);
    }
    let (go, wait) = channel::<()>();
    let other = thread::spawn(move || wait.iter().for_each(|()| call()));
    go.send(()).expect("the thread waits");
    assert_eq!(
        syscalls::count(|| {
            let start = Instant::now();
            while start.elapsed() < Duration::from_millis(5) {}
        }),
        0
    );
    drop(go);
    other.join().expect("the thread ends");
}

#[test]
fn page_faults_of_a_set_are_exact_and_those_of_a_separate_counter() {
    let _alone = alone();
    let source = source();
    let mut set = source.counters(source.thread());
    let keys = [PAGE_FAULTS, TASK_CLOCK, PAGE_FAULTS].map(|config| add(&mut *set, config));
    let opened = source.open(&event(PAGE_FAULTS), source.thread());
    let mut separate = opened.expect("offered");
    separate.start().expect("start");
    let fresh = Fresh::new(200);
    let mut read = || {
        let [faults, _, also] = values(&mut *set, keys);
        [faults, also, separate.read().expect("read").value]
    };
    // Read once before the measurement, so that pages of code and stack are in memory.
    read();
    let before = read();
    fresh.touch(0..200);
    let after = read();
    for (before, after) in before.iter().zip(after) {
        assert_eq!(after - before, 200);
    }
}

#[test]
fn task_clock_of_a_set_lies_between_two_readings_of_a_separate_counter() {
    let _alone = alone();
    let source = source();
    let mut set = source.counters(source.thread());
    let key = add(&mut *set, TASK_CLOCK);
    let opened = source.open(&event(TASK_CLOCK), source.thread());
    let mut separate = opened.expect("offered");
    separate.start().expect("start");
    let mut clock = || separate.read().expect("read").value;
    let outer = clock();
    let [start] = readings(&mut *set, [key]);
    let inner = clock();
    let spin = Instant::now();
    while spin.elapsed() < Duration::from_millis(50) {}
    let inner = clock() - inner;
    let [end] = readings(&mut *set, [key]);
    let outer = clock() - outer;
    let spent = end.value - start.value;
    assert!((inner..=outer).contains(&spent), "{spent} ns counted, but {inner} to {outer} ns passed");
    let (enabled, running) = (end.enabled - start.enabled, end.running - start.running);
    assert_eq!(enabled, running, "software events always run while they are enabled");
    assert!(enabled.abs_diff(spent) < spent / 10, "enabled for {enabled} ns, but {spent} ns counted");
}

#[test]
fn counter_added_later_counts_from_zero_and_disturbs_no_other() {
    let _alone = alone();
    let mut set = set();
    let fresh = Fresh::new(30);
    let first = add(&mut *set, PAGE_FAULTS);
    values(&mut *set, [first]);
    let [before] = values(&mut *set, [first]);
    fresh.touch(0..10);
    let second = add(&mut *set, PAGE_FAULTS);
    let at_add = set.reading(second).expect("the add read it");
    assert!(at_add.value < 5, "the new counter does not start near zero: {at_add:?}");
    assert_eq!(set.reading(first).expect("readable").value, before);
    let [since, start] = readings(&mut *set, [first, second]);
    assert!(since.value - before >= 10);
    assert!(start.enabled > at_add.enabled);
    fresh.touch(10..30);
    let [late, end] = readings(&mut *set, [first, second]);
    // There can be more faults than touched pages. If the kernel migrates a page of the process during the test, the
    // next access to that page also faults.
    let faults = late.value - since.value;
    assert!(faults >= 20, "{faults} faults for 20 pages");
    assert_eq!(end.value - start.value, faults);
    assert_eq!((late.enabled, late.running), (end.enabled, end.running));
}

#[test]
fn removed_counters_leave_the_others_counting_the_leader_last() {
    let _alone = alone();
    let before = open_descriptors();
    let mut set = set();
    let fresh = Fresh::new(50);
    let keys = [PAGE_FAULTS; 5].map(|config| add(&mut *set, config));
    let [leader, second, third, fourth, fifth] = keys;
    assert_eq!(open_descriptors(), before + 5);

    set.remove(third);
    assert_eq!(open_descriptors(), before + 4);
    set.remove(leader);
    assert_eq!(open_descriptors(), before + 4, "a removed leader stays open while it has members");
    set.refresh();
    for gone in [leader, third] {
        assert_eq!(errno(set.reading(gone)), Some(libc::EIO));
    }
    let left = [second, fourth, fifth];
    let start = values(&mut *set, left);
    fresh.touch(0..50);
    let end = values(&mut *set, left);
    assert_eq!(end, start.map(|value| value + 50));

    // Remove `second` twice. The second removal must have no effect.
    for key in [leader, third, second, second, fifth] {
        set.remove(key);
    }
    assert_eq!(open_descriptors(), before + 2);
    assert_eq!(syscalls::count(|| set.refresh()), 1);
    assert!(set.reading(fourth).is_ok());
    set.remove(fourth);
    assert_eq!(open_descriptors(), before);
    assert_eq!(syscalls::count(|| set.refresh()), 0);
}

#[test]
fn removed_leader_is_used_again_for_the_same_request_from_zero() {
    let _alone = alone();
    let mut set = set();
    let fresh = Fresh::new(40);
    let leader = add(&mut *set, PAGE_FAULTS);
    let other = add(&mut *set, CONTEXT_SWITCHES);
    let open = open_descriptors();
    fresh.touch(0..20);
    assert!(values(&mut *set, [leader])[0] >= 20);
    set.remove(leader);
    let third = add(&mut *set, TASK_CLOCK);
    assert_eq!(open_descriptors(), open + 1, "an event of another kind opens a new counter");
    let again = add(&mut *set, PAGE_FAULTS);
    assert_eq!(open_descriptors(), open + 1);
    assert_ne!(again, leader);
    assert_eq!(set.reading(again).expect("the add read it").value, 0);
    let [start] = values(&mut *set, [again]);
    assert!(start < 5, "the new counter starts at {start}");
    fresh.touch(20..40);
    assert_eq!(values(&mut *set, [again]), [start + 20]);
    assert_eq!(errno(set.reading(leader)), Some(libc::EIO), "the key of a removed counter is invalid");
    let twice = add(&mut *set, PAGE_FAULTS);
    assert_eq!(open_descriptors(), open + 2, "a removed leader can be reused only once");
    for key in [leader, other, third, again, twice] {
        set.remove(key);
    }
    assert_eq!(open_descriptors(), open - 2);
}

#[test]
fn thousands_of_adds_and_removes_leak_no_descriptor() {
    let _alone = alone();
    let before = open_descriptors();
    let mut set = set();
    let mut keys = Vec::new();
    let mut random = 1_u64;
    for round in 0..5000 {
        random = random.wrapping_mul(6_364_136_223_846_793_005) + 1;
        let chosen = usize::try_from(random >> 33).expect("31 bits");
        if keys.len() < 100 && chosen % 2 == 0 {
            let request = Request { pinned: chosen % 7 == 0, ..event(EVENTS[chosen / 2 % EVENTS.len()]) };
            keys.push(set.add(&request).expect("added"));
        } else if !keys.is_empty() {
            set.remove(keys.swap_remove(chosen / 2 % keys.len()));
        }
        if round % 100 == 0 {
            set.refresh();
            assert!(keys.iter().all(|key| set.reading(*key).is_ok()));
            let open = open_descriptors() - before;
            // A removed leader stays open while its group has members. Up to five such leaders may be open here.
            assert!((keys.len()..=keys.len() + 5).contains(&open), "{open} descriptors for {} counters", keys.len());
        }
    }
    for key in keys.drain(..) {
        set.remove(key);
    }
    assert_eq!(open_descriptors(), before);
    let _key = add(&mut *set, PAGE_FAULTS);
    drop(set);
    assert_eq!(open_descriptors(), before, "dropping a set closes its counters");
}

#[test]
fn descriptors_near_the_limit_are_left_to_others() {
    let _alone = alone();
    let mut set = set();
    let first = add(&mut *set, PAGE_FAULTS);
    let mut keys = Vec::new();
    let highest = descriptors().into_iter().max().expect("some");
    let limit = Limit::new(highest + 100);
    let refused = loop {
        match set.add(&event(PAGE_FAULTS)) {
            Ok(key) => keys.push(key),
            Err(error) => break error,
        }
    };
    assert_eq!(refused.raw_os_error(), Some(libc::EMFILE));
    assert!(keys.len() > 50, "only {} counters", keys.len());
    // Listing the descriptors itself takes one descriptor.
    let top = descriptors().into_iter().max().expect("some");
    assert!(top <= highest + 100 - 32, "descriptor {top} is in the reserve");
    set.refresh();
    assert!(keys.iter().chain([&first]).all(|key| set.reading(*key).is_ok()));
    let freed = keys.pop().expect("some");
    set.remove(freed);
    let open = open_descriptors();
    keys.push(add(&mut *set, PAGE_FAULTS));
    assert_eq!(errno(set.add(&event(PAGE_FAULTS))), Some(libc::EMFILE));
    assert_eq!(open_descriptors(), open + 1);
    drop(limit);
    keys.push(add(&mut *set, PAGE_FAULTS));
}

#[test]
fn refresh_is_one_call_for_any_counters_of_a_group() {
    let _alone = alone();
    for counters in [0, 1, 6, 20, MOST_IN_GROUP, MOST_IN_GROUP + 1] {
        let mut set = set();
        let configs = EVENTS.into_iter().cycle().take(counters);
        let keys: Vec<_> = configs.map(|config| add(&mut *set, config)).collect();
        let groups = counters.div_ceil(MOST_IN_GROUP);
        for _ in 0..3 {
            assert_eq!(syscalls::count(|| set.refresh()), groups, "{counters}");
        }
        let look = || keys.iter().all(|key| set.reading(*key).is_ok());
        assert_eq!(syscalls::count(|| assert!(look())), 0);
    }
}

#[test]
fn pinned_counter_costs_a_call_of_its_own() {
    let _alone = alone();
    let mut set = set();
    let pinned = Request { pinned: true, ..event(PAGE_FAULTS) };
    let shared = [PAGE_FAULTS, TASK_CLOCK].map(|config| add(&mut *set, config));
    let alone = [0, 1].map(|_| set.add(&pinned).expect("added"));
    assert_eq!(syscalls::count(|| set.refresh()), 3);
    let fresh = Fresh::new(10);
    let keys = [shared[0], alone[0], alone[1]];
    values(&mut *set, keys);
    let before = values(&mut *set, keys);
    fresh.touch(0..10);
    let after = values(&mut *set, keys);
    assert_eq!(after, before.map(|value| value + 10));
    set.remove(alone[0]);
    assert_eq!(syscalls::count(|| set.refresh()), 2);
}

#[test]
fn request_that_samples_or_traces_is_refused_with_einval() {
    let _alone = alone();
    let mut set = set();
    let samples = Request {
        sampling: Some(Sampling { rate: Rate::Period(1_000_000), engine: Engine::Exit }),
        ..event(TASK_CLOCK)
    };
    let traces = Request { kind: KIND_EXIT_TRACE, ..event(0) };
    assert_eq!(errno(set.add(&samples)), Some(libc::EINVAL));
    assert_eq!(errno(set.add(&traces)), Some(libc::EINVAL));
    assert_eq!(errno(set.add(&event(99))), Some(libc::ENOENT));
    assert_eq!(errno(set.reading(CounterKey(0))), Some(libc::EIO));
    assert_eq!(errno(set.reading(CounterKey(u32::MAX))), Some(libc::EIO));
    set.remove(CounterKey(u32::MAX));
}

#[test]
fn counters_of_an_ended_thread_keep_their_counts() {
    let _alone = alone();
    let (tell, reported) = channel();
    let (go, wait) = channel::<()>();
    let thread = thread::spawn(move || {
        let source = source();
        tell.send(source.thread()).expect("asked");
        wait.recv().expect("notified");
        Fresh::new(50).touch(0..50);
        tell.send(0).expect("asked");
        wait.recv().expect("notified");
    });
    let mut set = source().counters(reported.recv().expect("a thread"));
    let key = add(&mut *set, PAGE_FAULTS);
    go.send(()).expect("the thread waits");
    reported.recv().expect("done");
    let [running] = readings(&mut *set, [key]);
    assert!(running.value >= 50, "too few faults: {running:?}");
    go.send(()).expect("the thread waits");
    thread.join().expect("the thread ends");
    // The thread was joined, but the kernel may not have removed it yet. Therefore, repeat until the kernel no longer
    // finds the thread.
    let ended = Instant::now();
    let refused = loop {
        match set.add(&event(PAGE_FAULTS)) {
            Err(error) => break error,
            Ok(key) => set.remove(key),
        }
        assert!(ended.elapsed() < Duration::from_secs(10));
    };
    assert_eq!(refused.raw_os_error(), Some(libc::ESRCH));
    let [last] = readings(&mut *set, [key]);
    assert!(last.value >= running.value);
    assert_eq!(readings(&mut *set, [key]), [last]);
}

/// A counter counts correctly even if it and its group's leader belong to different PMUs of the kernel. This is the
/// case here, because each clock has its own PMU.
#[test]
fn counters_count_from_their_add_whatever_leads_their_group() {
    let _alone = alone();
    let mut orders: Vec<Vec<u64>> = EVENTS.map(|leader| vec![leader, PAGE_FAULTS]).to_vec();
    orders.extend(EVENTS.map(|leader| vec![leader, TASK_CLOCK]));
    orders.extend([EVENTS.to_vec(), EVENTS.iter().rev().copied().collect()]);
    for order in orders {
        let mut set = set();
        let keys: Vec<_> = order.iter().map(|&config| add(&mut *set, config)).collect();
        let fresh = Fresh::new(100);
        let mut read = || {
            set.refresh();
            let readings = keys.iter().map(|&key| set.reading(key).expect("readable").value);
            readings.collect::<Vec<_>>()
        };
        let before = read();
        fresh.touch(0..100);
        let after = read();
        for ((config, before), after) in order.iter().zip(before).zip(after) {
            let grown = after - before;
            match *config {
                PAGE_FAULTS => assert!(grown >= 100, "{grown} page faults in {order:?}"),
                0 | TASK_CLOCK => assert!(grown > 0, "clock {config} stopped in {order:?}"),
                _ => {}
            }
        }
    }
}

//! perf's rules for overflows: when a program is signalled, when a poll returns, which records are in the ring. Each
//! rule is checked at every door through which a program can open an event: `perf_event_open(2)` of our PMU,
//! `/dev/vpmu`, and, to show that the expected figures are perf's own, a tracepoint of the kernel itself.
//!
//! `guest-tests overflows` prints the whole table.
#![expect(unsafe_code, reason = "a system call that a tracepoint counts")]

use std::fmt::{self, Write as _};
use std::fs;
use std::hint;
use std::io;
use std::os::fd::{AsFd, RawFd};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use perf_event_open_sys::bindings::{self, perf_event_attr};

use crate::ensure::ensure;
use crate::fields::{IP, LOST, SAMPLE, TID, TIME};
use crate::handled;
use crate::pages::{Pages, READ_WRITE};
use crate::probes;
use crate::raw::{
    Device, Event, FORMAT_LOST, How, KIND_MARK, KIND_SOFTWARE, MARK_ANY, kernels, sampling, waking, watermark,
};
use crate::{Fallible, Outcome, cpu, interrupt, os};

/// How a program opens an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Door {
    /// A tracepoint, which no driver is involved in.
    Kernels,
    /// `perf_event_open(2)` of the PMU `vpmu`.
    Perf,
    /// `/dev/vpmu`.
    File,
}

impl fmt::Display for Door {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Kernels => "kernel's own",
            Self::Perf => "perf_event_open",
            Self::File => "/dev/vpmu",
        })
    }
}

const EVERY_DOOR: &[Door] = &[Door::Kernels, Door::Perf, Door::File];
const OURS: &[Door] = &[Door::Perf, Door::File];
const PERFS: &[Door] = &[Door::Kernels, Door::Perf];

/// The occurrences that an event counts.
#[derive(Debug, Clone, Copy)]
enum Counted {
    /// Occurrences.
    First,
    /// Occurrences, counted by a different event.
    Second,
    /// Something that does not occur.
    Nothing,
}

/// A figure's name and its value.
type Figure = (&'static str, u64);

/// A rule: the figures that it predicts, and a run that returns the figures as they are.
struct Rule {
    name: &'static str,
    doors: &'static [Door],
    expected: &'static [Figure],
    run: fn(&Table, Door) -> Fallible<Vec<u64>>,
}

const VALUE: u64 = 71;
const OTHER_VALUE: u64 = 72;
/// The CPU that the occurrences are on.
const CPU: usize = 1;
/// A record has 32 bytes with its header.
const FIELDS: u64 = IP | TID | TIME;
/// Room for more records than a rule makes.
const PAGES: usize = 32;
/// The time after which a signal or a poll is missing.
const LONG: Duration = Duration::from_secs(2);
/// The time after which records must be in the ring, even if nobody asks for them.
const SOON: Duration = Duration::from_millis(100);
const LARGE: u64 = 1 << 40;

const GROUP: &str = "overflows";

/// A test for each rule, with the rule's name.
macro_rules! rules {
    ($($name:ident at $doors:expr => [$($figure:literal: $value:expr),+ $(,)?];)+) => {
        const RULES: &[Rule] = &[$(Rule {
            name: stringify!($name),
            doors: $doors,
            expected: &[$(($figure, $value)),+],
            run: $name,
        }),+];

        guest_tests! { $($name => check(stringify!($name));)+ }
    };
}

rules! {
    each_overflow_signals_before_the_next_instruction at EVERY_DOOR =>
        ["POLL_IN": 1000, "POLL_HUP": 0, "its descriptor": 1000, "late": 0, "count": 1000];
    each_overflow_signals_if_another_cpu_takes_the_interrupt at OURS =>
        ["POLL_IN": 1000, "POLL_HUP": 0, "its descriptor": 1000, "count": 1000];
    overflow_signals_without_a_wakeup_interval at PERFS =>
        ["POLL_IN": 100, "POLL_HUP": 0, "late": 0];
    tenth_occurrence_signals at EVERY_DOOR =>
        ["POLL_IN": 100, "POLL_HUP": 0, "count": 1000];
    sibling_signals_each_overflow at EVERY_DOOR =>
        ["POLL_IN": 810, "POLL_HUP": 0, "its descriptor": 810, "late": 0, "count": 810];
    two_siblings_signal_each_overflow at EVERY_DOOR =>
        ["POLL_IN": 600, "first's": 300, "second's": 300, "late": 0];
    leader_and_sibling_signal_each_overflow at EVERY_DOOR =>
        ["POLL_IN": 600, "leader's": 300, "sibling's": 300, "late": 0];
    overflow_of_a_child_signals_the_parent at EVERY_DOOR =>
        ["POLL_IN": 50, "POLL_HUP": 0, "its descriptor": 50, "count": 50];
    refresh_of_one_hangs_up_each_time at EVERY_DOOR =>
        ["POLL_IN": 0, "POLL_HUP": 100, "late": 0, "records": 100, "count": 100];
    refresh_of_one_wakes_a_poll_each_time at EVERY_DOOR =>
        ["POLLIN": 100, "POLLHUP": 0, "records": 100, "count": 100];
    refresh_adds_to_the_refresh_before at EVERY_DOOR =>
        ["POLL_IN": 4, "POLL_HUP": 1, "records": 5, "count": 5];
    refresh_after_a_used_up_refresh_starts_again at EVERY_DOOR =>
        ["POLL_IN": 3, "POLL_HUP": 2, "records": 5, "count": 5];
    enable_after_a_used_up_refresh_has_no_limit at EVERY_DOOR =>
        ["POLL_IN": 6, "POLL_HUP": 1, "records": 7, "count": 7];
    larger_period_holds_from_the_call at OURS =>
        ["POLL_IN": 20, "records": 20, "count": 70];
    smaller_period_holds_from_the_call at OURS =>
        ["POLL_IN": 12, "records": 12, "count": 40];
    period_that_is_not_reached_gives_no_overflow at EVERY_DOOR =>
        ["signals": 0, "records": 0, "count": 100];
    exit_of_the_task_hangs_up_a_poll at EVERY_DOOR =>
        ["POLLHUP": 1, "records": 3, "count": 3];
    wakeup_at_each_record_wakes_each_poll at EVERY_DOOR =>
        ["polls woken": 50, "polls woken twice": 0, "records": 50];
    wakeup_at_each_tenth_record_wakes_each_tenth_poll at EVERY_DOOR =>
        ["polls woken": 10, "at another record": 0, "records": 100];
    watermark_wakes_past_its_bytes at EVERY_DOOR =>
        ["first": 7, "second": 13, "third": 19, "more": 0];
    records_are_soon_in_the_ring_without_a_wakeup at EVERY_DOOR =>
        ["signals": 0, "polls woken": 0, "records": 20];
    records_of_a_paused_ring_are_lost at EVERY_DOOR =>
        ["records": 10, "lost by record": 7, "lost by read": 7, "count": 17];
}

/// The rules that a tracepoint breaks in Linux 7.3, with its figures there. At the end of its refresh, perf core now also
/// stops the event, and perf_trace_add() does not start it again: a tracepoint never counts again. perf's other events do.
const BROKEN_IN_7_3: &[(&str, &[u64])] = &[
    ("refresh_of_one_hangs_up_each_time", &[0, 1, 99, 1, 1]),
    ("refresh_of_one_wakes_a_poll_each_time", &[1, 0, 1, 1]),
    ("refresh_after_a_used_up_refresh_starts_again", &[1, 1, 2, 2]),
    ("enable_after_a_used_up_refresh_has_no_limit", &[1, 1, 2, 2]),
];

/// Returns the figures that a rule predicts for a door on the kernel `release`.
fn expected(rule: &Rule, door: Door, release: &str) -> Vec<u64> {
    let broken = BROKEN_IN_7_3.iter().find(|(name, _)| *name == rule.name);
    match broken {
        Some((_, figures)) if door == Door::Kernels && release.starts_with("7.3.") => figures.to_vec(),
        _ => rule.expected.iter().map(|&(_, value)| value).collect(),
    }
}

/// The means to make the table.
struct Table {
    device: Device,
    /// The kernel's release.
    release: String,
    /// The tracepoints that stand for [`Counted`].
    tracepoints: [u64; 3],
}

impl Table {
    /// Prepares this process: it stays on one CPU, which also takes the device's interrupt.
    fn prepare() -> Fallible<Self> {
        interrupt::move_to(CPU)?;
        cpu::pin(CPU)?;
        // Signals beyond this limit come as SIGIO.
        os::limit_signals(10_000)?;
        let tracepoint = |name| probes::tracepoint("syscalls", name);
        Ok(Self {
            device: Device::open()?,
            release: fs::read_to_string("/proc/sys/kernel/osrelease")?,
            tracepoints: [
                tracepoint("sys_enter_getpgid")?,
                tracepoint("sys_exit_getpgid")?,
                tracepoint("sys_enter_getsid")?,
            ],
        })
    }

    /// The attr of an event that is disabled, and wakes its readers at each record.
    fn attr(&self, door: Door, counted: Counted, period: u64) -> perf_event_attr {
        let attr = match door {
            Door::Kernels => perf_event_attr {
                type_: bindings::PERF_TYPE_TRACEPOINT,
                config: self.tracepoints[counted as usize],
                ..self.device.attr(KIND_SOFTWARE, 0)
            },
            Door::Perf | Door::File => {
                let marks = [VALUE, MARK_ANY, OTHER_VALUE];
                self.device.attr(KIND_MARK, marks[counted as usize])
            }
        };
        waking(sampling(attr, period, FIELDS), 1)
    }

    fn open(&self, door: Door, attr: &perf_event_attr, how: How<'_>) -> io::Result<Event> {
        match door {
            Door::File => self.device.open_event(attr, how),
            Door::Kernels | Door::Perf => kernels(attr, how),
        }
    }

    /// Opens an event of this task, and maps its ring.
    fn ringed(&self, door: Door, attr: &perf_event_attr) -> io::Result<(Event, Pages)> {
        let event = self.open(door, attr, How::OWN)?;
        let ring = Pages::map(&event, PAGES, READ_WRITE)?;
        Ok((event, ring))
    }

    /// Opens a member of a group, with a ring.
    fn member(&self, door: Door, counted: Counted, leader: &Event) -> io::Result<(Event, Pages)> {
        let mut attr = self.attr(door, counted, 1);
        attr.set_disabled(0);
        let event = self.open(door, &attr, How::OWN.led_by(leader.as_fd()))?;
        let ring = Pages::map(&event, PAGES, READ_WRITE)?;
        Ok((event, ring))
    }

    /// Opens an event of this task that signals it, and maps its ring. The event is disabled.
    fn signalling(&self, door: Door, period: u64) -> io::Result<(Event, Pages)> {
        let (event, ring) = self.ringed(door, &self.attr(door, Counted::First, period))?;
        os::signal_from(event.ring_fd())?;
        Ok((event, ring))
    }

    /// Makes what is counted occur once.
    fn occur(&self, door: Door) -> io::Result<()> {
        match door {
            Door::Kernels => {
                // SAFETY: the call takes only a number.
                unsafe { libc::getpgid(0) };
                Ok(())
            }
            Door::Perf | Door::File => self.device.mark(VALUE),
        }
    }

    fn occur_times(&self, door: Door, times: u64) -> io::Result<()> {
        (0..times).try_for_each(|_| self.occur(door))
    }

    /// Like [`Table::occur_times`]. Returns the number of occurrences after which there were not exactly `signals` more
    /// signals before the next instruction.
    fn late(&self, door: Door, times: u64, signals: u64) -> io::Result<u64> {
        let mut late = 0;
        for _ in 0..times {
            let before = handled::all();
            self.occur(door)?;
            late += u64::from(handled::all() != before + signals);
        }
        Ok(late)
    }
}

/// Waits without sleeping: sleeping would end the turn of the task's events.
fn spin(time: Duration) {
    let end = Instant::now() + time;
    while Instant::now() < end {
        hint::spin_loop();
    }
}

/// The numbers of samples in a ring, and of samples that its records report as lost.
fn taken(ring: &mut Pages) -> Fallible<[u64; 2]> {
    let (mut samples, mut lost) = (0, 0);
    for record in ring.take()? {
        match record.kind {
            SAMPLE => samples += 1,
            LOST => lost += record.words.get(1).ok_or("a LOST record without a number")?,
            kind => return Err(format!("a record of type {kind}").into()),
        }
    }
    Ok([samples, lost])
}

/// Returns the numbers of signals with each code, after `expected` signals have arrived.
fn signals(expected: u64) -> [u64; 2] {
    handled::wait_for(expected, LONG);
    let handled = handled::so_far();
    // A signal with another code makes both figures wrong.
    [handled.input, handled.hang_up].map(|signals| signals + 1_000_000 * handled.strange)
}

/// Reads the count with the losses, in that order.
fn count_and_lost(event: &Event) -> Fallible<[u64; 2]> {
    let words = event.read()?;
    let [count, lost] = words[..] else {
        return Err(format!("read(2) returned {words:?}").into());
    };
    Ok([count, lost])
}

fn each_overflow_signals_before_the_next_instruction(table: &Table, door: Door) -> Fallible<Vec<u64>> {
    let (event, _ring) = table.signalling(door, 1)?;
    event.enable(0)?;
    let late = table.late(door, 1000, 1)?;
    let [input, hang_up] = signals(1000);
    let own = handled::of(event.ring());
    Ok(vec![input, hang_up, own, late, event.count()?])
}

fn each_overflow_signals_if_another_cpu_takes_the_interrupt(table: &Table, door: Door) -> Fallible<Vec<u64>> {
    interrupt::move_to(0)?;
    let (event, _ring) = table.signalling(door, 1)?;
    event.enable(0)?;
    table.occur_times(door, 1000)?;
    let [input, hang_up] = signals(1000);
    interrupt::move_to(CPU)?;
    let own = handled::of(event.ring());
    Ok(vec![input, hang_up, own, event.count()?])
}

fn overflow_signals_without_a_wakeup_interval(table: &Table, door: Door) -> Fallible<Vec<u64>> {
    let attr = waking(table.attr(door, Counted::First, 1), 0);
    let event = table.open(door, &attr, How::OWN)?;
    os::signal_from(event.ring_fd())?;
    event.enable(0)?;
    let late = table.late(door, 100, 1)?;
    let [input, hang_up] = signals(100);
    Ok(vec![input, hang_up, late])
}

fn tenth_occurrence_signals(table: &Table, door: Door) -> Fallible<Vec<u64>> {
    let (event, _ring) = table.signalling(door, 10)?;
    event.enable(0)?;
    table.occur_times(door, 1000)?;
    let [input, hang_up] = signals(100);
    Ok(vec![input, hang_up, event.count()?])
}

fn sibling_signals_each_overflow(table: &Table, door: Door) -> Fallible<Vec<u64>> {
    let leader = table.open(door, &table.attr(door, Counted::Nothing, LARGE), How::OWN)?;
    let (member, _ring) = table.member(door, Counted::First, &leader)?;
    os::signal_from(member.ring_fd())?;
    leader.enable(0)?;
    let late = table.late(door, 810, 1)?;
    let [input, hang_up] = signals(810);
    let own = handled::of(member.ring());
    Ok(vec![input, hang_up, own, late, member.count()?])
}

/// Returns the figures of two signalling events of a group, both of which overflow 300 times.
fn both(table: &Table, door: Door, enabled: &Event, fds: [RawFd; 2]) -> Fallible<Vec<u64>> {
    enabled.enable(0)?;
    let late = table.late(door, 300, 2)?;
    let [input, _] = signals(600);
    Ok(vec![input, handled::of(fds[0]), handled::of(fds[1]), late])
}

fn two_siblings_signal_each_overflow(table: &Table, door: Door) -> Fallible<Vec<u64>> {
    let leader = table.open(door, &table.attr(door, Counted::Nothing, LARGE), How::OWN)?;
    let (first, _first) = table.member(door, Counted::First, &leader)?;
    let (second, _second) = table.member(door, Counted::Second, &leader)?;
    os::signal_from(first.ring_fd())?;
    os::signal_from(second.ring_fd())?;
    both(table, door, &leader, [first.ring(), second.ring()])
}

fn leader_and_sibling_signal_each_overflow(table: &Table, door: Door) -> Fallible<Vec<u64>> {
    let (leader, _ring) = table.signalling(door, 1)?;
    let (member, _member) = table.member(door, Counted::Second, &leader)?;
    os::signal_from(member.ring_fd())?;
    both(table, door, &leader, [leader.ring(), member.ring()])
}

/// perf does not map a ring of an inherited event, but the signals need none.
fn overflow_of_a_child_signals_the_parent(table: &Table, door: Door) -> Fallible<Vec<u64>> {
    let mut attr = table.attr(door, Counted::First, 1);
    attr.set_inherit(1);
    let event = table.open(door, &attr, How::OWN)?;
    let _ring = match door {
        Door::File => Some(Pages::map(&event, PAGES, READ_WRITE)?),
        Door::Kernels | Door::Perf => None,
    };
    os::signal_from(event.ring_fd())?;
    event.enable(0)?;
    os::in_child(|| Ok(table.occur_times(door, 50)?))?;
    let [input, hang_up] = signals(50);
    let own = handled::of(event.ring());
    Ok(vec![input, hang_up, own, event.count()?])
}

fn refresh_of_one_hangs_up_each_time(table: &Table, door: Door) -> Fallible<Vec<u64>> {
    let (event, mut ring) = table.signalling(door, 1)?;
    handled::refresh_in_handler(event.ring());
    event.refresh(1)?;
    let late = table.late(door, 100, 1)?;
    let [input, hang_up] = signals(100);
    event.disable(0)?;
    let [records, _] = taken(&mut ring)?;
    Ok(vec![input, hang_up, late, records, event.count()?])
}

fn refresh_of_one_wakes_a_poll_each_time(table: &Table, door: Door) -> Fallible<Vec<u64>> {
    let (event, mut ring) = table.ringed(door, &table.attr(door, Counted::First, 1))?;
    let (mut woken, mut hung_up) = (0, 0);
    for _ in 0..100 {
        event.refresh(1)?;
        table.occur(door)?;
        let ready = event.poll(0)?;
        woken += u64::from(ready & libc::POLLIN != 0);
        hung_up += u64::from(ready & libc::POLLHUP != 0);
    }
    event.disable(0)?;
    let [records, _] = taken(&mut ring)?;
    Ok(vec![woken, hung_up, records, event.count()?])
}

/// Returns the figures of an event after `act`.
fn limited(table: &Table, door: Door, expected: u64, act: impl FnOnce(&Event) -> io::Result<()>) -> Fallible<Vec<u64>> {
    let (event, mut ring) = table.signalling(door, 1)?;
    act(&event)?;
    let [input, hang_up] = signals(expected);
    event.disable(0)?;
    let [records, _] = taken(&mut ring)?;
    Ok(vec![input, hang_up, records, event.count()?])
}

fn refresh_adds_to_the_refresh_before(table: &Table, door: Door) -> Fallible<Vec<u64>> {
    limited(table, door, 5, |event| {
        event.refresh(2)?;
        event.refresh(3)?;
        table.occur_times(door, 10)
    })
}

fn refresh_after_a_used_up_refresh_starts_again(table: &Table, door: Door) -> Fallible<Vec<u64>> {
    limited(table, door, 5, |event| {
        event.refresh(2)?;
        table.occur_times(door, 5)?;
        event.refresh(3)?;
        table.occur_times(door, 5)
    })
}

fn enable_after_a_used_up_refresh_has_no_limit(table: &Table, door: Door) -> Fallible<Vec<u64>> {
    limited(table, door, 7, |event| {
        event.refresh(2)?;
        table.occur_times(door, 5)?;
        event.enable(0)?;
        table.occur_times(door, 5)
    })
}

/// Returns the figures of an event whose period changes while it runs. A tracepoint overflows at the first occurrence
/// after the change, other than events of hardware, so this rule has no figures of the kernel's own.
fn changed(
    table: &Table,
    door: Door,
    [first, second]: [u64; 2],
    [before, after]: [u64; 2],
    expected: u64,
) -> Fallible<Vec<u64>> {
    let (event, mut ring) = table.signalling(door, first)?;
    event.enable(0)?;
    table.occur_times(door, before)?;
    event.period(second)?;
    table.occur_times(door, after)?;
    let [input, _] = signals(expected);
    event.disable(0)?;
    let [records, _] = taken(&mut ring)?;
    Ok(vec![input, records, event.count()?])
}

fn larger_period_holds_from_the_call(table: &Table, door: Door) -> Fallible<Vec<u64>> {
    changed(table, door, [2, 5], [20, 50], 20)
}

fn smaller_period_holds_from_the_call(table: &Table, door: Door) -> Fallible<Vec<u64>> {
    changed(table, door, [10, 2], [20, 20], 12)
}

fn period_that_is_not_reached_gives_no_overflow(table: &Table, door: Door) -> Fallible<Vec<u64>> {
    let (event, mut ring) = table.signalling(door, LARGE)?;
    event.enable(0)?;
    table.occur_times(door, 100)?;
    let signals = signals(0).iter().sum();
    let [records, _] = taken(&mut ring)?;
    Ok(vec![signals, records, event.count()?])
}

fn exit_of_the_task_hangs_up_a_poll(table: &Table, door: Door) -> Fallible<Vec<u64>> {
    let (go, going) = io::pipe()?;
    let mut child = os::Forked::start(|| {
        let told = cpu::read(go.as_fd(), 1).is_ok();
        i32::from(!told || table.occur_times(door, 3).is_err())
    })?;
    let how = How { pid: child.pid, ..How::OWN };
    let event = table.open(door, &table.attr(door, Counted::First, 1), how)?;
    let mut ring = Pages::map(&event, PAGES, READ_WRITE)?;
    event.enable(0)?;
    io::Write::write_all(&mut { going }, b"x")?;
    let code = child.wait()?;
    ensure!(code == 0, "the child exited with {code}");
    let ready = event.poll(0)?;
    let [records, _] = taken(&mut ring)?;
    let hung_up = u64::from(ready & libc::POLLHUP != 0);
    Ok(vec![hung_up, records, event.count()?])
}

fn wakeup_at_each_record_wakes_each_poll(table: &Table, door: Door) -> Fallible<Vec<u64>> {
    let (event, mut ring) = table.ringed(door, &table.attr(door, Counted::First, 1))?;
    event.enable(0)?;
    let (mut woken, mut twice) = (0, 0);
    for _ in 0..50 {
        table.occur(door)?;
        woken += u64::from(event.poll(0)? == libc::POLLIN);
        twice += u64::from(event.poll(0)? != 0);
    }
    event.disable(0)?;
    let [records, _] = taken(&mut ring)?;
    Ok(vec![woken, twice, records])
}

/// Returns the numbers of the occurrences, counted from one, after which a poll returns.
fn woken_at(table: &Table, door: Door, event: &Event, times: u64) -> io::Result<Vec<u64>> {
    let mut woken = Vec::new();
    for occurrence in 1..=times {
        table.occur(door)?;
        if event.poll(0)? & libc::POLLIN != 0 {
            woken.push(occurrence);
        }
    }
    Ok(woken)
}

fn wakeup_at_each_tenth_record_wakes_each_tenth_poll(table: &Table, door: Door) -> Fallible<Vec<u64>> {
    let attr = waking(table.attr(door, Counted::First, 1), 10);
    let (event, mut ring) = table.ringed(door, &attr)?;
    event.enable(0)?;
    let woken = woken_at(table, door, &event, 100)?;
    let others = woken.iter().filter(|at| *at % 10 != 0).count();
    event.disable(0)?;
    let [records, _] = taken(&mut ring)?;
    Ok(vec![woken.len() as u64, others as u64, records])
}

/// The third record begins past byte 64, and so on: record 7 is the first that ends past byte 200.
fn watermark_wakes_past_its_bytes(table: &Table, door: Door) -> Fallible<Vec<u64>> {
    let attr = watermark(table.attr(door, Counted::First, 1), 200);
    let (event, _ring) = table.ringed(door, &attr)?;
    event.enable(0)?;
    let mut woken = woken_at(table, door, &event, 24)?;
    let more = woken.len().saturating_sub(3);
    woken.resize(3, 0);
    woken.push(more as u64);
    Ok(woken)
}

fn records_are_soon_in_the_ring_without_a_wakeup(table: &Table, door: Door) -> Fallible<Vec<u64>> {
    let attr = waking(table.attr(door, Counted::First, 1), 0);
    let (event, mut ring) = table.ringed(door, &attr)?;
    event.enable(0)?;
    table.occur_times(door, 20)?;
    spin(SOON);
    let [records, _] = taken(&mut ring)?;
    let woken = u64::from(event.poll(0)? != 0);
    Ok(vec![handled::all(), woken, records])
}

fn records_of_a_paused_ring_are_lost(table: &Table, door: Door) -> Fallible<Vec<u64>> {
    let attr = perf_event_attr { read_format: FORMAT_LOST, ..table.attr(door, Counted::First, 1) };
    let (event, mut ring) = table.ringed(door, &attr)?;
    event.enable(0)?;
    table.occur_times(door, 5)?;
    event.pause(true)?;
    table.occur_times(door, 7)?;
    event.pause(false)?;
    table.occur_times(door, 5)?;
    event.disable(0)?;
    let [records, by_record] = taken(&mut ring)?;
    let [count, by_read] = count_and_lost(&event)?;
    Ok(vec![records, by_record, by_read, count])
}

/// Returns a line of the table, and whether the rule holds.
fn row(table: &Table, rule: &Rule, door: Door) -> (String, bool) {
    let show = |values: &[u64]| {
        let figures = rule.expected.iter().zip(values);
        let shown: Vec<String> = figures.map(|((name, _), value)| format!("{name} {value}")).collect();
        shown.join(", ")
    };
    let expected = expected(rule, door, &table.release);
    let seen = handled::install().map_err(Into::into).and_then(|()| (rule.run)(table, door));
    let holds = seen.as_ref().is_ok_and(|seen| *seen == expected);
    let seen = match seen {
        Ok(_) if holds => "as expected".to_owned(),
        Ok(seen) => show(&seen),
        Err(error) => format!("error: {error}"),
    };
    let line = format!("{:<58} | {door:<15} | {} | {seen}", rule.name, show(&expected));
    (line, holds)
}

/// Checks a rule at each door. Fails with the rule's part of the table.
fn check(name: &str) -> Outcome {
    let rule = RULES.iter().find(|rule| rule.name == name);
    let rule = rule.ok_or("not a rule")?;
    let table = Table::prepare()?;
    let (mut lines, mut all_hold) = (String::new(), true);
    for &door in rule.doors {
        let (line, holds) = row(&table, rule, door);
        all_hold &= holds;
        writeln!(lines, "{line}")?;
    }
    print!("{lines}");
    ensure!(all_hold, "{lines}");
    Ok(())
}

/// `guest-tests overflows`: prints the table.
pub(crate) fn run() -> ExitCode {
    let table = match Table::prepare() {
        Ok(table) => table,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    println!("rule | door | expected | seen");
    let mut all_hold = true;
    for rule in RULES {
        for &door in rule.doors {
            let (line, holds) = row(&table, rule, door);
            println!("{line}");
            all_hold &= holds;
        }
    }
    match all_hold {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

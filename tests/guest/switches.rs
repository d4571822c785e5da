//! Checks what task switches cost when both tasks have events, and that all counts stay exact.

use std::error::Error;
use std::io::{PipeReader, PipeWriter, Read, Write, pipe};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use perf_event_open_sys::bindings::{self, perf_event_attr};
use vpmu_client::perf::PerfPmu;

use crate::ensure::{ensure, ensure_eq};
use crate::fields::{STACK_USER, TID};
use crate::pages::{Pages, READ_WRITE};
use crate::perf_core::{mark_attr, take_samples};
use crate::raw::{
    Device, EXIT_MMIO, Event, FORMAT_GROUP, FORMAT_LOST, How, KIND_EXITS, KIND_MARK, KIND_SOFTWARE, KIND_TSC,
    SW_CPU_CLOCK, kernels, sampling, silent,
};
use crate::{Outcome, cpu, fields, interrupt};

const GROUP: &str = "module";

type Failure = Box<dyn Error>;
type Shared<T> = Result<T, Box<dyn Error + Send + Sync>>;

const VALUE: u64 = 31;
const ROUNDS: u64 = 500;
/// Nanoseconds between samples. With a period of an hour, no sample is taken during a test. The interrupt for a sample
/// would cause additional exits.
const PERIOD: u64 = 3_600_000_000_000;
/// The CPU that both tasks run on.
const CPU: usize = 1;
/// The other CPU, from which tests read the counts.
const READERS: usize = 0;
/// How to open an event that counts all tasks on [`CPU`].
const ALL: How<'_> = How::on_cpu(1);

/// Two tasks take turns by means of two pipes. This is one task's end of each pipe. A task waits for a byte from the
/// other task, and later sends a byte back.
pub(crate) struct Turn {
    mine: PipeReader,
    other: PipeWriter,
}

impl Turn {
    pub(crate) fn pair() -> std::io::Result<[Self; 2]> {
        let ((first, to_first), (second, to_second)) = (pipe()?, pipe()?);
        Ok([Self { mine: first, other: to_second }, Self { mine: second, other: to_first }])
    }

    pub(crate) fn wait(&mut self) -> std::io::Result<()> {
        self.mine.read_exact(&mut [0])
    }

    pub(crate) fn give(&mut self) -> std::io::Result<()> {
        self.other.write_all(&[0])
    }
}

/// Keeps this thread on [`CPU`] with a real-time priority. The only other threads that can run there are kernel threads
/// of a higher priority, and the task with which this thread takes turns.
pub(crate) fn settle() -> std::io::Result<()> {
    cpu::pin(CPU)?;
    cpu::keep()
}

/// The number of MMIO exits of [`CPU`], and the number of context switches that the kernel counted there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cost {
    exits: u64,
    switches: u64,
}

impl Cost {
    /// Reads both counters. Tries again if a switch occurs between the two readings.
    fn so_far(exits: &Pages, switches: &Event) -> std::io::Result<Self> {
        let mut before = switches.count()?;
        loop {
            let exits = exits.snapshot().count;
            let switches = switches.count()?;
            if switches == before {
                return Ok(Self { exits, switches });
            }
            before = switches;
        }
    }

    /// The number of switches beyond those between the two tasks. These are to and from kernel threads that ran between
    /// the turns.
    fn others(self) -> Result<u64, Failure> {
        let others = self.switches.checked_sub(2 * ROUNDS);
        Ok(others.ok_or_else(|| format!("fewer switches than turns: {self:?}"))?)
    }

    /// Ensures that each switch between the two tasks caused exactly `each` exits: one if only one of the tasks has
    /// events, two if both have. If a kernel thread runs between two turns, the two switches together cause as many. If
    /// it runs within a turn, the two switches cause at most two more exits.
    fn ensure_exits_a_switch(self, each: u64, what: &str) -> Outcome {
        let least = each * 2 * ROUNDS;
        let most = least + self.others()?;
        ensure!((least..=most).contains(&self.exits), "not {each} exits for each switch: {self:?}, {what}");
        Ok(())
    }

    /// Ensures that no switch between the two tasks caused an exit. If a kernel thread runs between two turns, the two
    /// switches cause at most two exits each.
    fn ensure_no_exit_a_switch(self, what: &str) -> Outcome {
        let others = self.others()?;
        ensure!(others < ROUNDS / 5, "too many other tasks ran: {self:?}, {what}");
        ensure!(self.exits <= 2 * others, "switches caused exits: {self:?}, {what}");
        Ok(())
    }
}

/// Counts the exits and the switches of [`CPU`].
struct Costs {
    /// Keeps the page's event open.
    _exits: Event,
    page: Pages,
    switches: Event,
}

impl Costs {
    fn start(device: &Device) -> Result<Self, Failure> {
        // Moves the interrupts that announce replies to the other CPU. On this CPU, such an interrupt could arrive after
        // the task has read the reply, and the test would count the interrupt's exits, too.
        interrupt::bind(READERS)?;
        let exits = device.start(&device.attr(KIND_EXITS, EXIT_MMIO), ALL)?;
        let page = Pages::map(&exits, 0, READ_WRITE)?;
        let switches = kernels(
            &perf_event_attr {
                type_: bindings::PERF_TYPE_SOFTWARE,
                config: bindings::PERF_COUNT_SW_CONTEXT_SWITCHES.into(),
                ..device.attr(KIND_SOFTWARE, 0)
            },
            ALL,
        )?;
        switches.enable(0)?;
        Ok(Self { _exits: exits, page, switches })
    }

    /// Makes [`ROUNDS`] round trips as the first of two tasks, after one that is not counted. Then ends the other task's
    /// last wait.
    fn of_rounds(&self, turn: &mut Turn) -> std::io::Result<Cost> {
        turn.give()?;
        turn.wait()?;
        let before = Cost::so_far(&self.page, &self.switches)?;
        for _ in 0..ROUNDS {
            turn.give()?;
            turn.wait()?;
        }
        let after = Cost::so_far(&self.page, &self.switches)?;
        turn.give()?;
        Ok(Cost { exits: after.exits - before.exits, switches: after.switches - before.switches })
    }
}

/// Makes the round trips as the second of two tasks. Returns only after the first task's last reading.
fn answer(turn: &mut Turn) -> std::io::Result<()> {
    // The first round is not counted.
    for _ in 0..=ROUNDS {
        turn.wait()?;
        turn.give()?;
    }
    turn.wait()
}

/// Returns the cost of [`ROUNDS`] round trips between a task that opens events with `open` and a task that inherits
/// them.
fn cost_of_related_rounds(open: impl Fn(&Device) -> std::io::Result<Vec<Event>> + Sync) -> Result<Cost, Failure> {
    let device = Device::open()?;
    let costs = Costs::start(&device)?;
    let [mut one, mut other] = Turn::pair()?;
    let (device, costs, open) = (&device, &costs, &open);
    thread::scope(|scope| {
        let caller = scope.spawn(move || -> Shared<Cost> {
            settle()?;
            let _events = open(device)?;
            thread::scope(|scope| {
                // The thread inherits the events, the CPU and the priority.
                let partner = scope.spawn(move || answer(&mut other));
                let made = costs.of_rounds(&mut one);
                drop(one);
                partner.join().map_err(|_| "a task panicked")??;
                Ok(made?)
            })
        });
        let made = caller.join().map_err(|_| "a task panicked")?;
        made.map_err(|error| error.to_string().into())
    })
}

/// Returns the cost of [`ROUNDS`] round trips between two tasks. One task opens its events with `first`, the other with
/// `second`.
fn cost_of_rounds(
    first: impl Fn(&Device) -> std::io::Result<Vec<Event>> + Sync,
    second: impl Fn(&Device) -> std::io::Result<Vec<Event>> + Sync,
) -> Result<Cost, Failure> {
    let device = Device::open()?;
    let costs = Costs::start(&device)?;
    let [mut one, mut other] = Turn::pair()?;
    let (device, costs) = (&device, &costs);
    let (first, second) = (&first, &second);
    thread::scope(|scope| {
        // If a task fails, its pipe ends are dropped, and the other task stops waiting.
        let partner = scope.spawn(move || -> Shared<()> {
            settle()?;
            let _events = second(device)?;
            Ok(answer(&mut other)?)
        });
        let caller = scope.spawn(move || -> Shared<Cost> {
            settle()?;
            let _events = first(device)?;
            Ok(costs.of_rounds(&mut one)?)
        });
        let made = caller.join().map_err(|_| "a task panicked")?;
        let ended = partner.join().map_err(|_| "a task panicked")?;
        match (made, ended) {
            (Ok(made), Ok(())) => Ok(made),
            (made, ended) => Err(format!("one task: {made:?}, the other: {ended:?}").into()),
        }
    })
}

/// Opens `count` events with `open`, and enables them. The events count the calling thread's marks.
fn marks(
    device: &Device,
    count: u64,
    open: impl Fn(&perf_event_attr, How<'_>) -> std::io::Result<Event>,
) -> std::io::Result<Vec<Event>> {
    (0..count)
        .map(|value| {
            let event = open(&device.attr(KIND_MARK, value), How::OWN)?;
            event.enable(0)?;
            Ok(event)
        })
        .collect()
}

#[apply(guest_test)]
fn switch_between_tasks_of_perf_core_costs_two_exits() -> Outcome {
    for (first, second) in [(1, 1), (1, 6), (20, 20), (100, 100)] {
        let open = |count| move |device: &Device| marks(device, count, kernels);
        let cost = cost_of_rounds(open(first), open(second))?;
        cost.ensure_exits_a_switch(2, &format!("{first} and {second} events"))?;
    }
    Ok(())
}

#[apply(guest_test)]
fn switch_between_tasks_of_the_device_file_costs_two_exits() -> Outcome {
    for (first, second) in [(1, 1), (6, 1), (20, 20)] {
        let open = |count| move |device: &Device| marks(device, count, |attr, how| device.open_event(attr, how));
        let cost = cost_of_rounds(open(first), open(second))?;
        cost.ensure_exits_a_switch(2, &format!("{first} and {second} events"))?;
    }
    // One task uses `/dev/vpmu` and also samples. The other task uses perf core.
    let cost = cost_of_rounds(
        |device| {
            let clock = device.attr(KIND_SOFTWARE, SW_CPU_CLOCK);
            let mut events = marks(device, 2, |attr, how| device.open_event(attr, how))?;
            events.push(device.start(&sampling(clock, PERIOD, 0), How::OWN)?);
            Ok(events)
        },
        |device| marks(device, 2, kernels),
    )?;
    cost.ensure_exits_a_switch(2, "between the two")
}

/// Opens a group of perf core's events with this leader and `members` events that count marks, and enables it.
fn group(leader: perf_event_attr, device: &Device, members: u64) -> std::io::Result<Vec<Event>> {
    let leader = perf_event_attr { read_format: FORMAT_GROUP, ..leader };
    let mut events = vec![kernels(&leader, How::OWN)?];
    for value in 0..members {
        let how = How::OWN.led_by(events[0].as_fd());
        let mut member = device.attr(KIND_MARK, value);
        member.set_disabled(0);
        let member = kernels(&member, how)?;
        events.push(member);
    }
    events[0].enable(0)?;
    Ok(events)
}

#[apply(guest_test)]
fn switch_between_tasks_with_groups_costs_two_exits() -> Outcome {
    let own = |device: &Device| group(device.attr(KIND_TSC, 0), device, 3);
    cost_of_rounds(own, own)?.ensure_exits_a_switch(2, "of groups")
}

/// The leader is an event of the kernel's own software PMU, so perf core schedules events of two PMUs together.
fn mixed(device: &Device) -> std::io::Result<Vec<Event>> {
    let leader = perf_event_attr {
        type_: bindings::PERF_TYPE_SOFTWARE,
        config: bindings::PERF_COUNT_SW_PAGE_FAULTS.into(),
        ..device.attr(KIND_SOFTWARE, 0)
    };
    group(leader, device, 5)
}

#[apply(guest_test)]
fn switch_between_tasks_with_mixed_groups_costs_two_exits() -> Outcome {
    cost_of_rounds(mixed, mixed)?.ensure_exits_a_switch(2, "of mixed groups")?;
    let own = |device: &Device| group(device.attr(KIND_TSC, 0), device, 3);
    cost_of_rounds(mixed, own)?.ensure_exits_a_switch(2, "of a mixed group and another")?;
    let cost = cost_of_rounds(mixed, |_| Ok(Vec::new()))?;
    cost.ensure_exits_a_switch(1, "of a mixed group and no event")
}

/// perf core does not switch the events of two tasks that inherited the same events. It exchanges them.
#[apply(guest_test)]
fn switch_between_tasks_that_inherited_their_events_costs_no_exit() -> Outcome {
    for count in [1, 20] {
        let cost = cost_of_related_rounds(|device| {
            marks(device, count, |attr, how| {
                let mut attr = *attr;
                attr.set_inherit(1);
                kernels(&attr, how)
            })
        })?;
        cost.ensure_no_exit_a_switch(&format!("{count} inherited events"))?;
    }
    Ok(())
}

#[apply(guest_test)]
fn switch_to_a_task_without_events_costs_one_exit_a_direction() -> Outcome {
    let cost = cost_of_rounds(|device| marks(device, 6, kernels), |device| marks(device, 0, kernels))?;
    cost.ensure_exits_a_switch(1, "out and in")?;
    let cost = cost_of_rounds(|device| marks(device, 0, kernels), |device| marks(device, 0, kernels))?;
    ensure_eq!(cost.exits, 0, "exits of switches without events");
    Ok(())
}

/// Calls `act` each time this task has its turn, until `stop` is set. If `begins` is true, this task has the first
/// turn.
fn take_turns(
    turn: &mut Turn,
    begins: bool,
    stop: &AtomicBool,
    mut act: impl FnMut() -> std::io::Result<()>,
) -> std::io::Result<()> {
    if begins {
        act()?;
        turn.give()?;
    }
    while !stop.load(Ordering::Relaxed) {
        turn.wait()?;
        act()?;
        turn.give()?;
    }
    Ok(())
}

/// Two tasks that take turns to place marks, and the number of marks that each task has placed.
struct Placers<'a> {
    device: &'a Device,
    placed: [AtomicU64; 2],
    stop: AtomicBool,
}

impl<'a> Placers<'a> {
    fn new(device: &'a Device) -> Self {
        Self { device, placed: [AtomicU64::new(0), AtomicU64::new(0)], stop: AtomicBool::new(false) }
    }

    /// Runs `watch` on the other CPU while both tasks take turns. `watch` gets the tasks' events and thread ids. Each
    /// event counts marks of [`VALUE`], starting with its task's first turn.
    fn run(
        &self,
        open: impl Fn(&Device) -> std::io::Result<Event> + Sync,
        watch: impl FnOnce(&[Event; 2], [i32; 2]) -> Outcome,
    ) -> Outcome {
        let [one, other] = Turn::pair()?;
        let (events, ready) = std::sync::mpsc::channel();
        thread::scope(|scope| -> Outcome {
            let tasks: Vec<_> = [one, other]
                .into_iter()
                .enumerate()
                .map(|(index, mut turn)| {
                    let (open, events) = (&open, events.clone());
                    scope.spawn(move || -> Shared<()> {
                        cpu::pin(CPU)?;
                        events.send((index, open(self.device)?, cpu::thread_id()))?;
                        drop(events);
                        take_turns(&mut turn, index == 0, &self.stop, || {
                            self.device.mark(VALUE)?;
                            self.placed[index].fetch_add(1, Ordering::Release);
                            Ok(())
                        })
                        .or_else(|error| match error.kind() {
                            // The other task has stopped first.
                            std::io::ErrorKind::UnexpectedEof | std::io::ErrorKind::BrokenPipe => Ok(()),
                            _ => Err(error.into()),
                        })
                    })
                })
                .collect();
            drop(events);
            let mut opened: Vec<_> = ready.iter().take(2).collect();
            opened.sort_by_key(|&(index, _, _)| index);
            let ids: Vec<_> = opened.iter().map(|&(_, _, id)| id.cast_signed()).collect();
            let watched = <[Event; 2]>::try_from(opened.into_iter().map(|(_, event, _)| event).collect::<Vec<_>>())
                .map_err(|_| "a task opened no event");
            let seen = watched.as_ref().map_err(|&why| why.into()).and_then(|events| {
                cpu::pin(READERS)?;
                watch(events, [ids[0], ids[1]])
            });
            self.stop.store(true, Ordering::Relaxed);
            for task in tasks {
                let ended = task.join().map_err(|_| "a task panicked")?;
                ended.map_err(|error| error.to_string())?;
            }
            seen?;
            for (event, placed) in watched?.iter().zip(&self.placed) {
                let placed = placed.load(Ordering::Acquire);
                ensure_eq!(event.count()?, placed, "marks of a task in the end");
            }
            Ok(())
        })
    }
}

fn own_marks(device: &Device) -> std::io::Result<Event> {
    device.start(&device.attr(KIND_MARK, VALUE), How::OWN)
}

fn own_marks_of_perf_core(device: &Device) -> std::io::Result<Event> {
    let event = kernels(&device.attr(KIND_MARK, VALUE), How::OWN)?;
    event.enable(0)?;
    Ok(event)
}

#[apply(guest_test)]
fn count_of_a_task_switched_out_is_whole_for_readers_elsewhere() -> Outcome {
    let device = Device::open()?;
    for open in [own_marks, own_marks_of_perf_core] {
        let placers = Placers::new(&device);
        placers.run(open, |events, _| {
            for look in 0..10_000 {
                let (event, placed) = (&events[look % 2], &placers.placed[look % 2]);
                let least = placed.load(Ordering::Acquire);
                let count = event.count()?;
                // A mark is placed before it is added to `placed`.
                let most = placed.load(Ordering::Acquire) + 1;
                ensure!(
                    (least..=most).contains(&count),
                    "the count is {count}, but {least} to {most} marks were placed"
                );
            }
            Ok(())
        })?;
    }
    Ok(())
}

#[apply(guest_test)]
fn counts_of_a_group_being_disabled_are_whole_for_readers_elsewhere() -> Outcome {
    let device = &Device::open()?;
    let (placed, stop) = (&AtomicU64::new(0), &AtomicBool::new(false));
    let (opened, group) = std::sync::mpsc::channel();
    thread::scope(|scope| -> Outcome {
        let placer = scope.spawn(move || -> Shared<()> {
            cpu::pin(CPU)?;
            let attr = device.attr(KIND_MARK, VALUE);
            let leader = kernels(&attr, How::OWN)?;
            let mut member = attr;
            member.set_disabled(0);
            let member = kernels(&member, How::OWN.led_by(leader.as_fd()))?;
            let events = Arc::new([leader, member]);
            opened.send(Arc::clone(&events))?;
            drop(opened);
            while !stop.load(Ordering::Relaxed) {
                events[0].enable(0)?;
                device.mark(VALUE)?;
                placed.fetch_add(1, Ordering::Release);
                events[0].disable(0)?;
            }
            Ok(())
        });
        let events = group.recv();
        let watch = || -> Outcome {
            let events = events.as_ref().map_err(|_| "the task opened no group")?;
            cpu::pin(READERS)?;
            for look in 0..10_000 {
                let least = placed.load(Ordering::Acquire);
                let count = events[look % 2].count()?;
                // A mark is placed before it is added to `placed`.
                let most = placed.load(Ordering::Acquire) + 1;
                ensure!(
                    (least..=most).contains(&count),
                    "the count is {count}, but {least} to {most} marks were placed"
                );
            }
            Ok(())
        };
        let seen = watch();
        stop.store(true, Ordering::Relaxed);
        placer.join().map_err(|_| "the task panicked")?.map_err(|error| error.to_string())?;
        seen?;
        for event in events?.iter() {
            ensure_eq!(event.count()?, placed.load(Ordering::Acquire), "marks of an event of the group in the end");
        }
        Ok(())
    })
}

#[apply(guest_test)]
fn counts_of_switching_tasks_are_exact_while_their_events_come_and_go() -> Outcome {
    let device = Device::open()?;
    for open in [own_marks, own_marks_of_perf_core] {
        let placers = Placers::new(&device);
        placers.run(open, |_, ids| {
            for turn in 0..60 {
                let how = How { pid: ids[turn % 2], ..How::OWN };
                let attr = device.attr(KIND_MARK, VALUE);
                for event in [device.open_event(&attr, how)?, kernels(&attr, how)?] {
                    let placed = &placers.placed[turn % 2];
                    let least = placed.load(Ordering::Acquire);
                    event.enable(0)?;
                    let (first, between) = (event.count()?, placed.load(Ordering::Acquire));
                    event.disable(0)?;
                    let (count, most) = (event.count()?, placed.load(Ordering::Acquire) + 1);
                    ensure!(
                        first <= count && count <= most - least && first <= between + 1 - least,
                        "counts {first}, then {count}, but {least}, {between}, {most} marks were placed in total"
                    );
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Closes events of a task that is being switched in.
#[apply(guest_test)]
fn sampling_events_of_switching_tasks_end_with_their_close() -> Outcome {
    let device = Device::open()?;
    let mut attr = device.attr(KIND_MARK, VALUE);
    attr.__bindgen_anon_1.sample_period = 1_000_000;
    let placers = Placers::new(&device);
    placers.run(own_marks_of_perf_core, |_, ids| {
        for turn in 0..60 {
            let how = How { pid: ids[turn % 2], ..How::OWN };
            let event = kernels(&attr, how)?;
            event.enable(0)?;
            (0..turn % 4).for_each(|_| thread::yield_now());
            if turn % 3 == 0 {
                event.disable(0)?;
            }
        }
        await_replay(&device)?;
        Ok(())
    })
}

/// Waits until the driver has gone through the list of the events that sample on [`CPU`], which it does at a tick.
fn await_replay(device: &Device) -> std::io::Result<()> {
    let event = kernels(&silent(device.marks(VALUE, 1, 0)), ALL)?;
    let ring = Pages::map(&event, 1, READ_WRITE)?;
    event.enable(0)?;
    while ring.head() == 0 {
        thread::yield_now();
    }
    Ok(())
}

/// Disables events of a task that is being switched in.
#[apply(guest_test)]
fn disabled_event_of_a_switching_task_takes_no_samples() -> Outcome {
    let (device, pmu) = (Device::open()?, PerfPmu::open()?);
    let attr = mark_attr(&pmu, VALUE)?.sampling(1);
    let placers = Placers::new(&device);
    placers.run(own_marks_of_perf_core, |_, ids| {
        for (index, id) in ids.into_iter().enumerate() {
            let await_marks = || {
                let placed = || placers.placed[index].load(Ordering::Acquire);
                let enough = placed() + 2;
                while placed() < enough {
                    thread::yield_now();
                }
            };
            let event = pmu.open_event(&attr.clone().of_task(id))?;
            let (mut ring, mut samples) = (event.map(4)?, 0);
            event.enable()?;
            await_marks();
            for turn in 0..100 {
                event.disable()?;
                samples += take_samples(&mut ring)?;
                if turn % 2 == 0 {
                    await_marks();
                    ensure_eq!(take_samples(&mut ring)?, 0, "samples while it was disabled");
                }
                event.enable()?;
                (0..turn % 4).for_each(|_| thread::yield_now());
            }
            event.disable()?;
            samples += take_samples(&mut ring)?;
            let count = event.read()?.value;
            ensure!(count > 0, "no mark was counted");
            ensure_eq!(samples, count, "samples, and the expected number, the count");
        }
        Ok(())
    })
}

#[apply(guest_test)]
fn disabled_event_of_a_switching_task_counts_nothing() -> Outcome {
    let device = Device::open()?;
    let placers = Placers::new(&device);
    placers.run(own_marks, |_, ids| {
        for turn in 0..60 {
            let how = How { pid: ids[turn % 2], ..How::OWN };
            let event = device.start(&device.attr(KIND_MARK, VALUE), how)?;
            event.disable(0)?;
            let count = event.count()?;
            let placed = placers.placed[turn % 2].load(Ordering::Acquire);
            while placers.placed[turn % 2].load(Ordering::Acquire) < placed + 4 {
                thread::yield_now();
            }
            ensure_eq!(event.count()?, count, "marks while it was disabled");
            event.reset(0)?;
            ensure_eq!(event.count()?, 0, "the count after a reset");
        }
        Ok(())
    })
}

/// perf core reads the user stack when the driver replays the sample. At a mark, and again at a switch, the driver
/// replays at most 64 samples, and the stack of a task that has left the CPU cannot be read later.
#[apply(guest_test)]
fn user_stacks_of_tasks_that_left_their_cpu_are_counted_as_lost() -> Outcome {
    const EVENTS: usize = 200;
    const MARKS: u64 = 20;
    const ROUNDS: u64 = 20;
    let device = &Device::open()?;
    interrupt::bind(READERS)?;
    cpu::pin(READERS)?;
    let attr = perf_event_attr {
        sample_stack_user: 64,
        read_format: FORMAT_LOST,
        ..silent(device.marks(VALUE, 1, TID | STACK_USER))
    };
    let events: Vec<Event> = (0..EVENTS).map(|_| kernels(&attr, ALL)).collect::<std::io::Result<_>>()?;
    let mut ring = Pages::map(&events[0], 256, READ_WRITE)?;
    for event in &events[1..] {
        event.output_to(events[0].ring())?;
    }
    // Returns the numbers of marks counted and of samples lost.
    let totals = || -> std::io::Result<[u64; 2]> {
        let readings: Vec<Vec<u64>> = events.iter().map(Event::read).collect::<std::io::Result<_>>()?;
        Ok([0, 1].map(|word| readings.iter().filter_map(|reading| reading.get(word)).sum()))
    };
    let [mut one, mut other] = Turn::pair()?;
    let (order, orders) = std::sync::mpsc::channel();
    let (tell, placed) = std::sync::mpsc::channel();
    thread::scope(|scope| -> Outcome {
        let placer = scope.spawn(move || -> std::io::Result<()> {
            settle()?;
            for marks in orders {
                for _ in 0..marks {
                    device.mark(VALUE)?;
                    one.give()?;
                    one.wait()?;
                }
                // Fails only if the test has failed.
                let _ = tell.send(());
            }
            Ok(())
        });
        // The task to which the placer's CPU switches. It ends with the placer.
        scope.spawn(move || {
            if settle().is_ok() {
                while other.wait().and_then(|()| other.give()).is_ok() {}
            }
        });
        let mut samples = 0;
        // How many samples are late depends on when the other CPU takes the device's interrupts.
        let mut until_late = || -> Outcome {
            for _ in 0..ROUNDS {
                for event in &events {
                    event.enable(0)?;
                }
                order.send(MARKS)?;
                placed.recv()?;
                for event in &events {
                    event.disable(0)?;
                    device.flush_perf(event)?;
                }
                let (taken, no_room) = fields::samples(&ring.take()?, &attr)?;
                ensure_eq!(no_room, 0, "samples lost for room");
                samples += taken.len() as u64;
                let [count, lost] = totals()?;
                ensure_eq!(samples + lost, count, "{samples} samples and {lost} lost, of {EVENTS} events");
                if lost > 0 {
                    return Ok(());
                }
            }
            Err("no sample was late".into())
        };
        let seen = until_late();
        drop(order);
        placer.join().map_err(|_| "the placer panicked")??;
        seen
    })
}

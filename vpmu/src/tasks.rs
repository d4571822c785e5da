//! The running and previous tasks of each vCPU. The driver writes each task switch to a page in guest memory, and the
//! device reads that page. Neither access causes an exit. The guest may write anything to the page at any time, but
//! wrong data can mislabel only the guest's own records.

use std::mem::offset_of;
use std::sync::atomic::{Ordering, fence};

use vm_memory::{Address, Bytes, GuestAddress, VolatileSlice};

use crate::abi::{PAGE_SIZE, TASK_HISTORY, TaskPage, TaskSwitch};
use crate::memory::View;

const USER_REGS: u64 = offset_of!(TaskPage, user_regs) as u64;
const SWITCHES: usize = offset_of!(TaskPage, switches);
const HISTORY: usize = offset_of!(TaskPage, history);
const ENTRIES: u64 = TASK_HISTORY as u64;
/// Maximum number of attempts to read a history. Only a guest that constantly writes to its task page can invalidate
/// more than one attempt.
const TRIES: usize = 3;

/// A process and a thread of the guest; zeros if unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub(crate) struct Task {
    pub(crate) pid: u32,
    pub(crate) tid: u32,
}

/// The task page of one vCPU. `None` until the driver has set a page.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tasks(Option<GuestAddress>);

impl Tasks {
    /// `page` is `None` if the driver has not set a task page. The caller must have checked that the page is
    /// guest memory.
    pub(crate) fn new(page: Option<GuestAddress>) -> Self {
        Self(page)
    }

    /// The guest-physical address of the page.
    pub(crate) fn page(self) -> Option<GuestAddress> {
        self.0
    }

    /// The vCPU's current task, from its page. May be out of date while the vCPU is in the guest.
    pub(crate) fn running(self, memory: &View<'_>) -> Task {
        let word = self.0.and_then(|page| memory.load::<u64>(page, Ordering::Relaxed).ok());
        task(word.unwrap_or(0))
    }

    /// The guest-virtual address of the saved registers with which the running task entered the kernel. Zero if the
    /// task has no user registers. The guest can write any value, so check the address before use.
    pub(crate) fn user_regs(self, memory: &View<'_>) -> u64 {
        let word = self
            .0
            .and_then(|page| page.checked_add(USER_REGS))
            .and_then(|at| memory.load::<u64>(at, Ordering::Relaxed).ok());
        u64::from_le(word.unwrap_or(0))
    }

    /// Returns the tasks that have run on the vCPU so far. The vCPU may be running during the call.
    pub(crate) fn history(self, memory: &View<'_>) -> TaskHistory {
        self.0
            .and_then(|page| memory.slice(page, PAGE_SIZE).ok())
            .and_then(|page| (0..TRIES).find_map(|_| TaskHistory::read(&page)))
            .unwrap_or_default()
    }
}

/// The tasks that ran on one vCPU until its task page was read. Older tasks, which the page no longer contained, are
/// missing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct TaskHistory {
    /// The running task, if no switch has been recorded yet.
    always: Option<Task>,
    /// Start times and tasks, in the order of the switches.
    switches: Vec<(u64, Task)>,
}

impl TaskHistory {
    /// Returns the task that ran at the guest's TSC `tsc`. `None` if the history does not go back that far.
    pub(crate) fn at(&self, tsc: u64) -> Option<Task> {
        let later = self.switches.partition_point(|&(since, _)| since <= tsc);
        match later.checked_sub(1) {
            Some(last) => self.switches.get(last).map(|&(_, task)| task),
            None => self.always,
        }
    }

    /// Reads a page. Returns `None` if every entry was overwritten during the read.
    fn read(page: &VolatileSlice<'_>) -> Option<Self> {
        let load = |offset, order| page.load::<u64>(offset, order).ok().map(u64::from_le);
        // Pairs with the driver's release, so that all counted entries are complete.
        let count = load(SWITCHES, Ordering::Acquire)?;
        let number = count.min(ENTRIES);
        let first = count - number;
        let mut switches = Vec::with_capacity(TASK_HISTORY);
        for switch in first..count {
            let index = usize::try_from(switch % ENTRIES).ok()?;
            let at = HISTORY + index * size_of::<TaskSwitch>();
            // In memory byte order: `task` parses it.
            let word = page.load::<u64>(at, Ordering::Relaxed).ok()?;
            let since = load(at + 8, Ordering::Relaxed)?;
            switches.push((since, task(word)));
        }
        let always = match count {
            0 => Some(task(page.load::<u64>(0, Ordering::Relaxed).ok()?)),
            _ => None,
        };
        // Read the entries before the count is read again.
        fence(Ordering::Acquire);
        let now = load(SWITCHES, Ordering::Relaxed)?;
        // The entry of switch n + ENTRIES overwrites the entry of switch n. The driver counts a switch only after
        // writing its entry, so one switch that is not counted yet may also have overwritten an entry.
        let spoilt = now.checked_sub(first)?.saturating_add(1).saturating_sub(ENTRIES);
        if spoilt >= number.max(1) {
            return None;
        }
        switches.drain(..usize::try_from(spoilt).ok()?);
        Some(Self { always, switches })
    }
}

/// The task in the first word of a page or entry. `word` is in memory byte order.
fn task(word: u64) -> Task {
    let task: TaskSwitch = zerocopy::transmute!([word, 0]);
    Task { pid: task.pid.get(), tid: task.tid.get() }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use proptest::prelude::*;
    use vm_memory::GuestMemoryMmap;

    use super::*;

    const PAGE: GuestAddress = GuestAddress(0x1000);

    fn memory() -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x3000)]).expect("memory")
    }

    fn put(memory: &GuestMemoryMmap, offset: usize, value: u64, order: Ordering) {
        let at = GuestAddress(PAGE.0 + offset as u64);
        memory.store(value.to_le(), at, order).expect("in memory");
    }

    fn word(who: u32) -> u64 {
        u64::from(who) | u64::from(who + 1) << 32
    }

    fn named(who: u32) -> Task {
        Task { pid: who, tid: who + 1 }
    }

    /// Writes switch number `n` to the page, as the driver does. It is a switch to task `who` at the TSC `since`.
    fn switch(memory: &GuestMemoryMmap, n: u64, who: u32, since: u64) {
        let index = usize::try_from(n % ENTRIES).expect("small");
        let at = HISTORY + index * size_of::<TaskSwitch>();
        put(memory, 0, word(who), Ordering::Relaxed);
        put(memory, at, word(who), Ordering::Relaxed);
        put(memory, at + 8, since, Ordering::Relaxed);
        put(memory, SWITCHES, n + 1, Ordering::Release);
    }

    fn tasks() -> Tasks {
        Tasks::new(Some(PAGE))
    }

    #[test]
    fn task_without_a_task_page_is_unknown() {
        let tasks = Tasks::default();
        assert_eq!(tasks.running(&View::of(&memory())), Task::default());
        assert_eq!(tasks.history(&View::of(&memory())).at(5), None);
    }

    #[test]
    fn task_before_the_first_switch_is_the_running_one() {
        let memory = memory();
        put(&memory, 0, word(7), Ordering::Relaxed);
        assert_eq!(tasks().running(&View::of(&memory)), named(7));
        assert_eq!(tasks().history(&View::of(&memory)).at(5), Some(named(7)));
    }

    #[test]
    fn each_moment_has_its_task() {
        let memory = memory();
        for (n, since) in [(0, 100), (1, 200), (2, 300)] {
            switch(&memory, n, 10 + u32::try_from(n).expect("small"), since);
        }
        let history = tasks().history(&View::of(&memory));
        let expected = [
            (99, None),
            (100, Some(named(10))),
            (199, Some(named(10))),
            (200, Some(named(11))),
            (u64::MAX, Some(named(12))),
        ];
        for (tsc, who) in expected {
            assert_eq!(history.at(tsc), who, "{tsc}");
        }
        assert_eq!(tasks().running(&View::of(&memory)), named(12));
    }

    #[test]
    fn overwritten_switches_are_unknown() {
        let memory = memory();
        let all = 3 * ENTRIES + 5;
        for n in 0..all {
            switch(&memory, n, u32::try_from(n).expect("small"), 10 * n);
        }
        let history = tasks().history(&View::of(&memory));
        // The history has one entry fewer than the page, because the next switch may already have overwritten half of
        // the oldest entry.
        let oldest = all - ENTRIES + 1;
        assert_eq!(history.at(10 * oldest - 1), None);
        for n in oldest..all {
            let who = u32::try_from(n).expect("small");
            assert_eq!(history.at(10 * n), Some(named(who)));
        }
    }

    #[test]
    fn history_during_switches_has_the_right_tasks() {
        let memory = memory();
        let stop = AtomicBool::new(false);
        let mut histories: Vec<TaskHistory> = std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut n = 0_u64;
                while n < 1000 || !stop.load(Ordering::Relaxed) {
                    let who = u32::try_from(n % 1_000_000).expect("small");
                    switch(&memory, n, who, n);
                    n += 1;
                }
            });
            let histories = (0..1000)
                .map(|_| {
                    // Yield, so that the guest's thread can run if both threads share a CPU.
                    std::thread::yield_now();
                    tasks().history(&View::of(&memory))
                })
                .collect();
            stop.store(true, Ordering::Relaxed);
            histories
        });
        // Each read so far may have happened during a switch. This read happens after the last switch.
        histories.push(tasks().history(&View::of(&memory)));
        assert!(histories.iter().any(|history| !history.switches.is_empty()));
        for history in &histories {
            for &(since, task) in &history.switches {
                let who = u32::try_from(since % 1_000_000).expect("small");
                assert_eq!(task, named(who), "switch {since}");
            }
            assert!(history.switches.is_sorted_by_key(|&(since, _)| since));
        }
    }

    proptest! {
        #[test]
        fn any_task_page_is_read_without_a_panic(words in prop::collection::vec(any::<u64>(), 512), tsc in any::<u64>()) {
            let memory = memory();
            for (index, &value) in words.iter().enumerate() {
                put(&memory, index * 8, value, Ordering::Relaxed);
            }
            let history = tasks().history(&View::of(&memory));
            let _ = history.at(tsc);
            prop_assert!(history.switches.len() <= TASK_HISTORY);
        }
    }
}

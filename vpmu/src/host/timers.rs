//! Starts and stops counters that are paced by timers of the host. Up to 64 such counters of a thread are members of
//! one perf group, and their timers start together.
//!
//! Each such counter has its own timer. Timers that start a microsecond apart expire a microsecond apart. Each expiry
//! is an interrupt, which takes a vCPU out of the guest. If the timers of a perf group start together with the group's
//! leader, they expire at one moment, and one interrupt serves them all. Enabling or disabling the leader also takes
//! only one system call for any number of counters.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use vpmu_perf::bindings::{PERF_COUNT_SW_DUMMY, PERF_TYPE_SOFTWARE, perf_event_attr};

use super::sys;

/// Maximum number of members of a group. A limit is needed because the host visits each member whenever the
/// leader is enabled or disabled.
const MOST_MEMBERS: usize = 64;

/// Maximum number of member changes that are kept for the next start. A limit is needed because a guest can
/// make any number of changes.
const MOST_CHANGED: usize = 4 * MOST_MEMBERS;

/// The timer groups of all threads.
#[derive(Debug, Default)]
pub(super) struct Timers(Mutex<Groups>);

#[derive(Debug, Default)]
struct Groups {
    /// The group of each thread that has one.
    of: Vec<(i32, Weak<TimerGroup>)>,
    /// The threads whose members are paused.
    paused: Vec<i32>,
}

impl Timers {
    /// Returns the group of `thread`. Creates the group if the thread has none. `None` if the group is full.
    ///
    /// # Errors
    /// The host's error.
    pub(super) fn of(&self, thread: i32) -> io::Result<Option<Arc<TimerGroup>>> {
        if let Some(group) = self.find(thread) {
            let has_room = group.members.load(Ordering::Relaxed) < MOST_MEMBERS;
            return Ok(Some(group).filter(|_| has_room));
        }
        let group = Arc::new(TimerGroup::open(thread)?);
        let mut groups = locked(&self.0);
        locked(&group.state).paused = groups.paused.contains(&thread);
        groups.of.retain(|(_, group)| group.strong_count() > 0);
        groups.of.push((thread, Arc::downgrade(&group)));
        Ok(Some(group))
    }

    /// Delays each start of a member of the group of `thread` until [`Timers::release`], which starts the members
    /// together. Until then, stopping one member stops all members.
    pub(super) fn hold(&self, thread: i32) {
        if let Some(group) = self.find(thread) {
            locked(&group.state).held = true;
        }
    }

    /// Ends the delay that [`Timers::hold`] began, and starts the members that should count.
    ///
    /// # Errors
    /// The host's error.
    pub(super) fn release(&self, thread: i32) -> io::Result<()> {
        let Some(group) = self.find(thread) else {
            return Ok(());
        };
        let mut state = locked(&group.state);
        state.held = false;
        group.settle(&mut state)
    }

    /// Pauses the members of the group of `thread` until [`Timers::resume`].
    ///
    /// # Errors
    /// The host's error.
    pub(super) fn pause(&self, thread: i32) -> io::Result<()> {
        locked(&self.0).paused.push(thread);
        let Some(group) = self.find(thread) else {
            return Ok(());
        };
        let mut state = locked(&group.state);
        state.paused = true;
        group.switch(&mut state, false)
    }

    /// Ends a pause.
    ///
    /// # Errors
    /// The host's error.
    pub(super) fn resume(&self, thread: i32) -> io::Result<()> {
        locked(&self.0).paused.retain(|&paused| paused != thread);
        let Some(group) = self.find(thread) else {
            return Ok(());
        };
        let mut state = locked(&group.state);
        state.paused = false;
        if state.held { Ok(()) } else { group.settle(&mut state) }
    }

    fn find(&self, thread: i32) -> Option<Arc<TimerGroup>> {
        let groups = locked(&self.0);
        let mut of = groups.of.iter().filter(|&&(on, _)| on == thread);
        of.find_map(|(_, group)| group.upgrade())
    }
}

/// A perf group of one thread's timer-paced counters. The leader itself counts nothing. The members count only while
/// the leader is enabled.
#[derive(Debug)]
pub(super) struct TimerGroup {
    leader: File,
    members: AtomicUsize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    held: bool,
    /// Whether the vCPU of the thread is paused.
    paused: bool,
    /// Whether the leader is enabled.
    on: bool,
    /// Number of members that should count.
    running: usize,
    /// Members whose host event may still have to be enabled or disabled. The change is made while the leader is
    /// disabled.
    changed: Vec<Weak<Member>>,
}

/// A counter's event on the host.
#[derive(Debug)]
struct Member {
    event: File,
    /// Whether the event should count. This flag and `on` change only while the group's state is locked.
    runs: AtomicBool,
    /// Whether the host's event is enabled.
    on: AtomicBool,
}

impl Member {
    /// Enables or disables the host's event if it does not have the wanted state.
    fn settle(&self) -> io::Result<()> {
        let runs = self.runs.load(Ordering::Relaxed);
        if self.on.load(Ordering::Relaxed) == runs {
            return Ok(());
        }
        if runs {
            sys::enable(&self.event)?
        } else {
            sys::disable(&self.event)?
        }
        self.on.store(runs, Ordering::Relaxed);
        Ok(())
    }
}

/// A counter in a group. Dropping it closes its event.
#[derive(Debug)]
pub(super) struct Timer {
    group: Arc<TimerGroup>,
    member: Arc<Member>,
}

impl Timer {
    /// Opens a stopped member of `group`.
    ///
    /// # Errors
    /// The host's error.
    pub(super) fn open(group: Arc<TimerGroup>, attr: &perf_event_attr, thread: i32) -> io::Result<Self> {
        let event = sys::open_member(attr, thread, &group.leader)?;
        group.members.fetch_add(1, Ordering::Relaxed);
        let member = Arc::new(Member { event, runs: AtomicBool::new(false), on: AtomicBool::new(false) });
        Ok(Self { group, member })
    }

    /// The host's event.
    pub(super) fn event(&self) -> &File {
        &self.member.event
    }

    /// Starts the counter. If the group is held, the counter starts only at the release.
    ///
    /// # Errors
    /// The host's error.
    pub(super) fn start(&self) -> io::Result<()> {
        let mut state = locked(&self.group.state);
        if self.member.runs.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        state.running += 1;
        state.changed.push(Arc::downgrade(&self.member));
        if state.held {
            return Ok(());
        }
        self.group.settle(&mut state)
    }

    /// Stops the counter. If the group is held, its other counters also stop until the release.
    ///
    /// # Errors
    /// The host's error.
    pub(super) fn stop(&self) -> io::Result<()> {
        let mut state = locked(&self.group.state);
        if !self.member.runs.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        state.running -= 1;
        if state.held || state.running == 0 {
            state.changed.push(Arc::downgrade(&self.member));
            return self.group.switch(&mut state, false);
        }
        self.member.settle()
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        let mut state = locked(&self.group.state);
        if self.member.runs.load(Ordering::Relaxed) {
            state.running -= 1;
        }
        self.group.members.fetch_sub(1, Ordering::Relaxed);
    }
}

impl TimerGroup {
    fn open(thread: i32) -> io::Result<Self> {
        let mut attr = perf_event_attr {
            type_: PERF_TYPE_SOFTWARE,
            config: PERF_COUNT_SW_DUMMY.into(),
            ..perf_event_attr::default()
        };
        attr.set_disabled(1);
        // All events of a group must use the same clock, which is the clock of the members' samples.
        attr.set_use_clockid(1);
        attr.clockid = libc::CLOCK_MONOTONIC_RAW;
        Ok(Self {
            leader: sys::open(&attr, thread)?,
            members: AtomicUsize::new(0),
            state: Mutex::new(State { held: false, paused: false, on: false, running: 0, changed: Vec::new() }),
        })
    }

    /// Enables or disables the changed members as wanted. Meanwhile, the leader is disabled, because a member that is
    /// enabled while the leader is enabled might not start. When the host looks for events of the member's PMU to
    /// start, it may skip groups whose leader has another PMU.
    fn settle(&self, state: &mut State) -> io::Result<()> {
        // If no member should run, disable only the leader and keep the changes for the next start. Members
        // that stop together may start together again, and then none of them needs its own system call.
        if state.running == 0 && state.changed.len() <= MOST_CHANGED {
            return self.switch(state, false);
        }
        if !state.changed.is_empty() {
            self.switch(state, false)?;
            let mut changed = state.changed.drain(..).filter_map(|member| member.upgrade());
            changed.try_for_each(|member| member.settle())?;
        }
        self.switch(state, state.running > 0)
    }

    fn switch(&self, state: &mut State, on: bool) -> io::Result<()> {
        let on = on && !state.paused;
        if state.on == on {
            return Ok(());
        }
        if on {
            sys::enable(&self.leader)?
        } else {
            sys::disable(&self.leader)?
        }
        state.on = on;
        Ok(())
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timer(timers: &Timers) -> Timer {
        let mut attr = perf_event_attr { type_: PERF_TYPE_SOFTWARE, ..perf_event_attr::default() };
        attr.set_disabled(1);
        attr.set_use_clockid(1);
        attr.clockid = libc::CLOCK_MONOTONIC_RAW;
        let group = timers.of(sys::thread()).unwrap().unwrap();
        Timer::open(group, &attr, sys::thread()).unwrap()
    }

    #[test]
    fn changes_without_a_start_are_bounded() {
        let (timers, thread) = (Timers::default(), sys::thread());
        let kept = timer(&timers);
        for _ in 0..10 * MOST_CHANGED {
            timers.hold(thread);
            kept.start().unwrap();
            kept.stop().unwrap();
            timers.release(thread).unwrap();
            let changed = locked(&kept.group.state).changed.len();
            assert!(changed <= MOST_CHANGED, "{changed} changes wait");
        }
        let state = locked(&kept.group.state);
        assert_eq!((state.running, state.on, state.held), (0, false, false));
    }

    #[test]
    fn closed_members_leave_room_for_others() {
        let timers = Timers::default();
        let all: Vec<_> = (0..MOST_MEMBERS).map(|_| timer(&timers)).collect();
        assert!(timers.of(sys::thread()).unwrap().is_none(), "it is full");
        all[0].start().unwrap();
        drop(all);
        let groups = locked(&timers.0);
        assert!(groups.of.iter().all(|(_, group)| group.strong_count() == 0));
        drop(groups);
        let again = timer(&timers);
        assert_eq!(locked(&again.group.state).running, 0);
    }
}

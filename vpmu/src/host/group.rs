//! One group of host events on a vCPU's thread. The host schedules either all members or none, and one system call
//! reads them all.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;

use vpmu_perf::Mapping;
use vpmu_perf::field::FORMAT_GROUP;

use super::counter::attr;
use super::pmc;
use super::pmus::CpuPmu;
use super::probe::is_clock;
use super::readings::Readings;
use super::sys;
use crate::abi::{KIND_HARDWARE, KIND_HW_CACHE, KIND_RAW, KIND_SOFTWARE};
use crate::arch;
use crate::source::{CounterKey, Reading, Request};

/// Maximum number of members of a group.
const MOST: usize = 64;
/// Maximum number of members of a group on the CPU's PMU. A PMU with fewer counters refuses members
/// earlier.
const MOST_ON_CPU: usize = 16;
/// Number of words before the members' values in a reading. The words are the number of members, the
/// leader's time enabled, and the leader's time running.
const HEADER: usize = 3;
/// Bytes of the longest reading.
const BYTES: usize = (HEADER + MOST) * size_of::<u64>();

/// Only events of the same class share a group. Their exclusions may differ, because perf applies them to each event
/// separately.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Class {
    /// Software events. Perf allows them in a group of hardware events, but would then multiplex them
    /// together with the hardware events.
    Software,
    /// Events of the CPU's PMU.
    Cpu,
    /// A pinned event. Only a leader can be pinned. If a pinned leader loses its counter, its whole group goes into the
    /// error state. Therefore, a pinned event is alone in its group, and each reading of it takes a separate system
    /// call.
    Pinned,
}

impl Class {
    /// Returns the class of `what`. `None` if `what` samples or is a trace.
    pub(super) fn of(what: &Request) -> Option<Self> {
        let class = match what.kind {
            KIND_SOFTWARE => Self::Software,
            KIND_HARDWARE | KIND_HW_CACHE | KIND_RAW => Self::Cpu,
            _ => return None,
        };
        match (what.sampling, what.pinned) {
            (Some(_), _) => None,
            (None, true) => Some(Self::Pinned),
            (None, false) => Some(class),
        }
    }

    fn most(self) -> usize {
        match self {
            Self::Software => MOST,
            Self::Cpu => MOST_ON_CPU,
            Self::Pinned => 1,
        }
    }
}

/// Buffer for readings. With this buffer, reading does not allocate memory.
#[derive(Debug)]
pub(super) struct Scratch {
    bytes: [u8; BYTES],
    /// The members' values in order.
    values: [u64; MOST],
}

impl Scratch {
    pub(super) fn new() -> Self {
        Self { bytes: [0; BYTES], values: [0; MOST] }
    }
}

/// The thread that the counters count, and how to open and read the counters.
#[derive(Debug, Clone, Copy)]
pub(super) struct On {
    pub(super) thread: i32,
    pub(super) pmu: CpuPmu,
    /// Whether `thread` is the calling thread.
    pub(super) own: bool,
    /// Whether to map the metadata page of new events.
    pub(super) pages: bool,
}

#[derive(Debug)]
pub(super) struct Group {
    class: Class,
    /// Members in the order in which they were opened, which is also the order of the values in the host's
    /// readings. The first member is the leader.
    members: Vec<Member>,
    /// Whether the group takes no more members, because the host refused one. Cleared when a member other than the
    /// leader is removed.
    full: bool,
    /// The times of the last reading.
    times: Reading,
}

#[derive(Debug)]
struct Member {
    /// `None` for a removed leader. Its event stays open, because closing it would dissolve the group.
    key: Option<CounterKey>,
    request: Request,
    event: File,
    /// The event's metadata page, if it is mapped.
    page: Option<Mapping>,
    /// The host's count when the member was added. It is not zero for a reused leader.
    base: u64,
}

impl Member {
    fn open(what: &Request, key: CounterKey, on: On, leader: Option<&File>) -> io::Result<Self> {
        let mut attr = attr(what, on.pmu);
        attr.set_disabled(0);
        attr.read_format |= FORMAT_GROUP;
        let event = match leader {
            Some(leader) => sys::open_member(&attr, on.thread, leader)?,
            None => sys::open(&attr, on.thread)?,
        };
        let wants_page = arch::READS_COUNTERS && on.pages && what.kind != KIND_SOFTWARE;
        let page = match wants_page {
            // Mapping fails if the limit on locked memory is reached. Without a page, a system call reads the event.
            true => Mapping::new(event.as_fd(), sys::page_size()?).ok(),
            false => None,
        };
        Ok(Self { key: Some(key), request: *what, event, page, base: 0 })
    }

    /// Returns the member's reading. `value` is the host's count of the member's event, and `times` are the times of
    /// the group.
    fn reading(&self, value: u64, times: Reading) -> Reading {
        Reading { value: value.wrapping_sub(self.base), ..times }
    }
}

impl Group {
    /// Opens a group with one running event.
    pub(super) fn open(class: Class, what: &Request, key: CounterKey, on: On) -> io::Result<Self> {
        Ok(Self { class, members: vec![Member::open(what, key, on, None)?], full: false, times: Reading::default() })
    }

    pub(super) fn is_of(&self, class: Class) -> bool {
        self.class == class
    }

    pub(super) fn has_room(&self) -> bool {
        !self.full && self.members.len() < self.class.most()
    }

    /// Refuses new members until a member other than the leader is removed.
    pub(super) fn close_to_others(&mut self) {
        self.full = true;
    }

    /// Number of mapped metadata pages.
    pub(super) fn pages(&self) -> usize {
        let mapped = self.members.iter().filter(|member| member.page.is_some());
        mapped.count()
    }

    /// Returns whether the group has no members left, except for a removed leader.
    pub(super) fn is_empty(&self) -> bool {
        self.members.iter().all(|member| member.key.is_none())
    }

    /// Reuses the leader if it was removed and had the same request. Returns whether the leader was reused.
    pub(super) fn revive(&mut self, what: &Request, key: CounterKey, on: On, into: &mut Scratch) -> bool {
        let fits = |leader: &Member| leader.key.is_none() && leader.request == *what;
        if !self.members.first().is_some_and(fits) || self.read(on.own, into).is_none() {
            return false;
        }
        if let Some(leader) = self.members.first_mut() {
            leader.key = Some(key);
            leader.base = into.values[0];
        }
        true
    }

    /// Opens another member. Returns whether the host can count it together with the group's other members. If not, the
    /// group is unchanged.
    ///
    /// # Errors
    /// Errors that would also occur in another group.
    pub(super) fn join(&mut self, what: &Request, key: CounterKey, on: On, into: &mut Scratch) -> io::Result<bool> {
        let leader = self.members.first().map(|leader| &leader.event);
        match Member::open(what, key, on, leader) {
            Ok(member) => self.members.push(member),
            Err(error) if is_misfit(&error) => return Ok(false),
            Err(error) => return Err(error),
        }
        if let Err(error) = self.start_last(on) {
            self.members.pop();
            return Err(error);
        }
        let starves = self.class == Class::Cpu && on.own && self.starves(into);
        if starves {
            self.members.pop();
        }
        Ok(!starves)
    }

    /// Starts the newest member. If the member's PMU differs from the leader's, Linux 6.12 and newer do not
    /// start the member until the group's thread is scheduled again. This function therefore opens one more event of
    /// the leader's PMU, which starts all members, and closes that event again.
    fn start_last(&self, on: On) -> io::Result<()> {
        let (Some(leader), Some(last)) = (self.members.first(), self.members.last()) else {
            return Ok(());
        };
        if software_pmu(&leader.request) == software_pmu(&last.request) {
            return Ok(());
        }
        let on = On { pages: false, ..on };
        Member::open(&leader.request, CounterKey(0), on, Some(&leader.event)).map(drop)
    }

    /// Whether the group waits for counters although its thread runs. The host accepts a group that fits an
    /// idle PMU. Such a group never runs if it needs every counter and another user, such as the NMI
    /// watchdog, holds one permanently.
    fn starves(&mut self, into: &mut Scratch) -> bool {
        let [before, after] = [self.ask(into), self.ask(into)];
        matches!((before, after), (Some(before), Some(after)) if is_waiting(before, after))
    }

    /// Removes the member `key`. Returns whether the group had this member.
    pub(super) fn remove(&mut self, key: CounterKey) -> bool {
        let is_it = |member: &Member| member.key == Some(key);
        match self.members.iter().position(is_it) {
            Some(0) => self.members[0].key = None,
            Some(at) => {
                self.members.remove(at);
                self.full = false;
            }
            None => return false,
        }
        true
    }

    /// Reads every member now. Stores the reading of `only`, or all readings if `only` is `None`. `own` is true if the
    /// counters count the calling thread.
    pub(super) fn refresh(&mut self, only: Option<CounterKey>, own: bool, into: &mut Scratch, readings: &mut Readings) {
        let times = self.read(own, into);
        for (member, value) in self.members.iter().zip(&into.values) {
            let wanted = |key: &CounterKey| only.is_none_or(|only| only == *key);
            if let Some(key) = member.key.filter(wanted) {
                readings.set(key, times.map(|times| member.reading(*value, times)));
            }
        }
    }

    /// Reads the members' values into `into`, and returns the group's times. Returns `None` if the host cannot read the
    /// group.
    fn read(&mut self, own: bool, into: &mut Scratch) -> Option<Reading> {
        let looked = if own { self.look(into) } else { None };
        let now = looked.or_else(|| self.ask(into))?;
        // `look` and `ask` round nanoseconds differently, and times must not decrease.
        self.times = Reading {
            enabled: self.times.enabled.max(now.enabled),
            running: self.times.running.max(now.running),
            ..now
        };
        Some(self.times)
    }

    /// Reads the whole group from its metadata pages. Returns `None` if a member cannot be read from a page. The times
    /// are the leader's times, as in a reading by the host.
    fn look(&self, into: &mut Scratch) -> Option<Reading> {
        let mut of_leader = None;
        for (member, value) in self.members.iter().zip(&mut into.values) {
            let reading = pmc::read(member.page.as_ref()?)?;
            of_leader.get_or_insert(reading);
            *value = reading.value;
        }
        of_leader
    }

    /// Reads the group with a system call. Returns `None` if the call fails, or if a pinned event has lost its counter,
    /// in which case the host returns end of file.
    fn ask(&self, into: &mut Scratch) -> Option<Reading> {
        let leader = self.members.first()?;
        let words = HEADER + self.members.len();
        let bytes = into.bytes.get_mut(..words * size_of::<u64>())?;
        if (&leader.event).read(bytes).ok()? != bytes.len() {
            return None;
        }
        let (words, _) = bytes.as_chunks();
        let (header, values) = words.split_at_checked(HEADER)?;
        let &[members, enabled, running] = header else {
            return None;
        };
        if u64::from_ne_bytes(members) != values.len() as u64 {
            return None;
        }
        for (value, bytes) in into.values.iter_mut().zip(values) {
            *value = u64::from_ne_bytes(*bytes);
        }
        Some(Reading {
            value: into.values[0],
            enabled: u64::from_ne_bytes(enabled),
            running: u64::from_ne_bytes(running),
        })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Drop the leader last, because without a leader the host makes each member a separate group.
        while self.members.pop().is_some() {}
    }
}

/// Identifies the kernel's software PMU to which an event belongs. Each clock has its own PMU, and all other software
/// events share one. `None` if the event is not a software event.
fn software_pmu(what: &Request) -> Option<u64> {
    let software = what.kind == KIND_SOFTWARE;
    software.then_some(if is_clock(what.kind, what.config) { what.config } else { u64::MAX })
}

/// Returns whether the host refused a member because of its group. The error is `EINVAL` or `ENOSPC` if the PMU cannot
/// count all members at once, `E2BIG` if the host cannot read all members at once, and `ENODEV` (Linux 6.15 and newer)
/// if the group's thread has ended. On a thread that has ended, an event without a group fails with `ESRCH`.
fn is_misfit(error: &io::Error) -> bool {
    let misfits = [libc::EINVAL, libc::ENOSPC, libc::E2BIG, libc::ENODEV];
    error.raw_os_error().is_some_and(|error| misfits.contains(&error))
}

/// Returns whether a group was never scheduled on its PMU between two readings although its thread ran.
fn is_waiting(before: Reading, after: Reading) -> bool {
    after.enabled > before.enabled && after.running == before.running
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

    use super::*;
    use crate::source::{Engine, Rate, Sampling};

    const PAGE_FAULTS: u64 = 2;
    const FAULTS: Request = Request {
        kind: KIND_SOFTWARE,
        config: PAGE_FAULTS,
        sampling: None,
        exclude_user: false,
        exclude_kernel: false,
        exclude_host: false,
        pinned: false,
    };

    fn here() -> On {
        On { thread: sys::thread(), pmu: CpuPmu::default(), own: true, pages: true }
    }

    /// A group of two counters of page faults, with their keys.
    fn two(readings: &mut Readings, into: &mut Scratch) -> (Group, [CounterKey; 2]) {
        let keys = [readings.take().unwrap(), readings.take().unwrap()];
        let mut group = Group::open(Class::Software, &FAULTS, keys[0], here()).unwrap();
        assert!(group.join(&FAULTS, keys[1], here(), into).unwrap());
        (group, keys)
    }

    fn touch(pages: u64) {
        let length = usize::try_from(pages).unwrap() * 4096;
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), length)]).unwrap();
        for page in 0..pages {
            memory.write_obj(1_u8, GuestAddress(page * 4096)).unwrap();
        }
    }

    #[test]
    fn software_events_with_pages_are_read_by_the_kernel() {
        let (mut readings, mut into) = (Readings::default(), Scratch::new());
        let (mut group, keys) = two(&mut readings, &mut into);
        assert_eq!(group.pages(), 0, "a software event never has a counter");
        for member in &mut group.members {
            let page = Mapping::new(member.event.as_fd(), sys::page_size().unwrap()).unwrap();
            assert_eq!(pmc::read(&page), None);
            member.page = Some(page);
        }
        assert_eq!(group.look(&mut into), None);
        let mut read = || {
            group.refresh(None, true, &mut into, &mut readings);
            keys.map(|key| readings.get(key).unwrap())
        };
        read();
        let before = read();
        touch(10);
        let after = read();
        for (before, after) in before.iter().zip(after) {
            assert!(after.value - before.value >= 10, "{before:?} {after:?}");
            assert!(after.running > before.running);
        }
    }

    #[test]
    fn failed_read_fails_the_members_of_its_group_only() {
        // Reading these files gives, in this order, end of file, a short read and an error.
        for file in ["/dev/null", "/proc/sys/kernel/perf_event_paranoid", "/"] {
            let (mut readings, mut into) = (Readings::default(), Scratch::new());
            let (mut lost, of_lost) = two(&mut readings, &mut into);
            let (mut kept, of_kept) = two(&mut readings, &mut into);
            let mut refresh = |lost: &mut Group| {
                lost.refresh(None, true, &mut into, &mut readings);
                kept.refresh(None, true, &mut into, &mut readings);
                let is_read = |key| readings.get(key).is_some();
                (of_lost.map(is_read), of_kept.map(is_read))
            };
            assert_eq!(refresh(&mut lost), ([true; 2], [true; 2]));
            let event = std::mem::replace(&mut lost.members[0].event, File::open(file).unwrap());
            assert_eq!(refresh(&mut lost), ([false; 2], [true; 2]), "{file}");
            lost.members[0].event = event;
            assert_eq!(refresh(&mut lost), ([true; 2], [true; 2]));
        }
    }

    #[test]
    fn group_with_other_members_than_its_own_is_not_read() {
        let (mut readings, mut into) = (Readings::default(), Scratch::new());
        let (mut group, _) = two(&mut readings, &mut into);
        let member = group.members.pop().unwrap();
        assert_eq!(group.ask(&mut into), None, "the host has one more");
        group.members.push(member);
        assert!(group.ask(&mut into).is_some());
    }

    #[test]
    fn request_has_the_class_of_its_pmu_unless_it_is_pinned_or_samples() {
        let of = |kind, pinned, sampling| Class::of(&Request { kind, pinned, sampling, ..FAULTS });
        for kind in [KIND_HARDWARE, KIND_HW_CACHE, KIND_RAW] {
            assert_eq!(of(kind, false, None), Some(Class::Cpu));
            assert_eq!(of(kind, true, None), Some(Class::Pinned));
        }
        assert_eq!(of(KIND_SOFTWARE, false, None), Some(Class::Software));
        assert_eq!(of(KIND_SOFTWARE, true, None), Some(Class::Pinned));
        assert_eq!(of(crate::abi::KIND_EXIT_TRACE, false, None), None);
        let sampling = Sampling { rate: Rate::Period(1), engine: Engine::Exit };
        assert_eq!(of(KIND_HARDWARE, false, Some(sampling)), None);
    }

    #[test]
    fn group_waits_if_its_time_enabled_alone_grows() {
        let at = |enabled, running| Reading { value: 0, enabled, running };
        assert!(is_waiting(at(10, 5), at(20, 5)));
        assert!(!is_waiting(at(10, 5), at(20, 15)));
        assert!(!is_waiting(at(10, 5), at(10, 5)), "its thread did not run");
    }
}

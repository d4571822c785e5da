//! The non-sampling counters of a vCPU's thread. They are in as few groups as the host allows, because reading
//! each group takes a system call.

use std::io;

use super::group::{Class, Group, On, Scratch};
use super::pmus::CpuPmu;
use super::readings::Readings;
use super::{sys, unknown};
use crate::source::{CounterKey, CounterSet, Reading, Request};

/// Maximum number of metadata pages of a set. A limit is needed because the host locks the pages in memory. Few
/// PMUs have more counters than this.
pub(super) const MOST_PAGES: usize = 32;

#[derive(Debug)]
pub(super) struct PerfSet {
    thread: i32,
    pmu: CpuPmu,
    groups: Vec<Group>,
    readings: Readings,
    scratch: Scratch,
    /// Number of mapped metadata pages of all groups.
    pages: usize,
}

impl PerfSet {
    pub(super) fn new(thread: i32, pmu: CpuPmu) -> Self {
        Self { thread, pmu, groups: Vec::new(), readings: Readings::default(), scratch: Scratch::new(), pages: 0 }
    }

    /// Opens a counter in the first group that accepts it, or in a new group. Returns the group's index.
    fn place(&mut self, what: &Request, class: Class, key: CounterKey) -> io::Result<usize> {
        let on = On {
            thread: self.thread,
            pmu: self.pmu,
            own: sys::known_thread() == self.thread,
            pages: self.pages < MOST_PAGES,
        };
        let mut of_class = self.groups.iter_mut();
        let revived = |group: &mut Group| group.is_of(class) && group.revive(what, key, on, &mut self.scratch);
        if let Some(at) = of_class.position(revived) {
            return Ok(at);
        }
        for (at, group) in self.groups.iter_mut().enumerate() {
            let may_join = group.is_of(class) && group.has_room();
            if may_join && group.join(what, key, on, &mut self.scratch)? {
                return Ok(at);
            }
        }
        let group = Group::open(class, what, key, on)?;
        // The event could be opened in a new group, so the other groups refused it only because of their members.
        for refusing in self.groups.iter_mut().filter(|group| group.is_of(class)) {
            refusing.close_to_others();
        }
        self.groups.push(group);
        Ok(self.groups.len() - 1)
    }

    /// Whether the calling thread can read the mapped pages.
    fn reads_pages(&self) -> bool {
        self.pages > 0 && sys::known_thread() == self.thread
    }

    fn count_pages(&mut self) {
        self.pages = self.groups.iter().map(Group::pages).sum();
    }
}

impl CounterSet for PerfSet {
    fn add(&mut self, what: &Request) -> io::Result<CounterKey> {
        let class = Class::of(what).ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
        self.pmu.check(what)?;
        let key = self.readings.take()?;
        let placed = self.place(what, class, key);
        let placed = placed.map_err(|error| unknown(what, error));
        let at = placed.inspect_err(|_| self.readings.release(key))?;
        self.count_pages();
        let own = self.reads_pages();
        if let Some(group) = self.groups.get_mut(at) {
            group.refresh(Some(key), own, &mut self.scratch, &mut self.readings);
        }
        Ok(key)
    }

    fn remove(&mut self, key: CounterKey) {
        self.readings.release(key);
        let Some(at) = self.groups.iter_mut().position(|group| group.remove(key)) else {
            return;
        };
        if self.groups[at].is_empty() {
            self.groups.swap_remove(at);
        }
        self.count_pages();
    }

    fn refresh(&mut self) {
        let own = self.reads_pages();
        for group in &mut self.groups {
            group.refresh(None, own, &mut self.scratch, &mut self.readings);
        }
    }

    fn reading(&self, key: CounterKey) -> io::Result<Reading> {
        let failed = || io::Error::from_raw_os_error(libc::EIO);
        self.readings.get(key).ok_or_else(failed)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread;

    use super::*;
    use crate::abi::KIND_SOFTWARE;

    fn software(config: u64) -> Request {
        Request { kind: KIND_SOFTWARE, config, ..Request::default() }
    }

    /// Adds a group that no counter of the calling thread can join, because the group counts another thread.
    fn add_strange_group(set: &mut PerfSet, thread: i32) {
        let on = On { thread, pmu: CpuPmu::default(), own: false, pages: false };
        let key = set.readings.take().unwrap();
        let group = Group::open(Class::Software, &software(2), key, on).unwrap();
        set.groups.push(group);
    }

    #[test]
    fn counter_that_a_group_refuses_joins_another_group() {
        let mut set = PerfSet::new(sys::thread(), CpuPmu::default());
        let (tell, reported) = channel();
        let (end, ended) = channel::<()>();
        let strange = thread::spawn(move || {
            tell.send(sys::thread()).unwrap();
            ended.recv().unwrap_err();
        });
        add_strange_group(&mut set, reported.recv().unwrap());

        // No host has software event 99, so it cannot be added. This error does not close the group to other counters.
        assert_eq!(set.add(&software(99)).unwrap_err().raw_os_error(), Some(libc::ENOENT));
        assert!(set.groups[0].has_room());

        let keys = [2, 3].map(|config| set.add(&software(config)).unwrap());
        assert_eq!(set.groups.len(), 2);
        assert!(!set.groups[0].has_room(), "it is not tried again");
        assert!(set.groups[1].has_room());
        set.refresh();
        assert!(keys.iter().all(|key| set.reading(*key).is_ok()));
        drop(end);
        strange.join().unwrap();
    }

    #[test]
    fn counters_of_one_class_share_a_group_up_to_its_bound() {
        let mut set = PerfSet::new(sys::thread(), CpuPmu::default());
        let keys: Vec<_> = (0..65).map(|_| set.add(&software(2)).unwrap()).collect();
        assert_eq!(set.groups.len(), 2);
        let pinned = Request { pinned: true, ..software(2) };
        let alone = [set.add(&pinned).unwrap(), set.add(&pinned).unwrap()];
        assert_eq!(set.groups.len(), 4, "each pinned counter is alone");
        for key in keys.into_iter().chain(alone) {
            assert!(set.reading(key).is_ok());
            set.remove(key);
            assert!(set.reading(key).is_err());
        }
        assert!(set.groups.is_empty());
    }
}

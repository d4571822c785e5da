//! The files that processes have mapped.

use std::collections::{BTreeMap, HashMap};

/// Maximum number of mappings that forks copy.
const MOST_COPIES: usize = 1 << 22;

/// A file: its path and build id.
pub(crate) type FileKey = (String, Option<Vec<u8>>);

/// A mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Map {
    end: u64,
    /// The offset in the file of the mapping's first byte.
    offset: u64,
    file: u32,
}

/// Mappings of all processes.
#[derive(Debug, Default)]
pub(crate) struct Maps {
    processes: HashMap<i32, BTreeMap<u64, Map>>,
    files: Vec<FileKey>,
    ids: HashMap<FileKey, u32>,
    copies: usize,
}

impl Maps {
    /// Maps `length` bytes at `start`, which replace older mappings.
    pub(crate) fn map(&mut self, pid: i32, start: u64, length: u64, offset: u64, file: FileKey) {
        let Some(file) = self.file(file) else {
            return;
        };
        let end = start.saturating_add(length);
        if start == end {
            return;
        }
        let maps = self.processes.entry(pid).or_default();
        // At most the last mapping that begins before `end` extends beyond it.
        let beyond = maps.range(..end).next_back().map(|(&at, &map)| (at, map)).filter(|(_, map)| map.end > end);
        if let Some((_, before)) = maps.range_mut(..start).next_back() {
            before.end = before.end.min(start);
        }
        let replaced: Vec<u64> = maps.range(start..end).map(|(&at, _)| at).collect();
        for at in replaced {
            maps.remove(&at);
        }
        if let Some((at, map)) = beyond {
            maps.insert(end, Map { offset: map.offset.wrapping_add(end - at), ..map });
        }
        maps.insert(start, Map { end, offset, file });
    }

    fn file(&mut self, file: FileKey) -> Option<u32> {
        if let Some(&id) = self.ids.get(&file) {
            return Some(id);
        }
        let id = u32::try_from(self.files.len()).ok()?;
        self.files.push(file.clone());
        self.ids.insert(file, id);
        Some(id)
    }

    /// Copies the mappings of a process that forks. Returns whether the copies of all forks are within the limit.
    #[must_use]
    pub(crate) fn fork(&mut self, parent: i32, child: i32) -> bool {
        if parent == child {
            return true;
        }
        if let Some(maps) = self.processes.get(&parent) {
            self.copies += maps.len();
            if self.copies > MOST_COPIES {
                return false;
            }
            self.processes.insert(child, maps.clone());
        }
        true
    }

    /// Removes the mappings of a process that executes a new program, or exits.
    pub(crate) fn clear(&mut self, pid: i32) {
        self.processes.remove(&pid);
    }

    /// Removes the mappings of all processes.
    pub(crate) fn clear_all(&mut self) {
        self.processes.clear();
        self.copies = 0;
    }

    /// Returns the file at an address, and the offset in the file.
    pub(crate) fn at(&self, pid: i32, address: u64) -> Option<(u32, u64)> {
        let (&start, map) = self.processes.get(&pid)?.range(..=address).next_back()?;
        (address < map.end).then(|| (map.file, map.offset.wrapping_add(address - start)))
    }

    /// Returns a file's path and build id.
    pub(crate) fn get(&self, file: u32) -> Option<&FileKey> {
        self.files.get(file as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str) -> FileKey {
        (name.to_owned(), None)
    }

    fn at(maps: &Maps, pid: i32, address: u64) -> Option<(&str, u64)> {
        let (file, offset) = maps.at(pid, address)?;
        maps.get(file).map(|(path, _)| (path.as_str(), offset))
    }

    #[test]
    fn new_mapping_replaces_the_middle_of_an_old_one() {
        let mut maps = Maps::default();
        maps.map(1, 0x1000, 0x5000, 0x100, file("old"));
        maps.map(1, 0x2000, 0x1000, 0, file("new"));
        assert_eq!(at(&maps, 1, 0x1fff), Some(("old", 0x10ff)));
        assert_eq!(at(&maps, 1, 0x2000), Some(("new", 0)));
        assert_eq!(at(&maps, 1, 0x3000), Some(("old", 0x2100)));
        assert_eq!(at(&maps, 1, 0x6000), None);
        maps.map(1, 0, u64::MAX, 0, file("all"));
        assert_eq!(at(&maps, 1, 0x3000), Some(("all", 0x3000)));
        assert_eq!(at(&maps, 2, 0x3000), None);
    }

    #[test]
    fn fork_copies_mappings_and_exit_removes_them() {
        let mut maps = Maps::default();
        maps.map(1, 0x1000, 0x1000, 0, file("a"));
        assert!(maps.fork(1, 2) && maps.fork(1, 1) && maps.fork(7, 8));
        maps.clear(1);
        assert_eq!((at(&maps, 1, 0x1000), at(&maps, 2, 0x1000)), (None, Some(("a", 0))));
    }

    #[test]
    fn copies_of_forks_are_limited() {
        let mut maps = Maps::default();
        maps.map(1, 0x1000, 0x1000, 0, file("a"));
        maps.copies = MOST_COPIES;
        assert!(!maps.fork(1, 2));
    }
}

//! The readings of a set's counters. They are found by key without a search, because each task switch looks up many of
//! them.

use std::io;

use crate::source::{CounterKey, Reading};

/// Number of bits of a slot's index. They are the low bits of a key; the key's other bits count the slot's uses.
const INDEX_BITS: u32 = 20;
/// Maximum number of slots. By default, Linux lets a process open this many descriptors (`fs.nr_open`).
const MOST: usize = 1 << INDEX_BITS;

#[derive(Debug, Default)]
pub(super) struct Readings {
    slots: Vec<Slot>,
    /// Free slots.
    free: Vec<CounterKey>,
}

#[derive(Debug)]
struct Slot {
    key: CounterKey,
    /// `None` if the host could not read the counter.
    reading: Option<Reading>,
}

impl Readings {
    /// Allocates an unused key. A released key is reused after 4,096 uses of its slot at the
    /// earliest.
    pub(super) fn take(&mut self) -> io::Result<CounterKey> {
        if let Some(key) = self.free.pop() {
            return Ok(key);
        }
        let exhausted = || io::Error::from_raw_os_error(libc::EMFILE);
        let index = Some(self.slots.len()).filter(|&index| index < MOST);
        let index = index.and_then(|index| u32::try_from(index).ok());
        let key = CounterKey(index.ok_or_else(exhausted)?);
        self.slots.push(Slot { key, reading: None });
        Ok(key)
    }

    /// Releases a key.
    pub(super) fn release(&mut self, key: CounterKey) {
        if let Some(slot) = self.slot(key) {
            slot.key = CounterKey(key.0.wrapping_add(1 << INDEX_BITS));
            slot.reading = None;
            let next = slot.key;
            self.free.push(next);
        }
    }

    /// Stores a reading. `None` means that the host could not read the counter.
    pub(super) fn set(&mut self, key: CounterKey, reading: Option<Reading>) {
        if let Some(slot) = self.slot(key) {
            slot.reading = reading;
        }
    }

    /// Returns the last stored reading. Also returns `None` for an unknown key.
    pub(super) fn get(&self, key: CounterKey) -> Option<Reading> {
        let slot = self.slots.get(index(key)).filter(|slot| slot.key == key)?;
        slot.reading
    }

    fn slot(&mut self, key: CounterKey) -> Option<&mut Slot> {
        let slot = self.slots.get_mut(index(key));
        slot.filter(|slot| slot.key == key)
    }
}

fn index(key: CounterKey) -> usize {
    key.0 as usize % MOST
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOME: Reading = Reading { value: 1, enabled: 2, running: 2 };

    #[test]
    fn released_key_is_unknown_while_its_slot_is_used_again() {
        let mut readings = Readings::default();
        let first = readings.take().unwrap();
        readings.set(first, Some(SOME));
        assert_eq!(readings.get(first), Some(SOME));
        readings.release(first);
        assert_eq!(readings.get(first), None);
        let second = readings.take().unwrap();
        assert_ne!(first, second);
        assert_eq!(readings.slots.len(), 1, "the slot is reused");
        assert_eq!(readings.get(second), None, "nothing read yet");
        readings.set(first, Some(SOME));
        readings.release(first);
        assert_eq!(readings.get(second), None, "a stale key changes nothing");
        assert_ne!(readings.take().unwrap(), second, "and releases nothing");
    }

    #[test]
    fn key_repeats_after_4096_uses_of_its_slot() {
        let mut readings = Readings::default();
        let first = readings.take().unwrap();
        let mut key = first;
        for _ in 1..4096 {
            readings.release(key);
            key = readings.take().unwrap();
            assert_ne!(key, first);
        }
        readings.release(key);
        assert_eq!(readings.take().unwrap(), first);
    }

    #[test]
    fn keys_run_out_with_emfile() {
        let mut readings = Readings::default();
        for index in 0..MOST {
            assert_eq!(readings.take().unwrap().0 as usize, index);
        }
        let refused = readings.take().unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EMFILE));
    }
}

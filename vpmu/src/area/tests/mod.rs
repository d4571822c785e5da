//! Tests of areas. A vector stands in for the guest's pages, and each test acts as the reader.

mod properties;
mod rules;

use std::cell::Cell;
use std::sync::atomic::Ordering;

use super::device_owned::DeviceOwned;
use super::driver_owned::DriverOwned;
use super::writer::{AUX_HEAD, AUX_TAIL, Refused, Window, Writer};
use super::*;
use crate::pages::{Pages, Unwritable};

const PAGE: u64 = PAGE_SIZE as u64;
/// A value that tests never write.
const UNTOUCHED: u64 = u64::MAX;

/// The memory of one area, and the head and the tail. The writer and the reader share all of it.
struct Fake {
    data: Vec<u64>,
    head: Cell<u64>,
    tail: Cell<u64>,
    /// Number of reads of the tail.
    looks: Cell<u64>,
    /// The place in the area where memory is missing, if any.
    hole: Option<u64>,
}

impl Fake {
    fn new(pages: u64) -> Self {
        let words = usize::try_from(pages * PAGE / 8).expect("small");
        Self { data: vec![UNTOUCHED; words], head: Cell::new(0), tail: Cell::new(0), looks: Cell::new(0), hole: None }
    }

    fn size(&self) -> u64 {
        self.data.len() as u64 * 8
    }

    fn index(&self, position: u64) -> usize {
        usize::try_from(position % self.size() / 8).expect("small")
    }

    /// The words from `position` on.
    fn words(&self, position: u64, len: u64) -> Vec<u64> {
        (0..len / 8).map(|word| self.data[self.index(position.wrapping_add(word * 8))]).collect()
    }
}

impl Pages for Fake {
    fn load(&self, field: usize, order: Ordering) -> Result<u64, Unwritable> {
        assert_eq!((field, order), (AUX_TAIL, Ordering::Acquire));
        self.looks.set(self.looks.get() + 1);
        Ok(self.tail.get())
    }

    fn store(&self, field: usize, value: u64, order: Ordering) -> Result<(), Unwritable> {
        match field {
            AUX_TAIL => self.tail.set(value),
            _ => {
                assert_eq!((field, order), (AUX_HEAD, Ordering::Release));
                self.head.set(value);
            }
        }
        Ok(())
    }

    fn store_half(&self, field: usize, _: u32, _: Ordering) -> Result<(), Unwritable> {
        panic!("an area accesses only head and tail: {field}");
    }

    fn fence(&self, _: Ordering) {}

    fn put(&mut self, position: u64, words: &[u64]) -> Result<(), Unwritable> {
        let end = position % self.size() + size_of_val(words) as u64;
        if self.hole.is_some_and(|hole| end > hole) {
            return Err(Unwritable::NoPage);
        }
        for (at, &word) in (0..).zip(words) {
            let index = self.index(position.wrapping_add(at * 8));
            self.data[index] = word;
        }
        Ok(())
    }
}

/// `len` bytes of words with `value`.
fn filled(value: u64, len: u64) -> Vec<u64> {
    vec![value; usize::try_from(len / 8).expect("small")]
}

fn entry(words: &[u64]) -> Entry<'_> {
    Entry { skip: 0, parts: [&[], words], collision: false }
}

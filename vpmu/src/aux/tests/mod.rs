//! An area whose pages are a vector and whose reader does as the test says.

mod properties;
mod rules;

use std::cell::Cell;
use std::sync::atomic::Ordering;

use super::driven::Driven;
use super::kept::Kept;
use super::writer::{AUX_HEAD, AUX_TAIL, Refused, Window, Writer};
use super::*;
use crate::pages::{Pages, Unwritable};

const PAGE: u64 = PAGE_SIZE as u64;
/// What no test writes.
const UNTOUCHED: u64 = u64::MAX;

/// Memory of one area, and the two words that writer and reader share.
struct Fake {
    data: Vec<u64>,
    head: Cell<u64>,
    tail: Cell<u64>,
    /// Times that the tail was looked at.
    looks: Cell<u64>,
    /// From this byte of the area on there is no memory.
    hole: Option<u64>,
}

impl Fake {
    fn new(pages: u64) -> Self {
        let words = usize::try_from(pages * PAGE / 8).expect("small");
        Self {
            data: vec![UNTOUCHED; words],
            head: Cell::new(0),
            tail: Cell::new(0),
            looks: Cell::new(0),
            hole: None,
        }
    }

    fn size(&self) -> u64 {
        self.data.len() as u64 * 8
    }

    fn index(&self, position: u64) -> usize {
        usize::try_from(position % self.size() / 8).expect("small")
    }

    /// The words from `position` on.
    fn words(&self, position: u64, len: u64) -> Vec<u64> {
        (0..len / 8)
            .map(|word| self.data[self.index(position.wrapping_add(word * 8))])
            .collect()
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
        panic!("nothing but head and tail is an area's: {field}");
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

/// `len` bytes, each word of them `value`.
fn filled(value: u64, len: u64) -> Vec<u64> {
    vec![value; usize::try_from(len / 8).expect("small")]
}

fn entry(words: &[u64]) -> Entry<'_> {
    Entry {
        skip: 0,
        parts: [&[], words],
        collision: false,
    }
}

//! Reads an event's count without a system call, from the CPU's counter and the event's metadata page.
//!
//! The protocol is documented in `linux/perf_event.h` at `perf_event_mmap_page`. It works only on the thread that the
//! event counts, because the page refers to a counter of the CPU that runs this thread, and the kernel updates the page
//! when it assigns the counter to the event or takes it away.

use std::sync::atomic::{Ordering, fence};

use vpmu_perf::Mapping;
use vpmu_perf::page::{
    CAP_USER_RDPMC, CAP_USER_TIME, CAP_USER_TIME_SHORT, CAPABILITIES, LOCK_INDEX, OFFSET, TIME_CYCLES, TIME_ENABLED,
    TIME_MASK, TIME_OFFSET, TIME_RUNNING, WIDTH_SHIFT_MULT,
};
use vpmu_perf::record::halves;

use crate::arch;
use crate::source::Reading;

/// Maximum number of attempts to read the page. A concurrent update makes an attempt fail. After the last attempt, the
/// caller makes a system call instead.
const TRIES: usize = 4;

/// A metadata page, and the CPU on which the reader runs.
pub(super) trait Metadata {
    /// The aligned word at byte `offset` of the page.
    fn word(&self, offset: usize) -> u64;
    /// Returns the value of the performance counter with RDPMC number `index`. `None` if user space cannot read it.
    fn counter(&self, index: u32) -> Option<u64>;
    /// The time stamp counter now.
    fn tsc(&self) -> u64;
}

/// The metadata page of an event that counts the calling thread.
impl Metadata for Mapping {
    fn word(&self, offset: usize) -> u64 {
        self.load(offset, Ordering::Relaxed)
    }

    fn counter(&self, index: u32) -> Option<u64> {
        arch::performance_counter(index)
    }

    fn tsc(&self) -> u64 {
        arch::ticks()
    }
}

/// Returns the event's current count and times. `None` if only the kernel can read them: the event currently has no
/// counter, the page does not permit such reads, or the page keeps changing.
pub(super) fn read(event: &impl Metadata) -> Option<Reading> {
    for _ in 0..TRIES {
        let before = event.word(LOCK_INDEX);
        fence(Ordering::Acquire);
        let (lock, index) = halves(before);
        let reading = snapshot(event, index)?;
        fence(Ordering::Acquire);
        if event.word(LOCK_INDEX) == before && lock % 2 == 0 {
            return Some(reading);
        }
    }
    None
}

/// Reads the page once. The result is valid only if the page's lock did not change during the read.
fn snapshot(event: &impl Metadata, index: u32) -> Option<Reading> {
    let capabilities = event.word(CAPABILITIES);
    let needed = CAP_USER_RDPMC | CAP_USER_TIME;
    if capabilities & needed != needed {
        return None;
    }
    let [width, shift, _, _] = quarters(event.word(WIDTH_SHIFT_MULT));
    let (_, mult) = halves(event.word(WIDTH_SHIFT_MULT));
    let mut ticks = event.tsc();
    if capabilities & CAP_USER_TIME_SHORT != 0 {
        let known = event.word(TIME_CYCLES);
        ticks = known.wrapping_add(ticks.wrapping_sub(known) & event.word(TIME_MASK));
    }
    let since = nanoseconds(ticks, shift, mult)?.wrapping_add(event.word(TIME_OFFSET));
    let counter = event.counter(index.checked_sub(1)?)?;
    Some(Reading {
        value: event.word(OFFSET).wrapping_add(extended(counter, width)?),
        enabled: event.word(TIME_ENABLED).wrapping_add(since),
        running: event.word(TIME_RUNNING).wrapping_add(since),
    })
}

/// Returns `(ticks * mult) >> shift`, modulo 2^64. `None` for a shift that the kernel never uses.
fn nanoseconds(ticks: u64, shift: u16, mult: u32) -> Option<u64> {
    let shift = u32::from(shift);
    let quotient = ticks.checked_shr(shift)?;
    let remainder = ticks & !(u64::MAX << shift);
    let low = remainder.wrapping_mul(mult.into()) >> shift;
    Some(quotient.wrapping_mul(mult.into()).wrapping_add(low))
}

/// The low `width` bits of `counter`, sign-extended.
fn extended(counter: u64, width: u16) -> Option<u64> {
    let unused = u64::BITS.checked_sub(width.into())?;
    let counter = counter.checked_shl(unused)?.cast_signed();
    Some((counter >> unused).cast_unsigned())
}

fn quarters(word: u64) -> [u16; 4] {
    let [a, b, c, d, e, f, g, h] = word.to_ne_bytes();
    [[a, b], [c, d], [e, f], [g, h]].map(u16::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use proptest::prelude::*;

    use super::*;

    /// The fields of a page. A test sets them.
    #[derive(Debug, Clone, Copy)]
    struct Fields {
        lock: u32,
        index: u32,
        offset: u64,
        enabled: u64,
        running: u64,
        capabilities: u64,
        width: u16,
        shift: u16,
        mult: u32,
        time_offset: u64,
        cycles: u64,
        mask: u64,
        counter: u64,
    }

    /// The page of an event that has the counter with RDPMC number 3. The counter has 48 bits. A tick of the time
    /// stamp counter takes half a nanosecond.
    const PLAIN: Fields = Fields {
        lock: 8,
        index: 4,
        offset: 1000,
        enabled: 70,
        running: 50,
        capabilities: CAP_USER_RDPMC | CAP_USER_TIME,
        width: 48,
        shift: 10,
        mult: 512,
        time_offset: 0_u64.wrapping_sub(500),
        cycles: 0,
        mask: 0,
        counter: 77,
    };
    /// 100 ns after the page was updated.
    const NOW: u64 = 1200;

    /// A model of a metadata page that the kernel updates during reads. Each read of the counter changes the page to
    /// the next element of `fields`, until only one element is left.
    struct Page {
        fields: RefCell<Vec<Fields>>,
        reads: Cell<usize>,
    }

    impl Page {
        fn of(fields: &[Fields]) -> Self {
            Self { fields: RefCell::new(fields.iter().rev().copied().collect()), reads: Cell::new(0) }
        }

        fn now(&self) -> Fields {
            *self.fields.borrow().last().expect("one is left")
        }
    }

    impl Metadata for Page {
        fn word(&self, offset: usize) -> u64 {
            let now = self.now();
            let join = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
            match offset {
                8 => join(now.lock, now.index),
                16 => now.offset,
                24 => now.enabled,
                32 => now.running,
                40 => now.capabilities,
                48 => join(u32::from(now.shift) << 16 | u32::from(now.width), now.mult),
                56 => now.time_offset,
                80 => now.cycles,
                88 => now.mask,
                other => panic!("no field at {other}"),
            }
        }

        fn counter(&self, index: u32) -> Option<u64> {
            let now = self.now();
            assert_eq!(index, now.index - 1);
            self.reads.set(self.reads.get() + 1);
            let mut fields = self.fields.borrow_mut();
            if fields.len() > 1 {
                fields.pop();
            }
            Some(now.counter)
        }

        fn tsc(&self) -> u64 {
            NOW
        }
    }

    fn read_of(fields: Fields) -> Option<Reading> {
        read(&Page::of(&[fields]))
    }

    #[test]
    fn count_is_the_offset_and_the_counter_and_times_go_on_since_the_update() {
        let expected = Reading { value: 1077, enabled: 170, running: 150 };
        assert_eq!(read_of(PLAIN), Some(expected));
    }

    #[test]
    fn page_without_a_counter_or_a_capability_is_left_to_the_kernel() {
        let refused = [
            Fields { index: 0, ..PLAIN },
            Fields { capabilities: CAP_USER_TIME, ..PLAIN },
            Fields { capabilities: CAP_USER_RDPMC, ..PLAIN },
            Fields { width: 0, ..PLAIN },
            Fields { width: 65, ..PLAIN },
            Fields { shift: 64, ..PLAIN },
            Fields { lock: 7, ..PLAIN },
        ];
        for fields in refused {
            assert_eq!(read_of(fields), None, "{fields:?}");
        }
    }

    #[test]
    fn counter_is_sign_extended_from_its_width() {
        let cases = [
            (48, 0xffff_ffff_fff0, 984),
            (48, 0x7fff_ffff_ffff, 1000 + 0x7fff_ffff_ffff),
            (48, 0xabcd_0000_0000_0010, 1016),
            (32, 0xffff_ffff, 999),
            (64, u64::MAX, 999),
            (1, 1, 999),
        ];
        for (width, counter, value) in cases {
            let fields = Fields { width, counter, ..PLAIN };
            assert_eq!(read_of(fields).map(|r| r.value), Some(value), "{fields:?}");
        }
        let wrapped = Fields { offset: u64::MAX, counter: 5, ..PLAIN };
        assert_eq!(read_of(wrapped).map(|r| r.value), Some(4));
    }

    #[test]
    fn short_clock_is_completed_from_the_page() {
        let fields = Fields {
            capabilities: PLAIN.capabilities | CAP_USER_TIME_SHORT,
            // The clock has only 8 bits. At tick 1200 it shows 0xb0. When the page was updated, the clock showed 0x10,
            // so 0xa0 ticks have passed since then.
            cycles: 0x1_0010,
            mask: 0xff,
            time_offset: 0_u64.wrapping_sub(0x1_0010 / 2),
            ..PLAIN
        };
        let read = read_of(fields).unwrap();
        assert_eq!((read.enabled, read.running), (70 + 0x50, 50 + 0x50));
    }

    #[test]
    fn page_that_changes_under_the_reader_is_read_again() {
        let after = Fields { lock: 10, index: 2, offset: 5000, enabled: 90, running: 80, counter: 1, ..PLAIN };
        let page = Page::of(&[PLAIN, after]);
        let expected = Reading { value: 5001, enabled: 190, running: 180 };
        assert_eq!(read(&page), Some(expected));
        assert_eq!(page.reads.get(), 2);
        let lost = Fields { index: 0, ..after };
        assert_eq!(read(&Page::of(&[PLAIN, lost])), None);
    }

    #[test]
    fn page_that_never_rests_is_left_to_the_kernel() {
        let restless: Vec<_> = (0..100).map(|n| Fields { lock: 2 * n, ..PLAIN }).collect();
        let page = Page::of(&restless);
        assert_eq!(read(&page), None);
        assert_eq!(page.reads.get(), TRIES);
    }

    proptest! {
        #[test]
        fn ticks_convert_as_in_the_kernel(ticks in any::<u64>(), shift in 0_u16..=32, mult in any::<u32>()) {
            let exact = (u128::from(ticks) * u128::from(mult)) >> shift;
            let low = u64::try_from(exact & u128::from(u64::MAX)).expect("masked");
            prop_assert_eq!(nanoseconds(ticks, shift, mult), Some(low));
        }

        #[test]
        fn differences_survive_the_width(start in any::<u64>(), more in 0_u64..1 << 47) {
            // When the kernel reads the counter, it stores on the page the count minus the sign-extended counter.
            let seen = extended(start, 48).expect("a width");
            let now = extended(start.wrapping_add(more), 48).expect("a width");
            let grown = now.wrapping_sub(seen) & ((1 << 48) - 1);
            prop_assert_eq!(grown, more);
        }
    }
}

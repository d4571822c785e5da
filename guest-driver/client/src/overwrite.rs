//! A ring in overwrite mode: it always holds the latest records. The ring is written backwards: the newest record
//! begins at the head and older ones follow it. So a reader can find the start of every whole record.

use std::sync::atomic::Ordering;

use vpmu_perf::Mapping;
use vpmu_perf::page::DATA_HEAD;

use crate::event::{Event, EventError};
use crate::history;
use crate::record::{Layout, Record};
use crate::ring::{self, PAGE_SIZE, RingError};

/// An error of a snapshot.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OverwriteError {
    /// The ring cannot be mapped.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// The writer cannot be paused or resumed.
    #[error(transparent)]
    Event(#[from] EventError),
    /// A ring written forwards: the start of its oldest record is unknown.
    #[error("a ring in overwrite mode can be read only if its event was opened to write backwards")]
    Forward,
}

/// A ring in overwrite mode.
#[derive(Debug)]
pub struct Overwrite<'a> {
    event: &'a Event,
    mapping: Mapping,
    layout: Layout,
}

impl<'a> Overwrite<'a> {
    /// Maps the metadata page and 2^`pages_log2` data pages of an event opened with
    /// [`EventAttr::backward`](crate::EventAttr::backward), to keep the newest records for a snapshot.
    ///
    /// # Errors
    /// See [`Event::map`]; [`OverwriteError::Forward`].
    pub fn map(event: &'a Event, pages_log2: u32) -> Result<Self, OverwriteError> {
        if !event.is_backward() {
            return Err(OverwriteError::Forward);
        }
        let pages = 1usize.checked_shl(pages_log2).ok_or(RingError::TooLarge(pages_log2))?;
        let mapping = ring::map(event.map_fd(pages)?, pages, Mapping::new_read_only)?;
        Ok(Self { event, mapping, layout: event.layout() })
    }

    /// Copies the records in the ring, oldest first. The writer is paused during the copy, so
    /// overflows during the copy leave no records.
    ///
    /// # Errors
    /// [`OverwriteError`]; [`RingError::Record`] for a record that cannot be parsed.
    pub fn snapshot(&self) -> Result<Vec<Record>, OverwriteError> {
        self.event.pause_output(true)?;
        let records = records(&self.mapping, &self.layout);
        self.event.pause_output(false)?;
        Ok(records?)
    }
}

/// Returns the whole records in the ring, oldest first.
fn records(mapping: &Mapping, layout: &Layout) -> Result<Vec<Record>, RingError> {
    let head = mapping.load(DATA_HEAD, Ordering::Acquire);
    let size = (mapping.len() - PAGE_SIZE) as u64;
    // The head counts down from zero.
    let held = history::copy(mapping, head, head.wrapping_neg().min(size));
    let mut records = history::walk(&held, head, layout).map(|(record, _)| record).collect::<Result<Vec<_>, _>>()?;
    records.reverse();
    Ok(records)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attr::{EventAttr, SAMPLE_IP};
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    /// Writes backwards, as the host does: each record in front of the previous one.
    struct Writer {
        file: File,
        head: u64,
    }

    impl Writer {
        const SIZE: u64 = PAGE_SIZE as u64;

        fn new() -> (Self, Mapping) {
            let file = tempfile::tempfile().unwrap();
            file.set_len(2 * Self::SIZE).unwrap();
            let mapping = Mapping::new_read_only(file.as_fd(), 2 * PAGE_SIZE).unwrap();
            (Self { file, head: 0 }, mapping)
        }

        fn record(&mut self, words: &[u64]) {
            self.head = self.head.wrapping_sub(8 * words.len() as u64);
            for (index, word) in words.iter().enumerate() {
                let position = self.head.wrapping_add(8 * index as u64) % Self::SIZE;
                let offset = Self::SIZE + position;
                self.file.write_all_at(&word.to_ne_bytes(), offset).unwrap();
            }
            let head = self.head.to_ne_bytes();
            self.file.write_all_at(&head, DATA_HEAD as u64).unwrap();
        }
    }

    fn ips(mapping: &Mapping) -> Vec<u64> {
        let layout = Layout { sample_type: SAMPLE_IP, ..Layout::default() };
        records(mapping, &layout)
            .unwrap()
            .into_iter()
            .map(|record| match record {
                Record::Sample(sample) => sample.ip,
                record => panic!("{record:?}"),
            })
            .collect()
    }

    #[test]
    fn overwrite_ring_yields_latest_records_oldest_first() {
        let (mut writer, mapping) = Writer::new();
        assert!(ips(&mapping).is_empty());
        // A page holds 170 whole records of 24 bytes and 16 bytes of the next.
        for ip in 0..1000 {
            writer.record(&[24 << 48 | 9, ip, ip]);
            let oldest = (ip + 1).saturating_sub(170);
            assert_eq!(ips(&mapping), (oldest..=ip).collect::<Vec<u64>>());
        }
    }

    #[test]
    fn ring_written_forwards_is_refused() {
        let forward = Event::of_perf(tempfile::tempfile().unwrap().into(), &EventAttr::new(0, 0));
        assert!(matches!(Overwrite::map(&forward, 0), Err(OverwriteError::Forward)));
    }

    #[test]
    fn sizes_that_cannot_be_end_the_reading() {
        for size in [0, 4, 0xfff8] {
            let (mut writer, mapping) = Writer::new();
            writer.record(&[size << 48 | 9, 1, 2]);
            writer.record(&[24 << 48 | 9, 7, 7]);
            assert_eq!(ips(&mapping), [7], "{size}");
        }
    }
}

//! Writes the records of a device's persistent events as a `perf.data` file that stock perf reads
//! without options.
//!
//! [`histories`] reads the records from the device; [`Recording`] checks them and writes the file.
//! A guest can write to its rings, so records are not copied: each is checked and rebuilt. The file
//! describes only the guest, not the host, so an operator can share it.
//!
//! ```no_run
//! # fn dump(vpmu: &vpmu::Vpmu) -> std::io::Result<()> {
//! let histories = vpmu_recorder::histories(vpmu, |_| true, 64 << 20);
//! let mut file = std::fs::File::create("perf.data")?;
//! let summary = vpmu_recorder::Recording::new(&histories).write(&mut file)?;
//! println!("{} samples of {} events", summary.samples, summary.events);
//! # Ok(())
//! # }
//! ```

mod record;
mod stream;
mod symbols;

use std::collections::BTreeSet;
use std::io::{self, Write};

use vpmu::{History, PersistError, PersistentStatus, Vpmu, abi};
use vpmu_perfdata::{FINISHED_ROUND, Layout, Record};

use crate::stream::Stream;
use crate::symbols::Function;

pub use crate::symbols::{Symbols, SymbolsError};

/// Maximum number of kernel addresses to look up. The limit is necessary because a guest can forge any number of
/// addresses.
const MOST_NAMED: usize = 16_384;
/// Size in bytes of the shortest sample in the file.
const LEAST_OF_RECORD: usize = 64;

/// Totals of a recording.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Summary {
    /// Number of persistent events that sample. Events that only count are not in the file.
    pub events: usize,
    /// Number of samples of these events.
    pub samples: u64,
    /// Overflows without a record, as counted by the device.
    pub lost: u64,
    /// Number of records that were left out: the guest damaged them, they belong to another event that writes to the
    /// same ring, or they are too long for the file.
    pub left_out: u64,
    /// Bytes written.
    pub bytes: u64,
}

/// The content of one `perf.data` file.
#[derive(Debug)]
pub struct Recording<'a> {
    streams: Vec<Stream<'a>>,
    /// Kernel addresses in the records, at most [`MOST_NAMED`].
    addresses: BTreeSet<u64>,
    functions: Vec<Function>,
}

impl<'a> Recording<'a> {
    /// Scans the histories of sampling events. Omits events that only count, because perf prints only
    /// the fields that all events of a file have.
    #[must_use]
    pub fn new(histories: &'a [History]) -> Self {
        let mut addresses = BTreeSet::new();
        let mut see = |address| {
            if addresses.len() < MOST_NAMED {
                addresses.insert(address);
            }
        };
        let sampling = histories.iter().filter(|history| history.event.rate.is_some());
        let streams = sampling.map(|history| Stream::new(history, &mut see)).collect();
        Self { streams, addresses, functions: Vec::new() }
    }

    /// Looks up the guest's kernel functions at the addresses in the records. [`Recording::write`] then adds their
    /// names to the file.
    ///
    /// # Errors
    /// [`SymbolsError`]; the recording can still be written, without names.
    pub fn name_functions(&mut self, symbols: &Symbols) -> Result<(), SymbolsError> {
        self.functions = symbols.covering(&self.addresses)?;
        Ok(())
    }

    /// Writes the whole file to `out`, from the first byte to the last.
    ///
    /// # Errors
    /// Errors of `out`.
    pub fn write(&self, out: &mut impl Write) -> io::Result<Summary> {
        let bytes = self.write_file(out)?;
        let streams = self.streams.iter();
        Ok(Summary {
            events: self.streams.len(),
            samples: streams.clone().map(|stream| stream.samples).sum(),
            lost: streams.clone().map(|stream| stream.event.lost).sum(),
            left_out: streams.map(|stream| stream.left_out).sum(),
            bytes,
        })
    }

    /// Writes the file and returns its size in bytes.
    fn write_file(&self, out: &mut impl Write) -> io::Result<u64> {
        let events = self.streams.iter().map(|stream| stream.form.event.clone()).collect();
        let layout = Layout { events, arch: std::env::consts::ARCH.to_owned(), ..Layout::default() };
        let mut round = Vec::new();
        FINISHED_ROUND.append(&mut round, &[]);
        let mut size = self.streams.iter().map(|stream| stream.size).sum::<u64>() + round.len() as u64;
        self.functions(|function| {
            size += function.len() as u64;
            Ok(())
        })?;
        let (head, tail) = (layout.head(size), layout.tail(size));
        out.write_all(&head)?;
        self.functions(|function| out.write_all(function))?;
        stream::in_order(&self.streams, |record| out.write_all(record))?;
        out.write_all(&round)?;
        out.write_all(&tail)?;
        Ok(head.len() as u64 + size + tail.len() as u64)
    }

    /// Calls `put` with a record for each function. These records precede all others in the file.
    fn functions(&self, mut put: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        let Some(first) = self.streams.first() else {
            return Ok(());
        };
        let trailer = first.form.trailer(0);
        let mut bytes = Vec::new();
        for function in &self.functions {
            bytes.clear();
            Record::function(function.start, function.size, &function.name).append(&mut bytes, &trailer);
            put(&bytes)?;
        }
        Ok(())
    }
}

/// Returns the `wanted` persistent events of `vpmu` with the records in their rings. An event whose ring
/// cannot be read is returned without records.
///
/// `most` limits the total size in bytes of the records from rings in guest memory. Each record counts with its size in
/// the ring, but at least with the size of the shortest sample in the file. The limit is necessary because any number
/// of rings can use the same pages, and short records become longer in the file. A ring larger than `most` is not read.
#[must_use]
pub fn histories(vpmu: &Vpmu, wanted: impl Fn(&PersistentStatus) -> bool, most: u64) -> Vec<History> {
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    let events = vpmu.persistent().into_iter().filter(|event| wanted(event));
    let history = |event: PersistentStatus| {
        let pages = event.pages.filter(|_| !event.window).unwrap_or(0);
        if pages as usize * abi::PAGE_SIZE > most {
            too_much(&event);
            return Some(without_records(event));
        }
        match vpmu.history(event.id) {
            Ok(history) => Some(history),
            // The event ended after it was listed.
            Err(PersistError::NoSuch(_)) => None,
            Err(PersistError::NoRing(_)) => Some(without_records(event)),
            Err(error) => {
                log::warn!("`{}` is recorded without samples: {error}", event.name);
                Some(without_records(event))
            }
        }
    };
    bounded(events.filter_map(history), most)
}

fn without_records(event: PersistentStatus) -> History {
    History { event, records: Vec::new() }
}

fn too_much(event: &PersistentStatus) {
    log::warn!("`{}` is recorded without samples: the limit on records in guest memory is reached", event.name);
}

/// Returns how many bytes an event's records count toward the limit of [`histories`]. If the ring is in the window, the
/// size of the ring is subtracted, because the operator chose that size.
fn beyond_the_window(history: &History) -> usize {
    let pages = history.event.pages.filter(|_| history.event.window);
    let given = pages.map_or(0, |pages| pages as usize * abi::PAGE_SIZE);
    let records = history.iter();
    let in_file: usize = records.map(|record| record.len().max(LEAST_OF_RECORD)).sum();
    in_file.saturating_sub(given)
}

/// Keeps the records of each history if they fit in what remains of the `most` bytes. Otherwise drops them.
/// [`beyond_the_window`] returns the bytes that a history needs.
fn bounded(histories: impl Iterator<Item = History>, most: usize) -> Vec<History> {
    let mut room = most;
    let kept = histories.map(|history| {
        let Some(left) = room.checked_sub(beyond_the_window(&history)) else {
            too_much(&history.event);
            return without_records(history.event);
        };
        room = left;
        history
    });
    kept.collect()
}

#[cfg(test)]
mod tests;

//! Events on the calling thread, and their rings. The module does not interpret counts or records.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use libc::c_int;
use vpmu_perf::Mapping;
use vpmu_perf::bindings::perf_event_attr;
use vpmu_perf::call::{self, Scope, Target};
use vpmu_perf::page::DATA_HEAD;
use vpmu_perf::record::{Header, Records};

const PAGE: usize = 4096;
/// Number of data pages of a ring. This must be a power of two.
const DATA_PAGES: usize = 8;

/// One event on the calling thread.
#[derive(Debug)]
pub struct Event {
    file: File,
}

impl Event {
    /// Opens a disabled event on the calling thread, on any CPU.
    ///
    /// # Errors
    /// The error of perf_event_open(2).
    pub fn open(mut attr: perf_event_attr) -> io::Result<Self> {
        attr.set_disabled(1);
        let file = File::from(call::open(&attr, Target::HERE)?);
        Ok(Event { file })
    }

    /// Starts counting.
    pub fn enable(&self) -> io::Result<()> {
        call::enable(&self.file, Scope::Event)
    }

    /// Makes the event send `signal` to the calling thread whenever the event wakes its readers.
    pub fn announce(&self, signal: c_int) -> io::Result<()> {
        call::announce(&self.file, call::thread(), signal)
    }

    /// Stops counting.
    pub fn disable(&self) -> io::Result<()> {
        call::disable(&self.file, Scope::Event)
    }

    /// Reads the event's count.
    pub fn count(&self) -> io::Result<u64> {
        let mut count = [0; 8];
        (&self.file).read_exact(&mut count)?;
        Ok(u64::from_ne_bytes(count))
    }

    /// Maps a ring for the event's samples.
    pub fn ring(&self) -> io::Result<Ring> {
        let mapping = Mapping::new(self.file.as_fd(), (1 + DATA_PAGES) * PAGE)?;
        Ok(Ring { mapping })
    }
}

/// The pages that the kernel writes samples to.
#[derive(Debug)]
pub struct Ring {
    mapping: Mapping,
}

impl Ring {
    /// Returns the records written since the ring was mapped. Each record is a header and the words after it. Does not
    /// consume the records, so the kernel stops writing when the ring is full. The event must be disabled.
    #[must_use]
    pub fn records(&self) -> Vec<(Header, Vec<u64>)> {
        // Pairs with the kernel's release: the kernel stores the records before it moves the head.
        let head = self.mapping.load(DATA_HEAD, Ordering::Acquire);
        let word = |offset: u64| {
            let offset = usize::try_from(offset).unwrap_or(usize::MAX);
            let offset = PAGE.saturating_add(offset);
            self.mapping.load(offset, Ordering::Relaxed)
        };
        let size = (DATA_PAGES * PAGE) as u64;
        Records::new(&word, size, 0, head).map_while(Result::ok).map(|record| (record.header, record.body())).collect()
    }
}

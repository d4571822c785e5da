//! Writes memory to a file and reads it back. The file consists of all regions, one after the other, and a page with
//! the snapshot's name. Zero pages and pages that a diff omits are holes in the file.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use serde::{Deserialize, Serialize};
use vm_memory::{Bytes, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, MemoryRegionAddress};

use super::id::{DIGITS, Id};

/// Length of the last page in bytes.
pub(crate) const TRAILER: u64 = PAGE as u64;
pub(crate) const PAGE: usize = 4096;
/// Maximum number of bytes to copy at once. Before each copy, [`write()`] checks whether it must stop.
const STEP: usize = 1 << 20;
const ZEROS: [u8; PAGE] = [0; PAGE];
/// Before the snapshot's name, at the start of the last page. Zeros follow the name.
const MAGIC: &str = "vpmu machine memory ";

/// A run of pages in the file: the first page, and the number of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Run(pub(crate) u64, pub(crate) u64);

/// Whether `runs` are valid: none is empty, they ascend without overlapping, and all are within the first `pages`
/// pages.
pub(crate) fn are_valid(runs: &[Run], pages: u64) -> bool {
    let mut end = 0;
    runs.iter().all(|&Run(first, count)| {
        let valid = first >= end && count > 0;
        match first.checked_add(count).filter(|&end| end <= pages) {
            Some(next) => {
                end = next;
                valid
            }
            None => false,
        }
    })
}

/// The byte ranges of a region that are in `runs`, or the whole region if `runs` is `None`. The region starts at
/// `offset` in the file and has `length` bytes. The ranges are relative to the region, and their ends are exclusive.
fn parts(runs: Option<&[Run]>, offset: u64, length: u64) -> Vec<(u64, u64)> {
    let Some(runs) = runs else {
        return vec![(0, length)];
    };
    let page = PAGE as u64;
    let end = offset.saturating_add(length);
    let parts = runs.iter().filter_map(|&Run(first, count)| {
        let from = first.saturating_mul(page).max(offset);
        let to = first.saturating_add(count).saturating_mul(page).min(end);
        (from < to).then_some((from.saturating_sub(offset), to.saturating_sub(offset)))
    });
    parts.collect()
}

/// The reason why memory was not written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WriteError {
    /// The file cannot be written.
    #[error("cannot write the memory")]
    File(#[source] io::Error),
    /// Guest memory cannot be read, which is a bug.
    #[error("cannot read the guest's memory")]
    Memory(#[source] vm_memory::GuestMemoryError),
    /// The run is ending.
    #[error("the machine is ending")]
    Ends,
}

/// Writes `memories` to the empty file `file`. If `runs` is given, writes only the pages in `runs`. Stops with
/// [`WriteError::Ends`] when `goes_on` returns false. Returns the number of bytes written. Zero pages and the last page
/// do not count.
///
/// # Errors
/// [`WriteError`].
pub(crate) fn write(
    memories: &[&GuestMemoryMmap],
    file: &File,
    id: Id,
    runs: Option<&[Run]>,
    mut goes_on: impl FnMut() -> bool,
) -> Result<u64, WriteError> {
    let mut offset = 0u64;
    let mut written = 0u64;
    let mut buffer = vec![0; STEP];
    for region in memories.iter().flat_map(|memory| memory.iter()) {
        for (mut done, end) in parts(runs, offset, region.len()) {
            while done < end {
                if !goes_on() {
                    return Err(WriteError::Ends);
                }
                let bytes = step(&mut buffer, end - done);
                region.read_slice(bytes, MemoryRegionAddress(done)).map_err(WriteError::Memory)?;
                written += write_data(file, offset + done, bytes).map_err(WriteError::File)?;
                done += bytes.len() as u64;
            }
        }
        offset += region.len();
    }
    file.write_all_at(&trailer(id), offset).map_err(WriteError::File)?;
    Ok(written)
}

/// The first `left` bytes of `buffer`, or the whole buffer if it has fewer bytes.
fn step(buffer: &mut [u8], left: u64) -> &mut [u8] {
    let len = usize::try_from(left).map_or(buffer.len(), |left| left.min(buffer.len()));
    buffer.get_mut(..len).unwrap_or_default()
}

/// Reads the pages in `runs` from `file` into `memories`.
///
/// # Errors
/// The host's error.
pub(crate) fn apply(memories: &[&GuestMemoryMmap], file: &File, runs: &[Run]) -> io::Result<()> {
    let mut offset = 0;
    let mut buffer = vec![0; STEP];
    for region in memories.iter().flat_map(|memory| memory.iter()) {
        for (mut done, end) in parts(Some(runs), offset, region.len()) {
            while done < end {
                let bytes = step(&mut buffer, end - done);
                file.read_exact_at(bytes, offset + done)?;
                let written = region.write_slice(bytes, MemoryRegionAddress(done));
                written.map_err(io::Error::other)?;
                done += bytes.len() as u64;
            }
        }
        offset += region.len();
    }
    Ok(())
}

/// Writes the pages of `bytes` that are not all zero. Writes adjacent pages with one call.
fn write_data(file: &File, offset: u64, bytes: &[u8]) -> io::Result<u64> {
    let mut written = 0;
    let mut start = None;
    let mut at = 0;
    for page in bytes.chunks(PAGE) {
        let zeros = page == ZEROS.get(..page.len()).unwrap_or_default();
        match (zeros, start) {
            (false, None) => start = Some(at),
            (true, Some(from)) => {
                written += write_run(file, offset, bytes, from..at)?;
                start = None;
            }
            _ => {}
        }
        at += page.len();
    }
    if let Some(from) = start {
        written += write_run(file, offset, bytes, from..at)?;
    }
    Ok(written)
}

fn write_run(file: &File, offset: u64, bytes: &[u8], run: std::ops::Range<usize>) -> io::Result<u64> {
    let data = bytes.get(run.clone()).unwrap_or_default();
    file.write_all_at(data, offset + run.start as u64)?;
    Ok(data.len() as u64)
}

/// The last page of the memory file of the snapshot `id`.
fn trailer(id: Id) -> [u8; PAGE] {
    let mut trailer = ZEROS;
    let name = format!("{MAGIC}{id}\n");
    if let Some(place) = trailer.get_mut(..name.len()) {
        place.copy_from_slice(name.as_bytes());
    }
    trailer
}

/// Reads the snapshot's name from the memory file `file`, which has `length` bytes. Returns `None` if the last page is
/// not exactly as [`write()`] writes it.
///
/// # Errors
/// The host's error.
pub(crate) fn read_id(file: &File, length: u64) -> io::Result<Option<Id>> {
    let mut page = ZEROS;
    file.read_exact_at(&mut page, length.saturating_sub(TRAILER))?;
    let digits = page.get(MAGIC.len()..MAGIC.len() + DIGITS);
    let id = digits.and_then(|digits| str::from_utf8(digits).ok()?.parse().ok());
    Ok(id.filter(|id| trailer(*id) == page))
}

/// Returns the length of `memory` in bytes. In the file, `memory` has the same length.
pub(crate) fn length(memory: &GuestMemoryMmap) -> u64 {
    memory.iter().map(GuestMemoryRegion::len).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::GuestAddress;

    fn memory() -> GuestMemoryMmap {
        let ranges = [(GuestAddress(0), 3 << 20), (GuestAddress(1 << 32), 1 << 20)];
        GuestMemoryMmap::from_ranges(&ranges).expect("4 MiB")
    }

    #[test]
    fn memory_is_written_at_its_place_and_zeros_are_holes() {
        let memory = memory();
        let places = [(0x1ff8, 0x1ff8), ((1 << 32) + 0x3000, (3 << 20) + 0x3000)];
        for (address, _) in places {
            memory.write_obj(0xa5a5_a5a5_5a5a_5a5a_u64, GuestAddress(address)).expect("in range");
        }
        let file = tempfile::tempfile().expect("a file");
        let written = write(&[&memory], &file, Id(1), None, || true).expect("room");
        assert_eq!(written, 2 * PAGE as u64);
        let length = file.metadata().expect("a file").len();
        assert_eq!(length, (4 << 20) + TRAILER);
        for (_, offset) in places {
            let mut bytes = [0; 8];
            file.read_exact_at(&mut bytes, offset).expect("in the file");
            assert_eq!(u64::from_ne_bytes(bytes), 0xa5a5_a5a5_5a5a_5a5a);
        }
        assert_eq!(read_id(&file, length).expect("readable"), Some(Id(1)));
        use std::os::unix::fs::MetadataExt;
        let blocks = file.metadata().expect("a file").blocks();
        assert!(blocks * 512 < 1 << 20, "{blocks} blocks");
    }

    #[test]
    fn name_is_read_only_from_a_page_as_it_is_written() {
        let read = |page: &[u8]| {
            let file = tempfile::tempfile().expect("a file");
            file.write_all_at(page, PAGE as u64).expect("room");
            read_id(&file, 2 * TRAILER).expect("readable")
        };
        let whole = trailer(Id(0xabc));
        assert_eq!(read(&whole), Some(Id(0xabc)));
        let changed = |at: usize, byte| {
            let mut page = whole;
            page[at] = byte;
            read(&page)
        };
        let last = MAGIC.len() + DIGITS - 1;
        for (at, byte) in
            [(0, b'V'), (last, b'C'), (last, b'\n'), (last, 0xff), (last + 1, b'0'), (last + 2, b'\n'), (PAGE - 1, 1)]
        {
            assert_eq!(changed(at, byte), None, "{byte:#x} at {at}");
        }
        assert_eq!(read(&ZEROS), None);
    }

    #[test]
    fn run_that_ends_stops_the_writing() {
        let file = tempfile::tempfile().expect("a file");
        let mut steps = 0;
        let ended = write(&[&memory()], &file, Id(1), None, || {
            steps += 1;
            steps < 3
        });
        assert!(matches!(ended, Err(WriteError::Ends)));
        assert_eq!(steps, 3);
    }

    #[test]
    fn diff_has_its_pages_and_gives_them_to_other_memory() {
        let place = |page: u64| match page {
            page if page < 768 => GuestAddress(page << 12),
            page => GuestAddress((1 << 32) + ((page - 768) << 12)),
        };
        let (one, other) = (memory(), memory());
        for page in [1, 2, 5, 300, 767, 768] {
            one.write_obj(page, place(page)).expect("in range");
            other.write_obj(!page, place(page)).expect("in range");
        }
        // The diff also has a page of zeros.
        one.write_obj(0u64, place(5)).expect("in range");
        let runs = [Run(1, 1), Run(5, 1), Run(767, 2)];
        let file = tempfile::tempfile().expect("a file");
        let written = write(&[&one], &file, Id(2), Some(&runs), || true).expect("room");
        assert_eq!(written, 3 * PAGE as u64);
        apply(&[&other], &file, &runs).expect("in the file");
        let read = |page: u64| other.read_obj::<u64>(place(page)).expect("in range");
        assert_eq!([1, 5, 767, 768].map(read), [1, 0, 767, 768]);
        assert_eq!([2, 300].map(read), [!2, !300]);
    }

    #[test]
    fn runs_that_no_diff_has_are_not_valid() {
        assert!(are_valid(&[], 0));
        assert!(are_valid(&[Run(0, 2), Run(2, 1), Run(9, 1)], 10));
        let invalid: [&[Run]; 5] =
            [&[Run(0, 0)], &[Run(0, 11)], &[Run(0, 2), Run(1, 1)], &[Run(3, 1), Run(1, 1)], &[Run(1, u64::MAX)]];
        for runs in invalid {
            assert!(!are_valid(runs, 10), "{runs:?}");
        }
    }
}

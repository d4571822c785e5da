//! Memory on its way to a file, and back: what the guest reaches, one region after the other, then a page
//! with the snapshot's name. Pages of zeros are holes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use vm_memory::{Bytes, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// Bytes of the last page.
pub(crate) const TRAILER: u64 = PAGE as u64;
const PAGE: usize = 4096;
/// Bytes that are looked at before somebody may end it.
const STEP: usize = 1 << 20;
const ZEROS: [u8; PAGE] = [0; PAGE];
const MAGIC: &str = "vpmu machine memory ";

/// Why memory is not in the file.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WriteError {
    /// The file takes no more.
    #[error("cannot write the memory")]
    File(#[source] io::Error),
    /// Guest memory cannot be read: a mistake of ours.
    #[error("cannot read the guest's memory")]
    Memory(#[source] vm_memory::GuestMemoryError),
    /// Somebody ends the run.
    #[error("the machine ends")]
    Ends,
}

/// Writes `memories` to `file`, which is empty, while `goes_on` returns true. Returns how many bytes there
/// are besides zeros.
///
/// # Errors
/// [`WriteError`].
pub(crate) fn write(
    memories: &[&GuestMemoryMmap],
    file: &File,
    id: &str,
    mut goes_on: impl FnMut() -> bool,
) -> Result<u64, WriteError> {
    let mut offset = 0u64;
    let mut written = 0u64;
    let mut buffer = vec![0; STEP];
    for region in memories.iter().flat_map(|memory| memory.iter()) {
        let mut done = 0;
        while done < region.len() {
            if !goes_on() {
                return Err(WriteError::Ends);
            }
            let len = usize::try_from(region.len() - done).map_or(STEP, |left| left.min(STEP));
            let bytes = buffer.get_mut(..len).unwrap_or_default();
            region
                .read_slice(bytes, vm_memory::MemoryRegionAddress(done))
                .map_err(WriteError::Memory)?;
            written += write_data(file, offset + done, bytes).map_err(WriteError::File)?;
            done += len as u64;
        }
        offset += region.len();
    }
    let mut trailer = ZEROS;
    let name = format!("{MAGIC}{id}\n");
    if let Some(place) = trailer.get_mut(..name.len()) {
        place.copy_from_slice(name.as_bytes());
    }
    file.write_all_at(&trailer, offset)
        .map_err(WriteError::File)?;
    Ok(written)
}

/// Writes the pages of `bytes` that are not all zeros, neighbours at once.
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

fn write_run(
    file: &File,
    offset: u64,
    bytes: &[u8],
    run: std::ops::Range<usize>,
) -> io::Result<u64> {
    let data = bytes.get(run.clone()).unwrap_or_default();
    file.write_all_at(data, offset + run.start as u64)?;
    Ok(data.len() as u64)
}

/// The name of the snapshot whose memory `file` is, `length` bytes long.
///
/// # Errors
/// The host's.
pub(crate) fn read_id(file: &File, length: u64) -> io::Result<String> {
    let mut trailer = ZEROS;
    file.read_exact_at(&mut trailer, length.saturating_sub(TRAILER))?;
    let text = String::from_utf8_lossy(&trailer);
    let name = text
        .lines()
        .next()
        .and_then(|line| line.strip_prefix(MAGIC));
    Ok(name.unwrap_or_default().to_owned())
}

/// Bytes of `memory`: where the next memory begins in the file.
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
            memory
                .write_obj(0xa5a5_a5a5_5a5a_5a5a_u64, GuestAddress(address))
                .expect("in range");
        }
        let file = tempfile::tempfile().expect("a file");
        let written = write(&[&memory], &file, "one", || true).expect("room");
        assert_eq!(written, 2 * PAGE as u64);
        let length = file.metadata().expect("a file").len();
        assert_eq!(length, (4 << 20) + TRAILER);
        for (_, offset) in places {
            let mut bytes = [0; 8];
            file.read_exact_at(&mut bytes, offset).expect("in the file");
            assert_eq!(u64::from_ne_bytes(bytes), 0xa5a5_a5a5_5a5a_5a5a);
        }
        assert_eq!(read_id(&file, length).expect("readable"), "one");
        use std::os::unix::fs::MetadataExt;
        let blocks = file.metadata().expect("a file").blocks();
        assert!(blocks * 512 < 1 << 20, "{blocks} blocks");
    }

    #[test]
    fn run_that_ends_stops_the_writing() {
        let file = tempfile::tempfile().expect("a file");
        let mut steps = 0;
        let ended = write(&[&memory()], &file, "one", || {
            steps += 1;
            steps < 3
        });
        assert!(matches!(ended, Err(WriteError::Ends)));
        assert_eq!(steps, 3);
    }
}

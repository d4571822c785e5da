//! The raw data of a tracepoint in a record of a perf ring (`PERF_SAMPLE_RAW`). Lengths in records are not trusted.

use vpmu_perf::record::Record;

/// Maximum number of raw bytes to examine.
pub(super) const RAW_MOST: usize = 120;
/// Bytes of the number of raw bytes, which precedes them.
const COUNT: usize = 4;

/// The first raw bytes of a record.
#[derive(Debug)]
pub(super) struct Raw {
    bytes: [u8; RAW_MOST + 8],
    len: usize,
}

impl Raw {
    /// The raw data that begins at `word` of `record`'s body. `None` if the data is longer than the record.
    pub(super) fn of<W: Fn(u64) -> u64>(record: &Record<'_, W>, word: u64) -> Option<Self> {
        let mut bytes = [0; RAW_MOST + 8];
        let (words, _) = bytes.as_chunks_mut::<8>();
        for (place, index) in words.iter_mut().zip(word..record.words()) {
            *place = record.word(index).to_le_bytes();
        }
        let count = usize::try_from(record.word(word) & 0xffff_ffff).ok()?;
        let held = usize::try_from(record.words().checked_sub(word)?).ok()?;
        let held = held.checked_mul(8)?.checked_sub(COUNT)?;
        (count <= held).then_some(Self { bytes, len: count.min(RAW_MOST) })
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.bytes.get(COUNT..COUNT + self.len).unwrap_or_default()
    }
}

//! Checks the sizes in a `perf.data` file before `linux-perf-data` trusts them.
//!
//! That crate allocates as much memory as a header asks for, and adds offsets without a check. This module compares
//! each such number with the size of the file. It interprets nothing else.

use std::io::{self, BufReader, Read, Seek, SeekFrom};

/// Maximum size of a file, in bytes.
const MOST_BYTES: u64 = 1 << 30;
/// Maximum number of records. The reader keeps those of one round in memory, and a file can be a single round: this
/// number of empty records takes 1.2 GiB.
const MOST_RECORDS: u64 = 1 << 23;
/// Maximum size of the list of events, in bytes.
const MOST_DESCRIPTIONS: u64 = 1 << 24;

const MAGIC: &[u8; 8] = b"PERFILE2";
const MAGIC_BIG_ENDIAN: &[u8; 8] = b"2ELIFREP";
/// Size of the header of a file, and of the header of a stream.
const HEADER: u64 = 104;
const PIPE_HEADER: u64 = 16;
/// The first of the 256 bits of features, as an offset in the header.
const FEATURES_AT: usize = 72;
const SECTION: u64 = 16;
/// perf's `HEADER_EVENT_DESC`.
const EVENT_DESC: u64 = 12;
/// simpleperf's `META_INFO`.
const SIMPLEPERF: u64 = 128;

/// perf's records that this crate does not read: AUX areas, and compressed records.
const AUXTRACE: u32 = 71;
const COMPRESSED: [u32; 2] = [81, 83];

/// Errors of a file's sizes and kind.
#[derive(Debug, thiserror::Error)]
pub enum BoundsError {
    /// The file cannot be read.
    #[error("cannot read the file")]
    Read(#[source] io::Error),
    /// The file does not begin with perf's magic.
    #[error("not a perf.data file: it must be one that 'vmm run --recording', 'vmm ctl dump' or 'perf record' wrote")]
    NotPerf,
    /// The file is of the other byte order.
    #[error("the recording is from a big-endian machine: only x86-64 and aarch64 are supported")]
    BigEndian,
    /// The file is a stream.
    #[error("the recording was written to a pipe: record to a file with 'perf record -o FILE'")]
    Pipe,
    /// The file is of simpleperf.
    #[error("the recording is from simpleperf: record with 'perf record'")]
    Simpleperf,
    /// perf did not end normally.
    #[error("the recording was not finished: end 'perf record' with Ctrl-C, not with SIGKILL")]
    Unfinished,
    /// The file has the format of an old perf.
    #[error("the recording is from a perf before Linux 3.0: record again with a newer perf")]
    Old,
    /// A part of the file is outside the file.
    #[error("the recording is cut short or damaged: {0} are beyond the end of the file; copy the file again")]
    Outside(&'static str),
    /// A record is shorter than its header.
    #[error("the recording is damaged: the record at byte {0} has no valid size; copy the file again")]
    Record(u64),
    /// Records are compressed.
    #[error("the recording is compressed: record without 'perf record -z'")]
    Compressed,
    /// The file contains AUX areas.
    #[error("the recording contains a processor trace: record without AUX events such as intel_pt")]
    Auxtrace,
    /// The file exceeds a limit.
    #[error("the recording has {found} {unit}, more than {most}: record for a shorter time or with a lower frequency")]
    TooLarge {
        /// The size.
        found: u64,
        /// Its unit.
        unit: &'static str,
        /// The limit.
        most: u64,
    },
}

impl From<io::Error> for BoundsError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::Outside("its headers"),
            _ => Self::Read(error),
        }
    }
}

/// A little-endian number at an offset.
pub(crate) fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<u64> {
    let bytes: &[u8; N] = bytes.get(at..)?.first_chunk()?;
    let mut word = [0; 8];
    word.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    Some(u64::from_le_bytes(word))
}

/// Bytes that are consumed from the front.
struct Rest<'a>(&'a [u8]);

impl Rest<'_> {
    fn number(&mut self) -> Option<u64> {
        let number = number::<4>(self.0, 0)?;
        self.skip(4)?;
        Some(number)
    }

    fn skip(&mut self, bytes: u64) -> Option<()> {
        self.0 = self.0.get(usize::try_from(bytes).ok()?..)?;
        Some(())
    }
}

/// A part of a file.
#[derive(Debug, Clone, Copy)]
struct Section {
    offset: u64,
    size: u64,
}

impl Section {
    fn at(bytes: &[u8], at: usize) -> Option<Self> {
        Some(Self { offset: number::<8>(bytes, at)?, size: number::<8>(bytes, at + 8)? })
    }

    fn end(&self, length: u64, what: &'static str) -> Result<u64, BoundsError> {
        let end = self.offset.checked_add(self.size).filter(|&end| end <= length);
        end.ok_or(BoundsError::Outside(what))
    }
}

/// Checks a file and leaves the cursor at its begin.
///
/// # Errors
/// [`BoundsError`].
pub(crate) fn check(file: &mut (impl Read + Seek)) -> Result<(), BoundsError> {
    let length = file.seek(SeekFrom::End(0)).map_err(BoundsError::Read)?;
    if length > MOST_BYTES {
        return Err(BoundsError::TooLarge { found: length, unit: "bytes", most: MOST_BYTES });
    }
    file.rewind().map_err(BoundsError::Read)?;
    let header = header(file)?;
    let damaged = || BoundsError::Outside("its headers");
    let own_size = number::<8>(&header, 8).ok_or_else(damaged)?;
    let attr_size = number::<8>(&header, 16).ok_or_else(damaged)?;
    let attrs = Section::at(&header, 24).ok_or_else(damaged)?;
    let data = Section::at(&header, 40).ok_or_else(damaged)?;
    let event_types = Section::at(&header, 56).ok_or_else(damaged)?;
    if own_size > length || attr_size == 0 || attr_size > length {
        return Err(damaged());
    }
    if event_types.size != 0 {
        return Err(BoundsError::Old);
    }
    attrs.end(length, "its events")?;
    let features_at = data.end(length, "its records")?;
    if data.size == 0 {
        return Err(BoundsError::Unfinished);
    }
    features(file, &header, features_at, length)?;
    records(file, data)?;
    file.rewind().map_err(BoundsError::Read)
}

fn header(file: &mut impl Read) -> Result<Vec<u8>, BoundsError> {
    let mut header = Vec::new();
    file.take(HEADER).read_to_end(&mut header).map_err(BoundsError::Read)?;
    match header.first_chunk() {
        Some(MAGIC) => {}
        Some(MAGIC_BIG_ENDIAN) => return Err(BoundsError::BigEndian),
        _ => return Err(BoundsError::NotPerf),
    }
    if number::<8>(&header, 8) == Some(PIPE_HEADER) {
        return Err(BoundsError::Pipe);
    }
    Ok(header)
}

/// Checks the sections of features, whose table is at `at`.
fn features(file: &mut (impl Read + Seek), header: &[u8], at: u64, length: u64) -> Result<(), BoundsError> {
    const WHAT: &str = "its descriptions";
    let is_set = |bit: u64| {
        let byte = usize::try_from(bit / 8).ok().and_then(|byte| header.get(FEATURES_AT + byte));
        byte.is_some_and(|byte| byte & 1 << (bit % 8) != 0)
    };
    if is_set(SIMPLEPERF) {
        return Err(BoundsError::Simpleperf);
    }
    let bits = (0..256).filter(|&bit| is_set(bit));
    let mut total: u64 = 0;
    for (index, bit) in (0..).zip(bits) {
        file.seek(SeekFrom::Start(at + SECTION * index)).map_err(BoundsError::Read)?;
        let mut bytes = [0; 16];
        file.read_exact(&mut bytes)?;
        let section = Section::at(&bytes, 0).ok_or(BoundsError::Outside(WHAT))?;
        section.end(length, WHAT)?;
        // Sections that overlap could take up more memory than the file has bytes.
        total = total.checked_add(section.size).filter(|&total| total <= length).ok_or(BoundsError::Outside(WHAT))?;
        if bit == EVENT_DESC {
            if section.size > MOST_DESCRIPTIONS {
                let found = section.size;
                return Err(BoundsError::TooLarge { found, unit: "bytes of event names", most: MOST_DESCRIPTIONS });
            }
            let mut bytes = Vec::new();
            file.seek(SeekFrom::Start(section.offset)).map_err(BoundsError::Read)?;
            file.take(section.size).read_to_end(&mut bytes).map_err(BoundsError::Read)?;
            event_descriptions(&bytes).ok_or(BoundsError::Outside("the names of its events"))?;
        }
    }
    Ok(())
}

/// Checks the counts and lengths in the list of events.
fn event_descriptions(bytes: &[u8]) -> Option<()> {
    let mut rest = Rest(bytes);
    let events = rest.number()?;
    let attr_size = rest.number()?;
    // Each event has at least the two numbers below, which bounds the loop.
    for _ in 0..events {
        rest.skip(attr_size)?;
        let ids = rest.number()?;
        let name = rest.number()?;
        rest.skip(name)?;
        rest.skip(8 * ids)?;
    }
    // The reader reserves memory for all events before it reads them.
    (events <= (bytes.len() / 8) as u64).then_some(())
}

/// Walks over the headers of all records.
fn records(file: &mut (impl Read + Seek), data: Section) -> Result<(), BoundsError> {
    file.seek(SeekFrom::Start(data.offset)).map_err(BoundsError::Read)?;
    let mut file = BufReader::new(file);
    let (mut at, mut count) = (0, 0);
    while at < data.size {
        let mut header = [0; 8];
        file.read_exact(&mut header)?;
        let [a, b, c, d, _, _, low, high] = header;
        let size = u16::from_le_bytes([low, high]);
        let body = i64::from(size) - 8;
        if body < 0 || u64::from(size) > data.size - at {
            return Err(BoundsError::Record(data.offset + at));
        }
        match u32::from_le_bytes([a, b, c, d]) {
            AUXTRACE => return Err(BoundsError::Auxtrace),
            kind if COMPRESSED.contains(&kind) => return Err(BoundsError::Compressed),
            _ => {}
        }
        file.seek_relative(body).map_err(BoundsError::Read)?;
        at += u64::from(size);
        count += 1;
        if count > MOST_RECORDS {
            return Err(BoundsError::TooLarge { found: count, unit: "records or more", most: MOST_RECORDS });
        }
    }
    Ok(())
}

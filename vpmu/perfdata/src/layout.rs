//! Layout of the file: header, attributes of the events, records, features.
//!
//! Linux describes the format in `tools/perf/Documentation/perf.data-file-format.txt`. Each function of the guest's
//! kernel is stored as a `PERF_RECORD_KSYMBOL` with its name and address range. So perf needs no other symbols, and
//! does not mistake the host's kernel for the guest's.

use std::io::{self, Write};

use vpmu::abi;
use vpmu::source::Rate;
use vpmu_perf::record::{OWN_TYPE_BASE, TYPE_KSYMBOL};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{Immutable, IntoBytes};

use crate::record::TYPE_FINISHED_ROUND;
use crate::stream::{self, Stream};
use crate::symbols::Function;

const MAGIC: [u8; 8] = *b"PERFILE2";
/// The feature `HEADER_ARCH`: the guest's architecture.
const FEATURE_ARCH: u64 = 6;
/// The feature `HEADER_EVENT_DESC`: the events' names.
const FEATURE_EVENT_DESC: u64 = 12;
/// Strings are padded to multiples of this.
const NAME_ALIGN: usize = 64;
/// perf's `PERF_TYPE_HARDWARE`.
const TYPE_HARDWARE: u32 = 0;

const ATTR_EXCLUDE_USER: u64 = 1 << 4;
const ATTR_EXCLUDE_KERNEL: u64 = 1 << 5;
const ATTR_FREQ: u64 = 1 << 10;
const ATTR_SAMPLE_ID_ALL: u64 = 1 << 18;

#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct Section {
    offset: U64,
    size: U64,
}

#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct Header {
    magic: [u8; 8],
    size: U64,
    attr_size: U64,
    attrs: Section,
    data: Section,
    event_types: Section,
    features: [U64; 4],
}

/// The part of `struct perf_event_attr` that any perf of the last ten years supports.
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct Attr {
    kind: U32,
    size: U32,
    config: U64,
    sample_period: U64,
    sample_type: U64,
    read_format: U64,
    flags: U64,
    rest: [U64; 8],
}

const HEADER_SIZE: usize = size_of::<Header>();
const SECTION_SIZE: usize = size_of::<Section>();
const ATTR_SIZE: usize = size_of::<Attr>();
/// perf's `PERF_ATTR_SIZE_VER5`.
const ATTR_VERSION: u32 = 112;
const _: () = assert!(ATTR_SIZE == ATTR_VERSION as usize);

fn section(offset: usize, size: usize) -> Section {
    Section { offset: (offset as u64).into(), size: (size as u64).into() }
}

fn attr(stream: &Stream<'_>) -> Attr {
    let event = stream.event;
    let (period, freq) = match event.rate {
        Some(Rate::Period(period)) => (period, 0),
        Some(Rate::Frequency(rate)) => (rate, ATTR_FREQ),
        None => (0, 0),
    };
    let flag = |bit: u32, flag: u64| if event.flags & bit != 0 { flag } else { 0 };
    let kind = match event.kind {
        abi::KIND_HARDWARE => TYPE_HARDWARE,
        kind @ (abi::KIND_SOFTWARE | abi::KIND_HW_CACHE | abi::KIND_RAW) => kind,
        own => OWN_TYPE_BASE | own,
    };
    Attr {
        kind: kind.into(),
        size: ATTR_VERSION.into(),
        config: event.config.into(),
        sample_period: period.into(),
        sample_type: stream.form.sample_type().into(),
        read_format: 0.into(),
        flags: (ATTR_SAMPLE_ID_ALL
            | freq
            | flag(abi::OPEN_EXCLUDE_USER, ATTR_EXCLUDE_USER)
            | flag(abi::OPEN_EXCLUDE_KERNEL, ATTR_EXCLUDE_KERNEL))
        .into(),
        rest: [0.into(); 8],
    }
}

/// Writes the file; returns its size in bytes.
///
/// # Errors
/// Errors of `out`.
pub(crate) fn write(out: &mut impl Write, streams: &[Stream<'_>], functions: &[Function]) -> io::Result<u64> {
    let ids: Vec<u64> = streams.iter().map(|stream| stream.event.id).collect();
    let attrs_at = HEADER_SIZE + 8 * ids.len();
    let attrs_size = (ATTR_SIZE + SECTION_SIZE) * streams.len();
    let data_at = attrs_at + attrs_size;
    // perf warns about a file without any record, so a FINISHED_ROUND record ends the data of every file.
    let mut round = Vec::new();
    stream::append(&mut round, TYPE_FINISHED_ROUND, 0, &[]);
    let mut symbols_size = 0;
    symbols(streams, functions, |symbol| {
        symbols_size += symbol.len();
        Ok(())
    })?;
    let records_size: u64 = streams.iter().map(|stream| stream.size).sum();
    let records_size = usize::try_from(records_size).map_err(io::Error::other)?;
    let data_size = symbols_size + records_size + round.len();
    let features = [(FEATURE_ARCH, string(std::env::consts::ARCH)), (FEATURE_EVENT_DESC, descriptions(streams))];
    let bits = features.iter().map(|(bit, _)| 1 << bit).sum::<u64>();
    let header = Header {
        magic: MAGIC,
        size: (HEADER_SIZE as u64).into(),
        attr_size: ((ATTR_SIZE + SECTION_SIZE) as u64).into(),
        attrs: section(attrs_at, attrs_size),
        data: section(data_at, data_size),
        event_types: section(0, 0),
        features: [bits.into(), 0.into(), 0.into(), 0.into()],
    };
    out.write_all(header.as_bytes())?;
    for id in &ids {
        out.write_all(&id.to_le_bytes())?;
    }
    for (index, stream) in streams.iter().enumerate() {
        out.write_all(attr(stream).as_bytes())?;
        out.write_all(section(HEADER_SIZE + 8 * index, 8).as_bytes())?;
    }
    symbols(streams, functions, |symbol| out.write_all(symbol))?;
    stream::in_order(streams, |record| out.write_all(record))?;
    out.write_all(&round)?;
    let mut at = data_at + data_size + SECTION_SIZE * features.len();
    for (_, feature) in &features {
        out.write_all(section(at, feature.len()).as_bytes())?;
        at += feature.len();
    }
    for (_, feature) in &features {
        out.write_all(feature)?;
    }
    Ok(at as u64)
}

/// Calls `put` with a record for each function. These records precede all others in the file.
fn symbols(
    streams: &[Stream<'_>],
    functions: &[Function],
    mut put: impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut bytes = Vec::new();
    let Some(first) = streams.first() else {
        return Ok(());
    };
    let trailer = first.form.trailer(0);
    for function in functions {
        // The upper half of the second word is zero: `PERF_RECORD_KSYMBOL_TYPE_UNKNOWN`, no flags.
        let mut words = vec![function.start, u64::from(function.size)];
        let name = function.name.as_bytes();
        let name = name.iter().copied().chain([0]).collect::<Vec<u8>>();
        words.extend(name.chunks(8).map(|chunk| {
            let mut word = [0; 8];
            word.iter_mut().zip(chunk).for_each(|(to, from)| *to = *from);
            u64::from_le_bytes(word)
        }));
        words.extend(&trailer);
        bytes.clear();
        stream::append(&mut bytes, TYPE_KSYMBOL, 0, &words);
        put(&bytes)?;
    }
    Ok(())
}

/// Returns the content of `HEADER_EVENT_DESC`: the events' attributes, names and ids.
fn descriptions(streams: &[Stream<'_>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(count(streams.len()));
    bytes.extend(ATTR_VERSION.to_le_bytes());
    for stream in streams {
        bytes.extend(attr(stream).as_bytes());
        bytes.extend(1u32.to_le_bytes());
        bytes.extend(string(&stream.event.name));
        bytes.extend(stream.event.id.to_le_bytes());
    }
    bytes
}

/// Encodes a count as a 32-bit number. Every count in the `perf.data` file fits.
fn count(count: usize) -> [u8; 4] {
    u32::try_from(count).unwrap_or(u32::MAX).to_le_bytes()
}

/// Encodes a string in a feature's format. Every character other than visible ASCII becomes `_`, so that the
/// string is safe to print on a terminal.
fn string(text: &str) -> Vec<u8> {
    let plain = |c: char| if c.is_ascii_graphic() { c } else { '_' };
    let mut padded: Vec<u8> = text.chars().map(plain).collect::<String>().into_bytes();
    padded.resize((padded.len() + 1).next_multiple_of(NAME_ALIGN), 0);
    let mut bytes = count(padded.len()).to_vec();
    bytes.extend(padded);
    bytes
}

//! The parts of a file before and after its records: header, attributes of the events, features.

use vpmu_abi as abi;
use vpmu_perf::record::{MODE_USER, OWN_TYPE_BASE};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{Immutable, IntoBytes};

const MAGIC: [u8; 8] = *b"PERFILE2";
/// perf's `HEADER_BUILD_ID`.
const FEATURE_BUILD_ID: u64 = 2;
/// perf's `HEADER_OSRELEASE`.
const FEATURE_OS_RELEASE: u64 = 4;
/// perf's `HEADER_ARCH`.
const FEATURE_ARCH: u64 = 6;
/// perf's `HEADER_CPUID`.
const FEATURE_CPU_ID: u64 = 9;
/// perf's `HEADER_CMDLINE`.
const FEATURE_COMMAND: u64 = 11;
/// perf's `HEADER_EVENT_DESC`.
const FEATURE_EVENT_DESC: u64 = 12;
/// Strings are padded to multiples of this.
const NAME_ALIGN: usize = 64;
/// perf's `PERF_TYPE_HARDWARE`.
const TYPE_HARDWARE: u32 = 0;
/// perf's `PERF_RECORD_HEADER_BUILD_ID`.
const TYPE_BUILD_ID: u32 = 67;
/// perf's `PERF_RECORD_MISC_BUILD_ID_SIZE`.
const MISC_BUILD_ID_SIZE: u16 = 1 << 15;
/// Maximum size of a build id, in bytes.
const BUILD_ID_MAX: usize = 20;

/// [`Event::flags`]: samples of user mode are left out.
pub const ATTR_EXCLUDE_USER: u64 = 1 << 4;
/// [`Event::flags`]: samples of kernel mode are left out.
pub const ATTR_EXCLUDE_KERNEL: u64 = 1 << 5;
/// [`Event::flags`]: the host's work is left out.
pub const ATTR_EXCLUDE_HOST: u64 = 1 << 19;
/// [`Event::flags`]: the event kept only its newest records.
pub const ATTR_WRITE_BACKWARD: u64 = 1 << 27;
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

/// How often an event is sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rate {
    /// Once in this many counts.
    Period(u64),
    /// About this many times a second.
    Frequency(u64),
}

/// An event of a file. All its samples have the same fields.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The name. In the file, every character other than visible ASCII is `_`.
    pub name: String,
    /// perf's type, such as [`event_type`] returns.
    pub kind: u32,
    /// perf's `config`.
    pub config: u64,
    /// The rate; `None` if the event takes no samples.
    pub rate: Option<Rate>,
    /// Fields of the samples: [`SAMPLE_FIELDS`](crate::SAMPLE_FIELDS), and others.
    pub sample_type: u64,
    /// Any of `ATTR_*`.
    pub flags: u64,
    /// The id, which no other event of the file has.
    pub id: u64,
}

/// A program's file, and the build id that identifies its contents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildId {
    /// The path in the records of mappings.
    pub path: String,
    /// The id. Only its first 20 bytes are written.
    pub id: Vec<u8>,
}

/// Everything in a file except its records. Empty fields are left out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Layout {
    /// The events. perf prints only the fields that the samples of all events have.
    pub events: Vec<Event>,
    /// The architecture, as in `uname -m`.
    pub arch: String,
    /// The release of the kernel, as in `uname -r`.
    pub os_release: String,
    /// The processor: on x86, the vendor, family, model and stepping, separated by commas.
    pub cpu_id: String,
    /// The command that made the recording, with its arguments.
    pub command: Vec<String>,
    /// Files of programs.
    pub build_ids: Vec<BuildId>,
}

/// Returns perf's type of an event of a kind of the device, one of `KIND_*`.
#[must_use]
pub fn event_type(kind: u32) -> u32 {
    match kind {
        abi::KIND_HARDWARE => TYPE_HARDWARE,
        kind @ (abi::KIND_SOFTWARE | abi::KIND_HW_CACHE | abi::KIND_RAW) => kind,
        own => OWN_TYPE_BASE | own,
    }
}

fn section(offset: usize, size: u64) -> Section {
    Section { offset: (offset as u64).into(), size: size.into() }
}

impl Event {
    fn attr(&self) -> Attr {
        let (period, freq) = match self.rate {
            Some(Rate::Period(period)) => (period, 0),
            Some(Rate::Frequency(rate)) => (rate, ATTR_FREQ),
            None => (0, 0),
        };
        Attr {
            kind: self.kind.into(),
            size: ATTR_VERSION.into(),
            config: self.config.into(),
            sample_period: period.into(),
            sample_type: self.sample_type.into(),
            read_format: 0.into(),
            flags: (ATTR_SAMPLE_ID_ALL | freq | self.flags).into(),
            rest: [0.into(); 8],
        }
    }
}

impl Layout {
    /// Returns the part before the records, which have `records` bytes. A file whose head is of zero bytes is unfinished.
    /// The size of the head depends only on the number of events.
    #[must_use]
    pub fn head(&self, records: u64) -> Vec<u8> {
        let ids = 8 * self.events.len();
        let attrs_at = HEADER_SIZE + ids;
        let attrs_size = (ATTR_SIZE + SECTION_SIZE) * self.events.len();
        let features = if records == 0 { 0 } else { self.features().iter().map(|(bit, _)| 1 << bit).sum::<u64>() };
        let header = Header {
            magic: MAGIC,
            size: (HEADER_SIZE as u64).into(),
            attr_size: ((ATTR_SIZE + SECTION_SIZE) as u64).into(),
            attrs: section(attrs_at, attrs_size as u64),
            data: section(attrs_at + attrs_size, records),
            event_types: section(0, 0),
            features: [features.into(), 0.into(), 0.into(), 0.into()],
        };
        let mut bytes = header.as_bytes().to_vec();
        for event in &self.events {
            bytes.extend(event.id.to_le_bytes());
        }
        for (index, event) in self.events.iter().enumerate() {
            bytes.extend(event.attr().as_bytes());
            bytes.extend(section(HEADER_SIZE + 8 * index, 8).as_bytes());
        }
        bytes
    }

    /// Returns the part after the records, which have `records` bytes.
    #[must_use]
    pub fn tail(&self, records: u64) -> Vec<u8> {
        let features = self.features();
        let events = self.events.len();
        let before = HEADER_SIZE + (8 + ATTR_SIZE + SECTION_SIZE) * events + SECTION_SIZE * features.len();
        let mut at = records + before as u64;
        let mut bytes = Vec::new();
        for (_, feature) in &features {
            let size = feature.len() as u64;
            bytes.extend(Section { offset: at.into(), size: size.into() }.as_bytes());
            at += size;
        }
        bytes.extend(features.into_iter().flat_map(|(_, feature)| feature));
        bytes
    }

    /// The features with their bits, in the order of the bits.
    fn features(&self) -> Vec<(u64, Vec<u8>)> {
        let mut features = Vec::new();
        if !self.build_ids.is_empty() {
            features.push((FEATURE_BUILD_ID, self.build_ids.iter().flat_map(build_id).collect()));
        }
        for (bit, text) in
            [(FEATURE_OS_RELEASE, &self.os_release), (FEATURE_ARCH, &self.arch), (FEATURE_CPU_ID, &self.cpu_id)]
        {
            if !text.is_empty() {
                features.push((bit, string(text)));
            }
        }
        if !self.command.is_empty() {
            let words = self.command.iter().flat_map(|word| padded(word, |c| c == ' ' || c.is_ascii_graphic()));
            features.push((FEATURE_COMMAND, count(self.command.len()).into_iter().chain(words).collect()));
        }
        features.push((FEATURE_EVENT_DESC, self.descriptions()));
        features
    }

    /// Returns the content of `HEADER_EVENT_DESC`: the events' attributes, names and ids.
    fn descriptions(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(count(self.events.len()));
        bytes.extend(ATTR_VERSION.to_le_bytes());
        for event in &self.events {
            bytes.extend(event.attr().as_bytes());
            bytes.extend(1u32.to_le_bytes());
            bytes.extend(string(&event.name));
            bytes.extend(event.id.to_le_bytes());
        }
        bytes
    }
}

/// Returns perf's `struct perf_record_header_build_id`.
fn build_id(file: &BuildId) -> Vec<u8> {
    let mut path = file.path.as_bytes().to_vec();
    path.resize((path.len() + 1).next_multiple_of(NAME_ALIGN), 0);
    let length = file.id.len().min(BUILD_ID_MAX);
    let mut id = file.id.get(..length).unwrap_or_default().to_vec();
    id.resize(BUILD_ID_MAX, 0);
    let size = u16::try_from(8 + 4 + BUILD_ID_MAX + 4 + path.len()).unwrap_or(u16::MAX);
    let mut bytes = TYPE_BUILD_ID.to_le_bytes().to_vec();
    bytes.extend((MODE_USER | MISC_BUILD_ID_SIZE).to_le_bytes());
    bytes.extend(size.to_le_bytes());
    // No particular process.
    bytes.extend((-1_i32).to_le_bytes());
    bytes.extend(id);
    bytes.extend([u8::try_from(length).unwrap_or_default(), 0, 0, 0]);
    bytes.extend(path);
    bytes
}

/// Encodes a count as a 32-bit number. Every count in a `perf.data` file fits.
fn count(count: usize) -> [u8; 4] {
    u32::try_from(count).unwrap_or(u32::MAX).to_le_bytes()
}

/// Encodes a string in a feature's format. Every character other than visible ASCII becomes `_`, so that the
/// string is safe to print on a terminal.
fn string(text: &str) -> Vec<u8> {
    padded(text, |c| c.is_ascii_graphic())
}

/// Like [`string`], with each character that is not `plain` as `_`.
fn padded(text: &str, plain: impl Fn(char) -> bool) -> Vec<u8> {
    let plain = |c: char| if plain(c) { c } else { '_' };
    let mut padded: Vec<u8> = text.chars().map(plain).collect::<String>().into_bytes();
    padded.resize((padded.len() + 1).next_multiple_of(NAME_ALIGN), 0);
    let mut bytes = count(padded.len()).to_vec();
    bytes.extend(padded);
    bytes
}

//! KVM's binary statistics of a vCPU, which are counters that the host kernel keeps by name.
//!
//! Only these statistics give an exact count of the exits that do not reach this process.

#![expect(unsafe_code, reason = "an ioctl that kvm-ioctls does not wrap")]

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use vmm_sys_util::ioctl::ioctl;

mod request {
    const KVMIO: u32 = 0xae;
    vmm_sys_util::ioctl_io_nr!(KVM_GET_STATS_FD, KVMIO, 0xce);
}

/// Bytes of the file's header.
const HEADER: usize = 24;
/// Bytes of a descriptor before its name.
const DESCRIPTOR: usize = 16;
/// The largest values that this module accepts in the header. The values of every kernel are smaller.
const MAX_DESCRIPTORS: usize = 1024;
const MAX_NAME: usize = 256;

/// Bits of a descriptor's flags that hold its type. The types not listed here are histograms.
const TYPE_MASK: u32 = 0xf;
const TYPE_CUMULATIVE: u32 = 0;
const TYPE_INSTANT: u32 = 1;
const TYPE_PEAK: u32 = 2;

/// The type of a counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Only grows.
    Cumulative,
    /// A current value.
    Instant,
    /// The largest value so far.
    Peak,
}

/// Offset and type of a counter with a single value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ValueField {
    /// Its offset in the file.
    offset: u64,
    kind: Kind,
}

/// The statistics of one vCPU.
#[derive(Debug)]
pub struct Stats {
    file: File,
    /// Counters with a single value, by name.
    counters: BTreeMap<String, ValueField>,
}

impl Stats {
    /// Opens the statistics of the KVM vCPU descriptor `vcpu`.
    ///
    /// # Errors
    /// The error of `KVM_GET_STATS_FD`, or `InvalidData` if the file does not have the documented layout.
    pub fn open(vcpu: &impl AsRawFd) -> io::Result<Self> {
        // SAFETY: the request takes no argument and accesses no memory of this process.
        let fd = unsafe { ioctl(vcpu, request::KVM_GET_STATS_FD()) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made this descriptor, and nothing else owns it.
        Self::from_file(unsafe { File::from_raw_fd(fd) })
    }

    /// Reads the statistics from `file`, a descriptor of `KVM_GET_STATS_FD`. It may be of another process's vCPU.
    ///
    /// # Errors
    /// `InvalidData` if the file does not have the documented layout.
    pub fn from_file(file: File) -> io::Result<Self> {
        let counters = directory(&mut |offset, bytes| file.read_exact_at(bytes, offset))?;
        Ok(Self { file, counters })
    }

    fn read(&self, place: ValueField) -> Option<u64> {
        let mut value = [0; 8];
        self.file.read_exact_at(&mut value, place.offset).ok()?;
        Some(u64::from_ne_bytes(value))
    }
}

/// One vCPU's statistics over all boots.
#[derive(Debug, Default)]
struct Kept {
    now: Option<Stats>,
    /// Combined values of earlier boots.
    past: Option<BTreeMap<String, u64>>,
}

impl Kept {
    /// Reads the value at `place` and combines it with the counter `name` from earlier boots.
    fn total(&self, name: &str, place: ValueField) -> Option<u64> {
        let now = self.now.as_ref()?.read(place)?;
        let past = self.past.as_ref().and_then(|past| past.get(name));
        Some(joined(place.kind, past.copied().unwrap_or(0), now))
    }

    fn read(&self, name: &str) -> Option<u64> {
        match &self.now {
            Some(now) => self.total(name, *now.counters.get(name)?),
            None => self.past.as_ref()?.get(name).copied(),
        }
    }

    fn read_all(&self) -> Option<BTreeMap<String, u64>> {
        let Some(now) = &self.now else {
            return self.past.clone();
        };
        let totals = now.counters.iter();
        Some(totals.filter_map(|(name, place)| Some((name.clone(), self.total(name, *place)?))).collect())
    }
}

fn joined(kind: Kind, past: u64, now: u64) -> u64 {
    match kind {
        Kind::Cumulative => past.saturating_add(now),
        Kind::Instant => now,
        Kind::Peak => past.max(now),
    }
}

/// Statistics of every vCPU over all boots. Cumulative counters keep growing when the guest reboots.
#[derive(Debug)]
pub struct Statistics(RwLock<Vec<Kept>>);

impl Statistics {
    /// Creates empty statistics of `vcpus` vCPUs that have not run yet.
    #[must_use]
    pub fn new(vcpus: u32) -> Self {
        Self(RwLock::new((0..vcpus).map(|_| Kept::default()).collect()))
    }

    /// Starts a boot. `stats` holds the statistics of each vCPU in order, or `None` for a vCPU without statistics.
    pub fn begin(&self, stats: Vec<Option<Stats>>) {
        for (kept, stats) in self.write().iter_mut().zip(stats) {
            kept.now = stats;
        }
    }

    /// Ends a boot, and keeps the last values of its statistics. Call this while the boot's VM still exists.
    pub fn end(&self) {
        for kept in self.write().iter_mut() {
            kept.past = kept.read_all();
            kept.now = None;
        }
    }

    /// Returns the counter `name` of `vcpu`. Returns `None` if this kernel lacks the counter, or if the counter cannot
    /// be read.
    #[must_use]
    pub fn read(&self, vcpu: u32, name: &str) -> Option<u64> {
        let index = usize::try_from(vcpu).ok()?;
        self.lock().get(index)?.read(name)
    }

    /// Returns all counters with a single value for each vCPU, or `None` for a vCPU without statistics.
    #[must_use]
    pub fn read_all(&self) -> Vec<Option<BTreeMap<String, u64>>> {
        self.lock().iter().map(Kept::read_all).collect()
    }

    fn lock(&self) -> RwLockReadGuard<'_, Vec<Kept>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Vec<Kept>> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

fn invalid() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "KVM's statistics have an unknown layout")
}

fn u32_at(bytes: &[u8], offset: usize) -> io::Result<u32> {
    bytes.get(offset..offset + 4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_ne_bytes).ok_or_else(invalid)
}

/// Finds the counters with a single value in a statistics file. `read_at(offset, bytes)` reads from the file.
fn directory(read_at: &mut dyn FnMut(u64, &mut [u8]) -> io::Result<()>) -> io::Result<BTreeMap<String, ValueField>> {
    let mut header = [0; HEADER];
    read_at(0, &mut header)?;
    let name_size = u32_at(&header, 4)? as usize;
    let count = u32_at(&header, 8)? as usize;
    let descriptors = u64::from(u32_at(&header, 16)?);
    let data = u64::from(u32_at(&header, 20)?);
    if count > MAX_DESCRIPTORS || name_size > MAX_NAME {
        return Err(invalid());
    }
    let size = DESCRIPTOR + name_size;
    let mut bytes = vec![0; count * size];
    read_at(descriptors, &mut bytes)?;
    let mut counters = BTreeMap::new();
    for descriptor in bytes.chunks_exact(size.max(1)) {
        let elements = u16::from_ne_bytes([descriptor[6], descriptor[7]]);
        let offset = data + u64::from(u32_at(descriptor, 8)?);
        let kind = match u32_at(descriptor, 0)? & TYPE_MASK {
            TYPE_CUMULATIVE => Some(Kind::Cumulative),
            TYPE_INSTANT => Some(Kind::Instant),
            TYPE_PEAK => Some(Kind::Peak),
            _ => None,
        };
        let name = descriptor.get(DESCRIPTOR..).unwrap_or_default();
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
        if let (1, Some(kind)) = (elements, kind) {
            let place = ValueField { offset, kind };
            counters.insert(String::from_utf8_lossy(name).into_owned(), place);
        }
    }
    Ok(counters)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn file(entries: &[(&str, u32, u16, u32)]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let name_size = 16u32;
        let count = u32::try_from(entries.len()).expect("few");
        let descriptors = 40u32;
        let data = descriptors + count * (16 + name_size);
        for word in [0, name_size, count, 24, descriptors, data] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.resize(40, 0);
        for (name, flags, elements, offset) in entries {
            bytes.extend(flags.to_ne_bytes());
            bytes.extend(0u16.to_ne_bytes());
            bytes.extend(elements.to_ne_bytes());
            bytes.extend(offset.to_ne_bytes());
            bytes.extend(0u32.to_ne_bytes());
            let mut name = name.as_bytes().to_vec();
            name.resize(16, 0);
            bytes.extend(name);
        }
        bytes
    }

    fn parse(bytes: &[u8]) -> io::Result<BTreeMap<String, ValueField>> {
        directory(&mut |offset, out| {
            let start = usize::try_from(offset).expect("small");
            let part = bytes.get(start..start + out.len()).ok_or_else(invalid)?;
            out.copy_from_slice(part);
            Ok(())
        })
    }

    #[test]
    fn single_counters_are_found_by_name() {
        let bytes = file(&[("exits", 0, 1, 8), ("histogram", 3, 20, 16), ("longest", 0x12, 1, 176)]);
        let data = 40 + 3 * 32;
        let counters = parse(&bytes).expect("the documented layout");
        let place = |offset, kind| ValueField { offset, kind };
        let (exits, longest) = (counters.get("exits"), counters.get("longest"));
        assert_eq!(exits, Some(&place(data + 8, Kind::Cumulative)));
        assert_eq!(longest, Some(&place(data + 176, Kind::Peak)));
        assert_eq!(counters.get("histogram"), None);
    }

    #[test]
    fn unknown_layout_is_refused() {
        let mut bytes = file(&[("exits", 0, 1, 8)]);
        bytes[8..12].copy_from_slice(&u32::MAX.to_ne_bytes());
        assert!(parse(&bytes).is_err());
        assert!(parse(&bytes[..30]).is_err());
        assert!(parse(&file(&[("exits", 0, 1, 8)])[..60]).is_err());
    }

    /// A statistics file in the kernel's layout, with one counter of each kind.
    fn stats(exits: u64, blocking: u64, longest: u64) -> Option<Stats> {
        let mut bytes = file(&[("exits", 0, 1, 0), ("blocking", 1, 1, 8), ("longest", 2, 1, 16)]);
        for value in [exits, blocking, longest] {
            bytes.extend(value.to_ne_bytes());
        }
        let mut file = tempfile::tempfile().expect("a temporary file");
        file.write_all(&bytes).expect("written");
        let counters = directory(&mut |offset, bytes| file.read_exact_at(bytes, offset));
        let counters = counters.expect("the documented layout");
        Some(Stats { file, counters })
    }

    #[test]
    fn cumulative_counters_grow_over_boots() {
        let all = Statistics::new(2);
        assert_eq!(all.read(0, "exits"), None);
        all.begin(vec![stats(7, 1, 30), None]);
        assert_eq!(all.read(0, "exits"), Some(7));
        all.end();
        assert_eq!(all.read(0, "exits"), Some(7), "between boots");
        all.begin(vec![stats(2, 0, 20), None]);
        let read = ["exits", "blocking", "longest"].map(|name| all.read(0, name));
        assert_eq!(read, [Some(9), Some(0), Some(30)]);
        all.end();
        let [first, second] = all.read_all().try_into().expect("two vCPUs");
        assert_eq!(first.expect("read").get("exits"), Some(&9));
        assert_eq!((second, all.read(1, "exits")), (None, None));
        assert_eq!(all.read(2, "exits"), None, "no such vCPU");
    }
}

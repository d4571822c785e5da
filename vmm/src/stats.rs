//! KVM's binary statistics of a vCPU: what the host kernel counted, by name.
//!
//! The only exact number of exits that never reach this process.

#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;

use vmm_sys_util::ioctl::ioctl;

mod request {
    const KVMIO: u32 = 0xae;
    vmm_sys_util::ioctl_io_nr!(KVM_GET_STATS_FD, KVMIO, 0xce);
}

/// Bytes of the header that precedes everything.
const HEADER: usize = 24;
/// Bytes of a descriptor before its name.
const DESCRIPTOR: usize = 16;
/// More than any kernel has, and a bound on what we read.
const MAX_DESCRIPTORS: usize = 1024;
const MAX_NAME: usize = 256;

/// The statistics of one vCPU.
#[derive(Debug)]
pub struct Stats {
    file: File,
    /// Single counters by name: where each stands in the file.
    counters: BTreeMap<String, u64>,
}

impl Stats {
    /// Opens the statistics of `vcpu`, a KVM vCPU descriptor.
    ///
    /// # Errors
    /// The kernel's, or `InvalidData` for a layout that is not the documented one.
    pub fn open(vcpu: &impl AsRawFd) -> io::Result<Self> {
        // SAFETY: the request takes no argument and touches no memory of ours.
        let fd = unsafe { ioctl(vcpu, request::KVM_GET_STATS_FD()) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made this descriptor for us alone.
        let file = unsafe { File::from_raw_fd(fd) };
        let counters = directory(&mut |offset, bytes| file.read_exact_at(bytes, offset))?;
        Ok(Self { file, counters })
    }

    /// The counter `name` now; `None` when this kernel has none of that name.
    #[must_use]
    pub fn read(&self, name: &str) -> Option<u64> {
        self.read_at(*self.counters.get(name)?)
    }

    /// Every single counter now.
    #[must_use]
    pub fn read_all(&self) -> BTreeMap<String, u64> {
        self.counters
            .iter()
            .filter_map(|(name, place)| Some((name.clone(), self.read_at(*place)?)))
            .collect()
    }

    fn read_at(&self, place: u64) -> Option<u64> {
        let mut value = [0; 8];
        self.file.read_exact_at(&mut value, place).ok()?;
        Some(u64::from_ne_bytes(value))
    }
}

fn invalid() -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        "KVM statistics of an unknown layout",
    )
}

fn u32_at(bytes: &[u8], offset: usize) -> io::Result<u32> {
    bytes
        .get(offset..offset + 4)
        .and_then(|bytes| bytes.try_into().ok())
        .map(u32::from_ne_bytes)
        .ok_or_else(invalid)
}

/// The single counters of a statistics file that `read_at(offset, bytes)` reads.
fn directory(
    read_at: &mut dyn FnMut(u64, &mut [u8]) -> io::Result<()>,
) -> io::Result<BTreeMap<String, u64>> {
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
        let place = data + u64::from(u32_at(descriptor, 8)?);
        let name = descriptor.get(DESCRIPTOR..).unwrap_or_default();
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
        if elements == 1 {
            counters.insert(String::from_utf8_lossy(name).into_owned(), place);
        }
    }
    Ok(counters)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(entries: &[(&str, u16, u32)]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let name_size = 16u32;
        let count = u32::try_from(entries.len()).expect("few");
        let descriptors = 40u32;
        let data = descriptors + count * (16 + name_size);
        for word in [0, name_size, count, 24, descriptors, data] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.resize(40, 0);
        for (name, elements, offset) in entries {
            bytes.extend(0u32.to_ne_bytes());
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

    fn parse(bytes: &[u8]) -> io::Result<BTreeMap<String, u64>> {
        directory(&mut |offset, out| {
            let start = usize::try_from(offset).expect("small");
            let part = bytes.get(start..start + out.len()).ok_or_else(invalid)?;
            out.copy_from_slice(part);
            Ok(())
        })
    }

    #[test]
    fn single_counters_are_found_by_name() {
        let bytes = file(&[
            ("exits", 1, 8),
            ("histogram", 20, 16),
            ("halt_exits", 1, 176),
        ]);
        let data = 40 + 3 * 32;
        let counters = parse(&bytes).expect("the documented layout");
        assert_eq!(counters.get("exits"), Some(&(data + 8)));
        assert_eq!(counters.get("halt_exits"), Some(&(data + 176)));
        assert_eq!(counters.get("histogram"), None);
    }

    #[test]
    fn a_strange_layout_is_refused() {
        let mut bytes = file(&[("exits", 1, 8)]);
        bytes[8..12].copy_from_slice(&u32::MAX.to_ne_bytes());
        assert!(parse(&bytes).is_err());
        assert!(parse(&bytes[..30]).is_err());
        assert!(parse(&file(&[("exits", 1, 8)])[..60]).is_err());
    }
}

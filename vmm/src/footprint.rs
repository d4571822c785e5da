//! Memory use of the VMM itself: the process's resident memory without guest memory.

use std::fs::File;
use std::io::{Read, Seek};
use std::ops::Range;

use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// The open file `/proc/self/smaps`, if the host has it. The VMM opens the file at the start, because confinement can
/// make `/proc` unreachable later.
#[derive(Debug)]
pub struct Footprint(Option<File>);

impl Footprint {
    /// Opens `/proc/self/smaps`.
    pub(crate) fn open() -> Self {
        Self(File::open("/proc/self/smaps").ok())
    }

    /// Number of bytes resident in this process outside `memory`. `None` if the host does not report it.
    #[must_use]
    pub(crate) fn overhead(&self, memory: &GuestMemoryMmap) -> Option<u64> {
        let mut maps = String::new();
        let mut file = self.0.as_ref()?;
        file.rewind().ok()?;
        file.read_to_string(&mut maps).ok()?;
        overhead(&maps, memory)
    }
}

fn overhead(maps: &str, memory: &GuestMemoryMmap) -> Option<u64> {
    let guest: Vec<Range<u64>> = memory
        .iter()
        .map(|region| {
            let start = region.as_ptr() as u64;
            start..start + region.len()
        })
        .collect();
    resident_outside(maps, &guest)
}

/// Sums the resident bytes of all mappings in `maps` that start outside the ranges in `guest`.
fn resident_outside(maps: &str, guest: &[Range<u64>]) -> Option<u64> {
    let mut counted = false;
    let mut total = 0u64;
    for line in maps.lines() {
        let (first, rest) = line.split_once(' ')?;
        if let Some((start, _)) = first.split_once('-') {
            let start = u64::from_str_radix(start, 16).ok()?;
            counted = !guest.iter().any(|range| range.contains(&start));
        } else if first == "Rss:" && counted {
            let kib: u64 = rest.trim().strip_suffix(" kB")?.parse().ok()?;
            total += kib << 10;
        }
    }
    Some(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_memory_is_not_ours() {
        let maps = "\
00400000-00500000 r-xp 00000000 08:01 1 /vmm
Size:               1024 kB
Rss:                 300 kB
7f0000000000-7f0010000000 rw-p 00000000 00:00 0 
Size:             262144 kB
Rss:              100000 kB
7f0010000000-7f0010001000 rw-p 00000000 00:00 0 [heap]
Size:                  4 kB
Rss:                   4 kB
";
        let guest = 0x7f00_0000_0000..0x7f00_1000_0000;
        let outside = resident_outside(maps, std::slice::from_ref(&guest));
        assert_eq!(outside, Some(304 << 10));
    }
}

//! The CPUs' own PMUs, as sysfs describes them.

use std::fs;
use std::io;
use std::path::Path;

use crate::abi::KIND_RAW;
use crate::source::Request;

/// Where the host has its PMUs.
pub(super) const DEVICES: &str = "/sys/bus/event_source/devices";
/// The PMU of an x86 host whose CPUs are alike. Others have a file that lists their CPUs.
const PLAIN: &str = "cpu";
const CPUS: &str = "cpus";
/// Parts of a config that choose what is counted; the others are flags, some of which let a counter see more
/// than its thread.
const CHOOSING: [&str; 2] = ["event", "umask"];

/// The bits of a config that a raw event may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RawFormat(u64);

impl Default for RawFormat {
    /// An event number of 16 bits, or an event and a mask of 8 each: what each PMU has.
    fn default() -> Self {
        Self(0xffff)
    }
}

impl RawFormat {
    /// As `devices` has it: the bits that all PMUs of CPUs have for an event and its unit mask.
    pub(super) fn read(devices: &Path) -> Self {
        let Ok(entries) = fs::read_dir(devices) else {
            return Self::default();
        };
        let paths = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
        let of_cpus = paths.filter(|path| path.ends_with(PLAIN) || path.join(CPUS).exists());
        let masks = of_cpus.filter_map(|path| choosing(&path.join("format")));
        masks
            .reduce(|one, other| one & other)
            .map_or_else(Self::default, Self)
    }

    /// Whether `config` has no other bits.
    pub(super) fn takes(self, config: u64) -> bool {
        config & !self.0 == 0
    }

    /// Refuses a raw event with other bits.
    ///
    /// # Errors
    /// `ENOENT`.
    pub(super) fn check(self, what: &Request) -> io::Result<()> {
        match what.kind != KIND_RAW || self.takes(what.config) {
            true => Ok(()),
            false => Err(io::Error::from_raw_os_error(libc::ENOENT)),
        }
    }
}

/// The bits that choose an event; `None`: the directory does not say.
fn choosing(format: &Path) -> Option<u64> {
    let texts = CHOOSING
        .iter()
        .filter_map(|name| fs::read_to_string(format.join(name)).ok());
    let masks = texts.filter_map(|text| bits(text.trim().strip_prefix("config:")?));
    masks.reduce(|one, other| one | other)
}

/// A mask of the bits of a list such as `0-7,32-35`.
fn bits(list: &str) -> Option<u64> {
    list.split(',').try_fold(0, |mask, part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        let width = last.checked_sub(first)?.checked_add(1)?;
        let ones = u64::MAX.checked_shr(u64::BITS.checked_sub(width)?)?;
        Some(mask | ones.checked_shl(first).filter(|_| last < u64::BITS)?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// PMUs with files of these texts.
    fn devices(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a directory");
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("a directory")).expect("made");
            fs::write(path, text).expect("written");
        }
        root
    }

    fn mask(files: &[(&str, &str)]) -> u64 {
        RawFormat::read(devices(files).path()).0
    }

    #[test]
    fn raw_event_is_made_of_the_event_and_the_unit_mask_of_its_pmu() {
        let intel = [
            ("cpu/format/event", "config:0-7\n"),
            ("cpu/format/umask", "config:8-15\n"),
            ("cpu/format/any", "config:21\n"),
            ("cpu/format/offcore_rsp", "config1:0-63\n"),
            ("uncore_imc/format/event", "config:0-31\n"),
        ];
        assert_eq!(mask(&intel), 0xffff);
        let amd = [
            ("cpu/format/event", "config:0-7,32-35\n"),
            ("cpu/format/umask", "config:8-15\n"),
            ("cpu/format/inv", "config:23\n"),
        ];
        assert_eq!(mask(&amd), 0xf_0000_ffff);
        let arm = [
            ("armv8_pmuv3_0/cpus", "0-3\n"),
            ("armv8_pmuv3_0/format/event", "config:0-15\n"),
            ("armv8_pmuv3_0/format/long", "config1:0\n"),
            ("arm_dsu_0/format/event", "config:0-31\n"),
        ];
        assert_eq!(mask(&arm), 0xffff);
    }

    #[test]
    fn raw_event_has_the_bits_that_all_core_pmus_have() {
        let hybrid = [
            ("cpu_core/cpus", "0-7\n"),
            ("cpu_core/format/event", "config:0-7\n"),
            ("cpu_core/format/umask", "config:8-15,40-47\n"),
            ("cpu_atom/cpus", "8-15\n"),
            ("cpu_atom/format/event", "config:0-7\n"),
            ("cpu_atom/format/umask", "config:8-15\n"),
        ];
        assert_eq!(mask(&hybrid), 0xffff);
    }

    #[test]
    fn raw_event_has_16_bits_where_sysfs_does_not_say() {
        assert_eq!(mask(&[]), 0xffff);
        assert_eq!(RawFormat::read(Path::new("/nonexistent")).0, 0xffff);
        assert_eq!(mask(&[("software/type", "1\n")]), 0xffff);
        let senseless = [
            ("cpu/format/event", "config:7-0\n"),
            ("cpu/format/umask", "config1:0-7\n"),
        ];
        assert_eq!(mask(&senseless), 0xffff);
    }

    #[test]
    fn list_of_bits_is_a_mask_unless_it_leaves_the_word() {
        assert_eq!(bits("0-63"), Some(u64::MAX));
        assert_eq!(bits("5"), Some(0x20));
        assert_eq!(bits("0,63"), Some(1 << 63 | 1));
        for wrong in ["", "x", "0-64", "64", "1-", "3-1", "0-4294967295", "-"] {
            assert_eq!(bits(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn raw_request_with_other_bits_is_unknown() {
        let format = RawFormat(0xff);
        let check = |kind, config| {
            let request = Request {
                kind,
                config,
                sampling: None,
                exclude_user: false,
                exclude_kernel: false,
                exclude_host: true,
                pinned: false,
            };
            format.check(&request).map_err(|error| error.raw_os_error())
        };
        assert_eq!(check(KIND_RAW, 0x11), Ok(()));
        assert_eq!(check(KIND_RAW, 1 << 21 | 0x11), Err(Some(libc::ENOENT)));
        assert_eq!(check(crate::abi::KIND_HW_CACHE, 0x1_0000), Ok(()));
    }
}

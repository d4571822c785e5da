//! The CPUs' own PMUs, as sysfs describes them.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use vpmu_perf::bindings::PERF_TYPE_HARDWARE;

use crate::abi::{KIND_HARDWARE, KIND_HW_CACHE, KIND_RAW};
use crate::refusal::Refusal;
use crate::source::Request;

/// The host's directory of PMUs.
pub(super) const DEVICES: &str = "/sys/bus/event_source/devices";
/// The PMU of an x86 host with uniform CPUs. On other hosts, each CPU PMU has a file that lists its CPUs.
const PLAIN: &str = "cpu";
const CPUS: &str = "cpus";
/// Fields of a config that select the event. A raw event may set only these fields. The other fields are flags, some of
/// which make a counter count more than its thread.
const CHOOSING: [&str; 2] = ["event", "umask"];

/// A list that contains this CPU number or a higher one is invalid, because no host has so many CPUs.
const MOST_CPUS: u32 = 1 << 16;
/// Shift of the PMU's type in a generic event's config.
const TYPE_SHIFT: u32 = 32;

/// The PMU that counts hardware events on the CPUs of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CpuPmu {
    /// The PMU's type, if the host has several PMUs. Without a type in the config, perf would choose one of
    /// the PMUs itself.
    named: Option<u32>,
    /// Permitted bits of a raw event's config.
    raw_bits: u64,
}

impl Default for CpuPmu {
    /// The host's only PMU, if sysfs does not describe it. A raw event's config then has 16 bits: either one 16-bit
    /// event number, or an event number and a unit mask of 8 bits each.
    fn default() -> Self {
        Self { named: None, raw_bits: 0xffff }
    }
}

/// A PMU that counts on some of the host's CPUs.
#[derive(Debug)]
struct SomeCpus {
    path: PathBuf,
    of_type: u32,
    cpus: BTreeSet<u32>,
    /// The CPUs as the host's file lists them.
    list: String,
}

impl CpuPmu {
    /// The PMU in `devices` that counts on every CPU in `affinity`, the CPUs on which the process may run.
    ///
    /// # Errors
    /// [`Refusal::SeveralPmus`]: no PMU has all of these CPUs, so a generic event would not count on some of them. Also
    /// returned if `affinity` is empty, because the CPUs are then unknown.
    pub(super) fn find(devices: &Path, affinity: &BTreeSet<u32>) -> Result<Self, Refusal> {
        let pmus = of_some_cpus(devices);
        if pmus.is_empty() {
            return Ok(Self::of(&devices.join(PLAIN), None));
        }
        let mut fitting = pmus.iter().filter(|pmu| affinity.is_subset(&pmu.cpus));
        let pmu = fitting.next().filter(|_| !affinity.is_empty());
        let pmu = pmu.ok_or_else(|| {
            for SomeCpus { path, list, .. } in &pmus {
                log::warn!("the host's PMU {} counts only on CPUs {list}", path.display());
            }
            Refusal::SeveralPmus
        })?;
        Ok(Self::of(&pmu.path, (pmus.len() > 1).then_some(pmu.of_type)))
    }

    fn of(path: &Path, named: Option<u32>) -> Self {
        let usual = Self::default();
        Self { named, raw_bits: choosing(&path.join("format")).unwrap_or(usual.raw_bits) }
    }

    /// Type and config of the host's event for a request.
    pub(super) fn event(self, what: &Request) -> (u32, u64) {
        let of_type = match what.kind {
            KIND_HARDWARE => PERF_TYPE_HARDWARE,
            kind => kind,
        };
        match (what.kind, self.named) {
            (KIND_HARDWARE | KIND_HW_CACHE, Some(pmu)) => (of_type, u64::from(pmu) << TYPE_SHIFT | what.config),
            (KIND_RAW, Some(pmu)) => (pmu, what.config),
            _ => (of_type, what.config),
        }
    }

    /// Whether `config` is valid for a raw event.
    pub(super) fn takes(self, config: u64) -> bool {
        config & !self.raw_bits == 0
    }

    /// Rejects a raw event whose config has bits that are not permitted.
    ///
    /// # Errors
    /// `ENOENT`.
    pub(super) fn check(self, what: &Request) -> io::Result<()> {
        if what.kind != KIND_RAW || self.takes(what.config) {
            Ok(())
        } else {
            Err(io::Error::from_raw_os_error(libc::ENOENT))
        }
    }
}

/// The PMUs in `devices` that have a list of their CPUs, sorted by name.
fn of_some_cpus(devices: &Path) -> Vec<SomeCpus> {
    let entries = fs::read_dir(devices).into_iter().flatten();
    let paths = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let mut pmus: Vec<_> = paths.filter_map(some_cpus).collect();
    pmus.sort_unstable_by(|one, other| one.path.cmp(&other.path));
    pmus
}

fn some_cpus(path: PathBuf) -> Option<SomeCpus> {
    let text = |name| fs::read_to_string(path.join(name)).ok();
    let list = text(CPUS)?.trim().to_owned();
    let of_type = text("type")?.trim().parse().ok()?;
    Some(SomeCpus { cpus: cpus(&list)?, path, of_type, list })
}

/// Parses a list of CPUs such as `0-3,8`. An empty list is valid. `None` if the list is not valid.
fn cpus(list: &str) -> Option<BTreeSet<u32>> {
    let parts = list.split(',').filter(|_| !list.is_empty());
    parts.map(range).try_fold(BTreeSet::new(), |mut cpus, part| {
        cpus.extend(part.filter(|part| *part.end() < MOST_CPUS)?);
        Some(cpus)
    })
}

/// Parses `5` or `0-7`.
fn range(part: &str) -> Option<RangeInclusive<u32>> {
    let (first, last) = part.split_once('-').unwrap_or((part, part));
    let (first, last) = (first.parse().ok()?, last.parse().ok()?);
    (first <= last).then_some(first..=last)
}

/// Returns the mask of the config bits that select an event. `None` if the directory `format` does not describe them.
fn choosing(format: &Path) -> Option<u64> {
    let texts = CHOOSING.iter().filter_map(|name| fs::read_to_string(format.join(name)).ok());
    let masks = texts.filter_map(|text| bits(text.trim().strip_prefix("config:")?));
    masks.reduce(|one, other| one | other)
}

/// Parses a list of bits such as `0-7,32-35` to a mask.
fn bits(list: &str) -> Option<u64> {
    list.split(',').map(range).try_fold(0, |mask, part| {
        let part = part.filter(|part| *part.end() < u64::BITS)?;
        Some(part.fold(mask, |mask, bit| mask | 1 << bit))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::KIND_SOFTWARE;

    const REQUEST: Request = Request {
        kind: KIND_RAW,
        config: 0,
        sampling: None,
        exclude_user: false,
        exclude_kernel: false,
        exclude_host: true,
        pinned: false,
    };

    /// Creates a directory of PMUs that contains `files`. Each file is given as its path and its content.
    fn devices(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a directory");
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("a directory")).expect("made");
            fs::write(path, text).expect("written");
        }
        root
    }

    fn find(files: &[(&str, &str)], affinity: &[u32]) -> Result<CpuPmu, Refusal> {
        let affinity = affinity.iter().copied().collect();
        CpuPmu::find(devices(files).path(), &affinity)
    }

    fn mask(files: &[(&str, &str)]) -> u64 {
        find(files, &[0, 1]).expect("a PMU").raw_bits
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
            ("armv8_pmuv3_0/type", "8\n"),
            ("armv8_pmuv3_0/format/event", "config:0-15\n"),
            ("armv8_pmuv3_0/format/long", "config1:0\n"),
            ("arm_dsu_0/format/event", "config:0-31\n"),
        ];
        assert_eq!(mask(&arm), 0xffff);
    }

    const BIG_LITTLE: [(&str, &str); 7] = [
        ("armv8_cortex_a53/cpus", "0-3\n"),
        ("armv8_cortex_a53/type", "8\n"),
        ("armv8_cortex_a53/format/event", "config:0-15\n"),
        ("armv8_cortex_a72/cpus", "4-5\n"),
        ("armv8_cortex_a72/type", "9\n"),
        ("armv8_cortex_a72/format/event", "config:0-15\n"),
        ("software/type", "1\n"),
    ];
    const ALDER_LAKE: [(&str, &str); 9] = [
        ("cpu_core/cpus", "0-3,8\n"),
        ("cpu_core/type", "4\n"),
        ("cpu_core/format/event", "config:0-7\n"),
        ("cpu_core/format/umask", "config:8-15,40-47\n"),
        ("cpu_atom/cpus", "4-7\n"),
        ("cpu_atom/type", "10\n"),
        ("cpu_atom/format/event", "config:0-7\n"),
        ("cpu_atom/format/umask", "config:8-15\n"),
        ("uncore_imc_0/cpumask", "0\n"),
    ];
    const PLAIN_X86: [(&str, &str); 3] =
        [("cpu/type", "4\n"), ("cpu/format/event", "config:0-7\n"), ("cpu/format/umask", "config:8-15\n")];

    fn pmu(named: u32, raw_bits: u64) -> CpuPmu {
        CpuPmu { named: Some(named), raw_bits }
    }

    #[test]
    fn process_on_cpus_of_one_pmu_has_that_pmu() {
        for affinity in [&[0, 1, 2, 3][..], &[2]] {
            assert_eq!(find(&BIG_LITTLE, affinity), Ok(pmu(8, 0xffff)));
        }
        assert_eq!(find(&BIG_LITTLE, &[4, 5]), Ok(pmu(9, 0xffff)));
        assert_eq!(find(&ALDER_LAKE, &[8]), Ok(pmu(4, 0xff00_0000_ffff)));
        assert_eq!(find(&ALDER_LAKE, &[4, 7]), Ok(pmu(10, 0xffff)));
    }

    #[test]
    fn process_on_cpus_of_several_pmus_is_refused() {
        let refused = Err(Refusal::SeveralPmus);
        for affinity in [&[0, 1, 2, 3, 4, 5][..], &[3, 4], &[0, 6], &[]] {
            assert_eq!(find(&BIG_LITTLE, affinity), refused, "{affinity:?}");
        }
        assert_eq!(find(&ALDER_LAKE, &[0, 4]), refused);
        let text = Refusal::SeveralPmus.to_string();
        assert!(text.contains("several core PMUs") && text.contains("taskset"), "{text}");
    }

    #[test]
    fn process_on_a_machine_with_one_pmu_has_it_without_a_name() {
        for affinity in [&[0][..], &[0, 1, 63], &[]] {
            assert_eq!(find(&PLAIN_X86, affinity), Ok(CpuPmu::default()));
            assert_eq!(find(&[], affinity), Ok(CpuPmu::default()));
        }
        let arm = [("armv8_pmuv3_0/cpus", "0-1\n"), ("armv8_pmuv3_0/type", "8\n")];
        assert_eq!(find(&arm, &[0, 1]), Ok(CpuPmu::default()));
        // An event would count nothing on a CPU without a PMU.
        assert_eq!(find(&arm, &[0, 2]), Err(Refusal::SeveralPmus));
    }

    #[test]
    fn event_of_a_named_pmu_carries_its_type() {
        let event = |pmu: CpuPmu, kind, config| pmu.event(&Request { kind, config, ..REQUEST });
        let named = pmu(9, 0xffff);
        assert_eq!(event(named, KIND_HARDWARE, 1), (PERF_TYPE_HARDWARE, 9 << 32 | 1));
        assert_eq!(event(named, KIND_HW_CACHE, 0x1_0002), (KIND_HW_CACHE, 9 << 32 | 0x1_0002));
        assert_eq!(event(named, KIND_RAW, 0x11), (9, 0x11));
        assert_eq!(event(named, KIND_SOFTWARE, 2), (KIND_SOFTWARE, 2));
        assert_eq!(event(CpuPmu::default(), KIND_HARDWARE, 3), (PERF_TYPE_HARDWARE, 3));
        for kind in [KIND_HW_CACHE, KIND_RAW, KIND_SOFTWARE] {
            assert_eq!(event(CpuPmu::default(), kind, 3), (kind, 3));
        }
    }

    #[test]
    fn list_of_cpus_is_a_set_unless_it_has_no_sense() {
        let set = |cpus: &[u32]| Some(cpus.iter().copied().collect());
        assert_eq!(cpus("0-3,8"), set(&[0, 1, 2, 3, 8]));
        assert_eq!(cpus("5"), set(&[5]));
        assert_eq!(cpus(""), set(&[]));
        for wrong in ["x", "3-1", "0-", ",", "0-4294967295", "65536"] {
            assert_eq!(cpus(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn raw_event_has_16_bits_without_a_format_in_sysfs() {
        assert_eq!(mask(&[]), 0xffff);
        let nowhere = CpuPmu::find(Path::new("/nonexistent"), &BTreeSet::new());
        assert_eq!(nowhere, Ok(CpuPmu::default()));
        assert_eq!(mask(&[("software/type", "1\n")]), 0xffff);
        let senseless = [("cpu/format/event", "config:7-0\n"), ("cpu/format/umask", "config1:0-7\n")];
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
        let pmu = CpuPmu { named: None, raw_bits: 0xff };
        let check = |kind, config| {
            let checked = pmu.check(&Request { kind, config, ..REQUEST });
            checked.map_err(|error| error.raw_os_error())
        };
        assert_eq!(check(KIND_RAW, 0x11), Ok(()));
        assert_eq!(check(KIND_RAW, 1 << 21 | 0x11), Err(Some(libc::ENOENT)));
        assert_eq!(check(KIND_HW_CACHE, 0x1_0000), Ok(()));
    }
}

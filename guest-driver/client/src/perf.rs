//! The perf core door: `perf_event_open(2)` on the PMU that the driver registers, described
//! by sysfs as any PMU is. Events of this door count; the other door samples, too.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use crate::attr::EventAttr;
use crate::event::Event;
use crate::sys;

/// Where the kernel describes the PMU.
pub const SYSFS: &str = "/sys/bus/event_source/devices/vpmu";

/// What is missing in sysfs, or was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PerfError {
    /// No such PMU.
    #[error("no PMU at {}: load the driver with `modprobe virtio_pmu`, and mount sysfs", .0.display())]
    Missing(PathBuf),
    /// A file that cannot be read.
    #[error("reading {}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The type is no number.
    #[error("{} holds {text:?}, which is not a PMU's type", path.display())]
    Type {
        /// Which file.
        path: PathBuf,
        /// What it says.
        text: String,
    },
    /// No event of that name.
    #[error("the PMU has no event {name:?}, only: {}", known.join(", "))]
    Unknown {
        /// As asked for.
        name: String,
        /// All that there are.
        known: Vec<String>,
    },
    /// A format that is not ranges of bits of `config`.
    #[error("the format {format:?} of {term:?} is not ranges of bits of config")]
    Format {
        /// Whose.
        term: String,
        /// As sysfs says.
        format: String,
    },
    /// A term of an event that is not `name`, `name=number`, or does not fit its bits.
    #[error("the term {0:?} is not a name and a number that fits its bits")]
    Term(String),
    /// The kernel refused the event.
    #[error("perf_event_open")]
    Open(#[source] io::Error),
}

/// The PMU, as sysfs describes it.
#[derive(Debug)]
pub struct PerfPmu {
    path: PathBuf,
    pmu_type: u32,
}

impl PerfPmu {
    /// Reads the PMU's type from [`SYSFS`].
    ///
    /// # Errors
    /// [`PerfError`], above all that the driver is not loaded.
    pub fn open() -> Result<Self, PerfError> {
        Self::open_at(Path::new(SYSFS))
    }

    /// Reads another directory.
    ///
    /// # Errors
    /// As [`PerfPmu::open`].
    pub fn open_at(path: &Path) -> Result<Self, PerfError> {
        let file = path.join("type");
        let text = match read(&file) {
            Err(PerfError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Err(PerfError::Missing(path.into()));
            }
            text => text?,
        };
        let pmu_type = text
            .parse()
            .map_err(|_| PerfError::Type { path: file, text })?;
        Ok(Self {
            path: path.into(),
            pmu_type,
        })
    }

    /// `perf_event_attr::type` of its events.
    #[must_use]
    pub fn pmu_type(&self) -> u32 {
        self.pmu_type
    }

    /// The names of its events, sorted.
    ///
    /// # Errors
    /// [`PerfError::Read`].
    pub fn events(&self) -> Result<Vec<String>, PerfError> {
        let path = self.path.join("events");
        let error = |source| PerfError::Read {
            path: path.clone(),
            source,
        };
        let mut names = Vec::new();
        for entry in fs::read_dir(&path).map_err(error)? {
            names.push(
                entry
                    .map_err(error)?
                    .file_name()
                    .to_string_lossy()
                    .into_owned(),
            );
        }
        // Beside an event may stand files about it: its unit and its scale.
        names.retain(|name| !name.contains('.'));
        names.sort_unstable();
        Ok(names)
    }

    /// The event that sysfs names so: of the calling thread, disabled, counting.
    ///
    /// # Errors
    /// [`PerfError::Unknown`], or what is wrong with its description.
    pub fn attr(&self, name: &str) -> Result<EventAttr, PerfError> {
        let known = self.events()?;
        if !known.iter().any(|known| known == name) {
            return Err(PerfError::Unknown {
                name: name.into(),
                known,
            });
        }
        self.attr_of_terms(&read(&self.path.join("events").join(name))?)
    }

    /// The event of perf's terms, as between the slashes of `vpmu/kind=0x101,event=2/`.
    ///
    /// # Errors
    /// [`PerfError::Term`] or [`PerfError::Format`].
    pub fn attr_of_terms(&self, terms: &str) -> Result<EventAttr, PerfError> {
        let mut config = 0;
        for term in terms.split(',') {
            let wrong = || PerfError::Term(term.into());
            let (name, value) = term.split_once('=').unwrap_or((term, "1"));
            let value = number(value).ok_or_else(wrong)?;
            if name == "config" {
                config |= value;
                continue;
            }
            // A name is a name of a file, and not a way to other directories.
            if name.is_empty() || name.contains('/') || name.starts_with('.') {
                return Err(wrong());
            }
            let format = read(&self.path.join("format").join(name))?;
            let bits = bits(&format).ok_or_else(|| PerfError::Format {
                term: name.into(),
                format: format.clone(),
            })?;
            config |= spread(value, &bits).ok_or_else(wrong)?;
        }
        Ok(EventAttr::new(self.pmu_type, config))
    }

    /// Opens an event with `perf_event_open(2)`.
    ///
    /// # Errors
    /// [`PerfError::Open`] with the kernel's error number as its source.
    pub fn open_event(&self, attr: &EventAttr) -> Result<Event, PerfError> {
        open(attr, None)
    }

    /// Opens an event in the group that `leader`, of this door too, leads.
    ///
    /// # Errors
    /// As [`PerfPmu::open_event`].
    pub fn open_member(&self, attr: &EventAttr, leader: &Event) -> Result<Event, PerfError> {
        open(attr, Some(leader))
    }
}

fn open(attr: &EventAttr, leader: Option<&Event>) -> Result<Event, PerfError> {
    let place = attr.place(leader.map(AsFd::as_fd));
    let fd = sys::perf_event_open(&mut attr.to_raw(), place).map_err(PerfError::Open)?;
    Ok(Event::new(fd, attr))
}

fn read(path: &Path) -> Result<String, PerfError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(text.trim_end().to_owned()),
        Err(source) => Err(PerfError::Read {
            path: path.into(),
            source,
        }),
    }
}

fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

/// The bits, lowest first, of a format such as `config:0-7,32-35`.
fn bits(format: &str) -> Option<Vec<u32>> {
    let mut bits = Vec::new();
    for range in format.strip_prefix("config:")?.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        if first > last || last > 63 {
            return None;
        }
        bits.extend(first..=last);
    }
    Some(bits)
}

/// Puts the bits of `value` where the format has them; `None` if it has more than they hold.
fn spread(value: u64, bits: &[u32]) -> Option<u64> {
    if bits.len() < 64 && value >> bits.len() != 0 {
        return None;
    }
    let set = bits
        .iter()
        .enumerate()
        .filter(|&(index, _)| index < 64 && value >> index & 1 != 0);
    Some(set.fold(0, |config, (_, bit)| config | 1 << bit))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Record;

    fn pmu() -> (tempfile::TempDir, PerfPmu) {
        let dir = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        put("type", "9\n");
        put("format/event", "config:0-47\n");
        put("format/kind", "config:48-63\n");
        put("format/split", "config:0-1,62-63\n");
        put("format/other", "config1:0-7\n");
        put("events/exits-io", "event=0x2,kind=0x101\n");
        put("events/tsc", "kind=256\n");
        put("events/tsc.unit", "ticks\n");
        let pmu = PerfPmu::open_at(dir.path()).unwrap();
        (dir, pmu)
    }

    #[test]
    fn names_become_configs() {
        let (_dir, pmu) = pmu();
        assert_eq!(pmu.pmu_type(), 9);
        assert_eq!(pmu.events().unwrap(), ["exits-io", "tsc"]);
        let attr = pmu.attr("exits-io").unwrap();
        assert_eq!((attr.pmu_type, attr.config), (9, 0x101 << 48 | 2));
        assert_eq!(pmu.attr("tsc").unwrap().config, 0x100 << 48);
        assert_eq!(pmu.attr_of_terms("config=0x30").unwrap().config, 0x30);
        assert_eq!(pmu.attr_of_terms("split=0xd").unwrap().config, 3 << 62 | 1);
        assert_eq!(pmu.attr_of_terms("kind").unwrap().config, 1 << 48);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let (_dir, pmu) = pmu();
        let error = pmu.attr("cycles").unwrap_err();
        assert_eq!(
            error.to_string(),
            "the PMU has no event \"cycles\", only: exits-io, tsc"
        );
        for term in ["kind=0x10000", "kind=x", "../type=1", "=1", "split=16"] {
            let error = pmu.attr_of_terms(term).unwrap_err();
            assert!(
                matches!(error, PerfError::Term(ref t) if t == term),
                "{error}"
            );
        }
        assert!(matches!(
            pmu.attr_of_terms("other=1"),
            Err(PerfError::Format { .. })
        ));
        assert!(matches!(
            pmu.attr_of_terms("missing=1"),
            Err(PerfError::Read { .. })
        ));
        let missing = PerfPmu::open_at(Path::new("/nonexistent")).unwrap_err();
        assert!(
            missing.to_string().contains("modprobe virtio_pmu"),
            "{missing}"
        );
    }

    #[test]
    fn formats_that_make_no_sense_are_refused() {
        for format in [
            "",
            "config",
            "config:",
            "config:5-3",
            "config:0-64",
            "config:x",
            "config1:0",
        ] {
            assert_eq!(bits(format), None, "{format}");
        }
        assert_eq!(bits("config:3"), Some(vec![3]));
    }

    #[test]
    fn the_kernels_own_door_opens_here_too() {
        // The CPU's own software clock, through the same code; every kernel has it.
        let attr = EventAttr::new(1, 1);
        let pmu = PerfPmu {
            path: PathBuf::new(),
            pmu_type: 1,
        };
        let event = pmu.open_event(&attr).unwrap();
        event.enable().unwrap();
        let work: u64 = (0..200_000u64).map(std::hint::black_box).sum();
        std::hint::black_box(work);
        event.disable().unwrap();
        let reading = event.read().unwrap();
        assert!(reading.value > 0 && reading.time_running > 0, "{reading:?}");
        assert!(reading.time_running <= reading.time_enabled);
        assert_eq!(reading.id, event.id().unwrap());
        event.reset().unwrap();
        assert_eq!(event.read().unwrap().value, 0);
    }

    #[test]
    fn the_kernels_own_ring_reads_here_too() {
        let pmu = PerfPmu {
            path: PathBuf::new(),
            pmu_type: 1,
        };
        let attr = EventAttr {
            exclude_kernel: true,
            ..EventAttr::new(1, 1).sampling(100_000)
        };
        let event = pmu.open_event(&attr.wakeup_every(1)).unwrap();
        let mut ring = event.map(3).unwrap();
        event.enable().unwrap();
        let work: u64 = (0..20_000_000u64).map(std::hint::black_box).sum();
        std::hint::black_box(work);
        event.disable().unwrap();
        assert!(
            event
                .poll(Some(std::time::Duration::ZERO))
                .unwrap()
                .readable
        );
        let records: Result<Vec<Record>, _> = ring.records().collect();
        let mut last = 0;
        let mut samples = 0;
        for record in records.unwrap() {
            // The kernel throttles and says so; that is not ours to take apart.
            let Record::Sample(sample) = record else {
                continue;
            };
            samples += 1;
            assert_eq!(sample.pid, std::process::id());
            assert_eq!(sample.id, event.id().unwrap());
            assert!(sample.user && sample.time > last, "{sample:?} after {last}");
            assert_eq!(sample.period, 100_000);
            last = sample.time;
        }
        assert!(samples > 0);
        // The kernel writes the page when it likes, the last time before the event stopped.
        let told = ring.metadata().unwrap().time_enabled;
        assert!(told > 0 && told <= event.read().unwrap().time_enabled);
    }

    /// The kernel's own clock of tasks, of user mode alone.
    fn clock(period: u64) -> (PerfPmu, EventAttr) {
        let pmu = PerfPmu {
            path: PathBuf::new(),
            pmu_type: 1,
        };
        let attr = EventAttr {
            exclude_kernel: true,
            exclude_callchain_kernel: true,
            ..EventAttr::new(1, 1).sampling(period)
        };
        (pmu, attr)
    }

    fn spin() {
        let work: u64 = (0..20_000_000u64).map(std::hint::black_box).sum();
        std::hint::black_box(work);
    }

    #[test]
    fn the_kernels_own_groups_read_here_too() {
        let (pmu, attr) = clock(0);
        let attr = EventAttr {
            sample_type: 0,
            ..attr.reading_group()
        };
        let leader = pmu.open_event(&attr).unwrap();
        let open = EventAttr {
            disabled: false,
            ..attr
        };
        let member = pmu.open_member(&open, &leader).unwrap();
        leader.enable_group().unwrap();
        spin();
        leader.disable_group().unwrap();
        for event in [&leader, &member] {
            let group = event.read_group().unwrap();
            let ids: Vec<u64> = group.iter().map(|reading| reading.id).collect();
            assert_eq!(ids, [leader.id().unwrap(), member.id().unwrap()]);
            assert!(group.iter().all(|reading| reading.value > 0), "{group:?}");
        }
        leader.reset_group().unwrap();
        let group = leader.read_group().unwrap();
        assert!(group.iter().all(|reading| reading.value == 0), "{group:?}");
    }

    #[test]
    fn the_kernels_own_samples_of_everything_are_taken_apart() {
        // x86's numbers for the stack pointer and the instruction pointer.
        const SP: u32 = 7;
        const IP: u32 = 8;
        let (pmu, attr) = clock(100_000);
        let attr = attr
            .with_call_chains(8)
            .with_user_registers(1 << SP | 1 << IP)
            .with_user_stack(64);
        let attr = EventAttr {
            sample_type: attr.sample_type | crate::attr::SAMPLE_READ,
            sample_id_all: true,
            ..attr
        };
        let event = pmu.open_event(&attr).unwrap();
        let mut ring = event.map(3).unwrap();
        event.enable().unwrap();
        spin();
        event.disable().unwrap();
        let mut samples = 0;
        for record in ring.records() {
            let sample = match record.unwrap() {
                Record::Sample(sample) => sample,
                Record::Throttle(throttle) | Record::Unthrottle(throttle) => {
                    let who = throttle.who.unwrap();
                    assert_eq!(who.pid, std::process::id());
                    continue;
                }
                record => panic!("{record:?}"),
            };
            samples += 1;
            let registers = sample.user_registers.as_ref().unwrap();
            assert_eq!(registers.get(IP), Some(sample.ip));
            assert!(registers.get(SP) > Some(0));
            assert_eq!(sample.user_stack.len(), 64);
            let innermost = sample.frames()[0];
            assert_eq!((innermost.ip, innermost.user), (sample.ip, true));
            assert!(sample.frames().len() <= 8);
            assert_eq!(sample.counts.len(), 1);
            assert_eq!(sample.counts[0].id, sample.id);
        }
        assert!(samples > 0);
    }

    #[test]
    fn the_kernels_own_backward_ring_holds_the_latest() {
        let (pmu, attr) = clock(20_000);
        let attr = EventAttr {
            backward: true,
            ..attr
        };
        let event = pmu.open_event(&attr).unwrap();
        let ring = event.map_overwrite(0).unwrap();
        event.enable().unwrap();
        spin();
        event.disable().unwrap();
        let records = ring.snapshot().unwrap();
        let times: Vec<u64> = records
            .iter()
            .filter_map(|record| match record {
                Record::Sample(sample) => Some(sample.time),
                _ => None,
            })
            .collect();
        // 56 bytes each: a page holds 73 of them.
        assert!(!times.is_empty() && times.len() <= 73, "{}", times.len());
        assert!(times.is_sorted(), "the oldest first");
    }
}

//! `/dev/vpmu`: device information, catalogue, and events whose records the host writes.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vpmu_abi::uapi::CatalogueEntry;
use vpmu_abi::{COUNT_VCPU, VERSION};
use zerocopy::FromZeros;

use crate::Error;
use crate::attr::EventAttr;
use crate::catalogue::{Catalogue, Entry};
use crate::event::Event;
use crate::marks::{Marks, MarksError};
use crate::persistent::{self, Persistent, PersistentError};
use crate::sys;

/// Path of the driver's device file.
pub const PATH: &str = "/dev/vpmu";

/// Maximum number of catalogue entries read at once.
const CHUNK: usize = 32;

/// An error of the device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The device file is missing.
    #[error("no {}: load the driver with `modprobe virtio_pmu`; if that fails, this machine's VMM offers no vPMU", .0.display())]
    Missing(PathBuf),
    /// The device file cannot be opened.
    #[error("cannot open {}", path.display())]
    Open {
        /// The path.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The file does not belong to a vPMU, the device was removed, or the device did not answer and
    /// the driver gave up on it.
    #[error("cannot query the vPMU")]
    Info(#[source] io::Error),
    /// The driver's interface version differs from this library's.
    #[error(
        "the vPMU has interface version {0}, but this program supports only {VERSION}: use the client that came with the VMM"
    )]
    Version(u32),
    /// The catalogue cannot be read.
    #[error("cannot read the vPMU's catalogue")]
    Catalogue(#[source] io::Error),
    /// Pending samples could not be written.
    #[error("cannot flush pending samples")]
    Flush(#[source] io::Error),
    /// The device refused the event.
    #[error("cannot open the event{}", hint(.0))]
    OpenEvent(#[source] io::Error),
}

/// A hint to append to the error text if the error number alone does not suggest a remedy.
fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOENT) => " (this host cannot count the event: see `vperf list`)",
        Some(libc::EACCES | libc::EPERM) => {
            " (`sysctl kernel.perf_event_paranoid` says what programs without CAP_PERFMON may open)"
        }
        Some(libc::EOPNOTSUPP) => " (an attribute is not supported for this event, or not with the requested engine)",
        Some(libc::ENOSPC) => {
            " (too many events are open in this machine, or too many by programs without CAP_PERFMON: \
              close some, or raise the module's parameter `unprivileged_percent`)"
        }
        Some(libc::EMFILE | libc::ENFILE) => " (each event on each CPU or thread is an open file: raise `ulimit -n`)",
        Some(libc::ESRCH) => " (the task is gone)",
        Some(libc::ENODEV) => " (no such CPU, or it is offline)",
        Some(libc::E2BIG) => " (the driver is too old for this program)",
        _ => "",
    }
}

/// Properties of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Info {
    /// Version of the device interface.
    pub version: u32,
    /// Number of vCPUs that the device counts on.
    pub vcpus: u32,
    /// Maximum number of events open at once in the whole machine.
    pub max_events: u32,
    /// Maximum number of data pages of one ring.
    pub max_ring_pages: u32,
    /// Whether counts of hardware events include the host's work for the vCPU.
    pub host_work_counted: bool,
    /// Base of the conversion from a TSC value to record time, in nanoseconds:
    /// `time_zero + ((tsc * time_mult) >> time_shift)`.
    pub time_zero: u64,
    /// Multiplier; see [`Info::time_zero`].
    pub time_mult: u32,
    /// Shift; see [`Info::time_zero`].
    pub time_shift: u32,
    /// perf type number of this PMU's events.
    pub pmu_type: u32,
    /// Frequency of the guest's TSC.
    pub tsc_khz: u32,
    /// Maximum number of samples per second of one event.
    pub max_sample_rate: u32,
    /// Maximum number of pages of one AUX area; zero if the device has no AUX areas.
    pub max_aux_pages: u32,
    /// Maximum number of persistent events that the guest may have.
    pub max_persistent: u32,
    /// perf type number with which a persistent event is reopened.
    pub persistent_type: u32,
}

impl Info {
    /// Converts a guest TSC value to record time in nanoseconds.
    #[must_use]
    pub fn time_of(&self, tsc: u64) -> u64 {
        let scaled = (u128::from(tsc) * u128::from(self.time_mult)).checked_shr(self.time_shift).unwrap_or(0);
        #[expect(clippy::cast_possible_truncation, reason = "the clock is modulo 2^64")]
        let scaled = scaled as u64;
        self.time_zero.wrapping_add(scaled)
    }
}

/// The open device.
#[derive(Debug)]
pub struct Vpmu {
    file: Arc<File>,
    info: Info,
    catalogue: Catalogue,
}

impl Vpmu {
    /// Opens [`PATH`] and reads the device's properties and catalogue.
    ///
    /// # Errors
    /// [`DeviceError`]: most often, the driver is not loaded.
    pub fn open() -> Result<Self, DeviceError> {
        Self::open_at(Path::new(PATH))
    }

    /// Opens the device at another path.
    ///
    /// # Errors
    /// See [`Vpmu::open`].
    pub fn open_at(path: &Path) -> Result<Self, DeviceError> {
        // Open the file for writing, too: the kernel requires that for mapping the doorbell.
        let file = File::options().read(true).write(true).open(path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => DeviceError::Missing(path.into()),
            _ => DeviceError::Open { path: path.into(), source },
        })?;
        let raw = sys::info(file.as_fd()).map_err(DeviceError::Info)?;
        if raw.version != VERSION {
            return Err(DeviceError::Version(raw.version));
        }
        let info = Info {
            version: raw.version,
            vcpus: raw.vcpus,
            max_events: raw.max_events,
            max_ring_pages: raw.max_ring_pages,
            host_work_counted: raw.count_mode == COUNT_VCPU,
            time_zero: raw.time_zero,
            time_mult: raw.time_mult,
            time_shift: raw.time_shift,
            pmu_type: raw.pmu_type,
            tsc_khz: raw.tsc_khz,
            max_sample_rate: raw.max_sample_rate,
            max_aux_pages: raw.max_aux_pages,
            max_persistent: raw.max_persistent,
            persistent_type: raw.persistent_type,
        };
        let catalogue = read_catalogue(&file, raw.catalogue_len)?;
        Ok(Self { file: Arc::new(file), info, catalogue })
    }

    /// Properties of the device.
    #[must_use]
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// Events that this host can count.
    #[must_use]
    pub fn catalogue(&self) -> &Catalogue {
        &self.catalogue
    }

    /// Returns attributes for the event that `spec` names. An event opened with them counts the
    /// calling thread, and is disabled at first. See [`Catalogue::attr`].
    ///
    /// # Errors
    /// [`Error::Catalogue`] names the invalid part.
    pub fn attr(&self, spec: &str) -> Result<EventAttr, Error> {
        Ok(self.catalogue.attr(self.info.pmu_type, spec)?)
    }

    /// Opens an event. If its ring is mapped, the host writes records directly to the ring.
    ///
    /// # Errors
    /// [`Error::Device`] with the driver's error number as its source.
    pub fn open_event(&self, attr: &EventAttr) -> Result<Event, Error> {
        self.open_in(attr, None)
    }

    /// Opens an event in the group that `leader` leads. The event counts only while the leader is
    /// enabled, and one reading returns the counts of the whole group at one moment.
    ///
    /// # Errors
    /// See [`Vpmu::open_event`]. Also fails with `EINVAL` if the event and `leader` measure
    /// different tasks or CPUs, and with `E2BIG` if the group already has 64 events.
    pub fn open_member(&self, attr: &EventAttr, leader: &Event) -> Result<Event, Error> {
        self.open_in(attr, Some(leader))
    }

    fn open_in(&self, attr: &EventAttr, leader: Option<&Event>) -> Result<Event, Error> {
        let open = || {
            let fd = vpmu_perf::call::open(&attr.to_raw(true), attr.place(leader.map(Event::perf_fd)))?;
            let event = Event::of_host(fd, &self.file, attr, attr.persistent);
            if self.makes_records(attr) {
                event.ring_fd()?;
            }
            Ok(event)
        };
        Ok(open().map_err(DeviceError::OpenEvent)?)
    }

    /// Whether programs wait for the event's records or packets.
    fn makes_records(&self, attr: &EventAttr) -> bool {
        attr.period != 0 || attr.inherit_stat || self.catalogue.is_trace(self.info.pmu_type, attr)
    }

    /// Places the mark `value` on the caller's CPU: one VM exit.
    ///
    /// # Errors
    /// [`MarksError::Place`] if the device supports no marks.
    pub fn mark(&self, value: u32) -> Result<(), MarksError> {
        sys::mark(self.file.as_fd(), value).map_err(MarksError::Place)
    }

    /// Maps the doorbell, so that a store can place a mark. If the kernel refuses the mapping, each
    /// mark takes a system call instead.
    ///
    /// # Errors
    /// [`MarksError::Keep`].
    pub fn marks(&self) -> Result<Marks, MarksError> {
        Marks::on(self.as_fd())
    }

    /// Makes the device write all pending samples and packets of persistent events to their rings and
    /// areas, and wakes the readers. Returns when all this is done.
    ///
    /// # Errors
    /// [`Error::Device`], with `EPERM` without CAP_PERFMON. If an event is in the error state, all other
    /// events are flushed, and the error is `EIO`.
    pub fn flush(&self) -> Result<(), Error> {
        Ok(sys::flush(self.as_fd()).map_err(DeviceError::Flush)?)
    }

    /// Lists persistent events by ascending id.
    ///
    /// # Errors
    /// [`PersistentError::List`].
    pub fn persistent(&self) -> Result<Vec<Persistent>, PersistentError> {
        persistent::list(self.as_fd())
    }

    /// Finds a persistent event by its name, or by its id in decimal digits.
    ///
    /// # Errors
    /// [`PersistentError::Unknown`] suggests similar names.
    pub fn find_persistent(&self, name: &str) -> Result<Persistent, PersistentError> {
        persistent::find(self.persistent()?, name)
    }

    /// Opens another handle of a persistent event. The handles share the event's ring, which keeps
    /// its earlier records.
    ///
    /// # Errors
    /// [`PersistentError::Open`], with `ENOENT` if it has ended and `EPERM` without CAP_PERFMON.
    pub fn reopen(&self, event: &Persistent) -> Result<Event, Error> {
        let by_id = EventAttr {
            disabled: false,
            read_format: event.attr.read_format,
            ..EventAttr::new(self.info().persistent_type, event.id).on_cpu(event.attr.cpu)
        };
        let open = || {
            let fd = vpmu_perf::call::open(&by_id.to_raw(false), by_id.place(None))?;
            let opened = Event::of_host(fd, &self.file, &event.attr, true);
            opened.ring_fd()?;
            Ok(opened)
        };
        Ok(open().map_err(|source| PersistentError::Open { name: event.name.clone(), source })?)
    }

    /// Reopens the listed event with this name or id.
    ///
    /// # Errors
    /// See [`Vpmu::find_persistent`] and [`Vpmu::reopen`].
    pub fn reopen_named(&self, name: &str) -> Result<Event, Error> {
        self.reopen(&self.find_persistent(name)?)
    }
}

impl AsFd for Vpmu {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn read_catalogue(file: &File, len: u32) -> Result<Catalogue, DeviceError> {
    let mut entries = Vec::new();
    let mut first = 0;
    while first < len {
        let mut raw = [CatalogueEntry::new_zeroed(); CHUNK];
        let filled = sys::catalogue(file.as_fd(), first, &mut raw).map_err(DeviceError::Catalogue)?;
        if filled == 0 {
            break;
        }
        entries.extend(raw[..filled].iter().map(Entry::from_raw));
        first = first.saturating_add(u32::try_from(filled).unwrap_or(u32::MAX));
    }
    Ok(Catalogue::new(entries))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_driver_error_names_remedy() {
        let error = Vpmu::open_at(Path::new("/nonexistent/vpmu")).unwrap_err();
        assert!(error.to_string().contains("modprobe virtio_pmu"), "{error}");
    }

    #[test]
    fn open_of_other_device_is_refused() {
        let error = Vpmu::open_at(Path::new("/dev/null")).unwrap_err();
        assert!(matches!(error, DeviceError::Info(_)), "{error}");
    }

    #[test]
    fn tsc_becomes_time() {
        let info = Info {
            version: 1,
            vcpus: 1,
            max_events: 1,
            max_ring_pages: 1,
            host_work_counted: false,
            time_zero: 5,
            time_mult: 1 << 31,
            time_shift: 32,
            pmu_type: 9,
            tsc_khz: 2_000_000,
            max_sample_rate: 100_000,
            max_aux_pages: 1024,
            max_persistent: 64,
            persistent_type: 10,
        };
        assert_eq!(info.time_of(2_000), 1_005);
        assert_eq!(info.time_of(u64::MAX), (u64::MAX >> 1) + 5);
        assert_eq!(Info { time_shift: 500, ..info }.time_of(2_000), 5);
    }
}

//! Records every exit of a vCPU, including exits that the host's kernel handles itself. To do so, this module opens
//! KVM's tracepoints on the vCPU's thread. The tracepoints' records also contain data about the host. This module
//! removes that data.

mod format;
mod pairs;
mod permission;
mod raw;
mod recorder;
mod redact;
mod stores;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use self::format::{Field, Format};
pub(super) use self::permission::Paranoid;
pub(super) use self::recorder::Recorder;
pub use self::stores::{StoreTracepoint, Stores};
use crate::abi::{EXIT_ALL, KIND_EXIT_TRACE};
use crate::source::Offer;

/// The host's tracefs directories.
const TRACEFS: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];
/// The kernel's own KVM drivers, which hit the tracepoints at every exit and entry. Other KVM drivers define these
/// tracepoints but do not hit them.
const DRIVERS: [&str; 2] = ["/sys/module/kvm_intel", "/sys/module/kvm_amd"];
const EXIT: &str = "kvm_exit";
const ENTRY: &str = "kvm_entry";

/// Why exits that the host's kernel handles cannot be traced.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// No tracefs is mounted, or the tracefs has no KVM events.
    #[error("no kvm events in tracefs: mount -t tracefs none /sys/kernel/tracing")]
    Absent,
    /// The events exist, but this process cannot read them.
    #[error("cannot read {path}: run as root")]
    Read {
        /// The path.
        path: PathBuf,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
    /// A field is missing in the events' `format` files.
    #[error("a tracepoint of KVM has no field {0} on this host")]
    Field(&'static str),
    /// The fields take up more bytes than the device examines.
    #[error("the fields of kvm:kvm_exit and kvm:kvm_entry take up {0} bytes on this host, more than the supported {most}", most = raw::RAW_MOST)]
    TooLong(usize),
    /// No driver that hits the tracepoints is loaded.
    #[error("neither kvm_intel nor kvm_amd is loaded, and only these drivers hit the tracepoints")]
    Driver,
    /// perf denies access to the tracepoints' data.
    #[error("perf refuses access to tracepoint data: run as root, or grant CAP_PERFMON")]
    Permission,
    /// perf cannot open the tracepoints.
    #[error("cannot open kvm:kvm_exit")]
    Open(#[source] io::Error),
}

/// The two tracepoints of this host.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tracepoints {
    pub(super) layout: Layout,
    /// Whether access to the tracepoints' data is unrestricted.
    open_to_all: bool,
}

/// Positions of the fields in the raw data of both tracepoints.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    /// The `common_type` of each tracepoint.
    exit: u16,
    entry: u16,
    /// The `common_type` field of the raw data.
    kind: Field,
    reason: Field,
    ip: Field,
    isa: Field,
    info: [Field; 2],
    /// Bytes of an exit's raw data that contain all these fields.
    end: usize,
}

/// Returns the offer for a host with both tracepoints.
pub(super) fn offer() -> Offer {
    Offer {
        kind: KIND_EXIT_TRACE,
        config: EXIT_ALL,
        any_config: false,
        name: "exit-trace".to_owned(),
        unit: "bytes",
        counts: "packets of format 1 (exits): each VM exit, including those that the host's kernel \
                 handles by itself",
        shortest_period: None,
        guest_only: true,
        excludes: false,
    }
}

/// The `format` file of KVM's tracepoint `name`.
fn read_format(name: &str) -> Result<String, Refusal> {
    let mut refused = Refusal::Absent;
    for root in TRACEFS {
        let path = Path::new(root).join("events/kvm").join(name).join("format");
        match fs::read_to_string(&path) {
            Ok(text) => return Ok(text),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => refused = Refusal::Read { path, source },
        }
    }
    Err(refused)
}

impl Tracepoints {
    /// Finds the tracepoints in the host's tracefs. Does not open them, because closing them again would take
    /// long. [`Tracepoints::permitted`] checks the permission.
    ///
    /// # Errors
    /// [`Refusal`].
    pub(super) fn find() -> Result<Self, Refusal> {
        let mut found = Self::parse(&read_format(EXIT)?, &read_format(ENTRY)?)?;
        if !DRIVERS.iter().any(|driver| Path::new(driver).exists()) {
            return Err(Refusal::Driver);
        }
        found.open_to_all = Paranoid::read().allows_tracepoints();
        Ok(found)
    }

    /// Returns the tracepoints if the calling thread may read their data.
    ///
    /// # Errors
    /// [`Refusal::Permission`].
    pub(super) fn permitted(self) -> Result<Self, Refusal> {
        if self.open_to_all || permission::is_capable() { Ok(self) } else { Err(Refusal::Permission) }
    }

    /// Opens the tracepoints on the calling thread, and closes them again. Closing them takes long.
    ///
    /// # Errors
    /// [`Refusal::Open`].
    pub(super) fn probe(&self) -> Result<(), Refusal> {
        recorder::probe(&self.layout).map_err(Refusal::Open)
    }

    /// Parses the `format` files of both tracepoints.
    fn parse(exit: &str, entry: &str) -> Result<Self, Refusal> {
        let of = |text| Format::parse(text).ok_or(Refusal::Field("ID"));
        let (exit, entry) = (of(exit)?, of(entry)?);
        let field = |name| exit.field(name).ok_or(Refusal::Field(name));
        let kind = field("common_type")?;
        if entry.field("common_type") != Some(kind) {
            return Err(Refusal::Field("common_type"));
        }
        let (reason, ip, isa) = (field("exit_reason")?, field("guest_rip")?, field("isa")?);
        let info = [field("info1")?, field("info2")?];
        let all = [kind, reason, ip, isa, info[0], info[1]];
        let end = all.into_iter().map(Field::end).max().unwrap_or(0);
        if end > raw::RAW_MOST {
            return Err(Refusal::TooLong(end));
        }
        Ok(Self {
            layout: Layout { exit: exit.id, entry: entry.id, kind, reason, ip, isa, info, end },
            open_to_all: false,
        })
    }
}

/// The formats of both tracepoints, for fuzz targets.
#[cfg(feature = "internals")]
#[derive(Debug)]
pub struct ExitFormats(Layout);

#[cfg(feature = "internals")]
impl ExitFormats {
    /// Parses the texts of the `format` files for the exit tracepoint and the entry tracepoint. Returns `None` if they
    /// are invalid.
    #[must_use]
    pub fn parse(exit: &str, entry: &str) -> Option<Self> {
        let found = Tracepoints::parse(exit, entry).ok()?;
        Some(Self(found.layout))
    }

    /// Returns the number of exits and losses in a host ring of exit records. The parameters are the same as for
    /// [`crate::host::records::take`].
    pub fn exits_in(&self, word: impl Fn(u64) -> u64, size: u64, tail: u64, head: u64) -> u64 {
        let (mut pairs, mut exits) = (pairs::Pairs::default(), 0);
        pairs.take(&self.0, word, size, tail, head, |_| exits += 1);
        pairs.finish(&mut |_| exits += 1);
        exits
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(crate) const EXIT: &str = "name: kvm_exit
ID: 1473
format:
\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;
\tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;

\tfield:unsigned int exit_reason;\toffset:8;\tsize:4;\tsigned:0;
\tfield:unsigned long guest_rip;\toffset:16;\tsize:8;\tsigned:0;
\tfield:u32 isa;\toffset:24;\tsize:4;\tsigned:0;
\tfield:u64 info1;\toffset:32;\tsize:8;\tsigned:0;
\tfield:u64 info2;\toffset:40;\tsize:8;\tsigned:0;
\tfield:unsigned int vcpu_id;\toffset:56;\tsize:4;\tsigned:0;
";
    pub(crate) const ENTRY: &str = "name: kvm_entry
ID: 1482
format:
\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;
\tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;

\tfield:unsigned int vcpu_id;\toffset:8;\tsize:4;\tsigned:0;
";

    #[test]
    fn both_formats_make_a_layout() {
        let found = Tracepoints::parse(EXIT, ENTRY).expect("known fields");
        let layout = found.layout;
        assert_eq!((layout.exit, layout.entry, layout.end), (1473, 1482, 48));
    }

    #[test]
    fn missing_field_is_named() {
        for name in ["exit_reason", "guest_rip", "isa", "info1", "info2"] {
            let without = EXIT.replace(&format!(" {name};"), " renamed;");
            let refused = Tracepoints::parse(&without, ENTRY).expect_err("not known");
            assert!(refused.to_string().contains(name), "{refused}");
        }
        assert!(Tracepoints::parse(EXIT, "").is_err());
        assert!(Tracepoints::parse(EXIT, &ENTRY.replace("common_type", "kind")).is_err());
    }

    #[test]
    fn field_far_from_the_start_is_refused() {
        let far = EXIT.replace("offset:40", "offset:121");
        let refused = Tracepoints::parse(&far, ENTRY).expect_err("129 bytes");
        assert!(matches!(refused, Refusal::TooLong(129)), "{refused}");
    }
}

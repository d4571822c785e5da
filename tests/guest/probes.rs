//! Tracepoints of the guest's kernel, and probes that tracefs puts on the kernel's functions.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::PathBuf;

const TRACEFS: &str = "/sys/kernel/tracing";
/// The group of these tests' probes, which is a directory of tracefs.
const GROUP: &str = "guest_tests";

/// Returns the number of a tracepoint, which is the `config` of its perf event.
pub(crate) fn tracepoint(group: &str, name: &str) -> io::Result<u64> {
    let file = PathBuf::from(TRACEFS).join("events").join(group).join(name).join("id");
    fs::read_to_string(file)?.trim().parse().map_err(io::Error::other)
}

/// Whether the kernel has a function of this name.
pub(crate) fn has_function(name: &str) -> io::Result<bool> {
    let symbols = fs::read_to_string("/proc/kallsyms")?;
    let mut names = symbols.lines().filter_map(|line| line.split_whitespace().nth(2));
    Ok(names.any(|symbol| symbol == name))
}

/// A probe at the beginning of a function of the kernel. It is removed when dropped. No event may use it then.
#[derive(Debug)]
pub(crate) struct Probe {
    name: String,
    pub(crate) id: u64,
}

impl Probe {
    /// Probes a function. The kernel refuses to probe some functions, for example those that handle probes.
    pub(crate) fn of(function: &str) -> io::Result<Self> {
        Self::at(function, function)
    }

    /// Like [`Probe::of`], for the last of several functions with this name.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn of_last(function: &str) -> io::Result<Self> {
        let symbols = fs::read_to_string("/proc/kallsyms")?;
        let mut lines = symbols.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let last = lines.rfind(|words| words.get(2) == Some(&function));
        let address = last.and_then(|words| words.first().copied()).ok_or(io::ErrorKind::NotFound)?;
        Self::at(function, &format!("0x{address}"))
    }

    fn at(name: &str, place: &str) -> io::Result<Self> {
        write_line(&format!("p:{GROUP}/{name} {place}"))?;
        let id = tracepoint(GROUP, name)?;
        Ok(Self { name: name.to_owned(), id })
    }

    /// The probe's name as perf's option `-e` takes it.
    pub(crate) fn event(&self) -> String {
        format!("{GROUP}:{}", self.name)
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        // A probe that stays only takes time.
        let _ = write_line(&format!("-:{GROUP}/{}", self.name));
    }
}

/// Appends to the kernel's list of probes, because a file that is opened for writing removes all probes.
fn write_line(line: &str) -> io::Result<()> {
    let mut probes = File::options().append(true).open(PathBuf::from(TRACEFS).join("kprobe_events"))?;
    probes.write_all(line.as_bytes())
}

//! A `perf.data` file that is written while the measurement runs.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, BufWriter, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use vpmu_client::attr::SAMPLE_CALLCHAIN;
use vpmu_client::tasks::{Action, Notice};
use vpmu_client::{Entry, EventAttr, Sample};
use vpmu_perf::record::{MODE_KERNEL, MODE_USER};
use vpmu_perfdata::{
    ATTR_EXCLUDE_HOST, ATTR_EXCLUDE_KERNEL, ATTR_EXCLUDE_USER, ATTR_WRITE_BACKWARD, BuildId, Context, Event,
    FINISHED_ROUND, Fields, Layout, Rate, Record, SAMPLE_FIELDS, SAMPLE_RAW, event_type,
};
use vpmu_symbols::kallsyms;

use crate::processes::Change;

/// The kernel's list of its functions.
const KALLSYMS: &str = "/proc/kallsyms";
const CPUINFO: &str = "/proc/cpuinfo";
const OS_RELEASE: &str = "/proc/sys/kernel/osrelease";
/// perf's `PERF_CONTEXT_MAX`: in a call chain, this value and all higher values are not addresses.
const FIRST_CONTEXT: u64 = 4095_u64.wrapping_neg();

/// An error of the file.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FileError {
    #[error("cannot keep the old recording as {}: remove it, or choose another file with -o", .0.display())]
    Keep(PathBuf, #[source] io::Error),
    #[error("cannot create {}: choose another file with -o", .0.display())]
    Create(PathBuf, #[source] io::Error),
    #[error("cannot write {}", .0.display())]
    Write(PathBuf, #[source] io::Error),
}

/// Describes an event of the catalogue for the file. Its id is the event's index plus 1.
pub(crate) fn event(index: usize, name: &str, entry: Option<&Entry>, attr: &EventAttr, is_newest_only: bool) -> Event {
    let flag = |is_set: bool, flag: u64| if is_set { flag } else { 0 };
    let is_trace = entry.is_some_and(|entry| entry.trace.is_some());
    Event {
        name: name.to_owned(),
        kind: entry.map_or(attr.pmu_type, |entry| event_type(entry.kind)),
        config: entry.map_or(attr.config, |entry| entry.config),
        rate: Some(if attr.freq { Rate::Frequency(attr.period) } else { Rate::Period(attr.period) }),
        sample_type: SAMPLE_FIELDS | attr.sample_type & SAMPLE_CALLCHAIN | flag(is_trace, SAMPLE_RAW),
        flags: flag(attr.exclude_user, ATTR_EXCLUDE_USER)
            | flag(attr.exclude_kernel, ATTR_EXCLUDE_KERNEL)
            | flag(entry.is_some_and(Entry::samples_guest_only), ATTR_EXCLUDE_HOST)
            | flag(is_newest_only, ATTR_WRITE_BACKWARD),
        id: index as u64 + 1,
    }
}

/// A file that is being written. Until [`Output::finish`], it is marked as unfinished.
#[derive(Debug)]
pub(crate) struct Output {
    path: PathBuf,
    file: BufWriter<File>,
    layout: Layout,
    /// Bytes of the records.
    size: u64,
    /// The record that is being written.
    bytes: Vec<u8>,
    /// Files of programs.
    programs: BTreeSet<String>,
    /// Addresses in the kernel.
    kernel: BTreeSet<u64>,
}

impl Output {
    /// Creates the file; an existing one is renamed to `path` with `.old` appended.
    pub(crate) fn create(path: &Path, events: Vec<Event>) -> Result<Self, FileError> {
        if path.is_file() {
            let mut old = path.as_os_str().to_owned();
            old.push(".old");
            fs::rename(path, &old).map_err(|error| FileError::Keep(old.into(), error))?;
        }
        let create = |error| FileError::Create(path.to_owned(), error);
        let command = std::env::args_os().map(|word| word.to_string_lossy().into_owned());
        let layout = Layout {
            events,
            arch: std::env::consts::ARCH.to_owned(),
            os_release: fs::read_to_string(OS_RELEASE).unwrap_or_default().trim_end().to_owned(),
            cpu_id: cpu_id(&fs::read_to_string(CPUINFO).unwrap_or_default()).unwrap_or_default(),
            command: command.collect(),
            build_ids: Vec::new(),
        };
        let mut file = BufWriter::new(File::create(path).map_err(create)?);
        file.write_all(&layout.head(0)).map_err(create)?;
        Ok(Self {
            path: path.to_owned(),
            file,
            layout,
            size: 0,
            bytes: Vec::new(),
            programs: BTreeSet::new(),
            kernel: BTreeSet::new(),
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a record with a trailer for `context`. Its event is the one with the index `event`.
    fn put(&mut self, event: usize, record: &Record, context: &Context) -> Result<(), FileError> {
        let Some(event) = self.layout.events.get(event) else {
            return Ok(());
        };
        self.bytes.clear();
        // A record that is too long is left out: no name or path of the kernel is.
        record.append(&mut self.bytes, &event.trailer(context));
        self.write()
    }

    fn write(&mut self) -> Result<(), FileError> {
        self.size += self.bytes.len() as u64;
        self.file.write_all(&self.bytes).map_err(|error| FileError::Write(self.path.clone(), error))
    }

    /// Writes a sample of the event with the index `event`. `raw` is the packet of a trace.
    pub(crate) fn sample(&mut self, event: usize, sample: &Sample, raw: &[u8]) -> Result<(), FileError> {
        if !sample.user {
            self.kernel.insert(sample.ip);
        }
        // The kernel is in the upper half of the address space.
        self.kernel.extend(sample.chain.iter().filter(|&&address| (1 << 63..FIRST_CONTEXT).contains(&address)));
        let Some(event) = self.layout.events.get(event) else {
            return Ok(());
        };
        let &Sample { pid, tid, time, cpu, ip, addr, period, user, .. } = sample;
        let mode = if user { MODE_USER } else { MODE_KERNEL };
        let context = Context { pid, tid, time, cpu };
        self.bytes.clear();
        event
            .sample(&Fields { context, ip, mode, addr, period, chain: &sample.chain, raw })
            .append(&mut self.bytes, &[]);
        self.write()
    }

    /// Writes the number of samples that an event has lost.
    pub(crate) fn lost(&mut self, event: usize, lost: u64, time: u64) -> Result<(), FileError> {
        self.put(event, &Record::lost(event as u64 + 1, lost), &Context { time, ..Context::default() })
    }

    /// Writes that an event was throttled.
    pub(crate) fn throttle(&mut self, event: usize, time: u64) -> Result<(), FileError> {
        self.put(event, &Record::throttle(event as u64 + 1, time), &Context { time, ..Context::default() })
    }

    /// Writes a change of a process.
    pub(crate) fn change(&mut self, change: &Change) -> Result<(), FileError> {
        match change {
            Change::State(process, time) => {
                let pid = process.pid;
                let context = |tid| Context { pid, tid, time: *time, cpu: 0 };
                for (tid, name) in &process.threads {
                    // The mappings that follow replace the old ones.
                    self.put(0, &Record::comm(pid, *tid, name, *tid == pid), &context(*tid))?;
                }
                for map in &process.maps {
                    let length = map.end.saturating_sub(map.start);
                    self.map(pid, (map.start, length, map.offset), &map.path, &context(pid))?;
                }
                Ok(())
            }
            Change::Notice(Notice { pid, tid, time, action }) => {
                let (pid, tid) = (*pid, *tid);
                let context = Context { pid, tid, time: *time, cpu: 0 };
                let record = match action {
                    Action::Map { start, length, offset, path } => {
                        return self.map(pid, (*start, *length, *offset), path, &context);
                    }
                    Action::Exec(name) => Record::comm(pid, tid, name, true),
                    Action::Name(name) => Record::comm(pid, tid, name, false),
                    Action::Fork { parent, parent_thread } => {
                        Record::fork((*parent, *parent_thread), (pid, tid), *time)
                    }
                    // Ignore actions that later versions of the library add.
                    _ => return Ok(()),
                };
                self.put(0, &record, &context)
            }
        }
    }

    fn map(
        &mut self,
        pid: u32,
        (start, length, offset): (u64, u64, u64),
        path: &str,
        context: &Context,
    ) -> Result<(), FileError> {
        if path.starts_with('/') && !self.programs.contains(path) {
            self.programs.insert(path.to_owned());
        }
        self.put(0, &Record::map(pid, start, length, offset, path), context)
    }

    /// Writes the names of the kernel's functions, the build ids of programs, and the head, which is now final.
    pub(crate) fn finish(&mut self) -> Result<(), FileError> {
        for (start, (size, name)) in functions(&self.kernel) {
            self.put(0, &Record::function(start, size, &name), &Context::default())?;
        }
        self.bytes.clear();
        FINISHED_ROUND.append(&mut self.bytes, &[]);
        self.write()?;
        let programs = std::mem::take(&mut self.programs).into_iter();
        self.layout.build_ids = programs.filter_map(|path| Some(BuildId { id: build_id(&path)?, path })).collect();
        let (head, tail) = (self.layout.head(self.size), self.layout.tail(self.size));
        let file = &mut self.file;
        let mut write = || -> io::Result<()> {
            file.write_all(&tail)?;
            file.rewind()?;
            file.write_all(&head)?;
            file.flush()
        };
        write().map_err(|error| FileError::Write(self.path.clone(), error))
    }
}

/// The kernel's functions at the addresses: size and name, by start. If the kernel hides them from this user, there are
/// none.
fn functions(addresses: &BTreeSet<u64>) -> BTreeMap<u64, (u32, String)> {
    if addresses.is_empty() {
        return BTreeMap::new();
    }
    let text = fs::read(KALLSYMS).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let functions = kallsyms(&text);
    if functions.are_hidden() {
        return BTreeMap::new();
    }
    let covering = functions.covering(addresses.iter().copied()).into_iter().map(|function| {
        let size = u32::try_from(function.end - function.start).unwrap_or(u32::MAX);
        (function.start, (size, function.name.to_string()))
    });
    covering.collect()
}

/// The build id of a program; `None` if it has none, or is not a regular file. A measured process chose the path.
fn build_id(path: &str) -> Option<Vec<u8>> {
    let mut options = File::options();
    let file = options.read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
    file.metadata().ok()?.is_file().then(|| vpmu_symbols::build_id(file))?
}

/// The processor as perf describes it: on x86, vendor, family, model and stepping.
fn cpu_id(cpuinfo: &str) -> Option<String> {
    let value = |wanted: &str| {
        cpuinfo.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            (key.trim() == wanted).then(|| value.trim())
        })
    };
    Some([value("vendor_id")?, value("cpu family")?, value("model")?, value("stepping")?].join(","))
}

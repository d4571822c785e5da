//! Task activity that a profile needs: programs executed, files mapped, processes forked. The guest kernel's perf
//! writes side-band records about this activity to the ring of a dummy event, which counts nothing, so even short-lived
//! processes are recorded. A [`Notice`] is a parsed side-band record.
//!
//! The dummy event uses `CLOCK_MONOTONIC_RAW` for the times of notices. The times of vPMU samples
//! are on the device's clock. [`Clocks`] converts the times of notices.

use std::io;

use vpmu_perf::bindings::{PERF_COUNT_SW_DUMMY, PERF_TYPE_SOFTWARE, perf_event_attr};
use vpmu_perf::call::{self, Target};
use vpmu_perf::record::{MODE_MASK, MODE_USER, TYPE_COMM, TYPE_FORK, TYPE_MMAP, halves};

use crate::arch;
use crate::attr::{EventAttr, SAMPLE_TID, SAMPLE_TIME};
use crate::device::Info;
use crate::event::Event;
use crate::record::Record;
use crate::ring::{Ring, RingError};
use crate::sys;

const MISC_EXEC: u16 = 1 << 13;

/// 2^3 pages hold about four hundred notices.
const PAGES_LOG2: u32 = 3;

/// An error of following tasks.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TasksError {
    /// The kernel refused the event.
    #[error("cannot follow task activity")]
    Open(#[source] io::Error),
    /// The event's ring is malformed.
    #[error("cannot follow task activity")]
    Ring(#[from] RingError),
}

/// An action of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Action {
    /// Mapped a file as executable.
    Map {
        /// Start address.
        start: u64,
        /// Bytes.
        length: u64,
        /// Offset of `start` in the file.
        offset: u64,
        /// The file, or a name such as `[vdso]`.
        path: String,
    },
    /// Executed the program with this name. The program's files are not mapped yet.
    Exec(String),
    /// Changed its name.
    Name(String),
    /// Was created, as a process or as a thread.
    Fork {
        /// The creator's process. A new thread is in the same process.
        parent: u32,
        /// The creator's thread.
        parent_thread: u32,
    },
}

/// One action of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// The process.
    pub pid: u32,
    /// The thread.
    pub tid: u32,
    /// Nanoseconds of `CLOCK_MONOTONIC_RAW`.
    pub time: u64,
    /// The action.
    pub action: Action,
}

/// Follows a thread and its children, or all tasks, on one CPU.
#[derive(Debug)]
pub struct Tasks {
    ring: Ring,
    lost: u64,
    _event: Event,
}

impl Tasks {
    /// Follows the thread `pid`, or all tasks if `pid` is -1, on the CPU `cpu`.
    ///
    /// # Errors
    /// [`TasksError::Open`] with the kernel's error number as its source.
    pub fn follow(pid: i32, cpu: i32) -> Result<Self, TasksError> {
        let place = Target { pid, cpu, leader: None };
        let fd = call::open(&dummy(), place).map_err(TasksError::Open)?;
        let event = Event::of_perf(fd, &EventAttr::new(PERF_TYPE_SOFTWARE, 0));
        Ok(Self { ring: event.map(PAGES_LOG2)?, lost: 0, _event: event })
    }

    /// Reads the notices since the last read, in order of time.
    ///
    /// # Errors
    /// [`TasksError::Ring`].
    pub fn read(&mut self) -> Result<Vec<Notice>, TasksError> {
        let mut notices = Vec::new();
        while let Some(record) = self.ring.next_record()? {
            match record {
                Record::Lost { lost, .. } => self.lost = self.lost.saturating_add(lost),
                Record::Unknown { record_type, misc, body } => notices.extend(notice(record_type, misc, &body)),
                // A dummy event has no samples.
                _ => {}
            }
        }
        Ok(notices)
    }

    /// Notices lost so far because the ring was full.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost
    }
}

fn dummy() -> perf_event_attr {
    let mut attr = EventAttr {
        inherit: true,
        disabled: false,
        exclude_kernel: true,
        sample_type: SAMPLE_TID | SAMPLE_TIME,
        read_format: 0,
        ..EventAttr::new(PERF_TYPE_SOFTWARE, u64::from(PERF_COUNT_SW_DUMMY))
    }
    .to_raw(false);
    attr.set_exclude_hv(1);
    attr.set_mmap(1);
    attr.set_comm(1);
    attr.set_comm_exec(1);
    attr.set_task(1);
    attr.set_sample_id_all(1);
    attr.set_use_clockid(1);
    attr.clockid = libc::CLOCK_MONOTONIC_RAW;
    attr
}

/// Parses a record whose last two words are the task and the time. Returns `None` for a mapping of the kernel, for a
/// record of another type, and for a malformed record.
fn notice(record_type: u32, misc: u16, body: &[u64]) -> Option<Notice> {
    let (body, trailer) = body.split_at_checked(body.len().checked_sub(2)?)?;
    let (pid, second) = halves(*body.first()?);
    let time = trailer[1];
    let mut tid = second;
    let action = match record_type {
        TYPE_MMAP if misc & MODE_MASK == MODE_USER => Action::Map {
            start: *body.get(1)?,
            length: *body.get(2)?,
            offset: *body.get(3)?,
            path: text(body.get(4..)?),
        },
        TYPE_COMM if misc & MISC_EXEC != 0 => Action::Exec(text(body.get(1..)?)),
        TYPE_COMM => Action::Name(text(body.get(1..)?)),
        // In a fork record, the second half of each word is the parent's.
        TYPE_FORK => {
            let (child, parent_thread) = halves(*body.get(1)?);
            tid = child;
            Action::Fork { parent: second, parent_thread }
        }
        _ => return None,
    };
    Some(Notice { pid, tid, time, action })
}

/// Returns the text up to the first zero byte.
fn text(words: &[u64]) -> String {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// `CLOCK_MONOTONIC_RAW` and the device's clock, read at one moment. Both run steadily, but at
/// slightly different rates: read them again from time to time.
#[derive(Debug, Clone, Copy, Default)]
pub struct Clocks {
    raw: u64,
    device: u64,
}

impl Clocks {
    /// Reads both clocks.
    #[must_use]
    pub fn read(info: &Info) -> Self {
        Self { raw: sys::monotonic_raw(), device: info.time_of(arch::ticks()) }
    }

    /// Converts a raw time to the device's.
    #[must_use]
    pub fn device_time(&self, raw: u64) -> u64 {
        self.device.wrapping_add(raw.wrapping_sub(self.raw))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn short_lived_child_has_name_and_program() {
        // Follows only this thread, which forks.
        let mut followed: Vec<Tasks> = (0..).map_while(|cpu| Tasks::follow(0, cpu).ok()).collect();
        assert!(!followed.is_empty());
        let mut child = Command::new("/bin/true").spawn().unwrap();
        let pid = child.id();
        child.wait().unwrap();
        let mut notices: Vec<Notice> = Vec::new();
        for tasks in &mut followed {
            notices.extend(tasks.read().unwrap());
            assert_eq!(tasks.lost(), 0);
        }
        notices.retain(|notice| notice.pid == pid);
        notices.sort_by_key(|notice| notice.time);
        let actions: Vec<&Action> = notices.iter().map(|notice| &notice.action).collect();
        assert!(matches!(actions[0], Action::Fork { parent, .. } if *parent == std::process::id()));
        let exec = actions.iter().position(|a| **a == Action::Exec("true".into())).unwrap();
        let is_program = |action: &&Action| {
            matches!(action, Action::Map { path, length, .. }
                if path.ends_with("/true") && *length > 0)
        };
        assert!(actions[exec..].iter().any(is_program), "{actions:?}");
    }

    #[test]
    fn records_that_make_no_sense_are_nothing() {
        for words in 0..5 {
            assert_eq!(notice(TYPE_MMAP, MODE_USER, &[1; 5][..words]), None, "{words}");
        }
        assert_eq!(notice(TYPE_COMM, 0, &[]), None);
        assert_eq!(notice(77, 0, &[1, 2, 3]), None);
        assert_eq!(notice(TYPE_FORK, 0, &[7 | 7 << 32, 0, 0]), None);
    }

    #[test]
    fn notice_is_of_a_thread() {
        let name = u64::from_ne_bytes(*b"work\0\0\0\0");
        let thread = 7 | 8 << 32;
        let expected = |action| Some(Notice { pid: 7, tid: 8, time: 9, action });
        assert_eq!(notice(TYPE_COMM, MISC_EXEC, &[thread, name, thread, 9]), expected(Action::Exec("work".into())));
        assert_eq!(notice(TYPE_COMM, 0, &[thread, name, thread, 9]), expected(Action::Name("work".into())));
        let fork = [7 | 5 << 32, 8 | 6 << 32, 9, thread, 9];
        assert_eq!(notice(TYPE_FORK, 0, &fork), expected(Action::Fork { parent: 5, parent_thread: 6 }));
    }

    #[test]
    fn clocks_translate_across_their_reading() {
        let clocks = Clocks { raw: 100, device: 1000 };
        assert_eq!(clocks.device_time(150), 1050);
        assert_eq!(clocks.device_time(50), 950);
    }
}

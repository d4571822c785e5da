//! Shared code of the tests of persistent events: opens and reads them, places known sequences of marks, and removes
//! what earlier tests left.
#![expect(unsafe_code, reason = "system calls")]

use std::fs;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::FromRawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use perf_event_open_sys::bindings::perf_event_attr;

use crate::ensure::{ensure, ensure_eq};
use crate::fields::{self, ADDR, TIME};
use crate::pages::{Pages, READ, Record};
use crate::raw::{Device, Doorbell, Event, How, OPERATORS, silent};
use crate::{Fallible, Outcome};

/// Bytes of a record of [`sequence`].
pub(crate) const RECORD: u64 = 24;
/// Where the kernel lists persistent events.
pub(crate) const SYSFS: &str = "/sys/bus/event_source/devices/persistent";

/// An attr that records each mark's value. Only a loss wakes readers.
pub(crate) fn sequence(device: &Device) -> perf_event_attr {
    silent(device.any_marks(1, TIME | ADDR))
}

/// Like [`sequence`], for a ring that is written backward, so that every reader finds the newest records at its head.
pub(crate) fn backwards(device: &Device) -> perf_event_attr {
    let mut attr = sequence(device);
    attr.set_write_backward(1);
    attr
}

/// Returns the values of the marks in these records. Fails if the records report a loss.
pub(crate) fn values(records: &[Record], attr: &perf_event_attr) -> Result<Vec<u64>, String> {
    let (samples, lost) = fields::samples(records, attr)?;
    if lost != 0 {
        return Err(format!("{lost} lost"));
    }
    Ok(samples.iter().filter_map(|sample| sample.addr).collect())
}

/// Like [`values`], for a backward ring. Returns the oldest value first.
pub(crate) fn newest(ring: &Pages, attr: &perf_event_attr) -> Result<Vec<u64>, String> {
    let head = ring.head();
    let mut records = Vec::new();
    let mut position = head;
    // The head counts down from zero.
    while position != 0 && position.wrapping_sub(head) + RECORD <= ring.size() {
        let record = ring.record_at(position)?;
        position = position.wrapping_add(8 + 8 * record.words.len() as u64);
        records.push(record);
    }
    records.reverse();
    values(&records, attr)
}

/// Ends all persistent events of the guest that earlier tests left behind. The operator's events stay.
pub(crate) fn sweep(device: &Device) -> Outcome {
    for entry in device.persistent()? {
        if entry.flags & OPERATORS == 0 {
            let event = device.reopen(entry.id, entry.cpu.cast_signed())?;
            event.attach()?;
        }
    }
    let left = device.persistent()?;
    let own = left.iter().filter(|entry| entry.flags & OPERATORS == 0);
    ensure_eq!(own.count(), 0, "persistent events after all were ended");
    Ok(())
}

/// Opens the device and ends every persistent event of the guest.
pub(crate) fn fresh() -> Fallible<Device> {
    let device = Device::open()?;
    sweep(&device)?;
    Ok(device)
}

/// Opens an enabled persistent event on `cpu`. Also returns its id.
pub(crate) fn persistent(device: &Device, attr: &perf_event_attr, cpu: i32, name: &str) -> io::Result<(Event, u64)> {
    let event = device.start(attr, How::on_cpu(cpu))?;
    let id = event.detach(name)?;
    Ok((event, id))
}

/// Maps the ring of a persistent event read-only, so that no records are taken from it.
pub(crate) fn look(event: &Event, data_pages: usize) -> io::Result<Pages> {
    Pages::map(event, data_pages, READ)
}

/// Returns the sysfs path of the event with this name.
pub(crate) fn listed(name: &str) -> PathBuf {
    Path::new(SYSFS).join("events").join(name)
}

/// The names that sysfs lists, in order.
pub(crate) fn names() -> io::Result<Vec<String>> {
    let mut names = fs::read_dir(Path::new(SYSFS).join("events"))?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<io::Result<Vec<_>>>()?;
    names.sort_unstable();
    Ok(names)
}

/// A pipe's read end and write end.
fn pipe() -> io::Result<(File, File)> {
    let mut fds = [0; 2];
    // SAFETY: room for two descriptors.
    if unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptors were just opened, and nothing else owns them.
    let ends = fds.map(|fd| unsafe { File::from_raw_fd(fd) });
    let [read, write] = ends;
    Ok((read, write))
}

/// A child process that sends numbers until it is killed.
pub(crate) struct Doomed {
    pid: libc::pid_t,
    said: File,
}

impl Doomed {
    /// Forks a child that runs `body`, which sends numbers with [`tell`]. Then the child waits to be killed.
    pub(crate) fn start(body: impl FnOnce(&mut File) -> Outcome) -> io::Result<Self> {
        let (said, mut tells) = pipe()?;
        // SAFETY: the process has only this thread, which continues in the child.
        let pid = unsafe { libc::fork() };
        if pid < 0 {
            return Err(io::Error::last_os_error());
        }
        if pid == 0 {
            if let Err(error) = body(&mut tells) {
                eprintln!("the doomed: {error}");
                // SAFETY: the call ends the child before the child can return from this function.
                unsafe { libc::_exit(1) };
            }
            loop {
                // SAFETY: the call takes no arguments.
                unsafe { libc::pause() };
            }
        }
        Ok(Self { pid, said })
    }

    /// The next number from the child.
    pub(crate) fn hear(&mut self) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.said.read_exact(&mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    /// Kills the child with SIGKILL, and waits until it has ended.
    pub(crate) fn kill(self) -> Outcome {
        let mut status = 0;
        // SAFETY: the process is a child of this one, and nobody has waited for it.
        unsafe { libc::kill(self.pid, libc::SIGKILL) };
        // SAFETY: a valid address.
        unsafe { libc::waitpid(self.pid, &raw mut status, 0) };
        ensure!(
            libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL,
            "the child ended by itself: status {status:#x}"
        );
        Ok(())
    }
}

/// Sends a number to the process that started a [`Doomed`].
pub(crate) fn tell(parent: &mut File, number: u64) -> io::Result<()> {
    parent.write_all(&number.to_ne_bytes())
}

/// A doorbell that marks 1, 2, 3 and so on.
pub(crate) struct Counter {
    bell: Doorbell,
    next: u32,
}

impl Counter {
    pub(crate) fn new(device: &Device) -> io::Result<Self> {
        Ok(Self { bell: Doorbell::map(device)?, next: 1 })
    }

    /// Places the next `times` marks.
    pub(crate) fn mark(&mut self, times: u32) {
        for _ in 0..times {
            self.bell.mark(self.next);
            self.next += 1;
        }
    }

    /// The number of marks placed so far.
    pub(crate) fn placed(&self) -> u64 {
        u64::from(self.next - 1)
    }

    /// Places marks until `stop` is set, or until `most` marks have been placed in total.
    pub(crate) fn mark_until(&mut self, stop: &AtomicBool, most: u64) {
        while !stop.load(Ordering::Relaxed) && self.placed() < most {
            self.mark(1);
        }
    }
}

/// All values from 1 to `last`.
pub(crate) fn up_to(last: u64) -> Vec<u64> {
    (1..=last).collect()
}

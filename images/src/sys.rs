//! System calls and instructions that the standard library does not offer: file locks, children that die
//! with their parent, the user's id, the time-stamp counter.
#![allow(unsafe_code)]

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::SystemTime;

/// A lock between processes and threads; released when dropped or when its owner dies.
#[derive(Debug)]
pub struct Lock {
    file: File,
}

impl Lock {
    /// Takes the exclusive lock on the file `path`. If another owner holds it, calls `waiting` once, then waits.
    ///
    /// # Errors
    /// When the file cannot be made or locked.
    pub fn take(path: &Path, waiting: impl FnOnce()) -> io::Result<Self> {
        if let Some(lock) = Self::try_take(path)? {
            return Ok(lock);
        }
        waiting();
        Self::open(path, libc::LOCK_EX)
    }

    /// Takes the exclusive lock on the file `path`; `None` if another owner holds it.
    ///
    /// # Errors
    /// When the file cannot be made or locked.
    pub fn try_take(path: &Path) -> io::Result<Option<Self>> {
        match Self::open(path, libc::LOCK_EX | libc::LOCK_NB) {
            Ok(lock) => Ok(Some(lock)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Takes a shared lock on the file `path`. Waits while another owner holds it exclusively.
    ///
    /// # Errors
    /// When the file cannot be made or locked.
    pub fn share(path: &Path) -> io::Result<Self> {
        Self::open(path, libc::LOCK_SH)
    }

    fn open(path: &Path, operation: libc::c_int) -> io::Result<Self> {
        loop {
            let file = File::options().create(true).append(true).open(path)?;
            match flock(&file, operation) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
                // The previous owner may have removed the file.
                Ok(()) if is_at(&file, path)? => return Ok(Self { file }),
                Ok(()) => {}
            }
        }
    }

    /// Sets the file's time of modification to now.
    ///
    /// # Errors
    /// When the file system refuses.
    pub fn touch(&self) -> io::Result<()> {
        self.file.set_modified(SystemTime::now())
    }
}

fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let ours = file.metadata()?;
    match fs::metadata(path) {
        Ok(meta) => Ok((meta.dev(), meta.ino()) == (ours.dev(), ours.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

fn flock(file: &File, operation: libc::c_int) -> io::Result<()> {
    // SAFETY: the descriptor is open for as long as `file` is borrowed; no memory is passed.
    match unsafe { libc::flock(file.as_raw_fd(), operation) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Makes the kernel kill the child when the thread that has started the child ends, for whatever reason.
pub fn dies_with_us(command: &mut Command) -> &mut Command {
    let parent = std::process::id();
    let arm = move || {
        // SAFETY: prctl with PR_SET_PDEATHSIG takes one integer and touches no memory.
        if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // The parent may have died before the signal was requested above; the child would then never get it.
        if std::os::unix::process::parent_id() != parent {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        Ok(())
    };
    // SAFETY: `arm` runs between fork and exec. It makes two system calls and allocates nothing.
    unsafe { command.pre_exec(arm) }
}

/// The number of the user as whom this process runs.
pub fn user() -> u32 {
    // SAFETY: the call takes no argument and cannot fail.
    unsafe { libc::geteuid() }
}

/// Whether this process may install packages.
pub fn is_root() -> bool {
    user() == 0
}

/// This processor's time-stamp counter.
#[cfg(target_arch = "x86_64")]
pub fn tsc() -> u64 {
    // SAFETY: every x86-64 processor has this counter, and Linux lets programs read it.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// This processor's virtual counter.
#[cfg(target_arch = "aarch64")]
pub fn tsc() -> u64 {
    let counter;
    // SAFETY: every processor has this counter, and Linux lets programs read it.
    unsafe { core::arch::asm!("mrs {}, cntvct_el0", out(reg) counter, options(nomem, nostack)) };
    counter
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn file_lock_has_one_holder() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let first = Lock::take(&path, || panic!("nobody has it")).unwrap();
        let (reported, waits) = mpsc::channel();
        let second = {
            let path = path.clone();
            std::thread::spawn(move || {
                let lock = Lock::take(&path, || reported.send("waiting").unwrap()).unwrap();
                drop(lock);
            })
        };
        assert_eq!(waits.recv().unwrap(), "waiting");
        assert!(!second.is_finished());
        drop(first);
        second.join().unwrap();
    }

    #[test]
    fn lock_on_a_file_that_its_last_owner_removed_is_on_the_new_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let first = Lock::take(&path, || panic!("nobody has it")).unwrap();
        let (reported, waits) = mpsc::channel();
        let second = {
            let path = path.clone();
            let thread = || fs::read_link("/proc/thread-self").unwrap();
            std::thread::spawn(move || Lock::take(&path, || reported.send(thread()).unwrap()).unwrap())
        };
        let status = Path::new("/proc").join(waits.recv().unwrap()).join("status");
        // The other thread sleeps only in order to wait for the lock.
        while !fs::read_to_string(&status).unwrap().contains("State:\tS") {
            std::thread::yield_now();
        }
        fs::remove_file(&path).unwrap();
        drop(first);
        let _second = second.join().unwrap();
        assert!(Lock::try_take(&path).unwrap().is_none());
    }
}

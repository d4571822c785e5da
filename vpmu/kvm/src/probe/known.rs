//! Caches the answer of [`guest_ips`](super::guest_ips) in a file, because a probe takes longer than all other
//! preparations for a guest. The answer remains valid until the host reboots or a KVM module is loaded again.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Maximum number of bytes to read from the file. Any answer is shorter.
const MOST: u64 = 4096;
/// KVM's device in sysfs.
const DEVICE: &str = "devices/virtual/misc/kvm";

/// The file that contains the answer for this host.
#[derive(Debug)]
pub(super) struct Known {
    directory: PathBuf,
    host: String,
}

impl Known {
    /// Returns the file in `directory` for this boot of the host and for the KVM module as it is loaded now. Returns
    /// `None` if the host's boot id or KVM's directory in sysfs cannot be read.
    pub(super) fn of_host(directory: &Path) -> Option<Self> {
        let host = host(Path::new("/proc"), Path::new("/sys")).ok()?;
        Some(Self { directory: directory.to_owned(), host })
    }

    fn path(&self) -> PathBuf {
        self.directory.join("guest-ips")
    }

    /// Returns whether host samples have guest addresses. Returns `None` if there is no trusted answer for this host.
    pub(super) fn answer(&self) -> Option<bool> {
        let text = self.read().ok()?;
        [false, true].into_iter().find(|&answer| text == self.text(answer))
    }

    fn text(&self, answer: bool) -> String {
        format!("{answer}\n{}", self.host)
    }

    fn read(&self) -> io::Result<String> {
        let mut options = File::options();
        let file = options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let file = file.open(self.path())?;
        let about = file.metadata()?;
        let own = rustix::process::geteuid().as_raw();
        // Trust the file only if nobody except root and this user can write to it.
        if !about.is_file() || ![0, own].contains(&about.uid()) || about.mode() & 0o022 != 0 {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let mut text = String::new();
        file.take(MOST).read_to_string(&mut text)?;
        Ok(text)
    }

    /// The path of the file until it is completely written. Each process has its own path, because another VMM may
    /// store its answer at the same time.
    fn unfinished(&self) -> PathBuf {
        // In a PID namespace of its own, each VMM has the id 1. /proc has the id that it has among all processes.
        let id = fs::read_link("/proc/self").unwrap_or_else(|_| std::process::id().to_string().into());
        let mut name = OsString::from("guest-ips.");
        name.push(id);
        self.directory.join(name)
    }

    /// Stores the answer.
    ///
    /// # Errors
    /// The file cannot be written. In that case, the VMM of the next guest probes again.
    pub(super) fn keep(&self, answer: bool) -> io::Result<()> {
        let mut builder = DirBuilder::new();
        match builder.mode(0o755).create(&self.directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let unfinished = self.unfinished();
        // An earlier process with this id may have died while it wrote the file.
        match fs::remove_file(&unfinished) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut options = File::options();
        let mut file = options.write(true).create_new(true).mode(0o644).open(&unfinished)?;
        let written = file
            .set_permissions(Permissions::from_mode(0o644))
            .and_then(|()| file.write_all(self.text(answer).as_bytes()))
            .and_then(|()| fs::rename(&unfinished, self.path()));
        written.inspect_err(|_| {
            // If the file cannot be removed, nothing more can be done.
            let _ = fs::remove_file(&unfinished);
        })
    }
}

/// Identifies this boot of the host by its boot id, and this load of the KVM module by the inode number of the
/// directory [`DEVICE`]. Each load of a KVM module creates this directory again, and sysfs does not reuse inode
/// numbers.
fn host(proc: &Path, sys: &Path) -> io::Result<String> {
    let boot = fs::read_to_string(proc.join("sys/kernel/random/boot_id"))?;
    let kvm = fs::metadata(sys.join(DEVICE))?.ino();
    Ok(format!("{}\nkvm {kvm}\n", boot.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(directory: &Path, host: &str) -> Known {
        Known { directory: directory.join("known"), host: host.to_owned() }
    }

    #[test]
    fn kept_answer_holds_for_the_same_host_alone() {
        let directory = tempfile::tempdir().expect("a directory");
        let one = known(directory.path(), "one");
        assert_eq!(one.answer(), None);
        for answer in [true, false] {
            one.keep(answer).expect("kept");
            assert_eq!(one.answer(), Some(answer));
        }
        assert_eq!(known(directory.path(), "two").answer(), None);
        let names = fs::read_dir(directory.path().join("known")).expect("a directory");
        assert_eq!(names.count(), 1);
    }

    #[test]
    fn file_that_a_dead_process_left_is_replaced() {
        let directory = tempfile::tempdir().expect("a directory");
        let one = known(directory.path(), "one");
        fs::create_dir(&one.directory).expect("a directory");
        fs::write(one.unfinished(), "half").expect("written");
        one.keep(true).expect("kept");
        assert_eq!(one.answer(), Some(true));
        assert!(!one.unfinished().exists());
    }

    #[test]
    fn file_that_others_can_write_is_ignored() {
        let directory = tempfile::tempdir().expect("a directory");
        let one = known(directory.path(), "one");
        one.keep(true).expect("kept");
        fs::set_permissions(one.path(), Permissions::from_mode(0o664)).expect("writable");
        assert_eq!(one.answer(), None);
        fs::remove_file(one.path()).expect("removed");
        let other = directory.path().join("other");
        fs::write(&other, one.text(true)).expect("written");
        std::os::unix::fs::symlink(&other, one.path()).expect("a link");
        assert_eq!(one.answer(), None);
    }

    #[test]
    fn fifo_is_ignored_without_waiting_for_a_writer() {
        let directory = tempfile::tempdir().expect("a directory");
        let one = known(directory.path(), "one");
        one.keep(true).expect("kept");
        fs::remove_file(one.path()).expect("removed");
        let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR);
        rustix::fs::mknodat(rustix::fs::CWD, one.path(), kind, mode, 0).expect("made");
        assert_eq!(one.answer(), None);
    }

    #[test]
    fn host_differs_by_its_boot_and_by_each_load_of_kvm() {
        let directory = tempfile::tempdir().expect("a directory");
        let (proc, sys) = (directory.path().join("proc"), directory.path().join("sys"));
        let boot = proc.join("sys/kernel/random/boot_id");
        fs::create_dir_all(boot.parent().expect("its directory")).expect("made");
        let set = |id: &str| fs::write(&boot, id).expect("written");
        let device = sys.join(DEVICE);
        let of = || host(&proc, &sys);
        set("a\n");
        assert!(of().is_err(), "without KVM");
        fs::create_dir_all(&device).expect("made");
        let first = of().expect("a host");
        assert_eq!(of().expect("a host"), first);
        // Create the new directory while the old one still exists, so that the inode numbers differ.
        let again = sys.join("again");
        fs::create_dir(&again).expect("made");
        fs::remove_dir(&device).expect("removed");
        fs::rename(&again, &device).expect("made again");
        let loaded = of().expect("a host");
        assert_ne!(loaded, first);
        set("b\n");
        assert_ne!(of().expect("a host"), loaded);
    }
}

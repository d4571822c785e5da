//! An earlier answer of [`guest_ips`](super::guest_ips), kept in a file for as long as the host's kernel and its KVM
//! modules stay loaded: a probe takes longer than all other preparations of a guest.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Longer files are not ours.
const MOST: u64 = 4096;
/// Of KVM, in sysfs.
const DEVICE: &str = "devices/virtual/misc/kvm";

/// The file of an answer.
#[derive(Debug)]
pub(super) struct Known {
    directory: PathBuf,
    host: String,
}

impl Known {
    /// The answer in `directory` for this boot of the host and its KVM modules; `None` where they cannot
    /// be told from others.
    pub(super) fn of_host(directory: &Path) -> Option<Self> {
        let host = host(Path::new("/proc"), Path::new("/sys")).ok()?;
        Some(Self {
            directory: directory.to_owned(),
            host,
        })
    }

    fn path(&self) -> PathBuf {
        self.directory.join("guest-ips")
    }

    /// Whether host samples have guest addresses, if a probe of this host has found out.
    pub(super) fn answer(&self) -> Option<bool> {
        let text = self.read().ok()?;
        [false, true]
            .into_iter()
            .find(|&answer| text == self.text(answer))
    }

    fn text(&self, answer: bool) -> String {
        format!("{answer}\n{}", self.host)
    }

    fn read(&self) -> io::Result<String> {
        let mut options = File::options();
        let file = options
            .read(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let file = file.open(self.path())?;
        let about = file.metadata()?;
        let own = rustix::process::geteuid().as_raw();
        // Other users may not vouch for the host.
        if !about.is_file() || ![0, own].contains(&about.uid()) || about.mode() & 0o022 != 0 {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let mut text = String::new();
        file.take(MOST).read_to_string(&mut text)?;
        Ok(text)
    }

    /// Keeps the answer.
    ///
    /// # Errors
    /// The file cannot be written; the next guest's probe takes its time again.
    pub(super) fn keep(&self, answer: bool) -> io::Result<()> {
        let mut builder = DirBuilder::new();
        match builder.mode(0o755).create(&self.directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        // Another VMM may be writing its own.
        let unfinished = self
            .directory
            .join(format!("guest-ips.{}", std::process::id()));
        let mut options = File::options();
        let mut file = options
            .write(true)
            .create_new(true)
            .mode(0o644)
            .open(&unfinished)?;
        let written = file
            .set_permissions(Permissions::from_mode(0o644))
            .and_then(|()| file.write_all(self.text(answer).as_bytes()))
            .and_then(|()| fs::rename(&unfinished, self.path()));
        written.inspect_err(|_| {
            // Nothing more can be done about a file that cannot be removed.
            let _ = fs::remove_file(&unfinished);
        })
    }
}

/// This boot of the host, and of its KVM: each load of a KVM module makes the device anew, and sysfs gives no inode
/// number twice.
fn host(proc: &Path, sys: &Path) -> io::Result<String> {
    let boot = fs::read_to_string(proc.join("sys/kernel/random/boot_id"))?;
    let kvm = fs::metadata(sys.join(DEVICE))?.ino();
    Ok(format!("{}\nkvm {kvm}\n", boot.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(directory: &Path, host: &str) -> Known {
        Known {
            directory: directory.join("known"),
            host: host.to_owned(),
        }
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
        // Made while the other still exists: with an inode of its own.
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

//! The file of the control socket. From the moment when the file is created, only its owner can access it. The file is
//! removed when the VMM ends. A new socket replaces the stale socket of a VMM that has ended, but never the socket of a
//! running VMM.

#![allow(unsafe_code)]

use std::fs::{File, Permissions};
use std::io;
use std::mem::{MaybeUninit, offset_of};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use libc::{c_char, c_int, sockaddr_un, socklen_t, ucred};
use rustix::fs::{AtFlags, FileType};

use crate::confine::User;
use crate::path_at::PathAt;

/// Errors from creating the control socket.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Another process listens there.
    #[error("another machine uses the control socket {0}: choose another path with --ctl")]
    InUse(PathBuf),
    /// The path is not a socket.
    #[error("{0} exists and is not a socket: choose another path with --ctl")]
    NoSocket(PathBuf),
    /// The path is empty or too long for a socket's address.
    #[error("invalid path {path} for a socket: choose a path of 1 to {most} bytes")]
    Length {
        /// The path.
        path: PathBuf,
        /// The limit.
        most: usize,
    },
    /// Another process replaced the new socket's file.
    #[error("{0} was replaced by another file: choose a path in a directory that only you can write to")]
    Replaced(PathBuf),
    /// The host refused.
    #[error("cannot create the control socket {path}")]
    Host {
        /// The path.
        path: PathBuf,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
}

/// Maximum length of a socket's path in bytes, without the terminating zero.
const MAX_PATH: usize = size_of::<sockaddr_un>() - offset_of!(sockaddr_un, sun_path) - 1;
/// Maximum number of clients that wait to be accepted.
const BACKLOG: c_int = 16;

/// A listening socket that only its owner can open. Dropping the value removes the socket's file.
#[derive(Debug)]
pub struct Socket {
    pub(crate) listener: UnixListener,
    place: PathAt,
    /// Device and inode of the socket's file, to detect that another file has replaced it at the path.
    made: (u64, u64),
}

impl Socket {
    /// Listens at `path`. The socket's file belongs to `owner`, or to the user of this process if `owner` is `None`.
    ///
    /// # Errors
    /// [`SocketError`].
    pub fn listen(path: &Path, owner: Option<User>) -> Result<Self, SocketError> {
        let failed = |source| SocketError::Host { path: path.to_owned(), source };
        let place = PathAt::open(path);
        let socket = match bound(path) {
            Err(SocketError::Host { source, .. }) if source.kind() == io::ErrorKind::AddrInUse => {
                remove_stale(&place)?;
                bound(path)?
            }
            other => other?,
        };
        // SAFETY: touches no memory.
        if unsafe { libc::listen(socket.as_raw_fd(), BACKLOG) } != 0 {
            return Err(failed(io::Error::last_os_error()));
        }
        let listener = UnixListener::from(socket);
        let file = place.file().map_err(failed)?;
        if let Some((uid, gid)) = owner.map(User::ids) {
            // The new owner may be able to replace files in the directory, and must not get a file that is not ours.
            if !is_socket(&file).map_err(failed)? || !listens(&listener, &file).map_err(failed)? {
                return Err(SocketError::Replaced(path.to_owned()));
            }
            let given = rustix::fs::chownat(&file, "", Some(uid), Some(gid), AtFlags::EMPTY_PATH);
            given.map_err(|error| failed(error.into()))?;
        }
        let made = rustix::fs::fstat(&file).map_err(|error| failed(error.into()))?;
        Ok(Self { listener, place, made: (made.st_dev, made.st_ino) })
    }

    /// The descriptor of the socket's directory.
    #[must_use]
    pub fn directory(&self) -> Option<BorrowedFd<'_>> {
        self.place.descriptor()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let now = self.place.status(false).ok().flatten();
        if now.is_none_or(|now| (now.st_dev, now.st_ino) != self.made) {
            return;
        }
        match self.place.remove() {
            Ok(()) => {}
            // The process has no permission to remove files from the directory, so the socket's file stays. The next
            // machine that uses this path replaces the file.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                log::info!("cannot remove the control socket: {error}");
            }
            Err(error) => {
                let path = self.place.path().display();
                log::warn!("cannot remove the control socket {path}: {error}");
            }
        }
    }
}

/// A socket that is bound to `path` with mode 0600, and does not listen yet.
#[expect(clippy::cast_possible_truncation, reason = "the address family and the size of the structure are small")]
fn bound(path: &Path) -> Result<OwnedFd, SocketError> {
    let failed = |source| SocketError::Host { path: path.to_owned(), source };
    let bytes = path.as_os_str().as_bytes();
    if bytes.is_empty() || bytes.len() > MAX_PATH || bytes.contains(&0) {
        return Err(SocketError::Length { path: path.to_owned(), most: MAX_PATH });
    }
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: touches no memory.
    let socket = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
    if socket < 0 {
        return Err(failed(io::Error::last_os_error()));
    }
    // SAFETY: the kernel has just made this descriptor, and nothing else owns it.
    let socket = File::from(unsafe { OwnedFd::from_raw_fd(socket) });
    // `bind` creates the file with the descriptor's mode, so other users can never access the file.
    socket.set_permissions(Permissions::from_mode(0o600)).map_err(failed)?;
    // SAFETY: zeros are a valid value of this plain structure.
    let mut address: sockaddr_un = unsafe { MaybeUninit::zeroed().assume_init() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = c_char::from_ne_bytes([*from]);
    }
    // SAFETY: the pointer and the size describe `address`, which the kernel reads only during the call.
    let result =
        unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), size_of::<sockaddr_un>() as socklen_t) };
    if result != 0 {
        return Err(failed(io::Error::last_os_error()));
    }
    Ok(socket.into())
}

/// Removes the socket of a VMM that ended without removing it.
fn remove_stale(place: &PathAt) -> Result<(), SocketError> {
    let path = || place.path().to_owned();
    let failed = |source| SocketError::Host { path: path(), source };
    let file = place.file().map_err(failed)?;
    if !is_socket(&file).map_err(failed)? {
        return Err(SocketError::NoSocket(path()));
    }
    match connect(&file) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => place.remove().map_err(failed),
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(failed(error)),
        _ => Err(SocketError::InUse(path())),
    }
}

fn is_socket(file: &OwnedFd) -> io::Result<bool> {
    let found = rustix::fs::fstat(file)?;
    Ok(FileType::from_raw_mode(found.st_mode) == FileType::Socket)
}

/// Whether `file` is the file of `listener`, or of another listener of this process.
fn listens(listener: &UnixListener, file: &OwnedFd) -> io::Result<bool> {
    let stream = connect(file)?;
    let ours = peer(&stream)?.pid.cast_unsigned() == std::process::id();
    // Don't leave the connection in the queue of clients. If there is none, another client has disconnected.
    let _ = listener.accept();
    Ok(ours)
}

/// Connects to the socket whose file is `file`, even if its path now leads to another file.
pub(super) fn connect(file: &OwnedFd) -> io::Result<UnixStream> {
    UnixStream::connect(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Whether the client runs as the user of this process, or as root.
pub(crate) fn is_ours(stream: &UnixStream) -> io::Result<bool> {
    let user = peer(stream)?.uid;
    Ok(user == rustix::process::geteuid().as_raw() || user == 0)
}

/// The process at the other end of `stream`: for a client, the process that called `listen`.
#[expect(clippy::cast_possible_truncation, reason = "the size of the structure is a few bytes")]
pub(crate) fn peer(stream: &UnixStream) -> io::Result<ucred> {
    let mut peer = ucred { pid: 0, uid: 0, gid: 0 };
    let mut size = size_of::<ucred>() as socklen_t;
    // SAFETY: `size` is the size of `peer`, and the kernel writes at most that many bytes to `peer`. It accesses `peer`
    // and `size` only during the call.
    let result = unsafe {
        libc::getsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut peer).cast(), &raw mut size)
    };
    match result {
        0 => Ok(peer),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    use super::*;

    #[test]
    fn socket_is_the_owners_alone_and_is_removed_on_drop() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("ctl");
        let socket = Socket::listen(&path, None).expect("listens");
        let mode = fs::metadata(&path).expect("there").permissions().mode();
        assert_eq!(mode & 0o7777, 0o600);
        let stream = UnixStream::connect(&path).expect("answers");
        assert!(is_ours(&stream).expect("notified"));
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn live_socket_is_refused_and_dead_one_replaced() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("ctl");
        let living = UnixListener::bind(&path).expect("listens");
        assert!(matches!(Socket::listen(&path, None), Err(SocketError::InUse(_))));
        drop(living);
        assert!(path.exists(), "the file of the dead socket remains");
        let socket = Socket::listen(&path, None).expect("replaces it");
        fs::remove_file(&path).expect("there");
        fs::write(&path, "mine").expect("written");
        drop(socket);
        assert_eq!(fs::read(&path).expect("not ours to remove"), b"mine");
    }

    #[test]
    fn socket_of_another_process_is_not_taken_for_our_own() {
        let directory = tempfile::tempdir().expect("a directory");
        let at = |name: &str| directory.path().join(name);
        let listener = UnixListener::bind(at("own")).expect("listens");
        listener.set_nonblocking(true).expect("a socket");
        let file = |name: &str| PathAt::open(&at(name)).file().expect("there");
        assert!(listens(&listener, &file("own")).expect("listens"));
        let other = bound(&at("other")).expect("bound");
        let mut command = Command::new("sleep");
        command.arg("60").stdin(other);
        let listen = || {
            // SAFETY: touches no memory.
            match unsafe { libc::listen(libc::STDIN_FILENO, 1) } {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        };
        // SAFETY: `listen` only makes a system call, which is permitted between `fork` and `exec`.
        unsafe { command.pre_exec(listen) };
        let mut child = command.spawn().expect("sleep starts");
        let taken = listens(&listener, &file("other"));
        child.kill().expect("a child");
        child.wait().expect("a child");
        assert!(!taken.expect("the other process listens"));
        fs::write(at("file"), "").expect("written");
        assert!(!is_socket(&file("file")).expect("a file"));
        std::os::unix::fs::symlink("own", at("link")).expect("made");
        assert!(!is_socket(&file("link")).expect("a link"));
    }

    #[test]
    fn file_in_place_of_a_socket_stays() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("notes");
        fs::write(&path, "dear diary").expect("written");
        assert!(matches!(Socket::listen(&path, None), Err(SocketError::NoSocket(_))));
        assert_eq!(fs::read(&path).expect("there"), b"dear diary");
        let long = directory.path().join("x".repeat(MAX_PATH));
        for bad in [Path::new(""), &long] {
            assert!(matches!(Socket::listen(bad, None), Err(SocketError::Length { .. })));
        }
        let nowhere = directory.path().join("no/ctl");
        assert!(matches!(Socket::listen(&nowhere, None), Err(SocketError::Host { .. })));
    }
}

//! The file of the control socket. From the moment when the file is created, only its owner can access it. The file is
//! removed when the VMM ends. A new socket replaces the stale socket of a VMM that has ended, but never the socket of a
//! running VMM.

#![allow(unsafe_code)]

use std::fs::{self, File, Permissions};
use std::io;
use std::mem::{MaybeUninit, offset_of};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use libc::{c_char, c_int, sockaddr_un, socklen_t, ucred};

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
    pub(super) listener: UnixListener,
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
        let failed = |source| SocketError::Host {
            path: path.to_owned(),
            source,
        };
        let socket = match bound(path) {
            Err(SocketError::Host { source, .. }) if source.kind() == io::ErrorKind::AddrInUse => {
                remove_stale(path)?;
                bound(path)?
            }
            other => other?,
        };
        // SAFETY: touches no memory.
        if unsafe { libc::listen(socket.as_raw_fd(), BACKLOG) } != 0 {
            return Err(failed(io::Error::last_os_error()));
        }
        if let Some((uid, gid)) = owner.map(User::ids) {
            let (uid, gid) = (Some(uid.as_raw()), Some(gid.as_raw()));
            std::os::unix::fs::lchown(path, uid, gid).map_err(failed)?;
        }
        let place = PathAt::open(path);
        let made = place.status(false).map_err(failed)?;
        let made = made.ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?;
        Ok(Self {
            listener: UnixListener::from(socket),
            place,
            made: (made.st_dev, made.st_ino),
        })
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
#[expect(
    clippy::cast_possible_truncation,
    reason = "the address family and the size of the structure are small"
)]
fn bound(path: &Path) -> Result<OwnedFd, SocketError> {
    let failed = |source| SocketError::Host {
        path: path.to_owned(),
        source,
    };
    let bytes = path.as_os_str().as_bytes();
    if bytes.is_empty() || bytes.len() > MAX_PATH || bytes.contains(&0) {
        return Err(SocketError::Length {
            path: path.to_owned(),
            most: MAX_PATH,
        });
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
    socket
        .set_permissions(Permissions::from_mode(0o600))
        .map_err(failed)?;
    // SAFETY: zeros are a valid value of this plain structure.
    let mut address: sockaddr_un = unsafe { MaybeUninit::zeroed().assume_init() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = c_char::from_ne_bytes([*from]);
    }
    // SAFETY: the pointer and the size describe `address`, which the kernel reads only during the call.
    let result = unsafe {
        libc::bind(
            socket.as_raw_fd(),
            (&raw const address).cast(),
            size_of::<sockaddr_un>() as socklen_t,
        )
    };
    if result != 0 {
        return Err(failed(io::Error::last_os_error()));
    }
    Ok(socket.into())
}

/// Removes the socket of a VMM that ended without removing it.
fn remove_stale(path: &Path) -> Result<(), SocketError> {
    let failed = |source| SocketError::Host {
        path: path.to_owned(),
        source,
    };
    let found = fs::symlink_metadata(path).map_err(failed)?;
    if !found.file_type().is_socket() {
        return Err(SocketError::NoSocket(path.to_owned()));
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(failed)
        }
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(failed(error)),
        _ => Err(SocketError::InUse(path.to_owned())),
    }
}

/// Whether the client runs as the user of this process, or as root.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the size of the structure is a few bytes"
)]
pub(super) fn is_ours(stream: &UnixStream) -> io::Result<bool> {
    let mut peer = ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut size = size_of::<ucred>() as socklen_t;
    // SAFETY: `size` is the size of `peer`, and the kernel writes at most that many bytes to `peer`. It accesses `peer`
    // and `size` only during the call.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut size,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: touches no memory.
    let own = unsafe { libc::geteuid() };
    Ok(peer.uid == own || peer.uid == 0)
}

#[cfg(test)]
mod tests {
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
        assert!(matches!(
            Socket::listen(&path, None),
            Err(SocketError::InUse(_))
        ));
        drop(living);
        assert!(path.exists(), "the file of the dead socket remains");
        let socket = Socket::listen(&path, None).expect("replaces it");
        fs::remove_file(&path).expect("there");
        fs::write(&path, "mine").expect("written");
        drop(socket);
        assert_eq!(fs::read(&path).expect("not ours to remove"), b"mine");
    }

    #[test]
    fn file_in_place_of_a_socket_stays() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("notes");
        fs::write(&path, "dear diary").expect("written");
        assert!(matches!(
            Socket::listen(&path, None),
            Err(SocketError::NoSocket(_))
        ));
        assert_eq!(fs::read(&path).expect("there"), b"dear diary");
        let long = directory.path().join("x".repeat(MAX_PATH));
        for bad in [Path::new(""), &long] {
            assert!(matches!(
                Socket::listen(bad, None),
                Err(SocketError::Length { .. })
            ));
        }
        let nowhere = directory.path().join("no/ctl");
        assert!(matches!(
            Socket::listen(&nowhere, None),
            Err(SocketError::Host { .. })
        ));
    }
}

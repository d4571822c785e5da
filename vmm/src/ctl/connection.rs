//! A client's connection to a machine. Whoever can create a file at the socket's path can listen there, so the client
//! speaks only to a process that it may trust with the files that it sends.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, Uid};

use super::descriptor;
use super::protocol::{Answer, Reply, Request};
use super::socket;
use crate::path_at::PathAt;

/// Maximum size of a reply in bytes. No reply of a VMM is that large.
const MAX_ANSWER: u64 = 64 << 20;

/// Errors of a connection to a machine.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    /// The socket does not exist.
    #[error("no control socket at {0}: start the machine with 'vmm run --ctl {0}'")]
    Missing(PathBuf),
    /// No process listens on the socket.
    #[error("no machine listens on {0}: the machine that created the socket has ended")]
    Dead(PathBuf),
    /// The path is not a socket.
    #[error("{0} is not a control socket: --socket must be the path of 'vmm run --ctl'")]
    NoSocket(PathBuf),
    /// The path is a symbolic link.
    #[error("{0} is a symbolic link: --socket must be the path of the control socket itself")]
    Link(PathBuf),
    /// The caller lacks permission.
    #[error("no permission for the control socket {0}: run as the owner of the machine, or as root")]
    Permission(PathBuf),
    /// The socket's file belongs to another user.
    #[error("the control socket {path} belongs to user {owner}: run as this user, or as root")]
    Owner {
        /// The path.
        path: PathBuf,
        /// The owner of the file.
        owner: u32,
    },
    /// Others can create files beside the socket, so any user could have created it.
    #[error(
        "the control socket {path} belongs to user {owner}, and other users can create files in its directory: \
         run as user {owner}, or start the machine with --ctl in a directory that only root or this user can \
         write to"
    )]
    Shared {
        /// The path.
        path: PathBuf,
        /// The owner of the file.
        owner: u32,
    },
    /// The process that listens runs as another user.
    #[error("a process of user {user} listens on {path}, which is not the owner of this machine")]
    Peer {
        /// The path.
        path: PathBuf,
        /// The user of the process.
        user: u32,
    },
    /// Communication failed.
    #[error("cannot communicate on the control socket {path}")]
    Host {
        /// The path.
        path: PathBuf,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
    /// The machine ended, or rejected the connection.
    #[error("the machine at {0} closed the connection without a reply")]
    Closed(PathBuf),
    /// The reply does not come from a VMM, or comes from a VMM of a different version.
    #[error("unexpected reply on {path}: use the version of 'vmm' that runs the machine")]
    Stranger {
        /// The path.
        path: PathBuf,
        /// The parser's error.
        #[source]
        source: serde_json::Error,
    },
    /// The machine refused the request, with this reason.
    #[error("{0}")]
    Refused(String),
    /// The request cannot be encoded.
    #[error("cannot encode JSON")]
    Json(#[source] serde_json::Error),
}

/// A connection to a machine of the user of this process, of root, or of the user whose socket root has named.
#[derive(Debug)]
pub(super) struct Connection<'a> {
    socket: &'a Path,
    owner: Uid,
    stream: BufReader<UnixStream>,
}

/// The reason why a socket is not trusted.
#[derive(Debug, PartialEq, Eq)]
enum Distrust {
    Owner,
    Shared,
}

/// The owner and the permissions of a directory.
#[derive(Debug, Clone, Copy)]
struct Access {
    owner: Uid,
    mode: Mode,
}

/// Checks whether the user `own` may connect to a socket file that belongs to `owner` and is in `directory`. A file that
/// belongs to `own` or to root is trusted. Only root may connect to the socket of another user, and only if no third user
/// could have created the file: the directory belongs to `owner` or to root, and nobody else can write to it.
fn trust(own: Uid, owner: Uid, directory: Access) -> Result<(), Distrust> {
    if owner == own || owner.is_root() {
        return Ok(());
    }
    if !own.is_root() {
        return Err(Distrust::Owner);
    }
    let theirs = directory.owner == owner || directory.owner.is_root();
    // In a sticky directory, too, every user can create a socket where none exists.
    if theirs && !directory.mode.intersects(Mode::WGRP | Mode::WOTH) { Ok(()) } else { Err(Distrust::Shared) }
}

impl<'a> Connection<'a> {
    /// Connects to the socket at `socket`, after checking its file. Then checks who listens.
    ///
    /// # Errors
    /// [`ConnectionError`].
    pub(super) fn open(socket: &'a Path) -> Result<Self, ConnectionError> {
        let path = || socket.to_owned();
        let failed = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => ConnectionError::Missing(path()),
            io::ErrorKind::ConnectionRefused => ConnectionError::Dead(path()),
            io::ErrorKind::PermissionDenied => ConnectionError::Permission(path()),
            _ => ConnectionError::Host { path: path(), source: error },
        };
        let place = PathAt::open(socket);
        let file = place.file().map_err(failed)?;
        let found = rustix::fs::fstat(&file).map_err(|error| failed(error.into()))?;
        match FileType::from_raw_mode(found.st_mode) {
            FileType::Socket => {}
            FileType::Symlink => return Err(ConnectionError::Link(path())),
            _ => return Err(ConnectionError::NoSocket(path())),
        }
        let directory = place.directory_status().map_err(failed)?;
        let directory = Access { owner: Uid::from_raw(directory.st_uid), mode: Mode::from_raw_mode(directory.st_mode) };
        let (own, owner) = (rustix::process::geteuid(), Uid::from_raw(found.st_uid));
        trust(own, owner, directory).map_err(|distrust| {
            let (path, owner) = (path(), owner.as_raw());
            match distrust {
                Distrust::Owner => ConnectionError::Owner { path, owner },
                Distrust::Shared => ConnectionError::Shared { path, owner },
            }
        })?;
        let stream = socket::connect(&file).map_err(failed)?;
        let user = Uid::from_raw(socket::peer(&stream).map_err(failed)?.uid);
        if ![Uid::ROOT, own, owner].contains(&user) {
            return Err(ConnectionError::Peer { path: path(), user: user.as_raw() });
        }
        Ok(Self { socket, owner, stream: BufReader::new(stream) })
    }

    /// The path of the socket.
    pub(super) fn socket(&self) -> &'a Path {
        self.socket
    }

    /// The owner of the machine.
    pub(super) fn owner(&self) -> Uid {
        self.owner
    }

    /// Sends `request`, and `files` with it. Returns the answer.
    ///
    /// # Errors
    /// [`ConnectionError`].
    pub(super) fn ask(&mut self, request: &Request, files: &[&File]) -> Result<Answer, ConnectionError> {
        let path = || self.socket.to_owned();
        let mut line = serde_json::to_vec(request).map_err(ConnectionError::Json)?;
        line.push(b'\n');
        let mut answer = Vec::new();
        let files: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
        let sent = descriptor::send(self.stream.get_ref(), &line, &files);
        // Read the reply even if sending failed, because a machine that closes the connection may have sent the reason
        // first.
        let read = (&mut self.stream).take(MAX_ANSWER).read_until(b'\n', &mut answer);
        if answer.is_empty() {
            return match sent.and_then(|()| read.map(|_| ())) {
                Err(source) if source.kind() != io::ErrorKind::BrokenPipe => {
                    Err(ConnectionError::Host { path: path(), source })
                }
                _ => Err(ConnectionError::Closed(path())),
            };
        }
        match serde_json::from_slice(&answer) {
            Ok(Reply::Ok(answer)) => Ok(answer),
            Ok(Reply::Error(why)) => Err(ConnectionError::Refused(why)),
            Err(source) => Err(ConnectionError::Stranger { path: path(), source }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_of_another_user_is_for_root_where_nobody_else_could_have_made_it() {
        let [own, other, third] = [1000, 1001, 1002].map(Uid::from_raw);
        let directory = |owner, mode| Access { owner, mode: Mode::from_raw_mode(mode) };
        let shared = directory(Uid::ROOT, 0o1777);
        for owner in [own, Uid::ROOT] {
            assert_eq!(trust(own, owner, shared), Ok(()));
        }
        let theirs = directory(other, 0o700);
        assert_eq!(trust(own, other, theirs), Err(Distrust::Owner));
        let by_root = |directory| trust(Uid::ROOT, other, directory);
        assert_eq!(by_root(theirs), Ok(()));
        assert_eq!(by_root(directory(Uid::ROOT, 0o755)), Ok(()));
        for directory in [shared, directory(Uid::ROOT, 0o775), directory(other, 0o757), directory(third, 0o755)] {
            assert_eq!(by_root(directory), Err(Distrust::Shared), "{directory:?}");
        }
    }
}

//! Sends and receives bytes on the control socket, with open files.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;

use rustix::cmsg_space;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};

/// Maximum number of files that accompany a request.
pub(super) const MAX_FILES: usize = 2;

/// Sends all of `bytes`. The descriptors `files`, at most [`MAX_FILES`], accompany the first byte.
///
/// # Errors
/// The socket's error.
pub(super) fn send(mut stream: &UnixStream, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
    if files.is_empty() {
        return stream.write_all(bytes);
    }
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_FILES))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(files));
    let slices = [IoSlice::new(bytes)];
    let sent = rustix::net::sendmsg(stream, &slices, &mut ancillary, SendFlags::NOSIGNAL)?;
    stream.write_all(bytes.get(sent..).unwrap_or_default())
}

/// The other end of a connection.
pub(super) trait Peer: Write {
    /// Receives some bytes, and the files that accompanied them.
    ///
    /// # Errors
    /// The connection's error.
    fn receive(&mut self, bytes: &mut [u8]) -> io::Result<(usize, Vec<File>)>;
}

impl Peer for UnixStream {
    fn receive(&mut self, bytes: &mut [u8]) -> io::Result<(usize, Vec<File>)> {
        receive(self, bytes)
    }
}

fn receive(stream: &UnixStream, bytes: &mut [u8]) -> io::Result<(usize, Vec<File>)> {
    // The kernel closes received descriptors that do not fit into this buffer.
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_FILES))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut slices = [IoSliceMut::new(bytes)];
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = rustix::net::recvmsg(stream, &mut slices, &mut ancillary, flags)?;
    let files = ancillary.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    Ok((received.bytes, files.flatten().map(File::from).collect()))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn files_arrive_with_their_bytes_in_order() {
        let (one, other) = UnixStream::pair().expect("sockets");
        let files = [(); MAX_FILES].map(|()| tempfile::tempfile().expect("a file"));
        send(&one, b"first", &[]).expect("sent");
        let mut bytes = [0; 16];
        let (count, none) = receive(&other, &mut bytes).expect("received");
        assert_eq!((bytes.get(..count), none.len()), (Some(&b"first"[..]), 0));
        send(&one, b"second", &files.each_ref().map(AsFd::as_fd)).expect("sent");
        let (count, received) = receive(&other, &mut bytes).expect("received");
        assert_eq!((bytes.get(..count), received.len()), (Some(&b"second"[..]), MAX_FILES));
        for (number, mut file) in received.into_iter().enumerate() {
            write!(file, "text {number}").expect("written");
        }
        for (number, mut file) in files.into_iter().enumerate() {
            let mut text = String::new();
            file.rewind().expect("a file");
            file.read_to_string(&mut text).expect("text");
            assert_eq!(text, format!("text {number}"));
        }
    }
}

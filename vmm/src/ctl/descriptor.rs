//! Sends and receives bytes on the control socket, with an optional open file.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;

use rustix::cmsg_space;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};

/// Sends all of `bytes`. The descriptor `file` accompanies the first byte.
///
/// # Errors
/// The socket's error.
pub(super) fn send(mut stream: &UnixStream, bytes: &[u8], file: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let Some(file) = file else {
        return stream.write_all(bytes);
    };
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let files = [file];
    ancillary.push(SendAncillaryMessage::ScmRights(&files));
    let slices = [IoSlice::new(bytes)];
    let sent = rustix::net::sendmsg(stream, &slices, &mut ancillary, SendFlags::NOSIGNAL)?;
    stream.write_all(bytes.get(sent..).unwrap_or_default())
}

/// The other end of a connection.
pub(super) trait Peer: Write {
    /// Receives some bytes, and the file that accompanied them, if any.
    ///
    /// # Errors
    /// The connection's error.
    fn receive(&mut self, bytes: &mut [u8]) -> io::Result<(usize, Option<File>)>;
}

impl Peer for UnixStream {
    fn receive(&mut self, bytes: &mut [u8]) -> io::Result<(usize, Option<File>)> {
        receive(self, bytes)
    }
}

fn receive(stream: &UnixStream, bytes: &mut [u8]) -> io::Result<(usize, Option<File>)> {
    // The kernel closes received descriptors that do not fit into this buffer.
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut slices = [IoSliceMut::new(bytes)];
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = rustix::net::recvmsg(stream, &mut slices, &mut ancillary, flags)?;
    let files = ancillary.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    Ok((received.bytes, files.flatten().map(File::from).last()))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn file_arrives_with_its_bytes() {
        let (one, other) = UnixStream::pair().expect("sockets");
        let mut file = tempfile::tempfile().expect("a file");
        send(&one, b"first", None).expect("sent");
        let mut bytes = [0; 16];
        let (count, none) = receive(&other, &mut bytes).expect("received");
        assert_eq!((bytes.get(..count), none.is_none()), (Some(&b"first"[..]), true));
        send(&one, b"second", Some(file.as_fd())).expect("sent");
        let (count, received) = receive(&other, &mut bytes).expect("received");
        assert_eq!(bytes.get(..count), Some(&b"second"[..]));
        received.expect("a file").write_all(b"text").expect("written");
        let mut text = String::new();
        file.rewind().expect("a file");
        file.read_to_string(&mut text).expect("text");
        assert_eq!(text, "text");
    }
}

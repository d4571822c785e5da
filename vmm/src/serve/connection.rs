//! The connection to the VMM: one call receives a request, and one call sends its answer.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;

use rustix::cmsg_space;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use zerocopy::{FromBytes, IntoBytes};

use super::message::{HEADER, Header, MAX_BODY, MAX_FILES, Refused};

/// Errors of a connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    /// The socket's error.
    #[error("the connection to the VMM failed")]
    Socket(#[source] io::Error),
    /// The VMM ended the connection inside a message.
    #[error("the VMM ended the connection inside a message")]
    Cut,
    /// A message outside the protocol.
    #[error("the VMM sent a message that is not a vfio-user request, or is too long")]
    Message,
}

/// A request, as it was received.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) header: Header,
    pub(super) body: Vec<u8>,
    /// The files that came with the request.
    pub(super) files: Vec<File>,
}

/// A connected VMM.
#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
    /// Received bytes that are not part of a complete message yet.
    input: Vec<u8>,
    /// Received files that belong to no message yet. A message's files accompany its first byte.
    files: VecDeque<File>,
    output: Vec<u8>,
}

impl Connection {
    pub(super) fn new(stream: UnixStream) -> Self {
        Self { stream, input: Vec::new(), files: VecDeque::new(), output: Vec::new() }
    }

    /// Waits for the next request. `None` if the VMM has ended the connection.
    ///
    /// # Errors
    /// [`ConnectionError`]; the connection cannot continue.
    pub(super) fn receive(&mut self) -> Result<Option<Message>, ConnectionError> {
        loop {
            if let Some(header) = self.input.first_chunk::<HEADER>() {
                let header = Header::read_from_bytes(header).map_err(|_| ConnectionError::Message)?;
                let body = header.body().ok_or(ConnectionError::Message)?;
                if self.input.len() >= HEADER + body {
                    let rest = self.input.split_off(HEADER + body);
                    let mut bytes = std::mem::replace(&mut self.input, rest);
                    bytes.drain(..HEADER);
                    return Ok(Some(Message { header, body: bytes, files: self.files.drain(..).collect() }));
                }
            }
            match self.read() {
                Ok(0) if self.input.is_empty() => return Ok(None),
                Ok(0) => return Err(ConnectionError::Cut),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
                Err(error) => return Err(ConnectionError::Socket(error)),
            }
        }
    }

    fn read(&mut self) -> io::Result<usize> {
        let mut bytes = [0; HEADER + MAX_BODY];
        // The kernel closes received descriptors that do not fit.
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_FILES))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(&mut bytes)];
        let received = rustix::net::recvmsg(&self.stream, &mut slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
        let files = ancillary.drain().flat_map(|message| match message {
            RecvAncillaryMessage::ScmRights(files) => Some(files),
            _ => None,
        });
        self.files.extend(files.flatten().map(File::from));
        self.files.truncate(MAX_FILES);
        self.input.extend_from_slice(bytes.get(..received.bytes).unwrap_or_default());
        Ok(received.bytes)
    }

    /// Answers the request with this `header`, unless the VMM wants no answer. `file` accompanies the answer.
    ///
    /// # Errors
    /// [`ConnectionError::Socket`].
    pub(super) fn answer(
        &mut self,
        header: &Header,
        answer: Result<&[u8], Refused>,
        file: Option<BorrowedFd<'_>>,
    ) -> Result<(), ConnectionError> {
        if !header.wants_reply() {
            return Ok(());
        }
        self.output.clear();
        match answer {
            Ok(body) => {
                self.output.extend_from_slice(header.reply(body.len()).as_bytes());
                self.output.extend_from_slice(body);
            }
            Err(refused) => self.output.extend_from_slice(header.refusal(refused).as_bytes()),
        }
        self.send(file).map_err(ConnectionError::Socket)
    }

    fn send(&mut self, file: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let files = file.as_slice();
        if !files.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(files));
        }
        let slices = [IoSlice::new(&self.output)];
        let sent = rustix::net::sendmsg(&self.stream, &slices, &mut ancillary, SendFlags::NOSIGNAL)?;
        self.stream.write_all(self.output.get(sent..).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;
    use crate::serve::message::Request;

    /// A DEVICE_RESET with this number.
    fn request(id: u16) -> Vec<u8> {
        let head = [id, 13].map(u16::to_ne_bytes).concat();
        [head, [16u32, 0, 0].map(u32::to_ne_bytes).concat()].concat()
    }

    #[test]
    fn requests_are_split_and_joined_as_they_come() {
        let (mut vmm, device) = UnixStream::pair().expect("sockets");
        let mut connection = Connection::new(device);
        let both = [request(1), request(2)].concat();
        let (first, second) = both.split_at(20);
        vmm.write_all(first).expect("written");
        let message = connection.receive().expect("received").expect("a request");
        assert!(matches!(Request::parse(&message.header, &message.body, message.files), Ok(Request::Reset)));
        vmm.write_all(second).expect("written");
        let message = connection.receive().expect("received").expect("a request");
        connection.answer(&message.header, Ok(&[]), None).expect("sent");
        let mut answer = [0; HEADER];
        vmm.read_exact(&mut answer).expect("an answer");
        assert_eq!(answer[..2], 2u16.to_ne_bytes());
        drop(vmm);
        assert!(connection.receive().expect("received").is_none());
    }

    #[test]
    fn cut_and_wrong_messages_end_the_connection() {
        let wrong = [&[0xff; HEADER][..], &request(1)[..10]];
        for bytes in wrong {
            let (mut vmm, device) = UnixStream::pair().expect("sockets");
            vmm.write_all(bytes).expect("written");
            drop(vmm);
            Connection::new(device).receive().expect_err("no message");
        }
    }
}

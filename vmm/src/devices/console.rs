//! The user's side of the serial port: writes the guest's output to standard output in batches, and detects
//! the key sequence that ends a run.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::Instant;

use vmm_sys_util::eventfd::EventFd;

use crate::bucket::Bucket;
use crate::exit::StopLatch;
use crate::signal::EndingSignals;
use crate::terminal;

/// Size of a batch in bytes. As soon as this many bytes are held back, they are written. A pipe that polls as writable
/// accepts a batch without blocking.
const BATCH: usize = 4096;

/// Conditions that end the wait for a slow reader.
#[derive(Debug)]
pub struct StallPolicy {
    /// The end of the run. If the user or a signal requests the end, the output stops waiting for the reader
    /// ([`StopLatch::force`]). If the guest causes the end, the output continues to wait.
    pub end: Arc<StopLatch>,
    /// Pending signals that end the run.
    pub signals: EndingSignals,
}

/// Standard output, written in batches. The first byte of a batch signals an eventfd. A moment later, the event loop
/// writes the batch with [`Output::write_out`], even if it is incomplete.
#[derive(Debug)]
pub struct Output {
    out: File,
    pending: Vec<u8>,
    waiting: Arc<EventFd>,
    stall: StallPolicy,
    broken: bool,
    /// Number of bytes that may still be written. `None` means unlimited.
    room: Option<Bucket>,
    bytes: ConsoleBytes,
}

/// Totals of the guest's console output.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ConsoleBytes {
    /// Bytes accepted for standard output.
    pub taken: u64,
    /// Bytes dropped because of the limit per second.
    pub left_out: u64,
}

impl Output {
    /// Standard output, limited to `most` bytes per second. Zero means unlimited. The output signals `waiting` when it
    /// holds back the first byte of a batch.
    ///
    /// # Errors
    /// Standard output is closed, or the host has no free descriptors.
    pub fn new(waiting: Arc<EventFd>, stall: StallPolicy, most: u64) -> io::Result<Self> {
        let out = io::stdout().as_fd().try_clone_to_owned()?;
        Ok(Self::to(File::from(out), waiting, stall, most))
    }

    fn to(out: File, waiting: Arc<EventFd>, stall: StallPolicy, most: u64) -> Self {
        Self {
            room: (most > 0).then(|| Bucket::per_second(most, most)),
            bytes: ConsoleBytes::default(),
            out,
            pending: Vec::with_capacity(BATCH),
            waiting,
            stall,
            broken: false,
        }
    }

    /// The totals so far.
    #[must_use]
    pub fn bytes(&self) -> ConsoleBytes {
        self.bytes
    }

    /// Returns the number of bytes that may be written now, at most `len`.
    fn admit(&mut self, len: usize) -> usize {
        let Some(room) = &mut self.room else {
            return len;
        };
        let taken = room.take(len as u64, Instant::now());
        // Cannot fail: `taken` is at most `len`.
        let taken = usize::try_from(taken).unwrap_or(len);
        if taken < len && self.bytes.left_out == 0 {
            log::warn!("console output is omitted: the guest writes more per second than --max-console allows");
        }
        taken
    }

    /// Writes the held-back bytes, and waits for a slow reader. If the reader is gone, or the user or a signal ends the
    /// run before the reader reads, drops these bytes and all later output, with one warning.
    pub fn write_out(&mut self) {
        let mut rest = self.pending.as_slice();
        while !rest.is_empty() && !self.broken {
            let unless = [self.stall.end.force().as_raw_fd(), self.stall.signals.as_raw_fd()];
            let written = match terminal::wait_writable(self.out.as_raw_fd(), unless) {
                Ok(true) => self.out.write(&rest[..rest.len().min(BATCH)]),
                Ok(false) => Err(io::Error::other("the run ended before the output was read")),
                Err(error) => Err(error),
            };
            match written {
                Ok(count) => rest = rest.get(count..).unwrap_or_default(),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => {
                    log::warn!("console output is lost: {error}");
                    self.broken = true;
                }
            }
        }
        self.pending.clear();
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let (bytes, left_out) = bytes.split_at(self.admit(bytes.len()));
        let all = bytes.len() + left_out.len();
        self.bytes.taken += bytes.len() as u64;
        self.bytes.left_out += left_out.len() as u64;
        if self.pending.is_empty() && !bytes.is_empty() {
            self.waiting.write(1)?;
        }
        self.pending.extend_from_slice(bytes);
        if self.pending.len() >= BATCH {
            self.write_out();
        }
        Ok(all)
    }

    /// Does nothing, because the serial port calls this function after every byte. [`Output::write_out`] writes the
    /// batch.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        self.write_out();
    }
}

/// Ctrl-A.
const ESCAPE: u8 = 0x01;

/// Separates keys for the VMM from keys for the guest.
#[derive(Debug, Default)]
pub struct Keys {
    escaped: bool,
}

/// Decoded keys.
#[derive(Debug, PartialEq, Eq)]
pub struct Typed {
    /// Keys for the guest.
    pub guest: Vec<u8>,
    /// Ctrl-A x: end the run.
    pub end: bool,
}

impl Keys {
    /// Ctrl-A x ends the run. Ctrl-A Ctrl-A sends one Ctrl-A to the guest. Ctrl-A with any other key sends both keys.
    pub fn typed(&mut self, bytes: &[u8]) -> Typed {
        let mut guest = Vec::with_capacity(bytes.len());
        for byte in bytes {
            match (std::mem::take(&mut self.escaped), *byte) {
                (false, ESCAPE) => self.escaped = true,
                (true, b'x') => return Typed { guest, end: true },
                (true, ESCAPE) => guest.push(ESCAPE),
                (true, other) => guest.extend([ESCAPE, other]),
                (false, other) => guest.push(other),
            }
        }
        Typed { guest, end: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek};

    fn typed(keys: &mut Keys, bytes: &[u8]) -> (Vec<u8>, bool) {
        let typed = keys.typed(bytes);
        (typed.guest, typed.end)
    }

    #[test]
    fn only_ctrl_a_x_ends() {
        let mut keys = Keys::default();
        assert_eq!(typed(&mut keys, b"ls x\n"), (b"ls x\n".to_vec(), false));
        assert_eq!(typed(&mut keys, b"a\x01\x01b"), (b"a\x01b".to_vec(), false));
        assert_eq!(typed(&mut keys, b"\x01c"), (b"\x01c".to_vec(), false));
        assert_eq!(typed(&mut keys, b"q\x01"), (b"q".to_vec(), false));
        assert_eq!(typed(&mut keys, b"x"), (Vec::new(), true));
    }

    #[test]
    fn bytes_are_batched() {
        let waiting = EventFd::new(libc::EFD_NONBLOCK).expect("an event descriptor");
        let reported = waiting.try_clone().expect("a clone");
        let mut file = tempfile::tempfile().expect("a temporary file");
        let stall = StallPolicy {
            end: Arc::new(StopLatch::new().expect("event descriptors")),
            signals: EndingSignals::new().expect("a signal descriptor"),
        };
        let mut output = Output::to(file.try_clone().expect("a clone"), waiting.into(), stall, 0);
        for byte in b"login: " {
            output.write_all(&[*byte]).expect("kept");
            output.flush().expect("nothing to write");
        }
        assert_eq!(reported.read().expect("signalled"), 1);
        assert_eq!(file.metadata().expect("a file").len(), 0);
        output.write_out();
        let mut text = String::new();
        file.rewind().expect("a file");
        file.read_to_string(&mut text).expect("text");
        assert_eq!(text, "login: ");
        output.write_all(&vec![b'x'; BATCH]).expect("kept");
        assert_eq!(file.metadata().expect("a file").len(), 7 + 4096);
    }
}

//! Writes the answers to control requests into the driver's buffers.

use std::io::Write;

use zerocopy::{Immutable, IntoBytes};

use crate::abi::{ControlReply, OpenReply};
use crate::errno::{Denied, Errno, status};
use crate::queues::{BadChain, put};
use crate::refusal::Refusal;

/// The driver's buffer for an answer.
pub(super) struct ReplyBuffer<W> {
    pub(super) bytes: usize,
    pub(super) writer: W,
}

impl<W: Write> ReplyBuffer<W> {
    /// Calls `act`, and writes its result in a [`ControlReply`] with the value zero. If the buffer is too small for the
    /// reply, fails without calling `act`.
    pub(super) fn simple(self, act: impl FnOnce() -> Result<(), Errno>) -> Result<u32, BadChain> {
        self.valued(|| act().map(|()| 0))
    }

    /// Like [`ReplyBuffer::simple`], but writes the value that `act` returns.
    pub(super) fn valued(mut self, act: impl FnOnce() -> Result<u32, Errno>) -> Result<u32, BadChain> {
        self.enough(size_of::<ControlReply>())?;
        let acted = act();
        let reply = ControlReply { status: status(&acted).into(), value: acted.unwrap_or(0).into() };
        put(&mut self.writer, &reply)?;
        Ok(wire_len::<ControlReply>(1))
    }

    /// Writes an [`OpenReply`]. It has the engine and the id of the opened event, or the error and the host's reason
    /// for refusing the event.
    pub(super) fn opened(mut self, open: impl FnOnce() -> Result<(u32, u64), Denied>) -> Result<u32, BadChain> {
        self.enough(size_of::<OpenReply>())?;
        let reply = match open() {
            Ok((engine, id)) => OpenReply { engine: engine.into(), id: id.into(), ..OpenReply::default() },
            Err(Denied { errno, refusal }) => OpenReply {
                status: errno.get().into(),
                engine: u32::from(Refusal::wire(refusal)).into(),
                ..OpenReply::default()
            },
        };
        put(&mut self.writer, &reply)?;
        Ok(wire_len::<OpenReply>(1))
    }

    /// Writes a [`ControlReply`] and a list of entries. `list` receives the number of entries that fit in the
    /// buffer, and returns at most that many.
    pub(super) fn entries<T: IntoBytes + Immutable>(
        mut self,
        list: impl FnOnce(usize) -> Result<Vec<T>, Errno>,
    ) -> Result<u32, BadChain> {
        self.enough(size_of::<ControlReply>())?;
        let entries = list((self.bytes - size_of::<ControlReply>()) / size_of::<T>());
        let some = entries.as_deref().unwrap_or(&[]);
        let count = u32::try_from(some.len()).unwrap_or(u32::MAX);
        let reply = ControlReply { status: status(&entries).into(), value: count.into() };
        put(&mut self.writer, &reply)?;
        some.iter().try_for_each(|entry| put(&mut self.writer, entry))?;
        Ok(wire_len::<ControlReply>(1) + wire_len::<T>(count))
    }

    fn enough(&self, needed: usize) -> Result<(), BadChain> {
        if self.bytes < needed { Err(BadChain) } else { Ok(()) }
    }
}

/// The size of `count` ABI structures in bytes.
fn wire_len<T>(count: u32) -> u32 {
    // The product does not saturate, because ABI structures are small and the driver's buffer limits `count`.
    u32::try_from(size_of::<T>()).map_or(u32::MAX, |size| size.saturating_mul(count))
}

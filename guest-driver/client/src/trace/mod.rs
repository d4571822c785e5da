//! What the host writes to an AUX area, taken apart: packets out of bytes. Trusts no byte of
//! them: what is wrong comes back as an error with its place, never as a panic.

mod packet;

pub use packet::{ALIGN, Access, Exit, Reason, Sync, TraceSample};

use vpmu_abi::{
    FORMAT_EXITS, FORMAT_SAMPLES, PACKET_EXIT, PACKET_PADDING, PACKET_SAMPLE, PACKET_SYNC,
};
use zerocopy::FromBytes;

/// Every page of an area begins with a [`Sync`], and no packet crosses into the next.
const PAGE: u64 = 4096;

/// What a trace consists of, by its entry in the catalogue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Format {
    /// [`Packet::Exit`].
    Exits,
    /// [`Packet::Sample`].
    Samples,
    /// Packets that are unknown here.
    #[default]
    Unknown,
}

impl Format {
    pub(crate) fn of(number: u32) -> Self {
        match u16::try_from(number) {
            Ok(FORMAT_EXITS) => Self::Exits,
            Ok(FORMAT_SAMPLES) => Self::Samples,
            _ => Self::Unknown,
        }
    }
}

/// Bytes that are no packet; the next one read is that of the page's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no whole packet at {position:#x} of the area, where the byte {kind:#04x} stands")]
pub struct PacketError {
    /// Where, as [`Chunk::position`] counts.
    pub position: u64,
    /// The byte that stands there.
    pub kind: u8,
}

/// One packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Packet<'a> {
    /// A vCPU left the guest.
    Exit(&'a Exit),
    /// A sample with registers.
    Sample(&'a TraceSample),
    /// Where a reader can begin.
    Sync(&'a Sync),
    /// [`ALIGN`] bytes that mean nothing.
    Padding,
}

impl Packet<'_> {
    /// How many bytes.
    #[expect(clippy::len_without_is_empty, reason = "none is empty")]
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Sample(_) => size_of::<TraceSample>(),
            _ => ALIGN,
        }
    }
}

/// What was read of an area at once: whole packets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Chunk {
    /// Bytes that the area had got before these, since it was mapped.
    pub position: u64,
    /// As the host wrote them.
    pub bytes: Vec<u8>,
}

impl Chunk {
    /// The packets in it.
    #[must_use]
    pub fn packets(&self) -> Packets<'_> {
        Packets::new(self.position, &self.bytes)
    }
}

/// Packets, one after another. Where there is none the rest of the page is left out: that the
/// next begins with a [`Sync`] is sure, while what looks like one in the middle of garbage may
/// be a guest's registers.
#[derive(Debug, Clone)]
pub struct Packets<'a> {
    position: u64,
    bytes: &'a [u8],
}

impl<'a> Packets<'a> {
    /// Of `bytes` that stand at `position` of the area, where a packet begins.
    #[must_use]
    pub fn new(position: u64, bytes: &'a [u8]) -> Self {
        Self { position, bytes }
    }

    /// Where the next packet begins.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.position
    }

    fn skip(&mut self, bytes: usize) {
        self.position = self.position.wrapping_add(bytes as u64);
        self.bytes = self.bytes.get(bytes..).unwrap_or_default();
    }

    /// The bytes up to the end of the page, all that is left if it ends before.
    fn page(&self) -> &'a [u8] {
        let left = PAGE - self.position % PAGE;
        let left = usize::try_from(left).unwrap_or(usize::MAX);
        self.bytes.get(..left).unwrap_or(self.bytes)
    }

    fn parse(&self) -> Option<Packet<'a>> {
        let page = self.page();
        let packet = match *page.first()? {
            PACKET_PADDING if page.get(..ALIGN)?.iter().all(|&byte| byte == 0) => Packet::Padding,
            PACKET_EXIT => Packet::Exit(Exit::ref_from_prefix(page).ok()?.0),
            PACKET_SAMPLE => Packet::Sample(TraceSample::ref_from_prefix(page).ok()?.0),
            PACKET_SYNC => {
                let (sync, _) = Sync::ref_from_prefix(page).ok()?;
                Packet::Sync(Some(sync).filter(|sync| sync.has_magic())?)
            }
            _ => return None,
        };
        Some(packet)
    }
}

impl<'a> Iterator for Packets<'a> {
    type Item = Result<Packet<'a>, PacketError>;

    fn next(&mut self) -> Option<Self::Item> {
        let kind = *self.bytes.first()?;
        let position = self.position;
        Some(match self.parse() {
            Some(packet) => {
                self.skip(packet.len());
                Ok(packet)
            }
            None => {
                self.skip(self.page().len());
                Err(PacketError { position, kind })
            }
        })
    }
}

#[cfg(test)]
mod composed;
#[cfg(test)]
mod tests;

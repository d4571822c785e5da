//! Parses the packets that the host writes to an AUX area. Does not trust their bytes: malformed
//! packets lead to errors with their position, never to panics.

mod packet;

pub use packet::{ALIGN, Access, Exit, Reason, Sync, TraceSample};

use vpmu_abi::{FORMAT_EXITS, FORMAT_SAMPLES, PACKET_EXIT, PACKET_PADDING, PACKET_SAMPLE, PACKET_SYNC};
use zerocopy::FromBytes;

/// Every page of an area begins with a [`Sync`], and packets do not cross pages.
const PAGE: u64 = 4096;

/// The kind of packets in a trace, as its catalogue entry specifies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Format {
    /// [`Packet::Exit`].
    Exits,
    /// [`Packet::Sample`].
    Samples,
    /// Packets unknown to this library.
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

/// Bytes that are not a packet; reading continues at the next page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the bytes at {position:#x} of the area are not a whole packet (first byte {kind:#04x})")]
pub struct PacketError {
    /// Position in the area, counted like [`Chunk::position`].
    pub position: u64,
    /// The byte at that position.
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
    /// A position where a reader can begin.
    Sync(&'a Sync),
    /// [`ALIGN`] bytes without meaning.
    Padding,
}

impl Packet<'_> {
    /// Bytes of the packet.
    #[expect(clippy::len_without_is_empty, reason = "none is empty")]
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Sample(_) => size_of::<TraceSample>(),
            _ => ALIGN,
        }
    }
}

/// Whole packets, copied from an area in one step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Chunk {
    /// Number of bytes that were written to the area before `bytes`, since the area was mapped.
    pub position: u64,
    /// The bytes as the host wrote them.
    pub bytes: Vec<u8>,
}

impl Chunk {
    /// Iterates over the packets.
    #[must_use]
    pub fn packets(&self) -> Packets<'_> {
        Packets::new(self.position, &self.bytes)
    }
}

/// Iterates over packets. After a malformed packet, skips the rest of the page, because the next page
/// begins with a [`Sync`]. Does not search the rest of the page for a [`Sync`]: bytes that resemble a
/// [`Sync`] may be a guest's registers.
#[derive(Debug, Clone)]
pub struct Packets<'a> {
    position: u64,
    bytes: &'a [u8],
}

impl<'a> Packets<'a> {
    /// Iterates over the packets in `bytes`. The first packet begins at `position` of the area.
    #[must_use]
    pub fn new(position: u64, bytes: &'a [u8]) -> Self {
        Self { position, bytes }
    }

    /// Position of the next packet.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.position
    }

    fn skip(&mut self, bytes: usize) {
        self.position = self.position.wrapping_add(bytes as u64);
        self.bytes = self.bytes.get(bytes..).unwrap_or_default();
    }

    /// The remaining bytes of the current page, or of the data if it ends earlier.
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

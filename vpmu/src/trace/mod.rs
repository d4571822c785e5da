//! The state of a tracing event: packet numbers, byte counts, and sync packets that are due. This module numbers every
//! packet that the device makes. The caller decides where to write each packet.

mod exits;
mod samples;

use zerocopy::transmute;

use crate::abi::{
    ExitPacket, FORMAT_EXITS, PACKET_COLLISION, PACKET_SYNC, PAGE_SIZE, SYNC_LOSS, SYNC_MAGIC, SYNC_PAGE, SYNC_RESUME,
    SYNC_START, SamplePacket, SyncPacket,
};
use crate::area::{Appended, Entry};
use crate::record::SampleId;
use crate::saved::saved;
use crate::spec::EventSpec;

pub(crate) use self::exits::{exit_packet, host_exit_packet};
pub(crate) use self::samples::OverflowBatch;

const PAGE: u64 = PAGE_SIZE as u64;
const SYNC_LEN: u64 = size_of::<SyncPacket>() as u64;
/// Words of the longest packet.
const LONGEST: usize = size_of::<SamplePacket>() / 8;

/// A complete packet, except for its number, which is set when the packet is written.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Packet<'a> {
    Exit(&'a ExitPacket),
    Sample(&'a SamplePacket),
}

/// The trace of one event.
#[derive(Debug)]
pub(crate) struct Trace {
    /// Number of the next packet.
    sequence: u64,
    /// Bytes since the count was last reset, including lost bytes.
    count: u64,
    /// Bytes of lost packets.
    lost: u64,
    /// `SYNC_*` flags of the next sync packet, if one is due.
    due: u8,
    /// Whether the start of the trace was recorded in the event's ring.
    pub(crate) announced: bool,
}

/// One packet with the sync packet and padding before it.
#[derive(Debug)]
pub(crate) struct Laid {
    skip: u64,
    sync: Option<[u64; size_of::<SyncPacket>() / 8]>,
    packet: [u64; LONGEST],
    /// Number of the packet's words.
    len: usize,
    collision: bool,
}

saved! {
    /// The trace of an event.
    pub(crate) struct SavedTrace {
        pub(crate) sequence: u64,
        pub(crate) count: u64,
        pub(crate) lost: u64,
        /// `SYNC_*`.
        pub(crate) due: u8,
        pub(crate) announced: bool,
    }
}

impl Trace {
    /// A trace that has not begun.
    pub(crate) fn new() -> Self {
        Self { sequence: 0, count: 0, lost: 0, due: SYNC_START, announced: false }
    }

    /// The current state, to be saved.
    pub(crate) fn save(&self) -> SavedTrace {
        SavedTrace {
            sequence: self.sequence,
            count: self.count,
            lost: self.lost,
            due: self.due,
            announced: self.announced,
        }
    }

    /// Restores a saved trace; `None` if the saved state is not valid.
    pub(crate) fn restore(saved: &SavedTrace) -> Option<Self> {
        let known = SYNC_START | SYNC_LOSS | SYNC_RESUME;
        (saved.due & !known == 0).then_some(Self {
            sequence: saved.sequence,
            count: saved.count,
            lost: saved.lost,
            due: saved.due,
            announced: saved.announced,
        })
    }

    /// Requests a sync packet before the next packet. `flags` are the sync packet's `SYNC_*` flags.
    pub(crate) fn sync(&mut self, flags: u8) {
        self.due |= flags;
    }

    /// Number of bytes produced, including lost bytes. This is the event's count.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// Sets the event's count to zero.
    pub(crate) fn reset(&mut self) {
        self.count = 0;
    }

    /// Bytes lost.
    pub(crate) fn lost(&self) -> u64 {
        self.lost
    }

    /// Lays out the next packet for `position` in the area. Packets do not cross pages, and each page begins with a
    /// sync packet. The packet's time is the time in `sample_id`, and `tsc` is the guest's TSC at that time.
    pub(crate) fn lay(
        &self,
        spec: &EventSpec,
        sample_id: &SampleId,
        tsc: u64,
        packet: Packet<'_>,
        position: u64,
    ) -> Laid {
        let (words, len, collision) = self.numbered(packet);
        let (skip, flags) = place(position, len as u64 * 8, self.due);
        let sync = (flags != 0).then(|| {
            let sync = SyncPacket {
                kind: PACKET_SYNC,
                flags,
                format: spec.kind.format().unwrap_or(FORMAT_EXITS).into(),
                vcpu: sample_id.vcpu.into(),
                magic: SYNC_MAGIC.into(),
                event: spec.id.into(),
                time: sample_id.time.into(),
                tsc: tsc.into(),
                sequence: self.sequence.into(),
                lost: self.lost.into(),
                config: spec.request.config.into(),
            };
            transmute!(sync)
        });
        Laid { skip, sync, packet: words, len, collision }
    }

    /// Accounts for the packet that was laid out, whether or not it was appended.
    pub(crate) fn account(&mut self, packet: Packet<'_>, appended: &Appended) {
        self.sequence = self.sequence.wrapping_add(1);
        self.count = self.count.wrapping_add(appended.written);
        if appended.whole {
            self.due = 0;
        } else {
            let len = packet.len();
            self.count = self.count.wrapping_add(len);
            self.lost = self.lost.wrapping_add(len);
            self.due |= SYNC_LOSS;
        }
    }

    /// Counts bytes written by a producer in the VMM.
    pub(crate) fn grow(&mut self, bytes: u64) {
        self.count = self.count.wrapping_add(bytes);
    }

    /// Counts `packets` packets, `bytes` bytes in total, that were lost before they could be written.
    pub(crate) fn lose(&mut self, packets: u64, bytes: u64) {
        self.sequence = self.sequence.wrapping_add(packets);
        self.count = self.count.wrapping_add(bytes);
        self.lost = self.lost.wrapping_add(bytes);
        self.due |= SYNC_LOSS;
    }

    fn numbered(&self, packet: Packet<'_>) -> ([u64; LONGEST], usize, bool) {
        let sequence = self.sequence.into();
        match packet {
            Packet::Exit(exit) => {
                const LEN: usize = size_of::<ExitPacket>() / 8;
                let exit: [u64; LEN] = transmute!(ExitPacket { sequence, ..*exit });
                let mut words = [0; LONGEST];
                if let Some(first) = words.first_chunk_mut() {
                    *first = exit;
                }
                (words, LEN, false)
            }
            Packet::Sample(sample) => {
                let collision = sample.flags & PACKET_COLLISION != 0;
                let words = transmute!(SamplePacket { sequence, ..*sample });
                (words, LONGEST, collision)
            }
        }
    }
}

impl Packet<'_> {
    /// Number of bytes in the packet, without the sync packet and the padding before it.
    pub(crate) fn len(&self) -> u64 {
        let len = match self {
            Self::Exit(_) => size_of::<ExitPacket>(),
            Self::Sample(_) => size_of::<SamplePacket>(),
        };
        len as u64
    }
}

impl Laid {
    pub(crate) fn entry(&self) -> Entry<'_> {
        Entry {
            skip: self.skip,
            parts: [
                self.sync.as_ref().map_or(&[][..], |sync| &sync[..]),
                self.packet.get(..self.len).unwrap_or_default(),
            ],
            collision: self.collision,
        }
    }
}

/// Returns how many bytes of padding are needed before a packet of `len` bytes at `position`, and the `SYNC_*` flags of
/// the sync packet that must come before this packet. The flags include `due`. If they are zero, no sync packet is
/// needed.
fn place(position: u64, len: u64, due: u8) -> (u64, u8) {
    let offset = position % PAGE;
    let sync = if due == 0 { 0 } else { SYNC_LEN };
    if offset == 0 {
        (0, due | SYNC_PAGE)
    } else if offset + sync + len > PAGE {
        (PAGE - offset, due | SYNC_PAGE)
    } else {
        (0, due)
    }
}

#[cfg(test)]
mod tests;

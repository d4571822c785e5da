//! Parses the packets of an AUX area, whose layouts are in `<vpmu_uapi.h>`. The parser fails if the bytes break a rule
//! that every trace must follow.
#![expect(clippy::cast_possible_truncation, reason = "splits words into fields; usize has 64 bits")]

use crate::raw::PAGE;

pub(crate) const ALIGN: u64 = 64;
/// Bytes of an exit packet.
pub(crate) const EXIT_BYTES: u64 = 64;
/// Bytes of a sync packet.
pub(crate) const SYNC_BYTES: u64 = 64;
/// Bytes of a sample.
pub(crate) const SAMPLE_BYTES: u64 = 256;

pub(crate) const FORMAT_EXITS: u16 = 1;
pub(crate) const FORMAT_SAMPLES: u16 = 2;

pub(crate) const SYNC_START: u8 = 1 << 0;
pub(crate) const SYNC_LOSS: u8 = 1 << 1;
pub(crate) const SYNC_RESUME: u8 = 1 << 2;
pub(crate) const SYNC_PAGE: u8 = 1 << 3;

pub(crate) const USER: u8 = 1 << 0;
pub(crate) const HAS_IP: u8 = 1 << 1;
pub(crate) const CUT: u8 = 1 << 2;
pub(crate) const HARDWARE: u8 = 1 << 3;
pub(crate) const HAS_REGS: u8 = 1 << 4;
pub(crate) const COLLISION: u8 = 1 << 5;

/// Bit 8 of an exit's detail.
pub(crate) const DETAIL_WRITE: u64 = 1 << 8;

const PADDING: u8 = 0;
const EXIT: u8 = 1;
const SAMPLE: u8 = 2;
const SYNC: u8 = 3;
const MAGIC: u64 = 0x434e_5953_554d_5056;

/// `struct vpmu_sync_packet`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sync {
    pub(crate) flags: u8,
    pub(crate) format: u16,
    pub(crate) vcpu: u32,
    pub(crate) event: u64,
    pub(crate) time: u64,
    pub(crate) tsc: u64,
    pub(crate) sequence: u64,
    pub(crate) lost: u64,
    pub(crate) config: u64,
}

/// `struct vpmu_exit_packet`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Exit {
    pub(crate) flags: u8,
    pub(crate) reason: u16,
    pub(crate) vcpu: u32,
    pub(crate) time: u64,
    pub(crate) ip: u64,
    pub(crate) outside: u64,
    pub(crate) qualification: u64,
    pub(crate) detail: u64,
    pub(crate) pid_tid: (u32, u32),
    pub(crate) sequence: u64,
}

/// `struct vpmu_sample_packet`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sample {
    pub(crate) flags: u8,
    pub(crate) vcpu: u32,
    pub(crate) time: u64,
    pub(crate) ip: u64,
    pub(crate) period: u64,
    pub(crate) pid_tid: (u32, u32),
    pub(crate) sequence: u64,
    pub(crate) regs: [u64; 24],
}

/// One packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packet {
    Padding,
    Exit(Exit),
    Sample(Sample),
    Sync(Sync),
}

impl Packet {
    fn bytes(&self) -> u64 {
        match self {
            Self::Padding => ALIGN,
            Self::Exit(_) => EXIT_BYTES,
            Self::Sample(_) => SAMPLE_BYTES,
            Self::Sync(_) => SYNC_BYTES,
        }
    }

    pub(crate) fn sync(&self) -> Option<&Sync> {
        match self {
            Self::Sync(sync) => Some(sync),
            _ => None,
        }
    }

    pub(crate) fn exit(&self) -> Option<&Exit> {
        match self {
            Self::Exit(exit) => Some(exit),
            _ => None,
        }
    }

    pub(crate) fn sample(&self) -> Option<&Sample> {
        match self {
            Self::Sample(sample) => Some(sample),
            _ => None,
        }
    }
}

/// A packet and its position, which is the number of bytes that the trace had written before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Placed {
    pub(crate) at: u64,
    pub(crate) packet: Packet,
}

/// The exits among the packets.
pub(crate) fn exits(packets: &[Placed]) -> Vec<Exit> {
    packets.iter().filter_map(|placed| placed.packet.exit().copied()).collect()
}

/// The samples among the packets.
pub(crate) fn samples(packets: &[Placed]) -> Vec<Sample> {
    packets.iter().filter_map(|placed| placed.packet.sample().copied()).collect()
}

/// The syncs among the packets.
pub(crate) fn syncs(packets: &[Placed]) -> Vec<Sync> {
    packets.iter().filter_map(|placed| placed.packet.sync().copied()).collect()
}

/// Low and high half.
fn halves(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

/// Splits the first word of a packet into its parts: kind, flags, 16 bits and 32 bits.
fn first(word: u64) -> (u8, u8, u16, u32) {
    (word as u8, (word >> 8) as u8, (word >> 16) as u16, (word >> 32) as u32)
}

fn exit(words: &[u64]) -> Result<Exit, String> {
    let (_, flags, reason, vcpu) = first(words[0]);
    let known = USER | HAS_IP | CUT | HARDWARE;
    if flags & !known != 0 {
        return Err(format!("an exit has unknown flags: {flags:#x}"));
    }
    Ok(Exit {
        flags,
        reason,
        vcpu,
        time: words[1],
        ip: words[2],
        outside: words[3],
        qualification: words[4],
        detail: words[5],
        pid_tid: halves(words[6]),
        sequence: words[7],
    })
}

fn sync(words: &[u64]) -> Result<Sync, String> {
    let (_, flags, format, vcpu) = first(words[0]);
    if words[1] != MAGIC {
        return Err(format!("a sync has the magic {:#x}", words[1]));
    }
    let known = SYNC_START | SYNC_LOSS | SYNC_RESUME | SYNC_PAGE;
    if flags & !known != 0 || flags == 0 {
        return Err(format!("a sync has no flags, or unknown ones: {flags:#x}"));
    }
    Ok(Sync {
        flags,
        format,
        vcpu,
        event: words[2],
        time: words[3],
        tsc: words[4],
        sequence: words[5],
        lost: words[6],
        config: words[7],
    })
}

fn sample(words: &[u64]) -> Result<Sample, String> {
    let (_, flags, reserved, vcpu) = first(words[0]);
    let known = USER | HAS_IP | HAS_REGS | COLLISION;
    if flags & !known != 0 || reserved != 0 || words[6..8] != [0, 0] {
        return Err(format!("a sample has unknown flags, or reserved words that are not zero: {words:x?}"));
    }
    let mut regs = [0; 24];
    regs.copy_from_slice(&words[8..32]);
    Ok(Sample {
        flags,
        vcpu,
        time: words[1],
        ip: words[2],
        period: words[3],
        pid_tid: halves(words[4]),
        sequence: words[5],
        regs,
    })
}

/// Parses the packet at `at`. `word` returns the word at a position.
fn packet(at: u64, end: u64, word: &impl Fn(u64) -> u64) -> Result<Packet, String> {
    let head = word(at);
    let bytes = match head as u8 {
        PADDING => ALIGN,
        EXIT | SYNC => EXIT_BYTES,
        SAMPLE => SAMPLE_BYTES,
        kind => return Err(format!("the packet at {at:#x} has the unknown kind {kind}")),
    };
    let page = PAGE as u64;
    if at + bytes > end || at / page != (at + bytes - 1) / page {
        return Err(format!("{bytes} bytes at {at:#x} cross the end of their page or of the data ({end:#x})"));
    }
    let words: Vec<u64> = (at..at + bytes).step_by(8).map(word).collect();
    match head as u8 {
        PADDING if words.iter().any(|&word| word != 0) => Err(format!("the padding is not zero: {words:x?}")),
        PADDING => Ok(Packet::Padding),
        EXIT => exit(&words).map(Packet::Exit),
        SYNC => sync(&words).map(Packet::Sync),
        _ => sample(&words).map(Packet::Sample),
    }
    .map_err(|error| format!("at {at:#x}: {error}"))
}

/// Parses all packets in `[begin, end)`. `word` returns the word at a position. Each page must begin with a sync packet
/// that has the flag [`SYNC_PAGE`]. No other sync packet may have this flag.
pub(crate) fn decode(begin: u64, end: u64, word: impl Fn(u64) -> u64) -> Result<Vec<Placed>, String> {
    if !begin.is_multiple_of(ALIGN) || !end.is_multiple_of(ALIGN) {
        return Err(format!("the data from {begin:#x} to {end:#x} is not aligned"));
    }
    let mut packets = Vec::new();
    let mut at = begin;
    while at < end {
        let packet = packet(at, end, &word)?;
        let leads = at.is_multiple_of(PAGE as u64);
        let says = packet.sync().is_some_and(|sync| sync.flags & SYNC_PAGE != 0);
        if leads != says {
            return Err(format!("SYNC_PAGE does not match the position {at:#x}: {packet:?}"));
        }
        packets.push(Placed { at, packet });
        at += packet.bytes();
    }
    Ok(packets)
}

/// Checks the sequence numbers of one event's packets. Each packet must occur exactly once.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    /// The number that the next packet must have.
    next: u64,
    /// Lost bytes that syncs have reported.
    pub(crate) lost: u64,
    /// A sync packet that has not been followed by another packet yet.
    due: Option<Sync>,
    /// Time of the last packet of each vCPU.
    times: [u64; 2],
    pub(crate) packets: u64,
}

impl Ledger {
    /// Checks the next packets of one trace. Sequence numbers must be consecutive, unless a sync packet reports how
    /// many bytes of packets are missing. On each vCPU, times must not decrease. The trace must begin with a sync
    /// packet that reports its start.
    pub(crate) fn follow(&mut self, packets: &[Placed]) -> Result<(), String> {
        packets.iter().try_for_each(|placed| {
            self.one(&placed.packet).map_err(|error| format!("{error}: {placed:x?} after {self:x?}"))
        })
    }

    fn one(&mut self, packet: &Packet) -> Result<(), String> {
        let (vcpu, time, sequence, bytes) = match packet {
            Packet::Padding => return Ok(()),
            Packet::Sync(sync) => return self.sync(sync),
            Packet::Exit(exit) => (exit.vcpu, exit.time, exit.sequence, EXIT_BYTES),
            Packet::Sample(sample) => (sample.vcpu, sample.time, sample.sequence, SAMPLE_BYTES),
        };
        let due = self.due.take();
        if self.packets == 0 && due.is_none_or(|sync| sync.flags & SYNC_START == 0) {
            return Err("the trace does not begin with a sync that reports its start".into());
        }
        if due.is_some_and(|sync| (sync.vcpu, sync.time) != (vcpu, time)) {
            return Err(format!("the packet differs from its sync in time or vCPU: {due:x?}"));
        }
        if sequence != self.next {
            return Err(format!("the packet of {bytes} bytes does not have number {}", self.next));
        }
        let before = self.times.get_mut(vcpu as usize).ok_or("the packet names a vCPU that does not exist")?;
        if time < *before {
            return Err(format!("the time {time} ns is before {before} ns"));
        }
        *before = time;
        self.next += 1;
        self.packets += 1;
        Ok(())
    }

    fn sync(&mut self, sync: &Sync) -> Result<(), String> {
        let bytes = match sync.format {
            FORMAT_EXITS => EXIT_BYTES,
            FORMAT_SAMPLES => SAMPLE_BYTES,
            format => return Err(format!("a sync has the unknown format {format}")),
        };
        let lost = sync.lost.checked_sub(self.lost).ok_or("the lost bytes decreased")?;
        let missing = sync.sequence.checked_sub(self.next).ok_or("the sync's number has occurred already")?;
        if lost != missing * bytes {
            return Err(format!("{missing} packets are missing, but {lost} bytes are reported as lost"));
        }
        if (lost > 0) != (sync.flags & SYNC_LOSS != 0) {
            return Err(format!("SYNC_LOSS does not match {lost} lost bytes"));
        }
        if let Some(first) = self.due.replace(*sync) {
            return Err(format!("a second sync for one packet, after {first:x?}"));
        }
        (self.lost, self.next) = (sync.lost, sync.sequence);
        Ok(())
    }
}

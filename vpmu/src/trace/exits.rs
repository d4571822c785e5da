//! Builds the packets of an exit trace. The caller decides when an exit ends, and writes the packet to an area.

use crate::abi::{
    DETAIL_COUNT_SHIFT, DETAIL_WRITE, ExitPacket, PACKET_CUT, PACKET_EXIT, PACKET_HARDWARE, PACKET_IP, PACKET_USER,
};
use crate::kind::Reported;
use crate::machine::{ExitReason, GuestRegs};
use crate::record::SampleId;
use crate::source::HostExit;
use crate::vcpu::ExitStamp;

/// Returns the packet of an exit that ends at `now`, in guest nanoseconds. `sample_id` has the exit's time. If `cut` is
/// true, the end of the exit is unknown, for example because the trace ends before the exit does. The trace sets the
/// packet's `sequence`.
pub(crate) fn exit_packet(stamp: &ExitStamp, sample_id: &SampleId, now: u64, cut: bool) -> ExitPacket {
    let ExitStamp { exit, regs, .. } = stamp;
    let user = regs.is_some_and(|regs| regs.user);
    let (address, detail) = exit.access.map_or((0, 0), |access| {
        let count = if exit.reason == ExitReason::Io { u64::from(access.count) << DETAIL_COUNT_SHIFT } else { 0 };
        let write = if access.write { DETAIL_WRITE } else { 0 };
        (access.address, u64::from(access.size) | write | count)
    });
    ExitPacket {
        flags: flag(user, PACKET_USER) | flag(regs.is_some(), PACKET_IP) | flag(cut, PACKET_CUT),
        reason: reason(exit.reason).into(),
        ip: regs.map_or(0, |regs| regs.ip).into(),
        outside: now.saturating_sub(sample_id.time).into(),
        qualification: address.into(),
        detail: detail.into(),
        ..packet(sample_id)
    }
}

/// Returns the packet of an exit that the host recorded, and after which the vCPU was outside the guest for `outside`
/// nanoseconds.
pub(crate) fn host_exit_packet(exit: &HostExit, sample_id: &SampleId, outside: u64) -> ExitPacket {
    ExitPacket {
        flags: PACKET_HARDWARE
            | PACKET_IP
            | flag(GuestRegs::at(exit.ip).user, PACKET_USER)
            | flag(exit.back.is_none(), PACKET_CUT),
        reason: exit.reason.into(),
        ip: exit.ip.into(),
        outside: outside.into(),
        qualification: exit.qualification.into(),
        detail: exit.detail.into(),
        ..packet(sample_id)
    }
}

/// A packet with the fields that all exits have in common.
fn packet(sample_id: &SampleId) -> ExitPacket {
    ExitPacket {
        kind: PACKET_EXIT,
        vcpu: sample_id.vcpu.into(),
        time: sample_id.time.into(),
        pid: sample_id.pid.into(),
        tid: sample_id.tid.into(),
        ..ExitPacket::default()
    }
}

fn flag(on: bool, flag: u8) -> u8 {
    if on { flag } else { 0 }
}

/// The `EXIT_*` value of `reason`. Every such value fits into 16 bits.
fn reason(reason: ExitReason) -> u16 {
    u16::try_from(Reported::Only(reason).config()).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{EXIT_HLT, EXIT_IO, EXIT_MMIO};
    use crate::machine::{Access, Exit};

    const SAMPLE_ID: SampleId = SampleId { pid: 5, tid: 6, time: 1000, id: 1, stream_id: 1, vcpu: 3 };

    fn stamp(exit: Exit) -> ExitStamp {
        ExitStamp { exit, tsc: 500, regs: Some(GuestRegs { ip: 0x1234, user: true }) }
    }

    fn access(reason: ExitReason, write: bool) -> Exit {
        Exit { reason, access: Some(Access { address: 0x3f8, size: 4, write, count: 7 }) }
    }

    #[test]
    fn packet_has_the_access() {
        let io = exit_packet(&stamp(access(ExitReason::Io, true)), &SAMPLE_ID, 1500, false);
        assert_eq!(u64::from(io.reason.get()), EXIT_IO);
        assert_eq!(io.qualification.get(), 0x3f8);
        assert_eq!(io.detail.get(), 7 << 32 | 1 << 8 | 4);
        assert_eq!((io.pid.get(), io.tid.get()), (5, 6));
        assert_eq!((io.time.get(), io.outside.get()), (1000, 500));
        assert_eq!((io.vcpu.get(), io.ip.get()), (3, 0x1234));
        assert_eq!(io.flags, PACKET_USER | PACKET_IP);
        let mmio = exit_packet(&stamp(access(ExitReason::Mmio, false)), &SAMPLE_ID, 1500, false);
        assert_eq!(u64::from(mmio.reason.get()), EXIT_MMIO);
        // Only port I/O reports a number of accesses.
        assert_eq!(mmio.detail.get(), 4);
    }

    #[test]
    fn packet_of_unknown_state_has_zeros() {
        let silent = ExitStamp { regs: None, ..stamp(ExitReason::Hlt.into()) };
        // If the clock was set back, the time outside the guest is zero.
        let packet = exit_packet(&silent, &SAMPLE_ID, 900, true);
        assert_eq!(u64::from(packet.reason.get()), EXIT_HLT);
        assert_eq!(packet.flags, PACKET_CUT);
        assert_eq!((packet.ip.get(), packet.outside.get()), (0, 0));
        assert_eq!((packet.qualification.get(), packet.detail.get()), (0, 0));
    }
}

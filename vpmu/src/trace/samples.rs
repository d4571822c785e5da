//! Packets of a sample trace. A packet contains a vCPU's registers at an overflow of the event that paces the trace.

use zerocopy::little_endian::U64;

use crate::abi::{PACKET_COLLISION, PACKET_IP, PACKET_REGS, PACKET_SAMPLE, PACKET_USER, SamplePacket};
use crate::arch::packet_registers;
use crate::record::SampleId;
use crate::unwind::CpuContext;

/// Overflows found together at one exit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OverflowBatch {
    pub(crate) place: CpuContext,
    /// Their number, at least one.
    pub(crate) overflows: u64,
    /// Growth of the pacing event's count.
    pub(crate) period: u64,
}

impl OverflowBatch {
    /// Returns the packet for the overflows, with the task and the time of `sample_id`. The trace sets the packet's
    /// `sequence`.
    pub(crate) fn packet(&self, sample_id: &SampleId) -> SamplePacket {
        let flag = |on: bool, flag| if on { flag } else { 0 };
        let regs = self.place.cpu.as_ref().map(packet_registers);
        SamplePacket {
            kind: PACKET_SAMPLE,
            flags: PACKET_IP
                | flag(self.place.regs.user, PACKET_USER)
                | flag(regs.is_some(), PACKET_REGS)
                | flag(self.overflows > 1, PACKET_COLLISION),
            vcpu: sample_id.vcpu.into(),
            time: sample_id.time.into(),
            ip: self.place.regs.ip.into(),
            period: self.period.into(),
            pid: sample_id.pid.into(),
            tid: sample_id.tid.into(),
            regs: regs.unwrap_or_default().map(U64::new),
            ..SamplePacket::default()
        }
    }
}

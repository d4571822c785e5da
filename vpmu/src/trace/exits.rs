//! Builds the packets of an exit trace. The caller decides when an exit ends, and writes the packet to an area.

use crate::abi::{DETAIL_COUNT_SHIFT, DETAIL_WRITE, ExitPacket, PACKET_CUT, PACKET_EXIT, PACKET_IP, PACKET_USER};
use crate::machine::{Exit, ExitReason, GuestRegs};
use crate::tasks::Task;
use crate::vcpu::exit_config;

/// An open exit: an exit after which the vCPU has not entered the guest again.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OpenExit {
    pub(crate) exit: Exit,
    pub(crate) vcpu: u32,
    /// The guest's TSC at the start of the exit.
    pub(crate) tsc: u64,
    /// The start of the exit in guest nanoseconds.
    pub(crate) time: u64,
    /// The registers at the exit; `None` if the hypervisor does not provide them.
    pub(crate) regs: Option<GuestRegs>,
}

impl OpenExit {
    /// Returns the packet of an exit that ends at `now`, in guest nanoseconds, while `task` runs. If `cut` is true, the
    /// end of the exit is unknown, for example because the trace ends before the exit does. The trace sets the packet's
    /// `sequence`.
    pub(crate) fn packet(&self, task: Task, now: u64, cut: bool) -> ExitPacket {
        let flag = |on: bool, flag| if on { flag } else { 0 };
        let user = self.regs.is_some_and(|regs| regs.user);
        let access = self.exit.access;
        ExitPacket {
            kind: PACKET_EXIT,
            flags: flag(user, PACKET_USER) | flag(self.regs.is_some(), PACKET_IP) | flag(cut, PACKET_CUT),
            reason: reason(self.exit.reason).into(),
            vcpu: self.vcpu.into(),
            time: self.time.into(),
            ip: self.regs.map_or(0, |regs| regs.ip).into(),
            outside: now.saturating_sub(self.time).into(),
            qualification: access.map_or(0, |access| access.address).into(),
            detail: access
                .map_or(0, |access| {
                    let count = match self.exit.reason {
                        ExitReason::Io => u64::from(access.count) << DETAIL_COUNT_SHIFT,
                        _ => 0,
                    };
                    let write = if access.write { DETAIL_WRITE } else { 0 };
                    u64::from(access.size) | write | count
                })
                .into(),
            pid: task.pid.into(),
            tid: task.tid.into(),
            ..ExitPacket::default()
        }
    }
}

/// The `EXIT_*` value of `reason`. Every such value fits into 16 bits.
fn reason(reason: ExitReason) -> u16 {
    u16::try_from(exit_config(reason)).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{EXIT_HLT, EXIT_IO, EXIT_MMIO};
    use crate::machine::Access;

    fn open_exit(exit: Exit) -> OpenExit {
        OpenExit { exit, vcpu: 3, tsc: 500, time: 1000, regs: Some(GuestRegs { ip: 0x1234, user: true }) }
    }

    fn access(reason: ExitReason, write: bool) -> Exit {
        Exit { reason, access: Some(Access { address: 0x3f8, size: 4, write, count: 7 }) }
    }

    #[test]
    fn packet_has_the_access() {
        let task = Task { pid: 5, tid: 6 };
        let io = open_exit(access(ExitReason::Io, true)).packet(task, 1500, false);
        assert_eq!(u64::from(io.reason.get()), EXIT_IO);
        assert_eq!(io.qualification.get(), 0x3f8);
        assert_eq!(io.detail.get(), 7 << 32 | 1 << 8 | 4);
        assert_eq!((io.pid.get(), io.tid.get()), (5, 6));
        assert_eq!((io.time.get(), io.outside.get()), (1000, 500));
        assert_eq!((io.vcpu.get(), io.ip.get()), (3, 0x1234));
        assert_eq!(io.flags, PACKET_USER | PACKET_IP);
        let mmio = open_exit(access(ExitReason::Mmio, false)).packet(task, 1500, false);
        assert_eq!(u64::from(mmio.reason.get()), EXIT_MMIO);
        // Only port I/O reports a number of accesses.
        assert_eq!(mmio.detail.get(), 4);
    }

    #[test]
    fn packet_of_unknown_state_has_zeros() {
        let silent = OpenExit { regs: None, ..open_exit(ExitReason::Hlt.into()) };
        // If the clock was set back, the time outside the guest is zero.
        let packet = silent.packet(Task::default(), 900, true);
        assert_eq!(u64::from(packet.reason.get()), EXIT_HLT);
        assert_eq!(packet.flags, PACKET_CUT);
        assert_eq!((packet.ip.get(), packet.outside.get()), (0, 0));
        assert_eq!((packet.qualification.get(), packet.detail.get()), (0, 0));
    }
}

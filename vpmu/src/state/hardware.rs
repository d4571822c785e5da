//! Exits that the host recorded, those included that its kernel handled by itself: made into packets
//! when they are collected, for the vCPU ran on meanwhile.

use super::State;
use super::batched::KERNEL_HALF;
use crate::abi::{ExitPacket, PACKET_CUT, PACKET_EXIT, PACKET_HARDWARE, PACKET_IP, PACKET_USER};
use crate::event::Host;
use crate::record::Origin;
use crate::source::{HostExit, Recorded};
use crate::tasks::Task;
use crate::trace::Packet;

const PACKET: u64 = size_of::<ExitPacket>() as u64;

impl State {
    /// Makes packets of what the host recorded for the trace `id` on `vcpu`, oldest first.
    pub(super) fn write_exits(
        &mut self,
        host: &Host<'_>,
        id: u64,
        vcpu: u32,
        recorded: &[Recorded],
    ) {
        let Some(event) = self.events.get_mut(&id).filter(|_| !recorded.is_empty()) else {
            return;
        };
        let (facts, task) = (event.facts, event.task);
        let Some(trace) = &mut event.trace else {
            return;
        };
        let (clock, on) = (self.clock, &host.vcpus[vcpu as usize]);
        // Read after the exits were taken, so it holds every switch before those.
        let history = task.is_none().then(|| self.output.history(vcpu));
        let now = host.source.tsc();
        let mut left = recorded.len();
        for one in recorded {
            left -= 1;
            let exit = match one {
                Recorded::Exit(exit) => exit,
                Recorded::Lost(exits) => {
                    let bytes = exits.saturating_mul(PACKET);
                    self.output.aux_lose(&facts, trace, *exits, bytes);
                    continue;
                }
            };
            // It has happened, whatever a clock that was converted says.
            let tsc = on.to_guest(exit.tsc.min(now));
            let task = task.unwrap_or_else(|| {
                let known = history.as_ref().and_then(|history| history.at(tsc));
                known.unwrap_or_else(|| {
                    self.metrics.samples_unnamed += 1;
                    Task::default()
                })
            });
            let origin = Origin {
                pid: task.pid,
                tid: task.tid,
                time: clock.nanoseconds(tsc),
                id: facts.owner,
                stream_id: facts.id,
                vcpu,
            };
            // Of the last it is known that it was not over until now.
            let until = exit.back.or_else(|| (left == 0).then_some(now));
            let until = until.map_or(tsc, |tsc| on.to_guest(tsc.min(now)));
            let outside = clock.nanoseconds(until).saturating_sub(origin.time);
            let packet = packet(exit, &origin, outside);
            let packet = Packet::Exit(&packet);
            self.output.aux_produce(&facts, &origin, tsc, trace, packet);
        }
    }
}

fn packet(exit: &HostExit, origin: &Origin, outside: u64) -> ExitPacket {
    let flag = |on: bool, flag| if on { flag } else { 0 };
    ExitPacket {
        kind: PACKET_EXIT,
        flags: PACKET_HARDWARE
            | PACKET_IP
            | flag(exit.ip < KERNEL_HALF, PACKET_USER)
            | flag(exit.back.is_none(), PACKET_CUT),
        reason: exit.reason.into(),
        vcpu: origin.vcpu.into(),
        time: origin.time.into(),
        ip: exit.ip.into(),
        outside: outside.into(),
        qualification: exit.qualification.into(),
        detail: exit.detail.into(),
        pid: origin.pid.into(),
        tid: origin.tid.into(),
        ..ExitPacket::default()
    }
}

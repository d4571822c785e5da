//! Traces of exits: which traces record the vCPU's open exit, and the packets of exits.

use super::core::Core;
use super::map::EventMap;
use crate::abi::ExitPacket;
use crate::event::Event;
use crate::source::Recorded;
use crate::tasks::Task;
use crate::trace::{Packet, exit_packet, host_exit_packet};
use crate::vcpu::{ExitStamp, Vcpu};
use crate::work;

/// The traces that still have to record the vCPU's open exit.
#[derive(Debug, Default)]
pub(super) struct ExitTracer {
    /// The number of the exit for which the traces were last looked up. If it is the open exit's number, `traces` are
    /// the traces of that exit; otherwise `traces` is out of date.
    number: u64,
    /// Ids of traces. A trace that stops, pauses or loses its sink is removed once it has recorded the exit.
    traces: Vec<u64>,
}

impl ExitTracer {
    /// Looks up, once for each exit, the active, unpaused traces that record the session's open exit. Called before a
    /// trace starts, stops, pauses or resumes, and when the exit ends. Returns the traces that cannot tell whether they
    /// exclude the exit, because the registers are unknown. The caller must put them in the error state.
    pub(super) fn claim(&mut self, core: &Core, map: &EventMap) -> Vec<u64> {
        let mut blind = Vec::new();
        let Some((number, stamp)) = core.cpu.vcpu.open_exit().get() else {
            return blind;
        };
        if number == self.number {
            return blind;
        }
        self.number = number;
        self.traces.clear();
        for &id in core.watched() {
            let Some(event) = map.get(id) else {
                continue;
            };
            let spec = &event.spec;
            let traces = spec.kind.traced_exits().is_some_and(|exits| exits.includes(stamp.exit.reason));
            if !traces || event.counting.is_paused() {
                continue;
            }
            match stamp.regs {
                Some(regs) if spec.excludes(regs.user) => {}
                None if spec.excludes_any() => blind.push(id),
                _ => self.traces.push(id),
            }
        }
        blind
    }

    /// Ends the session's open exit, and writes the exit's packet to the traces that record it. If `cut` is true, the
    /// time at which the exit ended is unknown. Call [`ExitTracer::claim`] first.
    pub(super) fn end(&mut self, core: &mut Core, map: &mut EventMap, cut: bool) {
        if let Some(stamp) = self.claimed(&core.cpu.vcpu) {
            let now = core.cpu.time();
            for id in self.traces.drain(..) {
                if let Some(event) = map.get_mut(id) {
                    write(core, event, &stamp, now, cut);
                }
            }
        }
        core.cpu.vcpu.open_exit().withdraw();
    }

    /// Writes the open exit, up to this moment, to a trace that stops or that loses its ring or area. Call
    /// [`ExitTracer::claim`] first.
    pub(super) fn cut(&mut self, core: &mut Core, event: &mut Event) {
        let Some(stamp) = self.claimed(&core.cpu.vcpu) else {
            return;
        };
        if let Some(at) = self.traces.iter().position(|&trace| trace == event.spec.id) {
            self.traces.remove(at);
            let now = core.cpu.time();
            write(core, event, &stamp, now, true);
        }
    }

    /// Makes no trace record the open exit.
    pub(super) fn skip(&mut self, vcpu: &Vcpu) {
        if let Some((number, _)) = vcpu.open_exit().get() {
            self.number = number;
        }
        self.traces.clear();
    }

    /// The open exit, if its traces were looked up.
    fn claimed(&self, vcpu: &Vcpu) -> Option<ExitStamp> {
        let (number, stamp) = vcpu.open_exit().get()?;
        (number == self.number).then_some(stamp)
    }
}

/// Writes the packet of an exit that ended at `now`.
fn write(core: &mut Core, event: &mut Event, stamp: &ExitStamp, now: u64, cut: bool) {
    let task = event.schedule.task.unwrap_or_else(|| core.guest.running());
    let time = core.cpu.backend.clock.nanoseconds(stamp.tsc);
    let sample_id = event.spec.sample_id(task, core.cpu.index, time);
    let packet = exit_packet(stamp, &sample_id, now, cut);
    if let Some(trace) = &mut event.trace {
        core.writer.produce(&event.output, &event.spec, &sample_id, stamp.tsc, trace, Packet::Exit(&packet));
    }
    if event.counting.is_paused() {
        // Publish the packet now. The trace is paused, so no later write of this trace would publish the packet.
        core.flush(event);
    }
}

/// Writes packets for the exits that the host recorded for a trace, oldest first. These include exits that the host
/// kernel handled itself.
pub(super) fn write_recorded(core: &mut Core, event: &mut Event, recorded: &[Recorded]) {
    if recorded.is_empty() {
        return;
    }
    let Some(trace) = &mut event.trace else {
        return;
    };
    let (spec, output) = (&event.spec, &event.output);
    let (clock, vcpu) = (core.cpu.backend.clock, &core.cpu.vcpu);
    // Read the history after the exits were taken, so that it includes every switch before them.
    let history = event.schedule.task.is_none().then(|| core.guest.history());
    let now = core.cpu.backend.source.tsc();
    let mut left = recorded.len();
    work::charge(recorded.len() as u64);
    for one in recorded {
        left -= 1;
        let exit = match one {
            Recorded::Exit(exit) => exit,
            Recorded::Lost(exits) => {
                let bytes = exits.saturating_mul(size_of::<ExitPacket>() as u64);
                core.writer.lose_packets(output.sink(), trace, *exits, bytes);
                continue;
            }
        };
        // The exit happened before `now`, even if the conversion of the host's clock gives a later time.
        let tsc = vcpu.to_guest(exit.tsc.min(now));
        let task = event.schedule.task.unwrap_or_else(|| {
            let known = history.as_ref().and_then(|history| history.at(tsc));
            known.unwrap_or_else(|| {
                core.metrics.samples_unnamed += 1;
                Task::default()
            })
        });
        let sample_id = spec.sample_id(task, core.cpu.index, clock.nanoseconds(tsc));
        // If the last exit has not ended yet, count its time outside the guest up to this moment.
        let until = exit.back.or_else(|| (left == 0).then_some(now));
        let until = until.map_or(tsc, |tsc| vcpu.to_guest(tsc.min(now)));
        let outside = clock.nanoseconds(until).saturating_sub(sample_id.time);
        let packet = host_exit_packet(exit, &sample_id, outside);
        core.writer.produce(output, spec, &sample_id, tsc, trace, Packet::Exit(&packet));
    }
}

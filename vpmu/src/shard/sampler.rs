//! Samples: the decision whether an overflow may leave one, the vCPU's state that it shows, and its record or packet.

use std::io;

use super::core::Core;
use super::counts::Counts;
use super::moment::{ExitView, Moment};
use super::writer::Note;
use crate::abi::SamplePacket;
use crate::event::Event;
use crate::kind::Kind;
use crate::machine::GuestRegs;
use crate::record::{MASKS, MODE_KERNEL, MODE_UNKNOWN, MODE_USER, Sample, SampleId};
use crate::source::Overflows;
use crate::throttle::{BudgetShare, SamplingTime, Verdict};
use crate::trace::{OverflowBatch, Packet};
use crate::unwind::{CpuContext, SampleCapture};
use crate::work;

/// Size of a sample trace's packet.
pub(super) const PACKET: u64 = size_of::<SamplePacket>() as u64;

/// The state that the samples of one vCPU share.
#[derive(Debug, Default)]
pub(super) struct Sampler {
    /// The part of the guest's sampling budget that this shard has taken but not used yet. Samples of the operator's
    /// events are not charged to it.
    budget: BudgetShare,
    /// Time that the vCPU spent on samples of the guest's events.
    time: SamplingTime,
    /// Callchain, registers and stack of the sample under construction.
    capture: SampleCapture,
    /// The number of the last exit at which host counters were sampling, and the vCPU's state at that exit. The state is
    /// valid only until the vCPU enters the guest again.
    exit: (u64, Option<CpuContext>),
    /// The host's TSC at the earliest overflow of the guest's events that was found at this exit.
    first_overflow: Option<u64>,
}

impl Sampler {
    /// Begins an exit at which host counters are sampling. Keeps the vCPU's state, because a command during this exit
    /// may stop an event and then find further overflows that belong to the exit.
    pub(super) fn begin_exit(&mut self, core: &Core, exit: &mut ExitView<'_>) {
        self.exit = (core.cpu.vcpu.exits().total(), exit.place(core));
        self.first_overflow = None;
    }

    /// Charges the time of the last sample, unless it has already been charged. Samples may use only a share of the
    /// vCPU's time. Returns whether this share is used up at `time`.
    pub(super) fn charge_time(&mut self, core: &Core, time: u64) -> bool {
        let backend = &core.cpu.backend;
        if let Some((spent, guest)) = core.cpu.vcpu.take_sample() {
            // `spent` is CPU time, but `guest` is elapsed time, which includes any time in which the host ran other
            // threads. The charge can therefore be too low, but never too high.
            let took = spent.saturating_sub(backend.clock.nanoseconds(guest));
            self.time.charge(backend.time_limit, time, took);
        }
        self.time.is_used_up(backend.time_limit, time)
    }

    /// Total time that the vCPU spent on samples.
    pub(super) fn total_time(&self) -> u64 {
        self.time.total()
    }

    /// Takes the overflows of an event's host counter that uses the exit engine.
    pub(super) fn take(&mut self, core: &Core, event: &mut Event) -> Overflows {
        let overflows = event.counting.drain(core.cpu.index);
        work::charge_examined(overflows.samples.len());
        if let Some(first) = overflows.samples.first().filter(|_| event.takes_time()) {
            let first = self.first_overflow.map_or(first.tsc, |before| before.min(first.tsc));
            self.first_overflow = Some(first);
        }
        overflows
    }

    /// The earliest of the overflows that were taken at this exit and that cost time. Returns it only once.
    pub(super) fn take_first_overflow(&mut self) -> Option<u64> {
        self.first_overflow.take()
    }

    /// The moment of overflows that were found now.
    pub(super) fn moment(&self, core: &Core) -> Moment {
        let tsc = core.cpu.tsc();
        Moment {
            vcpu: core.cpu.index,
            tsc,
            time: core.cpu.backend.clock.nanoseconds(tsc),
            place: self.place(core),
            task: Some(core.guest.running()),
            addr: 0,
        }
    }

    /// The vCPU's state at the current exit. `None` if the state was not read, or if the vCPU has run since the exit.
    /// The vCPU may have run if the caller executes a command of another vCPU or a control request.
    fn place(&self, core: &Core) -> Option<CpuContext> {
        let vcpu = &core.cpu.vcpu;
        let (exit, place) = self.exit;
        place.filter(|_| !vcpu.is_inside() && exit == vcpu.exits().total())
    }

    // Admission.

    /// Decides whether the device writes a record for an overflow at `time`. If this overflow uses up the event's rate
    /// limit, or if the guest's budget is used up, also disables overflows of the host counter, unless the event has a
    /// frequency. If disabling them fails, the second value of the result is the host's error.
    pub(super) fn admit(&mut self, core: &mut Core, event: &mut Event, time: u64) -> (Verdict, io::Result<()>) {
        let limit = core.cpu.backend.rate_limit;
        let allowed =
            event.overflows.is_throttled() || event.is_operators() || self.budget.admit(&core.cpu.backend.budget, time);
        if allowed {
            core.change(event, |event, _| event.overflows.admit(&mut event.counting, limit, time))
        } else {
            core.change(event, |event, _| {
                (Verdict::Exhausted, event.overflows.exhaust(&mut event.counting, limit, time))
            })
        }
    }

    /// Admits an overflow at `time` that needs no work besides its record. For any other overflow, returns `false` and
    /// changes nothing. The caller must then call [`Sampler::admit`].
    pub(super) fn admit_plain(&mut self, core: &Core, event: &mut Event, time: u64) -> bool {
        let guests = !event.is_operators();
        if guests && !self.budget.admit(&core.cpu.backend.budget, time) {
            return false;
        }
        let admitted = event.admit_plain(core.cpu.backend.rate_limit, time);
        if guests && !admitted {
            self.budget.give_back();
        }
        admitted
    }

    /// Charges the record of an admitted sample to the guest's budget.
    pub(super) fn spend(&mut self, event: &Event, bytes: usize) {
        if !event.is_operators() {
            self.budget.spend(bytes);
        }
    }

    /// Lifts an event's throttle if the window of guest time in which the throttle began has ended at `time`, and the
    /// vCPU has time left for samples.
    ///
    /// # Errors
    /// The host's error. The caller must put the event in the error state.
    pub(super) fn unthrottle(&mut self, core: &mut Core, event: &mut Event, time: u64) -> io::Result<()> {
        let backend = &core.cpu.backend;
        if event.takes_time() && self.time.is_used_up(backend.time_limit, time) {
            return Ok(());
        }
        let limit = backend.rate_limit;
        if core.change(event, |event, _| event.overflows.unthrottle(&mut event.counting, limit, time))? {
            let sample_id = core.sample_id_at(event, time);
            core.note(event, &sample_id, &Note::Unthrottle);
        }
        Ok(())
    }

    /// Throttles an event because the vCPU has no time left for samples.
    ///
    /// # Errors
    /// The host's error. The caller must put the event in the error state.
    pub(super) fn rest(core: &mut Core, event: &mut Event, time: u64) -> io::Result<()> {
        let limit = core.cpu.backend.rate_limit;
        let rested = core.change(event, |event, _| event.overflows.rest(&mut event.counting, limit, time));
        let sample_id = core.sample_id_at(event, time);
        core.note(event, &sample_id, &Note::Throttle);
        rested
    }

    // Records.

    /// Writes the record of one overflow, or counts the record as lost. Returns the record's sample id.
    pub(super) fn sample(
        &mut self,
        core: &mut Core,
        event: &mut Event,
        period: u64,
        moment: &Moment,
        counts: &Counts,
    ) -> SampleId {
        work::charge(1);
        let spec = &event.spec;
        let sample_id = moment.sample_id(event);
        // If the registers are unknown, a record that must contain an IP would be wrong. Registers from an excluded
        // mode would leak data. They are possible because the device finds the overflow only at a later exit, and the
        // vCPU may be in an excluded mode by then.
        let regs = moment.place.map(|place| place.regs);
        // A remote device never knows the registers at a mark. A mark's sample then has an IP of zero and no mode, because
        // its data is the mark itself.
        let without = core.cpu.backend.settings.remote && matches!(spec.kind, Kind::Mark(_));
        let allowed = regs.map_or(without, |regs| !spec.excludes(regs.user));
        if !allowed && spec.request.layout.sample_type & MASKS.placed != 0 {
            core.lose(event, 1);
            return sample_id;
        }
        let wanted = spec.capture();
        let capture = &mut self.capture;
        if let Some(place) = moment.place.filter(|_| wanted.wants_state()) {
            let user_regs = core.guest.user_regs();
            capture.take(&core.guest.view(), &place, user_regs, &wanted, core.cpu.backend.orc());
        }
        let sample = Sample {
            misc: misc(regs),
            ip: regs.map_or(0, |regs| regs.ip),
            addr: moment.addr,
            period,
            read: counts.reading(),
            chain: capture.chain(),
            regs_user: capture.regs_user(),
            stack: capture.stack(),
            regs_intr: capture.regs_intr(),
        };
        if core.writer.sample(&event.output, spec, &sample_id, &sample) {
            self.spend(event, core.writer.record.size());
        } else {
            event.lost = event.lost.saturating_add(1);
        }
        sample_id
    }
}

/// Writes one packet for the overflows of a trace that were found together. `period` is the sum of their periods. The
/// packet is lost if the vCPU is in an excluded mode, or if its state is unknown, for example because the vCPU has run
/// since the exit.
pub(super) fn write_packet(
    core: &mut Core,
    event: &mut Event,
    sample_id: &SampleId,
    moment: &Moment,
    overflows: u64,
    period: u64,
) {
    let spec = &event.spec;
    let Some(trace) = &mut event.trace else {
        return;
    };
    work::charge(1);
    let Some(place) = moment.place.filter(|place| !spec.excludes(place.regs.user)) else {
        core.writer.lose_packets(event.output.sink(), trace, 1, PACKET);
        return;
    };
    let found = OverflowBatch { place, overflows, period };
    let packet = found.packet(sample_id);
    core.writer.produce(&event.output, spec, sample_id, moment.tsc, trace, Packet::Sample(&packet));
}

/// The mode in a sample's header.
pub(super) fn misc(regs: Option<GuestRegs>) -> u16 {
    match regs {
        Some(GuestRegs { user: true, .. }) => MODE_USER,
        Some(GuestRegs { user: false, .. }) => MODE_KERNEL,
        None => MODE_UNKNOWN,
    }
}

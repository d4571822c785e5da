//! The moment of an overflow: the vCPU's state, the time and the running task.

use std::collections::VecDeque;

use super::core::Core;
use crate::arch::CpuState;
use crate::cpu::Cpu;
use crate::event::Event;
use crate::machine::{GuestRegs, Registers};
use crate::record::{SAMPLE_TID, SampleId};
use crate::source::Overflow;
use crate::tasks::Task;
use crate::unwind::CpuContext;
use crate::vcpu::{ExitStamp, Hook};

/// The vCPU's state, the time and the running task at an overflow. Overflows that are found together share one
/// moment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moment {
    pub(super) vcpu: u32,
    /// The guest's TSC.
    pub(super) tsc: u64,
    /// The same moment in guest nanoseconds.
    pub(super) time: u64,
    /// The vCPU's registers and state. `None` if the hypervisor does not provide them, or if the vCPU has run
    /// since the exit.
    pub(super) place: Option<CpuContext>,
    /// The running task. `None` if it is not known.
    pub(super) task: Option<Task>,
    /// The value of the mark that caused the overflow. Zero if no mark caused it.
    pub(super) addr: u64,
}

impl Moment {
    /// The sample id (task, vCPU, time and event) of a record or packet that `event` writes for this overflow.
    pub(super) fn sample_id(&self, event: &Event) -> SampleId {
        let task = event.schedule.task.or(self.task).unwrap_or_default();
        event.spec.sample_id(task, self.vcpu, self.time)
    }

    /// Whether a record of `event` for this overflow would name the task, but the task is not known.
    pub(super) fn is_unnamed(&self, event: &Event) -> bool {
        self.task.is_none() && event.schedule.task.is_none() && event.spec.request.layout.has(SAMPLE_TID)
    }
}

/// Overflows of one event that were found at one moment and have not been applied yet.
#[derive(Debug)]
pub(super) struct Overflows {
    pub(super) event: u64,
    /// Whether the event is a trace.
    pub(super) of_trace: bool,
    pub(super) periods: Periods,
    pub(super) moment: Moment,
}

/// Overflows that were found but have not been applied yet, oldest first.
#[derive(Debug, Default)]
pub(super) struct OverflowQueue {
    overflows: VecDeque<Overflows>,
    /// Whether the queue is being applied. If so, overflows that are found meanwhile are applied, too.
    running: bool,
}

impl OverflowQueue {
    /// Begins to find and apply overflows. Returns false if an outer call is doing so. The outer call then applies the
    /// overflows.
    pub(super) fn begin(&mut self) -> bool {
        !std::mem::replace(&mut self.running, true)
    }

    pub(super) fn is_running(&self) -> bool {
        self.running
    }

    pub(super) fn push(&mut self, overflows: Overflows) {
        self.overflows.push_back(overflows);
    }

    pub(super) fn next(&mut self) -> Option<Overflows> {
        self.overflows.pop_front()
    }

    /// Ends what [`OverflowQueue::begin`] began, after the queue became empty.
    pub(super) fn end(&mut self) {
        self.running = false;
    }
}

/// The periods of overflows that were found together, one for each overflow.
#[derive(Debug)]
pub(super) enum Periods {
    /// The device itself counts the event, so all periods are equal.
    Equal { overflows: u64, length: u64 },
    /// Overflows that the host recorded.
    Each(std::vec::IntoIter<Overflow>),
}

impl Iterator for Periods {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        match self {
            Self::Equal { overflows: 0, .. } => None,
            Self::Equal { overflows, length } => {
                *overflows -= 1;
                Some(*length)
            }
            Self::Each(overflows) => overflows.next().map(|overflow| overflow.period),
        }
    }
}

/// A vCPU after an exit. Its registers and the time are read on demand.
pub(crate) struct ExitView<'a> {
    registers: &'a mut dyn Registers,
    regs: Option<Option<GuestRegs>>,
    cpu: Option<Option<CpuState>>,
    tsc: Option<u64>,
    /// The mark's value, if the exit is a mark.
    mark: Option<u32>,
}

impl<'a> ExitView<'a> {
    pub(crate) fn new(registers: &'a mut dyn Registers, mark: Option<u32>) -> Self {
        Self { registers, regs: None, cpu: None, tsc: None, mark }
    }

    /// Takes the time and registers from `stamp`, which was made at a traced exit, so that they are not read again.
    pub(crate) fn stamped(&mut self, stamp: &ExitStamp) {
        self.tsc = Some(stamp.tsc);
        self.regs = Some(stamp.regs);
    }

    pub(crate) fn regs(&mut self) -> Option<GuestRegs> {
        *self.regs.get_or_insert_with(|| self.registers.registers())
    }

    /// Returns the registers. If an event of the vCPU needs the whole state, also returns that state.
    pub(super) fn place(&mut self, core: &Core) -> Option<CpuContext> {
        let regs = self.regs()?;
        let wants_state = core.has(Hook::State);
        let cpu = if wants_state { *self.cpu.get_or_insert_with(|| self.registers.state()) } else { None };
        Some(CpuContext { regs, cpu })
    }

    pub(super) fn tsc(&mut self, cpu: &Cpu) -> u64 {
        *self.tsc.get_or_insert_with(|| cpu.tsc())
    }

    pub(super) fn moment(&mut self, core: &Core) -> Moment {
        let tsc = self.tsc(&core.cpu);
        Moment {
            vcpu: core.cpu.index,
            tsc,
            time: core.cpu.backend.clock.nanoseconds(tsc),
            place: self.place(core),
            task: Some(core.guest.running()),
            addr: self.mark.map_or(0, u64::from),
        }
    }
}

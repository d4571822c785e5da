//! The specification of an event from its open request. Only the interval of its wakeups can
//! change.

use crate::abi::{
    ENGINE_BATCHED, EXIT_ALL, KIND_EXIT_TRACE, KIND_HARDWARE, KIND_HOST_TRACE, KIND_SAMPLE_TRACE,
    KIND_SOFTWARE, KIND_VMM_TRACE, OPEN_EXCLUDE_CHAIN_KERNEL, OPEN_EXCLUDE_CHAIN_USER,
    OPEN_EXCLUDE_KERNEL, OPEN_EXCLUDE_USER, PACE_CPU_CLOCK, PACE_CYCLES, PACE_INSTRUCTIONS,
};
use crate::record::{
    Layout, SAMPLE_CALLCHAIN, SAMPLE_REGS_INTR, SAMPLE_REGS_USER, SAMPLE_STACK_USER,
};
use crate::ring::Wakeup;
use crate::source::Rate;
use crate::walk::CaptureSpec;

const NANOS_PER_SECOND: u64 = 1_000_000_000;

/// The context of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(deny_unknown_fields)
)]
pub(crate) enum Context {
    /// A vCPU, with any task.
    Vcpu(u32),
    /// A task, with the vCPU that it is scheduled in on, if any.
    Task(Option<u32>),
}

impl Context {
    /// Whether events of both contexts may share a group or a ring. For task events, only the driver
    /// knows whether their tasks are the same.
    pub(crate) fn is_like(self, other: Self) -> bool {
        match (self, other) {
            (Self::Vcpu(one), Self::Vcpu(other)) => one == other,
            (Self::Task(_), Self::Task(_)) => true,
            _ => false,
        }
    }
}

/// Kind and config of the host event for the `PACE_*` value `config` of a sample trace; `None` if
/// the device's own exits pace the trace.
pub(crate) fn pace(config: u64) -> Option<(u32, u64)> {
    match config {
        // PERF_COUNT_SW_CPU_CLOCK, PERF_COUNT_HW_CPU_CYCLES and PERF_COUNT_HW_INSTRUCTIONS.
        PACE_CPU_CLOCK => Some((KIND_SOFTWARE, 0)),
        PACE_CYCLES => Some((KIND_HARDWARE, 0)),
        PACE_INSTRUCTIONS => Some((KIND_HARDWARE, 1)),
        _ => None,
    }
}

/// The constant properties of an event, and its wakeups.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EventSpec {
    pub(crate) id: u64,
    /// The first event of the family. It provides the ring, and the id in the records.
    pub(crate) owner: u64,
    pub(crate) kind: u32,
    pub(crate) config: u64,
    /// `OPEN_*`.
    pub(crate) flags: u32,
    /// The layout of its records.
    pub(crate) layout: Layout,
    pub(crate) wakeup: Wakeup,
    /// Bytes of an area between two wakeups; zero: half of the area.
    pub(crate) aux_watermark: u32,
    /// Maximum length of a call chain.
    pub(crate) max_stack: u32,
    /// `ENGINE_*`: the engine of its samples.
    pub(crate) engine: u32,
    /// The shortest period of its backing: at least 1.
    pub(crate) shortest_period: u64,
    /// Whether its period is in nanoseconds.
    pub(crate) by_clock: bool,
}

impl EventSpec {
    /// Whether it was opened with `flag`.
    pub(crate) fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    /// Interrupts per second of its host counter at a rate; zero if the rate does not determine them.
    pub(crate) fn interrupts(&self, rate: Rate) -> u64 {
        match rate {
            Rate::Frequency(hertz) => hertz,
            Rate::Period(length) if self.by_clock => NANOS_PER_SECOND / length.max(1),
            Rate::Period(_) => 0,
        }
    }

    /// Whether it writes packets to an AUX area.
    pub(crate) fn is_trace(&self) -> bool {
        is_trace(self.kind)
    }

    /// Whether it excludes guest user mode, or guest kernel mode if `user` is false.
    pub(crate) fn excludes(&self, user: bool) -> bool {
        self.has(if user {
            OPEN_EXCLUDE_USER
        } else {
            OPEN_EXCLUDE_KERNEL
        })
    }

    /// Whether it is a trace of exits that reach the VMM.
    pub(crate) fn traces_exits(&self) -> bool {
        self.kind == KIND_EXIT_TRACE && self.config != EXIT_ALL
    }

    /// Whether it is a trace of samples.
    pub(crate) fn traces_samples(&self) -> bool {
        self.kind == KIND_SAMPLE_TRACE
    }

    /// Kind and config of its host counter's event, if it has one.
    pub(crate) fn counted(&self) -> (u32, u64) {
        let paced = pace(self.config).filter(|_| self.traces_samples());
        paced.unwrap_or((self.kind, self.config))
    }

    pub(crate) fn excludes_any(&self) -> bool {
        self.has(OPEN_EXCLUDE_USER | OPEN_EXCLUDE_KERNEL)
    }

    /// The parts of the vCPU's state that its samples contain.
    pub(crate) fn capture(&self) -> CaptureSpec {
        let layout = &self.layout;
        let of = |bit, mask| if layout.has(bit) { mask } else { 0 };
        CaptureSpec {
            chain: layout.has(SAMPLE_CALLCHAIN),
            exclude_kernel: self.has(OPEN_EXCLUDE_CHAIN_KERNEL),
            exclude_user: self.has(OPEN_EXCLUDE_CHAIN_USER),
            max_stack: self.max_stack,
            regs_user: of(SAMPLE_REGS_USER, layout.regs_user),
            regs_intr: of(SAMPLE_REGS_INTR, layout.regs_intr),
            stack_user: if layout.has(SAMPLE_STACK_USER) {
                layout.stack_user
            } else {
                0
            },
        }
    }

    /// Whether the host records its overflows for a later drain.
    pub(crate) fn is_batched(&self) -> bool {
        self.engine == ENGINE_BATCHED
    }

    /// Whether it was inherited from another event.
    pub(crate) fn is_child(&self) -> bool {
        self.owner != self.id
    }
}

/// Whether events of a kind write packets to an AUX area.
pub(crate) fn is_trace(kind: u32) -> bool {
    matches!(
        kind,
        KIND_EXIT_TRACE | KIND_SAMPLE_TRACE | KIND_HOST_TRACE | KIND_VMM_TRACE
    )
}

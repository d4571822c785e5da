//! What was asked for when an event was opened. Nothing of it changes but the interval of its wakeups.

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

/// Where an event counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(deny_unknown_fields)
)]
pub(crate) enum Context {
    /// On one vCPU, whoever runs there.
    Vcpu(u32),
    /// With a task, on the vCPU that the driver last scheduled it in on.
    Task(Option<u32>),
}

impl Context {
    /// Whether events of both may be in one group, or write to one ring. Which task it is, the
    /// driver alone knows.
    pub(crate) fn is_like(self, other: Self) -> bool {
        match (self, other) {
            (Self::Vcpu(one), Self::Vcpu(other)) => one == other,
            (Self::Task(_), Self::Task(_)) => true,
            _ => false,
        }
    }
}

/// Kind and config of the host event that a sample trace of the `PACE_*` value `config` goes by;
/// `None`: the device's own exits.
pub(crate) fn pace(config: u64) -> Option<(u32, u64)> {
    match config {
        // perf's numbers of its cpu-clock, cycles and instructions.
        PACE_CPU_CLOCK => Some((KIND_SOFTWARE, 0)),
        PACE_CYCLES => Some((KIND_HARDWARE, 0)),
        PACE_INSTRUCTIONS => Some((KIND_HARDWARE, 1)),
        _ => None,
    }
}

/// What does not change about an event, but for its wakeups.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EventSpec {
    pub(crate) id: u64,
    /// The event whose ring and id its records use: itself, or its parent.
    pub(crate) owner: u64,
    pub(crate) kind: u32,
    pub(crate) config: u64,
    /// `OPEN_*`.
    pub(crate) flags: u32,
    /// What its records hold.
    pub(crate) layout: Layout,
    pub(crate) wakeup: Wakeup,
    /// Bytes of an area between two wakeups; zero: half of it.
    pub(crate) aux_watermark: u32,
    /// Most addresses of a call chain.
    pub(crate) max_stack: u32,
    /// `ENGINE_*`: what makes its samples.
    pub(crate) engine: u32,
    /// The shortest period that its backing keeps: 1 at least.
    pub(crate) shortest_period: u64,
    /// Its period is of nanoseconds.
    pub(crate) by_clock: bool,
}

impl EventSpec {
    /// Whether it was opened with a flag of `OPEN_*`.
    pub(crate) fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    /// Interrupts a second that its host counter makes at a rate, as far as that tells.
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

    /// Whether guest user mode, or else kernel mode, is left out.
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

    /// Kind and config of the host event that its counter counts, if it has one.
    pub(crate) fn counted(&self) -> (u32, u64) {
        let paced = pace(self.config).filter(|_| self.traces_samples());
        paced.unwrap_or((self.kind, self.config))
    }

    pub(crate) fn excludes_any(&self) -> bool {
        self.has(OPEN_EXCLUDE_USER | OPEN_EXCLUDE_KERNEL)
    }

    /// What its samples hold of the place where they were taken.
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

    /// Whether the host records its overflows, to be collected later.
    pub(crate) fn is_batched(&self) -> bool {
        self.engine == ENGINE_BATCHED
    }

    /// Whether it was inherited from another.
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

//! The properties that an event's open request sets. Only those of its wakeups can change later.

use crate::abi::{
    ENGINE_BATCHED, EXIT_ALL, KIND_EXIT_TRACE, KIND_MARK, KIND_SAMPLE_TRACE, KIND_VMM_TRACE, OPEN_EXCLUDE_CHAIN_KERNEL,
    OPEN_EXCLUDE_CHAIN_USER, OPEN_EXCLUDE_KERNEL, OPEN_EXCLUDE_USER,
};
use crate::kind::{is_trace, pace};
use crate::record::{Layout, SAMPLE_CALLCHAIN, SAMPLE_REGS_INTR, SAMPLE_REGS_USER, SAMPLE_STACK_USER, SampleId};
use crate::ring::Wakeup;
use crate::saved::saved;
use crate::source::Rate;
use crate::tasks::Task;
use crate::unwind::CaptureSpec;

const NANOS_PER_SECOND: u64 = 1_000_000_000;

/// The context of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub(crate) enum Context {
    /// One vCPU, whatever task runs on it.
    Vcpu(u32),
    /// One task, and the vCPU on which it is scheduled in, if any.
    Task(Option<u32>),
}

impl Context {
    /// Whether events of these two contexts may share a group or a ring. For task events, only the driver knows
    /// whether their tasks are the same.
    pub(crate) fn is_like(self, other: Self) -> bool {
        match (self, other) {
            (Self::Vcpu(one), Self::Vcpu(other)) => one == other,
            (Self::Task(_), Self::Task(_)) => true,
            _ => false,
        }
    }
}

/// The properties of an event that never change, and those of its wakeups.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EventSpec {
    pub(crate) id: u64,
    /// The id of the family's first event. The family's ring is mapped for this id, unless the family is redirected to
    /// the ring of another family. Records contain this id.
    pub(crate) owner: u64,
    pub(crate) kind: u32,
    pub(crate) config: u64,
    /// `OPEN_*`.
    pub(crate) flags: u32,
    /// The layout of the event's records.
    pub(crate) layout: Layout,
    /// The wakeup interval of the event's family.
    pub(crate) wakeup: Wakeup,
    /// Whether the wakeups of the event's family have notices of their own.
    pub(crate) own_notices: bool,
    /// Whether each sample of the event causes a wakeup. Only the event's shard knows this, because a vCPU command sets
    /// it: it is `false` in the control plane's copy.
    pub(crate) prompt: bool,
    /// Number of bytes in an area between two wakeups. Zero means half of the area.
    pub(crate) aux_watermark: u32,
    /// Maximum length of a call chain.
    pub(crate) max_stack: u32,
    /// `ENGINE_*`: the engine that takes the event's samples unless the event is prompt.
    pub(crate) engine: u32,
    /// The shortest sampling period that the event's backing supports. It is at least 1.
    pub(crate) shortest_period: u64,
    /// Whether the event's period is in nanoseconds.
    pub(crate) by_clock: bool,
}

saved! {
    /// The specification of an event: its open request, with the current settings of its family's wakeups.
    pub(crate) struct SavedSpec {
        pub(crate) id: u64,
        pub(crate) owner: u64,
        pub(crate) kind: u32,
        pub(crate) config: u64,
        /// `OPEN_*`.
        pub(crate) flags: u32,
        pub(crate) layout: Layout,
        pub(crate) wakeup: Wakeup,
        /// Whether the wakeups of the event's family have notices of their own.
        pub(crate) own_notices: bool,
        pub(crate) aux_watermark: u32,
        pub(crate) max_stack: u32,
        /// `ENGINE_*`.
        pub(crate) engine: u32,
    }
}

impl EventSpec {
    /// Whether the event was opened with `flag`.
    pub(crate) fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    /// Returns the interrupts per second that the event's host counter causes at `rate`. Zero if `rate` does not
    /// determine the number.
    pub(crate) fn interrupts(&self, rate: Rate) -> u64 {
        match rate {
            Rate::Frequency(hertz) => hertz,
            Rate::Period(length) if self.by_clock => NANOS_PER_SECOND / length.max(1),
            Rate::Period(_) => 0,
        }
    }

    /// The sample id of a record or packet of the event: its task, vCPU, time in guest nanoseconds, and ids.
    pub(crate) fn sample_id(&self, task: Task, vcpu: u32, time: u64) -> SampleId {
        SampleId { pid: task.pid, tid: task.tid, time, id: self.owner, stream_id: self.id, vcpu }
    }

    /// Whether the event is a trace of a producer in the VMM.
    pub(crate) fn is_vmm_trace(&self) -> bool {
        self.kind == KIND_VMM_TRACE
    }

    /// Whether the event counts marks.
    pub(crate) fn is_mark(&self) -> bool {
        self.kind == KIND_MARK
    }

    /// Whether the event writes packets to an AUX area.
    pub(crate) fn is_trace(&self) -> bool {
        is_trace(self.kind)
    }

    /// Whether the event excludes guest user mode (`user` is true) or guest kernel mode (`user` is false).
    pub(crate) fn excludes(&self, user: bool) -> bool {
        self.has(if user { OPEN_EXCLUDE_USER } else { OPEN_EXCLUDE_KERNEL })
    }

    /// Whether the event is a trace of exits that reach the VMM.
    pub(crate) fn traces_exits(&self) -> bool {
        self.kind == KIND_EXIT_TRACE && self.config != EXIT_ALL
    }

    /// Whether the event is a trace of samples.
    pub(crate) fn traces_samples(&self) -> bool {
        self.kind == KIND_SAMPLE_TRACE
    }

    /// Kind and config for the event's host counter, if the event has one. For a sample trace, these are the kind
    /// and config of the host event that paces the trace.
    pub(crate) fn counted(&self) -> (u32, u64) {
        let paced = pace(self.config).filter(|_| self.traces_samples());
        paced.unwrap_or((self.kind, self.config))
    }

    pub(crate) fn excludes_any(&self) -> bool {
        self.has(OPEN_EXCLUDE_USER | OPEN_EXCLUDE_KERNEL)
    }

    /// The parts of the vCPU's state that the event's samples contain.
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
            stack_user: if layout.has(SAMPLE_STACK_USER) { layout.stack_user } else { 0 },
        }
    }

    /// Whether the host records the event's overflows for a later drain, unless the event is prompt.
    pub(crate) fn is_batched(&self) -> bool {
        self.engine == ENGINE_BATCHED
    }

    /// Whether the event was inherited from another event.
    pub(crate) fn is_child(&self) -> bool {
        self.owner != self.id
    }
}

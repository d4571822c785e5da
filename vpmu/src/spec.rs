//! The identity of an event: the request that opened it, its ids, and its context.

use crate::abi::{
    CONTEXT_TASK, DEFAULT_STACK, ENGINE_BATCHED, OPEN_EXCLUDE_CHAIN_KERNEL, OPEN_EXCLUDE_CHAIN_USER,
    OPEN_EXCLUDE_KERNEL, OPEN_EXCLUDE_USER, OPEN_SAMPLE_ID_ALL, OpenRequest,
};
use crate::kind::Kind;
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

saved! {
    /// The request with which an event was opened, as far as it describes the event itself. The event, the control plane
    /// and the saved state have this one form of it.
    pub(crate) struct EventRequest {
        pub(crate) kind: u32,
        pub(crate) config: u64,
        /// `OPEN_*`.
        pub(crate) flags: u32,
        /// The layout of the event's records.
        pub(crate) layout: Layout,
        /// Number of bytes in an area between two wakeups. Zero means half of the area.
        pub(crate) aux_watermark: u32,
        /// Maximum length of a call chain.
        pub(crate) max_stack: u32,
        /// `ENGINE_*`: the engine that takes the event's samples unless the event is prompt.
        pub(crate) engine: u32,
    }

    /// A saved [`EventSpec`], with the current settings of its family's wakeups.
    pub(crate) struct SavedSpec {
        pub(crate) id: u64,
        pub(crate) owner: u64,
        pub(crate) request: EventRequest,
        pub(crate) wakeup: Wakeup,
        /// Whether the wakeups of the event's family have notices of their own.
        pub(crate) own_notices: bool,
    }
}

impl EventRequest {
    /// The request that `open` describes.
    pub(crate) fn of(open: &OpenRequest) -> Self {
        Self {
            kind: open.kind.get(),
            config: open.config.get(),
            flags: open.flags.get(),
            layout: Layout {
                sample_type: open.sample_type.get(),
                read_format: open.read_format.get(),
                regs_user: open.regs_user.get(),
                regs_intr: open.regs_intr.get(),
                stack_user: open.stack_user.get(),
                sample_id_all: open.flags.get() & OPEN_SAMPLE_ID_ALL != 0,
            },
            aux_watermark: open.aux_watermark.get(),
            max_stack: match open.max_stack.get() {
                0 => DEFAULT_STACK,
                some => some,
            },
            engine: open.engine.get(),
        }
    }

    /// The open request for this event in `context`. `rate` is a period or a frequency, as the flags say.
    pub(crate) fn open(&self, context: Context, rate: Option<u64>) -> OpenRequest {
        let layout = &self.layout;
        OpenRequest {
            kind: self.kind.into(),
            context: match context {
                Context::Vcpu(vcpu) => vcpu,
                Context::Task(_) => CONTEXT_TASK,
            }
            .into(),
            config: self.config.into(),
            period: rate.unwrap_or(0).into(),
            sample_type: layout.sample_type.into(),
            flags: self.flags.into(),
            engine: self.engine.into(),
            max_stack: self.max_stack.into(),
            read_format: layout.read_format.into(),
            regs_user: layout.regs_user.into(),
            regs_intr: layout.regs_intr.into(),
            stack_user: layout.stack_user.into(),
            aux_watermark: self.aux_watermark.into(),
            ..OpenRequest::default()
        }
    }
}

/// The properties of an event that never change. The event and the control plane share them.
#[derive(Debug)]
pub(crate) struct EventSpec {
    pub(crate) id: u64,
    /// The id of the family's first event. The family's ring is mapped for this id, unless the family is redirected to
    /// the ring of another family. Records contain this id.
    pub(crate) owner: u64,
    /// The kind that the request names.
    pub(crate) kind: Kind,
    pub(crate) request: EventRequest,
    /// The shortest sampling period that the event's backing supports. It is at least 1.
    pub(crate) shortest_period: u64,
    /// Whether the event's period is in nanoseconds.
    pub(crate) by_clock: bool,
}

/// When an event's records wake their reader, and how the reader's wakeups reach the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wakeups {
    /// The wakeup interval of the event's family.
    pub(crate) every: Wakeup,
    /// Whether the wakeups of the event's family have notices of their own.
    pub(crate) own_notices: bool,
    /// Whether each sample of the event causes a wakeup.
    pub(crate) prompt: bool,
}

impl From<Wakeup> for Wakeups {
    fn from(every: Wakeup) -> Self {
        Self { every, own_notices: false, prompt: false }
    }
}

impl EventSpec {
    /// Whether the event was opened with `flag`.
    pub(crate) fn has(&self, flag: u32) -> bool {
        self.request.flags & flag != 0
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

    /// Whether the event writes packets to an AUX area.
    pub(crate) fn is_trace(&self) -> bool {
        self.kind.format().is_some()
    }

    /// Whether the event excludes guest user mode (`user` is true) or guest kernel mode (`user` is false).
    pub(crate) fn excludes(&self, user: bool) -> bool {
        self.has(if user { OPEN_EXCLUDE_USER } else { OPEN_EXCLUDE_KERNEL })
    }

    /// Whether the event is a trace of exits that reach the VMM.
    pub(crate) fn traces_exits(&self) -> bool {
        self.kind.traced_exits().is_some()
    }

    pub(crate) fn excludes_any(&self) -> bool {
        self.has(OPEN_EXCLUDE_USER | OPEN_EXCLUDE_KERNEL)
    }

    /// The parts of the vCPU's state that the event's samples contain.
    pub(crate) fn capture(&self) -> CaptureSpec {
        let layout = &self.request.layout;
        let of = |bit, mask| if layout.has(bit) { mask } else { 0 };
        CaptureSpec {
            chain: layout.has(SAMPLE_CALLCHAIN),
            exclude_kernel: self.has(OPEN_EXCLUDE_CHAIN_KERNEL),
            exclude_user: self.has(OPEN_EXCLUDE_CHAIN_USER),
            max_stack: self.request.max_stack,
            regs_user: of(SAMPLE_REGS_USER, layout.regs_user),
            regs_intr: of(SAMPLE_REGS_INTR, layout.regs_intr),
            stack_user: if layout.has(SAMPLE_STACK_USER) { layout.stack_user } else { 0 },
        }
    }

    /// Whether the host records the event's overflows for a later drain, unless the event is prompt.
    pub(crate) fn is_batched(&self) -> bool {
        self.request.engine == ENGINE_BATCHED
    }

    /// Whether the event was inherited from another event.
    pub(crate) fn is_child(&self) -> bool {
        self.owner != self.id
    }
}

//! What an event shall be, as plain data. Knows perf's numbers; opens nothing.

mod bits;
mod bytes;

pub use bits::*;

use std::os::fd::BorrowedFd;

use perf_event_open_sys::bindings::{self, perf_event_attr};
use vpmu_abi::{ENGINE_ANY, ENGINE_BATCHED, ENGINE_EXIT, uapi};

use crate::sys::Place;

#[expect(
    clippy::cast_possible_truncation,
    reason = "a constant of some hundred bytes"
)]
const ATTR_SIZE: u32 = size_of::<perf_event_attr>() as u32;

// Bits of perf's `aux_action`.
const AUX_START_PAUSED: u32 = 1 << 0;
const AUX_PAUSE: u32 = 1 << 1;
const AUX_RESUME: u32 = 1 << 2;

/// A wrong description.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AttrError {
    /// What follows the colon is not a modifier.
    #[error(
        "{0:?} is not a modifier of an event: write :u for user mode only, :k for the kernel only"
    )]
    Modifier(String),
}

/// Who makes an event's samples.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// The device chooses; of an open event: none, for it only counts.
    #[default]
    Any,
    /// The overflow takes the CPU out of the guest: exact on any host, with call chains,
    /// registers and stacks.
    Exit,
    /// The host samples on its own: no exit for a sample.
    Batched,
}

impl Engine {
    /// The driver's number for it.
    pub(crate) fn number(self) -> u32 {
        match self {
            Self::Any => ENGINE_ANY,
            Self::Exit => ENGINE_EXIT,
            Self::Batched => ENGINE_BATCHED,
        }
    }

    /// That of a number; of one that is unknown here, none.
    pub(crate) fn of(number: u32) -> Option<Self> {
        [Self::Any, Self::Exit, Self::Batched]
            .into_iter()
            .find(|engine| engine.number() == number)
    }
}

/// An event to open: all of perf's attributes that the PMU knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventAttr {
    /// perf's `PERF_TYPE_*`, or the PMU's own type ([`crate::Info::pmu_type`]).
    pub pmu_type: u32,
    /// Which event of the type.
    pub config: u64,
    /// 0 for the calling thread, another thread's id, or -1 for everything on [`Self::cpu`].
    pub pid: i32,
    /// A CPU, or -1 for any (then [`Self::pid`] must name a thread).
    pub cpu: i32,
    /// A sample every so many, or so many a second with [`Self::freq`]; 0 counts only.
    pub period: u64,
    /// [`Self::period`] is a frequency: the period follows the event's rate.
    pub freq: bool,
    /// `SAMPLE_*`.
    pub sample_type: u64,
    /// `FORMAT_*`.
    pub read_format: u64,
    /// A wakeup every so many records, or bytes with [`Self::watermark`]; 0: every full page.
    pub wakeup: u32,
    /// [`Self::wakeup`] is in bytes.
    pub watermark: bool,
    /// Opens disabled.
    pub disabled: bool,
    /// Counts the children that the task will have, too.
    pub inherit: bool,
    /// The task's next exec(2) enables the event.
    pub enable_on_exec: bool,
    /// User mode does not count.
    pub exclude_user: bool,
    /// Kernel mode does not count.
    pub exclude_kernel: bool,
    /// Always counted, or dead: with no counter left for it a reading says so.
    pub pinned: bool,
    /// The end of a child with an inherited event writes its counts to the ring.
    pub inherit_stat: bool,
    /// Records other than samples, too, say whose they are and when: [`crate::SampleId`].
    pub sample_id_all: bool,
    /// The ring is written from its end to its beginning, as [`crate::Event::map_overwrite`]
    /// reads it.
    pub backward: bool,
    /// Most addresses of a call chain; 0: as many as the kernel allows.
    pub max_stack: u16,
    /// Call chains leave the kernel's part out.
    pub exclude_callchain_kernel: bool,
    /// Call chains leave user mode's part out.
    pub exclude_callchain_user: bool,
    /// Which registers of user mode a sample holds, as bits of the kernel's numbers for them.
    pub regs_user: u64,
    /// Which registers at the overflow a sample holds.
    pub regs_intr: u64,
    /// How many bytes of user mode's stack a sample holds, a multiple of 8.
    pub stack_user: u32,
    /// Of a trace: wakes its reader every so many bytes of its AUX area; 0: every half of it.
    pub aux_watermark: u32,
    /// A trace opens paused: its times go on, but nothing is traced until a member of its
    /// group resumes it.
    pub aux_start_paused: bool,
    /// Its overflow pauses the trace that leads its group.
    pub aux_pause: bool,
    /// Its overflow has the trace that leads its group go on.
    pub aux_resume: bool,
    /// Who makes the samples. perf's own door knows no choice and pays it no heed.
    pub engine: Engine,
    /// Lives on without a handle from the first, with a ring that outlives a reset of this
    /// machine where the device can; see [`crate::Event::detach`]. Not by perf's own door.
    pub persistent: bool,
    /// Counts and samples nothing until its starter overflows:
    /// [`crate::Event::set_starter_of`]. Not by perf's own door.
    pub enable_on_starter: bool,
}

impl EventAttr {
    /// The calling thread's event, disabled, counting, with every field of a reading.
    #[must_use]
    pub fn new(pmu_type: u32, config: u64) -> Self {
        Self {
            pmu_type,
            config,
            pid: 0,
            cpu: -1,
            period: 0,
            freq: false,
            sample_type: 0,
            read_format: FORMAT_ALL,
            wakeup: 0,
            watermark: false,
            disabled: true,
            inherit: false,
            enable_on_exec: false,
            exclude_user: false,
            exclude_kernel: false,
            pinned: false,
            inherit_stat: false,
            sample_id_all: false,
            backward: false,
            max_stack: 0,
            exclude_callchain_kernel: false,
            exclude_callchain_user: false,
            regs_user: 0,
            regs_intr: 0,
            stack_user: 0,
            aux_watermark: 0,
            aux_start_paused: false,
            aux_pause: false,
            aux_resume: false,
            engine: Engine::Any,
            persistent: false,
            enable_on_starter: false,
        }
    }

    /// Of the thread `pid`, on whichever CPU it runs; 0 is the caller.
    #[must_use]
    pub fn of_task(self, pid: i32) -> Self {
        Self {
            pid,
            cpu: -1,
            ..self
        }
    }

    /// Of everything that runs on `cpu`.
    #[must_use]
    pub fn on_cpu(self, cpu: i32) -> Self {
        Self {
            pid: -1,
            cpu,
            ..self
        }
    }

    /// Takes a sample every `period`, with the fields of [`SAMPLE_DEFAULT`].
    #[must_use]
    pub fn sampling(self, period: u64) -> Self {
        Self {
            period,
            freq: false,
            sample_type: SAMPLE_DEFAULT,
            ..self
        }
    }

    /// Takes about `frequency` samples a second, with the fields of [`SAMPLE_DEFAULT`].
    #[must_use]
    pub fn sampling_at(self, frequency: u64) -> Self {
        Self {
            freq: true,
            ..self.sampling(frequency)
        }
    }

    /// Samples have call chains, of at most `max_stack` addresses; 0: as many as can be.
    #[must_use]
    pub fn with_call_chains(self, max_stack: u16) -> Self {
        Self {
            sample_type: self.sample_type | SAMPLE_CALLCHAIN,
            max_stack,
            ..self
        }
    }

    /// Samples have the registers of user mode that are set in `mask`.
    #[must_use]
    pub fn with_user_registers(self, mask: u64) -> Self {
        Self {
            sample_type: self.sample_type | SAMPLE_REGS_USER,
            regs_user: mask,
            ..self
        }
    }

    /// Samples have the registers at the overflow that are set in `mask`.
    #[must_use]
    pub fn with_registers(self, mask: u64) -> Self {
        Self {
            sample_type: self.sample_type | SAMPLE_REGS_INTR,
            regs_intr: mask,
            ..self
        }
    }

    /// Samples have the topmost `bytes` of user mode's stack.
    #[must_use]
    pub fn with_user_stack(self, bytes: u32) -> Self {
        Self {
            sample_type: self.sample_type | SAMPLE_STACK_USER,
            stack_user: bytes,
            ..self
        }
    }

    /// Reads the whole group at one moment: [`crate::Event::read_group`].
    #[must_use]
    pub fn reading_group(self) -> Self {
        Self {
            read_format: self.read_format | FORMAT_GROUP,
            ..self
        }
    }

    /// Chooses who makes the samples.
    #[must_use]
    pub fn sampled_by(self, engine: Engine) -> Self {
        Self { engine, ..self }
    }

    /// Wakes the reader every `records` records.
    #[must_use]
    pub fn wakeup_every(self, records: u32) -> Self {
        Self {
            wakeup: records,
            watermark: false,
            ..self
        }
    }

    /// Of a trace: wakes its reader every `bytes` of its AUX area, and has readings tell the
    /// bytes that were lost.
    #[must_use]
    pub fn tracing(self, bytes: u32) -> Self {
        Self {
            aux_watermark: bytes,
            read_format: self.read_format | FORMAT_LOST,
            ..self
        }
    }

    /// A trace opens paused; see [`EventAttr::aux_start_paused`].
    #[must_use]
    pub fn starting_paused(self) -> Self {
        Self {
            aux_start_paused: true,
            ..self
        }
    }

    /// Its overflow pauses the trace that leads its group.
    #[must_use]
    pub fn pausing(self) -> Self {
        Self {
            aux_pause: true,
            ..self
        }
    }

    /// Its overflow has the trace that leads its group go on.
    #[must_use]
    pub fn resuming(self) -> Self {
        Self {
            aux_resume: true,
            ..self
        }
    }

    /// Lives on without a handle; see [`EventAttr::persistent`].
    #[must_use]
    pub fn persistent(self) -> Self {
        Self {
            persistent: true,
            ..self
        }
    }

    /// Waits for its starter; see [`EventAttr::enable_on_starter`].
    #[must_use]
    pub fn enabled_on_starter(self) -> Self {
        Self {
            enable_on_starter: true,
            ..self
        }
    }

    /// Overflows every `period`, to start and stop others before the next instruction: its own
    /// records say nothing.
    #[must_use]
    pub fn triggering(self, period: u64) -> Self {
        Self {
            sample_type: 0,
            engine: Engine::Exit,
            ..self.sampling(period)
        }
    }

    /// Applies perf's modifiers, as after the colon in `task-clock:u`.
    ///
    /// # Errors
    /// [`AttrError::Modifier`] unless it is `u`, `k`, `uk` or `ku`.
    pub fn modified(self, modifiers: &str) -> Result<Self, AttrError> {
        let user = modifiers.contains('u');
        let kernel = modifiers.contains('k');
        if modifiers.len() != usize::from(user) + usize::from(kernel) || modifiers.is_empty() {
            return Err(AttrError::Modifier(modifiers.into()));
        }
        Ok(Self {
            exclude_user: !user,
            exclude_kernel: !kernel,
            ..self
        })
    }

    /// Whom it measures.
    pub(crate) fn place<'a>(&self, leader: Option<BorrowedFd<'a>>) -> Place<'a> {
        Place {
            pid: self.pid,
            cpu: self.cpu,
            leader,
        }
    }

    /// What the shared-page door is told beside the attributes.
    pub(crate) fn door_flags(&self) -> u64 {
        let flag = |asked, flag| if asked { flag } else { 0 };
        flag(self.persistent, uapi::FLAG_PERSISTENT)
            | flag(self.enable_on_starter, uapi::FLAG_ENABLE_ON_STARTER)
    }

    /// In the kernel's form.
    pub(crate) fn to_raw(&self) -> perf_event_attr {
        let mut raw = perf_event_attr {
            type_: self.pmu_type,
            size: ATTR_SIZE,
            config: self.config,
            sample_type: self.sample_type,
            read_format: self.read_format,
            sample_regs_user: self.regs_user,
            sample_regs_intr: self.regs_intr,
            sample_stack_user: self.stack_user,
            sample_max_stack: self.max_stack,
            aux_watermark: self.aux_watermark,
            ..perf_event_attr::default()
        };
        raw.__bindgen_anon_1 = bindings::perf_event_attr__bindgen_ty_1 {
            // With the flag below the same word is `sample_freq`.
            sample_period: self.period,
        };
        raw.__bindgen_anon_2 = bindings::perf_event_attr__bindgen_ty_2 {
            wakeup_events: self.wakeup,
        };
        let action = [
            (AUX_START_PAUSED, self.aux_start_paused),
            (AUX_PAUSE, self.aux_pause),
            (AUX_RESUME, self.aux_resume),
        ];
        let action = action.iter().filter(|(_, asked)| *asked);
        raw.__bindgen_anon_5 = bindings::perf_event_attr__bindgen_ty_5 {
            aux_action: action.fold(0, |bits, (bit, _)| bits | bit),
        };
        raw.set_watermark(self.watermark.into());
        raw.set_disabled(self.disabled.into());
        raw.set_inherit(self.inherit.into());
        raw.set_enable_on_exec(self.enable_on_exec.into());
        raw.set_exclude_user(self.exclude_user.into());
        raw.set_exclude_kernel(self.exclude_kernel.into());
        raw.set_freq(self.freq.into());
        raw.set_pinned(self.pinned.into());
        raw.set_inherit_stat(self.inherit_stat.into());
        raw.set_sample_id_all(self.sample_id_all.into());
        raw.set_write_backward(self.backward.into());
        raw.set_exclude_callchain_kernel(self.exclude_callchain_kernel.into());
        raw.set_exclude_callchain_user(self.exclude_callchain_user.into());
        raw
    }
}

#[cfg(test)]
mod tests;

//! Attributes of an event, as plain data, and their conversion to perf's struct. Nothing here opens
//! an event.

mod bits;
mod bytes;

pub use bits::*;

use std::os::fd::BorrowedFd;

use vpmu_abi::{ENGINE_ANY, ENGINE_BATCHED, ENGINE_EXIT, uapi};
use vpmu_perf::bindings::{self, perf_event_attr};

use vpmu_perf::call::Target;

#[expect(clippy::cast_possible_truncation, reason = "a constant of some hundred bytes")]
const ATTR_SIZE: u32 = size_of::<perf_event_attr>() as u32;

/// An invalid event description.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AttrError {
    /// The text after the colon is not a modifier.
    #[error("{0:?} is not an event modifier: write :u for user mode only, :k for the kernel only")]
    Modifier(String),
}

/// The engine that samples an event.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// In the attributes of a new event: the device chooses the engine. As the engine of an open
    /// event: the event only counts.
    #[default]
    Any,
    /// Each overflow causes a VM exit, at which the sample is taken. Such a sample is exact on any
    /// host, and can have a call chain, registers and a stack.
    Exit,
    /// The host samples without an exit per sample.
    Batched,
}

impl Engine {
    /// The driver's number for the engine.
    pub(crate) fn number(self) -> u32 {
        match self {
            Self::Any => ENGINE_ANY,
            Self::Exit => ENGINE_EXIT,
            Self::Batched => ENGINE_BATCHED,
        }
    }

    /// The engine with this number; `None` if it is unknown.
    pub(crate) fn of(number: u32) -> Option<Self> {
        [Self::Any, Self::Exit, Self::Batched].into_iter().find(|engine| engine.number() == number)
    }
}

/// An event to open: all perf attributes that the PMU supports. [`EventAttr::with`] sets those that have no method of
/// their own.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct EventAttr {
    /// perf's `PERF_TYPE_*`, or the PMU's own type ([`crate::Info::pmu_type`]).
    pub pmu_type: u32,
    /// The event within the type.
    pub config: u64,
    /// 0 for the calling thread, another thread's id, or -1 for everything on [`Self::cpu`].
    pub pid: i32,
    /// A CPU, or -1 for any (then [`Self::pid`] must name a thread).
    pub cpu: i32,
    /// Events between samples, or samples per second with [`Self::freq`]; 0 for an event that only
    /// counts.
    pub period: u64,
    /// [`Self::period`] is a frequency: the device adapts the number of events between samples to
    /// the event's rate.
    pub freq: bool,
    /// `SAMPLE_*`.
    pub sample_type: u64,
    /// `FORMAT_*`.
    pub read_format: u64,
    /// Records between wakeups, or bytes with [`Self::watermark`]; with 0, every full page wakes
    /// the reader.
    pub wakeup: u32,
    /// [`Self::wakeup`] is in bytes.
    pub watermark: bool,
    /// The event is opened disabled.
    pub disabled: bool,
    /// Also counts children that the task creates later.
    pub inherit: bool,
    /// The task's next exec(2) enables the event.
    pub enable_on_exec: bool,
    /// Does not count in user mode.
    pub exclude_user: bool,
    /// Does not count in kernel mode.
    pub exclude_kernel: bool,
    /// The event must count whenever it is enabled. If it cannot, it goes into the error state, and reading it returns
    /// [`crate::event::EventError::Dead`].
    pub pinned: bool,
    /// With [`Self::inherit`]: when a child exits, the child's counts are written to the ring.
    pub inherit_stat: bool,
    /// Records other than samples also carry task and time: [`crate::SampleId`].
    pub sample_id_all: bool,
    /// The ring is written backwards, as [`crate::Event::map_overwrite`] requires.
    pub backward: bool,
    /// Maximum number of addresses in a call chain; 0 for the default, 127. The device's limit is
    /// 1024.
    pub max_stack: u16,
    /// Call chains omit the kernel's frames.
    pub exclude_callchain_kernel: bool,
    /// Call chains omit user-mode frames.
    pub exclude_callchain_user: bool,
    /// User-mode registers in a sample, as a mask of the kernel's register numbers.
    pub regs_user: u64,
    /// Registers in a sample, as a mask of the kernel's register numbers. A sample has the values
    /// that the registers had at the overflow.
    pub regs_intr: u64,
    /// Bytes of the user stack in a sample, a multiple of 8.
    pub stack_user: u32,
    /// For a trace: AUX bytes between wakeups; 0 for half of the area.
    pub aux_watermark: u32,
    /// The trace is opened paused: its enabled and running times advance, but it writes nothing until a member of its
    /// group resumes it.
    pub aux_start_paused: bool,
    /// An overflow pauses the trace that leads the group.
    pub aux_pause: bool,
    /// An overflow resumes the trace that leads the group.
    pub aux_resume: bool,
    /// The engine that makes the samples.
    pub engine: Engine,
    /// The event is persistent from the start: it outlives its handles, as after
    /// [`crate::Event::detach`], and its ring outlives a guest reset where the device supports
    /// that.
    pub persistent: bool,
    /// The event counts and samples only after its starter has overflowed: see
    /// [`crate::Event::set_starter_of`].
    pub enable_on_starter: bool,
}

impl EventAttr {
    /// Describes a counting event of the calling thread, disabled, with the read format
    /// [`FORMAT_ALL`].
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

    /// The same event with the fields that `set` sets.
    #[must_use]
    pub fn with(mut self, set: impl FnOnce(&mut Self)) -> Self {
        set(&mut self);
        self
    }

    /// Measures the thread `pid` on any CPU; 0 is the caller.
    #[must_use]
    pub fn of_task(self, pid: i32) -> Self {
        Self { pid, cpu: -1, ..self }
    }

    /// Measures every task on `cpu`.
    #[must_use]
    pub fn on_cpu(self, cpu: i32) -> Self {
        Self { pid: -1, cpu, ..self }
    }

    /// Takes a sample every `period` events, with the fields of [`SAMPLE_DEFAULT`].
    #[must_use]
    pub fn sampling(self, period: u64) -> Self {
        Self { period, freq: false, sample_type: SAMPLE_DEFAULT, ..self }
    }

    /// Takes about `frequency` samples a second, with the fields of [`SAMPLE_DEFAULT`].
    #[must_use]
    pub fn sampling_at(self, frequency: u64) -> Self {
        Self { freq: true, ..self.sampling(frequency) }
    }

    /// Adds call chains of at most `max_stack` addresses to samples; 0 for the device's limit.
    #[must_use]
    pub fn with_call_chains(self, max_stack: u16) -> Self {
        Self { sample_type: self.sample_type | SAMPLE_CALLCHAIN, max_stack, ..self }
    }

    /// Adds the user-mode registers in `mask` to samples.
    #[must_use]
    pub fn with_user_registers(self, mask: u64) -> Self {
        Self { sample_type: self.sample_type | SAMPLE_REGS_USER, regs_user: mask, ..self }
    }

    /// Adds the registers in `mask` to samples, with their values at the overflow.
    #[must_use]
    pub fn with_registers(self, mask: u64) -> Self {
        Self { sample_type: self.sample_type | SAMPLE_REGS_INTR, regs_intr: mask, ..self }
    }

    /// Adds the top `bytes` of the user stack to samples.
    #[must_use]
    pub fn with_user_stack(self, bytes: u32) -> Self {
        Self { sample_type: self.sample_type | SAMPLE_STACK_USER, stack_user: bytes, ..self }
    }

    /// Makes a read return the counts of the whole group at one moment:
    /// [`crate::Event::read_group`].
    #[must_use]
    pub fn reading_group(self) -> Self {
        Self { read_format: self.read_format | FORMAT_GROUP, ..self }
    }

    /// Chooses the engine that makes the samples.
    #[must_use]
    pub fn sampled_by(self, engine: Engine) -> Self {
        Self { engine, ..self }
    }

    /// Wakes the reader every `records` records.
    #[must_use]
    pub fn wakeup_every(self, records: u32) -> Self {
        Self { wakeup: records, watermark: false, ..self }
    }

    /// For a trace: wakes the reader after every `bytes` bytes of the AUX area, and makes readings report the lost
    /// bytes.
    #[must_use]
    pub fn tracing(self, bytes: u32) -> Self {
        Self { aux_watermark: bytes, read_format: self.read_format | FORMAT_LOST, ..self }
    }

    /// Opens a trace paused; see [`EventAttr::aux_start_paused`].
    #[must_use]
    pub fn starting_paused(self) -> Self {
        Self { aux_start_paused: true, ..self }
    }

    /// Makes an overflow pause the trace that leads the group.
    #[must_use]
    pub fn pausing(self) -> Self {
        Self { aux_pause: true, ..self }
    }

    /// Makes an overflow resume the trace that leads the group.
    #[must_use]
    pub fn resuming(self) -> Self {
        Self { aux_resume: true, ..self }
    }

    /// Makes the event outlive its handles; see [`EventAttr::persistent`].
    #[must_use]
    pub fn persistent(self) -> Self {
        Self { persistent: true, ..self }
    }

    /// Makes the event wait for its starter; see [`EventAttr::enable_on_starter`].
    #[must_use]
    pub fn enabled_on_starter(self) -> Self {
        Self { enable_on_starter: true, ..self }
    }

    /// Makes the event overflow once per `period` occurrences, so that it can start or stop other
    /// events before the next instruction. The samples of the event itself have no fields.
    #[must_use]
    pub fn triggering(self, period: u64) -> Self {
        Self { sample_type: 0, engine: Engine::Exit, ..self.sampling(period) }
    }

    /// Applies perf's modifiers: the text after the colon in `task-clock:u`.
    ///
    /// # Errors
    /// [`AttrError::Modifier`] unless `modifiers` is `u`, `k`, `uk` or `ku`.
    pub fn modified(self, modifiers: &str) -> Result<Self, AttrError> {
        let user = modifiers.contains('u');
        let kernel = modifiers.contains('k');
        if modifiers.len() != usize::from(user) + usize::from(kernel) || modifiers.is_empty() {
            return Err(AttrError::Modifier(modifiers.into()));
        }
        Ok(Self { exclude_user: !user, exclude_kernel: !kernel, ..self })
    }

    /// The task or CPU to measure.
    pub(crate) fn place<'a>(&self, leader: Option<BorrowedFd<'a>>) -> Target<'a> {
        Target { pid: self.pid, cpu: self.cpu, leader }
    }

    /// The driver's own attributes. With `ring`, the host writes the event's records.
    fn config1(&self, ring: bool) -> u64 {
        let asked = [
            (ring, uapi::CONFIG1_RING),
            (self.enable_on_starter, uapi::CONFIG1_ENABLE_ON_STARTER),
            (self.persistent, uapi::CONFIG1_PERSISTENT),
            (self.aux_start_paused, uapi::CONFIG1_AUX_START_PAUSED),
            (self.aux_pause, uapi::CONFIG1_AUX_PAUSE),
            (self.aux_resume, uapi::CONFIG1_AUX_RESUME),
        ];
        let bits = asked.iter().filter(|(asked, _)| *asked).fold(0, |bits, (_, bit)| bits | bit);
        bits | u64::from(self.engine.number()) << uapi::CONFIG1_ENGINE_SHIFT
    }

    /// Converts to the kernel's struct. With `ring`, the host writes the event's records.
    pub(crate) fn to_raw(&self, ring: bool) -> perf_event_attr {
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
            // A union: if the `freq` flag is set, the kernel reads this word as `sample_freq`.
            sample_period: self.period,
        };
        raw.__bindgen_anon_2 = bindings::perf_event_attr__bindgen_ty_2 { wakeup_events: self.wakeup };
        raw.__bindgen_anon_3.config1 = self.config1(ring);
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

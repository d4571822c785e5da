//! What an event shall be, as plain data. Knows perf's numbers; opens nothing.

use perf_event_open_sys::bindings::{self, perf_event_attr};

/// perf's `PERF_SAMPLE_IP`: where the program was.
pub const SAMPLE_IP: u64 = 1 << 0;
/// perf's `PERF_SAMPLE_TID`: process and thread.
pub const SAMPLE_TID: u64 = 1 << 1;
/// perf's `PERF_SAMPLE_TIME`: nanoseconds of the guest's clock.
pub const SAMPLE_TIME: u64 = 1 << 2;
/// perf's `PERF_SAMPLE_ID`: which event; an inherited one has its parent's.
pub const SAMPLE_ID: u64 = 1 << 6;
/// perf's `PERF_SAMPLE_CPU`.
pub const SAMPLE_CPU: u64 = 1 << 7;
/// perf's `PERF_SAMPLE_PERIOD`: how much this sample stands for.
pub const SAMPLE_PERIOD: u64 = 1 << 8;
/// perf's `PERF_SAMPLE_STREAM_ID`: which event; an inherited one has its own.
pub const SAMPLE_STREAM_ID: u64 = 1 << 9;
/// perf's `PERF_SAMPLE_IDENTIFIER`: the id once more, at the record's beginning.
pub const SAMPLE_IDENTIFIER: u64 = 1 << 16;

/// perf's `PERF_FORMAT_TOTAL_TIME_ENABLED`.
pub const FORMAT_TIME_ENABLED: u64 = 1 << 0;
/// perf's `PERF_FORMAT_TOTAL_TIME_RUNNING`.
pub const FORMAT_TIME_RUNNING: u64 = 1 << 1;
/// perf's `PERF_FORMAT_ID`.
pub const FORMAT_ID: u64 = 1 << 2;

/// Every field that a sample can have here but the identifier and the stream.
pub const SAMPLE_DEFAULT: u64 =
    SAMPLE_IP | SAMPLE_TID | SAMPLE_TIME | SAMPLE_ID | SAMPLE_CPU | SAMPLE_PERIOD;

/// Every field that a reading can have.
pub const FORMAT_ALL: u64 = FORMAT_TIME_ENABLED | FORMAT_TIME_RUNNING | FORMAT_ID;

#[expect(
    clippy::cast_possible_truncation,
    reason = "a constant of some hundred bytes"
)]
const ATTR_SIZE: u32 = size_of::<perf_event_attr>() as u32;

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
    /// A sample every so many; 0 counts only.
    pub period: u64,
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
            sample_type: 0,
            read_format: FORMAT_ALL,
            wakeup: 0,
            watermark: false,
            disabled: true,
            inherit: false,
            enable_on_exec: false,
            exclude_user: false,
            exclude_kernel: false,
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
            sample_type: SAMPLE_DEFAULT,
            ..self
        }
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

    /// In the kernel's form.
    pub(crate) fn to_raw(&self) -> perf_event_attr {
        let mut raw = perf_event_attr {
            type_: self.pmu_type,
            size: ATTR_SIZE,
            config: self.config,
            sample_type: self.sample_type,
            read_format: self.read_format,
            ..perf_event_attr::default()
        };
        raw.__bindgen_anon_1 = bindings::perf_event_attr__bindgen_ty_1 {
            sample_period: self.period,
        };
        raw.__bindgen_anon_2 = bindings::perf_event_attr__bindgen_ty_2 {
            wakeup_events: self.wakeup,
        };
        raw.set_watermark(self.watermark.into());
        raw.set_disabled(self.disabled.into());
        raw.set_inherit(self.inherit.into());
        raw.set_enable_on_exec(self.enable_on_exec.into());
        raw.set_exclude_user(self.exclude_user.into());
        raw.set_exclude_kernel(self.exclude_kernel.into());
        raw
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modifiers_exclude_the_other_mode() {
        let attr = EventAttr::new(0, 0);
        let user = attr.clone().modified("u").unwrap();
        assert!(user.exclude_kernel && !user.exclude_user);
        let kernel = attr.clone().modified("k").unwrap();
        assert!(kernel.exclude_user && !kernel.exclude_kernel);
        assert_eq!(attr.clone().modified("uk").unwrap(), attr);
        for wrong in ["", "uu", "x", "ux", "uku"] {
            assert_eq!(
                attr.clone().modified(wrong),
                Err(AttrError::Modifier(wrong.into()))
            );
        }
    }

    #[test]
    fn the_kernels_form_keeps_every_field() {
        let raw = EventAttr {
            inherit: true,
            enable_on_exec: true,
            exclude_user: true,
            ..EventAttr::new(9, 7).sampling(5).wakeup_every(3)
        }
        .to_raw();
        assert_eq!((raw.type_, raw.config), (9, 7));
        assert_eq!(raw.size as usize, size_of::<perf_event_attr>());
        assert_eq!(
            (raw.sample_type, raw.read_format),
            (SAMPLE_DEFAULT, FORMAT_ALL)
        );
        assert_eq!(
            (raw.disabled(), raw.inherit(), raw.enable_on_exec()),
            (1, 1, 1)
        );
        assert_eq!(
            (raw.exclude_user(), raw.exclude_kernel(), raw.watermark()),
            (1, 0, 0)
        );
    }
}

//! Attributes for what a test needs.

use perf_event_open_sys::bindings::{self, perf_event_attr};
use vpmu_abi::uapi;

/// Attributes from a later kernel: a `perf_event_attr` with additional fields at its end.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Later {
    pub(crate) attr: perf_event_attr,
    pub(crate) more: [u64; 8],
}

/// An attr that samples.
pub(crate) fn sampling(attr: perf_event_attr, period: u64, sample_type: u64) -> perf_event_attr {
    let mut attr = perf_event_attr { sample_type, ..attr };
    attr.__bindgen_anon_1 = bindings::perf_event_attr__bindgen_ty_1 { sample_period: period };
    attr
}

/// Sets a wakeup every `records` records.
pub(crate) fn waking(mut attr: perf_event_attr, records: u32) -> perf_event_attr {
    attr.set_watermark(0);
    attr.__bindgen_anon_2 = bindings::perf_event_attr__bindgen_ty_2 { wakeup_events: records };
    attr
}

/// Sets a wakeup every `bytes` bytes.
pub(crate) fn watermark(mut attr: perf_event_attr, bytes: u32) -> perf_event_attr {
    attr.set_watermark(1);
    attr.__bindgen_anon_2 = bindings::perf_event_attr__bindgen_ty_2 { wakeup_watermark: bytes };
    attr
}

/// Sets a watermark that the records never reach, so that only lost records wake the readers.
pub(crate) fn silent(attr: perf_event_attr) -> perf_event_attr {
    watermark(attr, u32::MAX)
}

/// Sets the trace's watermark: a wakeup after every `bytes` bytes in its AUX area.
pub(crate) fn aux_watermark(attr: perf_event_attr, bytes: u32) -> perf_event_attr {
    perf_event_attr { aux_watermark: bytes, ..attr }
}

/// For [`with_aux_action`]: the event opens paused.
pub(crate) const AUX_START_PAUSED: u64 = uapi::CONFIG1_AUX_START_PAUSED;
/// For [`with_aux_action`]: an overflow pauses the trace.
pub(crate) const AUX_PAUSE: u64 = uapi::CONFIG1_AUX_PAUSE;
/// For [`with_aux_action`]: an overflow resumes the trace.
pub(crate) const AUX_RESUME: u64 = uapi::CONFIG1_AUX_RESUME;

/// Sets the bits of `config1` for an AUX area.
pub(crate) fn with_aux_action(mut attr: perf_event_attr, action: u64) -> perf_event_attr {
    attr.__bindgen_anon_3.config1 = action;
    attr
}

//! The kinds of events, and what each kind implies.

use crate::abi::{
    KIND_EXIT_TRACE, KIND_HARDWARE, KIND_HOST_TRACE, KIND_HW_CACHE, KIND_RAW, KIND_SAMPLE_TRACE, KIND_SOFTWARE,
    KIND_VMM_TRACE, PACE_CPU_CLOCK, PACE_CYCLES, PACE_EXITS, PACE_INSTRUCTIONS,
};

/// The configs of all sample traces.
pub(crate) const PACES: [u64; 4] = [PACE_CPU_CLOCK, PACE_EXITS, PACE_CYCLES, PACE_INSTRUCTIONS];

/// Returns the kind and the config of the host event that paces a sample trace. The parameter `config` is the trace's
/// own config, a `PACE_*` constant. `None` for a trace that is paced by exits, because the device counts exits itself.
pub(crate) fn pace(config: u64) -> Option<(u32, u64)> {
    match config {
        // PERF_COUNT_SW_CPU_CLOCK, PERF_COUNT_HW_CPU_CYCLES and PERF_COUNT_HW_INSTRUCTIONS.
        PACE_CPU_CLOCK => Some((KIND_SOFTWARE, 0)),
        PACE_CYCLES => Some((KIND_HARDWARE, 0)),
        PACE_INSTRUCTIONS => Some((KIND_HARDWARE, 1)),
        _ => None,
    }
}

/// Whether events of a kind write packets to an AUX area.
pub(crate) fn is_trace(kind: u32) -> bool {
    matches!(kind, KIND_EXIT_TRACE | KIND_SAMPLE_TRACE | KIND_HOST_TRACE | KIND_VMM_TRACE)
}

/// Whether the CPU's PMU counts events of this kind.
pub(crate) fn is_hardware(kind: u32) -> bool {
    matches!(kind, KIND_HARDWARE | KIND_HW_CACHE | KIND_RAW)
}

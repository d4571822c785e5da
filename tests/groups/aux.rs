//! AUX areas as a user sees them: how areas are mapped and written, the traces in them, the areas that perf core
//! manages, and vperf. The tests check exact counts and sizes.

tests::group!("aux");

/// Compares the trace of every exit with the host hypervisor's counts. The host must let the VMM use the host's
/// tracepoints, as the lab's host does.
mod hardware {
    tests::group!("aux-hardware", in_lab());
}

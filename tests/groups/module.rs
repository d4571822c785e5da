//! perf_event_open(2) on the PMU, the cost of task switches, and loading and unloading of the
//! module.

/// How many commands the driver sends to the device to close events.
mod closing;

tests::group!("module");

//! Tests of counters that the host or its operator refuses: the catalogue, the kernel log and the event in the guest.

tests::guest_tests! {
    "refusals" started &["--no-hardware-events", "--max-active-counters", "1"];
    hardware_that_the_operator_keeps_is_not_offered,
    kernel_log_reports_once_that_the_operator_keeps_hardware,
    pinned_event_without_a_counter_is_in_error,
}

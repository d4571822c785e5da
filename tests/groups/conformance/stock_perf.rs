//! Debian's perf for the guest's architecture: `perf stat` and `perf record` as users type them.

tests::guest_tests! {
    "stock-counters" on aarch64 with images::third_party::perf:
    plain_stat_counts_cycles_and_instructions,
    stat_grows_by_the_instructions_of_a_loop,
    stat_of_a_group_counts_at_once,
    stat_of_more_events_than_counters_scales_each,
    record_of_cycles_samples_the_loop,
    record_without_an_event_samples_cycles,
    event_that_the_host_lacks_is_not_supported,
}

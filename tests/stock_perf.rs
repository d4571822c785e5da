//! The distribution's own `perf`, which knows nothing of us, in a stock guest.

tests::guest_tests! {
    "stock-perf" on both kernels with images::foreign::perf:
    list_shows_every_event,
    port_writes_count_exactly,
    marks_count_by_number_and_by_name,
    children_count_unless_left_out,
    many_children_at_once_count,
    cpus_count_apart,
    intervals_add_up,
    many_events_of_a_task_at_once,
    vperf_and_perf_agree,
    what_cannot_be_counted_is_not_supported,
    what_has_no_name_is_refused,
    recording_is_refused_with_the_reason,
}

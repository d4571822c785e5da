//! Sampling into rings in a stock guest's memory.

tests::guest_tests! {
    "sampling":
    a_sample_for_each_period,
    samples_tell_who_and_where,
    times_increase_and_are_the_guests,
    two_vcpus_samples_never_mix,
    a_tasks_samples_follow_it,
    a_childs_samples_reach_the_parents_ring,
    siblings_are_told_apart,
    a_new_period_counts_from_now,
    exits_sample_exactly,
    a_clock_samples_the_loop_that_runs,
    every_nth_record_wakes,
    sampling_by_the_tsc_is_refused,
    an_absent_reader_loses_what_is_reported,
    a_lagging_reader_loses_what_is_reported,
    a_lying_reader_loses_what_is_reported,
    a_ring_wraps_whole,
    mapping_follows_the_rules,
    a_ring_outlives_its_event,
    the_metadata_page_tells_the_count,
}

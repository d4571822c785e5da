//! Sampling into rings in a stock guest's memory.

tests::guest_tests! {
    "sampling":
    sample_for_each_period,
    samples_name_task_and_address,
    times_increase_and_are_the_guests,
    two_vcpus_samples_never_mix,
    samples_follow_their_task,
    childs_samples_reach_the_parents_ring,
    siblings_are_distinguished,
    new_period_starts_at_once,
    exits_sample_exactly,
    clock_samples_the_loop_that_runs,
    every_nth_record_wakes,
    sampling_by_the_tsc_is_refused,
    absent_readers_losses_are_reported,
    lagging_readers_losses_are_reported,
    lying_readers_losses_are_reported,
    ring_wraps_without_loss,
    mapping_follows_the_rules,
    ring_outlives_its_event,
    metadata_page_has_the_count,
}

//! Flush as a user sees it: earlier samples and traces are in the pages when the call returns.

/// In the guest.
mod guest {
    tests::guest_tests! {
        "flush":
        a_flush_wakes_who_waits,
        a_sleeper_is_woken_by_a_flush,
        a_flush_without_records_wakes_nobody,
        a_loss_that_waits_is_told,
        a_group_is_flushed_as_one,
        all_persistent_events_are_flushed_at_once,
        every_state_can_be_flushed,
        a_traces_piece_is_shown,
        flush_writes_samples_of_the_exit_engine,
        a_task_is_flushed_wherever_it_is,
        children_are_flushed_too,
        a_flush_has_no_other_arguments,
        flushes_from_both_vcpus_lose_and_repeat_nothing,
        closing_under_a_flush_is_harmless,
    }
}

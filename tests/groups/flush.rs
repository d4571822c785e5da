//! Flushes as a user sees them. When the call returns, the mapped pages contain all samples and packets from before the
//! call.

/// In the guest.
mod guest {
    tests::guest_tests! {
        "flush":
        flush_wakes_a_waiting_reader,
        sleeper_is_woken_by_a_flush,
        flush_without_records_wakes_no_reader,
        pending_loss_is_recorded,
        group_is_flushed_as_one,
        all_persistent_events_are_flushed_at_once,
        every_state_can_be_flushed,
        flush_publishes_a_piece_of_a_trace,
        flush_writes_samples_of_the_exit_engine,
        task_is_flushed_wherever_it_is,
        children_are_flushed_too,
        flush_has_no_other_arguments,
        flushes_from_both_vcpus_lose_and_repeat_nothing,
        closing_under_a_flush_is_harmless,
    }
}

//! perf's rules for overflows, for events of both interfaces and of the kernel itself. `guest-tests overflows` prints them
//! as a table.

tests::guest_tests! {
    "overflows":
    each_overflow_signals_before_the_next_instruction,
    each_overflow_signals_if_another_cpu_takes_the_interrupt,
    overflow_signals_without_a_wakeup_interval,
    tenth_occurrence_signals,
    sibling_signals_each_overflow,
    two_siblings_signal_each_overflow,
    leader_and_sibling_signal_each_overflow,
    overflow_of_a_child_signals_the_parent,
    refresh_of_one_hangs_up_each_time,
    refresh_of_one_wakes_a_poll_each_time,
    refresh_adds_to_the_refresh_before,
    refresh_after_a_used_up_refresh_starts_again,
    enable_after_a_used_up_refresh_has_no_limit,
    larger_period_holds_from_the_call,
    smaller_period_holds_from_the_call,
    period_that_is_not_reached_gives_no_overflow,
    exit_of_the_task_hangs_up_a_poll,
    wakeup_at_each_record_wakes_each_poll,
    wakeup_at_each_tenth_record_wakes_each_tenth_poll,
    watermark_wakes_past_its_bytes,
    records_are_soon_in_the_ring_without_a_wakeup,
    records_of_a_paused_ring_are_lost,
}

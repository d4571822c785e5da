//! Tests each rule of the output ABI as programs use it: rings, records, and the accounting of their memory.

use std::path::Path;

use images::Arch;
use images::third_party::{Files, ThirdPartyError, compiled};

/// Compiles the reader in C with the kernel's header and the driver's header.
fn reader(arch: Arch) -> Result<Files, ThirdPartyError> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let headers = here.join("../guest-driver/linux");
    compiled(arch, "reader", &here.join("guest/reader.c"), &headers)
}

tests::guest_tests! {
    "output" with reader:
    // Pages, bytes and wakeups.
    ring_has_one_page_or_a_power_of_two_more,
    later_maps_are_equal_until_all_are_gone,
    maps_are_shared_and_from_the_start,
    two_maps_of_an_event_are_one_ring,
    forked_child_does_not_inherit_the_ring,
    ring_lives_as_long_as_any_map,
    unmapping_while_the_host_writes_harms_nothing,
    locked_memory_is_accounted_and_given_back,
    rings_of_root_have_no_memory_limit,
    big_ring_fills_before_it_loses,
    page_describes_itself,
    page_counts_without_a_call_or_an_exit,
    page_equals_read,
    page_follows_exits,
    page_is_never_torn,
    page_time_matches_record_time,
    records_wrap_whole,
    losses_stand_where_they_happened,
    read_returns_the_number_lost,
    overwriting_keeps_the_newest,
    writing_backwards_puts_the_newest_first,
    backward_ring_can_be_frozen_and_read,
    paused_ring_does_not_change,
    pausing_needs_a_ring_with_data,
    both_vcpus_write_into_one_ring,
    events_write_into_anothers_ring,
    redirection_is_refused_as_perf_refuses,
    output_returns_to_the_events_own_ring,
    redirected_event_maps_the_targets_ring,
    opening_can_redirect_at_once,
    removed_ring_removes_its_redirects,
    every_full_page_wakes,
    number_of_records_wakes,
    number_of_bytes_wakes,
    first_loss_wakes,
    sleeping_poll_is_woken,
    sleepers_of_all_events_that_share_a_ring_are_woken,
    epoll_reports_each_wakeup_once,
    each_overflow_signals,
    burst_signals_each_overflow,
    burst_on_another_cpu_signals_each_overflow,
    interval_changes_while_records_flow,
    inherited_events_wake_at_the_interval,
    invalid_wakeup_interval_is_refused,
    loop_of_poll_and_read_gets_every_record,
    descriptor_cannot_be_spliced,
    used_up_refresh_hangs_up,
    task_that_ends_hangs_up,
    shared_ring_wakes_all_and_signals_one,
    interrupts_are_as_few_as_the_mark_allows,
    program_built_on_perfs_header_reads_all,

    // The contents of records, and when they are written.
    each_field_alone_is_true,
    all_fields_together_are_true,
    registers_of_a_user_are_true,
    registers_at_a_system_call_are_its_users,
    stack_is_copied_unchanged,
    other_records_name_their_task,
    other_fields_are_refused,
    registers_and_stacks_that_cannot_be_are_refused,
    users_chain_is_exact,
    chain_has_the_requested_length,
    chain_continues_through_the_kernel,
    either_half_of_a_chain_can_be_left_out,
    chains_of_a_clock_equal_perfs,
    host_does_not_walk_guest_stacks,
    every_read_format_reads,
    buffer_that_is_too_short_is_refused,
    every_read_format_works_in_samples,
    each_events_loss_is_its_own,
    members_count_while_their_leader_does,
    group_is_read_at_one_moment,
    samples_have_the_counts_of_a_group_at_one_moment,
    group_flag_means_all_members,
    members_outlive_their_leader,
    groups_that_cannot_be_are_refused,
    refresh_limits_overflows,
    refresh_of_a_counting_or_inherited_event_is_refused,
    period_can_be_changed,
    frequency_is_reached,
    frequency_out_of_bounds_is_refused,
    exec_enables,
    children_are_read_with_their_parent,
    count_of_each_child_is_recorded_at_its_end,
    excluded_mode_is_not_counted,
    pinned_event_counts_always,
    attributes_change_as_perf_changes_them,
    unknown_bits_are_refused,
    attributes_of_other_sizes,
    engine_of_an_event_is_reported,
    swapping_tasks_are_distinguished_by_the_exit_engine,
    exit_engine_exits_once_for_a_sample,
}

/// A machine that limits each event to a thousand samples per second.
mod capped {
    tests::guest_tests! {
        "output-capped" started &["--max-sample-rate", "1000"];
        cap_throttles_and_unthrottles,
        below_the_cap_nothing_is_throttled,
    }
}

/// A machine whose operator allows only the batched engine. Samples of that engine cause no exits.
mod batched {
    tests::guest_tests! {
        "output-batched" started &["--engine", "batched"];
        clock_is_sampled_only_by_the_batched_engine,
        swapping_tasks_are_distinguished_by_the_batched_engine,
        batched_engine_exits_for_no_sample,
        both_vcpus_are_batched_into_one_ring,
        flush_writes_samples_of_the_batched_engine,
        batched_event_as_starter_is_refused,
    }
}

//! The output ABI as programs use it, rule by rule: rings, records, and the accounting of their memory.

use std::path::Path;

use images::Arch;
use images::foreign::{Files, ForeignError, compiled};

/// Compiles the reader in C with the kernel's header and the driver's.
fn reader(arch: Arch) -> Result<Files, ForeignError> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let headers = here.join("../guest-driver/linux");
    compiled(arch, "reader", &here.join("guest/reader.c"), &headers)
}

/// Pages, bytes and wakeups.
mod rings {
    tests::guest_tests! {
        "output-rings" with super::reader:
        a_ring_is_one_page_or_a_power_of_two_more,
        later_maps_are_equal_until_all_are_gone,
        maps_are_shared_and_from_the_start,
        two_maps_of_an_event_are_one_ring,
        a_forked_child_maps_anew,
        a_ring_lives_as_long_as_any_map,
        unmapping_while_the_host_writes_harms_nothing,
        locked_memory_is_accounted_and_given_back,
        rings_of_root_have_no_memory_limit,
        a_big_ring_holds_its_size,
        the_page_describes_itself,
        the_page_counts_without_a_call_or_an_exit,
        the_page_equals_read,
        the_page_follows_exits,
        the_page_is_never_torn,
        the_pages_time_is_the_records,
        records_wrap_whole,
        losses_stand_where_they_happened,
        a_read_tells_what_was_lost,
        overwriting_keeps_the_newest,
        writing_backwards_puts_the_newest_first,
        a_backward_ring_can_be_frozen_and_read,
        a_paused_ring_stands_still,
        pausing_needs_a_ring_with_data,
        both_vcpus_write_into_one_ring,
        events_write_into_anothers_ring,
        redirection_is_refused_as_perf_refuses,
        output_returns_to_the_events_own_ring,
        a_redirected_event_maps_the_targets_ring,
        opening_can_redirect_at_once,
        a_ring_that_goes_takes_its_routes_along,
        every_full_page_wakes,
        a_number_of_records_wakes,
        a_number_of_bytes_wakes,
        the_first_loss_wakes,
        a_sleeping_poll_is_woken,
        sleepers_of_all_events_that_share_a_ring_are_woken,
        epoll_tells_each_wakeup_once,
        each_overflow_signals,
        a_burst_signals_each_overflow,
        a_burst_on_another_cpu_signals_each_overflow,
        an_interval_changes_while_records_flow,
        inherited_events_wake_at_the_interval,
        an_interval_that_cannot_be_is_refused,
        a_loop_of_poll_and_read_takes_every_record,
        a_descriptor_cannot_be_spliced,
        a_used_up_refresh_hangs_up,
        a_task_that_ends_hangs_up,
        a_shared_ring_wakes_all_and_signals_one,
        interrupts_are_as_few_as_the_mark_allows,
        a_program_of_perfs_header_reads_all,
    }
}

/// Contents and occasions of records.
mod records {
    tests::guest_tests! {
        "output-records":
        each_field_alone_is_true,
        all_fields_together_are_true,
        registers_of_a_user_are_true,
        registers_at_a_system_call_are_its_users,
        a_stack_is_copied_as_it_is,
        other_records_tell_whose_they_are,
        other_fields_are_refused,
        registers_and_stacks_that_cannot_be_are_refused,
        a_users_chain_is_exact,
        a_chain_is_as_long_as_asked,
        a_chain_goes_through_the_kernel,
        either_half_of_a_chain_can_be_left_out,
        a_clocks_chains_are_perfs_own,
        the_host_walks_no_guests_stack,
        every_read_format_reads,
        a_buffer_that_is_too_short_is_refused,
        every_read_format_stands_in_samples,
        each_events_loss_is_its_own,
        members_count_while_their_leader_does,
        a_group_is_read_at_one_moment,
        a_groups_samples_are_of_one_moment,
        the_group_flag_means_all_members,
        members_outlive_their_leader,
        groups_that_cannot_be_are_refused,
        a_refresh_allows_so_many_overflows,
        a_refresh_needs_an_event_that_samples,
        a_period_can_be_changed,
        a_frequency_is_met,
        a_frequency_has_bounds,
        exec_enables,
        children_are_read_with_their_parent,
        each_childs_count_is_told_at_its_end,
        the_mode_that_is_left_out_does_not_count,
        a_pinned_event_counts_always,
        attributes_change_as_perf_changes_them,
        unknown_bits_are_refused,
        attributes_of_other_sizes,
        engine_of_an_event_is_reported,
        swapping_tasks_are_told_apart_by_the_exit_engine,
        the_exit_engine_returns_once_for_a_sample,
    }
}

/// A machine that limits each event to a thousand samples per second.
mod capped {
    tests::guest_tests! {
        "output-capped" started &["--max-sample-rate", "1000"];
        a_cap_throttles_and_lets_go,
        below_the_cap_nothing_is_throttled,
    }
}

/// A machine whose operator insists that host events make no exits.
mod batched {
    tests::guest_tests! {
        "output-batched" started &["--engine", "batched"];
        a_clock_is_sampled_by_the_batched_engine_alone,
        swapping_tasks_are_told_apart_by_the_batched_engine,
        the_batched_engine_returns_for_no_sample,
        both_vcpus_are_batched_into_one_ring,
        flush_writes_samples_of_the_batched_engine,
        batched_event_as_starter_is_refused,
    }
}

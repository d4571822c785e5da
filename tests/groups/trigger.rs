//! Starters and stoppers, tested from user space: a region counts exactly the exits of its code, and placing a mark
//! costs exactly one exit.

/// Regions: their contents, combinations, and ends.
mod regions {
    tests::guest_tests! {
        "trigger":
        regions_hold_exactly_their_marks,
        regions_hold_exactly_their_exits,
        both_vcpus_have_regions_of_their_own,
        region_follows_its_task,
        region_excludes_its_starting_mark_and_includes_its_stopping_mark,
        event_waiting_for_its_starter_counts_nothing,
        samples_are_of_regions_alone,
        period_continues_in_the_next_region,
        page_does_not_change_outside_a_region,
        ticks_stand_still_outside,
        chain_of_starters_starts_link_by_link,
        one_event_starts_many,
        one_event_is_a_switch,
        every_nth_region,
        exits_bound_regions,
        starter_stops_at_its_limit,
        members_of_a_group_are_targets_by_themselves,
        regions_of_a_trace,
        clock_is_started_and_stopped,
        starter_writes_its_own_records,
        links_that_cannot_be_are_refused,
        target_has_one_starter_and_one_stopper,
        links_go_with_the_event_that_acts,
        links_go_with_their_target,
        links_go_with_a_killed_process,
        target_that_is_off_is_left_alone,
        links_come_and_go_while_marks_are_placed,
        both_ends_are_closed_at_once,
        child_has_regions_of_its_own,
        family_counts_all_its_regions,
        links_made_later_reach_children,
        children_of_targets_alone_stay_paused,
        childs_samples_lie_in_its_regions,
        tasks_that_take_turns_keep_their_regions,
        regions_of_a_task_that_runs_at_the_link_stay_its_own,
        store_to_the_doorbell_is_a_mark,
        mark_costs_one_exit,
        mark_has_its_value,
        doorbell_is_one_page,
        doorbell_reads_as_zero,
    }
}

/// Rules that only the driver enforces.
mod driver {
    tests::guest_tests! {
        "trigger-driver":
        links_between_swapped_contexts_act,
        children_of_one_end_are_not_linked,
        links_come_and_go_while_tasks_fork,
        flush_sends_a_signal,
        flush_of_all_by_nobody_is_refused,
        doorbell_map_without_write_access_is_refused,
        doorbell_map_keeps_the_device,
    }
}

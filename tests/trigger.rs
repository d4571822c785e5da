//! Starters and stoppers as a user sees them: a region holds exactly its code's exits, and a mark
//! costs exactly one exit.

/// Regions: their contents, combinations, and ends.
mod regions {
    tests::guest_tests! {
        "trigger":
        regions_hold_exactly_their_marks,
        regions_hold_exactly_their_exits,
        both_vcpus_have_regions_of_their_own,
        a_tasks_region_follows_it,
        the_starting_mark_is_outside_the_stopping_inside,
        event_waiting_for_its_starter_counts_nothing,
        samples_are_of_regions_alone,
        a_period_goes_on_in_the_next_region,
        the_page_stands_still_outside,
        ticks_stand_still_outside,
        a_chain_starts_link_by_link,
        one_event_starts_many,
        one_event_is_a_switch,
        every_nth_region,
        exits_bound_regions,
        a_limited_starter_starts_so_often,
        members_of_a_group_are_targets_by_themselves,
        regions_of_a_trace,
        a_clock_is_started_and_stopped,
        a_starters_own_records_are_written,
        links_that_cannot_be_are_refused,
        a_target_has_one_starter_and_one_stopper,
        links_go_with_the_event_that_acts,
        links_go_with_their_target,
        links_go_with_a_killed_process,
        a_target_that_is_off_is_left_alone,
        links_come_and_go_while_marks_are_placed,
        both_ends_are_closed_at_once,
        a_child_has_regions_of_its_own,
        a_family_counts_all_its_regions,
        links_made_later_reach_children,
        children_of_targets_alone_stay_paused,
        a_childs_samples_are_of_its_regions,
        tasks_that_take_turns_keep_their_regions,
        regions_of_a_task_that_runs_at_the_link_stay_its_own,
        a_store_is_a_mark,
        a_mark_costs_one_exit,
        a_mark_says_which_it_was,
        the_doorbell_is_one_page,
        the_doorbell_tells_nothing,
    }
}

/// Rules that only the driver enforces.
mod driver {
    tests::guest_tests! {
        "trigger-driver":
        links_between_swapped_contexts_act,
        children_of_one_end_are_not_linked,
        links_come_and_go_while_tasks_fork,
        a_flush_signals,
        flush_of_all_by_nobody_is_refused,
        doorbell_map_without_write_access_is_refused,
        the_doorbell_holds_the_device,
    }
}

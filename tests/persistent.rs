//! Persistent events as programs and the operator use them: they outlive their creators, the driver, and the guest.

/// The guest's own.
mod own {
    tests::guest_tests! {
        "persistent" with images::foreign::perf:
        a_detached_event_outlives_its_creators_kill,
        it_counts_on_without_a_handle,
        opened_persistent_it_is_so_at_once,
        detaching_again_tells_the_same_id,
        an_attached_event_ends_with_its_last_user,
        a_map_is_a_user_of_an_attached_event,
        readers_of_one_ring_find_its_history,
        readers_of_one_ring_are_all_woken,
        a_ring_keeps_its_size_without_maps,
        a_forgotten_reader_loses_nothing_that_fits,
        every_handle_switches_the_one_event,
        it_waits_for_its_cpu,
        handles_come_and_go_while_it_counts,
        an_attached_event_that_is_closed_leaves_its_place_on_the_device,
        a_task_is_not_outlived,
        who_is_in_a_group_is_not_detached,
        who_writes_elsewhere_is_not_detached,
        a_persistent_event_joins_nothing,
        others_may_write_into_its_ring,
        opening_again_takes_the_id_and_no_more,
        there_are_so_many_and_no_more,
        the_list_is_told_in_pieces,
        an_event_refused_stays_as_it_is,
        nobody_else_makes_opens_or_ends_one,
        names_are_those_of_events,
        a_name_is_of_one_event,
        sysfs_lists_them_while_they_are,
        sysfs_tells_how_to_open_one,
        stock_perf_counts_one_by_name,
        stock_perf_records_one_by_name,
        perfs_door_samples_rings_that_are_read,
        perfs_door_counts_alone,
        a_detached_events_ring_lies_in_the_window,
        ring_in_the_window_is_not_charged_to_the_user,
        the_window_has_an_end,
        ended_rings_leave_no_trace,
        a_driver_that_comes_again_finds_them,
        rings_in_guest_memory_end_with_their_driver,
        unloading_waits_for_handles_not_for_events,
    }
}

/// The operator's, started from the VMM's command line.
mod operator {
    tests::guest_tests! {
        "persistent-operator" started &[
            "--persistent", "marks,name=flight,size=64K",
            "--persistent", "exits-user,cpu=0,name=boot,size=1M",
        ];
        the_operators_events_are_found_by_name,
        they_hold_what_was_before_the_driver,
        nothing_of_them_is_the_guests_to_change,
        each_vcpu_has_its_own,
        a_reader_is_woken_by_a_flush,
        a_driver_that_comes_again_finds_the_operators,
        their_maps_cannot_be_made_writable,
    }
}

/// Recordings of a guest that has ended.
#[path = "persistent/ends.rs"]
mod ends;

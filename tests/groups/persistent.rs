//! Persistent events as programs and the operator use them. These events outlive their creators, the driver and the
//! guest.

/// Persistent events of the guest.
mod own {
    tests::guest_tests! {
        "persistent" with images::third_party::perf:
        detached_event_outlives_its_creators_kill,
        persistent_event_counts_on_without_a_handle,
        event_opened_persistent_outlives_its_handle,
        second_detach_returns_the_same_id,
        attached_event_ends_with_its_last_user,
        map_keeps_an_attached_event,
        readers_of_one_ring_find_its_history,
        readers_of_one_ring_are_all_woken,
        ring_keeps_its_size_without_maps,
        absent_reader_loses_nothing_that_fits,
        every_handle_switches_the_one_event,
        persistent_event_waits_for_its_cpu,
        handles_come_and_go_while_it_counts,
        closed_attached_event_frees_its_place_on_the_device,
        persistent_event_of_a_task_is_refused,
        detach_of_group_member_is_einval,
        detach_of_redirected_event_is_einval,
        persistent_event_refuses_members_and_redirects,
        others_may_write_into_its_ring,
        opening_again_takes_the_id_and_no_more,
        persistent_events_beyond_the_limit_are_enospc,
        list_is_read_in_pieces,
        refused_detach_changes_nothing,
        persistent_calls_of_nobody_are_refused,
        names_are_those_of_events,
        name_belongs_to_one_event,
        sysfs_lists_persistent_events_until_their_end,
        sysfs_describes_how_to_open_a_persistent_event,
        stock_perf_counts_one_by_name,
        stock_perf_records_one_by_name,
        perf_core_samples_rings_that_are_read,
        perf_core_counts_but_does_not_sample,
        ring_of_a_detached_event_is_in_the_window,
        ring_in_the_window_is_not_charged_to_the_user,
        full_window_refuses_a_ring,
        ended_rings_leave_no_trace,
        reloaded_driver_finds_persistent_events,
        rings_in_guest_memory_end_with_their_driver,
        unloading_waits_for_handles_not_for_events,
    }
}

/// Persistent events of the operator, started from the VMM's command line.
mod operator {
    tests::guest_tests! {
        "persistent-operator" started &[
            "--persistent", "marks,name=flight,size=64K",
            "--persistent", "exits-user,cpu=0,name=boot,size=1M",
        ];
        operators_events_are_found_by_name,
        operators_events_hold_records_from_before_the_driver,
        change_of_operators_event_is_refused,
        each_vcpu_has_its_own,
        reader_is_woken_by_a_flush,
        reloaded_driver_finds_the_operators_events,
        operators_ring_made_writable_is_refused,
    }
}

/// Recordings of a guest that has ended.
mod ends;

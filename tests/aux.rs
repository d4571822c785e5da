//! AUX areas as a user sees them, exact in counts and bytes: mapping and writing of areas, the
//! traces in them, perf core's own areas, and vperf.

/// Mapping, writing and announcement of areas.
mod area {
    tests::guest_tests! {
        "aux-area":
        an_area_is_mapped_as_it_was_announced,
        an_area_is_a_power_of_two_of_pages,
        only_traces_have_areas,
        later_maps_of_an_area_are_equal_until_all_are_gone,
        two_maps_of_an_area_are_one,
        a_part_of_an_area_is_not_unmapped,
        a_ring_whose_trace_is_closed_takes_no_area,
        a_forked_child_maps_the_area_anew,
        an_area_outlives_the_rings_last_map,
        an_area_lives_as_long_as_any_map,
        unmapping_an_area_while_the_host_writes_harms_nothing,
        closing_while_the_host_writes_harms_nothing,
        areas_are_accounted_and_given_back,
        a_trace_wraps_whole,
        a_stalled_reader_loses_what_is_told,
        written_and_lost_are_all_that_was_produced,
        a_lying_tail_is_a_full_area,
        a_snapshot_keeps_the_newest,
        without_an_area_all_is_lost,
        a_trace_that_starts_anew_says_so,
        the_start_is_told_once,
        pieces_without_a_record_are_told_later,
        a_ring_without_data_has_an_area,
        records_of_an_area_tell_whose_they_are,
        traces_write_into_anothers_area,
        children_write_into_their_parents_area,
        a_number_of_aux_bytes_wakes,
        half_an_area_wakes,
        the_first_loss_in_an_area_wakes,
    }
}

/// Contents of traces, and their pauses.
mod traces {
    tests::guest_tests! {
        "aux-traces":
        each_port_write_stands_in_the_trace_once,
        accesses_are_told_as_made,
        each_mark_stands_in_the_trace_once,
        time_outside_is_part_of_the_time,
        the_exit_that_ends_a_trace_is_cut,
        a_trace_of_all_is_the_traces_of_each,
        traces_that_cannot_be_are_refused,
        a_task_is_traced_alone,
        a_cpu_is_traced_whole,
        each_vcpu_has_its_own_trace,
        a_trace_follows_its_task,
        a_trace_makes_no_exits,
        a_mode_that_is_left_out_is_not_traced,
        each_period_makes_a_packet,
        a_packet_holds_all_registers,
        a_clock_paces_packets,
        a_stalled_readers_samples_are_counted,
        sample_traces_that_cannot_be_are_refused,
        the_trace_holds_the_regions_alone,
        trace_has_the_pausing_exit_and_not_the_resuming_one,
        a_tasks_trace_is_paused,
        exits_resume_and_pause_each_other,
        a_paused_trace_stays_enabled,
        pausing_is_for_members_of_a_trace,
    }
}

/// The same device through perf_event_open(2).
mod perf_core {
    tests::guest_tests! {
        "aux-core":
        perf_lists_the_traces,
        each_pmu_takes_its_own_events,
        perf_traces_a_task,
        perf_traces_a_cpu,
        perfs_maps_are_refused_as_ever,
        perfs_area_goes_while_the_host_writes,
        perfs_reader_keeps_up,
        a_watermark_wakes_perfs_reader,
        a_stalled_reader_disables_perfs_event,
        an_area_found_full_disables_perfs_event,
        perfs_snapshot_keeps_the_newest,
        perfs_children_write_into_the_area,
        perf_traces_samples,
        both_doors_trace_at_once,
        a_locked_down_kernel_tells_no_registers,
    }
}

/// Traces recorded and shown by `vperf`.
mod vperf {
    tests::guest_tests! {
        "aux-vperf":
        exits_of_a_command_are_all_there,
        exits_name_who_caused_them,
        exits_alone_records_and_shows,
        a_timeline_has_every_exit,
        a_trace_beside_samples_is_in_the_file,
        a_trace_of_samples_is_a_profile,
        a_snapshot_holds_the_newest_exits,
        a_signal_takes_a_snapshot_and_another_ends_it,
        a_recorder_that_stalls_tells_what_it_lost,
        wrong_traces_name_the_remedy,
    }
}

/// The trace of every exit, compared with the host hypervisor's counts. The host must grant the VMM
/// its tracepoints, as the lab's does.
mod hardware {
    tests::guest_tests! {
        "aux-hardware" in lab:
        every_exit_is_traced,
        exits_to_the_vmm_are_among_them,
        a_task_has_the_exits_of_its_own_time,
        a_stalled_reader_loses_what_is_counted,
    }
}

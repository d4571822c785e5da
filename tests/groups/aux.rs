//! AUX areas as a user sees them: how areas are mapped and written, the traces in them, the areas that perf core
//! manages, and vperf. The tests check exact counts and sizes.

tests::guest_tests! {
    "aux":
    // How areas are mapped and written, and when their readers are woken.
    area_is_mapped_only_as_announced,
    area_is_a_power_of_two_of_pages,
    only_traces_have_areas,
    later_maps_of_an_area_are_equal_until_all_are_gone,
    two_maps_of_an_area_are_one,
    part_of_an_area_cannot_be_unmapped,
    ring_of_a_closed_trace_refuses_an_area,
    forked_child_does_not_inherit_the_area,
    area_outlives_the_rings_last_map,
    area_lives_as_long_as_any_map,
    unmapping_an_area_while_the_host_writes_harms_nothing,
    closing_while_the_host_writes_harms_nothing,
    areas_are_accounted_and_given_back,
    trace_wraps_without_loss,
    stalled_readers_losses_are_recorded,
    written_and_lost_are_all_that_was_produced,
    lying_tail_counts_as_a_full_area,
    snapshot_keeps_the_newest,
    without_an_area_all_is_lost,
    trace_that_restarts_has_a_sync_packet,
    start_is_recorded_once,
    pieces_without_a_record_are_recorded_later,
    ring_without_data_has_an_area,
    records_of_an_area_name_their_task,
    traces_write_into_anothers_area,
    children_write_into_their_parents_area,
    number_of_aux_bytes_wakes,
    half_an_area_wakes,
    first_loss_in_an_area_wakes,

    // Contents of traces, and their pauses.
    each_port_write_is_in_the_trace_once,
    accesses_are_recorded_as_made,
    each_mark_is_in_the_trace_once,
    time_outside_is_part_of_the_time,
    exit_that_ends_a_trace_is_cut,
    trace_of_all_exits_has_those_of_each_reason,
    traces_that_cannot_be_are_refused,
    trace_of_a_task_excludes_others,
    trace_of_a_cpu_has_all_its_exits,
    each_vcpu_has_its_own_trace,
    trace_follows_its_task,
    trace_causes_no_exits,
    excluded_mode_is_not_traced,
    each_period_makes_a_packet,
    packet_holds_all_registers,
    clock_paces_packets,
    stalled_readers_samples_are_counted,
    sample_traces_that_cannot_be_are_refused,
    trace_has_only_the_regions,
    trace_has_the_pausing_exit_and_not_the_resuming_one,
    pause_of_a_trace_follows_its_task,
    exits_resume_and_pause_each_other,
    paused_trace_stays_enabled,
    pausing_is_for_members_of_a_trace,

    // The same device through perf_event_open(2).
    perf_lists_the_traces,
    each_pmu_takes_its_own_events,
    perf_traces_a_task,
    perf_traces_a_cpu,
    perfs_maps_are_refused_as_ever,
    perfs_area_is_unmapped_while_the_host_writes,
    perfs_reader_keeps_up,
    watermark_wakes_perfs_reader,
    stalled_reader_disables_perfs_event,
    area_found_full_disables_perfs_event,
    perfs_snapshot_keeps_the_newest,
    perfs_children_write_into_the_area,
    perf_traces_samples,
    both_interfaces_trace_at_once,
    locked_down_kernel_hides_registers,

    // Traces recorded and shown by `vperf`.
    exits_of_a_command_are_all_there,
    exits_name_who_caused_them,
    exits_alone_records_and_shows,
    timeline_has_every_exit,
    trace_beside_samples_is_in_the_file,
    trace_of_samples_is_a_profile,
    snapshot_holds_the_newest_exits,
    signal_takes_a_snapshot_and_another_ends_it,
    recorder_that_stalls_reports_losses,
    wrong_traces_name_the_remedy,
}

/// Compares the trace of every exit with the host hypervisor's counts. The host must let the VMM use the host's
/// tracepoints, as the lab's host does.
mod hardware {
    tests::guest_tests! {
        "aux-hardware" in lab:
        every_exit_is_traced,
        exits_to_the_vmm_are_among_them,
        hardware_trace_of_a_task_has_only_its_exits,
        stalled_readers_losses_are_counted,
    }
}

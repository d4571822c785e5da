//! perf_event_open(2) on the PMU, the cost of task switches, and loading and unloading of the
//! module.

/// How many commands the driver sends to the device to close events.
mod closing;

tests::guest_tests! {
    "module":
    perf_counts_a_task_exactly,
    perf_counts_a_cpu_exactly,
    perf_inherits,
    perf_samples_a_task_exactly,
    perf_events_start_and_stop_each_other,
    flush_of_a_perf_event_shows_its_samples,
    calls_on_perf_events_take_events_of_the_device,
    detached_perf_event_outlives_its_descriptor,
    detached_perf_event_reads_on_by_its_descriptor,
    view_of_a_persistent_event_has_the_history_of_its_ring,
    attached_perf_event_ends_with_its_last_view,
    perf_events_that_cannot_be_detached_are_refused,
    refresh_of_a_perf_event_ends_its_samples,
    bpf_program_runs_for_each_sample,
    period_of_a_perf_event_changes_at_once,
    perf_event_that_lost_its_leader_ends_with_its_close,
    perf_event_behind_a_trace_without_an_area_ends_with_its_close,
    exclusive_event_of_the_kernel_leaves_both_interfaces_counting,
    sysfs_lists_what_the_catalogue_lists,
    both_interfaces_count_the_same,
    switch_between_tasks_of_perf_core_costs_two_exits,
    switch_between_tasks_of_the_device_file_costs_two_exits,
    switch_between_tasks_with_groups_costs_two_exits,
    switch_between_tasks_with_mixed_groups_costs_two_exits,
    switch_between_tasks_that_inherited_their_events_costs_no_exit,
    switch_to_a_task_without_events_costs_one_exit_a_direction,
    count_of_a_task_switched_out_is_whole_for_readers_elsewhere,
    counts_of_a_group_being_disabled_are_whole_for_readers_elsewhere,
    counts_of_switching_tasks_are_exact_while_their_events_come_and_go,
    sampling_events_of_switching_tasks_end_with_their_close,
    disabled_event_of_a_switching_task_takes_no_samples,
    disabled_event_of_a_switching_task_counts_nothing,
    unloading_waits_for_the_last_user,
    module_is_loaded_by_the_devices_modalias,
    module_reloads_clean,
}

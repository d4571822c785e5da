//! The distribution's own `perf`, which knows nothing of us, in a stock guest.

tests::guest_tests! {
    "stock-perf" on both kernels with images::foreign::perf:
    list_shows_every_event,
    port_writes_count_exactly,
    marks_count_by_number_and_by_name,
    children_count_unless_left_out,
    many_children_at_once_count,
    cpus_count_apart,
    intervals_add_up,
    many_events_of_a_task_at_once,
    vperf_and_perf_agree,
    what_cannot_be_counted_is_not_supported,
    what_has_no_name_is_refused,
}

mod recording {
    //! `perf record` and its like, and perf's other habits.

    tests::guest_tests! {
        "stock-record" with images::foreign::perf:
        record_of_marks_has_a_sample_for_each,
        record_with_a_period_has_every_nth,
        record_of_a_frequency_has_the_clocks_period,
        record_of_children_has_all_their_samples,
        record_without_inheritance_leaves_children_out,
        record_per_thread_has_the_threads_samples,
        record_of_cpus_names_each_task,
        record_of_a_process_begins_where_perf_attaches,
        record_controlled_has_what_was_enabled,
        record_of_two_events_keeps_them_apart,
        records_of_two_perfs_are_both_whole,
        group_samples_have_the_counts_of_their_moment,
        samples_are_in_the_order_of_time,
        samples_lost_for_room_are_counted,
        call_graph_by_frame_pointers_is_the_programs,
        call_graph_by_dwarf_has_the_users_stack,
        top_names_the_hot_function,
        interrupts_of_a_recording_are_one_for_many_samples,
        cpu_that_goes_away_ends_its_part_alone,
        hardware_events_without_host_counters_fall_back,
        users_without_privilege_sample_their_own_mode,
        users_without_privilege_learn_what_they_lack,
        refused_requests_have_the_errno_that_perf_expects,
        traces_name_the_tool_that_reads_them,
        cgroup_counts_its_members_alone,
    }
}

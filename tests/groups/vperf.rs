//! The vperf command and its library in a stock guest, as users use them.

tests::guest_tests! {
    "vperf":
    list_names_every_source,
    stat_counts_a_command_exactly,
    stat_passes_the_exit_code_on,
    stat_counts_cpus,
    stat_names_what_it_does_not_know,
    record_and_report_find_the_hot_function,
    report_refuses_what_is_no_recording,
    call_tree_matches_the_program,
    recording_without_chains_has_no_tree,
    top_refreshes_with_fresh_counts,
    top_names_the_hot_function,
    top_ends_with_its_command,
    stat_counts_a_group_over_one_time,
    wrong_arguments_name_the_remedy,
    page_agrees_with_a_reading,
    backward_ring_keeps_the_latest_records,
    two_events_share_a_ring,
    group_reads_at_one_moment,
    refresh_lasts_as_long_as_granted,

    // Regions between a program's own marks.
    counts_of_ten_thousand_regions_are_exact,
    each_thread_has_regions_of_its_own,
    one_end_alone_has_a_meaning,
    one_mark_for_both_ends_is_every_other_region,
    marks_that_change_nothing_enter_nothing,
    regions_of_a_cpu_are_exact,
    regions_of_a_running_process_are_exact,
    group_counts_only_in_the_region,
    samples_are_of_the_region_alone,
    trace_covers_only_the_region,
    stat_names_the_region_and_its_visits,

    // Persistent events.
    recorder_is_created_read_and_ended,
    dump_can_be_reported,
    newest_marks_are_dumped,
    unread_marks_stay_until_they_are_read,
    attached_event_ends_with_its_reader,
    events_of_all_cpus_are_made_or_none,
    persistent_event_without_a_ring_is_listed,
    wrong_names_have_their_remedy,
    persist_without_perfmon_is_refused,
    flush_names_the_missing_event,
}

/// Events that the host started.
mod operator {
    tests::guest_tests! {
        "vperf-operator" started &["--persistent", "marks,cpu=0,size=64K,name=boot"];
        operators_events_can_be_read_but_not_ended,
    }
}

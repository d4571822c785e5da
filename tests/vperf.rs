//! vperf in a stock guest, as a user runs it, and its library.

tests::guest_tests! {
    "vperf":
    list_names_every_source,
    stat_counts_a_command_exactly,
    stat_passes_the_exit_code_on,
    stat_counts_cpus,
    stat_names_what_it_does_not_know,
    record_and_report_find_the_hot_function,
    report_refuses_what_is_no_recording,
    a_call_tree_is_the_programs,
    a_recording_without_chains_has_no_tree,
    top_refreshes_with_fresh_counts,
    top_names_the_hot_function,
    top_ends_with_its_command,
    stat_counts_a_group_over_one_time,
    wrong_arguments_name_the_remedy,
    the_page_tells_what_a_reading_does,
    a_backward_ring_holds_the_latest,
    two_events_share_a_ring,
    a_group_reads_at_one_moment,
    a_refresh_lasts_as_long_as_granted,
}

/// Regions between a program's own marks.
mod regions {
    tests::guest_tests! {
        "region-vperf":
        counts_of_ten_thousand_regions_are_exact,
        each_thread_has_regions_of_its_own,
        one_end_alone_has_a_meaning,
        one_mark_for_both_ends_is_every_other_region,
        marks_that_change_nothing_enter_nothing,
        a_cpus_regions_are_exact,
        a_running_processs_regions_are_exact,
        a_group_is_measured_in_the_region,
        samples_are_of_the_region_alone,
        a_trace_is_of_the_region_alone,
        stat_names_the_region_and_its_visits,
    }
}

/// Persistent events.
mod persistent {
    tests::guest_tests! {
        "persist-vperf":
        a_recorder_is_made_read_and_ended,
        a_dump_is_a_file_to_report,
        the_newest_marks_are_dumped,
        unread_marks_stay_until_they_are_read,
        an_attached_event_ends_with_its_reader,
        events_of_all_cpus_are_made_or_none,
        persistent_event_without_a_ring_is_listed,
        wrong_names_have_their_remedy,
        persist_without_perfmon_is_refused,
        a_flush_names_what_it_cannot_find,
    }
}

/// Events that the host started.
mod operator {
    tests::guest_tests! {
        "persist-vperf-operator" started &["--persistent", "marks,cpu=0,size=64K,name=boot"];
        the_operators_are_read_and_not_ended,
    }
}

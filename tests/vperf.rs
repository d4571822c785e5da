//! vperf in a stock guest, as a person uses it, and the library that it stands on.

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

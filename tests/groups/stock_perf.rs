//! The distribution's unmodified `perf` in a stock guest.

use images::Arch;
use images::third_party::{Files, Prerequisite, ThirdPartyError};

/// `perf annotate` runs objdump.
fn perf_and_objdump(arch: Arch) -> Result<Files, ThirdPartyError> {
    images::third_party::perf_with(arch, &[Prerequisite::Objdump])
}

tests::guest_tests! {
    "stock-perf" with perf_and_objdump:
    list_shows_every_event,
    port_writes_count_exactly,
    marks_count_by_number_and_by_name,
    children_count_unless_left_out,
    many_children_at_once_count,
    cpus_count_apart,
    intervals_add_up,
    many_events_of_a_task_at_once,
    vperf_and_perf_agree,
    uncountable_events_are_not_supported,
    unnamed_events_are_refused,

    // Other ways to select and print counts, and other records.
    stat_of_a_process_counts_its_threads_together,
    stat_per_thread_counts_each_thread,
    stat_per_thread_of_all_cpus_finds_the_thread,
    stat_of_a_command_counts_its_threads_unless_left_out,
    stat_of_a_command_begins_with_its_exec,
    stat_with_a_delay_counts_what_follows_it,
    stat_controlled_counts_what_was_enabled,
    stat_repeated_has_the_mean_of_equal_counts,
    stat_in_json_has_each_count,
    stat_of_each_cgroup_counts_its_members,
    stat_of_mixed_groups_counts_both_kinds,
    stat_without_events_names_what_is_not_supported,
    record_asked_for_any_precision_samples_without,
    record_asked_for_precision_names_the_lack,
    record_with_threads_counts_has_the_kernels_records,
    record_that_overwrites_keeps_the_newest,
    record_that_switches_files_loses_no_sample,
    report_has_every_sample_under_its_symbol,
    annotate_names_the_hot_instructions,
    tracepoints_and_marks_are_in_one_recording,
    sched_recorded_beside_leaves_counts_exact,
}

mod recording {
    //! `perf record` and related commands, and other uses of perf.

    tests::guest_tests! {
        "stock-record" with images::third_party::perf:
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
        cpu_that_goes_offline_ends_only_its_part,
        hardware_events_without_host_counters_fall_back,
        users_without_privilege_sample_their_own_mode,
        users_without_privilege_learn_what_they_lack,
        refused_requests_have_the_errno_that_perf_expects,
        traces_name_the_tool_that_reads_them,
        cgroup_counts_its_members_alone,
        cgroup_beside_a_count_of_all_tasks_counts_its_members_alone,
    }
}

mod order {
    //! The order of what `perf record` writes.

    tests::guest_tests! {
        "stock-order" with images::third_party::perf:
        recording_of_switches_and_a_clock_is_in_order,
        samples_of_a_task_lie_between_its_switches,
    }
}

mod few {
    //! In a machine whose guest can open at most three events.

    tests::guest_tests! {
        "stock-few" with images::third_party::perf, started &["--max-events", "3"];
        stat_of_more_events_than_the_device_has_names_the_errno,
        stat_of_children_without_room_shows_the_share,
        stat_of_all_that_has_room_is_whole_again,
    }
}

mod waiting {
    //! A machine on which each vCPU runs at most one host counter for sampling events at a time. Further events wait.

    tests::guest_tests! {
        "stock-waiting" with images::third_party::perf, started &["--max-active-counters", "1"];
        record_of_a_clock_that_waits_has_no_sample_of_it,
        clock_that_waits_has_not_run,
        clock_that_counts_after_a_wait_has_run,
        pinned_clock_without_a_counter_has_not_run,
        stat_beside_a_clock_that_waits_is_whole,
    }
}

mod tools {
    //! Third-party libraries and programs that open events themselves.

    use images::Arch;
    use images::third_party::{Files, Prerequisite, ThirdPartyError};

    fn programs(arch: Arch) -> Result<Files, ThirdPartyError> {
        images::third_party::perf_with(arch, &[Prerequisite::Papi, Prerequisite::StressNg, Prerequisite::TraceCmd])
    }

    tests::guest_tests! {
        "third-party-tools" with programs:
        library_that_reads_sysfs_counts_by_name,
        library_that_reads_sysfs_refuses_what_is_not_there,
        librarys_group_counts_its_members,
        librarys_group_with_an_idle_leader_counts_as_the_kernels_members_do,
        librarys_sampler_reads_every_mark,
        librarys_counter_begins_with_the_exec,
        papi_counts_the_kernels_events_beside_ours,
        papi_without_host_counters_is_refused_cycles,
        stress_ng_opens_its_events_beside_ours,
        trace_cmd_traces_beside_exact_counts,
    }
}

mod bpftrace {
    //! The distribution's bpftrace, with its built-in compiler.

    use images::Arch;
    use images::third_party::{Files, Prerequisite, ThirdPartyError};

    fn programs(arch: Arch) -> Result<Files, ThirdPartyError> {
        images::third_party::perf_with(arch, &[Prerequisite::Bpftrace])
    }

    tests::guest_tests! {
        "third-party-bpftrace" with programs:
        bpftrace_profiles_beside_exact_counts,
        bpftrace_sees_each_sample_on_its_way_to_perf,
        bpftrace_without_host_counters_is_refused_cycles,
    }
}

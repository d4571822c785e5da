//! Permissions for calls to the driver: perf's rules, capabilities, and the limit on events for users without
//! `CAP_PERFMON`.

tests::guest_tests! {
    "permissions":
    open_by_nobody_at_each_level_answers_as_perf_does,
    kernel_sampled_without_perfmon_at_level_2_is_refused,
    task_with_other_credentials_is_refused,
    task_in_another_user_namespace_is_refused,
    root_without_perfmon_is_refused,
    nobody_with_perfmon_opens,
    level_hidden_by_a_mount_still_holds,
    paranoid_parameter_opens_tasks_and_no_cpu,
    detach_without_perfmon_is_refused,
    persistent_open_without_perfmon_is_refused,
    attach_without_perfmon_is_refused,
    reopen_without_perfmon_is_refused,
    perf_view_without_perfmon_is_refused,
    device_flush_without_perfmon_is_refused,
    bpf_query_without_perfmon_is_refused,
    read_only_map_made_writable_is_refused,
    share_used_up_by_nobody_leaves_events_to_root,
    inherited_events_of_nobody_count_against_the_share,
    perf_core_events_of_nobody_count_against_the_share,
    registers_in_a_locked_down_kernel_are_refused,
}

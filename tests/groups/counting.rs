//! Counting in a stock guest, through `/dev/vpmu`.

tests::guest_tests! {
    "counting":
    marks_count_exactly,
    port_writes_count_exactly,
    two_vcpus_never_mix,
    disabled_events_stand_still,
    reset_zeroes_the_count_alone,
    tsc_agrees_with_rdtsc,
    task_clock_agrees_with_guest_time,
    halts_are_counted,
    all_exits_hold_those_of_the_vmm,
    every_listed_event_opens,
    open_of_unlisted_event_is_refused,
    exits_that_the_architecture_lacks_are_refused,
    short_buffer_is_refused,
    data_breakpoints_count_beside_marks,
    count_follows_its_task,
    another_tasks_marks_do_not_count,
    children_are_inherited,
    children_are_left_out_unless_asked,
    many_events_of_one_task,

    // How groups of events are scheduled, and how all members are read at once. Each kernel's perf core reschedules
    // groups differently.
    sibling_counts_while_its_leader_does,
    group_is_switched_and_reset_as_one,
    group_is_read_at_one_moment,
    closed_leader_frees_its_siblings,
    leaders_follow_each_other_without_end,
    group_of_unlike_events_is_refused,
    inherited_group_is_read_with_its_children,
    group_waits_for_its_leaders_exec,
    limit_continues_after_a_pause,
    groups_come_and_go_while_tasks_fork,
}

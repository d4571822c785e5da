//! Groups of events in a stock guest: their scheduling, and readings of all members at once. Runs on both
//! kernels, because perf core reschedules differently in each.

tests::guest_tests! {
    "groups" on both kernels:
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

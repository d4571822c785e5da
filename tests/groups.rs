//! Groups of events in a stock guest: their scheduling, and one reading of all. On both kernels:
//! perf core reschedules differently in each.

tests::guest_tests! {
    "groups" on both kernels:
    a_sibling_counts_while_its_leader_does,
    a_group_is_switched_and_reset_as_one,
    a_group_is_read_at_one_moment,
    a_closed_leader_frees_its_siblings,
    leaders_follow_each_other_without_end,
    group_of_unlike_events_is_refused,
    an_inherited_group_is_read_whole,
    a_group_waits_for_its_leaders_exec,
    a_limit_outlasts_a_pause,
    groups_come_and_go_while_tasks_fork,
}

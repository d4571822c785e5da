//! The perf core door, and the module's coming and going.

tests::guest_tests! {
    "module":
    perf_counts_a_task_exactly,
    perf_counts_a_cpu_exactly,
    perf_inherits,
    perf_sampling_is_refused,
    sysfs_lists_what_the_catalogue_lists,
    both_doors_count_the_same,
    unloading_waits_for_the_last_user,
    the_module_reloads_clean,
}

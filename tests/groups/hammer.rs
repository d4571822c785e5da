//! Several processes make random calls to the driver at the same time, in a guest whose kernel checks each allocation.

tests::guest_tests! {
    // `started &[]` replaces the usual `--max-sampling-percent 100`, so the default limit applies. Without that limit,
    // clock events with the shortest sampling period would leave an emulated processor no time for anything else.
    "hammer" appending "slub_debug=FZPU", started &[];
    random_calls_of_several_users_leave_kernel_and_device_clean,
}

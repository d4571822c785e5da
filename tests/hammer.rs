//! Random calls on the driver by several processes at once, in a guest whose kernel checks each
//! allocation.

tests::guest_tests! {
    // With the usual share of a vCPU's time for samples. Random clocks of the shortest period that may have all
    // of it leave an emulated processor to nobody else.
    "hammer" appending "slub_debug=FZPU", started &[];
    random_calls_of_several_users_leave_kernel_and_device_clean,
}

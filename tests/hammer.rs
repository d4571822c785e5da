//! Random calls on the driver by several processes at once, in a guest whose kernel checks each
//! allocation.

tests::guest_tests! {
    "hammer" appending "slub_debug=FZPU";
    random_calls_of_several_users_leave_kernel_and_device_clean,
}

//! Tests of the guest driver while the device stops answering, the transport is unbound, the machine hibernates or the
//! module is reloaded. Programs keep using the driver during these events.

tests::guest_tests! {
    "driver-life" appending "iomem=relaxed";
    mute_device_is_given_up_and_bound_again,
    mute_device_without_events_fails_an_open,
    killed_task_leaves_a_mute_device,
    unbinding_ends_open_events_and_returns,
    unbinding_and_binding_while_programs_open_and_close,
    event_opened_during_an_unbinding_ends_with_it,
    event_opened_before_an_unbinding_ends_although_the_device_is_bound_again,
    fork_with_inherited_events_of_a_lost_device_succeeds,
    counts_go_on_after_a_hibernation,
    rings_and_traces_end_with_a_hibernation,
    linked_events_of_perf_core_end_with_a_hibernation,
    persistent_event_of_a_given_up_device_opens_again_after_a_hibernation,
    vperf_continues_when_a_cpu_goes_offline,
    vperf_reads_a_persistent_event_whose_cpu_is_offline,
    module_reloads_while_programs_open_and_close,
}

mod kexec {
    //! A second kernel, which the first kernel starts with kexec_file_load(2). Debian's kernels for aarch64 do not have
    //! this system call.

    tests::guest_tests! {
        "kexec" on x86_64 with its kernel:
        second_kernel_has_its_memory_and_the_persistent_events,
    }
}

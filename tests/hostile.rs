//! What programs and kernels of a guest do to the machine on purpose: it goes on, for them and for
//! others.

/// Programs that share nothing with the operator but a guest.
mod programs {
    tests::guest_tests! {
        "hostile":
        doorbell_map_without_capability_is_refused,
        signal_frame_of_nobody_on_the_doorbell_leaves_the_machine_running,
        mark_of_nobody_is_exact,
        accesses_to_a_mapped_doorbell_leave_the_machine_running,
    }
}

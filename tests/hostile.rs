//! Attacks on the machine from inside a guest. The machine keeps running and answers.

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

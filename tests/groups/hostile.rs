//! Attacks on the machine by an unprivileged guest program. `tests/hostile.rs` contains attacks by the guest's kernel.

tests::guest_tests! {
    "hostile":
    doorbell_map_without_capability_is_refused,
    signal_frame_of_nobody_never_reaches_the_doorbell,
    mark_of_nobody_is_exact,
    accesses_to_a_mapped_doorbell_leave_the_machine_running,
}

//! What the operator decides about hardware events: what the guest sees of it, and what it may ask for.

tests::guest_tests! {
    "policy" started &["--count-mode", "vcpu"];
    count_mode_of_the_operator_is_reported,
    hypervisor_is_excluded_where_a_program_asks,
}

//! What the operator decides about hardware events: what the guest sees of it, and what it may ask for.

tests::guest_tests! {
    "policy" started &["--count-mode", "vcpu", "--raw-events", "0x11"];
    count_mode_of_the_operator_is_reported,
    hypervisor_is_excluded_where_a_program_asks,
    raw_event_of_the_operators_list_is_the_hosts_to_count,
    raw_event_beyond_the_operators_list_is_refused,
}

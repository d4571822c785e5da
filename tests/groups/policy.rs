//! The operator's policy on events, as the guest sees it.

mod hardware {
    tests::guest_tests! {
        "policy" started &["--count-mode", "vcpu", "--raw-events", "0x11"];
        count_mode_of_the_operator_is_reported,
        event_excluding_the_hypervisor_counts_through_both_interfaces,
        raw_event_of_the_operators_list_is_the_hosts_to_count,
        raw_event_beyond_the_operators_list_is_refused,
    }
}

/// A machine whose operator allows only the named events.
mod allowed {
    tests::guest_tests! {
        "policy-allowed" started &["--allow-event", "tsc,exits-mmio,mark:7,exit-trace-mmio"];
        allowed_events_are_all_that_there_is,
        allowed_events_are_open_through_every_interface_and_others_through_none,
        allowed_mark_counts_and_others_are_unknown,
    }
}

/// A machine whose operator denies the guest some events. The operator can still use these events.
mod denied {
    tests::guest_tests! {
        "policy-denied" started &[
            "--deny-event", "tsc,exits-mmio,mark:7,exit-trace-mmio,software",
            "--persistent", "exits-mmio,cpu=0,size=0,name=kept",
        ];
        denied_events_are_not_listed,
        denied_events_are_refused_through_every_interface_and_others_are_not,
        denied_event_of_the_operators_own_is_read,
        kernel_log_reports_a_denied_kind,
    }
}

//! The operator's policy on events, as the guest sees it.

mod hardware {
    tests::group!("policy", started(&["--count-mode", "vcpu", "--raw-events", "0x11"]));
}

/// A machine whose operator allows only the named events.
mod allowed {
    tests::group!("policy-allowed", started(&["--allow-event", "tsc,exits-mmio,mark:7,exit-trace-mmio"]));
}

/// A machine whose operator denies the guest some events. The operator can still use these events.
mod denied {
    tests::group!(
        "policy-denied",
        started(&[
            "--deny-event",
            "tsc,exits-mmio,mark:7,exit-trace-mmio,software",
            "--persistent",
            "exits-mmio,cpu=0,size=0,name=kept",
        ])
    );
}

//! Tests of counters that the host or its operator refuses: the catalogue, the kernel log and the event in the guest.

tests::group!("refusals", started(&["--no-hardware-events", "--max-active-counters", "1"]));

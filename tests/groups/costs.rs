//! Costs of events to programs of the guest. In the exact lab, each instruction takes a nanosecond, so times repeat.

tests::group!("costs", in_exact_lab());

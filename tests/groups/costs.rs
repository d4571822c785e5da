//! Costs of events to programs of the guest. In the exact lab, each instruction takes a nanosecond, so times repeat.

tests::guest_tests! {
    "costs" in exact lab:
    samples_of_nobodys_events_delay_no_interrupt,
    cpu_clock_signals_as_often_as_the_kernels,
    task_clock_signals_as_often_as_the_kernels,
    open_of_an_absent_hardware_event_is_as_quick_as_a_dummys,
    open_of_an_unknown_hardware_event_is_einval,
    open_and_close_take_a_tenth_of_a_millisecond,
}

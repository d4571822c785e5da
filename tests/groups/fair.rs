//! Limits on what programs without privileges take from others by their events.

tests::guest_tests! {
    "fair" with 4 vcpus:
    wakeups_of_nobodys_events_leave_other_cpus_their_time,
    signals_of_nobodys_events_leave_other_cpus_their_time,
    samples_of_nobodys_event_leave_idle_cpus_alone,
    samples_of_an_inherited_event_leave_idle_cpus_alone,
    samples_of_many_inherited_events_leave_idle_cpus_alone,
}

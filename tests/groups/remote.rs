//! Guests of a stock QEMU, with the device in a process of its own that QEMU reaches by vfio-user. The tests are those of
//! the groups that run in this project's VMM. By default QEMU emulates the guests, so the groups run alike on every machine.
//! With `VPMU_TEST_BESIDE_QEMU=kvm` the guests run on the lab's KVM. With `VPMU_CLOUD_HYPERVISOR` they run in this program of
//! Cloud Hypervisor there.

mod life;

use tests::guest::{OtherVmm, Refusal};

const ALL: &[OtherVmm] = &[OtherVmm::QemuTcg, OtherVmm::QemuKvm, OtherVmm::CloudHypervisor];
const EMULATED: &[OtherVmm] = &[OtherVmm::QemuTcg];
const ON_QEMUS_KVM: &[OtherVmm] = &[OtherVmm::QemuKvm];
const WITHOUT_STATISTICS: &[OtherVmm] = &[OtherVmm::QemuTcg, OtherVmm::CloudHypervisor];

/// The events that the guest tests open by number fail with this.
const NO_EVENT: &str = "No such file or directory (os error 2)";
/// The events that the guest tests open by name fail with this.
const NO_NAME: &str = "\" on this host";
const UNSUPPORTED: &str = "Operation not supported (os error 95)";
/// The same, in the words of the client library.
const NO_SAMPLES: &str = "an attribute is not supported for this event";

/// Events and traces of VM exits.
const EXITS: &str = "an emulated guest has no VM exits, and only the VMM sees which of KVM's exits it handles";
/// Halts, which KVM counts.
const HALTS: &str = "an emulated guest has no VM exits, and Cloud Hypervisor does not open KVM's statistics";
/// The exit engine, and what its samples have.
const REGISTERS: &str = "only the VMM can stop a vCPU and read its registers and its guest's stack";
/// Instruction pointers of marks.
const MARKS_IP: &str = "only the VMM can read where a mark was placed";
/// Samples of clocks.
const CLOCK_SAMPLES: &str = "the host's samples of an emulated guest have addresses of QEMU, so the device takes none";
/// Times of records.
const TIMES: &str = "QEMU does not reveal the offset of an emulated TSC, so records have the host's time";

mod counting {
    use super::{ALL, EXITS, HALTS, NO_NAME, Refusal, WITHOUT_STATISTICS};

    const REFUSED: &[Refusal] = &[
        Refusal {
            reason: EXITS,
            message: NO_NAME,
            on: ALL,
            tests: &["all_exits_hold_those_of_the_vmm", "port_writes_count_exactly"],
        },
        Refusal { reason: HALTS, message: NO_NAME, on: WITHOUT_STATISTICS, tests: &["halts_are_counted"] },
        Refusal {
            reason: EXITS,
            message: "is listed: false, expected true",
            on: ALL,
            tests: &["exits_that_the_architecture_lacks_are_refused"],
        },
        Refusal {
            reason: "only the VMM sees when a vCPU enters and leaves its guest, so guest-time is not listed",
            message: NO_NAME,
            on: ALL,
            tests: &["task_clock_agrees_with_guest_time"],
        },
    ];

    tests::group!("counting", beside(REFUSED));
}

mod flush {
    use super::{ALL, EXITS, NO_EVENT, REGISTERS, Refusal, UNSUPPORTED};

    const REFUSED: &[Refusal] = &[
        Refusal { reason: EXITS, message: NO_EVENT, on: ALL, tests: &["flush_publishes_a_piece_of_a_trace"] },
        Refusal {
            reason: REGISTERS,
            message: UNSUPPORTED,
            on: ALL,
            tests: &["flush_writes_samples_of_the_exit_engine"],
        },
    ];

    tests::group!("flush", beside(REFUSED));
}

mod output {
    use super::{ALL, EMULATED, EXITS, MARKS_IP, NO_EVENT, REGISTERS, Refusal, TIMES, UNSUPPORTED};

    const REFUSED: &[Refusal] = &[
        Refusal {
            reason: EXITS,
            message: NO_EVENT,
            on: ALL,
            tests: &[
                "all_fields_together_are_true",
                "chain_has_the_requested_length",
                "each_field_alone_is_true",
                "page_counts_without_a_call_or_an_exit",
                "page_follows_exits",
                "registers_of_a_user_are_true",
                "stack_is_copied_unchanged",
                "users_chain_is_exact",
            ],
        },
        Refusal {
            reason: REGISTERS,
            message: UNSUPPORTED,
            on: ALL,
            tests: &[
                "big_ring_fills_before_it_loses",
                "chain_continues_through_the_kernel",
                "chains_of_a_clock_equal_perfs",
                "either_half_of_a_chain_can_be_left_out",
                "engine_of_an_event_is_reported",
                "exit_engine_exits_once_for_a_sample",
                "host_does_not_walk_guest_stacks",
                "registers_at_a_system_call_are_its_users",
                "swapping_tasks_are_distinguished_by_the_exit_engine",
            ],
        },
        Refusal {
            reason: REGISTERS,
            message: "errno for a chain of 127: Some(95)",
            on: ALL,
            tests: &["registers_and_stacks_that_cannot_be_are_refused"],
        },
        Refusal {
            reason: MARKS_IP,
            message: "samples of user and kernel mode: (20, 0)",
            on: ALL,
            tests: &["excluded_mode_is_not_counted"],
        },
        Refusal {
            reason: TIMES,
            message: "time",
            on: EMULATED,
            tests: &[
                "other_records_name_their_task",
                "page_time_matches_record_time",
                "program_built_on_perfs_header_reads_all",
            ],
        },
    ];

    tests::group!("output", with_files(crate::output::reader), beside(REFUSED));
}

mod permissions {
    use super::{ALL, EXITS, REGISTERS, Refusal, UNSUPPORTED};

    const REFUSED: &[Refusal] = &[
        Refusal {
            reason: EXITS,
            message: "errno for exits of its own",
            on: ALL,
            tests: &["open_by_nobody_at_each_level_answers_as_perf_does"],
        },
        Refusal {
            reason: REGISTERS,
            message: "errno for call chains of the kernel at level 1: Some(95)",
            on: ALL,
            tests: &["kernel_sampled_without_perfmon_at_level_2_is_refused"],
        },
        Refusal {
            reason: REGISTERS,
            message: UNSUPPORTED,
            on: ALL,
            tests: &["registers_in_a_locked_down_kernel_are_refused"],
        },
    ];

    tests::group!("permissions", beside(REFUSED));
}

mod persistent {
    tests::group!("persistent", with_files(images::third_party::perf), beside(&[]));
}

mod sampling {
    use super::{ALL, CLOCK_SAMPLES, EMULATED, EXITS, MARKS_IP, NO_NAME, NO_SAMPLES, Refusal, TIMES};

    const REFUSED: &[Refusal] = &[
        Refusal { reason: EXITS, message: NO_NAME, on: ALL, tests: &["exits_sample_exactly"] },
        Refusal {
            reason: MARKS_IP,
            message: "the IP 0x0 of a sample",
            on: ALL,
            tests: &["samples_name_task_and_address"],
        },
        Refusal {
            reason: CLOCK_SAMPLES,
            message: NO_SAMPLES,
            on: EMULATED,
            tests: &["clock_samples_the_loop_that_runs"],
        },
        Refusal {
            reason: TIMES,
            message: "the guest's clock went",
            on: EMULATED,
            tests: &["times_increase_and_are_the_guests"],
        },
    ];

    tests::group!("sampling", beside(REFUSED));
}

mod trigger {
    use super::{
        ALL, CLOCK_SAMPLES, EMULATED, EXITS, NO_EVENT, ON_QEMUS_KVM, Refusal, UNSUPPORTED, WITHOUT_STATISTICS,
    };

    const REFUSED: &[Refusal] = &[
        Refusal {
            reason: EXITS,
            message: NO_EVENT,
            on: ALL,
            tests: &[
                "both_ends_are_closed_at_once",
                "exits_bound_regions",
                "mark_costs_one_exit",
                "mark_has_its_value",
                "region_follows_its_task",
                "regions_hold_exactly_their_exits",
                "regions_of_a_trace",
            ],
        },
        Refusal { reason: CLOCK_SAMPLES, message: UNSUPPORTED, on: EMULATED, tests: &["clock_is_started_and_stopped"] },
        Refusal {
            reason: EXITS,
            message: NO_EVENT,
            on: WITHOUT_STATISTICS,
            tests: &["page_does_not_change_outside_a_region"],
        },
        Refusal {
            reason: "the lab's processor takes a task register that QEMU has restored, which is busy, for none, and refuses \
                     a program's port writes",
            message: "signal 11",
            on: ON_QEMUS_KVM,
            tests: &["page_does_not_change_outside_a_region"],
        },
    ];

    tests::group!("trigger", beside(REFUSED));
}

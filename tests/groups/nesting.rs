//! Counts that the guest's kernel reads while its driver works on the same CPU.

// A driver that waits for itself hangs its CPU. The kernel then panics, so that the test fails soon, with its name.
tests::guest_tests! {
    "nesting" appending "softlockup_panic=1 sysctl.kernel.panic_on_rcu_stall=1";
    enough_functions_of_the_driver_can_be_probed,
    count_read_in_vm_notify_is_exact,
    count_read_in_virtqueue_kick_prepare_is_exact,
    count_read_in_virtqueue_notify_is_exact,
    count_read_in_virtqueue_add_sgs_is_exact,
    count_read_in_virtqueue_get_buf_is_exact,
    count_read_in_virtqueue_get_buf_ctx_is_exact,
    count_read_in_spin_unlock_irqrestore_is_exact,
    count_read_in_spin_lock_irqsave_is_exact,
    count_read_at_a_task_switch_is_exact,
    count_read_at_a_wakeup_is_exact,
    count_read_in_an_interrupt_is_exact,
    count_read_in_a_softirq_is_exact,
    count_read_by_a_bpf_program_in_a_probe_is_exact,
}

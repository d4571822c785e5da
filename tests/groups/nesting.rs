//! Counts that the guest's kernel reads while its driver works on the same CPU.

// A driver that waits for itself hangs its CPU. The kernel then panics, so that the test fails soon, with its name.
tests::group!("nesting", appending("softlockup_panic=1 sysctl.kernel.panic_on_rcu_stall=1"));

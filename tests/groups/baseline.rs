//! Checks README's claims about costs with emulated counters, in a guest with the paravirtual PMU and in one with KVM's
//! own PMU.
//! `cargo bench -p tests --bench baseline` prints the figures.

/// Only the paravirtual PMU.
mod vpmu {
    tests::group!("baseline", on_x86_64(), in_exact_lab(), with_files(images::third_party::perf));
}

/// KVM's own PMU.
mod kvm {
    tests::group!(
        "baseline-kvm",
        on_x86_64(),
        in_exact_lab(),
        with_files(images::third_party::perf),
        started(&["--max-sampling-percent", "100", "--guest-pmu"])
    );
}

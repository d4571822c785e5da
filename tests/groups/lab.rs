//! Checks which TSC frequency KVM uses on the lab's host.

use images::{Boot, KvmHostChoice};

/// Returns the timestamp of the line in the kernel's log that ends with `words`.
fn written(log: &str, words: &str) -> f64 {
    let line = log.lines().find(|line| line.ends_with(words));
    let line = line.unwrap_or_else(|| panic!("no line ends in {words:?}:\n{log}"));
    let time = line.trim_start_matches('[').split(']').next().unwrap_or("");
    let time = time.trim().parse();
    time.unwrap_or_else(|error| panic!("no time in {line:?}: {error}"))
}

/// KVM must be loaded after the kernel has refined its TSC frequency, because KVM keeps the value that it reads when it
/// is loaded. If the refined value differs too much from KVM's value, vCPUs have no TSC frequency that KVM can use for
/// their timers.
#[apply(tests::host_test)]
fn kvm_takes_the_refined_frequency_of_the_tsc() {
    let boot = Boot { command: "dmesg".to_owned(), kvm_host: KvmHostChoice::Lab, ..Boot::default() };
    let log = boot.run_on_lab_host().unwrap().output;
    let refined = written(&log, "Switched to clocksource tsc");
    let loaded = written(&log, "kvm: Nested Virtualization enabled");
    assert!(refined < loaded, "refined {refined} s, loaded {loaded} s");
}

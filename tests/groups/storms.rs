//! Sampling storms: an unprivileged program opens clocks with a period of ten microseconds. The tests check how much
//! time the samples leave for other work on the same vCPU.
//!
//! The tests run on the exact lab. There, a clock with a period of ten microseconds expires again before the vCPU
//! re-enters the guest, so the guest can continue only because of the throttle.

use images::{Boot, KvmHostChoice};

// The limit is only 5 %, so that storms reach it even on a fast machine, where a sample takes a small part of the
// ten microseconds.
tests::group!("storms", started(&["--max-sampling-percent", "5"]));

/// The length of the throttle's window, in nanoseconds of guest time.
const WINDOW: u64 = 10_000_000;

/// Returns the number after `name: ` in the line that a guest prints about its storm.
fn printed(output: &str, name: &str) -> u64 {
    let line = output.lines().find(|line| line.contains("storm of 1"));
    let line = line.unwrap_or_else(|| panic!("no storm in {output}"));
    let (_, rest) = line.split_once(&format!(" {name}: ")).expect("its number");
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().expect("a number")
}

#[apply(tests::host_test)]
fn storm_takes_a_quarter_of_its_vcpu_by_the_devices_own_count() {
    let test = "clock_of_nobodys_task_is_throttled_and_others_go_on";
    let boot = Boot {
        command: format!("guest-tests one storms {test}"),
        programs: vec!["guest-tests".into()],
        kvm_host: KvmHostChoice::Exact,
        vcpus: 1,
        timeout: tests::boots::LIMIT,
        ..Boot::default()
    };
    let outcome = boot.run().expect("the guest ends normally");
    assert_eq!(outcome.status, 0, "{}", outcome.output);
    let device = |name: &str| {
        let figure = outcome.report["vpmu"][name].as_u64();
        figure.unwrap_or_else(|| panic!("no {name}: {:#}", outcome.report))
    };
    let [samples, throttles, time] = ["samples", "throttles", "time"].map(|name| printed(&outcome.output, name));
    // This guest has no other sampling.
    assert_eq!(device("samples_written"), samples);
    assert_eq!(device("sampling_throttles"), throttles);
    assert!(throttles > 1, "{}", outcome.output);
    // By default, the samples may take a quarter of each window. If they take more, the excess is charged to the next
    // window. Therefore, the samples can exceed a quarter of the total time by at most the excess of the last window.
    let taken = device("sampling_time");
    let share = time / 4 + WINDOW;
    assert!(taken <= share, "{taken} ns of {time}");
    // A storm uses up its share.
    assert!(taken >= time / 5, "{taken} ns of {time}");
    assert!(device("samples_throttled") > 0);
}

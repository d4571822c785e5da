//! The baseline for the paravirtual PMU: CPU PMUs with trapped registers, driven by the stock kernel's own drivers.
//! `cargo bench -p tests --bench baseline` prints the figures.

/// Intel's architectural PMU, version 2.
mod intel {
    tests::guest_tests! {
        "baseline" with images::third_party::perf, run by "trapped" &["--pmu", "intel-v2"];
        cpu_pmu_reads_cost_one_exit,
        cpu_pmu_switches_cost_exits_by_the_event,
        cpu_pmu_samples_cost_an_nmi_and_exits,
        vpmu_samples_return_once_or_never,
        perf_runs_on_the_cpu_pmu,
    }
}

/// AMD's PerfMonV2.
mod amd {
    tests::guest_tests! {
        "baseline" with images::third_party::perf, run by "trapped" &["--pmu", "amd-v2"];
        cpu_pmu_reads_cost_one_exit,
        cpu_pmu_switches_cost_exits_by_the_event,
        cpu_pmu_samples_cost_an_nmi_and_exits,
        vpmu_samples_return_once_or_never,
        perf_runs_on_the_cpu_pmu,
    }
}

//! The baseline for the paravirtual PMU: CPU PMUs with trapped registers, driven by the stock kernel's own drivers.
//! `cargo bench -p tests --bench baseline` prints the figures.

/// Intel's architectural PMU, version 2.
mod intel {
    tests::group!(
        "baseline",
        with_files(images::third_party::perf),
        run_by("trapped"),
        started(&["--pmu", "intel-v2"])
    );
}

/// AMD's PerfMonV2.
mod amd {
    tests::group!("baseline", with_files(images::third_party::perf), run_by("trapped"), started(&["--pmu", "amd-v2"]));
}

//! The distribution's unmodified `perf` in a stock guest.

use images::Arch;
use images::third_party::{Files, ThirdPartyError};

/// `perf annotate` runs objdump.
fn perf_and_objdump(arch: Arch) -> Result<Files, ThirdPartyError> {
    images::third_party::programs(arch, &["perf", "objdump"])
}

tests::group!("stock-perf", with_files(perf_and_objdump));

mod recording {
    //! `perf record` and related commands, and other uses of perf.

    tests::group!("stock-record", with_files(images::third_party::perf));
}

mod order {
    //! The order of what `perf record` writes.

    tests::group!("stock-order", with_files(images::third_party::perf));
}

mod options {
    //! perf's options, with the module and without it.

    tests::group!("stock-options", with_files(images::third_party::perf));
}

mod few {
    //! In a machine whose guest can open at most three events.

    tests::group!("stock-few", with_files(images::third_party::perf), started(&["--max-events", "3"]));
}

mod waiting {
    //! A machine on which each vCPU runs at most one host counter for sampling events at a time. Further events wait.

    tests::group!("stock-waiting", with_files(images::third_party::perf), started(&["--max-active-counters", "1"]));
}

mod tools {
    //! Third-party libraries and programs that open events themselves.

    use images::Arch;
    use images::third_party::{Files, ThirdPartyError};

    fn programs(arch: Arch) -> Result<Files, ThirdPartyError> {
        images::third_party::programs(arch, &["perf", "papi_command_line", "stress-ng", "trace-cmd"])
    }

    tests::group!("third-party-tools", with_files(programs));
}

mod bpftrace {
    //! The distribution's bpftrace, with its built-in compiler.

    use images::Arch;
    use images::third_party::{Files, ThirdPartyError};

    fn programs(arch: Arch) -> Result<Files, ThirdPartyError> {
        images::third_party::programs(arch, &["perf", "bpftrace"])
    }

    tests::group!("third-party-bpftrace", with_files(programs));
}

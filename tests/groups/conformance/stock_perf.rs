//! Debian's perf for the guest's architecture: `perf stat` and `perf record` as users type them.

use images::Arch;
use images::third_party::{Files, ThirdPartyError};

fn files(arch: Arch) -> Result<Files, ThirdPartyError> {
    let mut files = images::third_party::perf(arch)?;
    files.extend(images::demo::known_program(arch)?);
    Ok(files)
}

mod x86_64 {
    tests::group!("stock-counters", on_x86_64(), in_exact_lab(), with_files(super::files));
}

mod aarch64 {
    tests::group!("stock-counters", on_aarch64(), in_exact_lab(), with_files(super::files));
}

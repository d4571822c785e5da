//! Tests each rule of the output ABI as programs use it: rings, records, and the accounting of their memory.

use std::path::Path;

use images::Arch;
use images::third_party::{Files, ThirdPartyError, compiled};

/// Compiles the reader in C with the kernel's header and the driver's header.
pub(crate) fn reader(arch: Arch) -> Result<Files, ThirdPartyError> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let headers = here.join("../guest-driver/linux");
    compiled(arch, "reader", &here.join("guest/reader.c"), &headers)
}

tests::group!("output", with_files(reader));

/// A machine that limits each event to a thousand samples per second.
mod capped {
    tests::group!("output-capped", started(&["--max-sample-rate", "1000"]));
}

/// A machine whose operator allows only the batched engine. Samples of that engine cause no exits.
mod batched {
    tests::group!("output-batched", started(&["--engine", "batched"]));
}

//! Debian's perf for the guest's architecture: `perf stat` and `perf record` as users type them.

tests::group!("stock-counters", on_aarch64(), with_files(images::third_party::perf));

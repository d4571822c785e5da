//! Debian's perf for the guest's architecture: `perf stat` and `perf record` as users type them.

mod x86_64 {
    tests::group!("stock-counters", on_x86_64(), in_exact_lab(), with_files(images::third_party::perf));
}

mod aarch64 {
    tests::group!("stock-counters", on_aarch64(), in_exact_lab(), with_files(images::third_party::perf));
}

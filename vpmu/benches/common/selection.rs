//! Whether to run this benchmark.

/// Returns whether to run the benchmark `name`. The arguments must contain `--bench`, which cargo passes when it
/// runs benchmarks. If they also contain a filter, the filter must be a part of `name`.
pub(crate) fn selects(name: &str) -> bool {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let filter = arguments.iter().find(|argument| !argument.starts_with('-'));
    let bench = arguments.iter().any(|argument| argument == "--bench");
    bench && filter.is_none_or(|filter| name.contains(filter.as_str()))
}

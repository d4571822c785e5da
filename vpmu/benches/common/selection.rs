//! Whether to run this benchmark.

/// Returns whether cargo runs benchmarks, and its filter selects the one with this name.
pub(crate) fn selects(name: &str) -> bool {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let filter = arguments.iter().find(|argument| !argument.starts_with('-'));
    let bench = arguments.iter().any(|argument| argument == "--bench");
    bench && filter.is_none_or(|filter| name.contains(filter.as_str()))
}

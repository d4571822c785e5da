//! Suggestions for an unknown name.

use strsim::levenshtein;

/// Returns the candidates nearest to `name`, at most three, nearest first.
pub(crate) fn near<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut ranked: Vec<(usize, &str)> = candidates
        .filter_map(|candidate| {
            let part = name.len() >= 3 && (candidate.contains(name) || name.contains(candidate));
            let distance = if part { 1 } else { levenshtein(name, candidate) };
            (distance <= 1 + name.len() / 4).then_some((distance, candidate))
        })
        .collect();
    ranked.sort_unstable();
    ranked.into_iter().take(3).map(|(_, name)| name.to_owned()).collect()
}

/// Formats the names as a question to append to an error message; empty without names.
pub(crate) fn suggestion(names: &[String]) -> String {
    if names.is_empty() { String::new() } else { format!(": did you mean {}?", names.join(" or ")) }
}

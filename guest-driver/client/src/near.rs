//! Names like a wrong one: what a person may have meant.

/// At most three of `candidates` that are like `name`, the likest first.
pub(crate) fn near<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut ranked: Vec<(usize, &str)> = candidates
        .filter_map(|candidate| {
            let part = name.len() >= 3 && (candidate.contains(name) || name.contains(candidate));
            let distance = if part { 1 } else { distance(name, candidate) };
            (distance <= 1 + name.len() / 4).then_some((distance, candidate))
        })
        .collect();
    ranked.sort_unstable();
    ranked
        .into_iter()
        .take(3)
        .map(|(_, name)| name.to_owned())
        .collect()
}

/// The end of an error's first half: empty if nothing is like it.
pub(crate) fn suggestion(names: &[String]) -> String {
    if names.is_empty() {
        String::new()
    } else {
        format!(": did you mean {}?", names.join(" or "))
    }
}

/// Levenshtein's: how many single-character edits lead from one to the other.
fn distance(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (i, a) in from.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, &b) in to.iter().enumerate() {
            let replaced = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[to.len()]
}

//! Folded stacks, as Brendan Gregg's `stackcollapse-perf.pl` writes them: the task's name and the frames, outermost
//! first, separated by semicolons; then a space and the weight.

use std::collections::BTreeMap;
use std::io::{self, Write};

use crate::selection::Selection;

/// Writes a selection.
///
/// # Errors
/// Errors of `out`.
pub(crate) fn write(selection: &Selection<'_>, out: &mut impl Write) -> io::Result<()> {
    // Stacks that differ in modules alone are the same line.
    let mut lines: BTreeMap<String, u64> = BTreeMap::new();
    for ((task, stack), weight) in selection.totals() {
        let frames: Vec<&str> = selection.profile.stacks.frames(stack).map(|frame| frame.name.as_str()).collect();
        let names = std::iter::once(task).chain(frames.into_iter().rev());
        let line = names.map(escape).collect::<Vec<_>>().join(";");
        let total = lines.entry(line).or_default();
        *total = total.saturating_add(weight);
    }
    for (line, weight) in lines {
        writeln!(out, "{line} {weight}")?;
    }
    Ok(())
}

/// Replaces the separator in a name.
fn escape(name: &str) -> String {
    name.replace(';', ":")
}

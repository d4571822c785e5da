//! Formats name, value and consequence in three columns.

use crate::probe::Check;

/// Width of the table in characters.
const WIDTH: usize = 110;
/// Blanks between columns.
const GAP: usize = 2;
/// Minimum width of a readable column.
const NARROW: usize = 24;

/// Renders `checks` as a table with a heading. Each line ends with a newline.
pub(super) fn render(checks: &[Check]) -> String {
    let longest = |text: fn(&Check) -> &str| checks.iter().map(|c| text(c).chars().count()).max();
    let name = longest(|check| check.name).unwrap_or(0).max("CHECK".len());
    let rest = WIDTH.saturating_sub(name + 2 * GAP);
    let value = longest(|check| &check.value).unwrap_or(0).clamp(NARROW, (rest / 2).max(NARROW));
    let consequence = rest.saturating_sub(value).max(NARROW);

    let mut table = String::new();
    let mut line = |columns: [&str; 3]| {
        let [first, second, third] = columns;
        let text = format!("{first:name$}{:GAP$}{second:value$}{:GAP$}{third}", "", "");
        table.push_str(text.trim_end());
        table.push('\n');
    };
    line(["CHECK", "FOUND", "SO"]);
    for check in checks {
        let values = wrap(&check.value, value);
        let consequences = wrap(&check.consequence, consequence);
        for row in 0..values.len().max(consequences.len()) {
            let cell = |cells: &[String]| cells.get(row).cloned().unwrap_or_default();
            line([if row == 0 { check.name } else { "" }, &cell(&values), &cell(&consequences)]);
        }
    }
    table
}

/// Breaks lines at spaces. A word that is longer than the width is not broken.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        if let Some(line) = lines.last_mut() {
            if line.is_empty() {
                line.push_str(word);
                continue;
            }
            if line.chars().count() + 1 + word.chars().count() <= width {
                line.push(' ');
                line.push_str(word);
                continue;
            }
        }
        lines.push(word.to_owned());
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_kept_and_lines_are_short() {
        let text = "one two three fourfourfourfour five";
        let lines = wrap(text, 9);
        assert_eq!(lines, ["one two", "three", "fourfourfourfour", "five"]);
        assert_eq!(wrap("", 9), [""]);
    }

    #[test]
    fn columns_line_up_and_fit() {
        let check =
            |name, value: &str, consequence: &str| Check { name, value: value.into(), consequence: consequence.into() };
        let table = render(&[
            check("a", "short", "so it is"),
            check("a-long-name", &"value ".repeat(30), &"words ".repeat(30)),
        ]);
        assert!(table.lines().all(|line| line.chars().count() <= WIDTH));
        let column = |text: &str| table.lines().find_map(|line| line.find(text));
        assert_eq!(column("FOUND"), column("short"));
        assert_eq!(column("SO"), column("so it"));
        assert_eq!(column("SO"), column("words"));
        assert_eq!(table.matches("words").count(), 30);
    }
}

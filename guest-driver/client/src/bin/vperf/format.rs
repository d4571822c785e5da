//! Numbers and tables as displayed text.

/// `1234567` as `1,234,567`.
pub(crate) fn grouped(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Nanoseconds as seconds with nine decimals.
pub(crate) fn seconds(nanoseconds: u64) -> String {
    format!("{}.{:09}", nanoseconds / 1_000_000_000, nanoseconds % 1_000_000_000)
}

/// Formats nanoseconds as ns, us, ms or s: in the largest of these units in which the value is at
/// least 1.
pub(crate) fn duration(nanoseconds: u64) -> String {
    let (unit, name) = match nanoseconds {
        0..1_000 => return format!("{nanoseconds} ns"),
        1_000..1_000_000 => (1_000, "us"),
        1_000_000..1_000_000_000 => (1_000_000, "ms"),
        _ => (1_000_000_000, "s"),
    };
    let thousandths = nanoseconds / (unit / 1_000);
    format!("{}.{:03} {name}", grouped(thousandths / 1_000), thousandths % 1_000)
}

/// `part` as a percentage of `whole` with two decimals; zero if `whole` is zero.
pub(crate) fn percent(part: u64, whole: u64) -> String {
    let whole = u128::from(whole);
    let hundredths = (u128::from(part) * 10_000 + whole / 2).checked_div(whole).unwrap_or(0);
    format!("{}.{:02}%", hundredths / 100, hundredths % 100)
}

/// Alignment of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Align {
    Left,
    Right,
}

/// Formats `rows` as lines of text, with columns two spaces apart and without trailing blanks.
pub(crate) fn table(columns: &[Align], rows: &[Vec<String>]) -> String {
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..columns.len()).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for ((cell, width), align) in row.iter().zip(&widths).zip(columns) {
            match align {
                Align::Left => line.push_str(&format!("{cell:<width$}  ")),
                Align::Right => line.push_str(&format!("{cell:>width$}  ")),
            }
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_go_in_threes() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(1_000), "1,000");
        assert_eq!(grouped(123_456), "123,456");
        assert_eq!(grouped(u64::MAX), "18,446,744,073,709,551,615");
    }

    #[test]
    fn shares_are_rounded_and_never_divide_by_nothing() {
        assert_eq!(percent(1, 3), "33.33%");
        assert_eq!(percent(2, 3), "66.67%");
        assert_eq!(percent(5, 5), "100.00%");
        assert_eq!(percent(u64::MAX, u64::MAX), "100.00%");
        assert_eq!(percent(0, 0), "0.00%");
        assert_eq!(seconds(1_000_000_001), "1.000000001");
    }

    #[test]
    fn durations_have_a_unit_that_suits_them() {
        assert_eq!(duration(0), "0 ns");
        assert_eq!(duration(999), "999 ns");
        assert_eq!(duration(1_000), "1.000 us");
        assert_eq!(duration(999_999), "999.999 us");
        assert_eq!(duration(12_345_678), "12.345 ms");
        assert_eq!(duration(3_600_000_000_000), "3,600.000 s");
        assert_eq!(duration(u64::MAX), "18,446,744,073.709 s");
    }

    #[test]
    fn columns_line_up() {
        let rows = [vec!["1".into(), "a".into()], vec!["100".into(), String::new()]];
        assert_eq!(table(&[Align::Right, Align::Left], &rows), "  1  a\n100\n");
    }
}

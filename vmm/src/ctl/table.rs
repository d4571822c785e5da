//! Formats persistent events as a table, one event per line.

use super::protocol::Entry;
use crate::printable::Printable;

const HEADINGS: [&str; 9] = ["ID", "NAME", "EVENT", "VCPU", "OWNER", "STATE", "SAMPLES", "COUNT", "LOST"];
/// The columns that contain numbers. They are aligned to the right.
const NUMBERS: [bool; 9] = [true, false, false, true, false, false, false, true, true];

/// Renders `events` as a table with a heading, one event per line. If there are no events, returns one sentence
/// instead.
pub(super) fn render(events: &[Entry]) -> Printable {
    if events.is_empty() {
        return Printable::line("no persistent events");
    }
    let rows: Vec<[String; 9]> = std::iter::once(HEADINGS.map(str::to_owned)).chain(events.iter().map(row)).collect();
    let mut widths = [0; 9];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    let lines = rows.iter().map(|row| {
        let cells: Vec<String> = row
            .iter()
            .zip(widths)
            .zip(NUMBERS)
            .map(|((cell, width), number)| if number { format!("{cell:>width$}") } else { format!("{cell:width$}") })
            .collect();
        cells.join("  ").trim_end().to_owned()
    });
    Printable::lines(lines)
}

fn row(event: &Entry) -> [String; 9] {
    let rate = match (event.period, event.freq) {
        (Some(period), _) => format!("every {period}"),
        (None, Some(freq)) => format!("{freq}/s"),
        (None, None) => "-".to_owned(),
    };
    [
        event.id.to_string(),
        event.name.clone(),
        event.event.clone(),
        event.vcpu.to_string(),
        event.owner.clone(),
        event.state.clone(),
        rate,
        event.count.to_string(),
        event.lost.to_string(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let event = |id, name: &str, count| Entry {
            id,
            name: name.to_owned(),
            event: "marks".to_owned(),
            vcpu: 0,
            owner: "guest".to_owned(),
            state: "active".to_owned(),
            count,
            time_enabled: 0,
            time_running: 0,
            lost: 0,
            period: Some(1),
            freq: None,
            ring: None,
        };
        let table = render(&[event(7, "a", 5), event(12, "a-longer-name", 12_345)]);
        let expected = "\
ID  NAME           EVENT  VCPU  OWNER  STATE   SAMPLES  COUNT  LOST
 7  a              marks     0  guest  active  every 1      5     0
12  a-longer-name  marks     0  guest  active  every 1  12345     0
";
        assert_eq!(table.to_string(), expected);
        assert_eq!(render(&[]).to_string(), "no persistent events\n");
    }
}

//! The result of `vperf stat`, in its three formats.

use vpmu_client::Reading;

use crate::events::Chosen;
use crate::format::{Align, grouped, percent, seconds, table};
use crate::region::Passages;

/// The count of one event.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Count {
    event: String,
    /// `None` if the event was refused.
    value: Option<u64>,
    unit: String,
    time_enabled: u64,
    time_running: u64,
    /// The count extrapolated to the whole time enabled.
    scaled: Option<u64>,
    guest_only: bool,
    source: String,
    counts: String,
    /// The reason for a refusal.
    refused: Option<String>,
}

impl Count {
    pub(crate) fn new(chosen: &Chosen, reading: Reading, refused: Option<String>) -> Self {
        Self {
            event: chosen.name.clone(),
            value: refused.is_none().then_some(reading.value),
            unit: chosen.entry.unit.clone(),
            time_enabled: reading.time_enabled,
            time_running: reading.time_running,
            scaled: refused.is_none().then(|| scaled(&reading)).flatten(),
            guest_only: chosen.entry.guest_only,
            source: chosen.entry.source.clone(),
            counts: chosen.entry.counts.clone(),
            refused,
        }
    }

    fn was_counted_in_part(&self) -> bool {
        self.time_running < self.time_enabled
    }

    fn share(&self) -> String {
        if self.was_counted_in_part() { percent(self.time_running, self.time_enabled) } else { "100.00%".into() }
    }

    fn row(&self) -> Vec<String> {
        let star = if self.guest_only || self.refused.is_some() { "" } else { "*" };
        let note = match (&self.refused, self.scaled) {
            (Some(why), _) => format!("({why})"),
            (None, Some(scaled)) if self.was_counted_in_part() => {
                let all = grouped(scaled);
                format!("{} (counted {} of the time, ~{all} in all)", self.source, self.share())
            }
            (None, None) if self.time_enabled > 0 => format!("{} (never counted)", self.source),
            (None, _) => self.source.clone(),
        };
        vec![
            self.value.map_or_else(|| "<not counted>".into(), grouped),
            self.unit.clone(),
            format!("{}{star}", self.event),
            note,
        ]
    }
}

/// Extrapolates a count to the whole time enabled; `None` if the event never ran.
fn scaled(reading: &Reading) -> Option<u64> {
    if reading.time_running >= reading.time_enabled {
        return Some(reading.value);
    }
    let product = u128::from(reading.value) * u128::from(reading.time_enabled);
    let scaled = product.checked_div(reading.time_running.into())?;
    Some(u64::try_from(scaled).unwrap_or(u64::MAX))
}

/// All counts of one measurement.
#[derive(Debug, serde::Serialize)]
pub(crate) struct Counts {
    pub(crate) target: String,
    pub(crate) elapsed_ns: u64,
    pub(crate) exit_code: u8,
    /// Present if the counts are limited to a region.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) region: Option<Passages>,
    pub(crate) events: Vec<Count>,
}

impl Counts {
    pub(crate) fn to_json(&self) -> serde_json::Result<String> {
        Ok(serde_json::to_string(self)? + "\n")
    }

    pub(crate) fn to_separated(&self, separator: &str) -> String {
        let line = |count: &Count| {
            let value = count.value.map_or_else(|| "<not counted>".into(), |v| v.to_string());
            let running = count.time_running.to_string();
            let share = count.share();
            let share = share.trim_end_matches('%');
            [value.as_str(), &count.unit, &count.event, &running, share].join(separator) + "\n"
        };
        self.events.iter().map(line).collect()
    }

    pub(crate) fn to_table(&self) -> String {
        let rows: Vec<Vec<String>> = self.events.iter().map(Count::row).collect();
        let columns = [Align::Right, Align::Left, Align::Left, Align::Left];
        let table = table(&columns, &rows);
        let star = self.events.iter().any(|count| !count.guest_only && count.refused.is_none());
        let legend = if star { "\n* the host's work for this machine included\n" } else { "" };
        let elapsed = seconds(self.elapsed_ns);
        let passages = self.region.as_ref().map(|region| format!("{}\n", region.describe()));
        format!(
            "\nCounts of {}:\n\n{table}\n{}{elapsed} seconds elapsed\n{legend}\n",
            self.target,
            passages.unwrap_or_default()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vpmu_client::{Entry, EventAttr};

    fn count(name: &str, unit: &str, guest_only: bool, reading: (u64, u64, u64)) -> Count {
        let entry = Entry {
            name: name.into(),
            unit: unit.into(),
            counts: "as named".into(),
            source: "a source".into(),
            samples: false,
            guest_only,
            takes_value: false,
            excludes: false,
            trace: None,
            kind: 0,
            config: 0,
        };
        let chosen = Chosen { name: name.into(), entry, attr: EventAttr::new(0, 0), leader: None };
        let (value, time_enabled, time_running) = reading;
        Count::new(&chosen, Reading { value, time_enabled, time_running, ..Reading::default() }, None)
    }

    fn counts() -> Counts {
        let refused = Count {
            value: None,
            scaled: None,
            refused: Some("no such thing".into()),
            ..count("cycles", "", true, (0, 0, 0))
        };
        Counts {
            target: "'true'".into(),
            elapsed_ns: 1_500_000_000,
            exit_code: 0,
            region: None,
            events: vec![
                count("task-clock", "ns", false, (1_234_567, 10, 10)),
                count("mark", "", true, (10, 100, 50)),
                count("tsc", "ticks", true, (0, 100, 0)),
                refused,
            ],
        }
    }

    #[test]
    fn table_names_source_of_each_count() {
        assert_eq!(
            counts().to_table(),
            "\nCounts of 'true':\n\n\
             \u{20}   1,234,567  ns     task-clock*  a source\n\
             \u{20}          10         mark         a source (counted 50.00% of the time, ~20 in all)\n\
             \u{20}           0  ticks  tsc          a source (never counted)\n\
             <not counted>         cycles       (no such thing)\n\
             \n1.500000000 seconds elapsed\n\
             \n* the host's work for this machine included\n\n"
        );
    }

    #[test]
    fn separated_lines_have_five_fields() {
        assert_eq!(
            counts().to_separated(";"),
            "1234567;ns;task-clock;10;100.00\n10;;mark;50;50.00\n0;ticks;tsc;0;0.00\n\
             <not counted>;;cycles;0;100.00\n"
        );
    }

    #[test]
    fn json_is_one_line_of_everything() {
        let json = counts().to_json().unwrap();
        assert_eq!(json.lines().count(), 1);
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(value["events"][0]["value"], 1_234_567);
        assert_eq!(value["events"][1]["scaled"], 20);
        assert!(value["events"][2]["scaled"].is_null());
        assert!(value["events"][3]["value"].is_null());
    }

    #[test]
    fn scaling_cannot_overflow() {
        let reading = Reading { value: u64::MAX, time_enabled: 4, time_running: 1, ..Reading::default() };
        assert_eq!(scaled(&reading), Some(u64::MAX));
    }
}

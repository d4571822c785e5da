//! Counts in the layout that the read format defines: from read(2), a sample, or a `PERF_RECORD_READ`.

use crate::attr::{FORMAT_GROUP, FORMAT_ID, FORMAT_LOST, FORMAT_TIME_ENABLED, FORMAT_TIME_RUNNING};
use vpmu_perf::record::Words;

/// A count at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Reading {
    /// The count.
    pub value: u64,
    /// Nanoseconds for which the event was enabled; for a task's event, only while the task ran.
    /// Zero if the read format does not include it.
    pub time_enabled: u64,
    /// Nanoseconds of `time_enabled` during which the event counted. Zero if the read format does
    /// not include it.
    pub time_running: u64,
    /// The event's id. Zero if the read format does not include it.
    pub id: u64,
    /// Number of lost records of the event, or of lost bytes of a trace. Zero if the read format
    /// does not include it.
    pub lost: u64,
}

/// Parses the reading of one event or, for a group, the readings of all members, beginning with the
/// leader. Each member's reading contains the group's times. Returns `None` if the words are too
/// few for the format.
pub(crate) fn parse(read_format: u64, words: &mut Words<'_>) -> Option<Vec<Reading>> {
    let has = |bit| read_format & bit != 0;
    if !has(FORMAT_GROUP) {
        return Some(vec![Reading {
            value: words.next()?,
            time_enabled: words.next_if(has(FORMAT_TIME_ENABLED))?,
            time_running: words.next_if(has(FORMAT_TIME_RUNNING))?,
            id: words.next_if(has(FORMAT_ID))?,
            lost: words.next_if(has(FORMAT_LOST))?,
        }]);
    }
    let members = words.next()?;
    let time_enabled = words.next_if(has(FORMAT_TIME_ENABLED))?;
    let time_running = words.next_if(has(FORMAT_TIME_RUNNING))?;
    // If the member count is too large, parsing returns `None` at the first missing word.
    let member = |_| {
        Some(Reading {
            value: words.next()?,
            time_enabled,
            time_running,
            id: words.next_if(has(FORMAT_ID))?,
            lost: words.next_if(has(FORMAT_LOST))?,
        })
    };
    (0..members).map(member).collect()
}

/// Bytes of a single event's reading.
pub(crate) fn single_size(read_format: u64) -> usize {
    let fields = FORMAT_TIME_ENABLED | FORMAT_TIME_RUNNING | FORMAT_ID | FORMAT_LOST;
    8 + 8 * (read_format & fields).count_ones() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_has_its_fields_in_perfs_order() {
        for format in 0..32 {
            let has = |bit| u64::from(format & bit != 0);
            let group = format & FORMAT_GROUP != 0;
            // The first event has value 10, enabled 20, running 30, id 40 and lost 50. The second
            // member of a group has value 11, id 41 and lost 51.
            let mut words = Vec::new();
            if group {
                words.push(2);
                words.extend((has(FORMAT_TIME_ENABLED) != 0).then_some(20));
                words.extend((has(FORMAT_TIME_RUNNING) != 0).then_some(30));
            }
            for member in 0..=u64::from(group) {
                words.push(10 + member);
                if !group {
                    words.extend((has(FORMAT_TIME_ENABLED) != 0).then_some(20));
                    words.extend((has(FORMAT_TIME_RUNNING) != 0).then_some(30));
                }
                words.extend((has(FORMAT_ID) != 0).then_some(40 + member));
                words.extend((has(FORMAT_LOST) != 0).then_some(50 + member));
            }
            let expected: Vec<Reading> = (0..=u64::from(group))
                .map(|member| Reading {
                    value: 10 + member,
                    time_enabled: 20 * has(FORMAT_TIME_ENABLED),
                    time_running: 30 * has(FORMAT_TIME_RUNNING),
                    id: (40 + member) * has(FORMAT_ID),
                    lost: (50 + member) * has(FORMAT_LOST),
                })
                .collect();
            assert_eq!(parse(format, &mut Words::new(&words)), Some(expected), "{format:#x}");
            if !group {
                assert_eq!(single_size(format), 8 * words.len());
            }
            let short = &words[..words.len() - 1];
            assert_eq!(parse(format, &mut Words::new(short)), None, "{format:#x}");
        }
    }

    #[test]
    fn forged_group_size_has_no_reading() {
        assert_eq!(parse(FORMAT_GROUP, &mut Words::new(&[u64::MAX, 1, 2])), None);
    }
}

use super::*;
use crate::attr::{FORMAT_ALL, FORMAT_ID};
use std::io::{Seek, Write};

fn event(content: &[u8], read_format: u64) -> Event {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(content).unwrap();
    file.rewind().unwrap();
    let layout = Layout { read_format, ..Layout::default() };
    Event { file, host: None, layout, backward: false }
}

#[test]
fn reading_follows_read_format() {
    let words: Vec<u8> = [7u64, 100, 50, 3].iter().flat_map(|w| w.to_ne_bytes()).collect();
    let all = Reading { value: 7, time_enabled: 100, time_running: 50, id: 3, lost: 0 };
    assert_eq!(event(&words, FORMAT_ALL).read().unwrap(), all);
    assert_eq!(event(&words, 0).read().unwrap(), Reading { value: 7, ..Reading::default() });
    let id = event(&words, FORMAT_ID).read().unwrap();
    assert_eq!(id, Reading { value: 7, id: 100, ..Reading::default() });
}

#[test]
fn group_reading_has_every_member() {
    let words: Vec<u8> = [2u64, 100, 50, 7, 3, 8, 4].iter().flat_map(|w| w.to_ne_bytes()).collect();
    let group = event(&words, FORMAT_ALL | FORMAT_GROUP);
    assert!(matches!(group.read(), Err(EventError::Format { group: true })));
    let readings = group.read_group().unwrap();
    let seen: Vec<_> = readings.iter().map(|r| (r.value, r.id)).collect();
    assert_eq!(seen, [(7, 3), (8, 4)]);
    assert_eq!((readings[1].time_enabled, readings[1].time_running), (100, 50));
    assert!(matches!(event(&words, FORMAT_ALL).read_group(), Err(EventError::Format { group: false })));
    let short = event(&words[..40], FORMAT_ALL | FORMAT_GROUP).read_group();
    assert!(matches!(short, Err(EventError::ShortRead { got: 40, .. })));
}

#[test]
fn short_read_is_an_error() {
    assert!(matches!(event(&[], FORMAT_ALL).read(), Err(EventError::Dead)));
    for got in [7, 24] {
        let error = event(&[0; 24][..got], FORMAT_ALL).read().unwrap_err();
        assert!(matches!(error, EventError::ShortRead { got: g, expected: 32 } if g == got), "{error}");
    }
}

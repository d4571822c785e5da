//! The records of the device are in the file, ordered by time.

use std::fs;

use linux_perf_data::{PerfFileReader, PerfFileRecord};

use super::*;

const MAP: &str = "\
ffffffff81000000 T startup_64
ffffffff81000100 t do_idle
ffffffff81000180 T panic
ffffffff81000200 D not_code
";

/// The times of a file's samples, in file order. All samples must be made by [`usual`]. This reads the file itself,
/// because other readers sort the samples.
fn stored(path: &Path) -> Vec<u64> {
    const SAMPLE: u64 = 9;
    let file = fs::read(path).unwrap();
    let word = |at: usize| u64::from_le_bytes(file[at..][..8].try_into().unwrap());
    // perf's header: magic, header size, attribute size, offset of the attributes, offset of the
    // data.
    let (mut at, len) = (word(40) as usize, word(48) as usize);
    let end = at + len;
    let mut times = Vec::new();
    while at < end {
        let header = word(at);
        if header & 0xffff_ffff == SAMPLE {
            // After the header, IDENTIFIER, IP and TID.
            times.push(word(at + 4 * 8));
        }
        at += (header >> 48) as usize;
    }
    times
}

#[test]
fn samples_of_two_vcpus_are_sorted_by_time() {
    let (first, second) = (event(11, "marks-0", 0, USUAL), event(12, "marks-1", 1, USUAL));
    let of_first = [10, 30, 50].map(|time| usual(&first, KERNEL, 0xffff_ffff_8100_0108, time, time));
    let of_second = [20, 40].map(|time| usual(&second, USER, 0x40_1000, time, time));
    let histories = [history(first, &of_first), history(second, &of_second)];
    let recorded = recorded(&histories, Some(MAP));
    assert_eq!(stored(&recorded.path), [10, 20, 30, 40, 50]);
    assert_eq!(
        script(&recorded.path),
        [
            ":6 6 [000] 0.000000010: marks-0: a ffffffff81000108 do_idle+0x8",
            ":6 6 [001] 0.000000020: marks-1: 14 401000 [unknown]",
            ":6 6 [000] 0.000000030: marks-0: 1e ffffffff81000108 do_idle+0x8",
            ":6 6 [001] 0.000000040: marks-1: 28 401000 [unknown]",
            ":6 6 [000] 0.000000050: marks-0: 32 ffffffff81000108 do_idle+0x8",
        ]
    );
    let expected =
        Summary { events: 2, samples: 5, bytes: fs::metadata(&recorded.path).unwrap().len(), ..Summary::default() };
    assert_eq!(recorded.summary, expected);
}

#[test]
fn linux_perf_data_reads_names_ids_and_records() {
    let clock = PersistentStatus {
        kind: abi::KIND_SOFTWARE,
        config: 0,
        rate: Some(Rate::Frequency(1000)),
        ..event(21, "clock", 0, USUAL)
    };
    let marks = event(22, "marks", 3, USUAL);
    let histories = [
        history(clock.clone(), &[usual(&clock, USER, 1, 100, 0)]),
        history(marks.clone(), &[usual(&marks, USER, 2, 50, 7)]),
    ];
    let recorded = recorded(&histories, None);
    let file = fs::File::open(&recorded.path).unwrap();
    let PerfFileReader { mut perf_file, mut record_iter } = PerfFileReader::parse_file(file).unwrap();
    let names: Vec<_> = perf_file
        .event_attributes()
        .iter()
        .map(|attribute| (attribute.name().unwrap().to_owned(), attribute.ids().to_vec()))
        .collect();
    assert_eq!(names, [("clock".into(), vec![21]), ("marks".into(), vec![22])]);
    assert_eq!(perf_file.hostname().unwrap(), None);
    assert_eq!(perf_file.os_release().unwrap(), None);
    assert_eq!(perf_file.cpu_desc().unwrap(), None);
    let mut found = Vec::new();
    while let Some(next) = record_iter.next_record(&mut perf_file).unwrap() {
        if let PerfFileRecord::EventRecord { attr_index, record } = next
            && let Ok(linux_perf_data::linux_perf_event_reader::EventRecord::Sample(sample)) = record.parse()
        {
            found.push((attr_index, sample.timestamp, sample.cpu, sample.addr));
        }
    }
    let marked = (1, Some(50), Some(3), Some(7));
    assert_eq!(found, [marked, (0, Some(100), Some(0), Some(0))]);
}

#[test]
fn events_with_different_fields_share_a_file() {
    // The samples of `bare` have only the IP. The samples of `full` have all fields, including the counts of a group
    // and a stack.
    let bare = event(1, "bare", 0, 1);
    let full = PersistentStatus {
        read_format: 0x1f,
        regs_user: 0x3,
        stack_user: 16,
        ..event(2, "full", 1, abi::SAMPLE_ALLOWED)
    };
    let group = [2, 100, 90, 5, 2, 0, 6, 3, 0];
    let chain = [3, u64::MAX - 127, 0xffff_ffff_8100_0108, 0xffff_ffff_8100_0181];
    let rest = [2, 1, 2, 16, 8, 9, 16, 0];
    let words = [&[2, 0xffff_ffff_8100_0108, 6 << 32 | 5, 1000, 9, 2, 2, 1, 1][..], &group, &chain, &rest].concat();
    let histories = [history(bare, &[record(9, USER, &[0x1234])]), history(full, &[record(9, KERNEL, &words)])];
    let recorded = recorded(&histories, Some(MAP));
    assert_eq!((recorded.summary.samples, recorded.summary.left_out), (2, 0));
    let text = perf(&["script", "-F", "event,ip,sym"], &recorded.path);
    let words: Vec<&str> = text.split_whitespace().collect();
    assert_eq!(
        words,
        ["bare:", "1234", "[unknown]", "full:", "ffffffff81000108", "do_idle", "ffffffff81000181", "panic"]
    );
}

#[test]
fn field_that_one_event_lacks_is_shown_for_the_others() {
    let silent = PersistentStatus { rate: Some(Rate::Period(9)), ..event(1, "silent", 1, 1 << 6) };
    let marks = event(2, "marks", 0, USUAL);
    let sample = usual(&marks, USER, 0x1234, 10, 7);
    let histories = [history(silent, &[record(9, USER, &[1])]), history(marks, &[sample])];
    let recorded = recorded(&histories, None);
    let text = perf(&["script", "-F", "tid,cpu,time,period,event,addr,ip"], &recorded.path);
    let words: Vec<&str> = text.split_whitespace().collect();
    let of_silent = ["-1", "[001]", "0.000000:", "9", "silent:", "0", "0"];
    let of_marks = ["6", "[000]", "0.000000:", "1", "marks:", "7", "1234"];
    assert_eq!(words, [of_silent, of_marks].concat());
}

#[test]
fn losses_are_counted_once_by_the_device() {
    let event = PersistentStatus { lost: 41, ..event(5, "marks", 0, USUAL) };
    let of_the_ring = record(2, 0, &[5, 1_000_000]);
    let sample = usual(&event, USER, 1, 10, 1);
    let recorded = recorded(&[history(event, &[sample, of_the_ring])], None);
    assert_eq!((recorded.summary.lost, recorded.summary.samples), (41, 1));
    let text = perf(&["script", "--show-lost-events"], &recorded.path);
    let lost: Vec<&str> = text.lines().filter(|line| line.contains("LOST")).collect();
    assert_eq!(lost.len(), 1, "{text}");
    assert!(lost[0].contains("lost 41"), "{text}");
}

#[test]
fn throttle_records_keep_their_times() {
    let event = event(5, "clock", 0, USUAL);
    let records = [
        usual(&event, USER, 1, 10, 1),
        record(5, 0, &[20, 5, 5]),
        record(6, 0, &[30, 5, 5]),
        usual(&event, USER, 1, 40, 1),
    ];
    let recorded = recorded(&[history(event, &records)], None);
    let dump = perf(&["script", "-D"], &recorded.path);
    let throttled = dump.lines().filter(|line| line.contains("THROTTLE")).count();
    assert_eq!((throttled, recorded.summary.samples), (2, 2), "{dump}");
}

#[test]
fn recording_without_samples_is_readable() {
    let silent = history(event(5, "silent", 0, USUAL), &[]);
    for histories in [vec![silent], vec![]] {
        let recorded = recorded(&histories, None);
        assert_eq!(script(&recorded.path), [""; 0]);
        assert_eq!(recorded.summary.events, histories.len());
    }
}

#[test]
fn counting_events_take_no_field_from_the_others() {
    let counting = PersistentStatus { rate: None, pages: None, ..event(4, "tsc", 0, 0) };
    let marks = event(5, "marks", 0, USUAL);
    let sample = usual(&marks, USER, 1, 10, 1);
    let recorded = recorded(&[history(counting, &[]), history(marks, &[sample])], None);
    assert_eq!((script(&recorded.path).len(), recorded.summary.events), (1, 1));
}

#[test]
fn name_has_no_character_that_a_terminal_acts_on() {
    let event = event(5, "a b\x1b[2J\n\u{fc}-0_9", 0, USUAL);
    let sample = usual(&event, USER, 1, 10, 1);
    let recorded = recorded(&[history(event, &[sample])], None);
    let lines = script(&recorded.path);
    assert!(lines[0].contains(" a_b_[2J__-0_9: "), "{lines:?}");
}

#[test]
fn reports_name_functions_of_the_guest_and_none_of_the_host() {
    let event = event(5, "clock", 0, USUAL);
    let ips = [0xffff_ffff_8100_0181, 0xffff_ffff_8100_0182, 0xffff_ffff_8200_0000];
    let samples = ips.map(|ip| usual(&event, KERNEL, ip, 10, 1));
    let histories = [history(event, &samples)];
    let named = recorded(&histories, Some(MAP));
    let report = perf(&["report", "--stdio", "--sort", "sym"], &named.path);
    // perf ends its report with a comment line that contains a random tip. Some tips contain a '%'.
    let rows: Vec<&str> = report.lines().filter(|line| !line.starts_with('#') && line.contains('%')).collect();
    assert_eq!(rows.len(), 2, "{report}");
    assert!(rows[0].contains("66.67%") && rows[0].contains("[k] panic"), "{report}");
    assert!(rows[1].contains("[k] 0xffffffff82000000"), "{report}");
    let bare = recorded(&histories, None);
    let lines = script(&bare.path);
    assert!(lines.iter().all(|line| line.ends_with("[unknown]")), "{lines:?}");
}

#[test]
fn recording_has_no_names_when_their_file_is_spoiled() {
    let map = tempfile::NamedTempFile::new().unwrap();
    fs::write(map.path(), "ffffffff81000000 T start_kernel\n").unwrap();
    let symbols = Symbols::open(map.path()).unwrap();
    fs::write(map.path(), "").unwrap();
    let event = event(5, "marks", 0, USUAL);
    let sample = usual(&event, KERNEL, 0xffff_ffff_8100_0000, 10, 1);
    let histories = [history(event, &[sample])];
    let mut recording = Recording::new(&histories);
    assert!(matches!(recording.name_functions(&symbols), Err(SymbolsError::None(_))));
    let recorded = written(&recording);
    assert_eq!(recorded.summary.samples, 1);
    assert_eq!(script(&recorded.path).len(), 1);
}

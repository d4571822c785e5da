use super::*;
use crate::data::{Chain, Map, Symbol, Traced};

fn recording() -> Recording {
    let mut recording = Recording::default();
    recording.add(Line::Event(EventLine {
        name: "task-clock".into(),
        unit: "ns".into(),
        period: 1000,
        freq: false,
        source: "a source".into(),
        guest_only: false,
    }));
    let map = |path: &str| Map { start: 0x1000, end: 0x3000, offset: 0, path: path.into() };
    for (time, comm) in [(100, "sh"), (200, "work")] {
        let maps = vec![map(comm)];
        recording.add(Line::Process(Process { pid: 7, comm: comm.into(), time, maps }));
    }
    let kernel = Symbol { start: 0xf000, end: 0xf100, name: "do_work".into() };
    recording.add(Line::Kernel(Kernel { symbols: vec![kernel], hidden: false }));
    let mut sample = |ip, pid, time, user| {
        recording.add(Line::Sample(Sample(0, ip, pid, pid, time, 1, 1000, user, Chain::default())));
    };
    sample(0x1234, 7, 50, true);
    sample(0x1234, 7, 150, true);
    sample(0x1234, 7, 250, true);
    sample(0x1fff, 7, 250, true);
    sample(0xf0ff, 7, 250, false);
    sample(0xf100, 0, 250, false);
    sample(0x9000, 9, 250, true);
    recording.add(Line::Lost(Lost { event: 0, lost: 3 }));
    recording.add(Line::Lost(Lost { event: 0, lost: 2 }));
    recording
}

#[test]
fn samples_fall_to_who_ran_at_their_time() {
    let profiles = recording().profiles(&[Key::Comm, Key::Object, Key::Symbol], View::default());
    let rows: Vec<(String, u64)> = profiles[0].rows.iter().map(|row| (row.cells.join(" "), row.samples)).collect();
    let expected = [
        ("sh sh [.] 0x1000-0x1fff", 2),
        ("work work [.] 0x1000-0x1fff", 2),
        ("[idle] [kernel] [k] 0xf000-0xffff", 1),
        ("[pid 9] [unknown] [.] 0x9000-0x9fff", 1),
        ("work [kernel] [k] do_work", 1),
    ];
    assert_eq!(rows, expected.map(|(row, samples)| (row.to_owned(), samples)));
    assert_eq!((profiles[0].samples, profiles[0].lost), (7, 5));
}

#[test]
fn shares_are_of_the_event_and_sum_up() {
    let mut recording = recording();
    recording.add(Line::Sample(Sample(0, 0, 9, 9, 0, 0, 93_000, true, Chain::default())));
    let profile = recording.profiles(&[Key::Pid], View::default()).remove(0);
    assert_eq!(profile.rows[0].cells, ["9"]);
    assert!((profile.rows[0].percent - 94.0).abs() < 1e-9);
    let sum: f64 = profile.rows.iter().map(|row| row.percent).sum();
    assert!((sum - 100.0).abs() < 1e-9);
}

#[test]
fn samples_of_no_event_are_nobodys() {
    let mut recording = Recording::default();
    recording.add(Line::Sample(Sample(5, 1, 1, 1, 1, 1, 1, true, Chain::default())));
    assert!(recording.profiles(&[Key::Symbol], View::default()).is_empty());
}

/// Samples of the process `work`. Its functions have no names, so the report shows their pages.
/// Code in page 0x1000 calls the kernel once, and calls functions in page 0x2000 twice. The second
/// of these two calls is the last instruction in page 0x1000.
fn chains() -> Recording {
    let mut recording = recording();
    recording.samples.clear();
    // 0x9000 is not code: the function at 0x1180 kept no frame pointer.
    let mut sample = |kernel: &[u64], user: &[u64], period| {
        let is_user = kernel.is_empty();
        let ip = if is_user { user[0] } else { kernel[0] };
        let chain = Chain(kernel.to_vec(), user.to_vec());
        recording.add(Line::Sample(Sample(0, ip, 7, 7, 250, 1, period, is_user, chain)));
    };
    sample(&[], &[0x2100, 0x1180, 0x9000, 0x1300], 600);
    sample(&[], &[0x2108, 0x2000], 200);
    sample(&[0xf010], &[0x1190], 200);
    recording
}

#[test]
fn call_tree_merges_equal_callers() {
    let view = |direction| View { children: false, calls: Some(direction) };
    let lines = |direction| -> Vec<String> {
        let profile = chains().profiles(&[Key::Symbol], view(direction)).remove(0);
        let calls = profile.calls.unwrap();
        calls.iter().map(|call| format!("{} {} {}", call.depth, call.name, call.percent)).collect()
    };
    assert_eq!(
        lines(Direction::Down),
        ["0 work 100", "1 [.] 0x1000-0x1fff 100", "2 [.] 0x2000-0x2fff 80", "2 [k] do_work 20",],
        "the call that returns to 0x2000 is in the page before it"
    );
    assert_eq!(
        lines(Direction::Up),
        [
            "0 work 100",
            "1 [.] 0x2000-0x2fff 80",
            "2 [.] 0x1000-0x1fff 80",
            "1 [k] do_work 20",
            "2 [.] 0x1000-0x1fff 20",
        ]
    );
    assert!(chains().has_chains() && !recording().has_chains());
}

#[test]
fn callers_share_what_they_call() {
    let view = View { children: true, calls: None };
    let profile = chains().profiles(&[Key::Symbol], view).remove(0);
    let rows: Vec<_> =
        profile.rows.iter().map(|row| (row.cells[0].as_str(), row.percent, row.children_percent)).collect();
    assert_eq!(
        rows,
        [
            ("[.] 0x1000-0x1fff", 0.0, Some(100.0)),
            ("[.] 0x2000-0x2fff", 80.0, Some(80.0)),
            ("[k] do_work", 20.0, Some(20.0)),
        ]
    );
}

#[test]
fn samples_of_a_trace_are_samples() {
    let mut recording = Recording::default();
    recording.add(Line::Event(EventLine {
        name: "task-clock".into(),
        unit: "ns".into(),
        period: 1000,
        freq: false,
        source: String::new(),
        guest_only: false,
    }));
    for (name, format) in [("exits", Format::Exits), ("samples", Format::Samples)] {
        recording.add(Line::Trace(TraceLine { name: name.into(), format, period: 5, ..TraceLine::default() }));
    }
    let mut packet = vec![2, 3, 0, 0, 1, 0, 0, 0];
    for word in [100u64, 0x1234, 5, 7 | 8 << 32] {
        packet.extend(word.to_le_bytes());
    }
    packet.resize(256, 0);
    for trace in [0, 1, 1, 2] {
        recording.add(Line::Aux(Aux { trace, place: 0, position: 64, bytes: 256, data: packet.clone() }));
        recording.add(Line::Traced(Traced { trace, place: 0, produced: 3 * 256, lost: 512, written: 256 }));
    }
    let profiles = recording.profiles(&[Key::Pid, Key::Cpu], View::default());
    let names: Vec<(&str, u64, u64)> =
        profiles.iter().map(|profile| (profile.event.as_str(), profile.samples, profile.lost)).collect();
    assert_eq!(names, [("task-clock", 0, 0), ("samples", 2, 4)]);
    assert_eq!(profiles[1].rows[0].cells, ["7", "1"]);
    assert_eq!(profiles[1].period, 10);
    let bytes: Vec<(&str, u64, u64, bool)> = recording
        .traces()
        .iter()
        .map(|trace| (trace.trace.as_str(), trace.written, trace.lost, trace.is_event()))
        .collect();
    assert_eq!(bytes, [("exits", 256, 512, false), ("samples", 512, 1024, true)]);
}

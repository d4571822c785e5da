use super::*;
use crate::data::{Aux, Chain, EventLine, Header, Line, Sample, Throttle, TraceLine};
use vpmu_client::trace::Format;

fn args(keys: &[Key]) -> ReportArgs {
    ReportArgs {
        input: "x".into(),
        sort: keys.to_vec(),
        call_graph: None,
        children: false,
        least: 0.5,
        limit: None,
        json: false,
    }
}

fn recording() -> Recording {
    let mut recording = Recording::default();
    recording.add(Line::Header(Header { version: 1, target: "'x'".into() }));
    recording.add(Line::Event(EventLine {
        name: "task-clock".into(),
        unit: "ns".into(),
        period: 1_000_000,
        freq: false,
        source: "a source".into(),
        guest_only: false,
    }));
    for pid in [7, 7, 7, 9] {
        recording.add(Line::Sample(Sample(0, 0x1000, pid, pid, 1, 0, 1_000_000, true, Chain::default())));
    }
    recording
}

#[test]
fn report_heading_shows_event_period_and_loss() {
    let mut recording = recording();
    recording.add(Line::Throttle(Throttle { event: 0, time: 1 }));
    let keys = [Key::Pid, Key::Symbol];
    assert_eq!(
        to_text(&recording, &recording.profiles(&keys, View::default()), &args(&keys)),
        "# Recording of 'x'\n\
         # The recording is truncated.\n\
         #\n# task-clock: 4 samples, one every 1,000,000 ns, 0 lost\n\
         # counted by a source, host's work included\n\
         # Throttled 1 times: samples are missing.\n\n\
         \u{20}SHARE  SAMPLES  PID  SYMBOL\n\
         75.00%        3  7    [.] 0x1000-0x1fff\n\
         25.00%        1  9    [.] 0x1000-0x1fff\n\n"
    );
}

#[test]
fn json_names_the_keys() {
    let profiles = recording().profiles(&[Key::Symbol], View::default());
    let json = serde_json::to_value(&profiles).unwrap();
    assert_eq!(json[0]["rows"][0]["symbol"], "[.] 0x1000-0x1fff");
    assert_eq!(json[0]["rows"][0]["percent"], 100.0);
    assert_eq!(json[0]["rows"][0]["samples"], 4);
}

#[test]
fn call_tree_is_indented_and_counts_omitted_calls() {
    let call = |depth, name: &str, percent, self_percent| Call {
        depth,
        name: name.into(),
        samples: 0,
        percent,
        self_samples: 0,
        self_percent,
    };
    let calls = [
        call(0, "workload", 100.0, 0.0),
        call(1, "[.] main", 99.75, 24.75),
        call(2, "[.] leaf", 75.0, 75.0),
        call(1, "[k] rare", 0.25, 0.25),
    ];
    assert_eq!(
        to_tree(&calls, &args(&[])),
        "CHILDREN    SELF  CALLS\n\
         \u{20}100.00%   0.00%  workload\n\
         \u{20} 99.75%  24.75%    [.] main\n\
         \u{20} 75.00%  75.00%      [.] leaf\n\
         (1 calls with less than 0.5% each are left out)\n"
    );
    let all = ReportArgs { least: 0.0, call_graph: Some(Direction::Up), ..args(&[]) };
    let up = to_tree(&calls, &all);
    assert!(up.contains("rare") && !up.contains("SELF"), "{up}");
}

#[test]
fn rates_and_shares_are_numbers_of_their_kind() {
    assert_eq!(percent("12.5"), Ok(12.5));
    for wrong in ["-1", "101", "x", "", "NaN", "inf"] {
        assert!(percent(wrong).is_err(), "{wrong}");
    }
    let mut profile = recording().profiles(&[Key::Pid], View::default()).remove(0);
    assert_eq!(every(&profile), "one every 1,000,000 ns");
    profile.unit.clear();
    assert_eq!(every(&profile), "one every 1,000,000");
    profile.freq = true;
    assert_eq!(every(&profile), "about 1,000,000 a second");
}

#[test]
fn report_describes_traces() {
    let mut recording = recording();
    recording.add(Line::Trace(TraceLine {
        name: "exit-trace-user".into(),
        format: Format::Exits,
        ..TraceLine::default()
    }));
    recording.add(Line::Aux(Aux { trace: 0, place: 0, position: 0, bytes: 4096, data: Vec::new() }));
    let text = to_text(&recording, &[], &args(&[Key::Pid]));
    let reported = "# exit-trace-user: 4,096 bytes of AUX data, 0 lost: `vperf exits report` shows them\n";
    assert!(text.contains(reported), "{text}");
}

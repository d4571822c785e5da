use super::*;
use crate::recording::composed::{clock, recorded, sample};

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

fn recording() -> Profile {
    recorded(vec![clock()], |output| {
        for pid in [7, 7, 7, 9] {
            output.sample(0, &sample(pid, 0x1000), &[]).unwrap();
        }
        output.throttle(0, 1).unwrap();
    })
}

#[test]
fn report_heading_shows_event_period_and_loss() {
    let mut recording = recording();
    recording.command = "vperf record x".into();
    let keys = [Key::Pid, Key::Symbol];
    assert_eq!(
        to_text(&recording, &profiles(&recording, &keys, View::default()), &args(&keys)),
        "# Recorded by: vperf record x\n\
         #\n# task-clock: 4 samples, one every 1,000,000 ns, 0 lost, host's work included\n\
         # Throttled 1 times: samples are missing.\n\n\
         \u{20}SHARE  SAMPLES  PID  SYMBOL\n\
         75.00%        3  7    [.] [unknown]\n\
         25.00%        1  9    [.] [unknown]\n\n"
    );
}

#[test]
fn json_names_the_keys() {
    let profiles = profiles(&recording(), &[Key::Symbol], View::default());
    let json = serde_json::to_value(&profiles).unwrap();
    assert_eq!(json[0]["rows"][0]["symbol"], "[.] [unknown]");
    assert_eq!(json[0]["rows"][0]["percent"], 100.0);
    assert_eq!(json[0]["rows"][0]["samples"], 4);
}

#[test]
fn file_that_is_not_a_recording_is_refused() {
    assert!(matches!(read(Path::new("/dev/zero")), Err(OpenError::NotFile(_))));
    assert!(matches!(read(Path::new("/proc/cpuinfo")), Err(OpenError::Read { .. })));
    let missing = read(Path::new("/nonexistent")).unwrap_err().to_string();
    assert!(missing.contains("name it with -i"), "{missing}");
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
    let mut profile = profiles(&recording(), &[Key::Pid], View::default()).remove(0);
    assert_eq!(every(&profile), ", one every 1,000,000 ns");
    profile.unit = "";
    assert_eq!(every(&profile), ", one every 1,000,000");
    profile.freq = true;
    assert_eq!(every(&profile), ", about 1,000,000 a second");
    profile.every = 0;
    assert_eq!(every(&profile), "");
}

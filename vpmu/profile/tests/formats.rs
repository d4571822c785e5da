//! Each format, of a recording that `vpmu-recorder` wrote.
#![allow(
    clippy::cast_possible_truncation,
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "tests fail by panicking"
)]

mod common;

use std::collections::BTreeMap;
use std::io::Read;

use common::{exported, guest, profile, text};
use serde_json::Value;
use vpmu_profile::{By, EventKind, Format, Options, Selection, SelectionError, Weight};

fn json(profile: &vpmu_profile::Profile, format: Format, options: &Options) -> Value {
    serde_json::from_slice(&exported(profile, format, options)).unwrap()
}

#[test]
fn profile_merges_events_of_vcpus_and_keeps_order() {
    let profile = profile(guest());
    let events: Vec<_> =
        profile.events.iter().map(|event| (event.name.as_str(), event.kind, event.samples, event.lost)).collect();
    assert_eq!(
        events,
        [
            ("cpu-clock", EventKind::Sampled, 5, 0),
            ("marks", EventKind::Mark, 2, 41),
            ("exits-io", EventKind::Exit, 1, 0)
        ]
    );
    assert_eq!(profile.events[0].interval(), Some(10_000_000));
    assert!(profile.is_guest && profile.events[0].is_time);
    let times: Vec<u64> = profile.samples.iter().map(|sample| sample.time).collect();
    assert_eq!(times, [10, 20, 25, 26, 27, 30, 40, 50]);
    assert_eq!(profile.panic, Some(7));
    let tasks: Vec<_> = profile.tasks.iter().map(|task| (task.name.as_str(), task.tid)).collect();
    assert_eq!(tasks, [("swapper/0", Some(0)), ("swapper/1", Some(0)), (":6", Some(6))]);
    // The two addresses of a user chain, and the addresses of marks and exits.
    assert_eq!(profile.nameless, (0, 6));
}

#[test]
fn folded_lists_each_stack_with_its_weight() {
    let profile = profile(guest());
    assert_eq!(
        text(&profile, Format::Folded),
        "\
:6;[unknown];[unknown] 1
:6;[unknown];sysrq_handle_crash;panic 1
swapper/0;do_idle 1
swapper/1;do_idle 2
"
    );
    let options = Options { weight: Weight::Period, ..Options::default() };
    let periods = String::from_utf8(exported(&profile, Format::Folded, &options)).unwrap();
    assert!(periods.starts_with(":6;[unknown];[unknown] 9\n"), "{periods}");
    let options = Options { event: Some("marks".to_owned()), ..Options::default() };
    assert_eq!(exported(&profile, Format::Folded, &options), b":6;[unknown] 2\n");
}

#[test]
fn unknown_event_is_refused_with_the_known_ones() {
    let profile = profile(guest());
    let options = Options { event: Some("cycles".to_owned()), ..Options::default() };
    let error = Selection::new(&profile, &options).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the recording has no samples of `cycles`; it has samples of: cpu-clock, marks, exits-io"
    );
    let empty = common::profile(common::recorded(&[common::history(
        &common::event(1, "marks", 0, vpmu::abi::KIND_MARK, common::USUAL),
        &[],
    )]));
    let error = Selection::new(&empty, &Options::default()).unwrap_err();
    assert!(matches!(error, SelectionError::Empty { lost: 0 }), "{error}");
}

/// The frames of an SVG: name, row, and the weight in the title.
fn frames(svg: &str) -> Vec<(String, usize, u64)> {
    let attribute = |line: &str, name: &str| {
        let (_, rest) = line.split_once(&format!("{name}=\"")).unwrap();
        rest.split_once('"').unwrap().0.to_owned()
    };
    let frames = svg.lines().filter(|line| line.starts_with("<g class=\"f\""));
    frames
        .map(|line| {
            let (_, title) = line.split_once("<title>").unwrap();
            let (_, weight) = title.split_once("</title>").unwrap().0.rsplit_once('(').unwrap();
            let weight = weight.split_once(' ').unwrap().0.parse().unwrap();
            (attribute(line, "data-n"), attribute(line, "data-d").parse().unwrap(), weight)
        })
        .collect()
}

#[test]
fn svg_has_a_frame_for_each_caller_and_needs_nothing_else() {
    let svg = text(&profile(guest()), Format::Svg);
    let mut found = frames(&svg);
    found.sort();
    let frame = |name: &str, row, weight| (name.to_owned(), row, weight);
    assert_eq!(
        found,
        [
            frame(":6", 1, 2),
            frame("[unknown]", 2, 2),
            frame("[unknown]", 3, 1),
            frame("all", 0, 5),
            frame("do_idle", 2, 1),
            frame("do_idle", 2, 2),
            frame("panic", 4, 1),
            frame("swapper/0", 1, 1),
            frame("swapper/1", 1, 2),
            frame("sysrq_handle_crash", 3, 1),
        ]
    );
    assert!(svg.starts_with("<?xml") && svg.trim_end().ends_with("</svg>"));
    // The name of the SVG's own namespace is the only address.
    assert_eq!(svg.matches("http").count(), 1);
    for outside in ["href", "src=", "@import", "url(", "fetch("] {
        assert!(!svg.contains(outside), "{outside}");
    }
}

#[test]
fn firefox_has_a_thread_for_each_task_and_markers() {
    let profile = profile(guest());
    let json = json(&profile, Format::Firefox, &Options::default());
    let meta = &json["meta"];
    for required in ["version", "preprocessedProfileVersion", "interval", "startTime", "processType", "product"] {
        assert!(!meta[required].is_null(), "{required}");
    }
    assert_eq!(meta["interval"], 10.0);
    let threads = json["threads"].as_array().unwrap();
    let mut stacks: BTreeMap<String, u64> = BTreeMap::new();
    let mut markers = Vec::new();
    for thread in threads {
        for required in ["name", "pid", "tid", "samples", "markers", "stackTable", "frameTable", "funcTable"] {
            assert!(!thread[required].is_null(), "{required}");
        }
        let strings = match &thread["stringArray"] {
            Value::Null => &json["shared"]["stringArray"],
            strings => strings,
        };
        let samples = &thread["samples"];
        let count = samples["length"].as_u64().unwrap();
        for index in 0..count as usize {
            let mut names = Vec::new();
            let mut stack = samples["stack"][index].as_u64();
            while let Some(at) = stack {
                let at = at as usize;
                let frame = thread["stackTable"]["frame"][at].as_u64().unwrap() as usize;
                let function = thread["frameTable"]["func"][frame].as_u64().unwrap() as usize;
                let name = thread["funcTable"]["name"][function].as_u64().unwrap() as usize;
                names.push(strings[name].as_str().unwrap());
                stack = thread["stackTable"]["prefix"][at].as_u64();
            }
            names.push(thread["name"].as_str().unwrap());
            names.reverse();
            let weight = samples["weight"][index].as_u64().unwrap();
            *stacks.entry(names.join(";")).or_default() += weight;
        }
        let of_thread = &thread["markers"];
        for index in 0..of_thread["length"].as_u64().unwrap() as usize {
            let name = of_thread["name"][index].as_u64().unwrap() as usize;
            let value = match &of_thread["data"][index]["value"] {
                Value::Number(number) => strings[number.as_u64().unwrap() as usize].as_str().unwrap(),
                value => value.as_str().unwrap(),
            };
            markers.push((strings[name].as_str().unwrap(), value.to_owned()));
        }
    }
    let folded: String = stacks.iter().map(|(stack, weight)| format!("{stack} {weight}\n")).collect();
    assert_eq!(folded, text(&profile, Format::Folded));
    let marker = |name, value: &str| (name, value.to_owned());
    assert_eq!(
        markers,
        [
            marker("marks", "7"),
            marker("marks", "8"),
            marker("exits-io", ""),
            marker("panic", ""),
            marker("lost samples", "41 of marks"),
        ]
    );
}

#[test]
fn threads_are_vcpus_on_request() {
    let options = Options { by: By::Cpu, ..Options::default() };
    let json = json(&profile(guest()), Format::Firefox, &options);
    let threads = json["threads"].as_array().unwrap();
    let threads: Vec<_> =
        threads.iter().map(|thread| (thread["name"].as_str(), thread["samples"]["length"].as_u64())).collect();
    assert_eq!(threads, [(Some("vCPU 0"), Some(3)), (Some("vCPU 1"), Some(2))]);
}

/// A message of protobuf: its fields, each a number or bytes. This decoder shares nothing with the writer's.
#[derive(Debug, Clone)]
enum Field {
    Number(u64),
    Bytes(Vec<u8>),
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = bytes.split_first().expect("a whole number");
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return value;
        }
    }
    panic!("a number of more than ten bytes");
}

fn message(mut bytes: &[u8]) -> BTreeMap<u64, Vec<Field>> {
    let mut fields: BTreeMap<u64, Vec<Field>> = BTreeMap::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let field = match key & 7 {
            0 => Field::Number(varint(&mut bytes)),
            2 => {
                let length = varint(&mut bytes);
                let (field, rest) = bytes.split_at(usize::try_from(length).unwrap());
                bytes = rest;
                Field::Bytes(field.to_vec())
            }
            other => panic!("wire type {other}"),
        };
        fields.entry(key >> 3).or_default().push(field);
    }
    fields
}

/// The messages of a repeated field.
fn messages(of: &BTreeMap<u64, Vec<Field>>, number: u64) -> Vec<BTreeMap<u64, Vec<Field>>> {
    let fields = of.get(&number).into_iter().flatten();
    fields
        .map(|field| match field {
            Field::Bytes(bytes) => message(bytes),
            Field::Number(number) => panic!("{number} is not a message"),
        })
        .collect()
}

/// The numbers of a field, packed or not.
fn numbers(of: &BTreeMap<u64, Vec<Field>>, number: u64) -> Vec<u64> {
    let mut numbers = Vec::new();
    for field in of.get(&number).into_iter().flatten() {
        match field {
            Field::Number(number) => numbers.push(*number),
            Field::Bytes(bytes) => {
                let mut bytes = bytes.as_slice();
                while !bytes.is_empty() {
                    numbers.push(varint(&mut bytes));
                }
            }
        }
    }
    numbers
}

/// The numbers of fields are those of pprof's `profile.proto`.
#[test]
fn pprof_has_both_weights_of_each_stack() {
    let profile = profile(guest());
    let bytes = exported(&profile, Format::Pprof, &Options::default());
    let mut proto = Vec::new();
    flate2::read::GzDecoder::new(bytes.as_slice()).read_to_end(&mut proto).unwrap();
    let proto = message(&proto);
    let strings: Vec<String> = proto[&6]
        .iter()
        .map(|field| match field {
            Field::Bytes(bytes) => String::from_utf8(bytes.clone()).unwrap(),
            Field::Number(number) => panic!("{number}"),
        })
        .collect();
    assert_eq!(strings[0], "");
    let string = |id: u64| strings[usize::try_from(id).unwrap()].as_str();
    let types: Vec<_> =
        messages(&proto, 1).iter().map(|of| (string(numbers(of, 1)[0]), string(numbers(of, 2)[0]))).collect();
    assert_eq!(types, [("samples", "count"), ("cpu-clock", "nanoseconds")]);
    let functions: BTreeMap<u64, &str> =
        messages(&proto, 5).iter().map(|of| (numbers(of, 1)[0], string(numbers(of, 2)[0]))).collect();
    let mappings: Vec<u64> = messages(&proto, 3).iter().map(|of| numbers(of, 1)[0]).collect();
    let locations: BTreeMap<u64, &str> = messages(&proto, 4)
        .iter()
        .map(|of| {
            assert!(mappings.contains(&numbers(of, 2)[0]));
            (numbers(of, 1)[0], functions[&numbers(&messages(of, 4)[0], 1)[0]])
        })
        .collect();
    let mut stacks: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    for sample in messages(&proto, 2) {
        let frames: Vec<&str> = numbers(&sample, 1).iter().map(|id| locations[id]).collect();
        let labels: BTreeMap<&str, BTreeMap<u64, Vec<Field>>> =
            messages(&sample, 3).into_iter().map(|label| (string(numbers(&label, 1)[0]), label)).collect();
        let names: Vec<&str> = frames.into_iter().chain([string(numbers(&labels["task"], 2)[0])]).rev().collect();
        let values = numbers(&sample, 2);
        let total = stacks.entry(names.join(";")).or_default();
        *total = (total.0 + values[0], total.1 + values[1]);
    }
    for (index, weight) in [Weight::Samples, Weight::Period].into_iter().enumerate() {
        let folded: String = stacks
            .iter()
            .map(|(stack, &(samples, period))| format!("{stack} {}\n", if index == 0 { samples } else { period }))
            .collect();
        let options = Options { weight, ..Options::default() };
        assert_eq!(folded.as_bytes(), exported(&profile, Format::Folded, &options));
    }
    let comments: Vec<&str> = numbers(&proto, 13).into_iter().map(string).collect();
    assert_eq!(comments.len(), 2, "{comments:?}");
}

#[test]
fn perfetto_has_every_sample_mark_and_exit_on_its_track() {
    let profile = profile(guest());
    let json = json(&profile, Format::Perfetto, &Options::default());
    let events = json["traceEvents"].as_array().unwrap();
    let mut tracks = BTreeMap::new();
    let mut found = Vec::new();
    for event in events {
        match event["ph"].as_str().unwrap() {
            "M" if event["name"] == "thread_name" => {
                tracks.insert(event["tid"].as_u64().unwrap(), event["args"]["name"].as_str().unwrap());
            }
            "M" => {}
            "i" => {
                let track = tracks.get(&event["tid"].as_u64().unwrap()).copied().unwrap_or_default();
                let name = event["name"].as_str().unwrap();
                found.push((track, name, event["ts"].as_f64().unwrap(), event["args"]["value"].as_u64()));
            }
            other => panic!("{other}"),
        }
    }
    assert_eq!(
        found,
        [
            ("swapper/0", "do_idle", 0.0, None),
            ("swapper/1", "do_idle", 0.01, None),
            (":6", "marks", 0.015, Some(7)),
            (":6", "marks", 0.016, Some(8)),
            (":6", "exits-io", 0.017, None),
            (":6", "[unknown]", 0.02, None),
            ("swapper/1", "do_idle", 0.03, None),
            (":6", "panic", 0.04, None),
            ("", "panic", 0.04, None),
            ("", "lost samples", 0.04, None),
        ]
    );
    let stack = &events.iter().rfind(|event| event["cat"] == "cpu-clock").unwrap()["args"]["stack"];
    assert_eq!(*stack, serde_json::json!(["panic", "sysrq_handle_crash", "[unknown]"]));
}

//! The profile of pprof: `profile.proto`, compressed with gzip.
//!
//! The messages have the numbers of pprof's published `profile.proto`, as far as they are used.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};

use flate2::Compression;
use flate2::write::GzEncoder;
use prost::Message;

use crate::model::{Event, EventKind};
use crate::selection::Selection;
use crate::stacks::{FrameId, Mode};

/// `perftools.profiles.Profile`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Proto {
    #[prost(message, repeated, tag = "1")]
    sample_type: Vec<ValueType>,
    #[prost(message, repeated, tag = "2")]
    sample: Vec<SampleProto>,
    #[prost(message, repeated, tag = "3")]
    mapping: Vec<Mapping>,
    #[prost(message, repeated, tag = "4")]
    location: Vec<Location>,
    #[prost(message, repeated, tag = "5")]
    function: Vec<Function>,
    #[prost(string, repeated, tag = "6")]
    string_table: Vec<String>,
    #[prost(int64, tag = "10")]
    duration_nanos: i64,
    #[prost(message, optional, tag = "11")]
    period_type: Option<ValueType>,
    #[prost(int64, tag = "12")]
    period: i64,
    #[prost(int64, repeated, tag = "13")]
    comment: Vec<i64>,
}

/// The meaning and unit of a value.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct ValueType {
    #[prost(int64, tag = "1")]
    kind: i64,
    #[prost(int64, tag = "2")]
    unit: i64,
}

/// A stack, innermost first, with its values.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct SampleProto {
    #[prost(uint64, repeated, tag = "1")]
    location_id: Vec<u64>,
    #[prost(int64, repeated, tag = "2")]
    value: Vec<i64>,
    #[prost(message, repeated, tag = "3")]
    label: Vec<Label>,
}

/// A fact about a sample.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct Label {
    #[prost(int64, tag = "1")]
    key: i64,
    #[prost(int64, tag = "2")]
    text: i64,
    #[prost(int64, tag = "3")]
    number: i64,
}

/// A file.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct Mapping {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(int64, tag = "5")]
    filename: i64,
    #[prost(bool, tag = "7")]
    has_functions: bool,
}

/// A frame.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Location {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(uint64, tag = "2")]
    mapping_id: u64,
    #[prost(message, repeated, tag = "4")]
    line: Vec<Line>,
}

/// The function of a frame.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct Line {
    #[prost(uint64, tag = "1")]
    function_id: u64,
}

/// A function.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct Function {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(int64, tag = "2")]
    name: i64,
    #[prost(int64, tag = "3")]
    system_name: i64,
    #[prost(int64, tag = "4")]
    filename: i64,
}

/// The strings of a profile, each once. The first is empty.
struct Strings {
    list: Vec<String>,
    ids: HashMap<String, i64>,
}

impl Strings {
    fn new() -> Self {
        let mut strings = Self { list: Vec::new(), ids: HashMap::new() };
        strings.id("");
        strings
    }

    fn id(&mut self, text: &str) -> i64 {
        if let Some(&id) = self.ids.get(text) {
            return id;
        }
        let id = signed(self.list.len() as u64);
        self.list.push(text.to_owned());
        self.ids.insert(text.to_owned(), id);
        id
    }
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// The number of a frame's location and function. Zero is not valid.
fn location_id(frame: FrameId) -> u64 {
    u64::from(frame) + 1
}

/// Writes a selection.
///
/// # Errors
/// Errors of `out`.
pub(crate) fn write(selection: &Selection<'_>, out: &mut impl Write) -> io::Result<()> {
    let mut encoder = GzEncoder::new(out, Compression::default());
    encoder.write_all(&proto(selection).encode_to_vec())?;
    encoder.finish()?;
    Ok(())
}

fn proto(selection: &Selection<'_>) -> Proto {
    let profile = selection.profile;
    let mut strings = Strings::new();
    let event = profile.events.get(selection.event_index());
    let is_time = event.is_some_and(|event| event.is_time);
    let samples = ValueType { kind: strings.id("samples"), unit: strings.id("count") };
    let unit = if is_time { "nanoseconds" } else { "count" };
    let weight = ValueType { kind: strings.id(selection.event()), unit: strings.id(unit) };
    let labels = ["task", "pid", "tid", "cpu"].map(|key| strings.id(key));
    let mut proto = Proto {
        sample_type: vec![samples, weight],
        period_type: Some(weight),
        period: signed(event.and_then(Event::interval).filter(|_| is_time).unwrap_or(1)),
        ..Proto::default()
    };
    proto.sample = stacks(selection, labels, &mut strings);
    files(selection, &mut proto, &mut strings);
    let times = || selection.samples().map(|sample| sample.time);
    if let (Some(first), Some(last)) = (times().min(), times().max()) {
        proto.duration_nanos = signed(last - first);
    }
    let lost = event.map_or(0, |event| event.lost).saturating_add(profile.lost);
    if lost > 0 {
        proto.comment.push(strings.id(&format!("{lost} samples were lost")));
    }
    if let Some(panic) = profile.panic.and_then(|index| profile.samples.get(index)) {
        let at = panic.time;
        proto.comment.push(strings.id(&format!("the kernel panicked at or before {at} ns")));
    }
    let marks = profile.samples.iter().filter(|sample| {
        let event = profile.events.get(sample.event);
        event.is_some_and(|event| event.kind == EventKind::Mark)
    });
    let marks = marks.count();
    if marks > 0 {
        proto.comment.push(strings.id(&format!("{marks} marks are not shown: pprof has no times")));
    }
    proto.string_table = strings.list;
    proto
}

/// Returns the samples. Those of one stack, task and vCPU are one.
fn stacks(selection: &Selection<'_>, labels: [i64; 4], strings: &mut Strings) -> Vec<SampleProto> {
    let mut totals: BTreeMap<_, (u64, u64)> = BTreeMap::new();
    for sample in selection.samples() {
        let total = totals.entry((sample.stack, sample.task, sample.cpu)).or_default();
        *total = (total.0 + 1, total.1.saturating_add(sample.period));
    }
    let [name, pid, tid, cpu] = labels;
    let profile = selection.profile;
    let one = |((stack, task, on), (samples, weight)): ((_, usize, Option<u32>), (u64, u64))| {
        let task = profile.tasks.get(task);
        let mut label = Vec::new();
        label.extend(task.map(|task| Label { key: name, text: strings.id(&task.name), number: 0 }));
        let numbers = [(pid, task.and_then(|task| task.pid)), (tid, task.and_then(|task| task.tid)), (cpu, on)];
        let numbers = numbers.into_iter().filter_map(|(key, number)| Some((key, number?)));
        label.extend(numbers.map(|(key, number)| Label { key, text: 0, number: number.into() }));
        SampleProto {
            location_id: profile.stacks.frame_ids(stack).map(location_id).collect(),
            value: vec![signed(samples), signed(weight)],
            label,
        }
    };
    totals.into_iter().map(one).collect()
}

/// Adds a location and a function for each frame, and a mapping for each file.
fn files(selection: &Selection<'_>, proto: &mut Proto, strings: &mut Strings) {
    let mut mappings: HashMap<i64, u64> = HashMap::new();
    for (frame, id) in selection.profile.stacks.all_frames().iter().zip(1..) {
        let file = match (&frame.module, frame.mode) {
            (Some(module), _) => module,
            (None, Mode::Kernel) => "[kernel]",
            (None, Mode::User) => "[unknown]",
            (None, Mode::Other) => "[guest]",
        };
        let filename = strings.id(file);
        let next = mappings.len() as u64 + 1;
        let mapping_id = *mappings.entry(filename).or_insert(next);
        if mapping_id == next {
            proto.mapping.push(Mapping { id: next, filename, has_functions: true });
        }
        let name = strings.id(&frame.name);
        proto.function.push(Function { id, name, system_name: name, filename });
        proto.location.push(Location { id, mapping_id, line: vec![Line { function_id: id }] });
    }
}

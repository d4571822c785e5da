//! Recordings of any bytes, and recordings of valid parts in any order. A recording that can be read must have
//! consistent indexes, and each exporter must write it: as many samples as the recording has, and JSON that parses.
#![no_main]
#![allow(dead_code, clippy::expect_used, reason = "not every target uses all of the shared module")]

mod shared;

use std::io::Cursor;

use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use vpmu::abi::{KIND_EXIT_TRACE, KIND_EXITS, KIND_MARK, KIND_SOFTWARE};
use vpmu_perfdata::{
    BuildId, Context, Event, FINISHED_ROUND, Fields, Layout, Rate, Record, SAMPLE_FIELDS, SAMPLE_RAW, append,
    event_type,
};
use vpmu_profile::{By, Format, Names, Options, Profile, Selection, Weight};

use crate::shared::input::{half, number, once_in};

const SAMPLE_CALLCHAIN: u64 = 1 << 5;
const FORMATS: [Format; 5] = [Format::Folded, Format::Svg, Format::Firefox, Format::Pprof, Format::Perfetto];
const TEXTS: [&str; 7] =
    ["", "sh", "/bin/sh", "[vdso]", "[kernel.kallsyms]_text", "probe [virtio_pmu]", "a;b\x1b[2J\"<\\\u{fc}"];

/// A small number of a task, or any number.
fn task(input: &mut Unstructured<'_>) -> Result<u32> {
    if once_in(input, 20)? { half(input) } else { input.int_in_range(0..=3) }
}

fn address(input: &mut Unstructured<'_>) -> Result<u64> {
    Ok(match input.int_in_range(0..=7)? {
        0 => number(input)?,
        // PERF_CONTEXT_*.
        1 => u64::MAX - *input.choose(&[127_u64, 511, 4094, 2047])?,
        2..=4 => 0x1000 * input.int_in_range(0..=3)? + input.int_in_range(0..=9)?,
        _ => 0xffff_ffff_8100_0000 + input.int_in_range(0..=0x300)?,
    })
}

fn event(input: &mut Unstructured<'_>, id: u64) -> Result<Event> {
    let names = ["task-clock", "marks-0", "marks-1", "exits", "a-"];
    let rates =
        [None, Some(Rate::Period(0)), Some(Rate::Period(1000)), Some(Rate::Frequency(0)), Some(Rate::Frequency(99))];
    Ok(Event {
        name: (*input.choose(&names)?).to_owned(),
        kind: event_type(*input.choose(&[KIND_SOFTWARE, KIND_MARK, KIND_EXITS, KIND_EXIT_TRACE])?),
        config: input.int_in_range(0..=2)?,
        rate: *input.choose(&rates)?,
        sample_type: SAMPLE_FIELDS
            | *input.choose(&[0, SAMPLE_CALLCHAIN, SAMPLE_RAW, SAMPLE_CALLCHAIN | SAMPLE_RAW])?,
        flags: 0,
        id,
    })
}

/// Appends a record of an event.
fn record(input: &mut Unstructured<'_>, event: &Event, bytes: &mut Vec<u8>) -> Result<()> {
    let context = Context { pid: task(input)?, tid: task(input)?, time: number(input)?, cpu: task(input)? };
    let Context { pid, tid, time, .. } = context;
    let name = *input.choose(&TEXTS)?;
    let record = match input.int_in_range(0..=9)? {
        0 => Record::comm(pid, tid, name, input.arbitrary()?),
        1 => Record {
            misc: input.int_in_range(0..=5)?,
            ..Record::map(pid, address(input)?, number(input)?, address(input)?, name)
        },
        2 => Record::fork((task(input)?, task(input)?), (pid, tid), time),
        3 => Record::function(address(input)?, half(input)?, name),
        4 => Record::lost(number(input)?, number(input)?),
        5 => Record::throttle(number(input)?, time),
        6 => {
            let length = input.int_in_range(0..=8)?;
            let words = (0..length).map(|_| number(input)).collect::<Result<Vec<u64>>>()?;
            append(bytes, half(input)?, input.arbitrary()?, &words, &event.trailer(&context));
            return Ok(());
        }
        _ => {
            let length = input.int_in_range(0..=6)?;
            let chain = (0..length).map(|_| address(input)).collect::<Result<Vec<u64>>>()?;
            let raw = vec![input.arbitrary()?; input.int_in_range(0..=70)?];
            let (ip, mode, addr) = (address(input)?, input.int_in_range(0..=5)?, number(input)?);
            event
                .sample(&Fields { context, ip, mode, addr, period: number(input)?, chain: &chain, raw: &raw })
                .append(bytes, &[]);
            return Ok(());
        }
    };
    record.append(bytes, &event.trailer(&context));
    Ok(())
}

/// Composes a file. Its bytes are sometimes damaged at one place.
fn file(input: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    let count = input.int_in_range(1..=4)?;
    let events = (1..=count).map(|id| event(input, id)).collect::<Result<Vec<Event>>>()?;
    let mut records = Vec::new();
    let build_ids = vec![BuildId { path: "/bin/sh".to_owned(), id: vec![7; input.int_in_range(0..=24)?] }];
    let (damage, at) = (input.ratio(1, 4)?, input.arbitrary::<u32>()? as usize);
    let value = input.arbitrary()?;
    while !input.is_empty() {
        // The bytes have run out.
        let event = input.choose(&events)?.clone();
        if record(input, &event, &mut records).is_err() {
            break;
        }
        if once_in(input, 30)? {
            FINISHED_ROUND.append(&mut records, &[]);
        }
    }
    FINISHED_ROUND.append(&mut records, &[]);
    let layout =
        Layout { events, arch: "x86_64".to_owned(), command: vec!["vperf".to_owned()], build_ids, ..Layout::default() };
    let size = records.len() as u64;
    let mut file = [layout.head(size), records, layout.tail(size)].concat();
    let length = file.len();
    if let Some(byte) = file.get_mut(at % length).filter(|_| damage) {
        *byte = value;
    }
    Ok(file)
}

fn export(profile: &Profile, options: &Options) {
    let Ok(selection) = Selection::new(profile, options) else {
        return;
    };
    for format in FORMATS {
        let mut bytes = Vec::new();
        format.write(&selection, &mut bytes).expect("memory takes everything");
        match format {
            Format::Folded if options.weight == Weight::Samples => {
                let text = String::from_utf8(bytes).expect("text");
                let weight = |line: &str| line.rsplit_once(' ').and_then(|(_, weight)| weight.parse::<u64>().ok());
                let total: u64 = text.lines().map(|line| weight(line).expect("a stack and its weight")).sum();
                // Events of different kinds can have the same name.
                let mut events = profile.events.iter().filter(|event| event.name == selection.event());
                assert!(events.any(|event| event.samples == total), "{total}");
            }
            Format::Firefox | Format::Perfetto => {
                serde_json::from_slice::<serde_json::Value>(&bytes).expect("JSON");
            }
            _ => {}
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    let Some((&kind, rest)) = bytes.split_first() else {
        return;
    };
    let file = match kind & 1 {
        0 => rest.to_vec(),
        _ => match file(&mut Unstructured::new(rest)) {
            Ok(file) => file,
            Err(_) => return,
        },
    };
    let Ok(profile) = Profile::read(Cursor::new(file), Names::none()) else {
        return;
    };
    let samples: u64 = profile.events.iter().map(|event| event.samples).sum();
    assert_eq!(samples, profile.samples.len() as u64);
    assert!(profile.samples.is_sorted_by_key(|sample| sample.time));
    for sample in &profile.samples {
        assert!(sample.event < profile.events.len() && sample.task < profile.tasks.len());
        assert!(profile.stacks.frames(sample.stack).all(|frame| !frame.name.contains(char::is_control)));
    }
    for by in [By::Task, By::Cpu] {
        for weight in [Weight::Samples, Weight::Period] {
            export(&profile, &Options { event: None, by, weight });
        }
    }
});

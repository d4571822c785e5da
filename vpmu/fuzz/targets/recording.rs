//! Recordings of rings with forged contents. An independent reader must parse the file to its end. It must find as many
//! samples as the summary counts, and no record that perf would act on, such as MMAP or COMM.
#![no_main]
#![allow(dead_code, clippy::expect_used, reason = "not every target uses all of the shared module")]

mod shared;

use std::io::{Cursor, Write};

use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use linux_perf_data::{PerfFileReader, PerfFileRecord};
use vpmu::abi::{
    KIND_EXIT_TRACE, KIND_HARDWARE, KIND_MARK, KIND_RAW, OPEN_BACKWARD, OPEN_ENABLED, READ_ALLOWED, SAMPLE_ALLOWED,
};
use vpmu::source::Rate;
use vpmu::{History, PersistentStatus};
use vpmu_recorder::{Recording, Summary, Symbols, histories};

use crate::shared::input::{number, once_in};
use crate::shared::stage::{Stage, features};
use crate::shared::{driver_ops, host_ops};

const MMAP: u32 = 1;
const LOST: u32 = 2;
const COMM: u32 = 3;
const THROTTLE: u32 = 5;
const UNTHROTTLE: u32 = 6;
const SAMPLE: u32 = 9;
const KSYMBOL: u32 = 17;
/// Symbols at addresses that [`address`] makes.
const SYMBOLS: &[u8] = b"\
ffffffff81000000 T startup_64
ffffffff81000100 t do_idle
ffffffff81000180 T panic
ffffffff81000200 D not_code
";

thread_local! {
    static NAMES: Symbols = names();
}

/// Opens a file with the symbols of a guest's kernel.
fn names() -> Symbols {
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    file.write_all(SYMBOLS).expect("written");
    // `Symbols` keeps the file open after it is unlinked.
    Symbols::open(file.path()).expect("symbols")
}

fn address(input: &mut Unstructured<'_>) -> Result<u64> {
    Ok(match input.int_in_range(0..=3)? {
        0 => number(input)?,
        1 => 0x40_0000 + input.int_in_range(0..=0x1000)?,
        _ => 0xffff_ffff_8100_0000 + input.int_in_range(0..=0x300)?,
    })
}

fn status(input: &mut Unstructured<'_>, id: u64) -> Result<PersistentStatus> {
    let rates = [Some(Rate::Period(1)), Some(Rate::Period(1000)), Some(Rate::Frequency(100)), None];
    let names = ["marks", "a", "clock-1", "event12"];
    let kind = *input.choose(&[KIND_MARK, KIND_HARDWARE, KIND_RAW, KIND_EXIT_TRACE])?;
    Ok(PersistentStatus {
        id,
        name: (*input.choose(&names)?).to_owned(),
        event: "mark=7".to_owned(),
        operator: input.arbitrary()?,
        vcpu: input.int_in_range(0..=3)?,
        kind,
        config: match kind {
            // One of perf's generic events.
            KIND_HARDWARE => input.int_in_range(0..=9)?,
            _ => number(input)?,
        },
        rate: *input.choose(&rates)?,
        flags: OPEN_ENABLED | u32::from(input.arbitrary::<u8>()?) | OPEN_BACKWARD,
        engine: input.int_in_range(0..=2)?,
        sample_type: match input.int_in_range(0..=3)? {
            0 => 0x1_018f,
            1 => 0x3ff,
            _ => input.arbitrary::<u64>()? & SAMPLE_ALLOWED,
        },
        read_format: u64::from(input.arbitrary::<u8>()?) & READ_ALLOWED,
        regs_user: number(input)?,
        regs_intr: number(input)?,
        stack_user: input.arbitrary::<u16>()?.into(),
        state: input.int_in_range(-2..=1)?,
        count: number(input)?,
        time_enabled: number(input)?,
        time_running: number(input)?,
        lost: input.int_in_range(0..=9)?,
        pages: *input.choose(&[None, Some(1), Some(16)])?,
        window: input.arbitrary()?,
    })
}

/// Makes the value of one field of a sample, for fields that are one word long. `field` is the number of the field's
/// bit in the sample type. In most cases, the value is valid for `event`.
fn word(input: &mut Unstructured<'_>, field: u32, event: &PersistentStatus) -> Result<u64> {
    if once_in(input, 30)? {
        return number(input);
    }
    match field {
        // IDENTIFIER, ID, STREAM_ID.
        16 | 6 | 9 => Ok(event.id),
        // CPU.
        7 => Ok(event.vcpu.into()),
        // IP, ADDR.
        0 | 3 => address(input),
        _ => number(input),
    }
}

/// Makes the body of a sample: the fields, counts and call chain that `event` samples.
fn sample(input: &mut Unstructured<'_>, event: &PersistentStatus) -> Result<Vec<u64>> {
    let mut words = Vec::new();
    for field in [16, 0, 1, 2, 3, 6, 9, 7, 8] {
        if event.sample_type & 1 << field != 0 {
            words.push(word(input, field, event)?);
        }
    }
    // READ.
    if event.sample_type & 1 << 4 != 0 {
        let bits = |mask: u64| (event.read_format & mask).count_ones();
        let members = match event.read_format & 1 << 3 {
            0 => 1,
            _ => {
                let members = input.int_in_range(0..=4)?;
                words.push(members.into());
                members
            }
        };
        for _ in 0..bits(3) + members * (1 + bits(0x14)) {
            words.push(number(input)?);
        }
    }
    // CALLCHAIN.
    if event.sample_type & 1 << 5 != 0 {
        let length = input.int_in_range(0..=6)?;
        words.push(length);
        for _ in 0..length {
            words.push(address(input)?);
        }
    }
    Ok(words)
}

fn record(input: &mut Unstructured<'_>, event: &PersistentStatus) -> Result<Vec<u8>> {
    let (kind, words) = match input.int_in_range(0..=7)? {
        0 => {
            let mut words = vec![0; input.int_in_range(0..=8)?];
            for word in &mut words {
                *word = number(input)?;
            }
            (input.int_in_range(0..=90)?, words)
        }
        1 => {
            // Include MMAP and COMM: records of these types must not reach the file, whatever they contain.
            let kind = *input.choose(&[THROTTLE, UNTHROTTLE, MMAP, COMM])?;
            (kind, vec![number(input)?, word(input, 6, event)?, event.id])
        }
        2 => (LOST, vec![event.id, number(input)?]),
        _ => (SAMPLE, sample(input, event)?),
    };
    let misc = u64::from(input.int_in_range(0..=3_u8)?);
    let size = if once_in(input, 40)? { number(input)? & 0xffff } else { 8 + 8 * words.len() as u64 };
    let header = u64::from(kind) | misc << 32 | size << 48;
    let mut bytes = header.to_le_bytes().to_vec();
    bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    Ok(bytes)
}

/// Makes histories with forged records, without a device.
fn forged(input: &mut Unstructured<'_>, into: &mut Vec<History>) -> Result<()> {
    for id in 1..=input.int_in_range(1..=3)? {
        let event = status(input, id)?;
        into.push(History { event: event.clone(), records: Vec::new() });
        while !once_in(input, 12)? && !input.is_empty() {
            let record = record(input, &event)?;
            if let Some(history) = into.last_mut() {
                history.records.extend(record);
            }
        }
    }
    Ok(())
}

/// Makes a device fill its rings by arbitrary operations. Some of the operations are writes of the guest to the rings.
fn device(stage: &mut Stage, input: &mut Unstructured<'_>) -> Result<()> {
    stage.activate(features(input)?);
    while !input.is_empty() {
        match input.int_in_range(0..=7)? {
            0..=2 => host_ops::marks(stage, input)?,
            3 => host_ops::persist(stage, input)?,
            4..=5 => driver_ops::write_window(stage, input)?,
            6 => driver_ops::step(stage, input)?,
            _ => host_ops::step(stage, input)?,
        }
    }
    Ok(())
}

/// Reads a recording with an independent reader.
fn read(file: &[u8], summary: &Summary) {
    let PerfFileReader { mut perf_file, mut record_iter } =
        PerfFileReader::parse_file(Cursor::new(file)).expect("a perf.data file");
    assert_eq!(perf_file.event_attributes().len(), summary.events);
    assert_eq!(perf_file.hostname().expect("readable"), None);
    let mut samples = 0;
    while let Some(record) = record_iter.next_record(&mut perf_file).expect("whole") {
        let PerfFileRecord::EventRecord { record, .. } = record else {
            continue;
        };
        record.parse().expect("a record with the layout of its event");
        match record.record_type.0 {
            SAMPLE => samples += 1,
            LOST | THROTTLE | UNTHROTTLE | KSYMBOL => {}
            other => panic!("perf would act on a record of type {other}"),
        }
    }
    assert_eq!(samples, summary.samples);
}

fn check(histories: &[History], named: bool) {
    let mut file = Vec::new();
    let mut recording = Recording::new(histories);
    if named {
        NAMES.with(|names| recording.name_functions(names).expect("names"));
    }
    let summary = recording.write(&mut file).expect("memory takes it all");
    if summary.events > 0 {
        read(&file, &summary);
    }
}

fuzz_target!(|input: &[u8]| {
    let mut input = Unstructured::new(input);
    let named = input.arbitrary().unwrap_or(false);
    if input.arbitrary().unwrap_or(false) {
        let Ok(mut stage) = Stage::new(&mut input) else {
            return;
        };
        // Ends when the bytes run out.
        let _ = device(&mut stage, &mut input);
        stage.leave_all();
        check(&histories(&stage.fixture.vpmu, |_| true, 64 << 20), named);
        stage.finish();
    } else {
        let mut histories = Vec::new();
        let _ = forged(&mut input, &mut histories);
        check(&histories, named);
    }
});

use proptest::prelude::*;

use super::*;
use crate::attr::{
    FORMAT_ALL, FORMAT_LOST, SAMPLE_CALLCHAIN, SAMPLE_DEFAULT, SAMPLE_ID, SAMPLE_IDENTIFIER, SAMPLE_IP, SAMPLE_READ,
    SAMPLE_REGS_INTR, SAMPLE_REGS_USER, SAMPLE_STACK_USER, SAMPLE_TID, SAMPLE_TIME,
};

const CONTEXT_KERNEL: u64 = 128_u64.wrapping_neg();
const CONTEXT_USER: u64 = 512_u64.wrapping_neg();

fn header(record_type: u32, misc: u16, words: usize) -> Header {
    Header { kind: record_type, misc, size: u16::try_from(8 + 8 * words).unwrap() }
}

fn plain(sample_type: u64) -> Layout {
    Layout { sample_type, ..Layout::default() }
}

fn parse(record_type: u32, body: &[u64], layout: &Layout) -> Result<Record, RecordError> {
    Record::parse(header(record_type, 2, body.len()), body, layout)
}

fn everything() -> Layout {
    Layout {
        sample_type: layout::MASKS.all,
        read_format: FORMAT_ALL | FORMAT_GROUP | FORMAT_LOST,
        sample_id_all: true,
        regs_user: 0b1010,
        regs_intr: 0b1,
    }
}

#[test]
fn traces_report_the_offsets_of_their_bytes() {
    let aux = |flags| match parse(11, &[4096, 128, flags], &plain(0)) {
        Ok(Record::Aux(aux)) => aux,
        other => panic!("{other:?}"),
    };
    assert_eq!((aux(0).offset, aux(0).size), (4096, 128));
    for (flags, expected) in [
        (1, [true, false, false, false]),
        (2, [false, true, false, false]),
        (4, [false, false, true, false]),
        (8, [false, false, false, true]),
    ] {
        let aux = aux(flags);
        let is = [aux.is_truncated(), aux.overwrites(), aux.is_partial(), aux.has_collision()];
        assert_eq!(is, expected);
    }
    assert_eq!(parse(12, &[8 << 32 | 7], &plain(0)), Ok(Record::ItraceStart { pid: 7, tid: 8, who: None }));
    for (record_type, words) in [(11, 2), (12, 0)] {
        let short = parse(record_type, &[1; 3][..words], &plain(0));
        assert!(matches!(short, Err(RecordError::Short { .. })), "{short:?}");
    }
    // With `sample_id_all`, any record ends with the trailer.
    let layout = Layout { sample_id_all: true, ..plain(SAMPLE_TID) };
    let Ok(Record::Aux(aux)) = parse(11, &[0, 64, 0, 8 << 32 | 7], &layout) else { panic!() };
    assert_eq!(aux.who.map(|who| (who.pid, who.tid)), Some((7, 8)));
}

#[test]
fn sample_fields_are_in_perf_order() {
    let body = [0x1000, 8 << 32 | 7, 99, 42, 1, 50];
    let record = parse(9, &body, &plain(SAMPLE_DEFAULT)).unwrap();
    let sample =
        Sample { ip: 0x1000, pid: 7, tid: 8, time: 99, cpu: 1, period: 50, id: 42, user: true, ..Sample::default() };
    assert_eq!(record, Record::Sample(sample));
}

#[test]
fn sample_with_every_field_parses() {
    let body = [
        5,
        0x1000,
        8 << 32 | 7,
        99,
        0xadd,
        42,
        43,
        1,
        50, // up to the period
        2,
        20,
        30,
        10,
        41,
        1,
        11,
        42,
        2, // the group's counts
        3,
        CONTEXT_USER,
        0x1000,
        0x2000, // the chain
        2,
        0xa,
        0xb, // user registers
        16,
        0x0807_0605_0403_0201,
        0x100f_0e0d_0c0b_0a09,
        9, // stack
        2,
        0xc, // registers
    ];
    let Ok(Record::Sample(sample)) = parse(9, &body, &everything()) else {
        panic!("{:?}", parse(9, &body, &everything()))
    };
    let reading = |value, id, lost| Reading { value, time_enabled: 20, time_running: 30, id, lost };
    assert_eq!((sample.addr, sample.id, sample.stream_id), (0xadd, 42, 43));
    assert_eq!(sample.counts, [reading(10, 41, 1), reading(11, 42, 2)]);
    assert_eq!(sample.chain, [CONTEXT_USER, 0x1000, 0x2000]);
    let user = sample.user_registers.unwrap();
    assert_eq!((user.get(1), user.get(3)), (Some(0xa), Some(0xb)));
    assert_eq!((user.get(0), user.get(64)), (None, None));
    assert_eq!(sample.user_stack, [1, 2, 3, 4, 5, 6, 7, 8, 9]);
    assert_eq!(sample.registers.unwrap().get(0), Some(0xc));
    for words in 0..body.len() {
        let short = parse(9, &body[..words], &everything());
        assert!(matches!(short, Err(RecordError::Short { .. })), "{words}");
    }
}

#[test]
fn absent_registers_and_stack_take_no_room() {
    let layout = Layout { sample_type: SAMPLE_REGS_USER | SAMPLE_STACK_USER | SAMPLE_REGS_INTR, ..everything() };
    let Ok(Record::Sample(sample)) = parse(9, &[0, 0, 1, 7], &layout) else { panic!() };
    assert_eq!((sample.user_registers, sample.user_stack), (None, vec![]));
    assert_eq!(sample.registers.unwrap().values, [7]);
}

#[test]
fn chains_name_the_mode_of_each_address() {
    let frames = |chain: &[u64]| {
        let sample = Sample { ip: 9, user: true, chain: chain.to_vec(), ..Sample::default() };
        sample.frames().iter().map(|frame| (frame.ip, frame.user)).collect::<Vec<_>>()
    };
    assert_eq!(frames(&[CONTEXT_KERNEL, 1, 2, CONTEXT_USER, 3]), [(1, false), (2, false), (3, true)]);
    assert_eq!(frames(&[]), [(9, true)], "without a chain");
    assert_eq!(frames(&[CONTEXT_KERNEL]), [(9, true)], "an empty one");
    let guest = 2048_u64.wrapping_neg();
    assert_eq!(frames(&[guest, 1, CONTEXT_USER, 3]), [(3, true)]);
}

#[test]
fn identifier_substitutes_missing_id() {
    let record = parse(9, &[5], &plain(SAMPLE_IDENTIFIER)).unwrap();
    let Record::Sample(sample) = record else { panic!("{record:?}") };
    assert_eq!(sample.id, 5);
}

#[test]
fn records_cut_short_are_errors() {
    for words in 0..6 {
        let result = parse(9, &[0; 6][..words], &plain(SAMPLE_DEFAULT));
        let bytes = 8 + 8 * words;
        let record_type = 9;
        assert_eq!(result, Err(RecordError::Short { record_type, bytes }));
    }
    for (record_type, fields) in [(2, 2), (5, 3), (6, 3), (8, 2)] {
        let short = parse(record_type, &[0; 3][..fields - 1], &Layout::default());
        assert!(matches!(short, Err(RecordError::Short { .. })), "{record_type}");
        assert!(parse(record_type, &[0; 3][..fields], &Layout::default()).is_ok());
    }
}

#[test]
fn other_types_and_fields_are_not_guessed() {
    let record = parse(77, &[5], &Layout::default()).unwrap();
    let unknown = Record::Unknown { record_type: 77, misc: 2, body: vec![5] };
    assert_eq!(record, unknown);
    let raw = 1 << 10;
    assert_eq!(parse(9, &[5], &plain(raw)), Err(RecordError::SampleType(raw)));
}

#[test]
fn losses_are_recorded_with_and_without_their_owner() {
    let lost = parse(2, &[42, 17], &plain(SAMPLE_DEFAULT)).unwrap();
    let (id, lost_records) = (42, 17);
    let expected = |who| Record::Lost { id, lost: lost_records, who };
    assert_eq!(lost, expected(None));
    let layout = Layout {
        sample_type: SAMPLE_IP | SAMPLE_TID | SAMPLE_TIME | SAMPLE_ID | SAMPLE_IDENTIFIER,
        sample_id_all: true,
        ..Layout::default()
    };
    let lost = parse(2, &[42, 17, 8 << 32 | 7, 99, 42, 42], &layout).unwrap();
    let who = SampleId { pid: 7, tid: 8, time: 99, id: 42, ..SampleId::default() };
    assert_eq!(lost, expected(Some(who)));
    let short = parse(2, &[42, 17, 1, 1], &layout);
    assert!(matches!(short, Err(RecordError::Short { .. })), "{short:?}");
}

#[test]
fn throttling_names_the_event_and_the_time() {
    let throttle = Throttle { time: 1, id: 2, stream_id: 3, who: None };
    let layout = Layout::default();
    assert_eq!(parse(5, &[1, 2, 3], &layout), Ok(Record::Throttle(throttle)));
    assert_eq!(parse(6, &[1, 2, 3], &layout), Ok(Record::Unthrottle(throttle)));
}

#[test]
fn read_record_of_child_has_counts_of_group() {
    let layout = Layout {
        sample_type: SAMPLE_TIME,
        sample_id_all: true,
        read_format: FORMAT_ALL | FORMAT_GROUP,
        ..Layout::default()
    };
    let record = parse(8, &[8 << 32 | 7, 10, 20, 30, 40, 99], &layout).unwrap();
    let Record::Read { pid: 7, tid: 8, count, who: Some(who) } = record else { panic!("{record:?}") };
    assert_eq!((count.value, count.time_running, count.id), (10, 30, 40));
    assert_eq!(who.time, 99);
}

proptest! {
    /// Parsing arbitrary bytes terminates without a panic, and returns no more data than they hold.
    #[test]
    fn random_record_neither_panics_nor_grows(
        record_type in 0u32..12,
        misc: u16,
        body in prop::collection::vec(prop_oneof![any::<u64>(), 0u64..20], 0..40),
        sample_type in 0u64..=layout::MASKS.all,
        read_format in 0u64..32,
        sample_id_all: bool,
        regs_user: u64,
        regs_intr in 0u64..0x100,
    ) {
        let layout = Layout { sample_type, read_format, sample_id_all, regs_user, regs_intr };
        let record = Record::parse(header(record_type, misc, body.len()), &body, &layout);
        if let Ok(Record::Sample(sample)) = record {
            let words = sample.chain.len() + sample.counts.len() + sample.user_stack.len() / 8;
            prop_assert!(words <= body.len());
            prop_assert!(sample.frames().len() <= body.len().max(1));
            prop_assert!(sample.counts.is_empty() == (sample_type & SAMPLE_READ == 0)
                || read_format & FORMAT_GROUP != 0);
            prop_assert!(sample.chain.is_empty() || sample_type & SAMPLE_CALLCHAIN != 0);
        }
    }
}

//! Tests that every field is at the same position as in perf's records.

use vpmu_perf::field::{SAMPLE_ADDR, SAMPLE_IP, SAMPLE_PERIOD};

use super::*;
use crate::abi::SAMPLE_ALLOWED;

const ORIGIN: SampleId = SampleId { pid: 7, tid: 8, time: 99, id: 3, stream_id: 4, vcpu: 2 };
const TASK: u64 = 8 << 32 | 7;

const MEMBERS: [Member; 2] = [Member { value: 100, id: 3, lost: 1 }, Member { value: 200, id: 5, lost: 2 }];

fn sample() -> Sample<'static> {
    Sample {
        misc: MODE_USER,
        ip: 0x1111,
        addr: 0x3333,
        period: 10,
        read: Reading { time_enabled: 50, time_running: 40, members: &MEMBERS },
        chain: &[u64::MAX - 511, 0x1111, 0x2222],
        regs_user: Some(Regs { abi: 2, values: &[11, 12] }),
        stack: Some(&[1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0]),
        regs_intr: Some(Regs { abi: 2, values: &[21] }),
    }
}

const LAYOUT: Layout = Layout {
    sample_type: SAMPLE_ALLOWED,
    read_format: 0,
    regs_user: 0b11,
    regs_intr: 1 << 8,
    stack_user: 24,
    sample_id_all: true,
};

/// Returns the record's words as numbers, regardless of the host's byte order.
fn words(record: &[u64]) -> Vec<u64> {
    record.iter().map(|&word| u64::from_le(word)).collect()
}

fn header(kind: u32, misc: u16, words: usize) -> u64 {
    u64::from(kind) | u64::from(misc) << 32 | (words as u64 * 8) << 48
}

/// Checks the header of a sample, and returns the words after it.
fn body(layout: &Layout, sample: &Sample<'_>) -> Vec<u64> {
    let mut record = Record::default();
    let all = words(record.sample(layout, &ORIGIN, sample).expect("short"));
    assert_eq!(all[0], header(TYPE_SAMPLE, sample.misc, all.len()));
    all[1..].to_vec()
}

/// The words that each bit of `sample_type` adds to the record of [`sample`], in perf's order.
fn parts() -> Vec<(u64, Vec<u64>)> {
    vec![
        (SAMPLE_IDENTIFIER, vec![3]),
        (SAMPLE_IP, vec![0x1111]),
        (SAMPLE_TID, vec![TASK]),
        (SAMPLE_TIME, vec![99]),
        (SAMPLE_ADDR, vec![0x3333]),
        (SAMPLE_ID, vec![3]),
        (SAMPLE_STREAM_ID, vec![4]),
        (SAMPLE_CPU, vec![2]),
        (SAMPLE_PERIOD, vec![10]),
        (SAMPLE_READ, vec![100]),
        (SAMPLE_CALLCHAIN, vec![3, u64::MAX - 511, 0x1111, 0x2222]),
        (SAMPLE_REGS_USER, vec![2, 11, 12]),
        (SAMPLE_STACK_USER, vec![24, 1, 2, 0, 11]),
        (SAMPLE_REGS_INTR, vec![2, 21]),
    ]
}

#[test]
fn every_combination_of_fields_is_in_perfs_order() {
    let parts = parts();
    let all = parts.iter().fold(0, |bits, (bit, _)| bits | bit);
    assert_eq!(all, SAMPLE_ALLOWED, "a part for each allowed bit");
    for chosen in 0..1_u32 << parts.len() {
        let (mut sample_type, mut expected) = (0, Vec::<u64>::new());
        for (index, (bit, fields)) in parts.iter().enumerate() {
            if chosen & 1 << index != 0 {
                sample_type |= bit;
                expected.extend(fields);
            }
        }
        let layout = Layout { sample_type, ..LAYOUT };
        assert_eq!(body(&layout, &sample()), expected, "{sample_type:#x}");
    }
}

#[test]
fn readings_in_every_format() {
    for read_format in 0..32_u64 {
        let has = |bit: u32| read_format & 1 << bit != 0;
        let mut expected = vec![if has(3) { 2 } else { 100 }];
        expected.extend(has(0).then_some(50));
        expected.extend(has(1).then_some(40));
        for (index, member) in MEMBERS.iter().enumerate() {
            if has(3) {
                expected.push(member.value);
            } else if index > 0 {
                break;
            }
            expected.extend(has(2).then_some(member.id));
            expected.extend(has(4).then_some(member.lost));
        }
        let layout = Layout { sample_type: SAMPLE_READ, read_format, ..LAYOUT };
        assert_eq!(body(&layout, &sample()), expected, "{read_format:#x}");
        assert_eq!(read_size(read_format, 2), expected.len() * 8);
    }
}

#[test]
fn kernel_thread_has_neither_registers_nor_stack() {
    let sample = Sample { regs_user: None, stack: None, regs_intr: None, ..sample() };
    let layout = Layout { sample_type: SAMPLE_REGS_USER | SAMPLE_STACK_USER | SAMPLE_REGS_INTR, ..LAYOUT };
    assert_eq!(body(&layout, &sample), [0, 0, 0]);
    // With an `abi` of zero, the record has no registers, even if `values` has some.
    let none = Some(Regs { abi: 0, values: &[1, 2] });
    let sample = Sample { regs_user: none, ..sample };
    assert_eq!(body(&layout, &sample), [0, 0, 0]);
}

#[test]
fn registers_are_as_many_as_the_mask_has_bits() {
    for values in [&[][..], &[11], &[11, 12, 13]] {
        let regs = Some(Regs { abi: 1, values });
        let sample = Sample { regs_user: regs, ..sample() };
        let layout = Layout { sample_type: SAMPLE_REGS_USER, ..LAYOUT };
        let at = |index| values.get(index).copied().unwrap_or(0);
        assert_eq!(body(&layout, &sample), [1, at(0), at(1)]);
    }
}

#[test]
fn stack_is_cut_to_the_size_of_a_record() {
    let stack = vec![0xff; 65_528];
    let sample = Sample { stack: Some(&stack), ..sample() };
    let layout = Layout { sample_type: SAMPLE_ALLOWED, stack_user: 65_528, ..LAYOUT };
    let mut record = Record::default();
    let words = words(record.sample(&layout, &ORIGIN, &sample).expect("cut"));
    assert_eq!(words.len() * 8, RECORD_MAX);
    let regs = &words[words.len() - 2..];
    assert_eq!(regs, [2, 21], "the words after the stack");
    let real = words[words.len() - 3];
    let size = words.iter().position(|&word| word == real).expect("size");
    assert_eq!(words.len() - 3 - size - 1, usize::try_from(real / 8).expect("small"));
}

#[test]
fn record_too_long_for_its_header_is_refused() {
    let chain = vec![1; 8190];
    let layout = Layout { sample_type: SAMPLE_CALLCHAIN | SAMPLE_STACK_USER, ..LAYOUT };
    let mut record = Record::default();
    let sample = Sample { chain: &chain, ..sample() };
    assert_eq!(record.sample(&layout, &ORIGIN, &sample), Err(TooLong));
    let members = vec![Member::default(); 8191];
    let reading = Reading { members: &members, ..Reading::default() };
    let layout = Layout { read_format: 8, ..LAYOUT };
    assert_eq!(record.read(&layout, &ORIGIN, &reading), Err(TooLong));
}

#[test]
fn records_that_are_no_samples_end_with_who_and_when() {
    let trailer = [
        (SAMPLE_TID, TASK),
        (SAMPLE_TIME, 99),
        (SAMPLE_ID, 3),
        (SAMPLE_STREAM_ID, 4),
        (SAMPLE_CPU, 2),
        (SAMPLE_IDENTIFIER, 3),
    ];
    let reading = sample().read;
    for chosen in 0..1_u32 << trailer.len() {
        for sample_id_all in [false, true] {
            // Fields that trailers lack.
            let mut sample_type = SAMPLE_IP | SAMPLE_CALLCHAIN;
            let mut ends = Vec::<u64>::new();
            for (index, (bit, value)) in trailer.iter().enumerate() {
                if chosen & 1 << index != 0 {
                    sample_type |= bit;
                    ends.extend(sample_id_all.then_some(*value));
                }
            }
            let layout = Layout { sample_type, sample_id_all, ..LAYOUT };
            let mut record = Record::default();
            let expected = |kind, fields: &[u64]| {
                let size = 1 + fields.len() + ends.len();
                [&[header(kind, 0, size)], fields, &ends].concat()
            };
            let lost = words(record.lost(&layout, &ORIGIN, 17));
            assert_eq!(lost, expected(2, &[3, 17]));
            let throttle = words(record.throttle(&layout, &ORIGIN));
            assert_eq!(throttle, expected(5, &[99, 3, 4]));
            let unthrottle = words(record.unthrottle(&layout, &ORIGIN));
            assert_eq!(unthrottle, expected(6, &[99, 3, 4]));
            let read = words(record.read(&layout, &ORIGIN, &reading).expect("short"));
            assert_eq!(read, expected(8, &[TASK, 100]));
        }
    }
}

#[test]
fn pieces_of_areas_and_beginnings_of_traces() {
    let mut record = Record::default();
    let chunk = Chunk { offset: 4096, size: 192, flags: 5 };
    let plain = Layout { sample_id_all: false, ..LAYOUT };
    let aux = words(record.aux(&plain, &ORIGIN, &chunk));
    assert_eq!(aux, [header(TYPE_AUX, 0, 4), 4096, 192, 5]);
    let begun = words(record.itrace_start(&plain, &ORIGIN));
    assert_eq!(begun, [header(TYPE_ITRACE_START, 0, 2), TASK]);
    assert_eq!((TYPE_AUX, TYPE_ITRACE_START), (11, 12));
    // With task and time at the end.
    let end = [TASK, 99, 3, 4, 2, 3];
    let aux = words(record.aux(&LAYOUT, &ORIGIN, &chunk));
    assert_eq!((aux[0], &aux[4..]), (header(TYPE_AUX, 0, 10), &end[..]));
    let begun = words(record.itrace_start(&LAYOUT, &ORIGIN));
    assert_eq!((begun[0], &begun[2..]), (header(TYPE_ITRACE_START, 0, 8), &end[..]));
}

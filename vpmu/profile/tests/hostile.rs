//! Damaged and forged files: each is read, or refused with an error that names a remedy. The reader neither panics nor
//! allocates what a header asks for.
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "tests fail by panicking")]

mod common;

use std::io::Cursor;

use common::{CHAINS, event, guest, history, put, record, recorded, sample, with_records, word};
use proptest::prelude::*;
use vpmu::abi;
use vpmu_profile::{Format, Names, Options, Profile, ReadError, Selection};

fn read(bytes: Vec<u8>) -> Result<Profile, ReadError> {
    Profile::read(Cursor::new(bytes), Names::none())
}

fn refused(bytes: Vec<u8>) -> String {
    vpmu_errors::chain(&read(bytes).expect_err("a refusal"))
}

/// The offset of the first record of type `kind`.
fn first(bytes: &[u8], kind: u32) -> usize {
    let (mut at, end) = (word(bytes, 40), word(bytes, 40) + word(bytes, 48));
    while at < end {
        if bytes[at..at + 4] == kind.to_le_bytes() {
            return at;
        }
        at += usize::from(u16::from_le_bytes([bytes[at + 6], bytes[at + 7]]));
    }
    panic!("no record of type {kind}");
}

#[test]
fn other_files_are_refused_with_the_remedy() {
    let mut big_endian = guest();
    big_endian[..8].copy_from_slice(b"2ELIFREP");
    let mut pipe = guest();
    put(&mut pipe, 8, 16);
    let mut unfinished = guest();
    put(&mut unfinished, 48, 0);
    let mut old = guest();
    put(&mut old, 64, 64);
    let mut simpleperf = guest();
    simpleperf[72 + 16] |= 1;
    for (bytes, remedy) in [
        (Vec::new(), "perf record"),
        (b"PERFFILE with an old magic".to_vec(), "perf record"),
        (b"PERFILE2".to_vec(), "copy the file again"),
        (big_endian, "x86-64"),
        (pipe, "perf record -o FILE"),
        (unfinished, "Ctrl-C"),
        (old, "newer perf"),
        (simpleperf, "perf record"),
        (with_records(&[record(81, 0, &[0])]), "without 'perf record -z'"),
        (with_records(&[record(71, 0, &[u64::MAX; 5])]), "without AUX events"),
    ] {
        let error = refused(bytes);
        assert!(error.contains(remedy), "{error}");
    }
}

#[test]
fn file_that_is_cut_anywhere_is_refused() {
    let bytes = guest();
    for length in 8..bytes.len() {
        let error = refused(bytes[..length].to_vec());
        assert!(error.contains("copy the file again"), "{length}: {error}");
    }
}

#[test]
fn sizes_of_the_header_do_not_become_allocations() {
    for at in (8..72).step_by(8) {
        for value in [0, 1, 1 << 40, 1 << 62, u64::MAX] {
            let mut bytes = guest();
            put(&mut bytes, at, value);
            // Some values change nothing that matters.
            let _ = read(bytes);
        }
    }
    let bytes = guest();
    let features = word(&bytes, 40) + word(&bytes, 48);
    for at in features..bytes.len() - 8 {
        for value in [u64::MAX, 1 << 40, u64::from(u32::MAX)] {
            let mut bytes = bytes.clone();
            put(&mut bytes, at, value);
            let _ = read(bytes);
        }
    }
}

#[test]
fn forged_lengths_in_records_are_refused() {
    let mut chain = guest();
    let at = first(&chain, 9);
    // Each sample begins with seven fields of one word.
    put(&mut chain, at + 8 * 8, 1 << 61);
    let mut mapping = record(10, 2 | 1 << 14, &[0; 10]);
    mapping[8 + 32] = 21;
    let short = record(9, 0, &[11, 1]);
    let mut empty = record(9, 0, &[]);
    empty[6] = 0;
    let beyond = {
        let mut record = record(9, 0, &[11]);
        record[7] = 0xff;
        record
    };
    for bytes in
        [chain, with_records(&[mapping]), with_records(&[short]), with_records(&[empty]), with_records(&[beyond])]
    {
        let error = refused(bytes);
        assert!(error.contains("damaged") && error.contains("copy the file again"), "{error}");
    }
}

#[test]
fn events_that_sample_counts_are_refused_by_name() {
    let mut bytes = guest();
    // The sample type of the first event in the list of names, which follows its type, size, configuration and period.
    let features = word(&bytes, 40) + word(&bytes, 48);
    let names = word(&bytes, features + 16);
    let at = names + 8 + 24;
    let sample_type = word(&bytes, at) as u64 | 1 << 4;
    put(&mut bytes, at, sample_type);
    let error = refused(bytes);
    assert!(error.contains("`cpu-clock-0`") && error.contains("record without"), "{error}");
}

#[test]
fn chain_of_any_depth_is_exported() {
    let deep = event(11, "cpu-clock", 0, abi::KIND_SOFTWARE, CHAINS);
    let chain: Vec<u64> = (0..8000).map(|index| 0xffff_ffff_8100_0100 + index % 2 * 0x100).collect();
    let taken = common::Taken { chain: &chain, ..common::TAKEN };
    let profile = read(recorded(&[history(&deep, &[sample(&deep, 1, common::IDLE, taken)])])).unwrap();
    let selection = Selection::new(&profile, &Options::default()).unwrap();
    for format in [Format::Folded, Format::Svg, Format::Firefox, Format::Pprof, Format::Perfetto] {
        format.write(&selection, &mut std::io::sink()).unwrap();
    }
    assert_eq!(profile.stacks.frames(profile.samples[0].stack).count(), 8000);
}

#[test]
fn names_cannot_break_out_of_a_format() {
    let name = "a;b<script>\"&]]>\u{1b}\u{9b}\nc";
    let mut comm = name.as_bytes().to_vec();
    comm.resize(comm.len().next_multiple_of(8) + 8, 0);
    let words: Vec<u64> = comm.chunks_exact(8).map(|chunk| u64::from_le_bytes(chunk.try_into().unwrap())).collect();
    // Process 5, thread 6; the trailer has no id.
    let comm = record(3, 0, &[&[6 << 32 | 5][..], &words, &[0; 5]].concat());
    let clock = event(11, "cpu-clock", 0, abi::KIND_SOFTWARE, CHAINS);
    let profile = read(with_records(&[comm, sample(&clock, 2, 1, common::TAKEN)])).unwrap();
    assert_eq!(profile.tasks[0].name, "a;b<script>\"&]]>c");
    let folded = common::text(&profile, Format::Folded);
    assert_eq!(folded, "a:b<script>\"&]]>c;[unknown] 1\n");
    let svg = common::text(&profile, Format::Svg);
    assert_eq!(svg.matches("<script>").count(), 1);
    assert!(svg.contains("a;b&lt;script&gt;&quot;&amp;]]&gt;c"), "{svg}");
}

proptest! {
    #[test]
    fn changed_bytes_are_read_or_refused(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8)) {
        let mut bytes = guest();
        for (index, byte) in changes {
            let at = index.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(profile) = read(bytes)
            && let Ok(selection) = Selection::new(&profile, &Options::default())
        {
            for format in [Format::Folded, Format::Svg, Format::Firefox, Format::Pprof, Format::Perfetto] {
                format.write(&selection, &mut std::io::sink()).unwrap();
            }
        }
    }
}

//! A guest that writes to its rings damages only its own records.

use super::*;

/// Two valid samples with a guest's data between them.
fn around(between: &[Vec<u8>]) -> Recorded {
    let event = event(5, "marks", 0, USUAL);
    let first = usual(&event, USER, 1, 10, 1);
    let last = usual(&event, USER, 1, 20, 2);
    let records = [&[first][..], between, &[last]].concat();
    recorded(&[history(event, &records)], None)
}

#[test]
fn foreign_record_is_left_out_and_counted() {
    let of = event(5, "marks", 0, USUAL);
    let other = event(6, "other", 0, USUAL);
    let elsewhere = event(5, "marks", 1, USUAL);
    let words = |count: usize| record(9, USER, &vec![5; count]);
    let bad = [
        // Samples of another event and of another vCPU, samples that are too short or too long, and samples with CPU
        // modes that the device never writes.
        usual(&other, USER, 1, 15, 9),
        usual(&elsewhere, USER, 1, 15, 9),
        words(0),
        words(6),
        words(8),
        usual(&of, 4, 1, 15, 9),
        usual(&of, 3, 1, 15, 9),
        // Records of mapped files, task names, forks and symbols, records that perf itself adds to files, a record of
        // an unknown type, and THROTTLE records of another event or without an id.
        record(1, KERNEL, &[0, 0, 1, 0x6574_632f, 0]),
        record(3, 0, &[5, 0x6c69_7665, 0]),
        record(7, 0, &[5; 4]),
        record(10, KERNEL, &[5; 12]),
        record(17, 0, &[5; 4]),
        record(64, 0, &[5; 16]),
        record(68, 0, &[]),
        record(u32::MAX, u16::MAX, &[5; 3]),
        record(5, 0, &[15, 6, 6]),
        record(5, 0, &[15]),
    ];
    let recorded = around(&bad);
    let expected = Summary {
        events: 1,
        samples: 2,
        lost: 0,
        left_out: bad.len() as u64,
        bytes: std::fs::metadata(&recorded.path).unwrap().len(),
    };
    assert_eq!(recorded.summary, expected);
    assert_eq!(script(&recorded.path).len(), 2);
    let text = perf(&["script", "--show-lost-events"], &recorded.path);
    assert!(text.contains(&format!("lost {}", bad.len())), "{text}");
    perf(&["report", "--stdio"], &recorded.path);
}

#[test]
fn record_of_cut_words_ends_history() {
    let of = event(5, "marks", 0, USUAL);
    let whole = usual(&of, USER, 1, 15, 9);
    let cut = [&whole[..6], &[62, 0], &whole[8..62]].concat();
    let records = [whole.clone(), cut, whole];
    let recorded = recorded(&[history(of, &records)], None);
    let summary = (recorded.summary.samples, recorded.summary.left_out);
    assert_eq!(summary, (1, 0));
}

#[test]
fn forged_length_is_not_followed() {
    let counts = 1 << 4;
    let chain = 1 << 5;
    for (sample_type, read_format, words) in [
        (1 | chain, 0, vec![1, 2, 7]),
        (1 | chain, 0, vec![1, u64::MAX, 7]),
        (1 | chain, 0, vec![1, 1 << 61, 7]),
        (1 | counts, 0x1f, vec![1, u64::MAX, 7]),
        (1 | counts, 0x1f, vec![1, u64::MAX / 3, 7]),
        (1 | counts, 8, vec![1, 1 << 61]),
        (1 | counts, 0, vec![1]),
        (1 | counts | chain, 0, vec![1, 2]),
    ] {
        let event = PersistentStatus { read_format, ..event(5, "marks", 0, sample_type) };
        let recorded = recorded(&[history(event, &[record(9, USER, &words)])], None);
        let summary = (recorded.summary.samples, recorded.summary.left_out);
        assert_eq!(summary, (0, 1), "{sample_type:#x} {read_format:#x} {words:x?}");
    }
}

#[test]
fn record_that_grows_too_long_is_left_out() {
    // A record is six words longer in the file than in the ring. With this many addresses in the call chain, the
    // record in the file has exactly the maximum length.
    let length = 8_182;
    let mut words = vec![1, length];
    words.extend(std::iter::repeat_n(0x1000, usize::try_from(length).unwrap()));
    let longest = record(9, USER, &words);
    assert_eq!(longest.len(), 65_528 - 6 * 8);
    words.push(0x1000);
    words[1] += 1;
    let event = event(5, "marks", 0, 1 | 1 << 5);
    let records = [longest, record(9, USER, &words)];
    let recorded = recorded(&[history(event, &records)], None);
    assert_eq!((recorded.summary.samples, recorded.summary.left_out), (1, 1));
}

#[test]
fn senseless_times_and_addresses_stop_no_reader() {
    let event = event(5, "marks", 0, USUAL);
    let samples = [u64::MAX, 0, 1 << 63, 7].map(|time| usual(&event, KERNEL, u64::MAX, time, !0));
    let recorded = recorded(&[history(event, &samples)], Some("ffffffff81000000 T _text\n"));
    assert_eq!(recorded.summary.samples, 4);
    assert_eq!(script(&recorded.path).len(), 4);
}

/// Pseudo-random numbers with a fixed seed.
fn noise(seed: u64) -> impl Iterator<Item = u64> {
    std::iter::successors(Some(seed | 1), |&x| {
        let x = x ^ x << 13;
        let x = x ^ x >> 7;
        Some(x ^ x << 17)
    })
}

#[test]
fn garbage_in_a_ring_leaves_a_file_that_perf_reads() {
    for seed in 1..=16 {
        let event = event(5, "marks", 0, abi::SAMPLE_ALLOWED);
        let mut numbers = noise(seed);
        let mut next = || numbers.next().unwrap();
        let records: Vec<Vec<u8>> = (0..300)
            .map(|_| {
                let words: Vec<u64> =
                    (0..next() % 40).map(|_| if next() % 2 == 0 { next() % 8 } else { next() }).collect();
                let kind = [9, 9, 9, 5, 6, 2, 1, 3, 10, 17][next() as usize % 10];
                record(kind, next() as u16 & 3, &words)
            })
            .collect();
        let recorded = recorded(&[history(event, &records)], None);
        let lines = perf(&["script", "-F", "event,time"], &recorded.path);
        assert!(recorded.summary.left_out > 0, "{lines}");
    }
}

#[test]
fn short_records_count_by_their_size_in_the_file() {
    let bare = |id, window| {
        let event = PersistentStatus { operator: false, window, pages: Some(1), ..event(id, "guests", 0, 0) };
        history(event, &vec![record(9, USER, &[]); 512])
    };
    // A page holds 512 records of 8 bytes. In the file, each of them takes 64 bytes.
    let page = 512 * 8;
    let kept = |window, most| {
        let kept = bounded([bare(1, window)].into_iter(), most);
        kept[0].records.len()
    };
    assert_eq!((kept(false, 8 * page), kept(false, 8 * page - 1)), (page, 0));
    // If the ring is in the window, its one page is not counted.
    assert_eq!((kept(true, 7 * page), kept(true, 7 * page - 1)), (page, 0));
}

#[test]
fn rings_in_guest_memory_stay_within_their_limit() {
    let guests = |id| PersistentStatus { operator: false, window: false, ..event(id, "guests", 0, USUAL) };
    let of = |event: PersistentStatus, count| {
        let records = vec![usual(&event, USER, 1, 10, 1); count];
        history(event, &records)
    };
    let all =
        [of(guests(1), 3), of(event(2, "ours", 0, USUAL), 90), of(guests(3), 8), of(guests(4), 7), of(guests(5), 1)];
    let one = all[4].records.len();
    let kept = bounded(all.into_iter(), 10 * one);
    let counts: Vec<usize> = kept.iter().map(|kept| kept.records.len() / one).collect();
    assert_eq!(counts, [3, 90, 0, 7, 0]);
}

//! An independent reader finds in a file everything that was written to it.
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::io::Cursor;

use linux_perf_data::linux_perf_event_reader::{AttrFlags, CpuMode, EventRecord, SamplingPolicy};
use linux_perf_data::{DsoKey, PerfFileReader, PerfFileRecord};
use vpmu_perfdata::{
    ATTR_EXCLUDE_HOST, BuildId, Context, Event, FINISHED_ROUND, Fields, Layout, RECORD_MAX, Rate, Record,
    SAMPLE_FIELDS, SAMPLE_RAW,
};

const USER: u16 = 2;
const SAMPLE_CALLCHAIN: u64 = 1 << 5;
const CONTEXT_USER: u64 = u64::MAX - 511;

fn event(id: u64, name: &str, extra: u64) -> Event {
    Event {
        name: name.to_owned(),
        kind: 1,
        config: 1,
        rate: Some(Rate::Frequency(99)),
        sample_type: SAMPLE_FIELDS | extra,
        flags: ATTR_EXCLUDE_HOST,
        id,
    }
}

fn file(layout: &Layout, records: &[u8]) -> Vec<u8> {
    let size = records.len() as u64;
    [layout.head(size), records.to_vec(), layout.tail(size)].concat()
}

#[test]
fn file_reads_back_with_all_its_parts() {
    let (clock, exits) = (event(1, "task-clock", SAMPLE_CALLCHAIN), event(2, "exits", SAMPLE_RAW));
    let context = Context { pid: 7, tid: 8, time: 50, cpu: 3 };
    let mut records = Vec::new();
    let mut put = |record: Record, time| {
        assert!(record.append(&mut records, &clock.trailer(&Context { time, ..context })));
    };
    put(Record::comm(7, 8, "make", true), 10);
    put(Record::map(7, 0x1000, 0x2000, 0x300, "/bin/a program"), 11);
    put(Record::fork((7, 8), (9, 10), 12), 12);
    put(Record::function(0xffff_8000_0000_0000, 64, "do_idle"), 13);
    put(Record::throttle(1, 14), 14);
    put(Record::lost(1, 6), 15);
    let chain = [CONTEXT_USER, 0x1010, 0x1020];
    let fields = Fields { context, ip: 0x1010, mode: USER, addr: 4, period: 5, chain: &chain, raw: &[] };
    assert!(clock.sample(&fields).append(&mut records, &[]));
    let raw = Fields { chain: &[], raw: &[1, 2, 3], ..fields };
    assert!(exits.sample(&raw).append(&mut records, &[]));
    FINISHED_ROUND.append(&mut records, &[]);
    let layout = Layout {
        events: vec![clock, exits],
        arch: "x86_64".into(),
        os_release: "6.1.0".into(),
        cpu_id: "AuthenticAMD,25,1,1".into(),
        command: vec!["vperf".into(), "record one\x1b".into()],
        build_ids: vec![BuildId { path: "/bin/a program".into(), id: vec![5; 20] }],
    };
    let reader = PerfFileReader::parse_file(Cursor::new(file(&layout, &records))).unwrap();
    let PerfFileReader { mut perf_file, mut record_iter } = reader;
    assert_eq!(perf_file.arch().unwrap(), Some("x86_64"));
    assert_eq!(perf_file.os_release().unwrap(), Some("6.1.0"));
    assert_eq!(perf_file.cpu_id().unwrap(), Some("AuthenticAMD,25,1,1"));
    assert_eq!(perf_file.cmdline().unwrap(), Some(vec!["vperf", "record one_"]));
    let build_ids = perf_file.build_ids().unwrap();
    let key = DsoKey::detect(b"/bin/a program", CpuMode::User).unwrap();
    assert_eq!(build_ids.get(&key).map(|info| info.build_id.as_slice()), Some(&[5; 20][..]));
    let names: Vec<_> = perf_file.event_attributes().iter().map(|event| (event.name().unwrap(), event.ids())).collect();
    assert_eq!(names, [("task-clock", &[1][..]), ("exits", &[2])]);
    let attributes = perf_file.event_attributes()[0].attributes();
    assert!(matches!(attributes.sampling_policy, SamplingPolicy::Frequency(99)));
    assert!(attributes.flags.contains(AttrFlags::EXCLUDE_HOST));
    let mut found = Vec::new();
    while let Some(record) = record_iter.next_record(&mut perf_file).unwrap() {
        let PerfFileRecord::EventRecord { attr_index, record } = record else { continue };
        found.push(match record.parse().unwrap() {
            EventRecord::Comm(comm) => {
                let name = String::from_utf8(comm.name.as_slice().to_vec()).unwrap();
                format!("comm {} {} {name} {}", comm.pid, comm.tid, comm.is_execve)
            }
            EventRecord::Mmap(map) => {
                let path = String::from_utf8(map.path.as_slice().to_vec()).unwrap();
                format!("map {} {:#x} {:#x} {:#x} {path}", map.pid, map.address, map.length, map.page_offset)
            }
            EventRecord::Fork(fork) => format!("fork {} {} {} {}", fork.ppid, fork.ptid, fork.pid, fork.tid),
            EventRecord::Throttle(throttle) => format!("throttle {} {}", throttle.id, throttle.timestamp),
            EventRecord::Lost(lost) => format!("lost {} {}", lost.id, lost.count),
            EventRecord::Sample(sample) => {
                let chain = sample.callchain.map(|chain| (0..chain.len()).map(|at| chain.get(at).unwrap()).collect());
                let chain: Vec<u64> = chain.unwrap_or_default();
                let raw = sample.raw.map(|raw| raw.as_slice().to_vec());
                assert_eq!((sample.pid, sample.tid, sample.timestamp), (Some(7), Some(8), Some(50)));
                assert_eq!((sample.cpu, sample.ip, sample.addr), (Some(3), Some(0x1010), Some(4)));
                assert_eq!((sample.period, sample.cpu_mode), (Some(5), CpuMode::User));
                format!("sample {attr_index} {} {raw:?}", chain.len())
            }
            _ => format!("type {}", record.record_type.0),
        });
    }
    assert_eq!(
        found,
        [
            "comm 7 8 make true",
            "map 7 0x1000 0x2000 0x300 /bin/a program",
            "fork 7 8 9 10",
            "type 17",
            "throttle 1 14",
            "lost 1 6",
            "sample 0 3 None",
            // The padding to whole words is part of the field.
            "sample 1 0 Some([1, 2, 3, 0])",
        ]
    );
}

#[test]
fn head_keeps_its_size_when_the_file_is_finished() {
    let mut layout = Layout { events: vec![event(1, "a", 0)], ..Layout::default() };
    let unfinished = layout.head(0);
    layout.build_ids.push(BuildId { path: "/bin/sh".into(), id: vec![1] });
    assert_eq!(layout.head(64).len(), unfinished.len());
}

#[test]
fn record_that_is_too_long_is_not_appended() {
    let of = |words: usize| Record { kind: 9, misc: 0, words: vec![0; words] };
    let mut bytes = Vec::new();
    let most = (RECORD_MAX - 8) / 8;
    assert!(!of(most).append(&mut bytes, &[1]) && !of(most + 1).append(&mut bytes, &[]) && bytes.is_empty());
    assert!(of(most).append(&mut bytes, &[]));
    assert_eq!(bytes.len(), RECORD_MAX);
}

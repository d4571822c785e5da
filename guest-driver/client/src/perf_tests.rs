use super::*;
use crate::{Overwrite, Record};

fn pmu() -> (tempfile::TempDir, PerfPmu) {
    let dir = tempfile::tempdir().unwrap();
    let put = |name: &str, text: &str| {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    put("type", "9\n");
    put("format/event", "config:0-47\n");
    put("format/kind", "config:48-63\n");
    put("format/split", "config:0-1,62-63\n");
    put("format/other", "config1:0-7\n");
    put("events/exits-io", "event=0x2,kind=0x101\n");
    put("events/tsc", "kind=256\n");
    put("events/tsc.unit", "ticks\n");
    let pmu = PerfPmu::open_at(dir.path()).unwrap();
    (dir, pmu)
}

#[test]
fn names_become_configs() {
    let (_dir, pmu) = pmu();
    assert_eq!(pmu.pmu_type(), 9);
    assert_eq!(pmu.events().unwrap(), ["exits-io", "tsc"]);
    let attr = pmu.attr("exits-io").unwrap();
    assert_eq!((attr.pmu_type, attr.config), (9, 0x101 << 48 | 2));
    assert_eq!(pmu.attr("tsc").unwrap().config, 0x100 << 48);
    assert_eq!(pmu.attr_of_terms("config=0x30").unwrap().config, 0x30);
    assert_eq!(pmu.attr_of_terms("split=0xd").unwrap().config, 3 << 62 | 1);
    assert_eq!(pmu.attr_of_terms("kind").unwrap().config, 1 << 48);
}

#[test]
fn wrong_terms_are_named_in_their_errors() {
    let (_dir, pmu) = pmu();
    let error = pmu.attr("cycles").unwrap_err();
    assert_eq!(error.to_string(), "the PMU has no event \"cycles\", only: exits-io, tsc");
    for term in ["kind=0x10000", "kind=x", "../type=1", "=1", "split=16"] {
        let error = pmu.attr_of_terms(term).unwrap_err();
        assert!(matches!(error, PerfError::Term(ref t) if t == term), "{error}");
    }
    assert!(matches!(pmu.attr_of_terms("other=1"), Err(PerfError::Format { .. })));
    assert!(matches!(pmu.attr_of_terms("missing=1"), Err(PerfError::Read { .. })));
    let missing = PerfPmu::open_at(Path::new("/nonexistent")).unwrap_err();
    assert!(missing.to_string().contains("modprobe virtio_pmu"), "{missing}");
}

#[test]
fn formats_that_make_no_sense_are_refused() {
    for format in ["", "config", "config:", "config:5-3", "config:0-64", "config:x", "config1:0"] {
        assert_eq!(bits(format), None, "{format}");
    }
    assert_eq!(bits("config:3"), Some(vec![3]));
}

#[test]
fn perf_software_event_opens_and_counts() {
    // The code that opens vPMU events also opens the software task clock, which every kernel has.
    let attr = EventAttr::new(1, 1);
    let pmu = PerfPmu { path: PathBuf::new(), pmu_type: 1 };
    let event = pmu.open_event(&attr).unwrap();
    event.enable().unwrap();
    let work: u64 = (0..200_000u64).map(std::hint::black_box).sum();
    std::hint::black_box(work);
    event.disable().unwrap();
    let reading = event.read().unwrap();
    assert!(reading.value > 0 && reading.time_running > 0, "{reading:?}");
    assert!(reading.time_running <= reading.time_enabled);
    assert_eq!(reading.id, event.id().unwrap());
    event.reset().unwrap();
    assert_eq!(event.read().unwrap().value, 0);
}

#[test]
fn perf_software_ring_reads_records() {
    let pmu = PerfPmu { path: PathBuf::new(), pmu_type: 1 };
    let attr = EventAttr { exclude_kernel: true, ..EventAttr::new(1, 1).sampling(100_000) };
    let event = pmu.open_event(&attr.wakeup_every(1)).unwrap();
    let mut ring = event.map(3).unwrap();
    event.enable().unwrap();
    let work: u64 = (0..20_000_000u64).map(std::hint::black_box).sum();
    std::hint::black_box(work);
    event.disable().unwrap();
    assert!(event.poll(Some(std::time::Duration::ZERO)).unwrap().readable);
    let records: Result<Vec<Record>, _> = ring.records().collect();
    let mut last = 0;
    let mut samples = 0;
    for record in records.unwrap() {
        // The kernel may throttle the event and record that.
        let Record::Sample(sample) = record else {
            continue;
        };
        samples += 1;
        assert_eq!(sample.pid, std::process::id());
        assert_eq!(sample.id, event.id().unwrap());
        assert!(sample.user && sample.time > last, "{sample:?} after {last}");
        assert_eq!(sample.period, 100_000);
        last = sample.time;
    }
    assert!(samples > 0);
    // The page's times may lag: the kernel last updated the page before the event stopped.
    let reported = ring.metadata().unwrap().time_enabled;
    assert!(reported > 0 && reported <= event.read().unwrap().time_enabled);
}

/// The kernel's task clock, in user mode only.
fn clock(period: u64) -> (PerfPmu, EventAttr) {
    let pmu = PerfPmu { path: PathBuf::new(), pmu_type: 1 };
    let attr =
        EventAttr { exclude_kernel: true, exclude_callchain_kernel: true, ..EventAttr::new(1, 1).sampling(period) };
    (pmu, attr)
}

fn spin() {
    let work: u64 = (0..20_000_000u64).map(std::hint::black_box).sum();
    std::hint::black_box(work);
}

#[test]
fn perf_software_group_reads_members() {
    let (pmu, attr) = clock(0);
    let attr = EventAttr { sample_type: 0, ..attr.reading_group() };
    let leader = pmu.open_event(&attr).unwrap();
    let open = EventAttr { disabled: false, ..attr };
    let member = pmu.open_member(&open, &leader).unwrap();
    leader.enable_group().unwrap();
    spin();
    leader.disable_group().unwrap();
    for event in [&leader, &member] {
        let group = event.read_group().unwrap();
        let ids: Vec<u64> = group.iter().map(|reading| reading.id).collect();
        assert_eq!(ids, [leader.id().unwrap(), member.id().unwrap()]);
        assert!(group.iter().all(|reading| reading.value > 0), "{group:?}");
    }
    leader.reset_group().unwrap();
    let group = leader.read_group().unwrap();
    assert!(group.iter().all(|reading| reading.value == 0), "{group:?}");
}

#[test]
fn perf_software_sample_with_every_field_parses() {
    use crate::arch::{IP, SP};
    let (pmu, attr) = clock(100_000);
    let attr = attr.with_call_chains(8).with_user_registers(1 << SP | 1 << IP).with_user_stack(64);
    let attr = EventAttr { sample_type: attr.sample_type | crate::attr::SAMPLE_READ, sample_id_all: true, ..attr };
    let event = pmu.open_event(&attr).unwrap();
    let mut ring = event.map(3).unwrap();
    event.enable().unwrap();
    spin();
    event.disable().unwrap();
    let mut samples = 0;
    for record in ring.records() {
        let sample = match record.unwrap() {
            Record::Sample(sample) => sample,
            Record::Throttle(throttle) | Record::Unthrottle(throttle) => {
                let who = throttle.who.unwrap();
                assert_eq!(who.pid, std::process::id());
                continue;
            }
            record => panic!("{record:?}"),
        };
        samples += 1;
        let registers = sample.user_registers.as_ref().unwrap();
        assert_eq!(registers.get(IP), Some(sample.ip));
        assert!(registers.get(SP) > Some(0));
        assert_eq!(sample.user_stack.len(), 64);
        let innermost = sample.frames()[0];
        assert_eq!((innermost.ip, innermost.user), (sample.ip, true));
        assert!(sample.frames().len() <= 8);
        assert_eq!(sample.counts.len(), 1);
        assert_eq!(sample.counts[0].id, sample.id);
    }
    assert!(samples > 0);
}

#[test]
fn perf_software_backward_ring_holds_latest() {
    let (pmu, attr) = clock(20_000);
    let attr = EventAttr { backward: true, ..attr };
    let event = pmu.open_event(&attr).unwrap();
    let ring = Overwrite::map(&event, 0).unwrap();
    event.enable().unwrap();
    spin();
    event.disable().unwrap();
    let records = ring.snapshot().unwrap();
    let times: Vec<u64> = records
        .iter()
        .filter_map(|record| match record {
            Record::Sample(sample) => Some(sample.time),
            _ => None,
        })
        .collect();
    // A page holds 73 records of 56 bytes.
    assert!(!times.is_empty() && times.len() <= 73, "{}", times.len());
    assert!(times.is_sorted(), "the oldest first");
}

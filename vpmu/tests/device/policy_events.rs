//! The operator's list of events. The catalogue does not list a denied event, and no request can open it.

use vpmu::abi::*;
use vpmu::{EventMatch, Hardware, Persist, Policy, RawEvents, Tier};
use vpmu_testkit::{CLOCK, CYCLES, FAULTS, Fields, Fixture, RAW, open_of};

/// One event of each kind that the host of these tests has, with its catalogue name.
const EVENTS: [(&str, u32, u64); 10] = [
    ("cycles", CYCLES.0, CYCLES.1),
    ("page-faults", FAULTS.0, FAULTS.1),
    ("clock", CLOCK.0, CLOCK.1),
    ("raw-0x11", RAW.0, RAW.1),
    ("tsc", KIND_TSC, 0),
    ("exits-io", KIND_EXITS, EXIT_IO),
    ("marks", KIND_MARK, MARK_ANY),
    ("exit-trace", KIND_EXIT_TRACE, EXIT_ALL),
    ("exit-trace-io", KIND_EXIT_TRACE, EXIT_IO),
    ("sample-trace-cycles", KIND_SAMPLE_TRACE, PACE_CYCLES),
];

fn hardware() -> Hardware {
    Hardware::default().with(|hardware| hardware.raw = RawEvents::Listed([RAW.1].into()))
}

fn fixture(allowed: Vec<EventMatch>, denied: Vec<EventMatch>) -> Fixture {
    Fixture::with_policy(hardware(), Policy::new(allowed, denied))
}

fn all() -> Vec<EventMatch> {
    Tier::Full.events()
}

fn names(fixture: &mut Fixture) -> Vec<String> {
    let text = |name: &[u8]| {
        let name = String::from_utf8_lossy(name).into_owned();
        name.trim_end_matches('\0').to_owned()
    };
    let entries = fixture.catalogue();
    entries.iter().map(|entry| text(&entry.name)).collect()
}

/// Returns requests that would open the event: on a vCPU, for a task, as a child, and as a sampling event.
fn requests(fixture: &mut Fixture, kind: u32, config: u64) -> Vec<OpenRequest> {
    let on = |context| {
        let request = open_of(kind, config, context);
        match kind {
            KIND_SAMPLE_TRACE => request.period(100),
            _ => request,
        }
    };
    let parent = fixture.opened(&open_of(UNLISTED, 0, 0));
    let child = on(0).parent(parent);
    let mut requests = vec![on(0), on(CONTEXT_TASK), child];
    if matches!(kind, KIND_HARDWARE | KIND_RAW | KIND_MARK | KIND_EXITS) {
        requests.push(on(0).sampled(100));
    }
    requests
}

/// The kind of the parent events in these tests. It is not in [`EVENTS`], and the policy never denies it.
const UNLISTED: u32 = KIND_GUEST_TIME;

fn is_open(fixture: &mut Fixture, kind: u32, config: u64) -> bool {
    let requests = requests(fixture, kind, config);
    let answers: Vec<_> = requests.iter().map(|request| fixture.open(request)).collect();
    let open = answers[0].is_ok();
    for (request, answer) in requests.iter().zip(answers) {
        match answer {
            Ok(event) => {
                assert!(open, "{request:?} opens the event, but the first request does not");
                fixture.close(event).expect("closed");
            }
            Err(errno) => assert_eq!((errno, open), (libc::ENOENT, false), "{request:?}"),
        }
    }
    open
}

/// Returns the names of the [`EVENTS`] that the device opens. Checks that the catalogue lists exactly these events.
fn open_events(fixture: &mut Fixture) -> Vec<&'static str> {
    let listed = names(fixture);
    let open = EVENTS.iter().filter(|&&(name, kind, config)| {
        let open = is_open(fixture, kind, config);
        assert_eq!(listed.iter().any(|listed| listed == name), open, "{name}");
        open
    });
    open.map(|&(name, ..)| name).collect()
}

#[test]
fn event_list_applies_to_every_request() {
    let every: Vec<&str> = EVENTS.iter().map(|&(name, ..)| name).collect();
    assert_eq!(open_events(&mut fixture(all(), vec![])), every, "a list that allows all events denies none");
    let parents = EventMatch::kind(UNLISTED);
    for &(member, kind, config) in &EVENTS {
        let one = EventMatch::one(kind, config);
        let mut allowing = fixture(vec![one, parents], vec![]);
        assert_eq!(open_events(&mut allowing), [member], "only {member} is allowed");
        let goes_with = |name: &str| match name {
            "exit-trace-io" => member == "exits-io",
            "sample-trace-cycles" => member == "cycles",
            _ => false,
        };
        let others: Vec<&str> = every.iter().copied().filter(|&name| name != member && !goes_with(name)).collect();
        assert_eq!(open_events(&mut fixture(all(), vec![one])), others, "only {member} is denied");
    }
}

#[test]
fn denied_event_causes_no_host_call() {
    for (_, kind, config) in EVENTS {
        let mut fixture = fixture(all(), vec![EventMatch::one(kind, config)]);
        assert_eq!(fixture.open(&open_of(kind, config, 0)), Err(libc::ENOENT));
        assert_eq!(fixture.host.asked(), [0; 0]);
    }
}

#[test]
fn raw_events_are_allowed_by_the_bits_of_a_mask() {
    let hardware = || Hardware::default().with(|hardware| hardware.raw = RawEvents::All);
    let family = EventMatch { kind: KIND_RAW, config: 0x11, mask: 0xff };
    let policy = Policy::new(vec![family], vec![EventMatch::one(KIND_RAW, 0x211)]);
    let mut fixture = Fixture::with_policy(hardware(), policy);
    assert_eq!(names(&mut fixture), ["raw"]);
    fixture.open(&open_of(KIND_RAW, 0x11, 0)).expect("allowed");
    for (config, asked) in [(0x211, 1), (0x12, 1), (0x111, 2)] {
        // The policy denies 0x211 and 0x12, so the device does not request them from the host. The policy allows
        // 0x111, but the host of these tests counts only 0x11.
        assert_eq!(fixture.open(&open_of(KIND_RAW, config, 0)), Err(libc::ENOENT));
        assert_eq!(fixture.host.asked().len(), asked, "{config:#x}");
    }
}

#[test]
fn mark_of_one_value_is_allowed_without_the_others() {
    let mut fixture = fixture(vec![EventMatch::one(KIND_MARK, 7)], vec![]);
    assert_eq!(names(&mut fixture), ["mark"]);
    let event = fixture.open(&open_of(KIND_MARK, 7, 0)).expect("allowed");
    fixture.command(0, COMMAND_ENABLE, event);
    fixture.mark(0, 7, 0);
    fixture.mark(0, 8, 0);
    assert_eq!(fixture.value(0, event), 1);
    for config in [8, MARK_ANY] {
        let refused = fixture.open(&open_of(KIND_MARK, config, 0));
        assert_eq!(refused, Err(libc::ENOENT), "{config:#x}");
    }
}

#[test]
fn configuration_reports_a_kind_that_the_operator_denies() {
    let why = |denied: Vec<EventMatch>| {
        let config = fixture(all(), denied).config();
        (config.refused_hardware, config.refused_software)
    };
    assert_eq!(why(vec![]), (REFUSED_NOT, REFUSED_NOT));
    let hardware = EventMatch::kind(KIND_HARDWARE);
    assert_eq!(why(vec![hardware]), (REFUSED_POLICY, REFUSED_NOT));
    let software = EventMatch::kind(KIND_SOFTWARE);
    assert_eq!(why(vec![software]), (REFUSED_NOT, REFUSED_POLICY));
    let left = Hardware::default().with(|hardware| {
        hardware.events = false;
        hardware.left_to_mediated = true;
    });
    let left = Fixture::with_hardware(left).config();
    assert_eq!(left.refused_hardware, REFUSED_MEDIATED);
}

#[test]
fn operators_own_event_of_a_denied_kind_counts_and_the_guest_reads_it() {
    let mut fixture = fixture(vec![EventMatch::kind(KIND_TSC)], vec![]);
    let persist = Persist { rate: None, pages: 0, ..crate::persistent::asked("cycles", 0) };
    let id = fixture.vpmu.persist(&persist).expect("the operator may open it");
    fixture.host.work(vpmu_testkit::thread(0), 40, 4);
    assert_eq!(fixture.value(0, id), 40, "the guest can read the event");
    let status = fixture.vpmu.persistent();
    assert_eq!(status[0].event, "cycles", "the operator sees the name of the event");
    assert_eq!(names(&mut fixture), ["tsc"]);
    // The guest still cannot open such an event by itself.
    for request in [open_of(CYCLES.0, CYCLES.1, 0), open_of(CYCLES.0, CYCLES.1, 0).flags(OPEN_PERSISTENT)] {
        assert_eq!(fixture.open(&request), Err(libc::ENOENT));
    }
}

#[test]
fn names_of_the_guests_events_are_those_of_its_catalogue() {
    let mut fixture = fixture(Tier::Clocks.events(), vec![EventMatch::kind(KIND_TSC)]);
    let listed = names(&mut fixture);
    assert_eq!(fixture.vpmu.guest_events(), listed);
    assert_eq!(fixture.config().catalogue_len.get() as usize, listed.len());
    assert_eq!(
        listed,
        [
            "clock",
            "exits-user",
            "exits-io",
            "exits-mmio",
            "exits-hlt",
            "exits-signal",
            "exits-other",
            "guest-time",
            "marks",
            "mark"
        ]
    );
}

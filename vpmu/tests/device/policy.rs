//! The operator's policy for events that the hardware counts.

use vpmu::abi::*;
use vpmu::{CountMode, Hardware, Persist, RawEvents};
use vpmu_testkit::{CLOCK, CYCLES, FAULTS, Fields, Fixture, RAW, open_of, thread};

use crate::contention::reports_lost_counter;

fn counting(count_mode: CountMode) -> Fixture {
    Fixture::with_hardware(Hardware::default().with(|hardware| hardware.count_mode = count_mode))
}

fn cycles() -> OpenRequest {
    open_of(CYCLES.0, CYCLES.1, 0)
}

/// Enables an event, which must then have exactly one host counter. Returns whether this counter excludes host work.
fn leaves_host_out(fixture: &mut Fixture, request: &OpenRequest) -> bool {
    let event = fixture.opened(request);
    fixture.command(0, COMMAND_ENABLE, event);
    let excluded = fixture.host.host_excluded();
    fixture.close(event).expect("closed");
    assert_eq!(excluded.len(), 1, "{request:?}");
    excluded[0]
}

#[test]
fn count_mode_selects_host_work_in_hardware_counts() {
    for (mode, reported, excluded) in [(CountMode::Guest, COUNT_GUEST, true), (CountMode::Vcpu, COUNT_VCPU, false)] {
        let mut fixture = counting(mode);
        assert_eq!(fixture.config().count_mode.get(), reported);
        assert_eq!(leaves_host_out(&mut fixture, &cycles()), excluded);
        // A clock cannot exclude host work, so the device does not set `exclude_host` for its counter.
        let clock = open_of(CLOCK.0, CLOCK.1, 0);
        assert!(!leaves_host_out(&mut fixture, &clock));
    }
}

#[test]
fn host_work_is_excluded_from_samples_and_on_request_in_both_modes() {
    let trace = open_of(KIND_SAMPLE_TRACE, PACE_CYCLES, 0).period(100);
    let excluding = cycles().flags(OPEN_EXCLUDE_HOST);
    for mode in [CountMode::Guest, CountMode::Vcpu] {
        let mut fixture = counting(mode);
        for request in [cycles().sampled(100), trace, excluding] {
            assert!(leaves_host_out(&mut fixture, &request), "{mode:?}: the counter includes host work: {request:?}");
        }
        // The device also accepts `OPEN_EXCLUDE_HOST` for events that cannot exclude host work.
        let clock = open_of(CLOCK.0, CLOCK.1, 0).flags(OPEN_EXCLUDE_HOST);
        assert!(!leaves_host_out(&mut fixture, &clock));
    }
}

#[test]
fn events_that_differ_in_host_work_have_counters_of_their_own() {
    let mut fixture = counting(CountMode::Vcpu);
    let excluding = cycles().flags(OPEN_EXCLUDE_HOST);
    for request in [cycles(), excluding, cycles(), excluding] {
        let event = fixture.opened(&request);
        fixture.command(0, COMMAND_ENABLE, event);
    }
    let mut excluded = fixture.host.host_excluded();
    excluded.sort_unstable();
    assert_eq!(excluded, [false, true]);
    assert_eq!(fixture.host.running(thread(0)), 2);
}

#[test]
fn catalogue_reports_whether_hardware_counts_host_work() {
    for (mode, flag, says) in [
        (CountMode::Guest, CATALOGUE_GUEST_ONLY, " while the guest runs"),
        (CountMode::Vcpu, 0, ", including host work for the vCPU unless the event samples"),
    ] {
        let mut fixture = counting(mode);
        let entries = fixture.catalogue();
        let found = |kind, config: u64| {
            let is_it = |entry: &&CatalogueEntry| (entry.kind.get(), entry.config.get()) == (kind, config);
            *entries.iter().find(is_it).expect("listed")
        };
        let cycles = found(CYCLES.0, CYCLES.1);
        assert_eq!(cycles.flags.get() & CATALOGUE_GUEST_ONLY, flag);
        let counts = String::from_utf8_lossy(&cycles.counts).into_owned();
        let counts = counts.trim_end_matches('\0');
        assert!(counts.ends_with(says), "the text does not end in {says:?}: {counts}");
        // Sampling events and the device's own events count only the guest.
        for (kind, config) in [(KIND_SAMPLE_TRACE, PACE_CYCLES), (KIND_MARK, MARK_ANY)] {
            let flags = found(kind, config).flags.get();
            assert_ne!(flags & CATALOGUE_GUEST_ONLY, 0, "{mode:?}");
        }
    }
}

fn allowing(raw: RawEvents) -> Fixture {
    Fixture::with_hardware(Hardware::default().with(|hardware| hardware.raw = raw))
}

fn listed(configs: &[u64]) -> RawEvents {
    RawEvents::Listed(configs.iter().copied().collect())
}

fn raw(config: u64) -> OpenRequest {
    open_of(KIND_RAW, config, 0)
}

/// Returns the names and flags of the raw events in the catalogue.
fn raw_entries(fixture: &mut Fixture) -> Vec<(String, u32)> {
    let entries = fixture.catalogue().into_iter();
    let raw = entries.filter(|entry| entry.kind.get() == KIND_RAW);
    let name = |entry: &CatalogueEntry| String::from_utf8_lossy(&entry.name).into_owned();
    raw.map(|entry| (name(&entry).trim_end_matches('\0').to_owned(), entry.flags.get())).collect()
}

const ALL_FLAGS: u32 = CATALOGUE_SAMPLES | CATALOGUE_GUEST_ONLY | CATALOGUE_EXCLUDES;

/// VPMU-D-6.2-3.
#[test]
fn raw_event_without_permission_is_refused_without_a_host_call() {
    for allowed in [listed(&[]), listed(&[0x8])] {
        let mut fixture = allowing(allowed);
        for request in [raw(RAW.1), raw(RAW.1).sampled(100), raw(1 << 47)] {
            assert_eq!(fixture.open(&request), Err(libc::ENOENT));
        }
        assert_eq!(fixture.host.asked(), [0; 0]);
        assert_eq!(raw_entries(&mut fixture), []);
    }
}

/// VPMU-D-6.1-6.
#[test]
fn raw_event_that_the_host_does_not_count_is_unknown() {
    let mut fixture = allowing(listed(&[RAW.1, 0x8]));
    assert_eq!(fixture.open(&raw(0x8)), Err(libc::ENOENT));
    assert_eq!(raw_entries(&mut fixture), [("raw-0x11".to_owned(), ALL_FLAGS)]);
    // If the operator allows all raw events, the device requests this event from the host, and the host refuses it.
    let mut fixture = allowing(RawEvents::All);
    assert_eq!(fixture.open(&raw(0x8)), Err(libc::ENOENT));
    assert_eq!(fixture.host.asked(), [KIND_RAW]);
    let any = ("raw".to_owned(), ALL_FLAGS | CATALOGUE_ANY_CONFIG);
    assert_eq!(raw_entries(&mut fixture), [any]);
}

#[test]
fn permitted_raw_event_counts_and_samples_like_hardware() {
    for allowed in [listed(&[RAW.1]), RawEvents::All] {
        let mut fixture = allowing(allowed);
        let event = fixture.opened(&raw(RAW.1));
        fixture.command(0, COMMAND_ENABLE, event);
        fixture.host.work(thread(0), 40, 4);
        assert_eq!(fixture.value(0, event), 40);
        fixture.close(event).expect("closed");

        let user = raw(RAW.1).flags(OPEN_EXCLUDE_KERNEL);
        fixture.open(&user).expect("a mode can be excluded");
        let reply = fixture.open_reply(&raw(RAW.1).sampled(10));
        assert_eq!((reply.status.get(), reply.engine.get()), (0, ENGINE_EXIT));
        assert_eq!(fixture.host.periods(), [10]);
        // A raw event cannot have a shorter period than its host counter supports.
        let refused = fixture.open(&raw(RAW.1).sampled(9));
        assert_eq!(refused, Err(libc::EOPNOTSUPP));
    }
}

#[test]
fn raw_samples_are_batched_where_the_host_names_guest_addresses() {
    let mut fixture = allowing(listed(&[RAW.1]));
    fixture.host.know_ips();
    let request = raw(RAW.1).sampled(10).engine(ENGINE_BATCHED).sample_type(0x1);
    let reply = fixture.open_reply(&request);
    assert_eq!((reply.status.get(), reply.engine.get()), (0, ENGINE_BATCHED));
}

#[test]
fn raw_events_need_hardware_events_enabled() {
    let mut fixture = Fixture::with_hardware(Hardware::default().with(|hardware| {
        hardware.events = false;
        hardware.raw = RawEvents::All;
    }));
    assert_eq!(fixture.open(&raw(RAW.1)), Err(libc::ENOENT));
    assert_eq!(raw_entries(&mut fixture), []);
    assert_eq!(fixture.host.asked(), [0; 0]);
}

#[test]
fn operator_names_raw_events_by_their_numbers() {
    for (allowed, name, spelled) in [(listed(&[RAW.1]), "raw-0x11", "raw-0x11"), (RawEvents::All, "raw=0x11", "raw=17")]
    {
        let fixture = allowing(allowed);
        let persist = Persist { rate: None, pages: 0, ..crate::persistent::asked(name, 0) };
        fixture.vpmu.persist(&persist).expect("started");
        let started = fixture.vpmu.persistent();
        let event = started.first().map(|status| status.event.as_str());
        assert_eq!(event, Some(spelled));
    }
}

fn pinning(pinned: bool) -> Fixture {
    Fixture::with_hardware(Hardware::default().with(|hardware| {
        hardware.pinned = pinned;
        hardware.raw = listed(&[RAW.1]);
    }))
}

#[test]
fn hardware_counters_are_pinned_if_configured() {
    let trace = open_of(KIND_SAMPLE_TRACE, PACE_CYCLES, 0).period(100);
    let hardware = [cycles(), cycles().sampled(100), raw(RAW.1), trace];
    let software = [open_of(FAULTS.0, FAULTS.1, 0), open_of(CLOCK.0, CLOCK.1, 0).sampled(100_000)];
    for pinned in [false, true] {
        let mut fixture = pinning(pinned);
        let of = |fixture: &mut Fixture, request: &OpenRequest| {
            let event = fixture.opened(request);
            fixture.command(0, COMMAND_ENABLE, event);
            let counters = fixture.host.pinned();
            fixture.close(event).expect("closed");
            counters
        };
        for request in &hardware {
            assert_eq!(of(&mut fixture, request), usize::from(pinned), "{request:?}");
        }
        for request in &software {
            assert_eq!(of(&mut fixture, request), 0, "{request:?}");
        }
    }
}

#[test]
fn operators_own_events_of_hardware_are_pinned_too() {
    let fixture = pinning(true);
    let persist = Persist { rate: None, pages: 0, ..crate::persistent::asked("cycles", 0) };
    fixture.vpmu.persist(&persist).expect("started");
    assert_eq!(fixture.host.pinned(), 1);
}

#[test]
fn pinned_hardware_without_a_counter_is_in_error() {
    for request in [cycles(), cycles().sampled(1_000_000)] {
        reports_lost_counter(&mut pinning(true), &request, COMMAND_DISABLE);
    }
}

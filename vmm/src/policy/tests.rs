//! Tests how entries of event lists are parsed, and which events the lists allow.

#![allow(clippy::expect_used, reason = "tests fail by panicking")]

use vpmu::abi::{EXIT_IO, KIND_EXIT_TRACE, KIND_GUEST_TIME, KIND_SAMPLE_TRACE, KIND_TSC, MARK_ANY, PACE_CYCLES};

use super::*;

fn events(words: &[&str]) -> Vec<Events> {
    let parsed = words.iter().map(|word| word.parse());
    parsed.collect::<Result<_, _>>().expect("events")
}

fn lists(pmu: Option<Tier>, allow: &[&str], deny: &[&str]) -> PolicyArgs {
    PolicyArgs { pmu, allow_events: events(allow), deny_events: events(deny), ..PolicyArgs::default() }
}

fn decided(args: PolicyArgs) -> Result<Decision, PolicyError> {
    args.decide(PolicyFile::default(), false, [].into_iter())
}

fn decision(args: PolicyArgs) -> Decision {
    decided(args).expect("a policy")
}

#[test]
fn words_name_events_patterns_kinds_and_numbers() {
    let one = EventMatch::one;
    let family = EventMatch { kind: KIND_RAW, config: 0x11, mask: 0xff };
    for (word, expected) in [
        ("instructions", vec![one(KIND_HARDWARE, 1)]),
        ("cpu-clock", vec![one(KIND_SOFTWARE, 0)]),
        ("exits", vec![one(KIND_EXITS, 0)]),
        ("marks", vec![one(KIND_MARK, MARK_ANY)]),
        ("mark:7", vec![one(KIND_MARK, 7)]),
        ("hardware", vec![EventMatch::kind(KIND_HARDWARE)]),
        ("raw", vec![EventMatch::kind(KIND_RAW)]),
        ("raw-0x11", vec![one(KIND_RAW, 0x11)]),
        ("raw:0x11", vec![one(KIND_RAW, 0x11)]),
        ("raw:17", vec![one(KIND_RAW, 0x11)]),
        ("raw:0x11/0xff", vec![family]),
        ("*-clock", vec![one(KIND_SOFTWARE, 0), one(KIND_SOFTWARE, 1), one(KIND_SAMPLE_TRACE, 0)]),
        ("exits-i*", vec![one(KIND_EXITS, EXIT_IO)]),
    ] {
        let parsed = word.parse::<Events>().expect(word);
        assert_eq!(parsed.matches, expected, "{word}");
    }
}

#[test]
fn word_that_names_no_event_is_refused_with_one_like_it() {
    for (word, words) in [
        ("instrutions", "no event `instrutions`: did you mean instructions?"),
        ("hardwares", "did you mean hardware?"),
        ("exit-io", "did you mean exits-io?"),
        ("zzz", "no event `zzz`; 'vmm check"),
        ("", "no event ``; 'vmm check"),
        ("zz*", "matches `zz*`"),
        ("raw:11/0xf0", "raw:11/0xf0"),
        ("raw:r11", "KIND:CONFIG"),
        ("raw:0x", "KIND:CONFIG"),
        ("cpu:1", "KIND:CONFIG"),
    ] {
        let error = word.parse::<Events>().expect_err(word).to_string();
        assert!(error.contains(words), "{word}: {error}");
    }
}

#[test]
fn list_begins_with_the_tier_and_is_refined() {
    for (args, name, open, closed) in [
        (
            lists(None, &[], &[]),
            "standard",
            &[(KIND_HARDWARE, 0), (KIND_TSC, 0), (KIND_EXIT_TRACE, 0)][..],
            &[(KIND_RAW, 0x11)][..],
        ),
        (
            lists(Some(Tier::Clocks), &["instructions"], &["exits-*"]),
            "clocks",
            &[(KIND_HARDWARE, 1), (KIND_TSC, 0)],
            &[(KIND_HARDWARE, 0), (KIND_EXITS, EXIT_IO), (KIND_EXIT_TRACE, 0)],
        ),
        (
            lists(None, &["tsc", "mark:7"], &[]),
            "list",
            &[(KIND_TSC, 0), (KIND_MARK, 7)],
            &[(KIND_MARK, 8), (KIND_GUEST_TIME, 0)],
        ),
        (
            lists(Some(Tier::Full), &[], &["raw:0x11/0xff", "cycles"]),
            "full",
            &[(KIND_RAW, 0x12)],
            &[(KIND_RAW, 0x4311), (KIND_HARDWARE, 0), (KIND_SAMPLE_TRACE, PACE_CYCLES)],
        ),
    ] {
        let decision = decision(args);
        assert_eq!(decision.name(), name);
        for &(kind, config) in open {
            assert!(decision.policy.allows(kind, config), "{name}: {kind:#x} {config:#x}");
        }
        for &(kind, config) in closed {
            assert!(!decision.policy.allows(kind, config), "{name}: {kind:#x} {config:#x}");
        }
    }
}

#[test]
fn raw_events_of_the_host_are_those_of_the_guest_and_of_its_operator() {
    let listed = |configs: &[u64]| vpmu::RawEvents::Listed(configs.iter().copied().collect());
    assert_eq!(decision(lists(None, &[], &[])).raw, listed(&[]));
    assert_eq!(decision(lists(None, &["raw:0x11"], &[])).raw, listed(&[0x11]));
    let full = decision(lists(Some(Tier::Full), &[], &[]));
    assert_eq!(full.raw, vpmu::RawEvents::All);
    let ranged = PolicyArgs { raw_events: Some("0x8-0x9".parse().expect("a list")), ..PolicyArgs::default() };
    let ranged = decision(ranged);
    assert_eq!(ranged.raw, listed(&[8, 9]));
    assert!(ranged.policy.allows(KIND_RAW, 9) && ranged.policy.allows(KIND_TSC, 0));
    let own = PolicyArgs::default().decide(PolicyFile::default(), false, ["raw-0x11"].into_iter()).expect("a policy");
    assert_eq!((own.raw, own.hardware), (listed(&[0x11]), HardwareUse::Always));
    assert!(!own.policy.allows(KIND_RAW, 0x11), "the operator's own");
}

#[test]
fn hardware_is_used_as_asked_and_left_to_mediated_pmus_where_nobody_asks() {
    let with = |hardware_events, no_hardware_events, args: PolicyArgs| PolicyArgs {
        hardware_events,
        no_hardware_events,
        ..args
    };
    let standard = || lists(None, &[], &[]);
    let clocks = || lists(Some(Tier::Clocks), &[], &[]);
    for (args, expected) in [
        (standard(), HardwareUse::UnlessMediated),
        (with(true, false, standard()), HardwareUse::Always),
        (with(false, true, standard()), HardwareUse::Never),
        (clocks(), HardwareUse::Never),
        (with(true, false, clocks()), HardwareUse::Always),
        (lists(Some(Tier::Full), &[], &[]), HardwareUse::Always),
        (lists(None, &["cycles"], &[]), HardwareUse::Always),
        (lists(None, &["sample-trace-cycles"], &[]), HardwareUse::Always),
        (lists(None, &["tsc"], &[]), HardwareUse::Never),
    ] {
        assert_eq!(decision(args.clone()).hardware, expected, "{args:?}");
    }
    for (event, expected) in [("cycles", HardwareUse::Always), ("marks", HardwareUse::Never)] {
        let decided = clocks().decide(PolicyFile::default(), false, [event].into_iter());
        assert_eq!(decided.expect("a policy").hardware, expected, "{event}");
    }
    let on = |of: HardwareUse| [None, Some(false), Some(true)].map(|mediated| of.on(mediated));
    assert_eq!(on(HardwareUse::UnlessMediated), [true, true, false]);
    assert_eq!(on(HardwareUse::Always), [true; 3]);
    assert_eq!(on(HardwareUse::Never), [false; 3]);
}

#[test]
fn contradiction_is_refused_with_both_its_sides() {
    let kept = |args: PolicyArgs| PolicyArgs { no_hardware_events: true, ..args };
    let raw = PolicyArgs { raw_events: Some("0x11".parse().expect("a list")), ..PolicyArgs::default() };
    for (args, words) in [
        (lists(None, &["cycles"], &["hardware"]), ["--allow-event cycles", "--deny-event hardware"]),
        (lists(None, &["tsc"], &["exits", "tsc"]), ["--allow-event tsc", "--deny-event tsc"]),
        (lists(Some(Tier::Off), &["tsc"], &[]), ["--allow-event", "--pmu off"]),
        (lists(Some(Tier::Off), &[], &["tsc"]), ["--deny-event", "--pmu off"]),
        (kept(lists(Some(Tier::Full), &[], &[])), ["--pmu full", "--no-hardware-events"]),
        (kept(lists(None, &["cycles"], &[])), ["--allow-event cycles", "--no-hardware-events"]),
        (kept(raw), ["--raw-events", "--no-hardware-events"]),
    ] {
        let error = decided(args).expect_err("a contradiction").to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
    let without = lists(Some(Tier::Clocks), &[], &[]);
    let error = without.decide(PolicyFile::default(), true, [].into_iter());
    assert_eq!(error, Err(PolicyError::NoVpmu("clocks")));
    // If one event that a pattern allows is denied, the other events of the pattern stay allowed.
    let refined = decision(lists(None, &["exits-*"], &["exits-io"]));
    assert!(!refined.policy.allows(KIND_EXITS, EXIT_IO));
    assert!(refined.policy.allows(KIND_EXITS, EXIT_IO + 1));
}

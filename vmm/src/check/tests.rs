//! Surveys the host once, and compares the results with /proc, /sys, /dev and the results of raw system calls.

use std::fs::{self, OpenOptions};
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::*;

fn surveyed() -> &'static Survey {
    static SURVEY: OnceLock<(Survey, Duration)> = OnceLock::new();
    let (survey, took) = SURVEY.get_or_init(|| {
        let begin = Instant::now();
        let asked = events::asked(&PolicyArgs::default()).unwrap();
        (survey(&asked), begin.elapsed())
    });
    assert!(*took < Duration::from_secs(20), "the survey took {took:?}");
    survey
}

/// The errno of a raw `perf_event_open` call for a generic hardware or software event. Zero if the event opened.
#[expect(unsafe_code, reason = "perf_event_open without the code under test")]
fn perf_event_open(kind: u32, config: u64) -> i32 {
    // A `perf_event_attr` in its first published size, 64 bytes. It sets type, size and config, and the flag `disabled`
    // in the flag word at byte 40. All other bytes are zero.
    let mut attr = [0_u64; 8];
    attr[0] = u64::from(kind) | 64 << 32;
    attr[1] = config;
    attr[5] = 1;
    // SAFETY: `attr` has the 64 bytes that its size field states.
    let fd = unsafe { libc::syscall(libc::SYS_perf_event_open, attr.as_ptr(), 0, -1, -1, 0) };
    if fd < 0 {
        return io::Error::last_os_error().raw_os_error().unwrap();
    }
    // SAFETY: the descriptor was made above and nothing else owns it.
    unsafe { libc::close(i32::try_from(fd).unwrap()) };
    0
}

#[test]
fn kvm_survey_matches_the_file_system() {
    let kvm = &surveyed().kvm;
    assert_eq!(kvm.present, Path::new("/dev/kvm").exists());
    let opens = OpenOptions::new().read(true).write(true).open("/dev/kvm");
    assert_eq!(kvm.api_version.is_some(), opens.is_ok(), "{kvm:?}");
    assert_eq!(kvm.usable, kvm.error.is_none());
    if let Some(module) = &kvm.module {
        let modules = fs::read_to_string("/proc/modules").unwrap_or_default();
        let built_in = !modules.lines().any(|line| line.starts_with("kvm "));
        assert!(built_in || modules.contains(module), "{module}");
    }
}

#[test]
fn stock_kernel_needs_hardware_virtualisation() {
    let survey = surveyed();
    assert_eq!(survey.stock_kernel, survey.kvm.usable && guest::has_hardware_virtualisation(), "{:?}", survey.guest);
}

#[test]
fn guests_run_wherever_kvm_is_usable() {
    let survey = surveyed();
    let Some(guest) = &survey.guest else {
        assert!(!survey.kvm.usable);
        return;
    };
    guest.assert_small_guests_run();
}

#[test]
fn paranoia_is_the_kernels() {
    let level =
        fs::read_to_string("/proc/sys/kernel/perf_event_paranoid").ok().map(|text| text.trim().parse().unwrap());
    assert_eq!(surveyed().perf.paranoid, level);
}

#[test]
fn events_open_and_fail_as_the_bare_system_call_does() {
    let events = &surveyed().perf.events;
    for (name, kind, config) in [
        ("cycles", 0, 0),
        ("instructions", 0, 1),
        ("cpu-clock", 1, 0),
        ("task-clock", 1, 1),
        ("page-faults", 1, 2),
        ("context-switches", 1, 3),
        ("cpu-migrations", 1, 4),
    ] {
        let event = &events[name];
        match perf_event_open(kind, config) {
            0 => assert!(event.opens && !event.user_only, "{name}: {event:?}"),
            libc::EACCES => assert!(event.user_only || !event.opens, "{name}: {event:?}"),
            errno => assert_eq!(event.errno, Some(errno), "{name}: {event:?}"),
        }
    }
}

#[test]
fn kind_without_an_event_has_the_reason_of_its_plainest() {
    let perf = &surveyed().perf;
    for (refused, kind) in [(&perf.hardware_refused, 0), (&perf.software_refused, 1)] {
        let names = match kind {
            0 => perf::hardware_names().collect::<Vec<_>>(),
            _ => perf::software_names().collect(),
        };
        let opens = names.iter().any(|name| perf.events[name].opens);
        let expected = match perf_event_open(kind, 0) {
            0 => None,
            errno => Some(vpmu::Refusal::of(&io::Error::from_raw_os_error(errno)).to_string()),
        };
        assert_eq!(refused, &expected.filter(|_| !opens), "kind {kind}");
    }
}

#[test]
fn guest_in_ring_3_appears_in_host_samples() {
    let survey = surveyed();
    let clock = survey.perf.events["cpu-clock"].opens;
    if !(clock && survey.kvm.usable) {
        assert_eq!(survey.perf.guest_user, None);
        return;
    }
    let samples = survey.perf.guest_user.unwrap();
    assert!(samples.in_loop <= samples.guest && samples.guest <= samples.total);
    assert_eq!(samples.carry_guest_ips(), Some(true), "{samples:?}");
}

#[test]
fn survey_has_its_documented_keys() {
    let json = serde_json::to_value(surveyed()).unwrap();
    assert!(json["stock_kernel"].is_boolean());
    for key in ["kvm", "guest", "perf", "pmu", "mediated_pmu"] {
        assert!(json.get(key).is_some(), "{key}");
    }
    for check in json["checks"].as_array().unwrap() {
        for key in ["name", "value", "consequence"] {
            assert!(!check[key].as_str().unwrap().is_empty(), "{check}");
        }
    }
}

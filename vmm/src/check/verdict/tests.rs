use super::*;

fn good_kvm() -> Kvm {
    Kvm { present: true, usable: true, api_version: Some(12), ..Kvm::default() }
}

#[test]
fn stock_kernel_needs_kvm_and_a_correct_guest() {
    assert!(stock_kernel(&good_kvm(), Some(&Guest::good())));
    assert!(!stock_kernel(&Kvm::default(), Some(&Guest::good())));
    assert!(!stock_kernel(&good_kvm(), None));
    assert!(!stock_kernel(&good_kvm(), Some(&Guest::default())));
}

#[test]
fn verdict_distinguishes_no_guest_from_small_guests() {
    let says = |guest: Option<Guest>| verdict(&good_kvm(), guest.as_ref()).consequence;
    assert!(says(Some(Guest::small())).contains("small guests only"));
    assert!(says(None).contains("no guest runs"));
    assert!(says(Some(Guest::good())).contains("direct KVM"));
}

#[test]
fn missing_device_is_one_line_with_its_remedy() {
    let kvm = Kvm { error: Some("no permission to open /dev/kvm: join group kvm".into()), ..Kvm::default() };
    let checks = checks(&kvm, None, &Perf::default());
    assert!(checks[0].value.contains("group kvm"));
    assert!(checks.iter().all(|c| !c.name.starts_with("guest.")));
}

#[test]
fn names_are_unique() {
    let kvm = good_kvm();
    let mut names: Vec<_> =
        checks(&kvm, Some(&Guest::good()), &Perf::default()).into_iter().map(|check| check.name).collect();
    let all = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), all);
}

#[test]
fn refused_events_name_the_remedy() {
    let event = Event { errno: Some(libc::EACCES), ..Event::default() };
    let perf = Perf { paranoid: Some(3), events: [("cpu-clock", event)].into(), ..Perf::default() };
    assert!(paranoid(&perf).consequence.contains("perf_event_paranoid=1"));
}

#[test]
fn kind_that_the_host_refuses_names_the_remedy() {
    let line = |name: &str, perf: &Perf| {
        let mut lines = counters(perf).into_iter();
        lines.find(|line| line.name == name).expect("a line").consequence
    };
    for (errno, remedy) in [
        (libc::EBUSY, "mediated PMU"),
        (libc::EOPNOTSUPP, "mediated PMU"),
        (libc::EACCES, "perf_event_paranoid=1"),
        (libc::EMFILE, "ulimit -n"),
        (libc::ENOENT, "no PMU"),
    ] {
        let refused = vpmu::Refusal::of(&std::io::Error::from_raw_os_error(errno)).to_string();
        let perf = Perf { hardware_refused: Some(refused.clone()), software_refused: Some(refused), ..Perf::default() };
        for name in ["perf.hardware", "perf.software"] {
            let line = line(name, &perf);
            assert!(line.contains(remedy), "{name}: {line}");
        }
    }
    let open = line("perf.hardware", &Perf::default());
    assert!(open.contains("--no-hardware-events"), "{open}");
    let opens = |silent| Event { opens: true, silent, ..Event::default() };
    let events = [("cycles", opens(false)), ("cache-misses", opens(true))].into();
    let perf = counters(&Perf { events, emulated: true, ..Perf::default() });
    let (value, means) = (&perf[1].value, &perf[1].consequence);
    assert_eq!(value, "cycles, emulated");
    assert!(means.contains("do not have cache-misses:"), "{means}");
}

#[test]
fn host_traces_are_listed_with_the_reason_of_refusal() {
    let trace = |pmu: &str| HostTrace { pmu: pmu.into(), refused: format!("because of {pmu}") };
    let perf = Perf { host_traces: vec![trace("intel_bts"), trace("intel_pt")], ..Perf::default() };
    let line = host_traces(&perf);
    assert_eq!(line.value, "intel_bts, intel_pt");
    assert!(line.consequence.contains("intel_pt: because of intel_pt"));
    assert_eq!(host_traces(&Perf::default()).value, "none");
}

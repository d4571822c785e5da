//! What an operator decides about events that hardware counts.

use vpmu::abi::*;
use vpmu::{CountMode, Hardware};

use crate::rig::{Rig, open_of, sampling, thread};
use crate::world::{CLOCK, CYCLES};

fn counting(count_mode: CountMode) -> Rig {
    Rig::with_hardware(Hardware {
        count_mode,
        ..Hardware::default()
    })
}

fn cycles() -> OpenRequest {
    open_of(CYCLES.0, CYCLES.1, 0)
}

/// Enables it, and says of its host counter, the only one, whether the host's work is left out.
fn leaves_host_out(rig: &mut Rig, request: &OpenRequest) -> bool {
    let event = rig.open(request).expect("open");
    rig.command(0, COMMAND_ENABLE, event);
    let excluded = rig.world.host_excluded();
    rig.close(event).expect("closed");
    assert_eq!(excluded.len(), 1, "{request:?}");
    excluded[0]
}

#[test]
fn count_mode_says_whether_counts_of_hardware_hold_host_work() {
    for (mode, reported, excluded) in [
        (CountMode::Guest, COUNT_GUEST, true),
        (CountMode::Vcpu, COUNT_VCPU, false),
    ] {
        let mut rig = counting(mode);
        assert_eq!(rig.config().count_mode.get(), reported);
        assert_eq!(leaves_host_out(&mut rig, &cycles()), excluded);
        // A clock cannot leave it out, so it is not asked to.
        let clock = open_of(CLOCK.0, CLOCK.1, 0);
        assert!(!leaves_host_out(&mut rig, &clock));
    }
}

#[test]
fn host_work_is_left_out_of_samples_and_where_the_driver_asks_in_both_modes() {
    let trace = OpenRequest {
        period: 100.into(),
        ..open_of(KIND_SAMPLE_TRACE, PACE_CYCLES, 0)
    };
    let excluding = OpenRequest {
        flags: OPEN_EXCLUDE_HOST.into(),
        ..cycles()
    };
    for mode in [CountMode::Guest, CountMode::Vcpu] {
        let mut rig = counting(mode);
        for request in [sampling(cycles(), 100), trace, excluding] {
            assert!(leaves_host_out(&mut rig, &request), "{mode:?}: {request:?}");
        }
        // It goes with events that cannot, too.
        let clock = OpenRequest {
            flags: OPEN_EXCLUDE_HOST.into(),
            ..open_of(CLOCK.0, CLOCK.1, 0)
        };
        assert!(!leaves_host_out(&mut rig, &clock));
    }
}

#[test]
fn events_that_differ_in_host_work_have_counters_of_their_own() {
    let mut rig = counting(CountMode::Vcpu);
    let excluding = OpenRequest {
        flags: OPEN_EXCLUDE_HOST.into(),
        ..cycles()
    };
    for request in [cycles(), excluding, cycles(), excluding] {
        let event = rig.open(&request).expect("open");
        rig.command(0, COMMAND_ENABLE, event);
    }
    let mut excluded = rig.world.host_excluded();
    excluded.sort_unstable();
    assert_eq!(excluded, [false, true]);
    assert_eq!(rig.world.running(thread(0)), 2);
}

#[test]
fn catalogue_names_whose_work_hardware_counts() {
    for (mode, flag, says) in [
        (
            CountMode::Guest,
            CATALOGUE_GUEST_ONLY,
            " while the guest runs",
        ),
        (
            CountMode::Vcpu,
            0,
            ", host work for the vCPU included, but not in samples",
        ),
    ] {
        let mut rig = counting(mode);
        let entries = rig.catalogue();
        let found = |kind, config: u64| {
            let is_it =
                |entry: &&CatalogueEntry| (entry.kind.get(), entry.config.get()) == (kind, config);
            *entries.iter().find(is_it).expect("listed")
        };
        let cycles = found(CYCLES.0, CYCLES.1);
        assert_eq!(cycles.flags.get() & CATALOGUE_GUEST_ONLY, flag);
        let counts = String::from_utf8_lossy(&cycles.counts).into_owned();
        let counts = counts.trim_end_matches('\0');
        assert!(counts.ends_with(says), "{counts}");
        // What samples, and what is of the device's own, is the guest's alone.
        for (kind, config) in [(KIND_SAMPLE_TRACE, PACE_CYCLES), (KIND_MARK, MARK_ANY)] {
            let flags = found(kind, config).flags.get();
            assert_ne!(flags & CATALOGUE_GUEST_ONLY, 0, "{mode:?}");
        }
    }
}

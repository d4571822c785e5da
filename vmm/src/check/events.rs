//! Finds the events that a guest can open on this host, either with each tier or with the list on the command line. To
//! do so, it creates PMU devices and reads their catalogues.

use std::sync::Arc;

use serde::Serialize;
use vpmu::host::{HostFiles, PerfSource};
use vpmu::{Hardware, Machine, Settings, Vpmu};

use crate::policy::{Decision, PolicyArgs, PolicyError, PolicyFile, Tier};
use crate::probe::Check;
use crate::signal;

/// The events of one list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Offered {
    /// A tier, or `list`.
    pub policy: &'static str,
    /// Names of the events that a guest may open.
    pub events: Vec<String>,
    /// The reason why the events are unknown.
    pub error: Option<String>,
}

/// A machine that never runs. It exists only so that its device can be queried.
#[derive(Debug)]
struct Idle {
    /// Whether KVM counts exits and halts.
    statistics: bool,
}

impl Machine for Idle {
    fn exits(&self, _vcpu: u32) -> Option<u64> {
        self.statistics.then_some(0)
    }

    fn halts(&self, _vcpu: u32) -> Option<u64> {
        self.statistics.then_some(0)
    }
}

/// The lists to survey: the list on the command line if there is one, otherwise the list of each tier.
///
/// # Errors
/// [`PolicyError`].
pub(super) fn asked(args: &PolicyArgs) -> Result<Vec<Decision>, PolicyError> {
    let decide = |args: PolicyArgs| args.decide(PolicyFile::default(), false, [].into_iter());
    if *args != PolicyArgs::default() {
        return Ok(vec![decide(args.clone())?]);
    }
    let tiers = [Tier::Clocks, Tier::Standard, Tier::Full];
    let of = |tier| PolicyArgs { pmu: Some(tier), ..PolicyArgs::default() };
    tiers.into_iter().map(|tier| decide(of(tier))).collect()
}

/// The events that a guest can open with each of the lists in `asked`. `statistics` is true if KVM counts exits.
/// `mediated` is true if KVM has mediated PMUs, and `None` if this is unknown.
pub(super) fn offered(asked: &[Decision], statistics: bool, mediated: Option<bool>) -> Vec<Offered> {
    let one = |decision: &Decision| {
        let (events, error) = match events(decision, statistics, mediated) {
            Ok(events) => (events, None),
            Err(error) => (Vec::new(), Some(vpmu_errors::chain(&*error))),
        };
        Offered { policy: decision.name(), events, error }
    };
    asked.iter().map(one).collect()
}

fn events(
    decision: &Decision,
    statistics: bool,
    mediated: Option<bool>,
) -> Result<Vec<String>, Box<dyn std::error::Error>> {
    if decision.tier == Some(Tier::Off) {
        return Ok(Vec::new());
    }
    let hardware = Hardware::default().with(|hardware| {
        hardware.events = decision.hardware.on(mediated);
        hardware.raw = decision.raw.clone();
    });
    let files = HostFiles::read(&hardware);
    let source = PerfSource::confined(files, signal::kick_signal(), || Ok(()))?;
    let settings = Settings::new(1, 1_000_000).with_hardware(hardware).with_policy(decision.policy.clone());
    let vpmu = Vpmu::new(settings, Arc::new(Idle { statistics }), Box::new(source))?;
    Ok(vpmu.guest_events())
}

/// A line for each list.
pub(super) fn checks(offered: &[Offered]) -> Vec<Check> {
    let line = |offered: &Offered| {
        let (name, option) = match offered.policy {
            "off" => ("pmu.off", "--pmu off"),
            "clocks" => ("pmu.clocks", "--pmu clocks"),
            "standard" => ("pmu.standard", "--pmu standard, the default"),
            "full" => ("pmu.full", "--pmu full"),
            _ => ("pmu.list", "this list"),
        };
        match (&offered.error, &offered.events[..]) {
            (Some(error), _) => Check::new(name, "not known", error.as_str()),
            (None, []) if offered.policy == "off" => {
                Check::new(name, "no device", "a guest has no PMU and no PMU exits")
            }
            (None, events) => Check::new(
                name,
                format!("{} events", events.len()),
                format!("a guest with {option} has: {}", events.join(", ")),
            ),
        }
    };
    offered.iter().map(line).collect()
}

/// The line that reports whether hardware events on this host prevent other VMs from starting.
pub(super) fn mediated(mediated: Option<bool>) -> Check {
    let name = "kvm.mediated-pmu";
    match mediated {
        None => Check::new(
            name,
            "not supported",
            "hardware events do not keep other VMs from starting: this KVM has no mediated PMUs",
        ),
        Some(false) => Check::new(
            name,
            "disabled",
            "hardware events do not keep other VMs from starting while KVM's parameter enable_mediated_pmu is off",
        ),
        Some(true) => Check::new(
            name,
            "enabled",
            "to let VMs with a mediated PMU start, 'vmm run' opens hardware events only on request, for example \
             with --hardware-events",
        ),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::expect_used, reason = "tests fail by panicking")]

    use super::*;

    fn args(pmu: Tier, denied: &str) -> PolicyArgs {
        PolicyArgs { pmu: Some(pmu), deny_events: vec![denied.parse().expect("an event")], ..PolicyArgs::default() }
    }

    #[test]
    fn tiers_are_asked_about_unless_a_list_is_given() {
        let names = |args| -> Vec<&str> {
            let asked = asked(&args).expect("a policy");
            asked.iter().map(Decision::name).collect()
        };
        assert_eq!(names(PolicyArgs::default()), ["clocks", "standard", "full"]);
        assert_eq!(names(args(Tier::Clocks, "tsc")), ["clocks"]);
    }

    #[test]
    fn list_of_a_tier_has_its_events_without_those_denied() {
        let asked = asked(&args(Tier::Clocks, "tsc")).expect("a policy");
        let offered = offered(&asked, true, None);
        assert_eq!((offered.len(), &offered[0].error), (1, &None));
        let rest = ["guest-time", "marks", "mark", "exits-user", "exits-other"];
        for event in rest {
            assert!(offered[0].events.iter().any(|name| name == event), "{event}");
        }
        for event in ["tsc", "exits", "halts", "cycles", "exit-trace-user"] {
            assert!(offered[0].events.iter().all(|name| name != event), "{event}");
        }
        let line = &checks(&offered)[0];
        assert_eq!(line.name, "pmu.clocks");
        assert!(line.consequence.contains("exits-user, exits-io"), "{line:?}");
    }

    #[test]
    fn standard_has_hardware_events_only_where_no_mediated_pmu_is() {
        let asked = asked(&args(Tier::Standard, "tsc")).expect("a policy");
        let of_hardware = |mediated| {
            let offered = offered(&asked, true, mediated);
            let events = offered[0].events.iter();
            events.filter(|name| crate::policy::is_hardware(name)).count()
        };
        assert_eq!(of_hardware(Some(true)), 0);
        // The number of events depends on this host.
        assert_eq!(of_hardware(Some(false)), of_hardware(None));
        for (found, words) in
            [(None, "no mediated PMUs"), (Some(false), "parameter"), (Some(true), "--hardware-events")]
        {
            assert!(mediated(found).consequence.contains(words), "{found:?}");
        }
    }
}

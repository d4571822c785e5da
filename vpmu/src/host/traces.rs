//! Traces of the host's own PMUs, and the reasons why guests cannot have them. A guest may have a trace only if the
//! trace contains nothing but the guest's data, and no current Linux driver guarantees this.

use std::fs;

const DEVICES: &str = "/sys/bus/event_source/devices";
/// KVM's parameter that selects who uses Intel PT while a guest runs.
const PT_MODE: &str = "/sys/module/kvm_intel/parameters/pt_mode";
/// The value of [`PT_MODE`] that gives Intel PT to guests.
const PT_OF_GUESTS: u32 = 1;

/// A host PMU with a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostTrace {
    /// The host's name for the PMU.
    pub pmu: String,
    /// The reason why guests cannot have the PMU's trace.
    pub refused: &'static str,
}

/// The host's PMUs with traces, by name.
pub fn host_traces() -> Vec<HostTrace> {
    let mode = fs::read_to_string(PT_MODE).ok();
    let mode = mode.and_then(|mode| mode.trim().parse().ok());
    let devices = fs::read_dir(DEVICES).into_iter().flatten().flatten();
    let mut traces: Vec<_> = devices
        .filter_map(|device| device.file_name().into_string().ok())
        .filter_map(|pmu| refusal(&pmu, mode).map(|refused| HostTrace { pmu, refused }))
        .collect();
    traces.sort_unstable_by(|one, other| one.pmu.cmp(&other.pmu));
    traces
}

/// Returns the reason why a guest cannot have the trace of `pmu`. `None` for a PMU without traces. `pt_mode` is the
/// value of the parameter [`PT_MODE`], or `None` if the parameter cannot be read.
fn refusal(pmu: &str, pt_mode: Option<u32>) -> Option<&'static str> {
    let kind = pmu.trim_end_matches(|c: char| c.is_ascii_digit() || c == '_');
    Some(match (kind, pt_mode) {
        ("intel_pt", Some(PT_OF_GUESTS)) => "KVM turns the host's trace off while a guest runs (pt_mode=1)",
        ("intel_pt", _) => "it records the host and all guests alike, and its driver ignores exclude_host",
        ("intel_bts", _) => "it records only the host's branches: the CPU stops it in guest mode",
        ("arm_spe", _) => "it samples only the host: KVM keeps the host's profiling out of guests",
        ("cs_etm", _) => "its driver is not known to separate a guest's trace from the host's",
        _ if kind.starts_with("hisi_ptt") => "it traces a PCIe link of the host, not a vCPU",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_that_traces_is_refused_for_a_reason() {
        let table = [
            ("intel_pt", None, "exclude_host"),
            ("intel_pt", Some(0), "exclude_host"),
            ("intel_pt", Some(1), "pt_mode=1"),
            ("intel_bts", Some(1), "branches"),
            ("arm_spe_0", None, "profiling"),
            ("cs_etm", None, "not known to separate"),
            ("hisi_ptt0_2", None, "PCIe"),
            ("hisi_ptt5", None, "PCIe"),
        ];
        for (pmu, mode, reason) in table {
            let refused = refusal(pmu, mode).expect("it traces");
            assert!(refused.contains(reason), "{pmu} {mode:?}: {refused}");
        }
    }

    #[test]
    fn pmu_without_traces_is_not_named() {
        for pmu in ["cpu", "cpu_core", "msr", "software", "tracepoint", "uncore_imc_0", "", "_"] {
            assert_eq!(refusal(pmu, Some(1)), None, "{pmu}");
        }
    }

    #[test]
    fn host_traces_are_named_once_each() {
        let traces = host_traces();
        eprintln!("{traces:?}");
        assert!(traces.is_sorted_by(|one, other| one.pmu < other.pmu));
    }
}

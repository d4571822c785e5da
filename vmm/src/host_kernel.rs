//! Properties of the host's kernel: defects that are known for its version, and mediated PMUs.

use std::fs;
use std::path::Path;

use crate::arch;

const RELEASE: &str = "/proc/sys/kernel/osrelease";

/// The reason why this host's KVM may lose counts of hardware events. `None` if no such defect is known. While the
/// guest runs, the host may move an event to another counter, or adapt the event's period. A KVM with the defect then
/// loses counts of that event.
#[must_use]
pub fn lost_counts() -> Option<String> {
    let release = fs::read_to_string(RELEASE).ok()?;
    lost_by(version(&release)?, arch::FIRST_TO_KEEP_COUNTS)
}

/// Directory of the modules' parameters.
const MODULES: &str = "/sys/module";
/// The KVM modules that can provide a mediated PMU.
const MEDIATING: [&str; 2] = ["kvm_intel", "kvm_amd"];

/// Whether this host's KVM gives its guests mediated PMUs. Reads the module parameter `enable_mediated_pmu`, which
/// Linux 7.0 introduced. `None` if the parameter or KVM is missing.
#[must_use]
pub fn mediated_pmu() -> Option<bool> {
    mediated_in(Path::new(MODULES))
}

fn mediated_in(modules: &Path) -> Option<bool> {
    let parameter = |module: &str| {
        let path = modules.join(module).join("parameters/enable_mediated_pmu");
        let text = fs::read_to_string(path).ok()?;
        Some(matches!(text.trim(), "Y" | "y" | "1"))
    };
    let found = MEDIATING.into_iter().filter_map(parameter);
    found.reduce(|one, other| one || other)
}

fn lost_by(version: (u32, u32), first: Option<(u32, u32)>) -> Option<String> {
    let (major, minor) = first.filter(|first| version < *first)?;
    Some(format!(
        "KVM of Linux before {major}.{minor} loses counts of hardware events that share counters or \
         sample at a frequency"
    ))
}

/// The first two numbers of a kernel's release string.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    let mut next = || numbers.next()?.parse().ok();
    Some((next()?, next()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn release_has_a_version() {
        assert_eq!(version("6.1.0-56-cloud-arm64\n"), Some((6, 1)));
        assert_eq!(version("6.12.117+deb12-cloud-amd64"), Some((6, 12)));
        for wrong in ["", "6", "linux", "-6.1"] {
            assert_eq!(version(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn mediated_pmu_follows_the_modules_parameter() {
        for (module, text, expected) in [
            ("kvm_intel", "Y\n", Some(true)),
            ("kvm_amd", "Y\n", Some(true)),
            ("kvm_amd", "N\n", Some(false)),
            ("kvm_amd", "1", Some(true)),
            ("kvm_intel", "", Some(false)),
            ("kvm", "Y\n", None),
        ] {
            let modules = tempfile::tempdir().expect("a directory");
            let parameters = modules.path().join(module).join("parameters");
            fs::create_dir_all(&parameters).expect("made");
            assert_eq!(mediated_in(modules.path()), None, "without the parameter");
            fs::write(parameters.join("enable_mediated_pmu"), text).expect("written");
            assert_eq!(mediated_in(modules.path()), expected, "{module}: {text:?}");
        }
    }

    #[test]
    fn kernel_before_the_first_good_one_loses_counts() {
        let first = Some((6, 6));
        assert!(lost_by((6, 5), first).is_some_and(|why| why.contains("before 6.6")));
        assert!(lost_by((5, 19), first).is_some());
        assert_eq!(lost_by((6, 6), first), None);
        assert_eq!(lost_by((6, 12), first), None);
        assert_eq!(lost_by((4, 1), None), None);
    }
}

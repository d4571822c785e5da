//! `/dev/kvm`: whether it is there, opens, and promises what a VMM needs.

use std::io;
use std::path::Path;

use kvm_bindings::{
    KVM_API_VERSION, KVM_CAP_BINARY_STATS_FD, KVM_CAP_EXT_CPUID, KVM_CAP_GET_TSC_KHZ,
    KVM_CAP_IMMEDIATE_EXIT, KVM_CAP_IOEVENTFD, KVM_CAP_IRQCHIP, KVM_CAP_IRQFD, KVM_CAP_MAX_VCPUS,
    KVM_CAP_PIT2, KVM_CAP_SET_TSS_ADDR, KVM_CAP_SYNC_REGS, KVM_CAP_TSC_DEADLINE_TIMER,
    KVM_CAP_USER_MEMORY, KVM_CAP_VCPU_ATTRIBUTES,
};
use kvm_ioctls::Kvm as Device;

use super::facts::Kvm;

const PATH: &str = "/dev/kvm";

/// Capabilities that are looked at: name, number, and whether a guest cannot run without.
const CAPABILITIES: &[(&str, u32, bool)] = &[
    ("binary_stats", KVM_CAP_BINARY_STATS_FD, false),
    ("ext_cpuid", KVM_CAP_EXT_CPUID, true),
    ("get_tsc_khz", KVM_CAP_GET_TSC_KHZ, false),
    ("immediate_exit", KVM_CAP_IMMEDIATE_EXIT, true),
    ("ioeventfd", KVM_CAP_IOEVENTFD, true),
    ("irqchip", KVM_CAP_IRQCHIP, true),
    ("irqfd", KVM_CAP_IRQFD, true),
    ("pit2", KVM_CAP_PIT2, false),
    ("set_tss_addr", KVM_CAP_SET_TSS_ADDR, true),
    ("sync_regs", KVM_CAP_SYNC_REGS, false),
    ("tsc_deadline_timer", KVM_CAP_TSC_DEADLINE_TIMER, false),
    ("user_memory", KVM_CAP_USER_MEMORY, true),
    ("vcpu_attributes", KVM_CAP_VCPU_ATTRIBUTES, false),
];

/// Opens the device and reads its list.
pub(super) fn probe() -> Kvm {
    let mut kvm = Kvm {
        present: Path::new(PATH).exists(),
        module: ["kvm_intel", "kvm_amd", "kvm_pvm"]
            .into_iter()
            .find(|name| Path::new("/sys/module").join(name).exists())
            .map(Into::into),
        ..Kvm::default()
    };
    let device = match Device::new() {
        Ok(device) => device,
        Err(error) => {
            kvm.error = Some(remedy(error.errno()));
            return kvm;
        }
    };
    let version = device.get_api_version();
    kvm.api_version = Some(version);
    if u32::try_from(version) != Ok(KVM_API_VERSION) {
        kvm.error = Some(format!(
            "{PATH} speaks API version {version}, not {KVM_API_VERSION}"
        ));
        return kvm;
    }
    for &(name, number, required) in CAPABILITIES {
        let present = device.check_extension_raw(number.into()) > 0;
        kvm.capabilities.insert(name, present);
        if required && !present {
            kvm.missing.push(name);
        }
    }
    kvm.max_vcpus = u32::try_from(device.check_extension_raw(KVM_CAP_MAX_VCPUS.into())).ok();
    kvm.usable = kvm.missing.is_empty();
    if !kvm.usable {
        kvm.error = Some(format!("this KVM lacks {}", kvm.missing.join(", ")));
    }
    kvm
}

/// One line that names what to do about a device that does not open.
fn remedy(errno: i32) -> String {
    match errno {
        libc::ENOENT => format!(
            "{PATH} does not exist: enable virtualisation in the firmware and load kvm_intel or kvm_amd"
        ),
        libc::EACCES | libc::EPERM => {
            format!("no permission to open {PATH}: join group kvm, or run as root")
        }
        libc::ENODEV | libc::ENXIO => {
            format!("{PATH} has no KVM behind it: load kvm_intel or kvm_amd")
        }
        _ => format!(
            "cannot open {PATH}: {}",
            io::Error::from_raw_os_error(errno)
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remedies_name_what_to_do() {
        assert!(remedy(libc::ENOENT).contains("load kvm_intel or kvm_amd"));
        assert!(remedy(libc::EACCES).contains("group kvm"));
        assert!(remedy(libc::EMFILE).contains("Too many open files"));
    }

    #[test]
    fn names_are_sorted_and_unique() {
        assert!(CAPABILITIES.is_sorted_by(|a, b| a.0 < b.0));
    }
}

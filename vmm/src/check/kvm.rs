//! `/dev/kvm`: presence, permissions and the capabilities that a VMM needs.

use std::io;
use std::path::Path;

use kvm_bindings::{KVM_API_VERSION, KVM_CAP_MAX_VCPUS};
use kvm_ioctls::Kvm as Device;

use super::facts::Kvm;
use crate::arch::check::CAPABILITIES;
use crate::arch::platform::HOST;

const PATH: &str = "/dev/kvm";

/// Opens the device and reads its capabilities.
pub(super) fn probe() -> Kvm {
    let mut kvm = Kvm {
        present: Path::new(PATH).exists(),
        module: HOST.modules.iter().copied().find(|name| Path::new("/sys/module").join(name).exists()).map(Into::into),
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
        kvm.error = Some(format!("{PATH} has API version {version}, not {KVM_API_VERSION}"));
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

/// One line that explains how to make the device open.
fn remedy(errno: i32) -> String {
    match errno {
        libc::ENOENT => format!("{PATH} does not exist: {}", HOST.remedy),
        libc::EACCES | libc::EPERM => {
            format!("no permission to open {PATH}: join group kvm, or run as root")
        }
        libc::ENODEV | libc::ENXIO => {
            format!("{PATH} exists, but KVM does not serve it: {}", HOST.remedy)
        }
        _ => format!("cannot open {PATH}: {}", io::Error::from_raw_os_error(errno)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remedies_name_what_to_do() {
        assert!(remedy(libc::ENOENT).contains(HOST.remedy));
        assert!(remedy(libc::EACCES).contains("group kvm"));
        assert!(remedy(libc::EMFILE).contains("Too many open files"));
    }

    #[test]
    fn names_are_sorted_and_unique() {
        assert!(CAPABILITIES.is_sorted_by(|a, b| a.0 < b.0));
    }
}

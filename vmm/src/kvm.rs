//! KVM as this VMM needs it: opened and checked.

use kvm_bindings::KVM_API_VERSION;
use kvm_ioctls::{Cap, Kvm};

use crate::arch::platform;

/// Why there is no VM to be had.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    /// The device is not there.
    #[error("there is no /dev/kvm: {}; 'vmm check' tells more", platform::REMEDY)]
    Missing,
    /// It is there, but not for us.
    #[error(
        "no permission for /dev/kvm: run as root or join its group with 'usermod -aG kvm $USER'"
    )]
    Permission,
    /// It cannot be opened for another reason.
    #[error("cannot open /dev/kvm")]
    Open(#[source] kvm_ioctls::Error),
    /// Not the one interface that there has been since 2007.
    #[error("/dev/kvm speaks version {0} of its interface, not {KVM_API_VERSION}")]
    Version(i32),
    /// This KVM lacks something without which nothing works here.
    #[error("this KVM lacks {0}: a host kernel of version 5.10 or later has it")]
    Lacks(&'static str),
    /// A number of vCPUs that this host does not run.
    #[error("{asked} vCPUs are too many: this KVM runs at most {most}")]
    TooManyVcpus {
        /// What the configuration says.
        asked: u8,
        /// What KVM says.
        most: usize,
    },
    /// KVM refuses a step.
    #[error("KVM cannot {what}")]
    Refused {
        /// Which step.
        what: &'static str,
        /// KVM's reason.
        #[source]
        source: kvm_ioctls::Error,
    },
}

impl KvmError {
    /// Why /dev/kvm does not open, with the remedy where the reason is a known one.
    fn open(source: kvm_ioctls::Error) -> Self {
        match source.errno() {
            libc::ENOENT | libc::ENODEV | libc::ENXIO => Self::Missing,
            libc::EACCES | libc::EPERM => Self::Permission,
            _ => Self::Open(source),
        }
    }

    /// For `map_err`: KVM refuses to do `what`.
    pub fn refused(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> Self {
        move |source| Self::Refused { what, source }
    }
}

/// What every architecture needs; its own needs are [`platform::NEEDED`].
const NEEDED: [(Cap, &str); 5] = [
    (Cap::UserMemory, "user memory"),
    (Cap::Irqchip, "the in-kernel interrupt controllers"),
    (Cap::Irqfd, "irqfd"),
    (Cap::Ioeventfd, "ioeventfd"),
    (Cap::ImmediateExit, "immediate exit"),
];

/// Opens /dev/kvm and checks that it can carry `vcpus` vCPUs of ours.
///
/// # Errors
/// [`KvmError`], each with its remedy where there is one.
pub fn open(vcpus: u8) -> Result<Kvm, KvmError> {
    let kvm = Kvm::new().map_err(KvmError::open)?;
    let version = kvm.get_api_version();
    if u32::try_from(version) != Ok(KVM_API_VERSION) {
        return Err(KvmError::Version(version));
    }
    let mut needed = NEEDED.iter().chain(platform::NEEDED);
    if let Some((_, what)) = needed.find(|(cap, _)| !kvm.check_extension(*cap)) {
        return Err(KvmError::Lacks(what));
    }
    let most = kvm.get_max_vcpus();
    if usize::from(vcpus) > most {
        return Err(KvmError::TooManyVcpus { asked: vcpus, most });
    }
    Ok(kvm)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_does_not_open_comes_with_its_remedy() {
        let told = |errno| KvmError::open(kvm_ioctls::Error::new(errno)).to_string();
        assert!(told(libc::ENOENT).contains(platform::REMEDY));
        assert!(told(libc::EACCES).contains("usermod -aG kvm"));
        assert_eq!(told(libc::EMFILE), "cannot open /dev/kvm");
    }
}

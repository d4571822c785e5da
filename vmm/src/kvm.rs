//! Opens KVM and checks the capabilities that this VMM needs.

use kvm_bindings::KVM_API_VERSION;
use kvm_ioctls::{Cap, Kvm};

/// Errors from opening KVM.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    /// /dev/kvm does not exist, or KVM does not serve it. The field contains the remedy.
    #[error("there is no /dev/kvm: {0}; see 'vmm check'")]
    Missing(&'static str),
    /// The process lacks permission.
    #[error("no permission for /dev/kvm: run as root or join its group with 'usermod -aG kvm $USER'")]
    Permission,
    /// The device cannot be opened for another reason.
    #[error("cannot open /dev/kvm")]
    Open(#[source] kvm_ioctls::Error),
    /// The API version is not [`KVM_API_VERSION`], the only version since 2007.
    #[error("/dev/kvm has API version {0}, not {KVM_API_VERSION}")]
    Version(i32),
    /// This KVM lacks a required capability.
    #[error("this KVM lacks {0}: use host kernel 5.10 or later")]
    Lacks(&'static str),
    /// More vCPUs than this host supports.
    #[error("{asked} vCPUs are too many: this KVM runs at most {most}")]
    TooManyVcpus {
        /// The configured number.
        asked: u8,
        /// KVM's limit.
        most: usize,
    },
    /// KVM refused a step.
    #[error("KVM cannot {what}")]
    Refused {
        /// The step.
        what: &'static str,
        /// KVM's reason.
        #[source]
        source: kvm_ioctls::Error,
    },
}

impl KvmError {
    /// The reason why /dev/kvm does not open, and the remedy if one is known.
    fn open(source: kvm_ioctls::Error, without: &'static str) -> Self {
        match source.errno() {
            libc::ENOENT | libc::ENODEV | libc::ENXIO => Self::Missing(without),
            libc::EACCES | libc::EPERM => Self::Permission,
            _ => Self::Open(source),
        }
    }

    /// For `map_err`: KVM refused to do `what`.
    pub fn refused(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> Self {
        move |source| Self::Refused { what, source }
    }
}

/// The host features that an architecture requires.
#[derive(Debug)]
pub struct Host {
    /// The remedy for a host without KVM.
    pub remedy: &'static str,
    /// The kernel modules that provide KVM on this architecture's processors, besides the module `kvm`.
    pub modules: &'static [&'static str],
    /// Capabilities that a machine needs, in addition to the capabilities that all architectures need.
    pub needed: &'static [(Cap, &'static str)],
}

/// Capabilities that a machine needs on every architecture, in addition to [`Host::needed`].
const NEEDED: [(Cap, &str); 5] = [
    (Cap::UserMemory, "user memory"),
    (Cap::Irqchip, "the in-kernel interrupt controllers"),
    (Cap::Irqfd, "irqfd"),
    (Cap::Ioeventfd, "ioeventfd"),
    (Cap::ImmediateExit, "immediate exit"),
];

/// Opens /dev/kvm and checks that it meets the requirements of `host` and supports `vcpus` vCPUs.
///
/// # Errors
/// [`KvmError`], with a remedy where one is known.
pub fn open(host: &Host, vcpus: u8) -> Result<Kvm, KvmError> {
    let kvm = Kvm::new().map_err(|source| KvmError::open(source, host.remedy))?;
    let version = kvm.get_api_version();
    if u32::try_from(version) != Ok(KVM_API_VERSION) {
        return Err(KvmError::Version(version));
    }
    let mut needed = NEEDED.iter().chain(host.needed);
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
    fn device_that_does_not_open_names_the_remedy() {
        let remedy = "load its module";
        let reported = |errno| KvmError::open(kvm_ioctls::Error::new(errno), remedy).to_string();
        assert!(reported(libc::ENOENT).contains(remedy));
        assert!(reported(libc::EACCES).contains("usermod -aG kvm"));
        assert_eq!(reported(libc::EMFILE), "cannot open /dev/kvm");
    }
}

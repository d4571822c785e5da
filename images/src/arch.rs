//! The architectures of guests and labs: their names in Debian, in the kernel and for compilers, and the
//! differences between their machines.

use std::fmt;

use clap::ValueEnum;

/// An architecture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, ValueEnum)]
pub enum Arch {
    /// The architecture that this program runs on.
    #[default]
    #[value(name = "x86_64")]
    X86_64,
    /// 64-bit Arm, in the lab only.
    #[value(name = "aarch64")]
    Aarch64,
}

impl Arch {
    /// Whether this machine can run the architecture's programs.
    pub fn is_native(self) -> bool {
        self == Self::default()
    }

    /// The name of the cache directory for results of kind `kind`. Each architecture has its own directory.
    pub(crate) fn kind(self, kind: &str) -> String {
        if self.is_native() { kind.to_owned() } else { format!("{kind}-{}", self.debian()) }
    }

    /// Debian's name for the architecture.
    pub fn debian(self) -> &'static str {
        match self {
            Self::X86_64 => "amd64",
            Self::Aarch64 => "arm64",
        }
    }

    /// The suffix of its stock kernels' names.
    pub(crate) fn flavour(self) -> &'static str {
        match self {
            Self::X86_64 => "-cloud-amd64",
            Self::Aarch64 => "-cloud-arm64",
        }
    }

    /// The kernel's name for the architecture: `ARCH` of the kernel's makefiles.
    pub(crate) fn kernel(self) -> &'static str {
        match self {
            Self::X86_64 => "x86",
            Self::Aarch64 => "arm64",
        }
    }

    /// The target triple of its Linux programs.
    pub(crate) fn target(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64-unknown-linux-gnu",
            Self::Aarch64 => "aarch64-unknown-linux-gnu",
        }
    }

    /// The prefix of the GNU compiler and its tools: `CROSS_COMPILE` of the kernel's makefiles.
    pub(crate) fn gnu(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64-linux-gnu-",
            Self::Aarch64 => "aarch64-linux-gnu-",
        }
    }

    /// QEMU's name for the architecture.
    pub(crate) fn qemu(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::Aarch64 => "aarch64",
        }
    }

    /// Whether the exact lab can run guests with several vCPUs.
    pub(crate) fn exact_with_vcpus(self) -> bool {
        self == Self::Aarch64
    }

    /// Whether stock kernels are images that unpack themselves.
    pub(crate) fn compresses_kernels(self) -> bool {
        self == Self::X86_64
    }

    /// Kernel modules for a guest's devices: the virtio transports and, on x86, the panic device. Our VMM has no PCI bus.
    /// A stock QEMU, which is for x86 only, has the device there. Debian's arm64 kernels have no driver for the panic
    /// device.
    pub(crate) fn guest_modules(self) -> &'static [&'static str] {
        match self {
            Self::X86_64 => &["virtio_mmio", "virtio_pci", "pvpanic_mmio"],
            Self::Aarch64 => &["virtio_mmio"],
        }
    }

    /// Kernel modules that provide KVM in the lab.
    pub(crate) fn lab_modules(self) -> &'static [&'static str] {
        match self {
            Self::X86_64 => &["kvm_amd"],
            Self::Aarch64 => &[],
        }
    }

    /// The workspace's packages that are always built. Their programs go into every guest, except the VMM,
    /// which goes into the lab.
    pub(crate) fn packages(self) -> &'static [&'static str] {
        match self {
            Self::X86_64 => &["vmm", "vpmu-client", "outb"],
            Self::Aarch64 => &["vmm", "vpmu-client"],
        }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::X86_64 => "x86",
            Self::Aarch64 => "aarch64",
        })
    }
}

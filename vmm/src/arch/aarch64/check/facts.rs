//! Results of the probes that run small guests, in the form that `vmm check --json` prints, and the consequences of
//! these results for stock kernels.

use serde::Serialize;

use crate::probe::{Check, Finding};

/// Results of the probes, each of which runs a guest of a few instructions.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Guest {
    /// A store outside guest memory reached the VMM with its address and data.
    pub mmio: Finding,
    /// `svc` at EL0 entered EL1, and `eret` returned to EL0.
    pub system_call: Finding,
    /// `brk` at EL1 raised a breakpoint exception.
    pub breakpoint: Finding,
    /// `hvc` with the function PSCI_VERSION returned version 0.2 or later.
    pub hypercall: Finding,
    /// While a vCPU was spinning in the guest, its thread received a signal, and `KVM_RUN` returned.
    pub signal: Finding,
}

impl Guest {
    /// The mechanisms that a stock kernel needs and this machine lacks.
    pub(crate) fn obstacles(&self) -> Vec<&'static str> {
        Finding::failed([
            ("MMIO", &self.mmio),
            ("svc", &self.system_call),
            ("brk", &self.breakpoint),
            ("PSCI", &self.hypercall),
            ("signals", &self.signal),
        ])
    }

    /// Whether any guest runs at all.
    pub(crate) fn runs(&self) -> bool {
        self.mmio.ok
    }

    /// The reason why no guest runs. It is meaningful only if [`Self::runs`] is false.
    pub(crate) fn failure(&self) -> &str {
        &self.mmio.detail
    }

    /// The lines for these findings in the `vmm check` table.
    pub(crate) fn checks(&self) -> Vec<Check> {
        vec![
            Check::choose(
                "guest.mmio",
                &self.mmio,
                "small guests run; virtio devices and the doorbell work",
                "no guest runs on this machine",
            ),
            Check::choose(
                "guest.system-call",
                &self.system_call,
                "programs can make system calls",
                "a stock kernel crashes at the first system call of its first program",
            ),
            Check::choose(
                "guest.breakpoint",
                &self.breakpoint,
                "a kernel can patch its own code",
                "a stock kernel crashes when it patches its own code",
            ),
            Check::choose(
                "guest.hypercall",
                &self.hypercall,
                "a kernel can start its processors, power off and reset",
                "a kernel can neither start its other processors nor power off",
            ),
            Check::choose(
                "guest.signal",
                &self.signal,
                "an overflow can stop a vCPU: exact samples",
                "vCPUs cannot be stopped: no sampling, no clean end",
            ),
        ]
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    fn good() -> Finding {
        Finding::yes("good")
    }

    impl Guest {
        /// Findings on a machine without faults.
        pub(crate) fn good() -> Self {
            Self { mmio: good(), system_call: good(), breakpoint: good(), hypercall: good(), signal: good() }
        }

        /// Findings on a machine that runs guests, but fails every other probe.
        pub(crate) fn small() -> Self {
            Self { mmio: good(), ..Self::default() }
        }

        /// Asserts findings that hold for every KVM.
        pub(crate) fn assert_small_guests_run(&self) {
            assert_eq!(self.obstacles(), [""; 0], "{self:?}");
        }
    }

    /// Whether the processor has hardware virtualisation. This is always true, because KVM on aarch64 requires it.
    pub(crate) fn has_hardware_virtualisation() -> bool {
        true
    }

    #[test]
    fn failed_probe_is_an_obstacle_to_stock_kernels() {
        assert!(Guest::good().obstacles().is_empty());
        let spoil: [fn(&mut Guest); 5] = [
            |g| g.mmio.ok = false,
            |g| g.system_call.ok = false,
            |g| g.breakpoint.ok = false,
            |g| g.hypercall.ok = false,
            |g| g.signal.ok = false,
        ];
        for spoil in spoil {
            let mut guest = Guest::good();
            spoil(&mut guest);
            assert_eq!(guest.obstacles().len(), 1, "{guest:?}");
        }
        assert!(Guest::small().runs() && !Guest::default().runs());
    }
}

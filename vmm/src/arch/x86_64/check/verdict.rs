//! Lines of the `vmm check` table for the results of small guests. Each line states the consequence of a result.

use super::facts::{ExitRip, Guest, GuestTsc};
use crate::probe::{Check, Finding};

impl Guest {
    /// The mechanisms that a stock kernel needs and this machine lacks.
    pub(crate) fn obstacles(&self) -> Vec<&'static str> {
        Finding::failed([
            ("port I/O", &self.port_io),
            ("MMIO", &self.mmio),
            ("syscall", &self.syscall),
            ("int3", &self.breakpoint),
            ("cmpxchg16b", &self.cmpxchg16b),
            ("signals", &self.signal),
        ])
    }

    /// Whether any guest runs at all.
    pub(crate) fn runs(&self) -> bool {
        self.port_io.ok
    }

    /// The lines for these findings in the `vmm check` table.
    pub(crate) fn checks(&self) -> Vec<Check> {
        let rip = match self.port_io_rip {
            ExitRip::At => ("at the instruction", "samples at a port write have the address of the write"),
            ExitRip::After => {
                ("after the instruction", "samples at a port write have the address of the next instruction")
            }
            ExitRip::Unknown => ("unknown", "addresses of samples at a port write are uncertain"),
        };
        let tsc = match self.tsc {
            GuestTsc::Offset => ("host's plus KVM's offset", "host times can be converted to guest times exactly"),
            GuestTsc::Host => ("the host's", "guest and host share one clock"),
            GuestTsc::HostDespiteOffset => (
                "the host's, although KVM reports an offset",
                "KVM reports a wrong offset: guest times must be read from the host's counter",
            ),
            GuestTsc::Unknown => ("no relation found", "times in samples may not agree with the guest's clock"),
        };
        vec![
            Check::choose("guest.port-io", &self.port_io, "small guests run", "no guest runs on this machine"),
            Check::new("guest.port-io-rip", rip.0, rip.1),
            Check::choose(
                "guest.mmio",
                &self.mmio,
                "virtio devices and the doorbell work",
                "virtio devices cannot work",
            ),
            Check::choose(
                "guest.syscall",
                &self.syscall,
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
                "guest.cmpxchg16b",
                &self.cmpxchg16b,
                "a kernel's memory allocator works",
                "a stock kernel crashes in its memory allocator",
            ),
            Check::choose(
                "guest.hypercall",
                &self.hypercall,
                "a kernel can call its hypervisor",
                "a guest that makes a hypercall hangs or crashes",
            ),
            Check::choose(
                "guest.signal",
                &self.signal,
                "an overflow can stop a vCPU: exact samples",
                "vCPUs cannot be stopped: no sampling, no clean end",
            ),
            Check::choose(
                "guest.sync-regs",
                &self.sync_regs,
                "registers for a sample cost no system call",
                "registers for a sample cost two system calls",
            ),
            Check::new("guest.tsc", tsc.0, tsc.1),
        ]
    }

    /// The reason why no guest runs. It is meaningful only if [`Self::runs`] is false.
    pub(crate) fn failure(&self) -> &str {
        &self.port_io.detail
    }
}

#[cfg(test)]
pub(super) mod tests;

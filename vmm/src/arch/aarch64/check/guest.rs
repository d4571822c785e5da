//! Probes that run guests of a few instructions, each in a new VM.

use std::time::Duration;

use super::code;
use super::facts::Guest;
use crate::probe::{Finding, finding};
use vpmu_kvm::arch::reg;
use vpmu_kvm::micro::{Exit, Machine, MachineError, Ring, in_loop};

/// Timeout of a probe that ends by itself. It is long because an emulated host is slow.
const BUDGET: Duration = Duration::from_secs(2);
/// Timeout of the probe that runs until a signal stops it.
const BUDGET_SPIN: Duration = Duration::from_millis(20);

/// Whether this processor is emulated by QEMU (`-cpu max`), and so are its counters: its implementer is 0, which is
/// reserved for software.
pub(crate) fn is_emulated() -> bool {
    let processors = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let fields = processors.lines().filter_map(|line| line.split_once(':'));
    fields.map(|(name, value)| (name.trim(), value.trim())).any(|field| field == ("CPU implementer", "0x00"))
}

/// Runs every probe.
pub(crate) fn probe() -> Guest {
    Guest {
        mmio: finding(BUDGET, Ring::Kernel, code::STORE, |machine| {
            Ok(match machine.run() {
                Exit::Store(code::RESULT, code::STORE_VALUE) => Finding::yes("address and data arrive"),
                exit => Finding::no(exit.describe()),
            })
        }),
        system_call: finding(BUDGET, Ring::User, code::CALL, system_call),
        breakpoint: finding(BUDGET, Ring::Kernel, code::BREAKPOINT, |machine| {
            Ok(match machine.run() {
                Exit::Store(code::EXCEPTION, code::CLASS_BRK) => Finding::yes("raises a breakpoint exception"),
                exit => Finding::no(exit.describe()),
            })
        }),
        hypercall: finding(BUDGET, Ring::Kernel, code::HYPERCALL, |machine| {
            machine.set(reg::x(0), code::PSCI_VERSION)?;
            machine.set(reg::x(4), code::WINDOW)?;
            Ok(match machine.run() {
                Exit::Store(code::RESULT, version) if version >= code::PSCI_0_2 => {
                    let (major, minor) = (version >> 16, version & 0xffff);
                    Finding::yes(format!("PSCI {major}.{minor} answers"))
                }
                exit => Finding::no(exit.describe()),
            })
        }),
        signal: finding(BUDGET_SPIN, Ring::Kernel, code::LOOP, |machine| {
            let exit = machine.run();
            let at = machine.get(reg::PC)?;
            Ok(match exit {
                Exit::Stopped if in_loop(at) => Finding::yes("makes KVM_RUN return"),
                Exit::Stopped => Finding::no(format!("left the guest at {at:#x}")),
                exit => Finding::no(exit.describe()),
            })
        }),
    }
}

/// Probes `svc` and `eret`. Checks the exception level that the guest reports after `svc`, and the one that KVM reports
/// after `eret`.
fn system_call(machine: &mut Machine) -> Result<Finding, MachineError> {
    let up = machine.run();
    if up != Exit::Store(code::RESULT, code::EL1) {
        return Ok(Finding::no(format!("{} instead of entering the kernel", up.describe())));
    }
    let down = machine.run();
    let back = down == Exit::Store(code::RETURNED, code::STORE_VALUE);
    let user = vpmu::CpuState::is_user(machine.get(reg::PSTATE)?);
    Ok(if back && user {
        Finding::yes("EL0 to EL1 and back")
    } else {
        Finding::no(format!("{} instead of returning to the program", down.describe()))
    })
}

//! Probes that run guests of a few instructions, each in a new VM.
//!
//! Only a guest can show that a feature works: a nested or emulated KVM may report every capability and still put its
//! guest into the wrong ring at `syscall`.

use std::arch::x86_64::{__cpuid, _rdtsc};
use std::time::Duration;

use super::code;
use super::facts::{ExitRip, Guest, GuestTsc};
use crate::probe::{Finding, finding, on_machine};
use vpmu_kvm::micro::{Exit, Machine, MachineError, Ring, in_loop};

/// Timeout of a probe that ends by itself. It is long because an emulated host is slow.
const BUDGET: Duration = Duration::from_secs(2);
/// Timeout of the hypercall probe. It is needed because a broken KVM repeats the instruction forever.
const BUDGET_HYPERCALL: Duration = Duration::from_millis(400);
/// Timeout of the probe that runs until a signal stops it.
const BUDGET_SPIN: Duration = Duration::from_millis(20);

/// A hypercall number that KVM does not define, and the value that KVM returns for it.
const HYPERCALL_UNKNOWN: u64 = 0xffff;
const HYPERCALL_ENOSYS: i64 = -1000;

/// CPUID leaf 1, ECX: `cmpxchg16b` exists.
const CPUID_CX16: u32 = 1 << 13;

/// Runs every probe.
pub(crate) fn probe() -> Guest {
    let (port_io, port_io_rip, sync_regs) = port_io();
    Guest {
        port_io,
        port_io_rip,
        sync_regs,
        mmio: finding(BUDGET, Ring::Kernel, code::STORE, |machine| {
            let expected = Exit::Store(code::RESULT, code::STORE_VALUE.into());
            Ok(match machine.run() {
                exit if exit == expected => Finding::yes("address and data arrive"),
                exit => Finding::no(exit.describe()),
            })
        }),
        syscall: finding(BUDGET, Ring::User, code::CALL, syscall),
        breakpoint: finding(BUDGET, Ring::Kernel, code::BREAKPOINT, |machine| {
            Ok(match machine.run() {
                Exit::Store(code::EXCEPTION, 3) => Finding::yes("raises exception 3"),
                exit => Finding::no(exit.describe()),
            })
        }),
        cmpxchg16b: cmpxchg16b(),
        hypercall: finding(BUDGET_HYPERCALL, Ring::Kernel, hypercall(), |machine| {
            machine.set_regs(|regs| regs.rax = HYPERCALL_UNKNOWN)?;
            let expected = Exit::Store(code::RESULT, HYPERCALL_ENOSYS.cast_unsigned());
            Ok(match machine.run() {
                exit if exit == expected => Finding::yes("an unknown number returns an error"),
                exit => Finding::no(exit.describe()),
            })
        }),
        signal: finding(BUDGET_SPIN, Ring::Kernel, code::LOOP, |machine| {
            let exit = machine.run();
            let at = machine.regs()?.rip;
            Ok(match exit {
                Exit::Stopped if in_loop(at) => Finding::yes("makes KVM_RUN return"),
                Exit::Stopped => Finding::no(format!("left the guest at {at:#x}")),
                exit => Finding::no(exit.describe()),
            })
        }),
        tsc: tsc(),
    }
}

/// Probes a port write, the instruction pointer at the resulting exit, and the registers that KVM copies to `struct
/// kvm_run`.
fn port_io() -> (Finding, ExitRip, Finding) {
    let unseen = || Finding::no("no port write to look at");
    let judged = on_machine(BUDGET, Ring::Kernel, code::PORT_WRITE, move |machine| {
        machine.set_regs(|regs| {
            regs.rdx = code::PORT.into();
            regs.rax = code::PORT_VALUE.into();
        })?;
        machine.sync_regs();
        let first = machine.run();
        if first != Exit::Port(code::PORT, vec![code::PORT_VALUE]) {
            let finding = Finding::no(first.describe());
            return Ok((finding, ExitRip::Unknown, unseen()));
        }
        let (rip, synced) = (machine.regs()?.rip, machine.synced_rip());
        let place = match rip.wrapping_sub(code::PROGRAM) {
            0 => ExitRip::At,
            code::OUT_LENGTH => ExitRip::After,
            _ => ExitRip::Unknown,
        };
        let sync = if rip == synced {
            Finding::yes("equal those of KVM_GET_REGS")
        } else {
            Finding::no(format!("rip {synced:#x}, but KVM_GET_REGS {rip:#x}"))
        };
        let finding = match machine.run() {
            Exit::Halt => Finding::yes("one write, one exit, then the halt"),
            exit => Finding::no(format!("after the write it {}", exit.describe())),
        };
        Ok((finding, place, sync))
    });
    judged.unwrap_or_else(|error| (Finding::no(error), ExitRip::Unknown, unseen()))
}

/// Probes `syscall` and `sysret`. Checks the code selectors that the guest reads and the privilege levels that KVM
/// reports.
fn syscall(machine: &mut Machine) -> Result<Finding, MachineError> {
    let down = match machine.run() {
        Exit::Store(code::RESULT, selector) => selector,
        exit => {
            return Ok(Finding::no(format!("{} instead of entering the kernel", exit.describe())));
        }
    };
    let cpl = machine.cpl()?;
    if cpl != 0 || down != u64::from(code::KERNEL_CS) {
        return Ok(Finding::no(format!("arrives in ring {cpl} with cs {down:#x} instead of in ring 0")));
    }
    let up = match machine.run() {
        Exit::Store(code::RETURNED, selector) => selector,
        exit => {
            return Ok(Finding::no(format!("{} instead of returning to the program", exit.describe())));
        }
    };
    let cpl = machine.cpl()?;
    if cpl != 3 || up != u64::from(code::USER_CS) {
        return Ok(Finding::no(format!("returns to ring {cpl} with cs {up:#x} instead of to ring 3")));
    }
    Ok(Finding::yes("ring 3 to ring 0 and back"))
}

fn cmpxchg16b() -> Finding {
    if __cpuid(1).ecx & CPUID_CX16 == 0 {
        return Finding::yes("not offered by CPUID");
    }
    const NEW: u64 = 0x0123_4567_89ab_cdef;
    finding(BUDGET, Ring::Kernel, code::EXCHANGE, |machine| {
        machine.set_regs(|regs| {
            regs.rsi = code::SCRATCH;
            (regs.rax, regs.rdx) = (0, 0);
            (regs.rbx, regs.rcx) = (NEW, !NEW);
        })?;
        Ok(match machine.run() {
            Exit::Store(code::RESULT, NEW) => Finding::yes("exchanges"),
            exit => Finding::no(exit.describe()),
        })
    })
}

/// Whether this processor is emulated by QEMU (TCG), and so are its counters.
pub(crate) fn is_emulated() -> bool {
    const HYPERVISOR: u32 = 1 << 31;
    const LEAF_HYPERVISOR: u32 = 0x4000_0000;
    if __cpuid(1).ecx & HYPERVISOR == 0 {
        return false;
    }
    let leaf = __cpuid(LEAF_HYPERVISOR);
    [leaf.ebx, leaf.ecx, leaf.edx].map(u32::to_le_bytes).concat() == b"TCGTCGTCGTCG"
}

/// The hypercall instruction of this CPU's vendor.
fn hypercall() -> &'static [u8] {
    match &__cpuid(0).ecx.to_le_bytes() {
        // GenuineIntel, CentaurHauls, "  Shanghai  ": the vendors with VMX.
        b"ntel" | b"auls" | b"ai  " => code::VMCALL,
        _ => code::VMMCALL,
    }
}

fn tsc() -> GuestTsc {
    let judged = on_machine(BUDGET, Ring::Kernel, code::READ_TSC, |machine| {
        let offset = machine.tsc_offset();
        let before = host_tsc();
        let exit = machine.run();
        let after = host_tsc();
        let Exit::Store(code::RESULT, guest) = exit else {
            return Ok(GuestTsc::Unknown);
        };
        // Use wrapping arithmetic, because the offset is usually negative: the guest's counter is behind the host's.
        let fits = |offset: u64| guest.wrapping_sub(offset).wrapping_sub(before) <= after - before;
        Ok(match offset {
            Some(offset) if offset != 0 && fits(offset) => GuestTsc::Offset,
            None | Some(0) if fits(0) => GuestTsc::Host,
            Some(_) if fits(0) => GuestTsc::HostDespiteOffset,
            _ => GuestTsc::Unknown,
        })
    });
    judged.unwrap_or_default()
}

#[expect(unsafe_code, reason = "one instruction without preconditions")]
fn host_tsc() -> u64 {
    // SAFETY: every x86-64 CPU has rdtsc, and Linux permits it in user mode.
    unsafe { _rdtsc() }
}

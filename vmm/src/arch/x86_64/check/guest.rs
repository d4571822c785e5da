//! What guests of a few instructions do here, one fresh machine per question.
//!
//! The capability list says what KVM promises; only running says what it keeps. A nested or
//! software variant can offer everything and still lose the ring on `syscall`.

use std::arch::x86_64::{__cpuid, _rdtsc};
use std::time::Duration;

use kvm_ioctls::Kvm;

use super::code;
use super::facts::{ExitRip, Guest, GuestTsc};
use super::machine::{Exit, Machine, MachineError};
use crate::check::{Finding, Ring, Watch, watched};
use crate::report;

/// For a probe that ends on its own: generous, an emulated host is slow.
const BUDGET: Duration = Duration::from_secs(2);
/// For the hypercall, which a broken KVM repeats for ever.
const BUDGET_HYPERCALL: Duration = Duration::from_millis(400);
/// For the one that only a signal ends.
const BUDGET_SPIN: Duration = Duration::from_millis(20);

/// The hypercall number that no KVM defines, and KVM's answer to it.
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
                exit if exit == expected => Finding::yes("an unknown one is answered"),
                exit => Finding::no(exit.describe()),
            })
        }),
        signal: finding(BUDGET_SPIN, Ring::Kernel, code::LOOP, |machine| {
            let exit = machine.run();
            let within = code::PROGRAM..code::PROGRAM + code::LOOP.len() as u64;
            let at = machine.regs()?.rip;
            Ok(match exit {
                Exit::Stopped if within.contains(&at) => Finding::yes("ends the run call"),
                Exit::Stopped => Finding::no(format!("left the guest at {at:#x}")),
                exit => Finding::no(exit.describe()),
            })
        }),
        tsc: tsc(),
    }
}

/// Builds a machine on a watched thread and lets `judge` run it.
///
/// # Errors
/// In words: what KVM refused, or that the probe never came back.
fn on_machine<T: Send + 'static>(
    budget: Duration,
    ring: Ring,
    program: &'static [u8],
    judge: impl FnOnce(&mut Machine) -> Result<T, MachineError> + Send + 'static,
) -> Result<T, String> {
    let probe = move |watch: &Watch| {
        let kvm = Kvm::new().map_err(|e| MachineError::Kvm("opening /dev/kvm", e))?;
        judge(&mut Machine::new(&kvm, watch, ring, program)?)
    };
    match watched(budget, probe) {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(report::chain(&error)),
        Err(error) => Err(report::chain(&error)),
    }
}

fn finding(
    budget: Duration,
    ring: Ring,
    program: &'static [u8],
    judge: impl FnOnce(&mut Machine) -> Result<Finding, MachineError> + Send + 'static,
) -> Finding {
    on_machine(budget, ring, program, judge).unwrap_or_else(Finding::no)
}

/// The write, where it leaves the instruction pointer, and whether the copied registers agree.
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

/// Down to ring 0 and back up, judged by the selectors that the guest reads and by KVM's own view.
fn syscall(machine: &mut Machine) -> Result<Finding, MachineError> {
    let down = match machine.run() {
        Exit::Store(code::RESULT, selector) => selector,
        exit => {
            return Ok(Finding::no(format!(
                "{} instead of arriving",
                exit.describe()
            )));
        }
    };
    let cpl = machine.cpl()?;
    if cpl != 0 || down != u64::from(code::KERNEL_CS) {
        return Ok(Finding::no(format!(
            "arrives in ring {cpl} with cs {down:#x} instead of in ring 0"
        )));
    }
    let up = match machine.run() {
        Exit::Store(code::RETURNED, selector) => selector,
        exit => {
            return Ok(Finding::no(format!(
                "{} instead of returning",
                exit.describe()
            )));
        }
    };
    let cpl = machine.cpl()?;
    if cpl != 3 || up != u64::from(code::USER_CS) {
        return Ok(Finding::no(format!(
            "returns to ring {cpl} with cs {up:#x} instead of to ring 3"
        )));
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

/// The hypercall instruction of this CPU's vendor.
fn hypercall() -> &'static [u8] {
    match &__cpuid(0).ecx.to_le_bytes() {
        // GenuineIntel, CentaurHauls, "  Shanghai  ": the ones with VMX.
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
        // Two's complement: the guest's counter usually lies behind the host's.
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
    // SAFETY: every x86-64 CPU has rdtsc, and Linux leaves it open to programs.
    unsafe { _rdtsc() }
}

/// A machine whose ring 0 or ring 3 is to be watched from outside while it loops.
///
/// The observer starts before the guest runs, on the thread that runs it, and is asked for its
/// answer once `budget` has ended the run, or earlier when `done`, which each signal asks.
pub(crate) fn spin<O: 'static, T: Send + 'static>(
    budget: Duration,
    ring: Ring,
    start: impl FnOnce() -> Result<O, String> + Send + 'static,
    mut done: impl FnMut(&O) -> bool + Send + 'static,
    finish: impl FnOnce(O) -> Result<T, String> + Send + 'static,
) -> Result<T, String> {
    let answer = on_machine(budget, ring, code::LOOP, move |machine| {
        let observer = match start() {
            Ok(observer) => observer,
            Err(error) => return Ok(Err(error)),
        };
        let exit = machine.run_until(|| done(&observer));
        Ok(match exit {
            Exit::Stopped => finish(observer),
            exit => Err(format!("the guest {}", exit.describe())),
        })
    });
    answer.and_then(|observed| observed)
}

/// Whether `ip` lies in the loop that [`spin`] runs.
pub(crate) fn in_loop(ip: u64) -> bool {
    (code::PROGRAM..code::PROGRAM + code::LOOP.len() as u64).contains(&ip)
}

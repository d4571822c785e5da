//! Attacks on the machine by programs. Each attack runs in its own process. After each attack, every vCPU must still
//! count.
#![expect(unsafe_code, reason = "instructions and calls that no program needs")]

use std::io;
use std::mem;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::arch::{ATTACKS, Attack};
use crate::ensure::ensure_eq;
use crate::os;
use crate::raw::{Device, Doorbell, How, KIND_MARK, PAGE, refused};
use crate::{Outcome, cpu};

const GROUP: &str = "hostile";

const VALUE: u64 = 90;
const CPUS: usize = 2;
/// Size of a signal's stack in bytes. It is large enough for the signal frame on every architecture.
const STACK: usize = 64 << 10;
/// The exit code of a child that was not allowed to map the doorbell.
const REFUSED: i32 = 20;
/// A child's exit code: something else failed.
const FAILED: i32 = 21;

/// Runs `act` in a child, as the user nobody, on `cpu`. Returns the child's exit code.
fn as_nobody(cpu: usize, act: impl FnOnce() -> io::Result<i32>) -> io::Result<i32> {
    os::forked(|| {
        let acted = cpu::pin(cpu).and_then(|()| os::become_nobody()).and_then(|()| act());
        acted.unwrap_or(FAILED)
    })
}

/// Checks that the device still works on each vCPU. A new event must count exactly the marks that are placed.
fn ensure_answers() -> Outcome {
    let device = Device::open()?;
    for cpu in 0..CPUS {
        cpu::pin(cpu)?;
        let event = device.start(&device.attr(KIND_MARK, VALUE), How::OWN)?;
        device.place(VALUE, 10)?;
        ensure_eq!(event.count()?, 10, "marks on CPU {cpu} after an attack");
    }
    Ok(())
}

/// VPMU-G-4-1.
#[apply(guest_test)]
fn doorbell_map_without_capability_is_refused() -> Outcome {
    let code = as_nobody(0, || {
        let refusal = refused(Doorbell::map(&Device::open()?));
        Ok(refusal.unwrap_or(0))
    })?;
    ensure_eq!(code, libc::EPERM, "errno for a mapping by the user nobody");
    Doorbell::map(&Device::open()?)?;
    Ok(())
}

/// Takes a signal on a stack that ends at `end`, so that the kernel writes the signal frame below `end`. Returns
/// whether the handler ran.
fn take_signal_below(end: *mut u8) -> io::Result<bool> {
    static RAN: AtomicBool = AtomicBool::new(false);
    extern "C" fn handler(_signal: i32) {
        RAN.store(true, Ordering::Relaxed);
    }
    let stack = libc::stack_t { ss_sp: end.wrapping_sub(STACK).cast(), ss_flags: 0, ss_size: STACK };
    // SAFETY: the kernel reads the stack's description during the call.
    if unsafe { libc::sigaltstack(&raw const stack, ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: all zeros are valid for this plain structure.
    let mut action: libc::sigaction = unsafe { mem::zeroed() };
    action.sa_sigaction = handler as *const () as usize;
    action.sa_flags = libc::SA_ONSTACK;
    // SAFETY: the kernel reads the action during the call.
    if unsafe { libc::sigaction(libc::SIGUSR1, &raw const action, ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call takes only a number. If the kernel cannot write the signal frame, it kills only this child
    // process.
    unsafe { libc::raise(libc::SIGUSR1) };
    Ok(RAN.load(Ordering::Relaxed))
}

/// A signal frame on a mapped doorbell would end the machine, because the kernel writes the frame with instructions
/// that KVM does not emulate.
#[apply(guest_test)]
fn signal_frame_of_nobody_never_reaches_the_doorbell() -> Outcome {
    for cpu in 0..CPUS {
        let mut memory = vec![0; STACK];
        let code = as_nobody(cpu, || {
            let ran = take_signal_below(memory.as_mut_ptr_range().end)?;
            Ok(i32::from(!ran))
        })?;
        ensure_eq!(code, 0, "the exit code with a signal frame in memory, CPU {cpu}");
        let code = as_nobody(cpu, || match Doorbell::map(&Device::open()?) {
            Ok(bell) => {
                take_signal_below(bell.base().wrapping_add(PAGE))?;
                Ok(0)
            }
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => Ok(REFUSED),
            Err(error) => Err(error),
        })?;
        ensure_eq!(code, REFUSED, "the attacker's exit code on CPU {cpu}");
        ensure_answers()?;
    }
    Ok(())
}

#[apply(guest_test)]
fn mark_of_nobody_is_exact() -> Outcome {
    // If `perf_event_paranoid` is 3, which is Debian's default, the user nobody cannot open any event.
    os::set_paranoid(3)?;
    let device = Device::open()?;
    for (cpu, number) in (0..CPUS).zip(0..) {
        let event = device.start(&device.attr(KIND_MARK, VALUE), How::on_cpu(number))?;
        let code = as_nobody(cpu, || {
            let device = Device::open()?;
            device.place(VALUE, 500)?;
            let opened = refused(device.open_event(&device.attr(KIND_MARK, VALUE), How::OWN));
            Ok(opened.unwrap_or(0))
        })?;
        ensure_eq!(code, libc::EACCES, "errno for an event of the user nobody");
        ensure_eq!(event.count()?, 500, "marks by the user nobody, CPU {cpu}");
    }
    Ok(())
}

/// Returns the errno of a system call's result, or zero if the call succeeded.
fn errno(result: libc::c_long) -> i32 {
    if result < 0 { io::Error::last_os_error().raw_os_error().unwrap_or(FAILED) } else { 0 }
}

/// Accesses to the page that do not depend on the architecture, and how the program ends after them.
const ACCESSES: [(&str, Attack, i32); 2] = [
    (
        "getrandom(2) into the page",
        |page| {
            // SAFETY: the kernel checks the address.
            errno(unsafe { libc::syscall(libc::SYS_getrandom, page, PAGE, 0) })
        },
        0,
    ),
    (
        "futex(2) on the page",
        |page| {
            // SAFETY: as above.
            errno(unsafe { libc::syscall(libc::SYS_futex, page, libc::FUTEX_WAIT, 1, ptr::null::<u8>()) })
        },
        libc::EFAULT,
    ),
];

#[apply(guest_test)]
fn accesses_to_a_mapped_doorbell_leave_the_machine_running() -> Outcome {
    let attacks = || ATTACKS.into_iter().chain(ACCESSES);
    let mut ends = Vec::new();
    for (what, access, _) in attacks() {
        for cpu in 0..CPUS {
            let code = os::forked(|| {
                let mapped = cpu::pin(cpu).and_then(|()| Doorbell::map(&Device::open()?));
                match mapped {
                    Ok(bell) => access(bell.base()),
                    Err(_) => FAILED,
                }
            })?;
            ends.push((what, cpu, code));
            ensure_answers()?;
        }
    }
    let expected = attacks().flat_map(|(what, _, end)| (0..CPUS).map(move |cpu| (what, cpu, end)));
    ensure_eq!(ends, expected.collect::<Vec<_>>(), "the ends of the programs");
    Ok(())
}

//! The offset of a vCPU's virtual counter.
#![expect(unsafe_code, reason = "inline assembly reads the virtual counter")]

use kvm_ioctls::VcpuFd;

use super::reg;

/// How many times the guest's counter is read to measure its offset.
const READINGS: usize = 16;

/// Returns the host's virtual counter.
#[must_use]
pub fn host_ticks() -> u64 {
    let ticks: u64;
    // SAFETY: the instructions only read the virtual counter, which Linux lets user space read.
    unsafe {
        core::arch::asm!("isb", "mrs {}, cntvct_el0", out(reg) ticks, options(nomem, nostack));
    }
    ticks
}

/// Returns the guest's virtual counter minus the host's. Reads the counters several times and uses the fastest of these
/// readings, because it is the most precise.
///
/// # Errors
/// The error of `KVM_GET_ONE_REG`.
pub fn clock_offset(vcpu: &VcpuFd) -> Result<u64, kvm_ioctls::Error> {
    let mut best = (u64::MAX, 0);
    for _ in 0..READINGS {
        let before = host_ticks();
        let guest = reg::get(vcpu, reg::TIMER_COUNT)?;
        let took = host_ticks().wrapping_sub(before);
        let host = before.wrapping_add(took / 2);
        best = best.min((took, guest.wrapping_sub(host)));
    }
    Ok(best.1)
}

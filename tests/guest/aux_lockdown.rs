//! Traces in a locked-down kernel. Lockdown lasts until the next boot, so these tests come last.

use std::ffi::CStr;
use std::fs;

use crate::ensure::ensure_eq;
use crate::raw::{Device, EXIT_PORT, How, KIND_EXIT_TRACE, KIND_SAMPLE_TRACE, PACE_EXITS, refused, sampling, silent};
use crate::{Outcome, os};

const GROUP: &str = "aux";

const SECURITY: &CStr = c"/sys/kernel/security";

// Only a reboot undoes a lockdown.
#[apply(guest_test)]
#[last]
fn locked_down_kernel_hides_registers() -> Outcome {
    let device = Device::open()?;
    let registers = sampling(silent(device.attr(KIND_SAMPLE_TRACE, PACE_EXITS)), 1, 0);
    let exits = silent(device.attr(KIND_EXIT_TRACE, EXIT_PORT));
    ensure_eq!(refused(device.open_event(&registers, How::OWN)), None, "registers, before the lockdown");
    os::mount(c"securityfs", SECURITY)?;
    fs::write("/sys/kernel/security/lockdown", "confidentiality")?;
    ensure_eq!(refused(device.open_event(&registers, How::OWN)), Some(libc::EPERM), "registers");
    ensure_eq!(refused(device.open_event(&exits, How::OWN)), None, "exits");
    Ok(())
}

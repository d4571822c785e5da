//! Exits that only this architecture has: accesses to ports.

use kvm_ioctls::{VcpuExit, VcpuFd};
use vpmu::Access;

use crate::bus::{Bus, Caller};

/// Handles `exit` if it is port I/O. Otherwise, returns `exit` to the caller. `access` contains the size in bytes of each
/// access.
pub(crate) fn serve<'a>(
    exit: VcpuExit<'a>,
    access: Option<Access>,
    caller: &mut Caller<'_>,
    ports: &Bus,
) -> Option<VcpuExit<'a>> {
    // A string instruction makes many accesses in one exit. Pass each access to the device separately.
    let size = access.map_or(1, |access| usize::from(access.size).max(1));
    match exit {
        VcpuExit::IoOut(port, data) => {
            for data in data.chunks_exact(size) {
                ports.write(port.into(), data, caller);
            }
        }
        VcpuExit::IoIn(port, data) => {
            for data in data.chunks_exact_mut(size) {
                ports.read(port.into(), data);
            }
        }
        other => return Some(other),
    }
    None
}

/// Whether the guest made an access that KVM could not decode. Always false on x86-64.
pub(crate) fn is_undecoded(_exit: &VcpuExit<'_>) -> bool {
    false
}

/// Does nothing: on x86-64, KVM decodes every access.
///
/// # Errors
/// None.
pub(crate) fn refuse_undecoded(_vcpu: &VcpuFd) -> Result<(), kvm_ioctls::Error> {
    Ok(())
}

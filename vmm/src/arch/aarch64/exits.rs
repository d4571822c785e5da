//! Exits that only this architecture has: this VMM uses none of them.

use kvm_ioctls::VcpuExit;
use vpmu::Access;

use super::emulation::VcpuEmulation;
use crate::bus::{Bus, Caller};

/// Handles `exit`, with `access`; returns one of another kind.
pub(crate) fn serve<'a>(
    exit: VcpuExit<'a>,
    _access: Option<Access>,
    _caller: &mut Caller<'_>,
    _emulation: Option<&mut VcpuEmulation>,
    _ports: &Bus,
) -> Option<VcpuExit<'a>> {
    Some(exit)
}

//! aarch64.

pub(crate) mod accesses;
mod attacks;
mod ports;
pub(crate) mod stubs;

pub(crate) use attacks::ATTACKS;
pub(crate) use ports::{
    EXIT_PORT, IDLE_PORT, OWN_IN_USER_MODE, PORT_DETAIL, PORT_EXITS, PORT_REASON, PORT_WRITTEN,
    STORE_EXITS, allow_ports, port_write, ticks,
};

use crate::Test;

/// The exits of the most complete trace: those that reach the VMM. The device reads KVM's own trace only on x86.
pub(crate) const MOST_EXITS: u64 = vpmu_abi::EXIT_USER;
/// Reasons for which no vCPU exits to the VMM.
pub(crate) const UNREACHABLE_EXITS: &[u64] = &[vpmu_abi::EXIT_IO, vpmu_abi::EXIT_HLT];
/// Whether the first record of a boot's exits to the VMM is from the kernel's first second.
pub(crate) const EXITS_AT_ONCE: bool = false;

/// How perf prints the instruction pointer among registers, up to its digits.
pub(crate) const PERF_ADDRESS: &str = ".... pc    0x";

/// Tests of exits by the hardware's own numbers: KVM has a trace of them only on x86.
pub(crate) fn hardware() -> Option<Vec<Test>> {
    None
}

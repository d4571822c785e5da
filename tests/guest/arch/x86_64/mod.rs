//! x86-64.

pub(crate) mod accesses;
mod attacks;
mod hardware;
mod ports;
pub(crate) mod stubs;

pub(crate) use attacks::ATTACKS;
pub(crate) use ports::{
    EXIT_PORT, IDLE_PORT, OWN_IN_USER_MODE, PORT_DETAIL, PORT_EXITS, PORT_REASON, PORT_WRITTEN,
    STORE_EXITS, allow_ports, port_write, ticks,
};

use crate::Test;

/// The exits of the most complete trace, including those that KVM handles by itself.
pub(crate) const MOST_EXITS: u64 = vpmu_abi::EXIT_ALL;
/// Reasons for which no vCPU exits to the VMM.
pub(crate) const UNREACHABLE_EXITS: &[u64] = &[];
/// Whether the first record of a boot's exits to the VMM is from the kernel's first second.
pub(crate) const EXITS_AT_ONCE: bool = true;

/// How perf prints the instruction pointer among registers, up to its digits.
pub(crate) const PERF_ADDRESS: &str = ".... IP    0x";

/// Tests of exits by the hardware's own numbers.
pub(crate) fn hardware() -> Option<Vec<Test>> {
    Some(hardware::TESTS.to_vec())
}

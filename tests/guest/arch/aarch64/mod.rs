//! aarch64.

mod attacks;
pub(crate) mod known_code;
pub(crate) mod mmio_pio;
mod ports;

pub(crate) use attacks::ATTACKS;
pub(crate) use ports::{
    EXIT_PORT, IDLE_PORT, OWN_IN_USER_MODE, PORT_DETAIL, PORT_EXITS, PORT_REASON, PORT_WRITTEN, STORE_EXITS,
    allow_ports, port_write, ticks,
};

/// The trace config that selects the most exits. On aarch64, it selects the exits that reach the VMM, because the
/// device reads KVM's own trace only on x86.
pub(crate) const MOST_EXITS: u64 = vpmu_abi::EXIT_USER;
/// The reasons for which a vCPU of this architecture never exits to the VMM.
pub(crate) const UNREACHABLE_EXITS: &[u64] = &[vpmu_abi::EXIT_IO, vpmu_abi::EXIT_HLT];
/// Whether a guest's first exit to the VMM occurs within a second after its kernel has started.
pub(crate) const EXITS_AT_ONCE: bool = false;

/// In perf's dump of the registers, the text before the instruction pointer's hexadecimal digits.
pub(crate) const PERF_ADDRESS: &str = ".... pc    0x";
/// The raw event that counts instructions: `INST_RETIRED` of Armv8.
pub(crate) const INSTRUCTIONS_CONFIG: u64 = 0x08;
/// Bits of a raw event's config that select no event.
pub(crate) const RAW_IGNORED: u64 = 0;
/// Instructions of the program `million` besides its loop.
pub(crate) const MILLIONS_OTHERS: u64 = 6;
/// Branches of the program `million` besides its loop. `None`: the PMU of the lab does not count branches.
pub(crate) const MILLIONS_OTHER_BRANCHES: Option<u64> = None;

//! x86-64.

mod attacks;
mod hardware;
mod kernel_chains;
pub(crate) mod known_code;
pub(crate) mod mmio_pio;
mod ports;

pub(crate) use attacks::ATTACKS;
pub(crate) use ports::{
    EXIT_PORT, IDLE_PORT, OWN_IN_USER_MODE, PORT_DETAIL, PORT_EXITS, PORT_REASON, PORT_WRITTEN, STORE_EXITS,
    allow_ports, port_write, ticks,
};

/// The trace config that selects the most exits. On x86, it selects all exits, including those that KVM handles by
/// itself.
pub(crate) const MOST_EXITS: u64 = vpmu_abi::EXIT_ALL;
/// The reasons for which a vCPU of this architecture never exits to the VMM.
pub(crate) const UNREACHABLE_EXITS: &[u64] = &[];
/// Whether a guest's first exit to the VMM occurs within a second after its kernel has started.
pub(crate) const EXITS_AT_ONCE: bool = true;

/// In perf's dump of the registers, the text before the instruction pointer's hexadecimal digits.
pub(crate) const PERF_ADDRESS: &str = ".... IP    0x";
/// The raw event that counts instructions: `ex_ret_instr` of AMD's processors.
pub(crate) const INSTRUCTIONS_CONFIG: u64 = 0xc0;
/// Bits of a raw event's config that select no event: those of an event select register that the kernel sets itself.
pub(crate) const RAW_IGNORED: u64 = 0x53 << 16;
/// Instructions of the program `million` besides its loop.
pub(crate) const MILLIONS_OTHERS: u64 = 4;
/// Branches of the program `million` besides its loop: the system call, which AMD counts, too.
pub(crate) const MILLIONS_OTHER_BRANCHES: Option<u64> = Some(1);

//! The guest kernel's RDPMC, which KVM cannot hand to user space.
//!
//! KVM without a PMU of its own answers RDPMC with a general protection fault, and has no exit to user
//! space for it. A stock kernel has the instruction once, in `native_read_pmc`: it becomes RDMSR there, which
//! takes the same registers, costs one exit as RDPMC would, and names the counter by its index.

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryError, GuestMemoryMmap};

/// `mov %edi,%ecx; rdpmc; xchg %ax,%ax; shl $32,%rdx`: the index is the function's argument, and the
/// two-byte NOP is the place of a tracepoint.
const NATIVE_READ_PMC: [u8; 10] = [0x89, 0xf9, 0x0f, 0x33, 0x66, 0x90, 0x48, 0xc1, 0xe2, 0x20];
/// The second byte of the instruction, and what makes it RDMSR.
const OPCODE: usize = 3;
const RDMSR: u8 = 0x32;
/// Where a kernel is loaded, and where it ends at the latest.
const KERNEL: std::ops::Range<u64> = 0x10_0000..0x800_0000;

/// Why the kernel cannot read its counters.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RdpmcError {
    /// Guest memory is not as it should be.
    #[error("cannot read the guest's kernel")]
    Memory(#[from] GuestMemoryError),
    /// Another kernel.
    #[error("the guest's kernel has native_read_pmc {0} times, not once")]
    Found(usize),
}

/// Turns the RDPMC of the kernel that runs in `memory` into RDMSR.
///
/// # Errors
/// [`RdpmcError`].
pub(crate) fn replace(memory: &GuestMemoryMmap) -> Result<(), RdpmcError> {
    let end = KERNEL.end.min(memory.last_addr().0);
    let mut kernel = vec![0; usize::try_from(end - KERNEL.start).unwrap_or(0)];
    memory.read_slice(&mut kernel, GuestAddress(KERNEL.start))?;
    let found: Vec<usize> = kernel
        .windows(NATIVE_READ_PMC.len())
        .enumerate()
        .filter(|(_, bytes)| *bytes == NATIVE_READ_PMC)
        .map(|(at, _)| at)
        .collect();
    let [at] = found[..] else {
        return Err(RdpmcError::Found(found.len()));
    };
    let place = GuestAddress(KERNEL.start + (at + OPCODE) as u64);
    Ok(memory.write_obj(RDMSR, place)?)
}

//! The guest kernel's RDPMC, which KVM cannot forward to user space.
//!
//! If the vCPU has no PMU, KVM answers RDPMC with a general protection fault, without an exit to user space. A stock
//! kernel has the instruction only once, in `native_read_pmc`. This module replaces it with RDMSR, which uses the same
//! general registers: the counter's index becomes the number of the MSR to read. Like a trapped RDPMC, the RDMSR costs
//! one exit.

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryError, GuestMemoryMmap};

/// `mov %edi,%ecx; rdpmc; xchg %ax,%ax; shl $32,%rdx`. The index is the function's argument, and the two-byte NOP is a
/// place for a tracepoint.
const NATIVE_READ_PMC: [u8; 10] = [0x89, 0xf9, 0x0f, 0x33, 0x66, 0x90, 0x48, 0xc1, 0xe2, 0x20];
/// Offset of the second byte of RDPMC in this code, and the value of that byte in RDMSR.
const OPCODE: usize = 3;
const RDMSR: u8 = 0x32;
/// The address range in which to search for the kernel's code. It starts at the kernel's load address.
const KERNEL: std::ops::Range<u64> = 0x10_0000..0x800_0000;

/// Errors of patching the guest's kernel.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RdpmcError {
    /// Guest memory cannot be read.
    #[error("cannot read the guest's kernel")]
    Memory(#[from] GuestMemoryError),
    /// An unexpected kernel.
    #[error("found native_read_pmc {0} times in the guest's kernel, expected it once")]
    Found(usize),
}

/// Patches RDPMC to RDMSR in the kernel in `memory`.
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

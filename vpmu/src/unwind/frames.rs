//! Finds callers by frame pointers. A frame contains the caller's frame pointer, followed by the return address.

use super::paging::{AddressSpace, Rights};
use crate::arch::{CpuState, FP, GENERAL_REGS, IP, KERNEL_STACK, LOOKED_AT, SP, WALKS_32_BIT_CODE, return_address};

/// perf's `PERF_CONTEXT_*` values, which specify the mode of the addresses that follow them in a chain.
pub(super) const CONTEXT_KERNEL: u64 = -128_i64 as u64;
pub(super) const CONTEXT_USER: u64 = -512_i64 as u64;

/// Bytes of one frame of 64-bit code.
const FRAME: u64 = 16;

/// A call chain under construction.
#[derive(Debug, Default)]
pub(super) struct Chain {
    entries: Vec<u64>,
    /// Number of addresses that still fit.
    left: u32,
}

impl Chain {
    /// Returns an empty chain for at most `most` addresses.
    pub(super) fn begin(&mut self, most: u32) {
        self.entries.clear();
        self.left = most;
    }

    pub(super) fn entries(&self) -> &[u64] {
        &self.entries
    }

    /// Appends a `PERF_CONTEXT_*` value, which specifies the mode of the addresses that follow. The value does not
    /// count towards the chain's maximum length.
    pub(super) fn mark(&mut self, context: u64) {
        self.entries.push(context);
    }

    /// Appends an address; returns whether it fitted.
    pub(super) fn push(&mut self, address: u64) -> bool {
        let Some(left) = self.left.checked_sub(1) else {
            return false;
        };
        self.left = left;
        self.entries.push(address);
        true
    }

    fn is_full(&self) -> bool {
        self.left == 0
    }
}

/// Whether two addresses are on the same kernel stack.
pub(super) fn share_stack(one: u64, other: u64) -> bool {
    one / KERNEL_STACK == other / KERNEL_STACK
}

/// Appends the callers in the kernel to `chain`. `end` is the address at which the kernel's frames end, if
/// known. A kernel may use the frame pointer register for other values. A frame is therefore accepted only if it is on
/// the stack, above the previous frame, and returns to kernel code.
pub(super) fn kernel_callers(space: &mut AddressSpace<'_>, chain: &mut Chain, cpu: &CpuState, end: Option<u64>) {
    let sp = cpu.general[SP];
    let end = end.unwrap_or_else(|| (sp | (KERNEL_STACK - 1)).saturating_add(1));
    if let Some(caller) = caller_without_frame(space, &cpu.general, Rights::Kernel)
        && (!space.is_kernel_code(caller) || !chain.push(caller))
    {
        return;
    }
    let mut least = sp;
    let mut fp = cpu.general[FP];
    while !chain.is_full() && fp >= least && fp.is_multiple_of(8) && fp.checked_add(FRAME).is_some_and(|top| top <= end)
    {
        let Some((next, caller)) = frame64(space, fp, Rights::Kernel) else {
            break;
        };
        if !space.is_kernel_code(caller) || !chain.push(caller) {
            break;
        }
        least = fp + FRAME;
        fp = next;
    }
}

/// Appends the callers in a program to `chain`. Reads the frames with the program's rights. `code64` is true for 64-bit
/// code.
pub(super) fn user_callers(
    space: &mut AddressSpace<'_>,
    chain: &mut Chain,
    general: &[u64; GENERAL_REGS],
    code64: bool,
) {
    if code64 && let Some(caller) = caller_without_frame(space, general, Rights::User) {
        chain.push(caller);
    }
    let mut fp = general[FP];
    while !chain.is_full() {
        let frame = if code64 { frame64(space, fp, Rights::User) } else { frame32(space, fp) };
        let Some((next, caller)) = frame else {
            break;
        };
        chain.push(caller);
        fp = next;
    }
}

/// Returns the caller of a function that has no frame at its next instruction, because it has not set up the frame yet
/// or has already removed it. The frame pointer is then the caller's.
fn caller_without_frame(space: &mut AddressSpace<'_>, general: &[u64; GENERAL_REGS], rights: Rights) -> Option<u64> {
    let ip = general[IP];
    let mut code = [0; LOOKED_AT];
    let filled = space.read(ip, rights, &mut code);
    let before = space.words(ip.wrapping_sub(1), rights).map(|[[before]]| before);
    let offset = return_address(before, code.get(..filled)?)?;
    let [caller] = space.words(general[SP].checked_add(offset)?, rights)?;
    Some(u64::from_le_bytes(caller))
}

/// The frame pointer and the return address in a frame of 64-bit code.
fn frame64(space: &mut AddressSpace<'_>, fp: u64, rights: Rights) -> Option<(u64, u64)> {
    let [next, caller] = space.words(fp, rights)?;
    Some((u64::from_le_bytes(next), u64::from_le_bytes(caller)))
}

/// Like `frame64`, but for 32-bit code. Returns `None` on architectures without support for 32-bit frames.
fn frame32(space: &mut AddressSpace<'_>, fp: u64) -> Option<(u64, u64)> {
    if !WALKS_32_BIT_CODE {
        return None;
    }
    let [next, caller] = space.words(fp & u64::from(u32::MAX), Rights::User)?;
    let wide = |word| u64::from(u32::from_le_bytes(word));
    Some((wide(next), wide(caller)))
}

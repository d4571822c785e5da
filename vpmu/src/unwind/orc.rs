//! Finds callers in a kernel without frame pointers, by the kernel's ORC tables. The tables are the operator's; the
//! registers and the stack are the guest's. Each step reads a few words of kernel memory, and yields an address only if
//! it is kernel code. Chains have a maximum length, so a stack that leads in a circle ends, too.

use vpmu_orc::{BpRule, FrameKind, FrameRule, OrcTable, Register, Rule, SpRule};

use super::frames::{Chain, share_stack};
use super::paging::{AddressSpace, Rights};
use crate::arch::{CpuState, FP, GENERAL_REGS, IP, SP, is_user_address, orc_register, saved_word};

/// Alignment of a kernel's address (`CONFIG_PHYSICAL_ALIGN`).
const ALIGNMENT: u64 = 2 << 20;
/// Kernels are in one GiB, from 16 MiB below the address for which they are linked.
const PLACES: u64 = (1 << 30) / ALIGNMENT;

/// The offset of the running kernel from the address for which it was linked (KASLR). It is kept between samples,
/// because finding it takes up to [`PLACES`] walks through the page tables.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Slide(u64);

impl Slide {
    /// Finds the kernel of `table` in the page tables. It is the first code in its part of the address space: the kernel
    /// unmaps what is before it. `None` if there is no kernel.
    fn find(&mut self, space: &mut AddressSpace<'_>, table: &OrcTable) -> Option<u64> {
        let start = table.start() & !(ALIGNMENT - 1);
        let mut begins_at = |slide: u64| {
            let address = start.checked_add(slide)?;
            let is_first = space.is_kernel_code(address) && !space.is_kernel_code(address.checked_sub(ALIGNMENT)?);
            is_first.then_some(Self(slide))
        };
        *self = begins_at(self.0).or_else(|| (0..PLACES).find_map(|place| begins_at(place * ALIGNMENT)))?;
        Some(self.0)
    }
}

/// Registers that a frame's code had.
#[derive(Debug, Clone, Copy)]
enum Registers<'a> {
    /// The vCPU's.
    Cpu(&'a [u64; GENERAL_REGS]),
    /// A `struct pt_regs` at this address of the kernel's stack.
    Saved(u64),
}

impl Registers<'_> {
    /// Returns the register with perf's number `number`.
    fn get(self, space: &mut AddressSpace<'_>, number: usize) -> Option<u64> {
        match self {
            Self::Cpu(general) => general.get(number).copied(),
            Self::Saved(at) => load(space, at.checked_add(saved_word(number)? as u64 * 8)?),
        }
    }
}

/// A function in the kernel that has not returned yet.
#[derive(Debug, Clone, Copy)]
struct Frame<'a> {
    ip: u64,
    sp: u64,
    bp: u64,
    /// Whether `ip` is the next instruction of interrupted code. Otherwise a call returns to it.
    interrupted: bool,
    /// All registers but `ip`, `sp` and `bp`, as far as they are known.
    registers: Option<Registers<'a>>,
    /// The address of all registers, if this frame was interrupted and its registers were saved.
    saved_at: Option<u64>,
}

impl<'a> Frame<'a> {
    fn of(cpu: &'a CpuState) -> Self {
        Self {
            ip: cpu.general[IP],
            sp: cpu.general[SP],
            bp: cpu.general[FP],
            interrupted: true,
            registers: Some(Registers::Cpu(&cpu.general)),
            saved_at: None,
        }
    }

    /// Returns the caller. `None` if this is the outermost frame, or if its caller cannot be found.
    fn caller(&self, space: &mut AddressSpace<'_>, table: &OrcTable, slide: u64) -> Option<Self> {
        // A call's return address may be the first one of the next function.
        let ip = if self.interrupted { self.ip } else { self.ip.wrapping_sub(1) };
        let Rule::Frame(FrameRule { sp, bp, kind, interrupted }) = table.rule(ip.wrapping_sub(slide))? else {
            return None;
        };
        let top = match sp {
            SpRule::Sum(register, offset) => self.register(space, register)?.wrapping_add_signed(offset.into()),
            SpRule::Loaded { register, before, after } => {
                let at = self.register(space, register)?.wrapping_add_signed(before.into());
                load(space, at)?.wrapping_add_signed(after.into())
            }
        };
        let mut caller = match kind {
            FrameKind::Call => {
                let ip = load(space, top.wrapping_sub(8))?;
                Self { ip, sp: top, bp: self.bp, interrupted, registers: None, saved_at: None }
            }
            FrameKind::Regs => {
                let saved = Registers::Saved(top);
                let (ip, sp) = (saved.get(space, IP)?, saved.get(space, SP)?);
                let bp = saved.get(space, FP)?;
                Self { ip, sp, bp, interrupted, registers: Some(saved), saved_at: Some(top) }
            }
            FrameKind::PartialRegs => {
                // The other registers are not saved yet, so they still have the values of the interrupted code.
                let saved = Registers::Saved(top.wrapping_sub(saved_word(IP)? as u64 * 8));
                let (ip, sp) = (saved.get(space, IP)?, saved.get(space, SP)?);
                let bp = self.registers.map_or(Some(self.bp), |registers| registers.get(space, FP))?;
                Self { ip, sp, bp, interrupted, registers: self.registers, saved_at: None }
            }
        };
        match bp {
            BpRule::Same => {}
            BpRule::FromSp(offset) => caller.bp = load(space, top.wrapping_add_signed(offset.into()))?,
            BpRule::FromBp(offset) => caller.bp = load(space, self.bp.wrapping_add_signed(offset.into()))?,
        }
        // A stack grows downwards, so a caller's part of it is higher.
        (caller.sp > self.sp || !share_stack(caller.sp, self.sp)).then_some(caller)
    }

    fn register(&self, space: &mut AddressSpace<'_>, register: Register) -> Option<u64> {
        match register {
            Register::Sp => Some(self.sp),
            Register::Bp => Some(self.bp),
            Register::Ax | Register::Dx | Register::Di | Register::R10 | Register::R13 => {
                self.registers?.get(space, orc_register(register)?)
            }
        }
    }
}

/// Appends the callers in the kernel to `chain`. Returns the address at which the kernel saved the registers of the
/// program that entered it, if the outermost frame is such an entry.
pub(super) fn orc_callers(
    space: &mut AddressSpace<'_>,
    chain: &mut Chain,
    cpu: &CpuState,
    table: &OrcTable,
    slide: &mut Slide,
) -> Option<u64> {
    let slide = slide.find(space, table)?;
    let mut frame = Frame::of(cpu);
    loop {
        frame = frame.caller(space, table, slide)?;
        // The kernel unmaps the code that runs only during the boot, but its first task has callers there.
        if !table.contains(frame.ip.wrapping_sub(slide)) && !space.is_kernel_code(frame.ip) {
            return frame.saved_at;
        }
        if !chain.push(frame.ip) {
            return None;
        }
    }
}

/// Loads a word of the kernel's stack.
fn load(space: &mut AddressSpace<'_>, address: u64) -> Option<u64> {
    if is_user_address(address) {
        return None;
    }
    let [word] = space.words(address, Rights::Kernel)?;
    Some(u64::from_le_bytes(word))
}

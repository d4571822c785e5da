//! Numbers and choices made from the fuzzer's bytes. The execution ends when the bytes run out.

use libfuzzer_sys::arbitrary::{Result, Unstructured};
use vpmu::{CpuState, Exit, ExitReason, GENERAL_REGS, GuestRegs, Registers};

use super::layout;

/// A small, large or arbitrary number.
pub(crate) fn number(input: &mut Unstructured<'_>) -> Result<u64> {
    Ok(match input.int_in_range(0..=7)? {
        0..=4 => input.int_in_range(0..=8)?,
        5 => input.int_in_range(0..=100_000)?,
        6 => u64::MAX - input.int_in_range(0..=100)?,
        _ => input.arbitrary()?,
    })
}

/// Like [`number`], in 32 bits.
pub(crate) fn half(input: &mut Unstructured<'_>) -> Result<u32> {
    let number = number(input)?;
    Ok(u32::try_from(number & 0xffff_ffff).unwrap_or(0))
}

/// True in one of `times` cases.
pub(crate) fn once_in(input: &mut Unstructured<'_>, times: u8) -> Result<bool> {
    input.ratio(1, times)
}

/// An exit for any reason, with or without details of an I/O access.
pub(crate) fn exit(input: &mut Unstructured<'_>) -> Result<Exit> {
    let reasons = [ExitReason::Io, ExitReason::Mmio, ExitReason::Hlt, ExitReason::Signal, ExitReason::Other];
    let reason = *input.choose(&reasons)?;
    let access = match input.arbitrary()? {
        true => Some(vpmu::Access {
            address: number(input)?,
            size: input.arbitrary()?,
            write: input.arbitrary()?,
            count: half(input)?,
        }),
        false => None,
    };
    Ok(Exit { reason, access })
}

/// The state of a vCPU, as the hypervisor reports it. The guest can choose the values of all registers, including the
/// address of its page tables.
#[derive(Debug)]
pub(crate) enum Cpu {
    /// The hypervisor reports no registers.
    Hidden,
    /// The hypervisor reports address and mode.
    Place(GuestRegs),
    /// The hypervisor reports all registers.
    Whole(Box<CpuState>),
}

impl Registers for Cpu {
    fn registers(&mut self) -> Option<GuestRegs> {
        match self {
            Self::Hidden => None,
            Self::Place(regs) => Some(*regs),
            Self::Whole(state) => Some(GuestRegs { ip: state.general[8], user: state.user }),
        }
    }

    fn state(&mut self) -> Option<CpuState> {
        match self {
            Self::Whole(state) => Some(**state),
            _ => None,
        }
    }
}

/// Makes the registers of a vCPU that has left the guest.
pub(crate) fn cpu(input: &mut Unstructured<'_>) -> Result<Cpu> {
    Ok(match input.int_in_range(0..=3)? {
        0 => Cpu::Hidden,
        1 => Cpu::Place(GuestRegs { ip: number(input)?, user: input.arbitrary()? }),
        _ => Cpu::Whole(Box::new(state(input)?)),
    })
}

fn state(input: &mut Unstructured<'_>) -> Result<CpuState> {
    let mut general = [0; GENERAL_REGS];
    for register in &mut general[..10] {
        *register = number(input)?;
    }
    Ok(CpuState {
        general,
        user: input.arbitrary()?,
        code64: input.ratio(3, 4)?,
        // In most cases, the vCPU is in long mode. CR3 points to a page to which `driver_ops::tables` writes.
        cr0: u64::from(input.ratio(9, 10)?) << 31,
        cr3: layout::table(input.int_in_range(0..=3)?),
        cr4: u64::from(input.ratio(9, 10)?) << 5 | u64::from(input.ratio(1, 4)?) << 12,
        efer: u64::from(input.ratio(9, 10)?) << 10,
    })
}

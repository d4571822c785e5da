//! The memory of a micro guest, and the handlers of its exceptions: instructions only.
//!
//! Every program finds the base of the device window in X0 and reports by storing there, since a
//! store reaches the VMM from any exception level.

/// Programs are written in instructions.
pub type Unit = u32;

/// Guest RAM, from address zero, open to EL0: nothing translates addresses.
pub(crate) const RAM: usize = 0x1_0000;
/// The device window: behind RAM and without memory, so every store exits.
pub const WINDOW: u64 = 0x1000_0000;
/// Address of the program.
pub const PROGRAM: u64 = 0x1000;
/// The exception vectors.
pub(crate) const VECTORS: u64 = 0x8000;
/// Offsets of the vectors for exceptions from EL1 and from EL0.
const FROM_KERNEL: u64 = 0x200;
const FROM_USER: u64 = 0x400;

/// Window offset that handlers store to: of the answer to a system call.
pub const RESULT: u64 = 0x00;
/// Window offset for programs: after the system call.
pub const RETURNED: u64 = 0x08;
/// Window offset of an exception.
pub const EXCEPTION: u64 = 0x70;

const STR_X1: u32 = 0xf900_0001; // str x1, [x0]
const STR_X1_EXCEPTION: u32 = 0xf900_3801; // str x1, [x0, #EXCEPTION]
const MRS_X1_CURRENT_EL: u32 = 0xd538_4241;
const MRS_X1_ESR: u32 = 0xd538_5201;
const LSR_X1_CLASS: u32 = 0xd35a_fc21; // lsr x1, x1, #26
const ERET: u32 = 0xd69f_03e0;
const BACK: u32 = 0x1400_0000; // b .

/// The handler of calls from EL0: stores the exception level at [`RESULT`], and returns.
const ANSWER: &[u32] = &[MRS_X1_CURRENT_EL, STR_X1, ERET];
/// The handler of exceptions from EL1: stores the class at [`EXCEPTION`].
const CLASSIFY: &[u32] = &[MRS_X1_ESR, LSR_X1_CLASS, STR_X1_EXCEPTION, BACK];

/// Loops for ever.
pub const LOOP: &[u32] = &[BACK];

/// Everything but the program: address and bytes.
pub(crate) fn tables() -> [(u64, Vec<u8>); 2] {
    [
        (VECTORS + FROM_KERNEL, bytes(CLASSIFY)),
        (VECTORS + FROM_USER, bytes(ANSWER)),
    ]
}

/// Bytes of `program`.
pub(crate) fn bytes(program: &[Unit]) -> Vec<u8> {
    program.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// In words, an exception that a program reported.
pub(crate) fn describe_exception(class: u64) -> String {
    format!("raised an exception of class {class:#x}")
}

//! The memory layout of a micro guest, and the machine code of its exception handlers.
//!
//! X0 holds the base of the device window for every program. A program reports to the VMM with a store to the window,
//! because a store reaches the VMM from any exception level.

/// The unit of machine code: one instruction.
pub type Unit = u32;

/// Size of guest RAM in bytes. RAM starts at address zero. The MMU is off, so EL0 can access all of RAM.
pub(crate) const RAM: usize = 0x1_0000;
/// Address of the device window, above RAM. No memory slot contains this address, so every store to it exits.
pub const WINDOW: u64 = 0x1000_0000;
/// Address of the program.
pub const PROGRAM: u64 = 0x1000;
/// Address of the exception vectors.
pub(crate) const VECTORS: u64 = 0x8000;
/// Vector table offsets for exceptions from EL1 and from EL0.
const FROM_KERNEL: u64 = 0x200;
const FROM_USER: u64 = 0x400;

/// Window offset at which the system call handler stores the result.
pub const RESULT: u64 = 0x00;
/// Window offset at which a program stores after its system call has returned.
pub const RETURNED: u64 = 0x08;
/// Window offset at which the exception handler stores the exception class.
pub const EXCEPTION: u64 = 0x70;

const STR_X1: u32 = 0xf900_0001; // str x1, [x0]
const STR_X1_EXCEPTION: u32 = 0xf900_3801; // str x1, [x0, #EXCEPTION]
const MRS_X1_CURRENT_EL: u32 = 0xd538_4241;
const MRS_X1_ESR: u32 = 0xd538_5201;
const LSR_X1_CLASS: u32 = 0xd35a_fc21; // lsr x1, x1, #26
const ERET: u32 = 0xd69f_03e0;
const BACK: u32 = 0x1400_0000; // b .

/// The handler of system calls from EL0: stores CurrentEL at [`RESULT`], and returns.
const ANSWER: &[u32] = &[MRS_X1_CURRENT_EL, STR_X1, ERET];
/// The handler of exceptions from EL1: stores the class at [`EXCEPTION`], and loops.
const CLASSIFY: &[u32] = &[MRS_X1_ESR, LSR_X1_CLASS, STR_X1_EXCEPTION, BACK];

/// Loops forever.
pub const LOOP: &[u32] = &[BACK];

/// Returns what guest memory must contain besides the program, as the address and the bytes of each part.
pub(crate) fn tables() -> [(u64, Vec<u8>); 2] {
    [(VECTORS + FROM_KERNEL, bytes(CLASSIFY)), (VECTORS + FROM_USER, bytes(ANSWER))]
}

/// Returns the bytes of `program`.
pub(crate) fn bytes(program: &[Unit]) -> Vec<u8> {
    program.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Describes an exception that a program reported, for [`Exit::describe`](crate::micro::Exit::describe).
pub(crate) fn describe_exception(class: u64) -> String {
    format!("raised an exception of class {class:#x}")
}

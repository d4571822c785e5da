//! The machine code of the probes: instructions only.
//!
//! Every program finds the base of the device window in X0 and reports by storing there, since a
//! store reaches the VMM from any exception level.

/// Programs are written in instructions.
pub(crate) type Unit = u32;

/// Guest RAM, from address zero, open to EL0: nothing translates addresses.
pub(crate) const RAM: usize = 0x1_0000;
/// The device window: behind RAM and without memory, so every store exits.
pub(crate) const WINDOW: u64 = 0x1000_0000;
/// Address of a probe's program.
pub(crate) const PROGRAM: u64 = 0x1000;
/// The exception vectors.
pub(super) const VECTORS: u64 = 0x8000;
/// Offsets of the vectors for exceptions from EL1 and from EL0.
const FROM_KERNEL: u64 = 0x200;
const FROM_USER: u64 = 0x400;

/// Window offsets that programs store to.
pub(super) const RESULT: u64 = 0x00;
pub(super) const RETURNED: u64 = 0x08;
pub(crate) const EXCEPTION: u64 = 0x70;

const STR_W1: u32 = 0xb900_0001; // str w1, [x0]
const STR_X1: u32 = 0xf900_0001; // str x1, [x0]
const STR_X1_RETURNED: u32 = 0xf900_0401; // str x1, [x0, #RETURNED]
const STR_X1_EXCEPTION: u32 = 0xf900_3801; // str x1, [x0, #EXCEPTION]
const STR_X0_TO_X4: u32 = 0xf900_0080; // str x0, [x4]
const MOV_X1_VALUE: u32 = 0xd282_4681; // mov x1, #STORE_VALUE
const MRS_X1_CURRENT_EL: u32 = 0xd538_4241;
const MRS_X1_ESR: u32 = 0xd538_5201;
const LSR_X1_CLASS: u32 = 0xd35a_fc21; // lsr x1, x1, #26
const SVC: u32 = 0xd400_0001;
const HVC: u32 = 0xd400_0002;
const BRK: u32 = 0xd420_0000;
const ERET: u32 = 0xd69f_03e0;
const BACK: u32 = 0x1400_0000; // b .

/// The value that [`STORE`] stores.
pub(super) const STORE_VALUE: u64 = 0x1234;
/// Stores at [`RESULT`].
pub(super) const STORE: &[u32] = &[MOV_X1_VALUE, STR_W1, BACK];

/// At EL0: calls EL1, and after the return stores [`STORE_VALUE`] at [`RETURNED`].
pub(super) const CALL: &[u32] = &[SVC, MOV_X1_VALUE, STR_X1_RETURNED, BACK];
/// The handler of that call: stores the exception level at [`RESULT`], and returns.
const ANSWER: &[u32] = &[MRS_X1_CURRENT_EL, STR_X1, ERET];
/// The exception level that it stores: EL1.
pub(super) const EL1: u64 = 1 << 2;

/// Raises a breakpoint exception.
pub(super) const BREAKPOINT: &[u32] = &[BRK, BACK];
/// The handler of exceptions from EL1: stores the class at [`EXCEPTION`].
const CLASSIFY: &[u32] = &[MRS_X1_ESR, LSR_X1_CLASS, STR_X1_EXCEPTION, BACK];
/// The class of `brk`.
pub(super) const CLASS_BRK: u64 = 0x3c;

/// Calls the hypervisor with the function in X0, and stores the answer at the address in X4, as the call
/// changes X0 to X3.
pub(super) const HYPERCALL: &[u32] = &[HVC, STR_X0_TO_X4, BACK];
/// The function PSCI_VERSION, and the lowest version that passes: 0.2.
pub(super) const PSCI_VERSION: u64 = 0x8400_0000;
pub(super) const PSCI_0_2: u64 = 2;

/// Loops for ever.
pub(crate) const LOOP: &[u32] = &[BACK];

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

//! The machine code of the probes, as instruction words. At the start of each probe except [`HYPERCALL`], X0 holds
//! the base of the device window.

pub(super) use vpmu_kvm::micro::code::*;

const STR_W1: u32 = 0xb900_0001; // str w1, [x0]
const STR_X1_RETURNED: u32 = 0xf900_0401; // str x1, [x0, #RETURNED]
const STR_X0_TO_X4: u32 = 0xf900_0080; // str x0, [x4]
const MOV_X1_VALUE: u32 = 0xd282_4681; // mov x1, #STORE_VALUE
const SVC: u32 = 0xd400_0001;
const HVC: u32 = 0xd400_0002;
const BRK: u32 = 0xd420_0000;
const BACK: u32 = 0x1400_0000; // b .

/// The value that [`STORE`] stores.
pub(super) const STORE_VALUE: u64 = 0x1234;
/// Stores at [`RESULT`].
pub(super) const STORE: &[u32] = &[MOV_X1_VALUE, STR_W1, BACK];

/// Runs at EL0. It makes a system call, and after the call returns, it stores [`STORE_VALUE`] at [`RETURNED`].
pub(super) const CALL: &[u32] = &[SVC, MOV_X1_VALUE, STR_X1_RETURNED, BACK];
/// The value of CurrentEL at EL1, which the system call enters.
pub(super) const EL1: u64 = 1 << 2;

/// Raises a breakpoint exception.
pub(super) const BREAKPOINT: &[u32] = &[BRK, BACK];
/// The exception class (ESR_EL1.EC) of `brk`.
pub(super) const CLASS_BRK: u64 = 0x3c;

/// Calls the hypervisor with the function in X0, and stores the result at the address in X4. The address is in X4
/// because the call may overwrite the first four registers, X0 through X3.
pub(super) const HYPERCALL: &[u32] = &[HVC, STR_X0_TO_X4, BACK];
/// The function PSCI_VERSION, and the lowest version that the probe accepts: 0.2.
pub(super) const PSCI_VERSION: u64 = 0x8400_0000;
pub(super) const PSCI_0_2: u64 = 2;

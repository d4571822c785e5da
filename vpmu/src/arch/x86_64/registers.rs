//! A vCPU's state, with registers as perf numbers them, and the registers that Linux saves when a program
//! enters the kernel.

/// Number of registers that a sample can hold.
pub const GENERAL_REGS: usize = 24;

/// The parts of a vCPU's state that a call chain or a record of registers needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuState {
    /// In the order of perf's numbers for x86: AX, BX, CX, DX, SI, DI, BP, SP, IP, FLAGS, CS, SS, DS, ES, FS, GS, R8 to
    /// R15. Segment registers hold selectors.
    pub general: [u64; GENERAL_REGS],
    /// Whether the vCPU was in guest user mode.
    pub user: bool,
    /// Whether the vCPU ran 64-bit code.
    pub code64: bool,
    /// CR0, which enables address translation.
    pub cr0: u64,
    /// CR3, the address of the page tables.
    pub cr3: u64,
    /// CR4, which selects the number of levels of the page tables.
    pub cr4: u64,
    /// EFER, which enables long mode.
    pub efer: u64,
}

/// perf's register numbers for the frame pointer, the stack pointer and the instruction pointer.
pub(crate) const FP: usize = 6;
pub(crate) const SP: usize = 7;
pub(crate) const IP: usize = 8;
const CS: usize = 10;

/// Registers that an event may request: AX to SS and R8 to R15, but not DS, ES, FS and GS.
pub(crate) const REGISTERS: u64 = 0xff_0fff;

/// Linux's kernel stacks have this size, and begin at a multiple of it.
pub(crate) const KERNEL_STACK: u64 = 16 << 10;

/// Whether frames of 32-bit code are walked. They are walked here, because 32-bit and 64-bit code use the same register
/// as the frame pointer.
pub(crate) const WALKS_32_BIT_CODE: bool = true;

/// Number of words in Linux's `struct pt_regs`.
pub(crate) const SAVED_WORDS: usize = 21;

/// perf's register number for each word of `struct pt_regs`, which the kernel saves when a program enters the kernel.
/// `None` for the word that holds the system call number.
pub(super) const SAVED: [Option<usize>; SAVED_WORDS] = [
    Some(23),
    Some(22),
    Some(21),
    Some(20),
    Some(6),
    Some(1),
    Some(19),
    Some(18),
    Some(17),
    Some(16),
    Some(0),
    Some(2),
    Some(3),
    Some(4),
    Some(5),
    None,
    Some(8),
    Some(10),
    Some(9),
    Some(7),
    Some(11),
];
/// The selector of Linux's 32-bit user code.
const USER32_CS: u64 = 0x23;
/// The privilege level in a selector.
const SELECTOR_LEVEL: u64 = 3;

/// Returns the registers in the words of a `struct pt_regs`, and whether they belong to 64-bit code. `None` unless the
/// kernel saved these registers when a program entered the kernel.
pub(crate) fn saved(words: [u64; SAVED_WORDS]) -> Option<([u64; GENERAL_REGS], bool)> {
    let mut general = [0; GENERAL_REGS];
    for (number, word) in SAVED.into_iter().zip(words) {
        if let Some(number) = number {
            general[number] = word;
        }
    }
    let cs = general[CS] & 0xffff;
    (cs & SELECTOR_LEVEL == SELECTOR_LEVEL).then_some((general, cs != USER32_CS))
}

/// The registers in a packet of a sample trace: all registers.
pub(crate) fn packet_registers(cpu: &CpuState) -> [u64; 24] {
    cpu.general
}

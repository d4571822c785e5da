//! The x86-64 assembly of [`crate::known_code`], and the values that registers have in it.
#![expect(unsafe_code, reason = "assembly")]

use std::arch::global_asm;

use crate::arch::{IDLE_PORT, Known};
use crate::known_code::{STACK, known, mark_known_ip};
use crate::raw::IOC_MARK;

/// Register numbers, as in perf's `PERF_REG_X86_*`.
const AX: usize = 0;
const CX: usize = 2;
const DX: usize = 3;
const SI: usize = 4;
const DI: usize = 5;
const SP: usize = 7;
const IP: usize = 8;
const FLAGS: usize = 9;
const CS: usize = 10;
const SS: usize = 11;
const R11: usize = 19;

/// Mask of every register that a sample can have. The data segment registers are missing, because the driver refuses
/// them.
pub(crate) const REGS: u64 = 0xff_0fff;
/// One more than the highest number.
pub(crate) const NUMBERS: usize = 24;
/// Index of the instruction pointer in a sample that has all registers.
pub(crate) const IP_PLACE: usize = IP;
/// Index of the instruction pointer in a packet.
pub(crate) const PACKET_IP: usize = IP;
/// Length in bytes of the instruction that writes.
pub(crate) const WRITE_LEN: u64 = 1;

/// Returns the argument that makes the stubs write to the idle port. It is the port's number.
pub(crate) fn idle_port() -> u64 {
    IDLE_PORT.into()
}

/// Returns the value of register `number` at the write in `out_known`. `sp` is the stack pointer that `out_known`
/// returned.
pub(crate) fn at_write(number: usize, sp: u64) -> Known {
    match number {
        SP => Known::Is(sp),
        IP => Known::Write,
        DX => Known::Is(known(number) & !0xffff | idle_port()),
        // Interrupts are on, and bit 1 is always set. The other flags depend on the code before the write.
        FLAGS => Known::Has(0x202),
        // 64-bit user code and its stack.
        CS => Known::Is(0x33),
        SS => Known::Is(0x2b),
        12..=15 => Known::Unknown,
        _ => Known::Is(known(number)),
    }
}

/// Like [`at_write`], but for the register at index `place` of a packet.
pub(crate) fn in_packet(place: usize, sp: u64) -> Known {
    at_write(place, sp)
}

/// The value of register `number` in the kernel.
pub(crate) fn in_kernel(number: usize) -> Known {
    match number {
        CS => Known::Is(0x10),
        SP => Known::Has(1 << 63),
        _ => Known::Unknown,
    }
}

/// Returns register masks that are refused, each with the errno of the refusal.
pub(crate) fn refused() -> Vec<(u64, i32)> {
    // The rows are the data segment registers, an empty mask, a bit without a register, and vector registers. For
    // vector registers, the driver returns EOPNOTSUPP, as perf does.
    let segments = (12..16).map(|bit| (1_u64 << bit, libc::EINVAL));
    let others =
        [(0, libc::EINVAL), (REGS | 1 << 24, libc::EINVAL), (1 << 32, libc::EOPNOTSUPP), (1 << 63, libc::EOPNOTSUPP)];
    segments.chain(others).collect()
}

/// Returns the value of user register `number` during the system call in `mark_known`.
pub(crate) fn in_call(number: usize, sp: u64, device: i32, value: u64) -> Known {
    match number {
        IP | CX => Known::Is(mark_known_ip()),
        SP => Known::Is(sp),
        DI => Known::Is(i64::from(device).cast_unsigned()),
        SI => Known::Is(IOC_MARK),
        DX => Known::Is(value),
        // On entry, the kernel stores -ENOSYS as the saved AX. The call's result replaces it only at the end.
        AX => Known::Is((-38_i64).cast_unsigned()),
        CS => Known::Is(0x33),
        SS => Known::Is(0x2b),
        // The system call copies the flags to R11.
        FLAGS | R11 => Known::Has(0x202),
        _ => Known::Is(known(number)),
    }
}

global_asm!(
    ".macro vpmu_known",
    "mov rbx, {bx}",
    "mov rbp, {bp}",
    "mov r8, {r8}",
    "mov r9, {r9}",
    "mov r10, {r10}",
    "mov r12, {r12}",
    "mov r13, {r13}",
    "mov r14, {r14}",
    "mov r15, {r15}",
    ".endm",
    ".macro vpmu_enter",
    "push rbx",
    "push rbp",
    "push r12",
    "push r13",
    "push r14",
    "push r15",
    "mov rax, {stack3}",
    "push rax",
    "mov rax, {stack2}",
    "push rax",
    "mov rax, {stack1}",
    "push rax",
    "mov rax, {stack0}",
    "push rax",
    ".endm",
    ".macro vpmu_leave",
    "add rsp, 32",
    "pop r15",
    "pop r14",
    "pop r13",
    "pop r12",
    "pop rbp",
    "pop rbx",
    "ret",
    ".endm",
    // fn(sp: *mut u64, port: u64)
    ".globl vpmu_out_known",
    "vpmu_out_known:",
    "vpmu_enter",
    "mov [rdi], rsp",
    "vpmu_known",
    "mov rax, {ax}",
    "mov rcx, {cx}",
    "mov rdx, {dx}",
    "mov dx, si",
    "mov rsi, {si}",
    "mov rdi, {di}",
    "mov r11, {r11}",
    ".globl vpmu_out_known_ip",
    "vpmu_out_known_ip:",
    "out dx, al",
    "vpmu_leave",
    // fn(sp: *mut u64, device: i32, value: u64)
    ".globl vpmu_mark_known",
    "vpmu_mark_known:",
    "vpmu_enter",
    "mov [rdi], rsp",
    "mov edi, esi",
    "mov esi, {mark}",
    "vpmu_known",
    "mov eax, 16",
    "syscall",
    ".globl vpmu_mark_known_ip",
    "vpmu_mark_known_ip:",
    "vpmu_leave",
    // fn(leaf: u64, first: u64, second: u64, port: u64)
    ".globl vpmu_nest",
    "vpmu_nest:",
    "push rbp",
    "xor ebp, ebp",
    "call vpmu_nest_outer",
    ".globl vpmu_nest_top",
    "vpmu_nest_top:",
    "pop rbp",
    "ret",
    "vpmu_nest_outer:",
    "push rbp",
    "mov rbp, rsp",
    "call vpmu_nest_middle",
    ".globl vpmu_nest_in_outer",
    "vpmu_nest_in_outer:",
    "pop rbp",
    "ret",
    "vpmu_nest_middle:",
    "push rbp",
    "mov rbp, rsp",
    "call vpmu_nest_leaf",
    ".globl vpmu_nest_in_middle",
    "vpmu_nest_in_middle:",
    "pop rbp",
    "ret",
    "vpmu_nest_leaf:",
    "push rbp",
    "mov rbp, rsp",
    "cmp rdi, 1",
    "je 2f",
    "ja 3f",
    "mov edx, ecx",
    "xor eax, eax",
    ".globl vpmu_nest_out",
    "vpmu_nest_out:",
    "out dx, al",
    "jmp 4f",
    "2:",
    "mov edi, esi",
    "mov esi, {mark}",
    "mov eax, 16",
    "syscall",
    ".globl vpmu_nest_marked",
    "vpmu_nest_marked:",
    "jmp 4f",
    "3:",
    ".globl vpmu_nest_spin",
    "vpmu_nest_spin:",
    "dec rsi",
    "jnz 3b",
    ".globl vpmu_nest_spun",
    "vpmu_nest_spun:",
    "4:",
    "pop rbp",
    "ret",
    // Nested calls with frame pointers, then a mark: fn(depth: u64, device: i32, value: u64).
    ".globl vpmu_deep",
    "vpmu_deep:",
    "push rbp",
    "xor ebp, ebp",
    "call 2f",
    "pop rbp",
    "ret",
    "2:",
    "push rbp",
    "mov rbp, rsp",
    "dec rdi",
    "jz 3f",
    "call 2b",
    "pop rbp",
    "ret",
    "3:",
    "mov edi, esi",
    "mov esi, {mark}",
    "mov eax, 16",
    "syscall",
    "pop rbp",
    "ret",
    // Two loops, fn(rounds: u64) each.
    ".globl vpmu_loop_a",
    "vpmu_loop_a:",
    "dec rdi",
    "jnz vpmu_loop_a",
    ".globl vpmu_loop_a_end",
    "vpmu_loop_a_end:",
    "ret",
    ".globl vpmu_loop_b",
    "vpmu_loop_b:",
    "dec rdi",
    "jnz vpmu_loop_b",
    ".globl vpmu_loop_b_end",
    "vpmu_loop_b_end:",
    "ret",
    ax = const known(0),
    bx = const known(1),
    cx = const known(2),
    dx = const known(DX),
    si = const known(4),
    di = const known(5),
    bp = const known(6),
    r8 = const known(16),
    r9 = const known(17),
    r10 = const known(18),
    r11 = const known(19),
    r12 = const known(20),
    r13 = const known(21),
    r14 = const known(22),
    r15 = const known(23),
    mark = const IOC_MARK,
    stack0 = const STACK[0],
    stack1 = const STACK[1],
    stack2 = const STACK[2],
    stack3 = const STACK[3],
);

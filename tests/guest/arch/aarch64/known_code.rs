//! The aarch64 assembly of [`crate::known_code`], and the values that registers have in it.
#![expect(unsafe_code, reason = "assembly")]

use std::arch::global_asm;

use super::ports;
use crate::arch::Known;
use crate::known_code::{STACK, known, mark_known_ip};
use crate::raw::IOC_MARK;

/// Register numbers, as in perf's `PERF_REG_ARM64_*`.
const LR: usize = 30;
const SP: usize = 31;
const PC: usize = 32;

/// Mask of every register that a sample can have.
pub(crate) const REGS: u64 = (1 << NUMBERS) - 1;
/// One more than the highest number.
pub(crate) const NUMBERS: usize = 33;
/// Index of the program counter in a sample that has all registers.
pub(crate) const IP_PLACE: usize = PC;
/// Index of the program counter in a packet.
pub(crate) const PACKET_IP: usize = 22;
/// Length in bytes of the instruction that writes.
pub(crate) const WRITE_LEN: u64 = 4;

/// Returns the argument with which the stubs access the idle port: the port's address in this process.
pub(crate) fn idle_port() -> u64 {
    ports::idle().expose_provenance() as u64
}

/// Returns the value of register `number` at the write in `out_known`. `sp` is the stack pointer that `out_known`
/// returned.
pub(crate) fn at_write(number: usize, sp: u64) -> Known {
    match number {
        1 => Known::Is(idle_port()),
        SP => Known::Is(sp),
        PC => Known::Write,
        _ => Known::Is(known(number)),
    }
}

/// Like [`at_write`], but for the register at index `place` of a packet. A packet does not have X9 to X18. Its last
/// register is PSTATE.
pub(crate) fn in_packet(place: usize, sp: u64) -> Known {
    match place {
        0..9 => at_write(place, sp),
        9..23 => at_write(place + 10, sp),
        _ => Known::Unknown,
    }
}

/// The value of register `number` in the kernel.
pub(crate) fn in_kernel(number: usize) -> Known {
    match number {
        SP => Known::Has(1 << 63),
        _ => Known::Unknown,
    }
}

/// Returns register masks that are refused, each with the errno of the refusal.
pub(crate) fn refused() -> Vec<(u64, i32)> {
    // The rows are an empty mask, a bit without a register, the vector length (VG), and the highest bit.
    vec![(0, libc::EINVAL), (REGS | 1 << 33, libc::EINVAL), (1 << 46, libc::EOPNOTSUPP), (1 << 63, libc::EINVAL)]
}

/// The system call number of ioctl(2), and the register that holds it.
const IOCTL: (u64, usize) = (29, 8);

/// Returns the value of user register `number` during the system call in `mark_known`.
pub(crate) fn in_call(number: usize, sp: u64, device: i32, value: u64) -> Known {
    match number {
        0 => Known::Is(i64::from(device).cast_unsigned()),
        1 => Known::Is(IOC_MARK),
        2 => Known::Is(value),
        _ if number == IOCTL.1 => Known::Is(IOCTL.0),
        SP => Known::Is(sp),
        PC => Known::Is(mark_known_ip()),
        _ => Known::Is(known(number)),
    }
}

global_asm!(
    ".macro vpmu_enter",
    "stp x29, x30, [sp, #-96]!",
    "stp x19, x20, [sp, #16]",
    "stp x21, x22, [sp, #32]",
    "stp x23, x24, [sp, #48]",
    "stp x25, x26, [sp, #64]",
    "stp x27, x28, [sp, #80]",
    "ldr x9, ={stack2}",
    "ldr x10, ={stack3}",
    "stp x9, x10, [sp, #-16]!",
    "ldr x9, ={stack0}",
    "ldr x10, ={stack1}",
    "stp x9, x10, [sp, #-16]!",
    "mov x9, sp",
    "str x9, [x0]",
    ".endm",
    ".macro vpmu_leave",
    "add sp, sp, #32",
    "ldp x27, x28, [sp, #80]",
    "ldp x25, x26, [sp, #64]",
    "ldp x23, x24, [sp, #48]",
    "ldp x21, x22, [sp, #32]",
    "ldp x19, x20, [sp, #16]",
    "ldp x29, x30, [sp], #96",
    "ret",
    ".endm",
    // Loads the registers that neither the write nor the system call uses.
    ".macro vpmu_known",
    "ldr x3, ={x3}",
    "ldr x4, ={x4}",
    "ldr x5, ={x5}",
    "ldr x6, ={x6}",
    "ldr x7, ={x7}",
    "ldr x9, ={x9}",
    "ldr x10, ={x10}",
    "ldr x11, ={x11}",
    "ldr x12, ={x12}",
    "ldr x13, ={x13}",
    "ldr x14, ={x14}",
    "ldr x15, ={x15}",
    "ldr x16, ={x16}",
    "ldr x17, ={x17}",
    "ldr x18, ={x18}",
    "ldr x19, ={x19}",
    "ldr x20, ={x20}",
    "ldr x21, ={x21}",
    "ldr x22, ={x22}",
    "ldr x23, ={x23}",
    "ldr x24, ={x24}",
    "ldr x25, ={x25}",
    "ldr x26, ={x26}",
    "ldr x27, ={x27}",
    "ldr x28, ={x28}",
    "ldr x29, ={x29}",
    "ldr x30, ={x30}",
    ".endm",
    // fn(sp: *mut u64, port: u64)
    ".globl vpmu_out_known",
    "vpmu_out_known:",
    "vpmu_enter",
    "vpmu_known",
    "ldr x0, ={x0}",
    "ldr x2, ={x2}",
    "ldr x8, ={x8}",
    ".globl vpmu_out_known_ip",
    "vpmu_out_known_ip:",
    "strb wzr, [x1]",
    "vpmu_leave",
    // fn(sp: *mut u64, device: i32, value: u64)
    ".globl vpmu_mark_known",
    "vpmu_mark_known:",
    "vpmu_enter",
    "mov w0, w1",
    "ldr x1, ={mark}",
    "vpmu_known",
    "mov x8, #{ioctl}",
    "svc #0",
    ".globl vpmu_mark_known_ip",
    "vpmu_mark_known_ip:",
    "vpmu_leave",
    ".ltorg",
    // fn(leaf: u64, first: u64, second: u64, port: u64)
    ".globl vpmu_nest",
    "vpmu_nest:",
    "stp x29, x30, [sp, #-16]!",
    "mov x29, #0",
    "bl vpmu_nest_outer",
    ".globl vpmu_nest_top",
    "vpmu_nest_top:",
    "ldp x29, x30, [sp], #16",
    "ret",
    "vpmu_nest_outer:",
    "stp x29, x30, [sp, #-16]!",
    "mov x29, sp",
    "bl vpmu_nest_middle",
    ".globl vpmu_nest_in_outer",
    "vpmu_nest_in_outer:",
    "ldp x29, x30, [sp], #16",
    "ret",
    "vpmu_nest_middle:",
    "stp x29, x30, [sp, #-16]!",
    "mov x29, sp",
    "bl vpmu_nest_leaf",
    ".globl vpmu_nest_in_middle",
    "vpmu_nest_in_middle:",
    "ldp x29, x30, [sp], #16",
    "ret",
    "vpmu_nest_leaf:",
    "stp x29, x30, [sp, #-16]!",
    "mov x29, sp",
    "cmp x0, #1",
    "b.eq 2f",
    "b.hi 3f",
    ".globl vpmu_nest_out",
    "vpmu_nest_out:",
    "strb wzr, [x3]",
    "b 4f",
    "2:",
    "mov w0, w1",
    "ldr x1, ={mark}",
    "mov x8, #{ioctl}",
    "svc #0",
    ".globl vpmu_nest_marked",
    "vpmu_nest_marked:",
    "b 4f",
    "3:",
    ".globl vpmu_nest_spin",
    "vpmu_nest_spin:",
    "subs x1, x1, #1",
    "b.ne 3b",
    ".globl vpmu_nest_spun",
    "vpmu_nest_spun:",
    "4:",
    "ldp x29, x30, [sp], #16",
    "ret",
    ".ltorg",
    // Nested calls with frame pointers, then a mark: fn(depth: u64, device: i32, value: u64).
    ".globl vpmu_deep",
    "vpmu_deep:",
    "stp x29, x30, [sp, #-16]!",
    "mov x29, #0",
    "bl 2f",
    "ldp x29, x30, [sp], #16",
    "ret",
    "2:",
    "stp x29, x30, [sp, #-16]!",
    "mov x29, sp",
    "subs x0, x0, #1",
    "b.eq 3f",
    "bl 2b",
    "ldp x29, x30, [sp], #16",
    "ret",
    "3:",
    "mov w0, w1",
    "ldr x1, ={mark}",
    "mov x8, #{ioctl}",
    "svc #0",
    "ldp x29, x30, [sp], #16",
    "ret",
    ".ltorg",
    // Two loops, fn(rounds: u64) each.
    ".globl vpmu_loop_a",
    "vpmu_loop_a:",
    "subs x0, x0, #1",
    "b.ne vpmu_loop_a",
    ".globl vpmu_loop_a_end",
    "vpmu_loop_a_end:",
    "ret",
    ".globl vpmu_loop_b",
    "vpmu_loop_b:",
    "subs x0, x0, #1",
    "b.ne vpmu_loop_b",
    ".globl vpmu_loop_b_end",
    "vpmu_loop_b_end:",
    "ret",
    x0 = const known(0),
    x2 = const known(2),
    x3 = const known(3),
    x4 = const known(4),
    x5 = const known(5),
    x6 = const known(6),
    x7 = const known(7),
    x8 = const known(8),
    x9 = const known(9),
    x10 = const known(10),
    x11 = const known(11),
    x12 = const known(12),
    x13 = const known(13),
    x14 = const known(14),
    x15 = const known(15),
    x16 = const known(16),
    x17 = const known(17),
    x18 = const known(18),
    x19 = const known(19),
    x20 = const known(20),
    x21 = const known(21),
    x22 = const known(22),
    x23 = const known(23),
    x24 = const known(24),
    x25 = const known(25),
    x26 = const known(26),
    x27 = const known(27),
    x28 = const known(28),
    x29 = const known(29),
    x30 = const known(LR),
    ioctl = const IOCTL.0,
    mark = const IOC_MARK,
    stack0 = const STACK[0],
    stack1 = const STACK[1],
    stack2 = const STACK[2],
    stack3 = const STACK[3],
);

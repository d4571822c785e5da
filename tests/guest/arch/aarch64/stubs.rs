//! Code whose registers, stack, callers and addresses are known to the last bit, because no
//! compiler had a hand in it.
#![expect(unsafe_code, reason = "assembly, and the addresses of its labels")]

use std::arch::global_asm;

use super::ports;
use crate::arch::{Known, Leaf};
use crate::raw::IOC_MARK;

/// Registers as `PERF_REG_ARM64_*` numbers them.
const LR: usize = 30;
const SP: usize = 31;
const PC: usize = 32;

/// Every register that a sample can have.
pub(crate) const REGS: u64 = (1 << NUMBERS) - 1;
/// One more than the highest number.
pub(crate) const NUMBERS: usize = 33;
/// The program counter's place among the registers of a sample that has all.
pub(crate) const IP_PLACE: usize = PC;
/// Its place in a packet.
pub(crate) const PACKET_IP: usize = 22;
/// Bytes of the instruction that writes.
pub(crate) const WRITE_LEN: u64 = 4;

/// What the stubs put into general register `number`: its number, told by every byte.
const fn known(number: usize) -> u64 {
    0x0101_0101_0101_0101 * (number as u64 + 0xa0)
}

/// What register `number` holds at the write of [`out_known`], whose stack pointer was `sp`.
pub(crate) fn at_write(number: usize, sp: u64) -> Known {
    match number {
        1 => Known::Is(ports::idle().expose_provenance() as u64),
        SP => Known::Is(sp),
        PC => Known::Write,
        _ => Known::Is(known(number)),
    }
}

/// The same of the register at `place` in a packet: of those that hold no argument and that nobody
/// preserves it has none, and PSTATE is the last.
pub(crate) fn in_packet(place: usize, sp: u64) -> Known {
    match place {
        0..9 => at_write(place, sp),
        9..23 => at_write(place + 10, sp),
        _ => Known::Unknown,
    }
}

/// What register `number` holds in the kernel.
pub(crate) fn in_kernel(number: usize) -> Known {
    match number {
        SP => Known::Has(1 << 63),
        _ => Known::Unknown,
    }
}

/// Masks that are refused, and the errno.
pub(crate) fn refused() -> Vec<(u64, i32)> {
    // None at all, what has no name; the length of vectors.
    vec![
        (0, libc::EINVAL),
        (REGS | 1 << 33, libc::EINVAL),
        (1 << 46, libc::EOPNOTSUPP),
        (1 << 63, libc::EINVAL),
    ]
}

/// The number of ioctl(2), and the register that has it.
const IOCTL: (u64, usize) = (29, 8);

/// What user register `number` holds in the system call of [`mark_known`].
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

/// Words that [`out_known`] and [`mark_known`] leave on top of the stack, topmost first.
pub(crate) const STACK: [u64; 4] = [
    0x1122_3344_5566_7788,
    0x2233_4455_6677_8899,
    0x3344_5566_7788_99aa,
    0x4455_6677_8899_aabb,
];

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
    // What both leave alone.
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
    // fn(sp: *mut u64, page: *mut u8)
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
    // fn(what: u64, first: u64, second: u64, page: *mut u8)
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

unsafe extern "C" {
    fn vpmu_out_known(sp: *mut u64, page: *mut u8);
    fn vpmu_mark_known(sp: *mut u64, device: i32, value: u64);
    fn vpmu_nest(what: u64, first: u64, second: u64, page: *mut u8);
    fn vpmu_loop_a(rounds: u64);
    fn vpmu_loop_b(rounds: u64);
    static vpmu_out_known_ip: u8;
    static vpmu_mark_known_ip: u8;
    static vpmu_nest_top: u8;
    static vpmu_nest_in_outer: u8;
    static vpmu_nest_in_middle: u8;
    static vpmu_nest_out: u8;
    static vpmu_nest_marked: u8;
    static vpmu_nest_spin: u8;
    static vpmu_nest_spun: u8;
    static vpmu_loop_a_end: u8;
    static vpmu_loop_b_end: u8;
}

fn at(label: *const u8) -> u64 {
    label.expose_provenance() as u64
}

/// One write to the idle address with every register known; returns the stack pointer at the write.
/// The caller may reach it.
pub(crate) fn out_known() -> u64 {
    let mut sp = 0;
    // SAFETY: keeps the calling convention, writes one word through its argument.
    unsafe { vpmu_out_known(&raw mut sp, ports::idle()) };
    sp
}

/// Where it writes: the instruction of [`out_known`].
pub(crate) fn out_known_ip() -> u64 {
    at(&raw const vpmu_out_known_ip)
}

/// One mark with every register known that a system call leaves alone; returns the stack
/// pointer at the call.
pub(crate) fn mark_known(device: i32, value: u64) -> u64 {
    let mut sp = 0;
    // SAFETY: as `out_known`; the system call takes its argument by value.
    unsafe { vpmu_mark_known(&raw mut sp, device, value) };
    sp
}

/// Where the system call of [`mark_known`] returns to.
pub(crate) fn mark_known_ip() -> u64 {
    at(&raw const vpmu_mark_known_ip)
}

/// A nest of three calls with frame pointers, below which no frame pointer leads on.
pub(crate) fn nest(leaf: Leaf) {
    let (what, first, second) = match leaf {
        Leaf::Out => (0, 0, 0),
        Leaf::Mark(device, value) => (1, i64::from(device).cast_unsigned(), value),
        Leaf::Spin(rounds) => (2, rounds.max(1), 0),
    };
    // SAFETY: keeps the calling convention; what it does is as safe as its parts.
    unsafe { vpmu_nest(what, first, second, ports::idle()) }
}

/// The return addresses of [`nest`]'s callers, innermost first.
pub(crate) fn nest_callers() -> [u64; 3] {
    [
        at(&raw const vpmu_nest_in_middle),
        at(&raw const vpmu_nest_in_outer),
        at(&raw const vpmu_nest_top),
    ]
}

/// The instruction that writes, in the leaf.
pub(crate) fn nest_out() -> u64 {
    at(&raw const vpmu_nest_out)
}

/// Where the leaf's system call returns to.
pub(crate) fn nest_marked() -> u64 {
    at(&raw const vpmu_nest_marked)
}

/// The loop in the leaf.
pub(crate) fn nest_spin() -> std::ops::Range<u64> {
    at(&raw const vpmu_nest_spin)..at(&raw const vpmu_nest_spun)
}

/// A loop and where its code lies.
#[derive(Debug, Clone)]
pub(crate) struct Loop {
    run: unsafe extern "C" fn(u64),
    pub(crate) code: std::ops::Range<u64>,
}

impl Loop {
    pub(crate) fn run(&self, rounds: u64) {
        // SAFETY: counts a register down.
        unsafe { (self.run)(rounds.max(1)) }
    }
}

/// Two loops that share no instruction.
pub(crate) fn loops() -> [Loop; 2] {
    let code = |run: unsafe extern "C" fn(u64), end: *const u8| at(run as *const u8)..at(end);
    [
        Loop {
            run: vpmu_loop_a,
            code: code(vpmu_loop_a, &raw const vpmu_loop_a_end),
        },
        Loop {
            run: vpmu_loop_b,
            code: code(vpmu_loop_b, &raw const vpmu_loop_b_end),
        },
    ]
}

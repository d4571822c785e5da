//! Assembly whose registers, stack, callers and addresses are known exactly. The module of each architecture contains
//! the assembly for that architecture.
#![expect(unsafe_code, reason = "assembly, and the addresses of its labels")]

pub(crate) use crate::arch::known_code::{
    IP_PLACE, NUMBERS, PACKET_IP, REGS, WRITE_LEN, at_write, in_call, in_kernel, in_packet, refused,
};

use crate::arch::known_code::idle_port;

/// The action of [`nest`]'s leaf.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Leaf {
    /// One write to the idle port.
    Out,
    /// One mark. The fields are the device's file descriptor and the mark's value.
    Mark(i32, u64),
    /// A loop of this many rounds.
    Spin(u64),
}

/// Words that [`out_known`] and [`mark_known`] leave on top of the stack, topmost first.
pub(crate) const STACK: [u64; 4] =
    [0x1122_3344_5566_7788, 0x2233_4455_6677_8899, 0x3344_5566_7788_99aa, 0x4455_6677_8899_aabb];

/// Returns the value that the stubs put into general register `number`. Each byte is the number plus 0xa0, except in
/// bytes that the port access or the system call uses.
pub(crate) const fn known(number: usize) -> u64 {
    0x0101_0101_0101_0101 * (number as u64 + 0xa0)
}

unsafe extern "C" {
    fn vpmu_out_known(sp: *mut u64, port: u64);
    fn vpmu_mark_known(sp: *mut u64, device: i32, value: u64);
    fn vpmu_nest(leaf: u64, first: u64, second: u64, port: u64);
    fn vpmu_deep(depth: u64, device: i32, value: u64);
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

/// Writes once to the idle port, with a known value in every register. Returns the stack pointer at the write.
/// Call [`allow_ports`](crate::arch::allow_ports) first.
pub(crate) fn out_known() -> u64 {
    let mut sp = 0;
    // SAFETY: the stub follows the calling convention. In memory, it writes only the word `sp`.
    unsafe { vpmu_out_known(&raw mut sp, idle_port()) };
    sp
}

/// The address of [`out_known`]'s port write instruction.
pub(crate) fn out_known_ip() -> u64 {
    at(&raw const vpmu_out_known_ip)
}

/// Places one mark, with a known value in every register that a system call preserves. Returns the stack pointer at
/// the call.
pub(crate) fn mark_known(device: i32, value: u64) -> u64 {
    let mut sp = 0;
    // SAFETY: as in `out_known`. The system call takes its argument by value.
    unsafe { vpmu_mark_known(&raw mut sp, device, value) };
    sp
}

/// Returns the return address of the system call in [`mark_known`].
pub(crate) fn mark_known_ip() -> u64 {
    at(&raw const vpmu_mark_known_ip)
}

/// Makes three nested calls with frame pointers. The outermost frame pointer is zero and ends the chain.
pub(crate) fn nest(leaf: Leaf) {
    let (leaf, first, second) = match leaf {
        Leaf::Out => (0, 0, 0),
        Leaf::Mark(device, value) => (1, i64::from(device).cast_unsigned(), value),
        Leaf::Spin(rounds) => (2, rounds.max(1), 0),
    };
    // SAFETY: the stub follows the calling convention. The leaf's write, system call and loop change no memory of this
    // program.
    unsafe { vpmu_nest(leaf, first, second, idle_port()) }
}

/// Makes `depth` nested calls, at least one, with frame pointers, and places one mark in the innermost. A call chain
/// of the program then has `depth` callers.
pub(crate) fn deep(depth: u64, device: i32, value: u64) {
    // SAFETY: the stub follows the calling convention. It changes no memory of this program but its stack, which has
    // room for 16 bytes a call.
    unsafe { vpmu_deep(depth.max(1), device, value) }
}

/// Returns the return addresses in [`nest`]'s callers, innermost first.
pub(crate) fn nest_callers() -> [u64; 3] {
    [at(&raw const vpmu_nest_in_middle), at(&raw const vpmu_nest_in_outer), at(&raw const vpmu_nest_top)]
}

/// Returns the address of the leaf's instruction that writes the port.
pub(crate) fn nest_out() -> u64 {
    at(&raw const vpmu_nest_out)
}

/// The return address of the leaf's system call.
pub(crate) fn nest_marked() -> u64 {
    at(&raw const vpmu_nest_marked)
}

/// The loop in the leaf.
pub(crate) fn nest_spin() -> std::ops::Range<u64> {
    at(&raw const vpmu_nest_spin)..at(&raw const vpmu_nest_spun)
}

/// A loop, and the addresses of its code.
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
        Loop { run: vpmu_loop_a, code: code(vpmu_loop_a, &raw const vpmu_loop_a_end) },
        Loop { run: vpmu_loop_b, code: code(vpmu_loop_b, &raw const vpmu_loop_b_end) },
    ]
}

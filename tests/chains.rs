//! Checks the call chains, registers and stacks in samples of a guest with hand-made frames. The built VMM runs the
//! guest on this machine's `/dev/kvm`.

use tests::micro::run;
use tests::micro::sampled::{KERNEL_STACK, Marked, SAVED, Sampled, USER, USER_STACK, records};

const IP: u64 = 1 << 0;
const CALLCHAIN: u64 = 1 << 5;
const REGS_USER: u64 = 1 << 12;
const STACK_USER: u64 = 1 << 13;
const REGS_INTR: u64 = 1 << 18;

const IN_KERNEL: u64 = -128_i64 as u64;
const IN_USER: u64 = -512_i64 as u64;

const MARK: u32 = 5;
/// BP, SP and IP.
const REGISTERS: u64 = 0b1_1100_0000;
/// Bytes of stack.
const STACK: u64 = 64;

const KERNEL_SP: u64 = KERNEL_STACK + 0x3000;
const KERNEL_BP: u64 = KERNEL_SP + 0x20;
const USER_SP: u64 = USER_STACK + 0xfd0;
const USER_BP: u64 = USER_STACK + 0x800;
/// The program's instruction pointer and frame pointer when it enters the kernel.
const ENTERED: u64 = USER + 0x123;
const ENTERED_BP: u64 = USER_STACK + 0x820;

/// Returns the request that opens an event of [`MARK`], with a sample for each mark.
fn open(sample_type: u64, flags: u64) -> Vec<u64> {
    const OPEN: u64 = 1;
    const KIND_MARK: u64 = 0x104;
    const ENABLED: u64 = 1;
    vec![
        OPEN,
        0,
        KIND_MARK,
        MARK.into(),
        1,
        sample_type,
        flags | ENABLED,
        0,
        0,
        0,
        0,
        if sample_type & REGS_USER != 0 { REGISTERS } else { 0 },
        if sample_type & REGS_INTR != 0 { REGISTERS } else { 0 },
        if sample_type & STACK_USER != 0 { STACK } else { 0 },
    ]
}

/// A guest that places a mark in the kernel and a mark in the program. At the kernel's mark, there are two frames of
/// the kernel and two of the program. At the program's mark, there are three frames of the program.
fn guest(sample_type: u64, flags: u64, user_regs: u64) -> Sampled {
    let mut guest = Sampled::new();
    let mut frame = |at: u64, next: u64, caller: u64, user: bool| {
        for (at, word) in [(at, next), (at + 8, caller)] {
            if user {
                guest.user_word(at, word);
            } else {
                guest.word(at, word);
            }
        }
    };
    frame(KERNEL_BP, KERNEL_BP + 0x30, 0x10_0111, false);
    frame(KERNEL_BP + 0x30, 0, 0x10_0222, false);
    frame(USER_BP, USER_BP + 0x20, 0x1111, true);
    frame(USER_BP + 0x20, USER_BP + 0x40, 0x2222, true);
    // The last frame links to a kernel address, where a program cannot have a frame.
    frame(USER_BP + 0x40, KERNEL_BP, 0x3333, true);
    for word in 0..6 {
        guest.user_word(USER_SP + word * 8, 0x7700 + word);
    }
    for (word, value) in [(4, ENTERED_BP), (16, ENTERED), (17, 0x33), (19, USER_SP), (20, 0x2b)] {
        guest.word(SAVED + word * 8, value);
    }
    guest.request(&open(sample_type, flags));
    guest.map();
    guest.task_page(user_regs);
    guest
}

/// Runs `guest`. Returns the return addresses of its two marks, and the sample of each mark without the header. The
/// sample in kernel mode comes first, and then the sample in user mode.
fn samples(guest: Sampled) -> (Marked, [Vec<u64>; 2]) {
    let (kernel, at) = guest.kernel(MARK, [KERNEL_BP, KERNEL_SP], [USER_BP, USER_SP]);
    let ran = run(&kernel, 1, &[]);
    assert_eq!(ran.status, 0, "{} {:#}", ran.errors, ran.report);
    assert_eq!(ran.marks(), 2);
    let records = records(&ran.console);
    let [of_kernel, of_user] = records.as_slice() else {
        panic!("not two records: {records:x?}");
    };
    // Samples of kernel and user mode.
    for (record, misc) in [(of_kernel, 1), (of_user, 2)] {
        assert_eq!(record[0] & 0xffff_ffff_ffff, 9 | misc << 32, "{record:x?}");
    }
    (at, [of_kernel[1..].to_vec(), of_user[1..].to_vec()])
}

#[test]
fn call_chain_has_every_address_of_kernel_and_program() {
    let (at, [of_kernel, of_user]) = samples(guest(IP | CALLCHAIN, 0, SAVED));
    let kernel = [IN_KERNEL, at.kernel, 0x10_0111, 0x10_0222];
    let entered = [IN_USER, ENTERED, 0x2222, 0x3333];
    assert_eq!(of_kernel, [&[at.kernel, 8], &kernel[..], &entered].concat());
    let user = [IN_USER, at.user, 0x1111, 0x2222, 0x3333];
    assert_eq!(of_user, [&[at.user, 5], &user[..]].concat());
}

#[test]
fn chain_of_kernel_thread_has_no_user_part() {
    let (at, [of_kernel, _]) = samples(guest(CALLCHAIN | REGS_USER | STACK_USER, 0, 0));
    let chain = [IN_KERNEL, at.kernel, 0x10_0111, 0x10_0222];
    assert_eq!(of_kernel, [&[4], &chain[..], &[0, 0]].concat());
}

#[test]
fn chains_without_kernel_or_program() {
    const EXCLUDE_KERNEL: u64 = 1 << 9;
    const EXCLUDE_USER: u64 = 1 << 10;
    let (at, [of_kernel, of_user]) = samples(guest(CALLCHAIN, EXCLUDE_KERNEL, SAVED));
    assert_eq!(of_kernel, [4, IN_USER, ENTERED, 0x2222, 0x3333]);
    assert_eq!(of_user[..3], [5, IN_USER, at.user]);
    let (at, [of_kernel, of_user]) = samples(guest(CALLCHAIN, EXCLUDE_USER, SAVED));
    assert_eq!(of_kernel, [4, IN_KERNEL, at.kernel, 0x10_0111, 0x10_0222]);
    assert_eq!(of_user, [0]);
}

#[test]
fn registers_and_stack_of_kernel_and_program() {
    let all = REGS_USER | STACK_USER | REGS_INTR;
    let (at, [of_kernel, of_user]) = samples(guest(all, 0, SAVED));
    // The stack's page ends six words above the stack pointer. Therefore, only six of the eight requested words are
    // copied, that is, 48 bytes.
    let mut stack = vec![STACK];
    stack.extend((0..6).map(|word| 0x7700 + word));
    stack.extend([0, 0, 48]);
    let saved = [2, ENTERED_BP, USER_SP, ENTERED];
    let kernel = [2, KERNEL_BP, KERNEL_SP, at.kernel];
    assert_eq!(of_kernel, [&saved[..], &stack, &kernel].concat());
    let user = [2, USER_BP, USER_SP, at.user];
    assert_eq!(of_user, [&user[..], &stack, &user].concat());
}

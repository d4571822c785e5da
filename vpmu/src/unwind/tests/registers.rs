//! Tests of the registers and stacks in samples, and of the tasks to which they are attributed.

use super::*;
use crate::memory::View;

#[test]
fn without_saved_registers_there_is_no_program() {
    let guest = Guest::new();
    let sp = KSTACK + 0x3000;
    let everything = CaptureSpec { regs_user: 1 << IP, regs_intr: 1 << IP, stack_user: 64, ..CHAIN };
    let look = |sp, user_regs| {
        let cpu = guest.in_kernel(TEXT, 0, sp);
        let mut capture = SampleCapture::default();
        let regs = GuestRegs { ip: TEXT, user: false };
        let cpu = Some(cpu);
        capture.take(&View::of(&guest.memory), &CpuContext { regs, cpu }, user_regs, &everything, None);
        capture
    };
    guest.save_task(UTEXT, 0, 0x33);
    let there = look(sp, SAVED);
    assert_eq!(there.chain(), [KERNEL, TEXT, USER, UTEXT]);
    assert_eq!((abi(there.regs_user()), there.stack().map(<[u8]>::len)), (2, Some(64)));
    // Each row has a stack pointer and an address of saved registers. The address must be rejected.
    for (sp, user_regs) in [
        // A kernel thread has no saved registers.
        (sp, 0),
        // During a task switch, the kernel still runs on the previous task's stack.
        (KSTACK - 8, SAVED),
        // The address is below the stack pointer.
        (SAVED + 8, SAVED),
        // The address is unaligned.
        (sp, SAVED + 4),
        // The address is too close to the end of the stack.
        (sp, KSTACK + 0x4000 - 8),
        // The address is on a page that is not present.
        (0x7000_0000, 0x7000_0100),
        // The address is at the end of the address space.
        (u64::MAX, u64::MAX - 7),
    ] {
        let capture = look(sp, user_regs);
        assert_eq!(capture.chain(), [KERNEL, TEXT], "{sp:#x} {user_regs:#x}");
        assert_eq!((capture.regs_user(), capture.stack()), (None, None));
        assert_eq!(capture.regs_intr(), Some(Regs { abi: 2, values: &[TEXT] }));
    }
    // The kernel was entered from itself.
    guest.save_task(TEXT, 0, 0x10);
    assert_eq!(look(sp, SAVED).chain(), [KERNEL, TEXT]);
    // From 32-bit code.
    guest.save_task(UTEXT, 0, 0x23);
    assert_eq!(abi(look(sp, SAVED).regs_user()), 1);
}

#[test]
fn registers_in_perfs_order() {
    let guest = Guest::new();
    guest.save_task(UTEXT, 0x5004, 0x33);
    let mut cpu = guest.in_kernel(TEXT, 0, KSTACK + 0x3000);
    for (number, register) in (0x6000..).zip(&mut cpu.general) {
        if *register == 0 {
            *register = number;
        }
    }
    let mask = 0xff_0fff;
    let spec = CaptureSpec { regs_user: mask, regs_intr: mask, ..CaptureSpec::default() };
    let capture = guest.capture(&cpu, &spec);
    // The registers in perf's order, from AX to R15. The value 0x5000 + n comes from word n of struct pt_regs, which
    // begins with R15.
    let saved = [
        0x500a,
        0x5005,
        0x500b,
        0x500c,
        0x500d,
        0x500e,
        0x5004,
        USTACK + 0x3f00,
        UTEXT,
        0x5012,
        0x33,
        0x5014,
        0x5009,
        0x5008,
        0x5007,
        0x5006,
        0x5003,
        0x5002,
        0x5001,
        0x5000,
    ];
    assert_eq!(values(capture.regs_user()), saved);
    let at: Vec<u64> = (0..24).filter(|number| mask >> number & 1 != 0).map(|number| cpu.general[number]).collect();
    assert_eq!(values(capture.regs_intr()), at);
    assert!(capture.chain().is_empty());

    // In user mode, the registers at the overflow are the user registers.
    cpu.user = true;
    let capture = guest.capture(&cpu, &spec);
    assert_eq!(values(capture.regs_user()), at);
}

#[test]
fn stack_ends_with_its_last_page() {
    let guest = Guest::new();
    let sp = USTACK + 0x4000 - 24;
    for word in 0..3 {
        guest.user_word(sp + word * 8, word + 1);
    }
    let cpu = guest.in_user(UTEXT, sp);
    let stack = |stack_user| {
        let spec = CaptureSpec { stack_user, ..CaptureSpec::default() };
        let capture = guest.capture(&cpu, &spec);
        capture.stack().expect("a program").to_vec()
    };
    let all = [1_u64, 2, 3].map(u64::to_le_bytes).concat();
    assert_eq!(stack(16), all[..16]);
    assert_eq!(stack(24), all);
    assert_eq!(stack(65_528), all);
}

#[test]
fn position_without_vcpu_state_is_the_address_alone() {
    let guest = Guest::new();
    let everything = CaptureSpec { regs_user: 1, regs_intr: 1, stack_user: 8, ..CHAIN };
    let mut capture = guest.capture(&guest.in_user(UTEXT, 0), &everything);
    let regs = GuestRegs { ip: TEXT, user: false };
    let cpu = None;
    capture.take(&View::of(&guest.memory), &CpuContext { regs, cpu }, SAVED, &everything, None);
    assert_eq!(capture.chain(), [KERNEL, TEXT]);
    assert_eq!((capture.regs_user(), capture.regs_intr()), (None, None));
    assert_eq!(capture.stack(), None);
    // In a mode that is not supported, the chain has only the IP.
    let mut cpu = guest.in_user(UTEXT, USTACK);
    cpu.efer = 0;
    assert_eq!(guest.chain(&cpu), [USER, UTEXT]);
}

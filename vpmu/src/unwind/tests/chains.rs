//! Call chains, checked to the last address.

use super::*;

#[test]
fn a_programs_callers() {
    let guest = Guest::new();
    let fp = USTACK + 0x100;
    guest.user_frame(fp, fp + 0x40, 0x1111);
    guest.user_frame(fp + 0x40, fp + 0x80, 0x2222);
    guest.user_frame(fp + 0x80, 0, 0x3333);
    let cpu = guest.in_user(UTEXT, fp);
    assert_eq!(guest.chain(&cpu), [USER, UTEXT, 0x1111, 0x2222, 0x3333]);
    let most = |max_stack| {
        let spec = CaptureSpec { max_stack, ..CHAIN };
        guest.capture(&cpu, &spec).chain().to_vec()
    };
    assert_eq!(most(2), [USER, UTEXT, 0x1111]);
    assert_eq!(most(1), [USER, UTEXT]);
    let out = CaptureSpec { exclude_user: true, ..CHAIN };
    assert!(guest.capture(&cpu, &out).chain().is_empty());
    let kernel_out = CaptureSpec { exclude_kernel: true, ..CHAIN };
    assert_eq!(guest.capture(&cpu, &kernel_out).chain().len(), 5);
}

#[test]
fn callers_of_32_bit_code() {
    let mut guest = Guest::new();
    guest.map(0x80_0000, 0x20_0000 | P | U, 0, P | U);
    guest.user_word(USTACK + 0x100, 0x80_0200 | 0x1111 << 32);
    guest.user_word(USTACK + 0x200, 0x2222 << 32);
    // The upper 32 bits of a register are not part of a 32-bit program's state.
    let mut cpu = guest.in_user(UTEXT, 7 << 32 | 0x80_0100);
    cpu.code64 = false;
    assert_eq!(guest.chain(&cpu), [USER, UTEXT, 0x1111, 0x2222]);
    let regs = CaptureSpec { regs_user: 1 << IP, ..CaptureSpec::default() };
    let capture = guest.capture(&cpu, &regs);
    assert_eq!(capture.regs_user(), Some(Regs { abi: 1, values: &[UTEXT] }));
}

#[test]
fn frames_in_a_circle_end_at_the_limit() {
    let guest = Guest::new();
    let fp = USTACK + 0x100;
    guest.user_frame(fp, fp, 0x1111);
    let chain = guest.chain(&guest.in_user(UTEXT, fp));
    assert_eq!(chain.len(), 1 + 127);
    assert!(chain[2..].iter().all(|&caller| caller == 0x1111));
}

#[test]
fn frame_pointer_into_the_kernel_reads_nothing() {
    let guest = Guest::new();
    guest.kernel_frame(KSTACK + 0x100, 0, 0x5ec2e7);
    let cpu = guest.in_user(UTEXT, KSTACK + 0x100);
    assert_eq!(guest.chain(&cpu), [USER, UTEXT]);
    let spec = CaptureSpec { stack_user: 64, ..CHAIN };
    assert_eq!(guest.capture(&cpu, &spec).stack(), Some(&[][..]));
}

#[test]
fn kernel_callers_precede_the_programs() {
    let guest = Guest::new();
    let (sp, fp) = (KSTACK + 0x3000, KSTACK + 0x3010);
    guest.kernel_frame(fp, fp + 0x20, TEXT + 0x111);
    // The kernel's outermost frame ends where the saved registers begin.
    guest.kernel_frame(fp + 0x20, SAVED, TEXT + 0x222);
    guest.user_frame(USTACK + 0x100, 0, 0x1111);
    guest.save_task(UTEXT, USTACK + 0x100, 0x33);
    let cpu = guest.in_kernel(TEXT, fp, sp);
    let kernel = [KERNEL, TEXT, TEXT + 0x111, TEXT + 0x222];
    let user = [USER, UTEXT, 0x1111];
    assert_eq!(guest.chain(&cpu), [&kernel[..], &user].concat());

    let part = |exclude_kernel, exclude_user| {
        let spec = CaptureSpec { exclude_kernel, exclude_user, ..CHAIN };
        guest.capture(&cpu, &spec).chain().to_vec()
    };
    assert_eq!(part(false, true), kernel);
    assert_eq!(part(true, false), user);
    assert!(part(true, true).is_empty());

    // Kernel and user callers share the limit. `PERF_CONTEXT_*` values do not count towards it.
    let spec = CaptureSpec { max_stack: 4, ..CHAIN };
    let chain = guest.capture(&cpu, &spec);
    assert_eq!(chain.chain(), [&kernel[..], &user[..2]].concat());
    let spec = CaptureSpec { max_stack: 3, ..CHAIN };
    let chain = guest.capture(&cpu, &spec);
    assert_eq!(chain.chain(), [&kernel[..], &user[..1]].concat());
}

#[test]
fn kernel_frame_off_the_stack_ends_the_chain() {
    let guest = Guest::new();
    let (sp, fp) = (KSTACK + 0x3000, KSTACK + 0x3010);
    let chain = |bp| {
        let spec = CaptureSpec { exclude_user: true, ..CHAIN };
        let cpu = guest.in_kernel(TEXT, bp, sp);
        guest.capture(&cpu, &spec).chain()[1..].to_vec()
    };
    guest.kernel_frame(fp, sp, TEXT + 0x111);
    assert_eq!(chain(fp), [TEXT, TEXT + 0x111], "the next frame is not higher");
    guest.kernel_frame(fp, fp, TEXT + 0x111);
    assert_eq!(chain(fp), [TEXT, TEXT + 0x111], "the next frame is the same frame");
    for caller in [0, UTEXT, KSTACK + 0x100, TEXT + 0x1000, 1 << 55] {
        guest.kernel_frame(fp, fp + 0x20, caller);
        assert_eq!(chain(fp), [TEXT], "{caller:#x} is not kernel code");
    }
    guest.kernel_frame(sp - 0x10, 0, TEXT + 0x111);
    guest.kernel_frame(fp + 4, 0, TEXT + 0x111);
    for wrong in [sp - 0x10, fp + 4, SAVED - 8, SAVED + 8, 0, USTACK, u64::MAX] {
        assert_eq!(chain(wrong), [TEXT], "there is no valid frame at {wrong:#x}");
    }
    guest.kernel_frame(SAVED - 16, 0, TEXT + 0x111);
    assert_eq!(chain(SAVED - 16), [TEXT, TEXT + 0x111], "the last frame that fits");
}

#[test]
fn code_is_what_no_level_forbids_to_run() {
    for level in 0..4 {
        let guest = Guest::new();
        let fp = KSTACK + 0x3010;
        guest.kernel_frame(fp, 0, TEXT + 0x111);
        let mut table = 0x1000;
        for above in (level..4).rev() {
            let at = table + (TEXT >> (12 + above * 9) & 511) * 8;
            if above == level {
                guest.put(at, guest.get(at) | NX);
            }
            table = guest.get(at) & 0x000f_ffff_ffff_f000;
        }
        let cpu = guest.in_kernel(TEXT, fp, fp);
        assert_eq!(guest.chain(&cpu), [KERNEL, TEXT], "level {level}");
    }
}

/// The bytes of `push %rbp; mov %rsp,%rbp; ...; pop %rbp; ret`, after `endbr64` and room for a tracer's call.
const FUNCTION: [u8; 16] =
    [0xf3, 0x0f, 0x1e, 0xfa, 0x0f, 0x1f, 0x44, 0x00, 0x00, 0x55, 0x48, 0x89, 0xe5, 0x90, 0x5d, 0xc3];

#[test]
fn function_without_its_frame_has_its_caller() {
    let guest = Guest::new();
    let fp = USTACK + 0x100;
    guest.user_frame(fp, 0, 0x2222);
    // Instructions of the function, and where the return address is from the stack pointer on.
    let places = [(0, Some(0)), (4, Some(0)), (9, Some(0)), (10, Some(8)), (13, None), (14, None), (15, Some(0))];
    for (offset, above) in places {
        let sp = USTACK + 0x80;
        guest.user_word(sp, 0x1111 + 8);
        guest.user_word(sp + 8, 0x1111);
        guest.write(0x31_0040, &FUNCTION);
        let mut cpu = guest.in_user(UTEXT + 0x40 + offset, fp);
        cpu.general[SP] = sp;
        let caller = above.map(|above| 0x1111 + 8 - above);
        let expected: Vec<u64> =
            [Some(USER), Some(UTEXT + 0x40 + offset), caller, Some(0x2222)].into_iter().flatten().collect();
        assert_eq!(guest.chain(&cpu), expected, "at {offset}");
        // In 32-bit code, the same bytes are other instructions.
        cpu.code64 = false;
        assert!(guest.chain(&cpu).len() <= 3, "at {offset}");
    }
    // A copy of the second instruction alone does not begin a function.
    guest.write(0x31_0080, &FUNCTION[10..]);
    let cpu = guest.in_user(UTEXT + 0x80, fp);
    assert_eq!(guest.chain(&cpu), [USER, UTEXT + 0x80, 0x2222]);
}

#[test]
fn kernel_function_without_its_frame_has_its_caller() {
    let guest = Guest::new();
    let (sp, fp) = (KSTACK + 0x3000, KSTACK + 0x3010);
    guest.kernel_frame(fp, SAVED, TEXT + 0x222);
    guest.kernel_word(sp, TEXT + 0x111);
    guest.write(0x30_0040, &FUNCTION);
    let spec = CaptureSpec { exclude_user: true, ..CHAIN };
    let chain = |ip| guest.capture(&guest.in_kernel(ip, fp, sp), &spec).chain().to_vec();
    assert_eq!(chain(TEXT + 0x40), [KERNEL, TEXT + 0x40, TEXT + 0x111, TEXT + 0x222]);
    assert_eq!(chain(TEXT + 0x4d), [KERNEL, TEXT + 0x4d, TEXT + 0x222]);
    // The word is not the address of code, so the rest of the stack is not known either.
    guest.kernel_word(sp, KSTACK);
    assert_eq!(chain(TEXT + 0x40), [KERNEL, TEXT + 0x40]);
}

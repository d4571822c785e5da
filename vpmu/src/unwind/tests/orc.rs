//! Callers in a kernel without frame pointers, which the tests describe with ORC rules.

use proptest::prelude::*;
use vpmu_orc::{BpRule, FrameKind, FrameRule, Register, Rule, SpRule};

use super::*;

const AX: usize = 0;
const R10: usize = 18;

/// Rules for functions of 0x100 bytes each, the first of which is at `TEXT`.
fn table(rules: &[Rule]) -> OrcTable {
    let starts = (TEXT..).step_by(0x100);
    OrcTable::from_rules(TEXT..TEXT + 0x1000, starts.zip(rules.iter().copied()))
}

const fn rule(sp: SpRule, bp: BpRule, kind: FrameKind) -> Rule {
    Rule::Frame(FrameRule { sp, bp, kind, interrupted: !matches!(kind, FrameKind::Call) })
}

const fn sum(register: Register, offset: i16) -> SpRule {
    SpRule::Sum(register, offset)
}

/// A function whose frame has `size` bytes with the return address.
const fn call(size: i16) -> Rule {
    rule(sum(Register::Sp, size), BpRule::Same, FrameKind::Call)
}

/// The address `offset` bytes into function `index`.
const fn at(index: u64, offset: u64) -> u64 {
    TEXT + index * 0x100 + offset
}

/// The kernel's part of the chain, without the context and the sampled address.
fn callers(guest: &Guest, cpu: &CpuState) -> Vec<u64> {
    let spec = CaptureSpec { exclude_user: true, ..CHAIN };
    let chain = guest.capture(cpu, &spec).chain().to_vec();
    assert_eq!(chain[..2], [KERNEL, cpu.general[IP]]);
    chain[2..].to_vec()
}

const STACK: u64 = KSTACK + 0x3000;

#[test]
fn frames_without_frame_pointers_have_their_callers() {
    let mut guest = Guest::new();
    guest.orc =
        Some(table(&[call(8), call(0x20), call(0x18), rule(sum(Register::Sp, 0), BpRule::Same, FrameKind::Regs)]));
    // The first function has just been called, and BP has nothing to do with the stack.
    guest.kernel_word(STACK, at(1, 0x50));
    guest.kernel_word(STACK + 0x20, at(2, 0x50));
    guest.kernel_word(STACK + 0x38, at(3, 0x50));
    guest.save_task(UTEXT, USTACK + 0x100, 0x33);
    guest.user_frame(USTACK + 0x100, 0, 0x1111);
    let mut cpu = guest.in_kernel(at(0, 0), 0x1234, STACK);
    assert_eq!(callers(&guest, &cpu), [at(1, 0x50), at(2, 0x50), at(3, 0x50)]);
    // The last frame leads to registers at 0x40 of the stack, which holds no saved registers.
    let chain = guest.chain(&cpu);
    assert_eq!(chain[5..], [USER, UTEXT, 0x1111], "{chain:x?}");
    // Later in the frame, the function's own rule leads to the same callers.
    cpu.general[IP] = at(1, 0x10);
    cpu.general[SP] = STACK + 8;
    assert_eq!(callers(&guest, &cpu), [at(2, 0x50), at(3, 0x50)]);
}

#[test]
fn call_at_the_end_of_a_function_belongs_to_that_function() {
    let mut guest = Guest::new();
    guest.orc = Some(table(&[call(8), call(0x20), Rule::Unknown]));
    // The call does not return, so its return address is the start of the next function, whose rule is another.
    guest.kernel_word(STACK, at(2, 0));
    guest.kernel_word(STACK + 0x20, at(1, 0x50));
    let mut cpu = guest.in_kernel(at(0, 0), 0, STACK);
    assert_eq!(callers(&guest, &cpu)[..2], [at(2, 0), at(1, 0x50)]);
    // The sampled address itself is not that of a call.
    cpu.general[IP] = at(2, 0);
    assert!(callers(&guest, &cpu).is_empty());
}

#[test]
fn interrupt_is_followed_to_the_stack_that_it_interrupted() {
    let mut guest = Guest::new();
    // The processor's own stack for interrupts, from 0x3000 of the guest's kernel stack on, seen at another address.
    let interrupts = 0xffff_fe00_0000_0000;
    guest.map(interrupts, 0x10_0000 | P | NX, 0, P);
    guest.orc = Some(table(&[
        call(8),
        // The handler keeps the task's stack pointer in the word that BP points to.
        rule(SpRule::Loaded { register: Register::Bp, before: -8, after: 0 }, BpRule::Same, FrameKind::Regs),
        rule(sum(Register::Bp, 16), BpRule::FromSp(-16), FrameKind::Call),
        rule(sum(Register::R10, 0), BpRule::Same, FrameKind::Call),
        rule(sum(Register::Sp, 0), BpRule::Same, FrameKind::Regs),
        call(8),
    ]));
    let saved = STACK + 0x100;
    guest.put(0x10_0000, at(1, 0x10));
    guest.put(0x10_0028, saved);
    // The interrupted function has a frame pointer, and was interrupted at its first instruction.
    for (word, value) in [(4, STACK + 0x700), (7, STACK + 0x600), (16, at(2, 0)), (17, 0x10), (19, STACK + 0x300)] {
        guest.kernel_word(saved + word * 8, value);
    }
    guest.kernel_word(STACK + 0x700, STACK + 0x800);
    guest.kernel_word(STACK + 0x708, at(5, 0x20));
    guest.kernel_word(STACK + 0x710, at(3, 0x20));
    let cpu = guest.in_kernel(at(0, 0), interrupts + 0x30, interrupts);
    // R10 is not known any more after a call.
    assert_eq!(callers(&guest, &cpu), [at(1, 0x10), at(2, 0), at(5, 0x20), at(3, 0x20)]);
    // It is known where the interrupt came.
    guest.kernel_word(saved + 16 * 8, at(3, 0));
    guest.kernel_word(STACK + 0x5f8, at(5, 0x20));
    guest.kernel_word(STACK + 0x600, at(2, 0x20));
    assert_eq!(callers(&guest, &cpu), [at(1, 0x10), at(3, 0), at(5, 0x20), at(2, 0x20), at(5, 0x20), at(3, 0x20)]);
}

#[test]
fn task_of_an_interrupt_is_known_by_the_chain() {
    let mut guest = Guest::new();
    let interrupts = 0xffff_fe00_0000_0000;
    guest.map(interrupts, 0x10_0000 | P | NX, 0, P);
    guest.orc = Some(table(&[rule(
        SpRule::Loaded { register: Register::Sp, before: 0, after: 0 },
        BpRule::Same,
        FrameKind::Regs,
    )]));
    guest.put(0x10_0000, SAVED);
    guest.save_task(UTEXT, USTACK + 0x100, 0x33);
    guest.user_frame(USTACK + 0x100, 0, 0x1111);
    let cpu = guest.in_kernel(at(0, 0), 0, interrupts);
    assert_eq!(guest.chain(&cpu), [KERNEL, at(0, 0), USER, UTEXT, 0x1111]);
    // The registers belong to another task than the one that runs.
    for user_regs in [0, SAVED - 0x4000] {
        assert_eq!(guest.capture_with(&cpu, user_regs, &CHAIN).chain(), [KERNEL, at(0, 0)]);
    }
}

#[test]
fn entry_that_has_saved_few_registers_has_the_others_in_the_cpu() {
    let mut guest = Guest::new();
    guest.orc = Some(table(&[
        rule(sum(Register::Sp, 8), BpRule::Same, FrameKind::PartialRegs),
        rule(sum(Register::R10, 0), BpRule::Same, FrameKind::Call),
        rule(sum(Register::Bp, 16), BpRule::Same, FrameKind::Call),
    ]));
    for (word, value) in [(1, at(1, 0)), (2, 0x10), (4, STACK + 0x100)] {
        guest.kernel_word(STACK + word * 8, value);
    }
    guest.kernel_word(STACK + 0x1f8, at(2, 0x10));
    guest.kernel_word(STACK + 0x308, at(2, 0x20));
    let mut cpu = guest.in_kernel(at(0, 0), STACK + 0x300, STACK);
    cpu.general[R10] = STACK + 0x200;
    cpu.general[AX] = u64::MAX;
    assert_eq!(callers(&guest, &cpu)[..3], [at(1, 0), at(2, 0x10), at(2, 0x20)]);
}

#[test]
fn chain_ends_where_tables_or_stack_end() {
    let mut guest = Guest::new();
    guest.map(TEXT + 0x1000, 0x30_1000 | P, 0, P);
    let leaf = |guest: &Guest, word: u64, sp: u64| {
        guest.kernel_word(STACK, word);
        callers(guest, &guest.in_kernel(at(0, 0), 0, sp))
    };
    guest.orc = Some(table(&[call(8), Rule::End, Rule::Unknown, call(0), call(-0x100)]));
    assert_eq!(leaf(&guest, at(1, 1), STACK), [at(1, 1)], "the outermost frame");
    assert_eq!(leaf(&guest, at(2, 1), STACK), [at(2, 1)], "a frame without a rule");
    let module = TEXT + 0x1000;
    assert_eq!(leaf(&guest, module + 0x10, STACK), [module + 0x10], "code outside the tables");
    for caller in [0, UTEXT, KSTACK + 0x100, TEXT + 0x2000, 1 << 55] {
        assert!(leaf(&guest, caller, STACK).is_empty(), "{caller:#x} is not kernel code");
    }
    guest.user_word(USTACK + 0x100, at(1, 1));
    for sp in [USTACK + 0x100, KSTACK + 0x4000, 0, u64::MAX, u64::MAX - 7, 1 << 63] {
        assert!(leaf(&guest, at(1, 1), sp).is_empty(), "{sp:#x} is not on a kernel stack");
    }
    for stuck in [3, 4] {
        guest.kernel_word(STACK - 0xf8, at(1, 1));
        assert_eq!(leaf(&guest, at(stuck, 1), STACK), [at(stuck, 1)], "a caller whose stack is not higher");
    }
}

#[test]
fn caller_in_code_of_the_boot_is_known_after_the_boot() {
    let mut guest = Guest::new();
    guest.orc = Some(OrcTable::from_rules(TEXT..TEXT + 0x2000, [(TEXT, call(8)), (TEXT + 0x1000, call(16))]));
    // The page of the second function is not mapped any more.
    guest.kernel_word(STACK, TEXT + 0x1234);
    guest.kernel_word(STACK + 0x10, at(0, 0x50));
    let chain = callers(&guest, &guest.in_kernel(at(0, 0), 0, STACK));
    assert_eq!(chain[..2], [TEXT + 0x1234, at(0, 0x50)]);
}

#[test]
fn moved_kernel_is_found_in_the_page_tables() {
    let mut guest = Guest::new();
    guest.orc = Some(table(&[call(8), Rule::End]));
    guest.kernel_word(STACK, at(1, 1));
    let cpu = guest.in_kernel(at(0, 0), 0, STACK);
    assert_eq!(callers(&guest, &cpu), [at(1, 1)]);
    for slide in [0x20_0000, 0x1e60_0000, (1 << 30) - 0x100_0000 - 0x20_0000_u64] {
        let mut guest = Guest::bare(4);
        for page in 0..4 {
            guest.map(KSTACK + page * 0x1000, (0x10_0000 + page * 0x1000) | P | NX, 0, P);
        }
        guest.map(TEXT + slide, 0x30_0000 | P, 0, P);
        // The next page of code is not the kernel's start.
        guest.map(TEXT + slide + 0x20_0000, 0x30_0000 | P, 0, P);
        guest.orc = Some(table(&[call(8), Rule::End]));
        guest.kernel_word(STACK, at(1, 1) + slide);
        let cpu = guest.in_kernel(at(0, 0) + slide, 0, STACK);
        assert_eq!(callers(&guest, &cpu), [at(1, 1) + slide], "{slide:#x}");
    }
}

fn any_rule() -> impl Strategy<Value = Rule> {
    let register = || {
        prop_oneof![
            1 => Just(Register::Ax),
            1 => Just(Register::Dx),
            1 => Just(Register::Di),
            1 => Just(Register::Bp),
            3 => Just(Register::Sp),
            1 => Just(Register::R10),
            1 => Just(Register::R13),
        ]
    };
    let offset = || prop_oneof![any::<i16>(), -16_i16..64];
    let sp = prop_oneof![
        3 => (register(), offset()).prop_map(|(register, offset)| SpRule::Sum(register, offset)),
        1 => (register(), offset(), offset())
            .prop_map(|(register, before, after)| SpRule::Loaded { register, before, after }),
    ];
    let bp = prop_oneof![Just(BpRule::Same), offset().prop_map(BpRule::FromSp), offset().prop_map(BpRule::FromBp)];
    let kind = prop_oneof![3 => Just(FrameKind::Call), 1 => Just(FrameKind::Regs), 1 => Just(FrameKind::PartialRegs)];
    prop_oneof![
        8 => (sp, bp, kind, any::<bool>())
            .prop_map(|(sp, bp, kind, interrupted)| Rule::Frame(FrameRule { sp, bp, kind, interrupted })),
        1 => Just(Rule::End),
        1 => Just(Rule::Unknown),
    ]
}

fn word() -> impl Strategy<Value = u64> {
    prop_oneof![
        (0..0x800_u64).prop_map(|word| KSTACK + word * 8),
        (0..0x1000_u64).prop_map(|offset| TEXT + offset),
        any::<u64>(),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Every address of a chain is code of the kernel, whatever the rules, the stack and the registers are.
    #[test]
    fn any_rules_on_any_stack_yield_only_kernel_code(
        rules in proptest::collection::vec(any_rule(), 1..16),
        stack in proptest::collection::vec(word(), 0x800),
        general in proptest::array::uniform24(word()),
        max_stack in 1..=127_u32,
    ) {
        let mut guest = Guest::new();
        guest.orc = Some(table(&rules));
        for (at, word) in (KSTACK..).step_by(8).zip(stack) {
            guest.kernel_word(at, word);
        }
        let mut cpu = guest.in_kernel(0, 0, 0);
        cpu.general = general;
        let spec = CaptureSpec { max_stack, exclude_user: true, ..CHAIN };
        let chain = guest.capture(&cpu, &spec).chain().to_vec();
        prop_assert!(chain.len() <= 1 + max_stack as usize);
        prop_assert!(chain.iter().skip(2).all(|address| (TEXT..TEXT + 0x1000).contains(address)), "{chain:x?}");
    }
}

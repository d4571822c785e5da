//! Samples of guests with random page tables, and of programs whose frames point to kernel memory.

use proptest::prelude::*;

use super::*;

/// Addresses that are usually mapped.
fn address() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        (0..0x4008_u64).prop_map(|offset| KSTACK + offset),
        (0..0x4008_u64).prop_map(|offset| USTACK + offset),
        (0..0x1008_u64).prop_map(|offset| TEXT + offset),
        0..0x2000_u64,
    ]
}

fn cpu_state() -> impl Strategy<Value = CpuState> {
    (
        proptest::array::uniform24(address()),
        any::<bool>(),
        any::<bool>(),
        prop_oneof![4 => Just(0x1000_u64), 1 => any::<u64>()],
        any::<bool>(),
    )
        .prop_map(|(general, user, code64, cr3, five)| CpuState {
            general,
            user,
            code64,
            cr0: 1 << 31,
            cr3,
            cr4: 1 << 5 | u64::from(five) << 12,
            efer: 1 << 10,
        })
}

fn spec() -> impl Strategy<Value = CaptureSpec> {
    (any::<[bool; 3]>(), 1..=127_u32, any::<[u32; 2]>(), 0..0x2000_u32).prop_map(
        |([chain, exclude_kernel, exclude_user], max_stack, [regs_user, regs_intr], stack)| CaptureSpec {
            chain,
            exclude_kernel,
            exclude_user,
            max_stack,
            regs_user: u64::from(regs_user) & 0xff_0fff,
            regs_intr: u64::from(regs_intr) & 0xff_0fff,
            stack_user: stack * 8,
        },
    )
}

fn look(guest: &Guest, cpu: &CpuState, user_regs: u64, spec: &CaptureSpec) -> SampleCapture {
    let capture = guest.capture_with(cpu, user_regs, spec);
    let marks = capture.chain().iter().filter(|&&one| one == KERNEL || one == USER);
    let addresses = capture.chain().len() - marks.count().min(2);
    assert!(addresses <= spec.max_stack as usize);
    assert!(capture.stack().is_none_or(|stack| stack.len() <= spec.stack_user as usize));
    let masks = [(capture.regs_user(), spec.regs_user), (capture.regs_intr(), spec.regs_intr)];
    for (regs, mask) in masks {
        assert!(regs.is_none_or(|regs| regs.values.len() == mask.count_ones() as usize));
    }
    capture
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn guest_of_random_input_does_no_harm(
        seed in any::<[u64; 4]>(),
        cpu in cpu_state(),
        user_regs in address(),
        spec in spec(),
    ) {
        let guest = Guest::bare(4);
        // Fill the tables with random entries. The present bit is set in many of them, so that walks also reach lower
        // levels.
        let mut noise = seed[0] | 1;
        for at in (0x1000..0x9000_u64).step_by(8) {
            noise ^= noise << 13;
            noise ^= noise >> 7;
            noise ^= noise << 17;
            guest.put(at, noise & (seed[1] | 0xf000) | seed[2] & P | noise & U);
        }
        look(&guest, &cpu, user_regs, &spec);
    }

    #[test]
    fn program_cannot_see_its_kernel(
        frames in proptest::collection::vec((0..0x800_u64, address(), address()), 0..64),
        mut cpu in cpu_state(),
        spec in spec(),
    ) {
        const SECRET: u64 = 0x5ec2_e75e_c2e7_5ec2;
        let guest = Guest::new();
        for at in (KSTACK..KSTACK + 0x4000).step_by(8) {
            guest.kernel_word(at, SECRET);
        }
        for at in (0x30_0000..0x30_1000).step_by(8) {
            guest.put(at, SECRET);
        }
        for (slot, next, caller) in frames {
            guest.user_word(USTACK + slot * 8, next);
            guest.user_word(USTACK + (slot ^ 1) * 8, caller);
        }
        cpu.user = true;
        cpu.cr3 = 0x1000;
        let capture = look(&guest, &cpu, SAVED, &spec);
        let secret = SECRET.to_le_bytes();
        let halves = [SECRET, SECRET & 0xffff_ffff, SECRET >> 32];
        prop_assert!(!capture.chain().iter().any(|one| halves.contains(one)));
        let stack = capture.stack().unwrap_or_default();
        prop_assert!(!stack.windows(8).any(|bytes| bytes == secret));
    }
}

//! Chains, registers and stacks of guests built by hand, and of guests that are nothing but
//! noise.

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::*;
use crate::machine::{CpuState, GENERAL_REGS, GuestRegs};
use crate::record::Regs;

const MEMORY: usize = 4 << 20;
const KERNEL: u64 = -128_i64 as u64;
const USER: u64 = -512_i64 as u64;

/// Bits of table entries.
const P: u64 = 1;
const U: u64 = 1 << 2;
const PS: u64 = 1 << 7;
const NX: u64 = 1 << 63;

/// Where the guest has what.
const TEXT: u64 = 0xffff_ffff_8100_0000;
const KSTACK: u64 = 0xffff_c900_0000_4000;
const USTACK: u64 = 0x7ffe_0000_0000;
const UTEXT: u64 = 0x40_1000;
/// The registers of the running task, at the end of its kernel stack.
const SAVED: u64 = KSTACK + 0x4000 - 21 * 8;

const BP: usize = 6;
const SP: usize = 7;
const IP: usize = 8;

/// A guest under construction.
struct Guest {
    memory: GuestMemoryMmap,
    levels: u32,
    next: u64,
}

impl Guest {
    fn bare(levels: u32) -> Self {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY)]).expect("memory");
        Self {
            memory,
            levels,
            // The root is at 0x1000.
            next: 0x2000,
        }
    }

    /// A kernel and a program with a stack each.
    fn new() -> Self {
        let mut guest = Self::bare(4);
        for page in 0..4 {
            let physical = 0x10_0000 + page * 0x1000;
            guest.map(KSTACK + page * 0x1000, physical | P | NX, 0, P);
            let physical = 0x20_0000 + page * 0x1000;
            guest.map(USTACK + page * 0x1000, physical | P | U | NX, 0, P | U);
        }
        guest.map(TEXT, 0x30_0000 | P, 0, P);
        guest.map(UTEXT, 0x31_0000 | P | U, 0, P | U);
        guest
    }

    fn put(&self, physical: u64, word: u64) {
        self.memory
            .write_obj(word.to_le(), GuestAddress(physical))
            .expect("in memory");
    }

    fn get(&self, physical: u64) -> u64 {
        self.memory
            .read_obj::<u64>(GuestAddress(physical))
            .map(u64::from_le)
            .expect("in memory")
    }

    /// Maps `address` with `entry` in a table of `level`, those above made with `bits`.
    fn map(&mut self, address: u64, entry: u64, level: u32, bits: u64) {
        let mut table = 0x1000;
        for above in (level + 1..self.levels).rev() {
            let at = table + (address >> (12 + above * 9) & 511) * 8;
            if self.get(at) == 0 {
                self.put(at, self.next | bits);
                self.next += 0x1000;
            }
            self.put(at, self.get(at) | bits);
            table = self.get(at) & 0x000f_ffff_ffff_f000;
        }
        self.put(table + (address >> (12 + level * 9) & 511) * 8, entry);
    }

    fn cpu(&self) -> CpuState {
        CpuState {
            general: [0; GENERAL_REGS],
            user: true,
            code64: true,
            cr0: 1 << 31 | 1,
            cr3: 0x1000 | 0x18,
            cr4: if self.levels == 5 {
                1 << 5 | 1 << 12
            } else {
                1 << 5
            },
            efer: 1 << 10 | 1 << 8,
        }
    }

    /// The machine in the program, at `ip` with this frame pointer.
    fn in_user(&self, ip: u64, bp: u64) -> CpuState {
        let mut cpu = self.cpu();
        cpu.general[IP] = ip;
        cpu.general[BP] = bp;
        cpu.general[SP] = bp;
        cpu
    }

    fn in_kernel(&self, ip: u64, bp: u64, sp: u64) -> CpuState {
        let mut cpu = self.in_user(ip, bp);
        cpu.general[SP] = sp;
        cpu.user = false;
        cpu
    }

    /// A word of the kernel's stack.
    fn kernel_word(&self, address: u64, word: u64) {
        self.put(0x10_0000 + (address - KSTACK), word);
    }

    fn user_word(&self, address: u64, word: u64) {
        self.put(0x20_0000 + (address - USTACK), word);
    }

    /// A program's frame at `fp`.
    fn user_frame(&self, fp: u64, next: u64, caller: u64) {
        self.user_word(fp, next);
        self.user_word(fp + 8, caller);
    }

    fn kernel_frame(&self, fp: u64, next: u64, caller: u64) {
        self.kernel_word(fp, next);
        self.kernel_word(fp + 8, caller);
    }

    /// A task that entered the kernel from `ip`; its other registers tell their places.
    fn save_task(&self, ip: u64, bp: u64, cs: u64) {
        for word in 0..21 {
            self.kernel_word(SAVED + word * 8, 0x5000 + word);
        }
        self.kernel_word(SAVED + 4 * 8, bp);
        self.kernel_word(SAVED + 16 * 8, ip);
        self.kernel_word(SAVED + 17 * 8, cs);
        self.kernel_word(SAVED + 19 * 8, USTACK + 0x3f00);
    }

    fn capture(&self, cpu: &CpuState, wish: &Wish) -> Capture {
        let mut capture = Capture::default();
        let regs = GuestRegs {
            ip: cpu.general[IP],
            user: cpu.user,
        };
        let cpu = Some(*cpu);
        capture.take(&self.memory, &Place { regs, cpu }, SAVED, wish);
        capture
    }

    fn chain(&self, cpu: &CpuState) -> Vec<u64> {
        self.capture(cpu, &CHAIN).chain().to_vec()
    }
}

fn abi(regs: Option<Regs<'_>>) -> u64 {
    regs.map_or(0, |regs| regs.abi)
}

fn values(regs: Option<Regs<'_>>) -> Vec<u64> {
    regs.map_or_else(Vec::new, |regs| regs.values.to_vec())
}

const CHAIN: Wish = Wish {
    chain: true,
    exclude_kernel: false,
    exclude_user: false,
    max_stack: 127,
    regs_user: 0,
    regs_intr: 0,
    stack_user: 0,
};

/// Reads a word as the guest's kernel or a program would.
fn word(guest: &Guest, address: u64, rights: paging::Rights) -> Option<u64> {
    let mut space = paging::AddressSpace::new(&guest.memory, &guest.cpu()).expect("long mode");
    space
        .words(address, rights)
        .map(|[word]| u64::from_le_bytes(word))
}

#[test]
fn pages_of_every_size_at_every_depth() {
    for levels in [4, 5] {
        for level in 0..3 {
            let mut guest = Guest::bare(levels);
            let size = 0x1000_u64 << (9 * level);
            let large = if level > 0 { PS } else { 0 };
            let address = 0x4000_0000_0000 + size * 3;
            // A page as large as the memory or larger begins with it.
            let physical = if level == 0 { 0x20_0000 } else { 0 };
            // Bit 12 of a large page's entry is no part of its address.
            let entry = physical | large | (large << 5) | P | U;
            guest.map(address, entry, level, P | U);
            guest.put(physical + 0x1238 % size, 42);
            let at = address + 0x1238 % size;
            assert_eq!(word(&guest, at, paging::Rights::User), Some(42), "{level}");
            assert_eq!(word(&guest, at, paging::Rights::Kernel), Some(42));
            assert_eq!(word(&guest, address - 8, paging::Rights::Kernel), None);
            assert_eq!(word(&guest, address + size, paging::Rights::Kernel), None);
        }
    }
}

#[test]
fn a_program_reads_only_what_every_level_opens() {
    let leaf = 0x20_0000 | P;
    for closed in 0..4 {
        let mut guest = Guest::bare(4);
        guest.map(USTACK, leaf | U, 0, P | U);
        // Takes the bit away at one level.
        let mut table = 0x1000;
        for level in (0..4).rev() {
            let at = table + (USTACK >> (12 + level * 9) & 511) * 8;
            if level == closed {
                guest.put(at, guest.get(at) & !U);
            }
            table = guest.get(at) & 0x000f_ffff_ffff_f000;
        }
        assert_eq!(word(&guest, USTACK, paging::Rights::User), None);
        assert_eq!(word(&guest, USTACK, paging::Rights::Kernel), Some(0));
    }
    // A page of the upper half is no program's, whatever the tables say.
    let mut guest = Guest::bare(4);
    guest.map(TEXT, leaf | U, 0, P | U);
    assert_eq!(word(&guest, TEXT, paging::Rights::User), None);
    assert_eq!(word(&guest, TEXT, paging::Rights::Kernel), Some(0));
}

#[test]
fn what_the_processor_would_not_translate_is_not_read() {
    let kernel = paging::Rights::Kernel;
    let mut guest = Guest::bare(4);
    // Not canonical, though its lower bits are mapped.
    guest.map(USTACK, 0x20_0000 | P | U, 0, P | U);
    assert_eq!(word(&guest, USTACK | 1 << 50, kernel), None);
    assert_eq!(word(&guest, u64::MAX, kernel), None);
    // A large page where there is none.
    guest.map(0, P | U | PS, 3, P | U);
    assert_eq!(word(&guest, 0, kernel), None);
    // A page, and tables, beyond memory.
    guest.map(1 << 39, 1 << 40 | P | U, 0, P | U);
    assert_eq!(word(&guest, 1 << 39, kernel), None);
    guest.map(2 << 39, 0x000f_ffff_ffff_f000 | P | U, 3, P | U);
    assert_eq!(word(&guest, 2 << 39, kernel), None);
    let mut cpu = guest.cpu();
    cpu.cr3 = u64::MAX;
    let mut space = paging::AddressSpace::new(&guest.memory, &cpu).expect("long mode");
    assert_eq!(space.words::<1, 8>(USTACK, kernel), None);
    // Modes that are not walked.
    for (cr0, cr4, efer) in [
        (1, 1 << 5, 1 << 10),
        (1 << 31, 0, 1 << 10),
        (1 << 31, 32, 0),
    ] {
        let cpu = CpuState {
            cr0,
            cr4,
            efer,
            ..guest.cpu()
        };
        assert!(paging::AddressSpace::new(&guest.memory, &cpu).is_none());
    }
}

#[test]
fn tables_that_point_to_themselves_end_like_any() {
    let guest = Guest::bare(4);
    guest.put(0x1000, 0x1000 | P | U);
    // Four times the same table: the page read is the table itself.
    assert_eq!(word(&guest, 0, paging::Rights::User), Some(0x1000 | P | U));
    let cpu = guest.in_user(UTEXT, 0);
    assert_eq!(guest.chain(&cpu), [USER, UTEXT, 0]);
}

#[test]
fn words_and_stacks_go_across_pages() {
    let mut guest = Guest::bare(4);
    guest.map(USTACK, 0x20_0000 | P | U, 0, P | U);
    guest.map(USTACK + 0x1000, 0x28_0000 | P | U, 0, P | U);
    guest.put(0x20_0ff8, 0x1122_3344_5566_7788);
    guest.put(0x28_0000, 0x99aa_bbcc_ddee_ff00);
    assert_eq!(
        word(&guest, USTACK + 0xffc, paging::Rights::User),
        Some(0xddee_ff00_1122_3344)
    );
}

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
        let wish = Wish { max_stack, ..CHAIN };
        guest.capture(&cpu, &wish).chain().to_vec()
    };
    assert_eq!(most(2), [USER, UTEXT, 0x1111]);
    assert_eq!(most(1), [USER, UTEXT]);
    let out = Wish {
        exclude_user: true,
        ..CHAIN
    };
    assert!(guest.capture(&cpu, &out).chain().is_empty());
    let kernel_out = Wish {
        exclude_kernel: true,
        ..CHAIN
    };
    assert_eq!(guest.capture(&cpu, &kernel_out).chain().len(), 5);
}

#[test]
fn callers_of_32_bit_code() {
    let mut guest = Guest::new();
    guest.map(0x80_0000, 0x20_0000 | P | U, 0, P | U);
    guest.user_word(USTACK + 0x100, 0x80_0200 | 0x1111 << 32);
    guest.user_word(USTACK + 0x200, 0x2222 << 32);
    // What lies above 32 bits is no part of its registers.
    let mut cpu = guest.in_user(UTEXT, 7 << 32 | 0x80_0100);
    cpu.code64 = false;
    assert_eq!(guest.chain(&cpu), [USER, UTEXT, 0x1111, 0x2222]);
    let regs = Wish {
        regs_user: 1 << IP,
        ..Wish::default()
    };
    let capture = guest.capture(&cpu, &regs);
    assert_eq!(
        capture.regs_user(),
        Some(Regs {
            abi: 1,
            values: &[UTEXT]
        })
    );
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
fn a_programs_frame_pointer_into_the_kernel_reads_nothing() {
    let guest = Guest::new();
    guest.kernel_frame(KSTACK + 0x100, 0, 0x5ec2e7);
    let cpu = guest.in_user(UTEXT, KSTACK + 0x100);
    assert_eq!(guest.chain(&cpu), [USER, UTEXT]);
    let wish = Wish {
        stack_user: 64,
        ..CHAIN
    };
    assert_eq!(guest.capture(&cpu, &wish).stack(), Some(&[][..]));
}

#[test]
fn the_kernels_callers_then_the_programs() {
    let guest = Guest::new();
    let (sp, fp) = (KSTACK + 0x3000, KSTACK + 0x3010);
    guest.kernel_frame(fp, fp + 0x20, TEXT + 0x111);
    // The outermost frame of the kernel's ends where the saved registers begin.
    guest.kernel_frame(fp + 0x20, SAVED, TEXT + 0x222);
    guest.user_frame(USTACK + 0x100, 0, 0x1111);
    guest.save_task(UTEXT, USTACK + 0x100, 0x33);
    let cpu = guest.in_kernel(TEXT, fp, sp);
    let kernel = [KERNEL, TEXT, TEXT + 0x111, TEXT + 0x222];
    let user = [USER, UTEXT, 0x1111];
    assert_eq!(guest.chain(&cpu), [&kernel[..], &user].concat());

    let part = |exclude_kernel, exclude_user| {
        let wish = Wish {
            exclude_kernel,
            exclude_user,
            ..CHAIN
        };
        guest.capture(&cpu, &wish).chain().to_vec()
    };
    assert_eq!(part(false, true), kernel);
    assert_eq!(part(true, false), user);
    assert!(part(true, true).is_empty());

    // Both share the limit, and its marks are beyond it.
    let wish = Wish {
        max_stack: 4,
        ..CHAIN
    };
    let chain = guest.capture(&cpu, &wish);
    assert_eq!(chain.chain(), [&kernel[..], &user[..2]].concat());
    let wish = Wish {
        max_stack: 3,
        ..CHAIN
    };
    let chain = guest.capture(&cpu, &wish);
    assert_eq!(chain.chain(), [&kernel[..], &user[..1]].concat());
}

#[test]
fn a_kernel_frame_lies_on_the_stack_rises_and_returns_to_code() {
    let guest = Guest::new();
    let (sp, fp) = (KSTACK + 0x3000, KSTACK + 0x3010);
    let chain = |bp| {
        let wish = Wish {
            exclude_user: true,
            ..CHAIN
        };
        let cpu = guest.in_kernel(TEXT, bp, sp);
        guest.capture(&cpu, &wish).chain()[1..].to_vec()
    };
    guest.kernel_frame(fp, sp, TEXT + 0x111);
    assert_eq!(chain(fp), [TEXT, TEXT + 0x111], "the next does not rise");
    guest.kernel_frame(fp, fp, TEXT + 0x111);
    assert_eq!(chain(fp), [TEXT, TEXT + 0x111], "nor does itself");
    for caller in [0, UTEXT, KSTACK + 0x100, TEXT + 0x1000, 1 << 55] {
        guest.kernel_frame(fp, fp + 0x20, caller);
        assert_eq!(chain(fp), [TEXT], "{caller:#x} is no code of the kernel's");
    }
    guest.kernel_frame(sp - 0x10, 0, TEXT + 0x111);
    guest.kernel_frame(fp + 4, 0, TEXT + 0x111);
    for wrong in [sp - 0x10, fp + 4, SAVED - 8, SAVED + 8, 0, USTACK, u64::MAX] {
        assert_eq!(chain(wrong), [TEXT], "{wrong:#x} is no frame");
    }
    guest.kernel_frame(SAVED - 16, 0, TEXT + 0x111);
    assert_eq!(
        chain(SAVED - 16),
        [TEXT, TEXT + 0x111],
        "the last that fits"
    );
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

#[test]
fn without_saved_registers_there_is_no_program() {
    let guest = Guest::new();
    let sp = KSTACK + 0x3000;
    let everything = Wish {
        regs_user: 1 << IP,
        regs_intr: 1 << IP,
        stack_user: 64,
        ..CHAIN
    };
    let look = |sp, user_regs| {
        let cpu = guest.in_kernel(TEXT, 0, sp);
        let mut capture = Capture::default();
        let regs = GuestRegs {
            ip: TEXT,
            user: false,
        };
        let cpu = Some(cpu);
        capture.take(&guest.memory, &Place { regs, cpu }, user_regs, &everything);
        capture
    };
    guest.save_task(UTEXT, 0, 0x33);
    let there = look(sp, SAVED);
    assert_eq!(there.chain(), [KERNEL, TEXT, USER, UTEXT]);
    assert_eq!(
        (abi(there.regs_user()), there.stack().map(<[u8]>::len)),
        (2, Some(64))
    );
    // A kernel thread; between two tasks; below the stack pointer; unaligned; beyond the stack;
    // not present; anything at all.
    for (sp, user_regs) in [
        (sp, 0),
        (KSTACK - 8, SAVED),
        (SAVED + 8, SAVED),
        (sp, SAVED + 4),
        (sp, KSTACK + 0x4000 - 8),
        (0x7000_0000, 0x7000_0100),
        (u64::MAX, u64::MAX - 7),
    ] {
        let capture = look(sp, user_regs);
        assert_eq!(capture.chain(), [KERNEL, TEXT], "{sp:#x} {user_regs:#x}");
        assert_eq!((capture.regs_user(), capture.stack()), (None, None));
        assert_eq!(
            capture.regs_intr(),
            Some(Regs {
                abi: 2,
                values: &[TEXT]
            })
        );
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
    let wish = Wish {
        regs_user: mask,
        regs_intr: mask,
        ..Wish::default()
    };
    let capture = guest.capture(&cpu, &wish);
    // AX to R15 from struct pt_regs, whose words count down from R15.
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
    let at: Vec<u64> = (0..24)
        .filter(|number| mask >> number & 1 != 0)
        .map(|number| cpu.general[number])
        .collect();
    assert_eq!(values(capture.regs_intr()), at);
    assert!(capture.chain().is_empty());

    // In user mode they are the same.
    cpu.user = true;
    let capture = guest.capture(&cpu, &wish);
    assert_eq!(values(capture.regs_user()), at);
}

#[test]
fn the_stack_ends_with_its_last_page() {
    let guest = Guest::new();
    let sp = USTACK + 0x4000 - 24;
    for word in 0..3 {
        guest.user_word(sp + word * 8, word + 1);
    }
    let cpu = guest.in_user(UTEXT, sp);
    let stack = |stack_user| {
        let wish = Wish {
            stack_user,
            ..Wish::default()
        };
        let capture = guest.capture(&cpu, &wish);
        capture.stack().expect("a program").to_vec()
    };
    let all = [1_u64, 2, 3].map(u64::to_le_bytes).concat();
    assert_eq!(stack(16), all[..16]);
    assert_eq!(stack(24), all);
    assert_eq!(stack(65_528), all);
}

#[test]
fn a_hypervisor_that_does_not_tell_leaves_the_address_alone() {
    let guest = Guest::new();
    let everything = Wish {
        regs_user: 1,
        regs_intr: 1,
        stack_user: 8,
        ..CHAIN
    };
    let mut capture = guest.capture(&guest.in_user(UTEXT, 0), &everything);
    let regs = GuestRegs {
        ip: TEXT,
        user: false,
    };
    let cpu = None;
    capture.take(&guest.memory, &Place { regs, cpu }, SAVED, &everything);
    assert_eq!(capture.chain(), [KERNEL, TEXT]);
    assert_eq!((capture.regs_user(), capture.regs_intr()), (None, None));
    assert_eq!(capture.stack(), None);
    // As do modes that are not walked.
    let mut cpu = guest.in_user(UTEXT, USTACK);
    cpu.efer = 0;
    assert_eq!(guest.chain(&cpu), [USER, UTEXT]);
}

/// Addresses that lead somewhere more often than not.
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

fn wish() -> impl Strategy<Value = Wish> {
    (
        any::<[bool; 3]>(),
        1..=127_u32,
        any::<[u32; 2]>(),
        0..0x2000_u32,
    )
        .prop_map(
            |([chain, exclude_kernel, exclude_user], max_stack, [regs_user, regs_intr], stack)| {
                Wish {
                    chain,
                    exclude_kernel,
                    exclude_user,
                    max_stack,
                    regs_user: u64::from(regs_user) & 0xff_0fff,
                    regs_intr: u64::from(regs_intr) & 0xff_0fff,
                    stack_user: stack * 8,
                }
            },
        )
}

fn look(guest: &Guest, cpu: &CpuState, user_regs: u64, wish: &Wish) -> Capture {
    let mut capture = Capture::default();
    let regs = GuestRegs {
        ip: cpu.general[IP],
        user: cpu.user,
    };
    let cpu = Some(*cpu);
    capture.take(&guest.memory, &Place { regs, cpu }, user_regs, wish);
    let marks = capture
        .chain()
        .iter()
        .filter(|&&one| one == KERNEL || one == USER);
    let addresses = capture.chain().len() - marks.count().min(2);
    assert!(addresses <= wish.max_stack as usize);
    assert!(
        capture
            .stack()
            .is_none_or(|stack| stack.len() <= wish.stack_user as usize)
    );
    let masks = [
        (capture.regs_user(), wish.regs_user),
        (capture.regs_intr(), wish.regs_intr),
    ];
    for (regs, mask) in masks {
        assert!(regs.is_none_or(|regs| regs.values.len() == mask.count_ones() as usize));
    }
    capture
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn a_guest_of_noise_does_no_harm(
        seed in any::<[u64; 4]>(),
        cpu in cpu_state(),
        user_regs in address(),
        wish in wish(),
    ) {
        let guest = Guest::bare(4);
        // Tables that are noise, with enough present entries to lead on.
        let mut noise = seed[0] | 1;
        for at in (0x1000..0x9000_u64).step_by(8) {
            noise ^= noise << 13;
            noise ^= noise >> 7;
            noise ^= noise << 17;
            guest.put(at, noise & (seed[1] | 0xf000) | seed[2] & P | noise & U);
        }
        look(&guest, &cpu, user_regs, &wish);
    }

    #[test]
    fn a_program_sees_nothing_of_its_kernel(
        frames in proptest::collection::vec((0..0x800_u64, address(), address()), 0..64),
        mut cpu in cpu_state(),
        wish in wish(),
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
        let capture = look(&guest, &cpu, SAVED, &wish);
        let secret = SECRET.to_le_bytes();
        let halves = [SECRET, SECRET & 0xffff_ffff, SECRET >> 32];
        prop_assert!(!capture.chain().iter().any(|one| halves.contains(one)));
        let stack = capture.stack().unwrap_or_default();
        prop_assert!(!stack.windows(8).any(|bytes| bytes == secret));
    }
}

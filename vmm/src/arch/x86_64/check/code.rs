//! The machine code of the probes, and the tables that carry it: bytes only.
//!
//! Every program finds the base of the device window in `rdi` and reports by storing there, since
//! a store reaches the VMM from any ring, where a port write needs ring 0.

/// Programs are written in bytes.
pub(crate) type Unit = u8;

/// Guest RAM, from address zero; mapped one to one, open to ring 3.
pub(crate) const RAM: usize = 0x20_0000;
/// The device window: mapped right behind RAM and without memory, so every store exits.
pub(crate) const WINDOW: u64 = 0x20_0000;

pub(super) const GDT: u64 = 0x1000;
pub(super) const IDT: u64 = 0x2000;
pub(super) const TSS: u64 = 0x3000;
const PML4_PDPT: u64 = 0x5000;
const PML4_PD: u64 = 0x6000;
/// The value of CR3.
pub(super) const PML4: u64 = 0x4000;
/// Address of a probe's program.
pub(crate) const PROGRAM: u64 = 0x8000;
/// The handler of `syscall`.
pub(super) const SYSCALL: u64 = 0x9000;
/// The handlers of exceptions.
const EXCEPTIONS: u64 = 0xa000;
/// Sixteen aligned zero bytes, free for a probe.
pub(super) const SCRATCH: u64 = 0xb000;
/// Tops of the stacks of ring 0 and ring 3.
pub(super) const STACK_KERNEL: u64 = 0x1_0000;
pub(super) const STACK_USER: u64 = 0x1_8000;

/// Code segment of ring 0; its data segment is the next one.
pub(super) const KERNEL_CS: u16 = 0x08;
pub(super) const KERNEL_SS: u16 = 0x10;
/// `sysret` wants stack, then code.
pub(super) const USER_SS: u16 = 0x1b;
pub(super) const USER_CS: u16 = 0x23;
pub(super) const TASK: u16 = 0x28;
/// The value of STAR, from which `syscall` and `sysret` take their segments.
pub(super) const STAR: u64 = (KERNEL_CS as u64) << 32 | ((KERNEL_SS as u64) | 3) << 48;

/// Window offsets that programs store to.
pub(super) const RESULT: u64 = 0x00;
pub(super) const RETURNED: u64 = 0x08;
pub(crate) const EXCEPTION: u64 = 0x70;

/// The port of [`PORT_WRITE`]. No PC device uses it.
pub(super) const PORT: u16 = 0x5f0;
/// The value that it writes there.
pub(super) const PORT_VALUE: u8 = 0xa5;
/// Length of its `out`.
pub(super) const OUT_LENGTH: u64 = 1;
/// `out dx, al; hlt`
pub(super) const PORT_WRITE: &[u8] = &[0xee, 0xf4];

/// The value that [`STORE`] stores.
pub(super) const STORE_VALUE: u32 = 0x1234_5678;
/// `mov dword [rdi], STORE_VALUE; hlt`
pub(super) const STORE: &[u8] = &[0xc7, 0x07, 0x78, 0x56, 0x34, 0x12, 0xf4];

/// In ring 3: `syscall; mov eax, cs; mov [rdi + RETURNED], eax; jmp $`
pub(super) const CALL: &[u8] = &[0x0f, 0x05, 0x8c, 0xc8, 0x89, 0x47, 0x08, 0xeb, 0xfe];
/// At [`SYSCALL`]: `mov eax, cs; mov [rdi + RESULT], eax; sysretq`
pub(super) const ANSWER: &[u8] = &[0x8c, 0xc8, 0x89, 0x07, 0x48, 0x0f, 0x07];

/// `int3; hlt`
pub(super) const BREAKPOINT: &[u8] = &[0xcc, 0xf4];

/// `cmpxchg16b [rsi]; mov rax, [rsi]; mov [rdi], rax; hlt`
pub(super) const EXCHANGE: &[u8] = &[
    0x48, 0x0f, 0xc7, 0x0e, 0x48, 0x8b, 0x06, 0x48, 0x89, 0x07, 0xf4,
];

/// `vmcall; mov [rdi], rax; hlt`
pub(super) const VMCALL: &[u8] = &[0x0f, 0x01, 0xc1, 0x48, 0x89, 0x07, 0xf4];
/// `vmmcall; mov [rdi], rax; hlt`
pub(super) const VMMCALL: &[u8] = &[0x0f, 0x01, 0xd9, 0x48, 0x89, 0x07, 0xf4];

/// `rdtsc; shl rdx, 32; or rax, rdx; mov [rdi], rax; hlt`
pub(super) const READ_TSC: &[u8] = &[
    0x0f, 0x31, 0x48, 0xc1, 0xe2, 0x20, 0x48, 0x09, 0xd0, 0x48, 0x89, 0x07, 0xf4,
];

/// `inc rax; jmp` back to it, for ever.
pub(crate) const LOOP: &[u8] = &[0x48, 0xff, 0xc0, 0xeb, 0xfb];

/// Everything but the program: address and bytes of each table.
pub(crate) fn tables() -> Vec<(u64, Vec<u8>)> {
    const PRESENT_WRITABLE_USER: u64 = 0b111;
    const LARGE: u64 = 1 << 7;
    let paging = [
        (PML4, vec![PML4_PDPT | PRESENT_WRITABLE_USER]),
        (PML4_PDPT, vec![PML4_PD | PRESENT_WRITABLE_USER]),
        (
            PML4_PD,
            vec![
                PRESENT_WRITABLE_USER | LARGE,
                WINDOW | PRESENT_WRITABLE_USER | LARGE,
            ],
        ),
        (GDT, descriptors()),
        (IDT, gates()),
    ];
    let mut tables: Vec<_> = paging
        .into_iter()
        .map(|(at, words)| (at, words.iter().flat_map(|w| w.to_le_bytes()).collect()))
        .collect();
    // Of the task segment only RSP0 matters: the stack that an exception in ring 3 switches to.
    tables.push((TSS + 4, STACK_KERNEL.to_le_bytes().to_vec()));
    tables.push((EXCEPTIONS, handlers()));
    tables.push((SYSCALL, ANSWER.to_vec()));
    tables
}

/// Bytes of `program`.
pub(crate) fn bytes(program: &[Unit]) -> Vec<u8> {
    program.to_vec()
}

/// In words, an exception that a program reported.
pub(crate) fn describe_exception(vector: u64) -> String {
    format!("raised exception {vector}")
}

/// Bytes of the global descriptor table.
pub(super) const GDT_LIMIT: u16 = 7 * 8 - 1;
/// Bytes of the task segment.
pub(super) const TSS_LIMIT: u32 = 0x67;
/// Exceptions of the architecture.
const VECTORS: u8 = 32;
/// Bytes of the interrupt descriptor table.
pub(super) const IDT_LIMIT: u16 = 32 * 16 - 1;

fn descriptors() -> Vec<u64> {
    vec![
        0,
        0x00af_9b00_0000_ffff, // ring 0, 64-bit code
        0x00cf_9300_0000_ffff, // ring 0, data
        0x00cf_f300_0000_ffff, // ring 3, data
        0x00af_fb00_0000_ffff, // ring 3, 64-bit code
        0x0000_8b00_0000_0000 | (TSS & 0xff_ffff) << 16 | u64::from(TSS_LIMIT),
        0,
    ]
}

/// Bytes of one stub in [`handlers`].
const STUB: u8 = 8;

/// One interrupt gate per exception, open to ring 3, each to its stub.
fn gates() -> Vec<u64> {
    (0..VECTORS)
        .flat_map(|vector| {
            let at = EXCEPTIONS + u64::from(vector) * u64::from(STUB);
            [0xee00 << 32 | u64::from(KERNEL_CS) << 16 | at & 0xffff, 0]
        })
        .collect()
}

/// A stub per vector, `push vector; jmp common`, and behind them the common end:
/// `pop rax; mov [rdi + EXCEPTION], eax; hlt`
fn handlers() -> Vec<u8> {
    let mut code = Vec::new();
    let end = i32::from(VECTORS) * i32::from(STUB);
    for vector in 0..VECTORS {
        let jump = end - (i32::from(vector) * i32::from(STUB) + 7);
        code.extend([0x6a, vector, 0xe9]);
        code.extend(jump.to_le_bytes());
        code.push(0x90);
    }
    code.extend([0x58, 0x89, 0x47, 0x70, 0xf4]);
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_overlaps() {
        let mut spans: Vec<_> = tables()
            .into_iter()
            .map(|(at, bytes)| (at, at + bytes.len() as u64))
            .collect();
        spans.push((PROGRAM, PROGRAM + 64));
        spans.push((SCRATCH, SCRATCH + 16));
        spans.sort_unstable();
        for pair in spans.windows(2) {
            assert!(pair[0].1 <= pair[1].0, "{pair:x?}");
        }
        assert!(spans.iter().all(|span| span.1 < STACK_KERNEL - 0x1000));
    }

    #[test]
    fn every_stub_jumps_to_the_common_end() {
        let code = handlers();
        let common = code.iter().rposition(|&byte| byte == 0x58).unwrap();
        assert_eq!(common, 32 * 8);
        assert_eq!(u64::from(code[common + 3]), EXCEPTION);
        for (vector, stub) in code[..common].chunks(8).enumerate() {
            assert_eq!((stub[0], usize::from(stub[1])), (0x6a, vector));
            let jump = i32::from_le_bytes([stub[3], stub[4], stub[5], stub[6]]);
            let target = (vector * 8 + 7).checked_add_signed(jump.try_into().unwrap());
            assert_eq!(target, Some(common), "vector {vector}");
        }
    }

    #[test]
    fn sysret_finds_its_segments() {
        assert_eq!((STAR >> 48) + 8, u64::from(USER_SS));
        assert_eq!((STAR >> 48) + 16, u64::from(USER_CS));
        assert_eq!((STAR >> 32 & 0xffff) + 8, u64::from(KERNEL_SS));
    }
}

//! The memory layout of a micro guest, its page and descriptor tables, and the machine code of its
//! handlers.
//!
//! `rdi` holds the base of the device window for every program. A program reports to the VMM with a store to the
//! window, because a store reaches the VMM from any ring, whereas a port write needs ring 0.

/// The unit of machine code: one byte.
pub type Unit = u8;

/// Size of guest RAM in bytes. RAM starts at address zero and is identity-mapped. Ring 3 can access all of it.
pub(crate) const RAM: usize = 0x20_0000;
/// Address of the device window, right after RAM. The page tables map it, but no memory slot contains it, so every
/// store to it exits.
pub const WINDOW: u64 = 0x20_0000;

pub(crate) const GDT: u64 = 0x1000;
pub(crate) const IDT: u64 = 0x2000;
pub(crate) const TSS: u64 = 0x3000;
const PML4_PDPT: u64 = 0x5000;
const PML4_PD: u64 = 0x6000;
/// The value of CR3.
pub(crate) const PML4: u64 = 0x4000;
/// Address of the program.
pub const PROGRAM: u64 = 0x8000;
/// Address of the handler of `syscall`.
pub(crate) const SYSCALL: u64 = 0x9000;
/// Address of the handlers of exceptions.
const EXCEPTIONS: u64 = 0xa000;
/// Address of sixteen aligned zero bytes that the program may use.
pub const SCRATCH: u64 = 0xb000;
/// Top of the stack of ring 0.
pub(crate) const STACK_KERNEL: u64 = 0x1_0000;
/// Top of the stack of ring 3.
pub(crate) const STACK_USER: u64 = 0x1_8000;

/// Code segment of ring 0. The data segment of ring 0 is the next GDT entry.
pub const KERNEL_CS: u16 = 0x08;
pub(crate) const KERNEL_SS: u16 = 0x10;
/// Data segment of ring 3. `sysret` requires this entry to precede the code segment's entry.
pub(crate) const USER_SS: u16 = 0x1b;
/// Code segment of ring 3.
pub const USER_CS: u16 = 0x23;
pub(crate) const TASK: u16 = 0x28;
/// The value of the MSR STAR, from which `syscall` and `sysret` derive their segments.
pub(crate) const STAR: u64 = (KERNEL_CS as u64) << 32 | ((KERNEL_SS as u64) | 3) << 48;

/// Window offset at which the system call handler stores the result.
pub const RESULT: u64 = 0x00;
/// Window offset at which a program stores after its system call has returned.
pub const RETURNED: u64 = 0x08;
/// Window offset at which the exception handler stores the vector.
pub const EXCEPTION: u64 = 0x70;

/// The handler at [`SYSCALL`]: `mov eax, cs; mov [rdi + RESULT], eax; sysretq`
pub(crate) const ANSWER: &[u8] = &[0x8c, 0xc8, 0x89, 0x07, 0x48, 0x0f, 0x07];

/// Loops forever: `again: inc rax; jmp again`
pub const LOOP: &[u8] = &[0x48, 0xff, 0xc0, 0xeb, 0xfb];

/// Returns what guest memory must contain besides the program, as the address and the bytes of each part.
pub(crate) fn tables() -> Vec<(u64, Vec<u8>)> {
    const PRESENT_WRITABLE_USER: u64 = 0b111;
    const LARGE: u64 = 1 << 7;
    let paging = [
        (PML4, vec![PML4_PDPT | PRESENT_WRITABLE_USER]),
        (PML4_PDPT, vec![PML4_PD | PRESENT_WRITABLE_USER]),
        (PML4_PD, vec![PRESENT_WRITABLE_USER | LARGE, WINDOW | PRESENT_WRITABLE_USER | LARGE]),
        (GDT, descriptors()),
        (IDT, gates()),
    ];
    let mut tables: Vec<_> =
        paging.into_iter().map(|(at, words)| (at, words.iter().flat_map(|w| w.to_le_bytes()).collect())).collect();
    // The only TSS field in use is RSP0, which holds the stack for exceptions in ring 3.
    tables.push((TSS + 4, STACK_KERNEL.to_le_bytes().to_vec()));
    tables.push((EXCEPTIONS, handlers()));
    tables.push((SYSCALL, ANSWER.to_vec()));
    tables
}

/// Returns the bytes of `program`.
pub(crate) fn bytes(program: &[Unit]) -> Vec<u8> {
    program.to_vec()
}

/// Describes an exception that a program reported, for [`Exit::describe`](crate::micro::Exit::describe).
pub(crate) fn describe_exception(vector: u64) -> String {
    format!("raised exception {vector}")
}

/// Offset of the last byte of the global descriptor table.
pub(crate) const GDT_LIMIT: u16 = 7 * 8 - 1;
/// Offset of the last byte of the task state segment.
pub(crate) const TSS_LIMIT: u32 = 0x67;
/// Number of exception vectors of the architecture.
const VECTORS: u8 = 32;
/// Offset of the last byte of the interrupt descriptor table.
pub(crate) const IDT_LIMIT: u16 = 32 * 16 - 1;

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

/// One interrupt gate per exception. Each gate leads to the exception's stub. Ring 3 can also enter a gate with `int`.
fn gates() -> Vec<u64> {
    (0..VECTORS)
        .flat_map(|vector| {
            let at = EXCEPTIONS + u64::from(vector) * u64::from(STUB);
            [0xee00 << 32 | u64::from(KERNEL_CS) << 16 | at & 0xffff, 0]
        })
        .collect()
}

/// A stub for each vector (`push vector; jmp common`), followed by the common code:
/// `common: pop rax; mov [rdi + EXCEPTION], eax; hlt`
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
        let mut spans: Vec<_> = tables().into_iter().map(|(at, bytes)| (at, at + bytes.len() as u64)).collect();
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

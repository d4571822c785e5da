//! An ELF kernel image that contains micro programs, one for each vCPU.
//!
//! The boot vCPU starts the other vCPUs with INIT and SIPI, as an operating system does. While they run their programs,
//! it runs its own. It then waits until all programs are done, and powers off the machine.

use super::code::Code;

/// Load address and entry of the file.
const LOAD: u32 = 0x10_0000;
/// Number of bytes in the file before the loaded part.
const HEADERS: usize = 64 + 56;
/// Address of the number of vCPUs that are done. Memory is zero at the start.
const DONE: u32 = 0x80_0000;
/// Real-mode pages where vCPUs 1, 2, ... start.
const TRAMPOLINE: u32 = 0x1_0000;
const TRAMPOLINE_SIZE: u32 = 0x1000;

/// The local APIC's register with the software-enable bit. KVM has no map of the APICs, and delivers no interrupts to
/// other vCPUs, until a local APIC changes its state. So the guest first enables its APIC, as every operating system
/// does.
const SPURIOUS: u32 = 0xfee0_00f0;
const ENABLED: u32 = 0x1ff;
/// The local APIC's interrupt command register: the high half, then the low half.
const ICR_HIGH: u32 = 0xfee0_0310;
const ICR_LOW: u32 = 0xfee0_0300;
const ICR_INIT: u32 = 0x4500;
const ICR_STARTUP: u32 = 0x4600;

/// The ACPI sleep port of the machine, and the value that powers it off.
const SLEEP_PORT: u16 = 0x600;
const SLEEP_NOW: u8 = 5 << 2 | 1 << 5;

/// Returns code that powers off the machine with one port write on the boot vCPU.
#[must_use]
pub fn power_off() -> Code {
    Code::new().out8(SLEEP_PORT, SLEEP_NOW).halt_for_ever()
}

/// Returns a kernel that runs one program, on the boot vCPU. The program must power off the machine.
#[must_use]
pub fn single(program: &Code) -> Vec<u8> {
    elf(program.bytes())
}

/// Returns a kernel that runs a program on each vCPU, all at the same time, and powers off when all are done.
///
/// In addition to the programs' accesses, the boot vCPU makes one port write, which powers off the machine.
#[must_use]
pub fn kernel(programs: &[Code]) -> Vec<u8> {
    let (boot, others) = programs.split_first().expect("a program for the boot vCPU");
    let others: Vec<Vec<u8>> = others
        .iter()
        .map(|program| {
            let whole = program.clone().increment(DONE).halt_for_ever();
            whole.bytes().to_vec()
        })
        .collect();
    let count = u32::try_from(others.len()).expect("few vCPUs");

    // The layout depends on the boot program's length, which does not depend on the values of addresses. So this code
    // measures the length with arbitrary addresses, and then builds the kernel with the right addresses.
    let make = |images: u32| {
        let mut code = Code::new().store(SPURIOUS, ENABLED);
        let mut program = images;
        for (index, other) in (0..count).zip(&others) {
            let page = TRAMPOLINE + index * TRAMPOLINE_SIZE;
            for (at, word) in (page..).step_by(4).zip(trampoline(page, program)) {
                code = code.store(at, word);
            }
            let target = (index + 1) << 24;
            code = code
                .store(ICR_HIGH, target)
                .store(ICR_LOW, ICR_INIT)
                .store(ICR_HIGH, target)
                .store(ICR_LOW, ICR_STARTUP | page >> 12);
            program += length(other);
        }
        code.then(boot).wait_for(DONE, count).then(&power_off())
    };
    let images = LOAD + length(make(0).bytes());
    let mut bytes = make(images).bytes().to_vec();
    bytes.extend(others.concat());
    elf(&bytes)
}

/// Returns the address of a part of the programs in a kernel file.
///
/// # Panics
/// Unless the file has the part exactly once.
#[must_use]
pub fn address_of(kernel: &[u8], part: &Code) -> u64 {
    let image = &kernel[HEADERS..];
    let windows = image.windows(part.bytes().len()).enumerate();
    let mut found = windows.filter(|(_, window)| *window == part.bytes());
    let (at, _) = found.next().expect("in the file");
    assert!(found.next().is_none(), "in one place");
    u64::from(LOAD) + at as u64
}

fn length(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).expect("a small program")
}

/// Returns code, as words to store, that starts in real mode at `page` and jumps to `entry` in flat protected mode.
fn trampoline(page: u32, entry: u32) -> Vec<u32> {
    const PROTECTED: u32 = 0x18;
    const TABLE: u32 = 0x30;
    const POINTER: u32 = 0x48;
    let mut code = vec![0; POINTER as usize + 8];
    let mut put = |at: u32, bytes: &[u8]| {
        let at = at as usize;
        code[at..at + bytes.len()].copy_from_slice(bytes);
    };
    // cli; lgdt cs:[POINTER], in 16 bits; mov eax, cr0; or al, 1; mov cr0, eax
    put(0, &[0xfa, 0x2e, 0x0f, 0x01, 0x16, 0x48, 0]);
    put(7, &[0x0f, 0x20, 0xc0, 0x0c, 0x01, 0x0f, 0x22, 0xc0]);
    // jmp far 8:PROTECTED, 32 bits of offset
    put(15, &[0x66, 0xea]);
    put(17, &(page + PROTECTED).to_le_bytes());
    put(21, &8_u16.to_le_bytes());
    // mov ax, 16; mov ds, ax; mov ss, ax; mov eax, entry; jmp eax
    put(PROTECTED, &[0x66, 0xb8, 0x10, 0, 0x8e, 0xd8, 0x8e, 0xd0, 0xb8]);
    put(PROTECTED + 9, &entry.to_le_bytes());
    put(PROTECTED + 13, &[0xff, 0xe0]);
    // The GDT: null, flat code and flat data descriptors. Then the GDT's limit and address, for LGDT.
    put(TABLE + 8, &0x00cf_9b00_0000_ffff_u64.to_le_bytes());
    put(TABLE + 16, &0x00cf_9300_0000_ffff_u64.to_le_bytes());
    put(POINTER, &23_u16.to_le_bytes());
    put(POINTER + 2, &(page + TABLE).to_le_bytes());
    code.chunks(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect()
}

/// Returns a 64-bit executable with one segment. Its load address and its entry point are [`LOAD`].
fn elf(code: &[u8]) -> Vec<u8> {
    let size = code.len() as u64;
    let mut file = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0];
    file.extend([0; 8]);
    // Type executable, machine x86-64, version 1.
    file.extend(2_u16.to_le_bytes());
    file.extend(62_u16.to_le_bytes());
    file.extend(1_u32.to_le_bytes());
    // Entry, program headers, section headers.
    for word in [u64::from(LOAD), 64, 0] {
        file.extend(word.to_le_bytes());
    }
    file.extend(0_u32.to_le_bytes());
    // Header sizes and entry counts: this header, one program header, no sections.
    for half in [64_u16, 56, 1, 64, 0, 0] {
        file.extend(half.to_le_bytes());
    }
    // Load: readable, writable, executable.
    file.extend(1_u32.to_le_bytes());
    file.extend(7_u32.to_le_bytes());
    for word in [HEADERS as u64, LOAD.into(), LOAD.into(), size, size, 0x1000] {
        file.extend(word.to_le_bytes());
    }
    file.extend(code);
    file
}

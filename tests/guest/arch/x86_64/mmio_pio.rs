//! Accesses to ports and device memory, in assembly. The address, size, direction and instruction of each access are
//! known.
#![expect(unsafe_code, reason = "assembly, and the addresses of its labels")]

use std::arch::global_asm;
use std::io;

use crate::arch::{Access, IDLE_PORT};
use crate::packets::DETAIL_WRITE;
use crate::pages::map_physical;
use crate::raw::PAGE;

global_asm!(
    // fn(buffer: *mut u8)
    ".globl vpmu_ports",
    "vpmu_ports:",
    "mov edx, {port}",
    "xor eax, eax",
    ".globl vpmu_port_0",
    "vpmu_port_0: out dx, al",
    "vpmu_port_1: out dx, ax",
    "vpmu_port_2: out dx, eax",
    "vpmu_port_3: in al, dx",
    "vpmu_port_4: in ax, dx",
    "vpmu_port_5: in eax, dx",
    "mov ecx, 12",
    "vpmu_port_6: rep insb",
    "mov ecx, 3",
    "vpmu_port_7: rep insd",
    "vpmu_port_8: ret",
    // fn(page: *mut u8)
    ".globl vpmu_memory",
    "vpmu_memory:",
    "xor eax, eax",
    "vpmu_memory_0: mov [rdi], al",
    "vpmu_memory_1: mov [rdi + 0x10], ax",
    "vpmu_memory_2: mov [rdi + 0x20], eax",
    "vpmu_memory_3: mov [rdi + 0x30], rax",
    "vpmu_memory_4: mov al, [rdi + 0x40]",
    "vpmu_memory_5: mov ax, [rdi + 0x50]",
    "vpmu_memory_6: mov eax, [rdi + 0x60]",
    "vpmu_memory_7: mov rax, [rdi + 0x70]",
    "vpmu_memory_8: ret",
    // fn(rounds: u64)
    ".globl vpmu_out_loop",
    "vpmu_out_loop:",
    "mov edx, {port}",
    "xor eax, eax",
    ".globl vpmu_out_loop_ip",
    "vpmu_out_loop_ip:",
    "out dx, al",
    "dec rdi",
    "jnz vpmu_out_loop_ip",
    "ret",
    ".section .data.rel.ro, \"aw\"",
    ".balign 8",
    ".globl vpmu_port_labels",
    "vpmu_port_labels:",
    ".quad vpmu_port_0, vpmu_port_1, vpmu_port_2, vpmu_port_3, vpmu_port_4",
    ".quad vpmu_port_5, vpmu_port_6, vpmu_port_7",
    ".globl vpmu_memory_labels",
    "vpmu_memory_labels:",
    ".quad vpmu_memory_0, vpmu_memory_1, vpmu_memory_2, vpmu_memory_3, vpmu_memory_4",
    ".quad vpmu_memory_5, vpmu_memory_6, vpmu_memory_7, vpmu_memory_8",
    ".text",
    port = const IDLE_PORT,
);

unsafe extern "C" {
    fn vpmu_ports(buffer: *mut u8);
    fn vpmu_memory(page: *mut u8);
    fn vpmu_out_loop(rounds: u64);
    static vpmu_out_loop_ip: u8;
    static vpmu_port_labels: [u64; 8];
    static vpmu_memory_labels: [u64; 9];
}

/// Writes and reads the idle port with each access size, both with plain instructions (IN, OUT) and with string
/// instructions (INS, OUTS). Returns the accesses as the host sees them. The caller must have permission for port I/O.
pub(crate) fn ports() -> Vec<Access> {
    let mut buffer = [0_u8; 24];
    // SAFETY: the call writes 12 bytes twice to the buffer, which has 24 bytes.
    unsafe { vpmu_ports(buffer.as_mut_ptr()) };
    // SAFETY: nothing writes to this table.
    let labels = unsafe { vpmu_port_labels };
    let details = [
        1 << 32 | DETAIL_WRITE | 1,
        1 << 32 | DETAIL_WRITE | 2,
        1 << 32 | DETAIL_WRITE | 4,
        1 << 32 | 1,
        1 << 32 | 2,
        1 << 32 | 4,
        12 << 32 | 1,
        3 << 32 | 4,
    ];
    let pairs = labels.into_iter().zip(details);
    let access = |(ip, detail)| Access { ip, qualification: IDLE_PORT.into(), detail };
    pairs.map(access).collect()
}

/// A guest-physical address at which no device answers and no kernel expects a device.
const IDLE_MEMORY: u32 = 0xe000_0000;

/// Memory that no device answers to, mapped.
#[derive(Debug)]
pub(crate) struct IdleMemory(*mut u8);

impl IdleMemory {
    pub(crate) fn map() -> io::Result<Self> {
        map_physical(IDLE_MEMORY).map(Self)
    }

    /// Makes a write and a read of each size. Returns the accesses as the host sees them. When a write exits, KVM has
    /// already completed the writing instruction, so the exit has the address of the next instruction.
    pub(crate) fn access(&self) -> Vec<Access> {
        // SAFETY: the code reads and writes inside the mapped page, where no device answers.
        unsafe { vpmu_memory(self.0) };
        // SAFETY: nothing writes to this table.
        let labels = unsafe { vpmu_memory_labels };
        (0..8)
            .map(|number| {
                let write = number < 4;
                let size = 1 << (number % 4);
                Access {
                    ip: labels[number + usize::from(write)],
                    qualification: u64::from(IDLE_MEMORY) + 0x10 * number as u64,
                    detail: if write { DETAIL_WRITE | size } else { size },
                }
            })
            .collect()
    }
}

impl Drop for IdleMemory {
    fn drop(&mut self) {
        // SAFETY: exactly the page that was mapped.
        unsafe { libc::munmap(self.0.cast(), PAGE) };
    }
}

/// Writes a byte to the idle port `rounds` times, always with the same instruction.
pub(crate) fn out_loop(rounds: u64) {
    // SAFETY: counts a register down.
    unsafe { vpmu_out_loop(rounds.max(1)) }
}

/// Returns the address of the instruction in [`out_loop`] that writes.
pub(crate) fn out_loop_ip() -> u64 {
    (&raw const vpmu_out_loop_ip).expose_provenance() as u64
}

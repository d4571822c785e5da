//! Accesses to device memory, in assembly. The address, size, direction and instruction of each access are known.
#![expect(unsafe_code, reason = "assembly, and the addresses of its labels")]

use std::arch::global_asm;
use std::io;

use super::ports;
use crate::arch::{Access, IDLE_PORT};
use crate::packets::DETAIL_WRITE;
use crate::pages::map_physical;
use crate::raw::PAGE;

global_asm!(
    // fn(page: *mut u8)
    ".globl vpmu_memory",
    "vpmu_memory:",
    "vpmu_memory_0: strb wzr, [x0]",
    "vpmu_memory_1: strh wzr, [x0, #0x10]",
    "vpmu_memory_2: str wzr, [x0, #0x20]",
    "vpmu_memory_3: str xzr, [x0, #0x30]",
    "vpmu_memory_4: ldrb w1, [x0, #0x40]",
    "vpmu_memory_5: ldrh w1, [x0, #0x50]",
    "vpmu_memory_6: ldr w1, [x0, #0x60]",
    "vpmu_memory_7: ldr x1, [x0, #0x70]",
    "vpmu_memory_8: ret",
    // fn(rounds: u64, page: *mut u8)
    ".globl vpmu_out_loop",
    "vpmu_out_loop:",
    ".globl vpmu_out_loop_ip",
    "vpmu_out_loop_ip:",
    "strb wzr, [x1]",
    "subs x0, x0, #1",
    "b.ne vpmu_out_loop_ip",
    "ret",
    ".section .data.rel.ro, \"aw\"",
    ".balign 8",
    ".globl vpmu_memory_labels",
    "vpmu_memory_labels:",
    ".quad vpmu_memory_0, vpmu_memory_1, vpmu_memory_2, vpmu_memory_3, vpmu_memory_4",
    ".quad vpmu_memory_5, vpmu_memory_6, vpmu_memory_7, vpmu_memory_8",
    ".text",
);

unsafe extern "C" {
    fn vpmu_memory(page: *mut u8);
    fn vpmu_out_loop(rounds: u64, page: *mut u8);
    static vpmu_out_loop_ip: u8;
    static vpmu_memory_labels: [u64; 9];
}

/// Makes a write and a read of each size in `page`, which is the mapping of the guest-physical address `address`.
/// Returns the accesses as the host sees them.
fn access(page: *mut u8, address: u32) -> Vec<Access> {
    // SAFETY: the code reads and writes inside the mapped page, where no device answers.
    unsafe { vpmu_memory(page) };
    // SAFETY: nothing writes to this table.
    let labels = unsafe { vpmu_memory_labels };
    (0..8)
        .map(|number| {
            let write = number < 4;
            let size = 1 << (number % 4);
            Access {
                ip: labels[number],
                qualification: u64::from(address) + 0x10 * number as u64,
                detail: if write { DETAIL_WRITE | size } else { size },
            }
        })
        .collect()
}

/// Makes a write and a read of each size at the idle address, which must be mapped. Returns the accesses as the host
/// sees them.
pub(crate) fn ports() -> Vec<Access> {
    access(ports::idle(), IDLE_PORT)
}

/// Another mapped address at which no device answers.
#[derive(Debug)]
pub(crate) struct IdleMemory(*mut u8);

const IDLE_MEMORY: u32 = 0x1001_0000;

impl IdleMemory {
    pub(crate) fn map() -> io::Result<Self> {
        map_physical(IDLE_MEMORY).map(Self)
    }

    /// Makes a write and a read of each size. Returns the accesses as the host sees them.
    pub(crate) fn access(&self) -> Vec<Access> {
        access(self.0, IDLE_MEMORY)
    }
}

impl Drop for IdleMemory {
    fn drop(&mut self) {
        // SAFETY: exactly the page that was mapped.
        unsafe { libc::munmap(self.0.cast(), PAGE) };
    }
}

/// Writes a byte to the idle address `rounds` times, always with the same instruction.
pub(crate) fn out_loop(rounds: u64) {
    // SAFETY: the code decrements a register, and writes where no device answers.
    unsafe { vpmu_out_loop(rounds.max(1), ports::idle()) }
}

/// Returns the address of the instruction in [`out_loop`] that writes.
pub(crate) fn out_loop_ip() -> u64 {
    (&raw const vpmu_out_loop_ip).expose_provenance() as u64
}

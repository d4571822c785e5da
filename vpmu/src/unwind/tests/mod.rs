//! Tests that capture samples from a hand-made guest.

mod chains;
mod noise;
mod orc;
mod registers;
mod tables;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vpmu_orc::OrcTable;

use super::paging::{AddressSpace, Rights};
use super::*;
use crate::arch::{CpuState, GENERAL_REGS};
use crate::machine::GuestRegs;
use crate::memory::View;
use crate::record::Regs;

const MEMORY: usize = 4 << 20;
const KERNEL: u64 = -128_i64 as u64;
const USER: u64 = -512_i64 as u64;

/// Bits of table entries.
const P: u64 = 1;
const U: u64 = 1 << 2;
const PS: u64 = 1 << 7;
const NX: u64 = 1 << 63;

/// Addresses in the guest.
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
    /// The ORC tables of its kernel.
    orc: Option<OrcTable>,
}

impl Guest {
    fn bare(levels: u32) -> Self {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY)]).expect("memory");
        Self {
            memory,
            levels,
            // The root is at 0x1000.
            next: 0x2000,
            orc: None,
        }
    }

    /// A kernel and a program. Each of them has a stack.
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
        self.memory.write_obj(word.to_le(), GuestAddress(physical)).expect("in memory");
    }

    fn write(&self, physical: u64, bytes: &[u8]) {
        self.memory.write_slice(bytes, GuestAddress(physical)).expect("in memory");
    }

    fn get(&self, physical: u64) -> u64 {
        self.memory.read_obj::<u64>(GuestAddress(physical)).map(u64::from_le).expect("in memory")
    }

    /// Maps `address` by storing `entry` in the table of level `level`. Creates missing tables at higher levels. Sets
    /// `bits` in the higher-level entries that translate `address`.
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
            cr4: if self.levels == 5 { 1 << 5 | 1 << 12 } else { 1 << 5 },
            efer: 1 << 10 | 1 << 8,
        }
    }

    /// Returns the state of a vCPU that executes the program at `ip`. Its frame pointer and stack pointer are `bp`.
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

    /// Saves the registers of a task that entered the kernel from `ip`. Each register whose value is not given gets
    /// 0x5000 plus its position.
    fn save_task(&self, ip: u64, bp: u64, cs: u64) {
        for word in 0..21 {
            self.kernel_word(SAVED + word * 8, 0x5000 + word);
        }
        self.kernel_word(SAVED + 4 * 8, bp);
        self.kernel_word(SAVED + 16 * 8, ip);
        self.kernel_word(SAVED + 17 * 8, cs);
        self.kernel_word(SAVED + 19 * 8, USTACK + 0x3f00);
    }

    fn capture(&self, cpu: &CpuState, spec: &CaptureSpec) -> SampleCapture {
        self.capture_with(cpu, SAVED, spec)
    }

    /// Captures with user registers that the guest's kernel saved at `user_regs`.
    fn capture_with(&self, cpu: &CpuState, user_regs: u64, spec: &CaptureSpec) -> SampleCapture {
        let mut capture = SampleCapture::default();
        let regs = GuestRegs { ip: cpu.general[IP], user: cpu.user };
        let cpu = Some(*cpu);
        capture.take(&View::of(&self.memory), &CpuContext { regs, cpu }, user_regs, spec, self.orc.as_ref());
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

const CHAIN: CaptureSpec = CaptureSpec {
    chain: true,
    exclude_kernel: false,
    exclude_user: false,
    max_stack: 127,
    regs_user: 0,
    regs_intr: 0,
    stack_user: 0,
};

/// Reads a word as the guest's kernel or a program would.
fn word(guest: &Guest, address: u64, rights: Rights) -> Option<u64> {
    let view = View::of(&guest.memory);
    let mut space = AddressSpace::new(&view, &guest.cpu()).expect("long mode");
    space.words(address, rights).map(|[word]| u64::from_le_bytes(word))
}

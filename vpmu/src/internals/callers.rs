//! A program in a guest's memory with a deep call stack.

use vm_memory::{Bytes, GuestAddress, GuestMemoryError, GuestMemoryMmap};

use crate::arch::{self, CpuState};
use crate::machine::GuestRegs;
use crate::memory::View;
use crate::unwind::{CaptureSpec, CpuContext, SampleCapture};

/// Guest-physical address of the page tables. The stack follows them, at `STACK`.
const TABLES: u64 = 0x1000;
const LEVELS: u64 = 4;
const STACK: u64 = 0x10_0000;
const PAGE: u64 = 0x1000;
const FRAME: u64 = 0x80;

/// A sampled program.
#[derive(Debug)]
pub struct Callers {
    memory: GuestMemoryMmap,
    cpu: CpuState,
    capture: SampleCapture,
}

impl Callers {
    /// Bytes of memory that the program needs.
    pub const MEMORY: usize = 0x20_0000;

    /// Creates a program whose call stack is `depth` calls deep. Its stack is mapped with 4 KiB pages, starting at
    /// virtual address zero.
    ///
    /// # Errors
    /// `memory` is too small for the program.
    pub fn new(memory: GuestMemoryMmap, depth: u64) -> Result<Self, GuestMemoryError> {
        let [table_entry, page_entry] = arch::ENTRIES;
        let put = |at: u64, word: u64| memory.write_obj(word.to_le(), GuestAddress(at));
        for level in 1..LEVELS {
            let table = TABLES + (level - 1) * PAGE;
            put(table, (table + PAGE) | table_entry)?;
        }
        let last = TABLES + (LEVELS - 1) * PAGE;
        for page in 0..=depth * FRAME / PAGE {
            put(last + page * 8, (STACK + page * PAGE) | page_entry)?;
        }
        for frame in 0..depth {
            let at = frame * FRAME;
            // The outermost frame has no caller, so the frame pointer that it saves is an unmapped address.
            let next = if frame + 1 < depth { at + FRAME } else { u64::MAX };
            put(STACK + at, next)?;
            put(STACK + at + 8, 0x40_0000 + frame)?;
        }
        Ok(Self { memory, cpu: arch::program(TABLES), capture: SampleCapture::default() })
    }

    /// Takes the call chain of one sample. Returns the number of addresses in the chain.
    pub fn walk(&mut self) -> usize {
        let regs = GuestRegs { ip: 0x40_0000, user: true };
        let spec = CaptureSpec { chain: true, max_stack: 127, ..CaptureSpec::default() };
        let cpu = Some(self.cpu);
        let place = CpuContext { regs, cpu };
        self.capture.take(&View::of(&self.memory), &place, 0, &spec, None);
        self.capture.chain().len() - 1
    }
}

//! The initial state of a guest: 64-bit mode, the first 4 GiB mapped one to one.
//!
//! Linux's 64-bit boot protocol requires this state. It also suits guests of a few instructions.

use kvm_bindings::{Msrs, kvm_fpu, kvm_msr_entry, kvm_regs, kvm_segment};
use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError, GuestMemoryMmap};

use super::layout;

/// Errors from setting a vCPU's state.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    /// The boot tables do not fit in guest memory.
    #[error("cannot write the boot tables")]
    Tables(#[source] GuestMemoryError),
    /// KVM refuses a part of the state.
    #[error("KVM refuses {what}")]
    State {
        /// The part.
        what: &'static str,
        /// KVM's error.
        #[source]
        source: kvm_ioctls::Error,
    },
}

const CODE_SELECTOR: u16 = 0x10;
const DATA_SELECTOR: u16 = 0x18;
const TASK_SELECTOR: u16 = 0x20;

const CR0_PROTECTED: u64 = 1 << 0;
const CR0_PAGING: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LONG_MODE: u64 = 1 << 8;
const EFER_LONG_MODE_ACTIVE: u64 = 1 << 10;

const PAGE_PRESENT_WRITABLE: u64 = 0b11;
const PAGE_LARGE: u64 = 1 << 7;

const MSR_MISC_ENABLE: u32 = 0x1a0;
const MISC_ENABLE_FAST_STRINGS: u64 = 1;
const MSR_MTRR_DEFAULT_TYPE: u32 = 0x2ff;
const MTRR_ENABLED_WRITE_BACK: u64 = 1 << 11 | 6;

fn segment(selector: u16, kind: u8, long: bool, system: bool) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: 0xfffff,
        selector,
        type_: kind,
        present: 1,
        dpl: 0,
        db: u8::from(!long && !system),
        s: u8::from(!system),
        l: u8::from(long),
        g: u8::from(!system),
        avl: 0,
        unusable: 0,
        padding: 0,
    }
}

fn descriptor(segment: &kvm_segment) -> u64 {
    let limit = u64::from(segment.limit);
    let access = u64::from(segment.type_)
        | u64::from(segment.s) << 4
        | u64::from(segment.dpl) << 5
        | u64::from(segment.present) << 7;
    let flags =
        u64::from(segment.avl) | u64::from(segment.l) << 1 | u64::from(segment.db) << 2 | u64::from(segment.g) << 3;
    limit & 0xffff
        | (segment.base & 0xff_ffff) << 16
        | access << 40
        | (limit >> 16 & 0xf) << 48
        | flags << 52
        | (segment.base >> 24 & 0xff) << 56
}

/// Writes the descriptor table and the page tables of the boot vCPU. [`enter`] loads their addresses into the vCPU.
///
/// # Errors
/// [`RegisterError::Tables`].
pub fn write_tables(memory: &GuestMemoryMmap) -> Result<(), RegisterError> {
    let write =
        |value: u64, address: u64| memory.write_obj(value, GuestAddress(address)).map_err(RegisterError::Tables);
    for (index, entry) in (0u64..).zip(segments().iter()) {
        let value = entry.as_ref().map_or(0, descriptor);
        write(value, layout::GDT + index * 8)?;
    }
    let pml4 = layout::PAGE_TABLES;
    let pdpt = pml4 + 0x1000;
    write(pdpt | PAGE_PRESENT_WRITABLE, pml4)?;
    for gib in 0..4u64 {
        let directory = pdpt + 0x1000 * (gib + 1);
        write(directory | PAGE_PRESENT_WRITABLE, pdpt + gib * 8)?;
        for entry in 0..512u64 {
            let address = (gib << 30) + (entry << 21);
            write(address | PAGE_LARGE | PAGE_PRESENT_WRITABLE, directory + entry * 8)?;
        }
    }
    Ok(())
}

fn segments() -> [Option<kvm_segment>; 5] {
    [
        None,
        None,
        Some(segment(CODE_SELECTOR, 0xb, true, false)),
        Some(segment(DATA_SELECTOR, 0x3, false, false)),
        Some(segment(TASK_SELECTOR, 0xb, false, true)),
    ]
}

/// Sets the initial state that every vCPU has: floating point and model-specific registers.
///
/// # Errors
/// [`RegisterError::State`].
pub fn prepare(vcpu: &VcpuFd) -> Result<(), RegisterError> {
    let fpu = kvm_fpu { fcw: 0x37f, mxcsr: 0x1f80, ..Default::default() };
    vcpu.set_fpu(&fpu).map_err(|source| RegisterError::State { what: "the floating point state", source })?;
    let entry = |index, data| kvm_msr_entry { index, data, ..Default::default() };
    let wanted =
        [entry(MSR_MISC_ENABLE, MISC_ENABLE_FAST_STRINGS), entry(MSR_MTRR_DEFAULT_TYPE, MTRR_ENABLED_WRITE_BACK)];
    for msr in wanted {
        // On hardware, firmware sets these registers. If KVM refuses to set one of them, the register keeps KVM's
        // default.
        let refused = match Msrs::from_entries(&[msr]) {
            Ok(one) => vcpu.set_msrs(&one).ok() != Some(1),
            Err(_) => true,
        };
        if refused {
            log::debug!("KVM has no model-specific register {:#x}", msr.index);
        }
    }
    Ok(())
}

/// Makes `vcpu` the boot vCPU. It starts at `entry` in 64-bit mode, with the address of the zero page in `rsi`.
///
/// # Errors
/// [`RegisterError::State`].
pub fn enter(vcpu: &VcpuFd, entry: u64) -> Result<(), RegisterError> {
    let mut sregs =
        vcpu.get_sregs().map_err(|source| RegisterError::State { what: "to report the system registers", source })?;
    let [_, _, code, data, task] = segments();
    if let (Some(code), Some(data), Some(task)) = (code, data, task) {
        sregs.cs = code;
        sregs.ds = data;
        sregs.es = data;
        sregs.fs = data;
        sregs.gs = data;
        sregs.ss = data;
        sregs.tr = task;
    }
    sregs.gdt.base = layout::GDT;
    sregs.gdt.limit = 5 * 8 - 1;
    sregs.idt.base = 0;
    sregs.idt.limit = 0;
    sregs.cr3 = layout::PAGE_TABLES;
    sregs.cr4 |= CR4_PAE;
    sregs.cr0 |= CR0_PROTECTED | CR0_PAGING;
    sregs.efer |= EFER_LONG_MODE | EFER_LONG_MODE_ACTIVE;
    vcpu.set_sregs(&sregs).map_err(|source| RegisterError::State { what: "the system registers", source })?;
    let regs = kvm_regs {
        rflags: 2,
        rip: entry,
        rsp: layout::BOOT_STACK,
        rbp: layout::BOOT_STACK,
        rsi: layout::ZERO_PAGE,
        ..Default::default()
    };
    vcpu.set_regs(&regs).map_err(|source| RegisterError::State { what: "the registers", source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_the_flat_ones_of_the_boot_protocol() {
        let values: Vec<u64> = segments().iter().map(|s| s.as_ref().map_or(0, descriptor)).collect();
        assert_eq!(values[2], 0x00af_9b00_0000_ffff);
        assert_eq!(values[3], 0x00cf_9300_0000_ffff);
        assert_eq!(values[4], 0x000f_8b00_0000_ffff);
    }

    #[test]
    fn four_gib_are_mapped_one_to_one() {
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 1 << 20)]).expect("1 MiB");
        write_tables(&memory).expect("tables fit");
        let read = |address| memory.read_obj::<u64>(GuestAddress(address)).expect("in range");
        for address in [0u64, 0x20_0000, 0xd000_0000, 0xffe0_0000] {
            let pdpt = read(layout::PAGE_TABLES) & !0xfff;
            let directory = read(pdpt + (address >> 30) * 8) & !0xfff;
            let page = read(directory + (address >> 21 & 511) * 8);
            assert_eq!(page & !0x1f_ffff, address);
            assert_eq!(page & 0x83, 0x83);
        }
    }
}

//! A guest that runs a short loop in ring 3 and counts the rounds of the loop in memory.

#![expect(unsafe_code, reason = "guest memory is registered with KVM by address")]

use std::io;

use kvm_bindings::{kvm_regs, kvm_segment, kvm_sregs, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, SyncReg, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vpmu::{GuestRegs, Registers};

/// Bytes of guest memory: 4 MiB. The page tables identity-map the first 8 MiB for ring 3. The second half of this range
/// has no memory, so each access there is memory-mapped I/O.
const MEMORY: usize = 0x40_0000;
const PML4: u64 = 0x1000;
pub const PROGRAM: u64 = 0x8000;
const COUNT: u64 = 0x9000;
/// RFLAGS with IOPL 3: ring 3 may access ports.
const FLAGS: u64 = 3 << 12 | 2;

/// The machine. The order of the fields matters: they drop in this order, so KVM releases the memory before
/// the memory is unmapped.
#[derive(Debug)]
pub struct Guest {
    pub vcpu: VcpuFd,
    _vm: VmFd,
    pub memory: GuestMemoryMmap,
}

fn system(error: kvm_ioctls::Error) -> io::Error {
    io::Error::from_raw_os_error(error.errno())
}

impl Guest {
    /// Creates a VM with one vCPU that is about to run `program`. `rdi` holds the address of the counter that the
    /// program increments.
    pub fn new(kvm: &Kvm, program: &[u8]) -> io::Result<Self> {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY)]).map_err(io::Error::other)?;
        write(&memory, program).map_err(io::Error::other)?;
        let vm = kvm.create_vm().map_err(system)?;
        vm.set_tss_address(0xfffb_d000).map_err(system)?;
        let host = memory.get_host_address(GuestAddress(0)).map_err(io::Error::other)?;
        let region = kvm_userspace_memory_region {
            memory_size: MEMORY as u64,
            userspace_addr: host as u64,
            ..Default::default()
        };
        // SAFETY: the region covers one entire mapping. The returned `Guest` owns it, and unmaps it only after the VM
        // is closed.
        unsafe { vm.set_user_memory_region(region) }.map_err(system)?;
        let mut vcpu = vm.create_vcpu(0).map_err(system)?;
        let mut sregs = vcpu.get_sregs().map_err(system)?;
        ring_3(&mut sregs);
        vcpu.set_sregs(&sregs).map_err(system)?;
        let regs = kvm_regs { rip: PROGRAM, rdi: COUNT, rflags: FLAGS, ..Default::default() };
        vcpu.set_regs(&regs).map_err(system)?;
        for set in [SyncReg::Register, SyncReg::SystemRegister] {
            vcpu.set_sync_valid_reg(set);
        }
        Ok(Self { vcpu, _vm: vm, memory })
    }

    /// Returns how many rounds the loop has completed so far.
    pub fn count(&self) -> u64 {
        self.memory.read_obj(GuestAddress(COUNT)).unwrap_or(0)
    }
}

/// Writes the program, and page tables that map the first 8 MiB.
fn write(memory: &GuestMemoryMmap, program: &[u8]) -> Result<(), vm_memory::GuestMemoryError> {
    const OPEN: u64 = 0b111;
    const LARGE: u64 = 1 << 7;
    memory.write_slice(program, GuestAddress(PROGRAM))?;
    memory.write_obj((PML4 + 0x1000) | OPEN, GuestAddress(PML4))?;
    memory.write_obj((PML4 + 0x2000) | OPEN, GuestAddress(PML4 + 0x1000))?;
    for index in 0..4 {
        let entry = index << 21 | LARGE | OPEN;
        memory.write_obj(entry, GuestAddress(PML4 + 0x2000 + 8 * index))?;
    }
    Ok(())
}

/// Sets up flat 64-bit segments for ring 3, and enables paging.
fn ring_3(sregs: &mut kvm_sregs) {
    let data = kvm_segment {
        limit: u32::MAX,
        selector: 0x1b,
        type_: 3,
        present: 1,
        dpl: 3,
        db: 1,
        s: 1,
        g: 1,
        ..Default::default()
    };
    sregs.cs = kvm_segment { selector: 0x23, type_: 11, db: 0, l: 1, ..data };
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.cr0 = 0x8005_0033;
    sregs.cr3 = PML4;
    sregs.cr4 = 0x620;
    sregs.efer = 0x501;
}

/// The vCPU's registers at the exit, from KVM's run page.
#[derive(Debug)]
pub struct Exited<'a>(pub &'a VcpuFd);

impl Registers for Exited<'_> {
    fn registers(&mut self) -> Option<GuestRegs> {
        let both = self.0.sync_regs();
        Some(GuestRegs { ip: both.regs.rip, user: both.sregs.ss.dpl == 3 })
    }
}

//! Registers that an embedder emulates instead of KVM. arm64 has no such registers: KVM does not pass accesses to
//! system registers to user space.

use std::error::Error;
use std::io;

use kvm_ioctls::VcpuFd;
use vm_memory::GuestMemoryMmap;

/// A set of registers that the embedder emulates. The enum has no variants, because KVM on arm64 does not let an
/// embedder emulate registers.
#[derive(Debug, Clone)]
pub enum Emulation {}

impl Emulation {
    pub(crate) fn loaded(&self, _memory: &GuestMemoryMmap) -> Result<(), Box<dyn Error + Send + Sync>> {
        match *self {}
    }

    pub(crate) fn vcpu(&self, _index: u32) -> io::Result<VcpuEmulation> {
        match *self {}
    }
}

/// The emulated registers of a vCPU.
#[derive(Debug)]
pub enum VcpuEmulation {}

impl VcpuEmulation {
    pub(crate) fn enter(&mut self, _vcpu: &VcpuFd) -> io::Result<()> {
        match *self {}
    }
}

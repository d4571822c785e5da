//! All calls that a vCPU's thread makes to the device.

use std::io;
use std::sync::Arc;

use vpmu::{Exit, VcpuSession, Vpmu};
use vpmu_testkit::At;

/// The instruction at which the guest always exits.
const IP: u64 = 0x40_0000;

/// The calling thread, acting as a vCPU of a device.
#[derive(Debug)]
pub(crate) struct VcpuThread(VcpuSession);

impl VcpuThread {
    pub(crate) fn attach(vpmu: &Arc<Vpmu>, vcpu: u32) -> io::Result<Self> {
        let session = vpmu.attach(vcpu, 0).map_err(io::Error::other)?;
        Ok(Self(session))
    }

    pub(crate) fn enter(&mut self) {
        self.0.enter();
    }

    pub(crate) fn leave(&mut self, exit: impl Into<Exit>) {
        self.0.leave(exit, &mut At(IP));
    }

    pub(crate) fn mark(&mut self, value: u32) {
        self.0.mark(value, &mut At(IP));
    }

    pub(crate) fn kick(&mut self, queue: u16) {
        self.0.kick(queue);
    }
}

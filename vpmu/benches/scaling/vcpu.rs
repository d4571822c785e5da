//! All calls that a vCPU's thread makes to the device, including notifications of the control queue.

use std::io;
use std::sync::Arc;

use vpmu::abi::QUEUE_CONTROL;
use vpmu::{Exit, GuestRegs, Registers, VcpuSession, Vpmu};

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
        self.0.leave(exit, &mut Loop);
    }

    pub(crate) fn mark(&mut self, value: u32) {
        self.0.mark(value, &mut Loop);
    }

    pub(crate) fn kick(&mut self, queue: u16) {
        self.0.kick(queue);
    }
}

/// Notifies the control queue.
pub(crate) fn notify_control(vpmu: &Vpmu) {
    let _ = vpmu.notify(QUEUE_CONTROL);
}

/// A guest that always exits at the same instruction of a program.
#[derive(Debug)]
struct Loop;

impl Registers for Loop {
    fn registers(&mut self) -> Option<GuestRegs> {
        Some(GuestRegs { ip: 0x40_0000, user: true })
    }
}

//! A machine with one vCPU that runs a few instructions.
//!
//! The machine has no firmware, no devices and no interrupt controller. It runs the instructions and returns the exit,
//! which the caller interprets. Memory layout, machine code and registers are in [`crate::arch`].

#![expect(unsafe_code, reason = "registers memory with KVM")]

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use super::{Ring, Watch};
use crate::arch::{code, create_vcpu, create_vm};

/// Errors of building or running a machine.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// KVM refused a step that builds the machine.
    #[error("{0} failed")]
    Kvm(&'static str, #[source] kvm_ioctls::Error),
    /// The machine's memory could not be mapped.
    #[error("cannot map {} KiB of guest memory", code::RAM / 1024)]
    Map(#[source] vm_memory::mmap::FromRangesError),
    /// The machine's memory could not be filled.
    #[error("cannot fill guest memory")]
    Fill(#[source] vm_memory::GuestMemoryError),
    /// The machine's time limit could not be set.
    #[error("KVM_SET_SIGNAL_MASK failed")]
    Guard(#[source] std::io::Error),
}

impl MachineError {
    /// Returns a function for `map_err`. It wraps KVM's error in a [`MachineError`] that names `step`.
    pub fn kvm(step: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> Self {
        move |source| Self::Kvm(step, source)
    }
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Exit {
    /// A write to a port. The fields are the port and the bytes written.
    Port(u16, Vec<u8>),
    /// A store to the device window. The fields are the offset and the value.
    Store(u64, u64),
    /// The vCPU halted.
    Halt,
    /// The time limit was reached, or the caller stopped the run.
    Stopped,
    /// Any other exit, as text.
    Other(String),
}

impl Exit {
    /// Returns a description of the exit that can follow the words "the guest", such as "halted".
    pub fn describe(&self) -> String {
        match self {
            Exit::Port(port, data) => format!("wrote {data:x?} to port {port:#x}"),
            Exit::Store(code::EXCEPTION, exception) => code::describe_exception(*exception),
            Exit::Store(offset, value) => format!("stored {value:#x} at offset {offset:#x}"),
            Exit::Halt => "halted".into(),
            Exit::Stopped => "was still running at its time limit".into(),
            Exit::Other(what) => format!("ended in {what}"),
        }
    }
}

/// One vCPU with its VM. The fields drop in this order, so that KVM releases the memory before the memory is unmapped.
#[derive(Debug)]
pub struct Machine {
    /// The machine's only vCPU.
    pub vcpu: VcpuFd,
    _vm: VmFd,
    _memory: GuestMemoryMmap,
    watch: Watch,
}

impl Machine {
    /// Builds a machine that is ready to execute `program` in `ring`. Each run ends when `watch` reaches its time
    /// limit, or earlier.
    pub fn new(kvm: &Kvm, watch: &Watch, ring: Ring, program: &[code::Unit]) -> Result<Self, MachineError> {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), code::RAM)]).map_err(MachineError::Map)?;
        let program = (code::PROGRAM, code::bytes(program));
        for (at, bytes) in code::tables().into_iter().chain([program]) {
            memory.write_slice(&bytes, GuestAddress(at)).map_err(MachineError::Fill)?;
        }
        let vm = create_vm(kvm).map_err(MachineError::kvm("KVM_CREATE_VM"))?;
        let host = memory.get_host_address(GuestAddress(0)).map_err(MachineError::Fill)?;
        let region = kvm_userspace_memory_region {
            memory_size: code::RAM as u64,
            userspace_addr: host as u64,
            ..Default::default()
        };
        // SAFETY: the region covers one entire mapping. The machine owns the mapping, and unmaps it only after the VM
        // is closed.
        unsafe { vm.set_user_memory_region(region) }.map_err(MachineError::kvm("KVM_SET_USER_MEMORY_REGION"))?;

        let vcpu = create_vcpu(kvm, &vm)?;
        watch.guard(&vcpu).map_err(MachineError::Guard)?;
        let mut machine = Machine { vcpu, _vm: vm, _memory: memory, watch: watch.clone() };
        machine.enter(ring)?;
        Ok(machine)
    }

    /// Runs the guest until its next exit, or until the time limit.
    pub fn run(&mut self) -> Exit {
        self.run_until(|| false)
    }

    /// Like [`Machine::run`], but also stops when `done` returns `true`. Calls `done` at the start and after
    /// each signal.
    pub fn run_until(&mut self, mut done: impl FnMut() -> bool) -> Exit {
        loop {
            if self.watch.over() || done() {
                return Exit::Stopped;
            }
            return match self.vcpu.run() {
                Ok(VcpuExit::IoOut(port, data)) => Exit::Port(port, data.to_vec()),
                Ok(VcpuExit::MmioWrite(at, data)) if at >= code::WINDOW => {
                    let mut value = [0; 8];
                    let length = data.len().min(8);
                    value[..length].copy_from_slice(&data[..length]);
                    Exit::Store(at - code::WINDOW, u64::from_le_bytes(value))
                }
                Ok(VcpuExit::Hlt) => Exit::Halt,
                Ok(VcpuExit::InternalError) => Exit::Other("a KVM internal error".into()),
                Ok(VcpuExit::Shutdown) => Exit::Other("a triple fault".into()),
                Ok(other) => Exit::Other(format!("{other:?}")),
                // A signal ended the run call. If this signal marked the time limit, `over` now returns `true`.
                Err(e) if e.errno() == libc::EINTR => {
                    self.watch.take_signals();
                    continue;
                }
                Err(e) => Exit::Other(format!("KVM_RUN: {e}")),
            };
        }
    }
}

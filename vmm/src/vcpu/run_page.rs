//! The page shared by KVM and a vCPU's thread.
//!
//! Mapped a second time besides kvm-ioctls' own mapping: the exit can then be read, and its data
//! answered, while the registers of the same vCPU are read; and the kick's signal handler has an
//! address for `immediate_exit`.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU8, Ordering};

use kvm_bindings::{
    KVM_EXIT_FAIL_ENTRY, KVM_EXIT_HLT, KVM_EXIT_INTERNAL_ERROR, KVM_EXIT_INTR,
    KVM_EXIT_IRQ_WINDOW_OPEN, KVM_EXIT_MMIO, KVM_EXIT_SHUTDOWN, KVM_EXIT_SYSTEM_EVENT, kvm_run,
};
use kvm_ioctls::VcpuFd;
use vpmu::{Access, ExitReason};

use super::VcpuError;
use crate::arch::exits;
use crate::signal::Kickable;

/// A memory access, at most eight bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MemoryAccess {
    pub(super) address: u64,
    pub(super) write: bool,
    pub(super) len: usize,
    data: [u8; 8],
}

impl MemoryAccess {
    fn told(&self) -> Access {
        Access {
            address: self.address,
            // At most eight.
            size: u8::try_from(self.len).unwrap_or(u8::MAX),
            write: self.write,
            count: 1,
        }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.data.get(..self.len).unwrap_or_default()
    }
}

/// Exit reasons.
#[derive(Debug)]
pub(crate) enum Exit {
    Memory(MemoryAccess),
    Halt,
    /// A kick, or any other signal.
    Signal,
    /// KVM had nothing to run and must be called again.
    Again,
    /// An architecture-specific exit.
    Arch(exits::Exit),
    /// A triple fault.
    Shutdown,
    /// A system event of this kind.
    System(u32),
    /// The guest cannot continue, for this reason.
    Broken(String),
}

impl From<&Exit> for vpmu::Exit {
    fn from(exit: &Exit) -> Self {
        match exit {
            Exit::Arch(exit) => exit.into(),
            Exit::Memory(access) => Self {
                reason: ExitReason::Mmio,
                access: Some(access.told()),
            },
            Exit::Halt => ExitReason::Hlt.into(),
            Exit::Signal => ExitReason::Signal.into(),
            Exit::Again | Exit::Shutdown | Exit::System(_) | Exit::Broken(_) => {
                ExitReason::Other.into()
            }
        }
    }
}

/// A vCPU's run page.
#[derive(Debug)]
pub struct RunPage {
    pub(crate) run: NonNull<kvm_run>,
    pub(crate) size: usize,
}

// SAFETY: the mapping is ours alone, and moves to the vCPU's thread with its owner; KVM writes
// it only in a run call, which the same owner makes.
unsafe impl Send for RunPage {}

impl RunPage {
    /// Maps the run page of `vcpu`, of KVM's `size` bytes.
    ///
    /// # Errors
    /// [`VcpuError::RunPage`].
    pub fn map(vcpu: &VcpuFd, size: usize) -> Result<Self, VcpuError> {
        // SAFETY: a fresh shared mapping of a descriptor that allows it; checked below.
        let address = unsafe {
            libc::mmap(
                ptr::null_mut(),
                size,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                vcpu.as_raw_fd(),
                0,
            )
        };
        if address == libc::MAP_FAILED || size < size_of::<kvm_run>() {
            return Err(VcpuError::RunPage(io::Error::last_os_error()));
        }
        let run = NonNull::new(address.cast())
            .ok_or_else(|| VcpuError::RunPage(io::ErrorKind::OutOfMemory.into()))?;
        Ok(Self { run, size })
    }

    pub(crate) fn run(&self) -> &kvm_run {
        // SAFETY: mapped with at least this size until drop; KVM writes only in run calls, made by
        // this value's owner.
        unsafe { self.run.as_ref() }
    }

    pub(crate) fn run_mut(&mut self) -> &mut kvm_run {
        // SAFETY: see `run`; borrowed exclusively.
        unsafe { self.run.as_mut() }
    }

    fn immediate_exit(&self) -> *mut u8 {
        // SAFETY: computes an address inside the mapping.
        unsafe { &raw mut (*self.run.as_ptr()).immediate_exit }
    }

    /// Directs this thread's kicks to this vCPU, until the value is dropped.
    pub(super) fn kickable(&self) -> Kickable {
        // SAFETY: `Vcpu` drops the result before its run page, on its own thread.
        unsafe { Kickable::new(self.immediate_exit()) }
    }

    /// Makes the next run call come back before it enters the guest.
    pub(super) fn set_immediate_exit(&self) {
        // SAFETY: as in `clear_immediate_exit`.
        let flag = unsafe { AtomicU8::from_ptr(self.immediate_exit()) };
        flag.store(1, Ordering::SeqCst);
    }

    /// Makes the next run call enter the guest again.
    pub(super) fn clear_immediate_exit(&self) {
        // SAFETY: valid and aligned; the signal handler of this thread may write it between any
        // two instructions, hence atomic.
        let flag = unsafe { AtomicU8::from_ptr(self.immediate_exit()) };
        flag.store(0, Ordering::SeqCst);
    }

    /// Decodes the exit of the last run call.
    pub(super) fn exit(&self) -> Exit {
        if let Some(exit) = exits::decode(self) {
            return Exit::Arch(exit);
        }
        let run = self.run();
        match run.exit_reason {
            KVM_EXIT_MMIO => {
                // SAFETY: the exit reason says which member KVM filled; so it does below.
                let mmio = unsafe { run.__bindgen_anon_1.mmio };
                Exit::Memory(MemoryAccess {
                    address: mmio.phys_addr,
                    write: mmio.is_write != 0,
                    len: usize::try_from(mmio.len).unwrap_or(0).min(8),
                    data: mmio.data,
                })
            }
            KVM_EXIT_HLT => Exit::Halt,
            KVM_EXIT_INTR => Exit::Signal,
            KVM_EXIT_IRQ_WINDOW_OPEN => Exit::Again,
            KVM_EXIT_SHUTDOWN => Exit::Shutdown,
            KVM_EXIT_SYSTEM_EVENT => {
                // SAFETY: as above.
                Exit::System(unsafe { run.__bindgen_anon_1.system_event.type_ })
            }
            KVM_EXIT_INTERNAL_ERROR => {
                // SAFETY: as above.
                let suberror = unsafe { run.__bindgen_anon_1.internal.suberror };
                let why = match suberror {
                    1 => "an instruction that it cannot emulate",
                    2 => "an exception during an exception",
                    3 => "an exit during event delivery",
                    4 => "an exit reason unknown to it",
                    _ => "an unknown error",
                };
                Exit::Broken(format!("KVM met {why} (internal error {suberror})"))
            }
            KVM_EXIT_FAIL_ENTRY => {
                // SAFETY: as above.
                let reason = unsafe {
                    run.__bindgen_anon_1
                        .fail_entry
                        .hardware_entry_failure_reason
                };
                Exit::Broken(format!("the processor refuses the guest ({reason:#x})"))
            }
            other => Exit::Broken(format!("KVM came back for a reason unknown here ({other})")),
        }
    }

    /// Completes a memory read of the guest with `data`.
    pub(super) fn answer_memory(&mut self, data: &[u8]) {
        // SAFETY: called for a memory read, whose member this is.
        let mmio = unsafe { &mut self.run_mut().__bindgen_anon_1.mmio };
        if let Some(room) = mmio.data.get_mut(..data.len()) {
            room.copy_from_slice(data);
        }
    }
}

impl Drop for RunPage {
    fn drop(&mut self) {
        // SAFETY: mapped in `map` with this size; no borrow of it remains.
        unsafe { libc::munmap(self.run.as_ptr().cast(), self.size) };
    }
}

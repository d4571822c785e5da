//! The page shared by KVM and a vCPU's thread.
//!
//! Mapped a second time besides kvm-ioctls' own mapping: the exit is classified while kvm-ioctls lends it, and
//! the kick's signal handler has an address for `immediate_exit`, which outlives the vCPU's descriptor.

#![expect(unsafe_code, reason = "a mapping that KVM writes to, and its unions")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU8, Ordering};

use kvm_bindings::{KVM_EXIT_HLT, KVM_EXIT_INTERNAL_ERROR, KVM_EXIT_INTR, KVM_EXIT_MMIO, kvm_run};
use kvm_ioctls::VcpuFd;
use vpmu::{Access, Exit, ExitReason};

use crate::arch;
use crate::kick::Kickable;

/// Pages follow it in which KVM leaves data of exits: kvm-ioctls lends that.
const SIZE: usize = size_of::<kvm_run>();

/// A vCPU's run page.
#[derive(Debug)]
pub(crate) struct RunPage(NonNull<kvm_run>);

/// The descriptor of `vcpu`.
pub(crate) fn descriptor(vcpu: &VcpuFd) -> BorrowedFd<'_> {
    // SAFETY: the vCPU has it open, and is borrowed for as long as the result.
    unsafe { BorrowedFd::borrow_raw(vcpu.as_raw_fd()) }
}

impl RunPage {
    /// Maps the run page of `vcpu`.
    ///
    /// # Errors
    /// The host's.
    pub(crate) fn map(vcpu: &VcpuFd) -> io::Result<Self> {
        // SAFETY: a fresh shared mapping of a descriptor that allows it; checked below.
        let address = unsafe {
            libc::mmap(
                ptr::null_mut(),
                SIZE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                vcpu.as_raw_fd(),
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let run = NonNull::new(address.cast());
        Ok(Self(run.ok_or(io::ErrorKind::OutOfMemory)?))
    }

    /// The page's address; its structure is mapped whole until drop.
    pub(crate) fn as_ptr(&self) -> *const kvm_run {
        self.0.as_ptr()
    }

    fn immediate_exit(&self) -> &AtomicU8 {
        // SAFETY: computes an address inside the mapping.
        let flag = unsafe { &raw mut (*self.0.as_ptr()).immediate_exit };
        // SAFETY: valid while the page is mapped. The signal handler of this thread may write it between any two
        // instructions, hence atomic; the kernel reads it in run calls of this thread only.
        unsafe { AtomicU8::from_ptr(flag) }
    }

    /// Directs this thread's kicks to this vCPU, until the value is dropped.
    pub(crate) fn kickable(&self) -> Kickable {
        // SAFETY: `VcpuThread` drops the result before its run page, on its own thread.
        unsafe { Kickable::new(self.immediate_exit().as_ptr()) }
    }

    /// Makes the next run call return before it enters the guest.
    pub(crate) fn set_immediate_exit(&self) {
        self.immediate_exit().store(1, Ordering::SeqCst);
    }

    /// Makes the next run call enter the guest again.
    pub(crate) fn clear_immediate_exit(&self) {
        self.immediate_exit().store(0, Ordering::SeqCst);
    }

    fn reason(&self) -> u32 {
        // SAFETY: computes an address inside the mapping.
        let reason = unsafe { &raw const (*self.as_ptr()).exit_reason };
        // SAFETY: KVM writes it in run calls, which the thread of this value makes.
        unsafe { reason.read() }
    }

    /// The exit of the last run call, which has not failed.
    pub(crate) fn exit(&self) -> Exit {
        let reason = self.reason();
        let access = |access| Exit {
            reason: ExitReason::Mmio,
            access: Some(access),
        };
        if let Some(exit) = arch::exit(self, reason) {
            return exit;
        }
        match reason {
            KVM_EXIT_MMIO => {
                // SAFETY: computes an address inside the mapping.
                let mmio = unsafe { &raw const (*self.as_ptr()).__bindgen_anon_1.mmio };
                // SAFETY: the exit reason determines the member that KVM filled.
                let mmio = unsafe { mmio.read() };
                access(Access {
                    address: mmio.phys_addr,
                    // At most eight.
                    size: u8::try_from(mmio.len).unwrap_or(u8::MAX),
                    write: mmio.is_write != 0,
                    count: 1,
                })
            }
            KVM_EXIT_HLT => ExitReason::Hlt.into(),
            KVM_EXIT_INTR => ExitReason::Signal.into(),
            _ => ExitReason::Other.into(),
        }
    }

    /// KVM's number of the error that the last run call returned, if it returned one of KVM's own.
    pub(crate) fn internal_error(&self) -> Option<u32> {
        (self.reason() == KVM_EXIT_INTERNAL_ERROR).then(|| {
            // SAFETY: computes an address inside the mapping.
            let error = unsafe { &raw const (*self.as_ptr()).__bindgen_anon_1.internal.suberror };
            // SAFETY: the exit reason determines the member that KVM filled.
            unsafe { error.read() }
        })
    }
}

impl Drop for RunPage {
    fn drop(&mut self) {
        // SAFETY: mapped in `map` with this size; no borrow of it remains.
        unsafe { libc::munmap(self.0.as_ptr().cast(), SIZE) };
    }
}

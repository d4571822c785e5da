//! The run page (`struct kvm_run`) that KVM shares with a vCPU's thread.
//!
//! kvm-ioctls also maps this page, but a second mapping is necessary for two reasons. First, the exit is classified
//! while a [`VcpuExit`](kvm_ioctls::VcpuExit) borrows the vCPU. Second, the signal handler for kicks needs an address
//! of `immediate_exit` that stays valid even after the vCPU's descriptor is closed.

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

/// Number of bytes to map. The vCPU's pages after the run page are not needed. They contain exit data, which kvm-ioctls
/// returns from its own mapping.
const SIZE: usize = size_of::<kvm_run>();

/// A vCPU's run page.
#[derive(Debug)]
pub(crate) struct RunPage(NonNull<kvm_run>);

/// Borrows the file descriptor of `vcpu`.
pub(crate) fn descriptor(vcpu: &VcpuFd) -> BorrowedFd<'_> {
    // SAFETY: `vcpu` owns the descriptor and stays borrowed while the result exists.
    unsafe { BorrowedFd::borrow_raw(vcpu.as_raw_fd()) }
}

impl RunPage {
    /// Maps the run page of `vcpu`.
    ///
    /// # Errors
    /// The error of mmap(2).
    pub(crate) fn map(vcpu: &VcpuFd) -> io::Result<Self> {
        // SAFETY: a new mapping at an address that the kernel chooses affects no other memory.
        let address = unsafe {
            libc::mmap(ptr::null_mut(), SIZE, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, vcpu.as_raw_fd(), 0)
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let run = NonNull::new(address.cast());
        Ok(Self(run.ok_or(io::ErrorKind::OutOfMemory)?))
    }

    /// Returns the page's address. The whole structure stays mapped until `self` is dropped.
    pub(crate) fn as_ptr(&self) -> *const kvm_run {
        self.0.as_ptr()
    }

    fn immediate_exit(&self) -> &AtomicU8 {
        // SAFETY: computes an address inside the mapping.
        let flag = unsafe { &raw mut (*self.0.as_ptr()).immediate_exit };
        // SAFETY: the byte is valid while the page is mapped. The signal handler may write it between any two
        // instructions of this thread, so the byte is atomic. The kernel reads it only in run calls of this thread.
        unsafe { AtomicU8::from_ptr(flag) }
    }

    /// Until the returned guard is dropped, a kick to this thread makes this vCPU leave the guest.
    pub(crate) fn kickable(&self) -> Kickable {
        // SAFETY: `VcpuThread` drops the guard before it drops the run page, so the byte stays mapped. `VcpuThread` is
        // not `Send`, so it drops the guard on this thread.
        unsafe { Kickable::new(self.immediate_exit().as_ptr()) }
    }

    /// Makes the next run call return without entering the guest.
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
        // SAFETY: KVM writes the field only in run calls, which only this thread makes.
        unsafe { reason.read() }
    }

    /// Returns the exit of the last run call, which must have succeeded.
    pub(crate) fn exit(&self) -> Exit {
        let reason = self.reason();
        let access = |access| Exit { reason: ExitReason::Mmio, access: Some(access) };
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
                    // KVM reports at most eight bytes.
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

    /// Returns the suberror of the last run call's exit, if that was `KVM_EXIT_INTERNAL_ERROR`.
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
        // SAFETY: `map` mapped this address with this size, and no borrow of the page remains.
        unsafe { libc::munmap(self.0.as_ptr().cast(), SIZE) };
    }
}

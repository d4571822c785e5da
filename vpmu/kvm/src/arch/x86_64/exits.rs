//! Exits that are specific to this architecture: port I/O.
#![expect(unsafe_code, reason = "the exit reason determines which member of a union KVM filled")]

use kvm_bindings::{KVM_EXIT_IO, KVM_EXIT_IO_OUT};
use vpmu::{Access, Exit, ExitReason};

use crate::run_page::RunPage;

/// Returns the exit in `page`, if it is specific to this architecture.
pub(crate) fn exit(page: &RunPage, reason: u32) -> Option<Exit> {
    if reason != KVM_EXIT_IO {
        return None;
    }
    let run = page.as_ptr();
    // SAFETY: computes an address inside the mapping.
    let io = unsafe { &raw const (*run).__bindgen_anon_1.io };
    // SAFETY: the exit reason determines the member that KVM filled.
    let io = unsafe { io.read() };
    Some(Exit {
        reason: ExitReason::Io,
        access: Some(Access {
            address: io.port.into(),
            size: io.size,
            write: u32::from(io.direction) == KVM_EXIT_IO_OUT,
            count: io.count,
        }),
    })
}

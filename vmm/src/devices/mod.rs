//! The devices on the guest's buses. A device handles accesses to its registers, and signals eventfds to notify
//! KVM and other threads. It uses neither KVM's descriptors nor the event loop.

pub mod console;
pub mod panic;
pub mod progress;
pub mod serial;
pub(crate) mod virtio;
pub mod virtio_mmio;
pub mod vpmu;

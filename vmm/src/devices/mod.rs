//! The devices on the guest's buses. A device has registers and listeners; it accesses neither
//! KVM's descriptors nor the event loop.

pub mod console;
pub mod panic;
pub mod progress;
pub mod serial;
pub mod virtio_mmio;
pub mod vpmu;

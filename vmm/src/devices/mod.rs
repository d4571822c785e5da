//! The devices on the guest's buses. A device knows its registers and its listeners; it knows
//! neither KVM's descriptors nor the event loop.

pub mod console;
pub mod panic;
pub mod progress;
pub mod serial;
pub mod virtio_mmio;
pub mod vpmu;

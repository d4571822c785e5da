//! What the guest finds on its buses. A device knows its registers and whom it tells; it knows
//! neither KVM's descriptors nor the event loop.

pub mod console;
pub mod panic;
pub mod progress;
pub mod serial;
pub mod virtio_mmio;
pub mod vpmu;

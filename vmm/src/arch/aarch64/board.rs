//! Adds the devices to the machine's buses, at their addresses. There is no device for power-off and reset: guests
//! call PSCI, which KVM implements.

use std::sync::Arc;

use super::layout;
use crate::bus::{Buses, Device, Overlap};
use crate::exit::StopLatch;

/// The default command line of a guest.
pub const DEFAULT_CMDLINE: &str = "console=ttyS0 panic=-1";

/// Adds the serial port, which has `size` registers.
///
/// # Errors
/// [`Overlap`].
pub fn plug_console(buses: &mut Buses, serial: Arc<dyn Device>, size: u64) -> Result<(), Overlap> {
    buses.memory.insert(layout::SERIAL, size, serial)
}

/// Adds the panic device and the boot-progress byte.
///
/// # Errors
/// [`Overlap`].
pub fn plug_power(
    buses: &mut Buses,
    _end: &Arc<StopLatch>,
    panic: Arc<dyn Device>,
    progress: Arc<dyn Device>,
) -> Result<(), Overlap> {
    let memory = &mut buses.memory;
    memory.insert(layout::PVPANIC, layout::DEVICE_SIZE, panic)?;
    memory.insert(layout::DEBUG, layout::DEVICE_SIZE, progress)
}

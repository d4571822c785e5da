//! The devices on the buses of a PC, at their ports and addresses.

use std::sync::Arc;

use super::layout;
use super::power::{I8042, I8042_SIZE, Reset, Sleep};
use crate::bus::{Buses, Device, Overlap};
use crate::exit::StopLatch;

/// The default command line of a guest.
pub const DEFAULT_CMDLINE: &str = "console=ttyS0 panic=-1 pci=off";

/// Adds the serial port, which has `size` registers.
///
/// # Errors
/// [`Overlap`].
pub fn plug_console(buses: &mut Buses, serial: Arc<dyn Device>, size: u64) -> Result<(), Overlap> {
    buses.ports.insert(layout::SERIAL_PORT.into(), size, serial)
}

/// Adds the panic device, the debug port, and the ports for power-off and reset. When a guest powers off or resets
/// through one of these ports, the port's device reports this to `end`.
///
/// # Errors
/// [`Overlap`].
pub fn plug_power(
    buses: &mut Buses,
    end: &Arc<StopLatch>,
    panic: Arc<dyn Device>,
    progress: Arc<dyn Device>,
) -> Result<(), Overlap> {
    let end = || Arc::clone(end);
    let ports = &mut buses.ports;
    ports.insert(layout::SLEEP_PORT.into(), 2, Arc::new(Sleep(end())))?;
    ports.insert(layout::RESET_PORT.into(), 1, Arc::new(Reset(end())))?;
    ports.insert(layout::I8042_PORT.into(), I8042_SIZE, Arc::new(I8042(end())))?;
    ports.insert(layout::PVPANIC_PORT.into(), 1, panic)?;
    ports.insert(layout::DEBUG_PORT.into(), 1, progress)
}

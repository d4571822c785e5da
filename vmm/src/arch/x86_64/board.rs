//! The devices on the buses of a PC, at their ports and addresses.

use std::sync::Arc;

use super::layout;
use super::power::{I8042, I8042_SIZE, Reset, Sleep};
use crate::board::Buses;
use crate::bus::Overlap;
use crate::devices::panic::Panic;
use crate::devices::progress::Progress;
use crate::devices::serial::{SERIAL_SIZE, Serial};
use crate::exit::End;

/// The default command line of a guest.
pub const DEFAULT_CMDLINE: &str = "console=ttyS0 panic=-1 pci=off";

/// Adds the serial port.
///
/// # Errors
/// [`Overlap`].
pub fn plug_console(buses: &mut Buses, serial: Arc<Serial>) -> Result<(), Overlap> {
    buses
        .ports
        .insert(layout::SERIAL_PORT.into(), SERIAL_SIZE, serial)
}

/// Adds the ports and devices that end a run, and the debug port.
///
/// # Errors
/// [`Overlap`].
pub fn plug_power(
    buses: &mut Buses,
    end: &Arc<End>,
    progress: &Arc<Progress>,
) -> Result<(), Overlap> {
    let end = || Arc::clone(end);
    let ports = &mut buses.ports;
    ports.insert(layout::SLEEP_PORT.into(), 2, Arc::new(Sleep(end())))?;
    ports.insert(layout::RESET_PORT.into(), 1, Arc::new(Reset(end())))?;
    ports.insert(
        layout::I8042_PORT.into(),
        I8042_SIZE,
        Arc::new(I8042(end())),
    )?;
    ports.insert(layout::PVPANIC_PORT.into(), 1, Arc::new(Panic(end())))?;
    ports.insert(layout::DEBUG_PORT.into(), 1, progress.clone())
}

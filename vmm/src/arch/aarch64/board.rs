//! Which device sits at which address. Power-off and reset are calls to the firmware, which KVM
//! answers (PSCI).

use std::sync::Arc;

use super::layout;
use crate::board::Buses;
use crate::bus::Overlap;
use crate::devices::panic::Panic;
use crate::devices::progress::Progress;
use crate::devices::serial::{SERIAL_SIZE, Serial};
use crate::exit::End;

/// The default command line of a guest.
pub const DEFAULT_CMDLINE: &str = "console=ttyS0 panic=-1";

/// Adds the serial port.
///
/// # Errors
/// [`Overlap`].
pub fn plug_console(buses: &mut Buses, serial: Arc<Serial>) -> Result<(), Overlap> {
    buses.memory.insert(layout::SERIAL, SERIAL_SIZE, serial)
}

/// Adds the panic device and the boot-progress byte.
///
/// # Errors
/// [`Overlap`].
pub fn plug_power(
    buses: &mut Buses,
    end: &Arc<End>,
    progress: &Arc<Progress>,
) -> Result<(), Overlap> {
    let memory = &mut buses.memory;
    memory.insert(
        layout::PVPANIC,
        layout::DEVICE_SIZE,
        Arc::new(Panic(Arc::clone(end))),
    )?;
    memory.insert(layout::DEBUG, layout::DEVICE_SIZE, progress.clone())
}

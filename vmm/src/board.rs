//! Adds the machine's devices to its buses, at fixed addresses.

use std::io;
use std::sync::Arc;

use vmm_sys_util::eventfd::EventFd;
use vpmu::Memory;

use crate::arch::{board, layout};
use crate::bus::{Buses, Overlap};
use crate::devices::console::{Output, StallPolicy};
use crate::devices::panic::Panic;
use crate::devices::progress::Progress;
use crate::devices::serial::{Console, FifoSpace, Line, SERIAL_SIZE, Serial};
use crate::devices::virtio_mmio::{Interrupt, VirtioMmio};
use crate::devices::vpmu::{Doorbell, VirtioPmu};
use crate::exit::StopLatch;

/// Errors from adding a device.
#[derive(Debug, thiserror::Error)]
pub enum PlugError {
    /// Two devices overlap in the layout.
    #[error(transparent)]
    Overlap(#[from] Overlap),
    /// The virtio library rejects the size of a queue.
    #[error("cannot create the virtqueues")]
    Queues(#[from] virtio_queue::Error),
    /// The process has no free file descriptors, or standard output is closed.
    #[error("cannot connect the console")]
    Console(#[source] io::Error),
}

fn event() -> Result<EventFd, PlugError> {
    EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).map_err(PlugError::Console)
}

/// Adds the serial port, and connects it to standard input and output.
///
/// # Errors
/// [`PlugError`].
pub fn plug_console(buses: &mut Buses, stall: StallPolicy, most: u64) -> Result<Console, PlugError> {
    let [line, room, waiting] = [event()?, event()?, event()?].map(Arc::new);
    let output = Output::new(Arc::clone(&waiting), stall, most).map_err(PlugError::Console)?;
    let serial = Arc::new(Serial::new(Line(line), FifoSpace(Arc::clone(&room)), output));
    board::plug_console(buses, serial.clone(), SERIAL_SIZE)?;
    Ok(Console { serial, room, waiting })
}

/// Adds the power devices, the panic device and the debug port.
///
/// # Errors
/// [`PlugError::Overlap`].
pub fn plug_power(buses: &mut Buses, end: &Arc<StopLatch>, progress: &Arc<Progress>) -> Result<(), PlugError> {
    let panic = Arc::new(Panic(Arc::clone(end)));
    Ok(board::plug_power(buses, end, panic, progress.clone())?)
}

/// Adds the paravirtual PMU: its transport and its doorbell page.
///
/// # Errors
/// [`PlugError`].
pub fn plug_vpmu(
    buses: &mut Buses,
    pmu: VirtioPmu,
    memory: Memory,
    interrupt: Arc<Interrupt>,
) -> Result<Arc<VirtioMmio>, PlugError> {
    let doorbell = Arc::new(Doorbell);
    let transport = VirtioMmio::new(Arc::new(pmu), memory, interrupt)?;
    let transport = Arc::new(transport);
    buses.memory.insert(layout::VIRTIO, layout::VIRTIO_SIZE, transport.clone())?;
    buses.memory.insert(layout::DOORBELL, layout::DOORBELL_SIZE, doorbell)?;
    Ok(transport)
}

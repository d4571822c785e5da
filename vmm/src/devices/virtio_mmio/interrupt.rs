//! The transport's interrupt: an edge on a line, and the register InterruptStatus, which holds the reason.

use std::fmt::Debug;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Reason: buffers were used.
pub(super) const USED_BUFFER: u32 = 1;
/// Reason: the device status or the configuration has changed.
pub(super) const CONFIG_CHANGE: u32 = 2;
/// A bit of [`Interrupt::status`] that the guest does not see: the driver has started the device.
const STARTED: u32 = 1 << 31;

/// An interrupt line of a VM.
pub trait Line: Send + Sync + Debug {
    /// Raises and lowers the line. When this returns, the VM's interrupt controller has the interrupt: if a vCPU's thread
    /// calls this at an exit, the vCPU takes the interrupt before its next instruction. Not called by two threads at
    /// the same time.
    ///
    /// # Errors
    /// KVM's error.
    fn edge(&self) -> io::Result<()>;
}

/// The line of the present VM.
#[derive(Debug, Default)]
struct Connection {
    line: Option<Arc<dyn Line>>,
    /// An edge was raised while there was no line.
    due: bool,
}

/// The device's interrupt: an edge on a line, and the register InterruptStatus, which holds the reason.
#[derive(Debug, Default)]
pub struct Interrupt {
    status: AtomicU32,
    /// Locked while an edge is raised: of two edges that overlap, one would be lost. No other lock is taken inside.
    connection: Mutex<Connection>,
}

impl Interrupt {
    /// Raises all further edges on `line`, and an edge that is due.
    ///
    /// # Errors
    /// The line's error.
    pub fn connect(&self, line: Arc<dyn Line>) -> io::Result<()> {
        let mut connection = self.connection();
        if std::mem::take(&mut connection.due) {
            line.edge()?;
        }
        connection.line = Some(line);
        Ok(())
    }

    /// Drops the line, and an edge that is due.
    pub fn disconnect(&self) {
        *self.connection() = Connection::default();
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports used buffers. Sets the status before raising the edge, so that the guest's interrupt handler sees the
    /// status.
    ///
    /// Does nothing before the driver starts the device, and nothing after a reset. A thread of the VMM can call this
    /// while the driver resets the device. Linux frees the queues after the reset. If the status still reported used
    /// buffers then, Linux's interrupt handler would access the freed queues.
    ///
    /// # Errors
    /// The line's error.
    pub fn used_buffer(&self) -> io::Result<()> {
        self.raise(USED_BUFFER)
    }

    pub(super) fn raise(&self, why: u32) -> io::Result<()> {
        let raised = self
            .status
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |status| (status & STARTED != 0).then_some(status | why));
        // If the driver resets the device at this point, the edge still arrives, but the guest's handler reads a
        // status of zero.
        if raised.is_err() {
            return Ok(());
        }
        let mut connection = self.connection();
        match &connection.line {
            Some(line) => line.edge(),
            None => {
                connection.due = true;
                Ok(())
            }
        }
    }

    /// The status register.
    pub(super) fn status(&self) -> u32 {
        self.status.load(Ordering::SeqCst) & !STARTED
    }

    pub(super) fn acknowledge(&self, why: u32) {
        self.status.fetch_and(!why | STARTED, Ordering::SeqCst);
    }

    /// The status to save. It includes the bit that guests do not see.
    pub(super) fn save(&self) -> u32 {
        self.status.load(Ordering::SeqCst)
    }

    /// Restores a saved status. If the driver had started the device, also reports a configuration change, because the
    /// limits and the clock of this host may differ. The edge for this report also replaces an edge that was raised
    /// before the save and may be lost, because the driver handles all reasons in the status. If the earlier edge was
    /// not lost, the driver reads a status of zero at one of the two edges, and ignores that edge.
    ///
    /// # Errors
    /// The line's error.
    pub(super) fn restore(&self, status: u32) -> io::Result<()> {
        self.status.store(status, Ordering::SeqCst);
        self.raise(CONFIG_CHANGE)
    }

    /// Called when the driver starts the device. From this call on, interrupts are raised.
    pub(super) fn start(&self) {
        self.status.store(STARTED, Ordering::SeqCst);
    }

    /// Called when the device is reset. The status stays zero until the driver starts the device again.
    pub(super) fn stop(&self) {
        self.status.store(0, Ordering::SeqCst);
    }
}

//! The device as its operator's hand sees it: the window, and persistent events from the host's side.

use vm_memory::GuestMemoryMmap;

use super::{Error, Vpmu};
use crate::persistent::{History, Persist, PersistError, PersistentStatus};
use crate::window::Window;

impl Vpmu {
    /// The same device with a window: memory of the VMM's for rings that outlive a reset. It is one
    /// region of whole pages, outside the guest's RAM; its address is where the VMM maps it for the
    /// guest, as shared memory region [`SHM_WINDOW`](crate::abi::SHM_WINDOW).
    ///
    /// # Errors
    /// [`Error::Window`].
    pub fn with_window(self, window: GuestMemoryMmap) -> Result<Self, Error> {
        let window = Window::new(&window).ok_or(Error::Window)?;
        self.locked().set_window(window);
        Ok(self)
    }

    /// Starts a persistent event of the operator's; its id. Called when the machine has its vCPUs and
    /// can tell what it counts, be it before their threads [attach](Vpmu::attach): the event begins
    /// when its vCPU does.
    ///
    /// # Errors
    /// [`PersistError`]; nothing has been started then.
    pub fn persist(&self, persist: &Persist) -> Result<u64, PersistError> {
        Err(PersistError::NoRoom(persist.pages))
    }

    /// Every persistent event, the guest's too, by ascending id.
    #[must_use]
    pub fn persistent(&self) -> Vec<PersistentStatus> {
        Vec::new()
    }

    /// Ends a persistent event, whoever made it; its ring goes with it.
    ///
    /// # Errors
    /// [`PersistError::NoSuch`].
    pub fn end(&self, id: u64) -> Result<(), PersistError> {
        Err(PersistError::NoSuch(id))
    }

    /// A persistent event with the records in its ring, whoever made it. What the batched engine has
    /// not collected yet is written first. A reset closes the events that have a ring in guest memory:
    /// to be called before that.
    ///
    /// # Errors
    /// [`PersistError::NoSuch`], [`PersistError::NoRing`], [`PersistError::Unreadable`].
    pub fn history(&self, id: u64) -> Result<History, PersistError> {
        Err(PersistError::NoSuch(id))
    }
}

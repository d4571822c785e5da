//! The device as its operator's hand sees it: the window, and persistent events from the host's side.

use vm_memory::GuestMemoryMmap;

use super::{Error, Vpmu};
use crate::persistent::{History, Persist, PersistError, PersistentStatus};
use crate::state::Held;
use crate::window::Window;

impl Vpmu {
    /// The same device with a window: memory of the VMM's for rings that outlive a reset. It is one
    /// region of whole pages, outside the guest's RAM; its address is where the VMM maps it for the
    /// guest, as shared memory region [`SHM_WINDOW`](crate::abi::SHM_WINDOW). Said before any event is
    /// started.
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
        if self.vcpu(persist.vcpu).is_none() {
            return Err(PersistError::NoVcpu {
                vcpu: persist.vcpu,
                vcpus: self.settings.vcpus,
            });
        }
        let catalogue = self.catalogue();
        let highest = self.settings.limits.max_sample_rate;
        let request = persist.request(catalogue, highest)?;
        if self.locked().engine_asks(&request) {
            self.ask_guest_ips();
        }
        self.with_state(|state, host| state.persist(host, catalogue, persist, &request))
    }

    /// Every persistent event, the guest's too, by ascending id.
    #[must_use]
    pub fn persistent(&self) -> Vec<PersistentStatus> {
        match self.catalogue.get() {
            Some(catalogue) => self.with_state(|state, host| state.statuses(host, catalogue)),
            // Nobody has opened anything yet.
            None => Vec::new(),
        }
    }

    /// Ends a persistent event, whoever made it; its ring goes with it.
    ///
    /// # Errors
    /// [`PersistError::NoSuch`].
    pub fn end(&self, id: u64) -> Result<(), PersistError> {
        self.with_state(|state, host| state.end_persistent(host, id))
    }

    /// A persistent event with the records in its ring, whoever made it. What the batched engine has
    /// not collected yet is written first. A reset closes the events that have a ring in guest memory:
    /// to be called before that.
    ///
    /// # Errors
    /// [`PersistError::NoSuch`], [`PersistError::NoRing`], [`PersistError::Unreadable`].
    pub fn history(&self, id: u64) -> Result<History, PersistError> {
        let catalogue = self.catalogue.get().ok_or(PersistError::NoSuch(id))?;
        let held = self.with_state(|state, host| state.held(host, catalogue, id));
        held.map(Held::history)
    }
}

//! What an event is that outlives its handles, and what it counts with.

use super::Event;
use crate::persistent::Name;

impl Event {
    /// Whether it is the operator's.
    pub(crate) fn is_operators(&self) -> bool {
        let known = self.persistence.as_ref();
        known.is_some_and(|persistence| persistence.operator)
    }

    /// Whether it is persistent under that name.
    pub(crate) fn is_named(&self, name: &Name) -> bool {
        let known = self.persistence.as_ref();
        known.is_some_and(|persistence| persistence.name == *name)
    }

    /// The thread that runs `vcpu` is gone, and with it what counts there; it is not active there.
    pub(crate) fn leave(&mut self, vcpu: u32) {
        self.backing.drop_counter(vcpu);
    }
}

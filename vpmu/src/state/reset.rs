//! A reset: what a driver brought goes, and nothing of it is touched afterwards. What outlives it
//! counts and records on throughout.

use super::State;
use super::producing::Awaited;
use crate::event::Host;
use crate::queues::Queues;
use crate::window::Window;

impl State {
    /// There is memory that outlives a reset; said before any driver is there.
    pub(crate) fn set_window(&mut self, window: Window) {
        self.output.set_window(window);
        self.output.reset(|_| false);
    }

    /// Forgets the driver and its memory, without a write there, and closes every event that needs
    /// them.
    pub(crate) fn reset(&mut self, host: &Host<'_>) {
        let ids: Vec<u64> = self.events.keys().copied().collect();
        for id in ids {
            if !self.outlives(id) {
                self.drop_event(host, id);
            }
        }
        for awaited in &mut self.awaited {
            *awaited = Awaited::default();
        }
        self.features = 0;
        self.queues = Queues::default();
        self.output.reset(|ring| self.events.contains_key(&ring));
        self.rest_if_idle(host);
    }

    /// Whether an event needs nothing of a driver's.
    fn outlives(&self, id: u64) -> bool {
        let event = self.events.get(&id);
        let ring = self.output.ring(id);
        event.is_some_and(|event| event.persistence.is_some())
            && ring.is_none_or(|ring| self.output.window_page(ring).is_some())
            && !self.output.has_area(id)
    }

    /// Closes an event as if it had never been, without a write to guest memory.
    fn drop_event(&mut self, host: &Host<'_>, id: u64) {
        let Some(event) = self.events.remove(&id) else {
            return;
        };
        self.links.forget(id);
        if let Some(vcpu) = event.active_on() {
            self.active[vcpu as usize].remove(&id);
            host.vcpus[vcpu as usize].drop_needs(event.needs());
        }
        if event.is_batched() {
            self.merge.forget(id);
        }
    }
}

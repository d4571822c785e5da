//! A reset: what a driver brought goes, and nothing of it is touched afterwards.

use super::{Awaited, State};
use crate::event::Host;
use crate::queues::Queues;

impl State {
    /// Forgets the driver, its events and its memory, without a write there.
    pub(crate) fn reset(&mut self, host: &Host<'_>) {
        let ids: Vec<u64> = self.events.keys().copied().collect();
        for id in ids {
            self.drop_event(host, id);
        }
        for awaited in &mut self.awaited {
            *awaited = Awaited::default();
        }
        self.features = 0;
        self.queues = Queues::default();
        self.output.reset();
        self.rest_if_idle(host);
    }

    /// Closes an event as if it had never been, without a write to guest memory.
    fn drop_event(&mut self, host: &Host<'_>, id: u64) {
        let Some(event) = self.events.remove(&id) else {
            return;
        };
        if let Some(vcpu) = event.active_on() {
            self.active[vcpu as usize].remove(&id);
            host.vcpus[vcpu as usize].drop_needs(event.needs());
        }
        if event.is_batched() {
            self.merge.forget(id);
        }
    }
}

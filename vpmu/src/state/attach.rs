//! A vCPU gets a thread, or another one: events of that vCPU count there from then on.

use super::State;
use crate::event::{Event, Host};

impl State {
    /// The thread `thread` runs `vcpu` from now on, with guest TSC = host TSC + `tsc_offset`. What
    /// counted on another thread before has counted for good, and goes on with this one.
    pub(crate) fn attach(&mut self, host: &Host<'_>, vcpu: u32, thread: i32, tsc_offset: u64) {
        let active: Vec<u64> = self.active[vcpu as usize].iter().copied().collect();
        for id in active {
            // One that cannot be stopped is in error by itself.
            let _ = self.stop(host, id);
        }
        for event in self.events.values_mut() {
            event.leave(vcpu);
        }
        host.vcpus[vcpu as usize].attach(thread, tsc_offset);
        let placed = |event: &&Event| event.placed_on() == Some(vcpu);
        let events = self.events.values().filter(placed);
        for id in events.map(|event| event.facts.id).collect::<Vec<_>>() {
            if let Err(errno) = self.start(host, id) {
                log::debug!(
                    "event {id} on the thread of vCPU {vcpu}: errno {}",
                    errno.get()
                );
            }
        }
    }
}

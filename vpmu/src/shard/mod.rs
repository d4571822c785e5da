//! A shard: one vCPU's part of the device. One lock protects the events placed on the vCPU, their host
//! counters and links, the vCPU's throttles and its queue. The vCPU's own thread takes this lock often; other
//! threads take it rarely.

mod batch;
mod commands;
mod core;
mod counts;
mod events;
mod exits;
mod guest;
mod hooks;
mod map;
mod merge;
mod moment;
mod occurrences;
mod sampler;
mod state;
mod waits;
mod writer;

use std::sync::Arc;

pub(crate) use self::commands::{Answer, CommandBuffer, event_command};
pub(crate) use self::core::Core;
pub(crate) use self::moment::ExitView;
pub(crate) use self::state::{State, View};
pub(crate) use self::writer::Writer;
use crate::backend::Backend;
use crate::cpu::{Cpu, Lease};
use crate::links::Effect;
use crate::locks::{Lock, SHARD};
use crate::notices::Notices;
use crate::vcpu::Vcpu;
use crate::work;

/// One vCPU's part of the device. Its alignment keeps other data out of its cache lines. The alignment is two cache
/// lines, because many CPUs fetch adjacent lines in pairs.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Shard {
    pub(crate) vcpu: Arc<Vcpu>,
    state: Lock<State, SHARD>,
}

/// Work that one shard defers to an event of another shard, or to a shared counter of another vCPU. The thread
/// that deferred the work executes it after unlocking its shard, before its vCPU continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Errand {
    /// The event's leader was enabled.
    Start(u64),
    /// The event's leader was disabled.
    Stop(u64),
    /// An overflow of another event starts, stops or toggles the event.
    Trigger(u64, Effect),
    /// An event no longer uses the vCPU's shared counter.
    Release(u32, Lease),
}

impl Shard {
    pub(crate) fn new(index: u32, backend: &Arc<Backend>, notices: &Arc<Notices>) -> Self {
        let vcpu = Arc::new(Vcpu::default());
        let cpu = Cpu::new(index, Arc::clone(backend), Arc::clone(&vcpu));
        let state = State::new(cpu, Writer::new(Arc::clone(notices)));
        Self { vcpu, state: Lock::new(state) }
    }

    /// Calls `act` while the shard is locked. Returns the result, and the work that was deferred to other shards. The
    /// caller must execute this work.
    ///
    /// Costs one operation. A request changes the members of a group, a family or a sink by one such call for each
    /// member, and so pays for all of them.
    pub(crate) fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> (T, Vec<Errand>) {
        work::charge(1);
        let mut state = self.state.lock();
        state.begin();
        let result = act(&mut state);
        (result, state.finish())
    }

    /// Waits until no other thread holds the shard's lock.
    pub(crate) fn wait(&self) {
        drop(self.state.lock());
    }
}

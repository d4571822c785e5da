//! KVM implementations of the services that the device needs from its VMM.

use std::io;
use std::sync::Arc;

use vpmu::Machine;

use crate::arch::HALTS;
use crate::drain::DrainTimer;
use crate::kick::Threads;
use crate::stats::Statistics;

/// The [`Machine`] of a VMM on KVM.
#[derive(Debug)]
pub struct KvmMachine {
    /// Each vCPU's statistics, if this kernel has them.
    pub stats: Arc<Statistics>,
    /// The vCPUs' threads, to kick them.
    pub threads: Arc<Threads>,
    /// The timer of drains.
    pub drain: Arc<DrainTimer>,
    /// Whether the host's samples have guest addresses, as returned by [`probe::guest_ips`](crate::probe::guest_ips).
    pub guest_ips: bool,
}

impl Machine for KvmMachine {
    fn exits(&self, vcpu: u32) -> Option<u64> {
        self.stats.read(vcpu, "exits")
    }

    fn halts(&self, vcpu: u32) -> Option<u64> {
        self.stats.read(vcpu, HALTS)
    }

    fn reports_guest_ips(&self) -> bool {
        self.guest_ips
    }

    fn kick(&self, vcpu: u32) -> io::Result<()> {
        self.threads.kick(vcpu)
    }

    fn draining(&self, wanted: bool) {
        self.drain.run(wanted);
    }
}

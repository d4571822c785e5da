//! vCPUs whose threads belong to another process than the device. The device counts on these threads, but takes no part
//! in their entries and exits: the VMM's process forwards their notifications and marks.

use std::ops::Range;

use crate::machine::{GuestRegs, Registers};
use crate::session::VcpuSession;
use crate::work::Turn;

/// Maximum number of turns that one notification takes. The vCPU waits all the while, and a guest chooses the commands.
const TURNS: usize = 16;

/// A vCPU and its thread in another process, from [`Vpmu::attach_thread`](crate::Vpmu::attach_thread) until the session
/// is dropped. Any thread may use the session, one at a time.
#[derive(Debug)]
pub struct RemoteVcpu(VcpuSession);

impl RemoteVcpu {
    pub(crate) fn new(session: VcpuSession) -> Self {
        Self(session)
    }

    /// Executes the commands of a notification that the vCPU sent for `queue`, a vCPU queue. The vCPU must not run the
    /// guest before this call returns.
    ///
    /// Returns [`Turn::Unfinished`] if commands remain after 16 turns. The next calls execute them, and only then the
    /// commands of their own notification. The vCPU, and often its whole VM, waits for each call, so one call must not
    /// take as long as a guest wishes.
    pub fn kick(&mut self, queue: u16) -> Turn {
        let mut turns = 0..TURNS;
        if self.resume(&mut turns) == Turn::Unfinished {
            return Turn::Unfinished;
        }
        self.0.kick(queue);
        self.resume(&mut turns)
    }

    fn resume(&mut self, turns: &mut Range<usize>) -> Turn {
        turns.map(|_| self.0.resume()).find(|&turn| turn == Turn::Done).unwrap_or(Turn::Unfinished)
    }

    /// Counts a mark that the vCPU made by writing `value` to the doorbell. Its samples have an IP of zero. The vCPU must
    /// not run the guest before this call returns.
    pub fn mark(&mut self, value: u32) {
        self.0.mark(value, &mut Unknown);
    }
}

/// The registers of a vCPU that another process runs.
struct Unknown;

impl Registers for Unknown {
    fn registers(&mut self) -> Option<GuestRegs> {
        None
    }
}

//! A vCPU on its thread: enters the guest, and reports each entry and exit to the device.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use kvm_ioctls::{VcpuExit, VcpuFd};
use vpmu::{Exit, ExitReason, GuestRegs, Registers, Turn, VcpuSession};

use crate::arch::{self, ExitRegisters};
use crate::here::Accesses;
use crate::kick::Kickable;
use crate::run_page::{self, RunPage};

/// A vCPU on the thread that runs it, with its session. The thread's kicks go to it.
#[derive(Debug)]
pub struct VcpuThread {
    // Fields drop in this order: counters overflow after the session, too, and the page is mapped longest.
    session: Option<VcpuSession>,
    /// Of a bus that does not pass the vCPU on.
    accesses: Option<Accesses>,
    _kickable: Kickable,
    page: RunPage,
    can_sync: bool,
    synced: bool,
}

/// A vCPU at an exit, before it enters again.
#[derive(Debug)]
#[non_exhaustive]
pub struct AtExit<'a> {
    /// The exit as the device knows it: port I/O has the size and number of its accesses.
    pub exit: Exit,
    /// KVM's number of the error, if the exit is one of KVM's own.
    pub internal_error: Option<u32>,
    /// The registers, read when they are asked for.
    pub registers: ExitRegisters<'a>,
    /// The vCPU's session with the device.
    pub session: Option<&'a mut VcpuSession>,
}

impl VcpuThread {
    /// The vCPU behind `fd` on the calling thread, which has its `session`; `None`: of a machine without the
    /// device. [`kick::install`](crate::kick::install) was called before.
    ///
    /// # Errors
    /// The run page cannot be mapped.
    pub fn new(fd: &VcpuFd, session: impl Into<Option<VcpuSession>>) -> io::Result<Self> {
        let page = RunPage::map(fd)?;
        let session = session.into();
        Ok(Self {
            accesses: session.is_some().then(Accesses::begin),
            session,
            _kickable: page.kickable(),
            page,
            can_sync: false,
            synced: false,
        })
    }

    /// With registers that KVM leaves in the run page while records need them: if
    /// [`syncs_registers`](crate::syncs_registers) returns `can`.
    #[must_use]
    pub fn syncing(mut self, can: bool) -> Self {
        self.can_sync = can;
        self
    }

    /// Runs the guest until its next exit: [`VcpuFd::run`], with all that the device needs before and
    /// after it. `fd` is the descriptor that the value was made of.
    ///
    /// # Errors
    /// KVM's. `EINTR` is a signal's: a kick, or an overflow, which the device has handled.
    #[expect(
        unsafe_code,
        reason = "kvm-ioctls borrows the vCPU for the exit, and registers are read meanwhile"
    )]
    pub fn run<'a>(
        &'a mut self,
        fd: &'a mut VcpuFd,
    ) -> Result<(VcpuExit<'a>, AtExit<'a>), kvm_ioctls::Error> {
        self.serve_bus(fd);
        let wanted = self.session.as_ref().map(VcpuSession::wants_registers);
        let wanted = self.can_sync && wanted.unwrap_or(false);
        if wanted != self.synced {
            arch::sync(fd, wanted);
            self.synced = wanted;
        }
        let page = &self.page;
        // SAFETY: the result lives no longer than the borrow of `fd`, which has it open.
        let vcpu = unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) };
        if let Some(session) = &mut self.session {
            session.enter();
        }
        let ran = fd.run();
        // Before the exit is reported: an overflow from here on makes the next run call return.
        page.clear_immediate_exit();
        let (exit, internal_error) = match &ran {
            Ok(_) => (page.exit(), page.internal_error()),
            Err(error) if error.errno() == libc::EINTR => (ExitReason::Signal.into(), None),
            Err(_) => (ExitReason::Other.into(), None),
        };
        let mut registers = ExitRegisters::new(vcpu, self.synced.then_some(page));
        let mut session = self.session.as_mut();
        if let Some(session) = &mut session {
            session.leave(exit, &mut registers);
        }
        let at = AtExit {
            exit,
            internal_error,
            registers,
            session,
        };
        ran.map(|exit| (exit, at))
    }

    /// Makes the next run call return before it enters the guest, with KVM's part of the last exit finished.
    pub fn return_at_once(&self) {
        self.page.set_immediate_exit();
    }

    /// One more turn at the work that a notification left, as [`VcpuSession::resume`]. [`VcpuThread::run`] takes
    /// all turns that are left; a VMM whose vCPUs may be asked to stop takes them itself, one by one.
    pub fn resume(&mut self) -> Turn {
        self.session
            .as_mut()
            .map_or(Turn::Done, VcpuSession::resume)
    }

    /// The vCPU's session.
    pub fn session(&mut self) -> Option<&mut VcpuSession> {
        self.session.as_mut()
    }

    /// Carries out what a bus has left to this thread since the last exit.
    fn serve_bus(&mut self, fd: &VcpuFd) {
        if let (Some(session), Some(accesses)) = (&mut self.session, &self.accesses) {
            let synced = self.synced.then_some(&self.page);
            let vcpu = run_page::descriptor(fd);
            accesses.carry_out(session, &mut ExitRegisters::new(vcpu, synced));
        }
    }
}

impl Drop for VcpuThread {
    /// A bus may have left accesses of the last exit. Their records have no registers.
    fn drop(&mut self) {
        if let (Some(session), Some(accesses)) = (&mut self.session, &self.accesses) {
            accesses.carry_out(session, &mut Unknown);
        }
    }
}

/// A vCPU whose registers cannot be read any more.
struct Unknown;

impl Registers for Unknown {
    fn registers(&mut self) -> Option<GuestRegs> {
        None
    }
}

impl AtExit<'_> {
    /// The vCPU wrote `value` to the doorbell.
    pub fn mark(&mut self, value: u32) {
        if let Some(session) = &mut self.session {
            session.mark(value, &mut self.registers);
        }
    }

    /// The vCPU notified `queue`, one of the vCPUs'.
    pub fn kick(&mut self, queue: u16) {
        if let Some(session) = &mut self.session {
            session.kick(queue);
        }
    }
}

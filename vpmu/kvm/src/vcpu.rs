//! Runs a vCPU on its thread: enters the guest, and reports each entry and exit to the device.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use kvm_ioctls::{VcpuExit, VcpuFd};
use vpmu::{Exit, ExitReason, GuestRegs, Registers, Turn, VcpuSession};

use crate::arch::{self, ExitRegisters};
use crate::here::Accesses;
use crate::kick::Kickable;
use crate::run_page::{self, RunPage};

/// A vCPU and its session, bound to the thread that runs the vCPU. A kick of this thread ends the run call.
#[derive(Debug)]
pub struct VcpuThread {
    // Fields drop in this order. The run page must be dropped last, because host counters can overflow after the
    // session ends, and then the signal handler writes to the page.
    session: Option<VcpuSession>,
    /// While this exists, [`here`](crate::here) accepts accesses on this thread. `None` without a session.
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
    /// The exit as reported to the device. For port I/O, it includes the size and the number of accesses.
    pub exit: Exit,
    /// The suberror, if the exit was `KVM_EXIT_INTERNAL_ERROR`.
    pub internal_error: Option<u32>,
    /// The registers, read on demand.
    pub registers: ExitRegisters<'a>,
    /// The vCPU's session with the device.
    pub session: Option<&'a mut VcpuSession>,
}

impl VcpuThread {
    /// Binds the vCPU behind `fd` to the calling thread. `session` is the vCPU's session, or `None` on a machine
    /// without the device. Call [`kick::install`](crate::kick::install) first.
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

    /// Lets KVM copy the registers to the run page while records need them. `can` is the result of
    /// [`syncs_registers`](crate::syncs_registers).
    #[must_use]
    pub fn syncing(mut self, can: bool) -> Self {
        self.can_sync = can;
        self
    }

    /// Runs the guest with [`VcpuFd::run`] until its next exit. Reports the entry and the exit to the device. `fd` must
    /// be the vCPU that was passed to [`VcpuThread::new`].
    ///
    /// # Errors
    /// The error of `KVM_RUN`. `EINTR` means that a signal arrived, either for a kick or for an overflow. The device
    /// has handled any overflow.
    #[expect(unsafe_code, reason = "registers are read while the exit of kvm-ioctls still borrows the vCPU")]
    pub fn run<'a>(&'a mut self, fd: &'a mut VcpuFd) -> Result<(VcpuExit<'a>, AtExit<'a>), kvm_ioctls::Error> {
        self.serve_bus(fd);
        let wanted = self.session.as_ref().map(VcpuSession::wants_registers);
        let wanted = self.can_sync && wanted.unwrap_or(false);
        if wanted != self.synced {
            arch::sync(fd, wanted);
            self.synced = wanted;
        }
        let page = &self.page;
        // SAFETY: `fd` owns the descriptor and stays borrowed while the result exists.
        let vcpu = unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) };
        if let Some(session) = &mut self.session {
            session.enter();
        }
        let ran = fd.run();
        // Clear the flag before reporting the exit, so that an overflow after this point makes the next run call
        // return.
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
        let at = AtExit { exit, internal_error, registers, session };
        ran.map(|exit| (exit, at))
    }

    /// Makes the next run call complete the last exit in KVM and then return without entering the guest.
    pub fn return_at_once(&self) {
        self.page.set_immediate_exit();
    }

    /// Runs the next turn of a notification's remaining commands, as [`VcpuSession::resume`] does.
    /// [`VcpuThread::run`] runs all remaining turns. A VMM that may need to stop a vCPU calls this method before
    /// [`VcpuThread::run`] and checks after each turn whether to stop.
    pub fn resume(&mut self) -> Turn {
        self.session.as_mut().map_or(Turn::Done, VcpuSession::resume)
    }

    /// Returns the vCPU's session.
    pub fn session(&mut self) -> Option<&mut VcpuSession> {
        self.session.as_mut()
    }

    /// Carries out the accesses that a bus reported on this thread since the last exit.
    fn serve_bus(&mut self, fd: &VcpuFd) {
        if let (Some(session), Some(accesses)) = (&mut self.session, &self.accesses) {
            let synced = self.synced.then_some(&self.page);
            let vcpu = run_page::descriptor(fd);
            accesses.carry_out(session, &mut ExitRegisters::new(vcpu, synced));
        }
    }
}

impl Drop for VcpuThread {
    /// Carries out the pending accesses that a bus reported. Their records have no registers.
    fn drop(&mut self) {
        if let (Some(session), Some(accesses)) = (&mut self.session, &self.accesses) {
            accesses.carry_out(session, &mut Unknown);
        }
    }
}

/// Provides no registers. Used when a [`VcpuThread`] is dropped, because the registers can no longer be read then.
struct Unknown;

impl Registers for Unknown {
    fn registers(&mut self) -> Option<GuestRegs> {
        None
    }
}

impl AtExit<'_> {
    /// Reports that the vCPU wrote `value` to the doorbell.
    pub fn mark(&mut self, value: u32) {
        if let Some(session) = &mut self.session {
            session.mark(value, &mut self.registers);
        }
    }

    /// Reports that the vCPU notified the vCPU queue `queue`.
    pub fn kick(&mut self, queue: u16) {
        if let Some(session) = &mut self.session {
            session.kick(queue);
        }
    }
}

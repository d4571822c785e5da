//! The thread of a vCPU, which enters the guest and dispatches its exits until the run ends.

mod gate;
pub(crate) mod handlers;

use std::sync::Arc;
use std::time::Instant;

use kvm_bindings::{KVM_SYSTEM_EVENT_CRASH, KVM_SYSTEM_EVENT_RESET, KVM_SYSTEM_EVENT_SHUTDOWN};
use kvm_ioctls::{VcpuExit, VcpuFd};
use vpmu::{ExitReason, Registers, Turn, VcpuSession, Vpmu};
use vpmu_kvm::{AtExit, Threads, VcpuThread, registers};

use crate::arch::exits;
use crate::arch::state::{self, CounterStarts, Saver};
use crate::bus::{Bus, Caller};
use crate::devices::progress::Progress;
use crate::exit::{Ending, StopLatch, VcpuError};
pub use gate::Gate;
use gate::Leaving;

/// State shared by the vCPU threads.
#[derive(Debug)]
pub struct Shared {
    /// Devices by port, if the architecture has ports.
    pub ports: Bus,
    /// Devices by address.
    pub memory: Bus,
    /// The paravirtual PMU, unless disabled.
    pub vpmu: Option<Arc<Vpmu>>,
    /// The end of the run.
    pub end: Arc<StopLatch>,
    /// The progress of the boot.
    pub progress: Arc<Progress>,
    /// Whether the accesses that devices handle are traced.
    pub trace_handlers: bool,
    /// The vCPUs' threads.
    pub threads: Arc<Threads>,
    /// The gate at which vCPUs wait while the machine is saved.
    pub gate: Gate,
    /// Saves a vCPU's state. `None` if there is no control socket, because no client can then request a snapshot.
    pub(crate) saver: Option<Saver>,
}

/// One vCPU. Its creator moves it to the vCPU's thread.
#[derive(Debug)]
pub struct Vcpu {
    index: u32,
    fd: VcpuFd,
    counters: CounterStarts,
    /// The guest's time counter minus the host's time counter.
    clock_offset: u64,
    can_sync: bool,
    shared: Arc<Shared>,
}

/// The action after an exit.
enum Next {
    Enter,
    /// Refuse an access that KVM does not decode, and then enter the guest.
    Refuse,
    End(Ending),
}

impl Vcpu {
    /// Creates the vCPU with the descriptor `fd`, whose state is set but for `counters`. Its time counter is `clock_offset` ahead of the host's counter.
    /// `can_sync` is true if KVM can copy registers to the run page.
    #[must_use]
    pub(crate) fn new(
        index: u32,
        (fd, counters): (VcpuFd, CounterStarts),
        clock_offset: u64,
        can_sync: bool,
        shared: Arc<Shared>,
    ) -> Self {
        Self { index, fd, counters, clock_offset, can_sync, shared }
    }

    /// Runs the guest on this vCPU until the run ends. Announces the end if this vCPU
    /// ends the run or fails.
    pub fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        let _leaving = Leaving::new(self.index, &shared.end, &shared.gate);
        if let Err(error) = self.enter_until_the_end() {
            shared.end.announce(Err(error));
        }
    }

    fn enter_until_the_end(&mut self) -> Result<(), VcpuError> {
        let shared = Arc::clone(&self.shared);
        let vcpu = self.index;
        let restored = self.counters.restore(&self.fd);
        restored.map_err(|source| VcpuError::Counters { vcpu, source: source.into() })?;
        let session = self.attach(shared.vpmu.as_deref())?;
        let thread = VcpuThread::new(&self.fd, session).map_err(VcpuError::RunPage)?;
        let mut thread = thread.syncing(self.can_sync);
        let _joined = shared.threads.join(vcpu);
        shared.progress.started();
        while !shared.end.reached() {
            if shared.gate.is_closed() {
                // Make the next run call complete the last access, and then return without entering the guest.
                thread.return_at_once();
            }
            if thread.resume() == Turn::Unfinished {
                // Some commands of a notification are still pending. Check whether the run has ended before executing
                // more of them.
                continue;
            }
            let signalled = match thread.run(&mut self.fd) {
                Ok((exit, at)) => {
                    let signalled = at.exit.reason == ExitReason::Signal;
                    let access = at.exit.access;
                    let began = shared.trace_handlers.then(Instant::now);
                    let next = serve(exit, at, vcpu, &shared)?;
                    if let (Some(began), Some(access), Some(vpmu)) = (began, &access, &shared.vpmu) {
                        handlers::record(vpmu, vcpu, access, began.elapsed());
                    }
                    match next {
                        Next::Enter => {}
                        Next::Refuse => {
                            exits::refuse_undecoded(&self.fd).map_err(|source| VcpuError::Run { vcpu, source })?
                        }
                        Next::End(ending) => {
                            shared.end.announce(Ok(ending));
                            shared.gate.left();
                        }
                    }
                    signalled
                }
                Err(error) => match error.errno() {
                    libc::EINTR => true,
                    libc::EAGAIN => false,
                    _ => {
                        return Err(VcpuError::Run { vcpu, source: error });
                    }
                },
            };
            if signalled && let Some(saver) = &shared.saver {
                self.pass(saver, &mut thread);
            }
        }
        if log::log_enabled!(log::Level::Debug)
            && let Some(regs) = registers(&self.fd).registers()
        {
            log::debug!("vCPU {vcpu} stops at {:#x}", regs.ip);
        }
        Ok(())
    }

    /// Waits while the machine is saved. Call this after a signal has interrupted a run call, because KVM has then
    /// completed the last access.
    fn pass(&self, saver: &Saver, thread: &mut VcpuThread) {
        let gate = &self.shared.gate;
        let closed = gate.is_closed();
        let _paused = thread.session().filter(|_| closed).map(VcpuSession::pause);
        if gate.pass(self.index, || saver.vcpu(&self.fd)) {
            state::paused(&self.fd);
        }
    }

    /// The vCPU's session with the PMU device. `None` if the device is disabled.
    fn attach(&self, vpmu: Option<&Vpmu>) -> Result<Option<VcpuSession>, VcpuError> {
        let attached = vpmu.map(|vpmu| vpmu.attach(self.index, self.clock_offset));
        attached.transpose().map_err(|source| VcpuError::Attach { vcpu: self.index, source })
    }
}

fn serve(exit: VcpuExit<'_>, mut at: AtExit<'_>, vcpu: u32, shared: &Shared) -> Result<Next, VcpuError> {
    let mut caller = Caller { vcpu, registers: &mut at.registers, pmu: at.session };
    let what = match exit {
        VcpuExit::MmioWrite(address, data) => {
            shared.memory.write(address, data, &mut caller);
            return Ok(Next::Enter);
        }
        VcpuExit::MmioRead(address, data) => {
            shared.memory.read(address, data);
            return Ok(Next::Enter);
        }
        undecoded if exits::is_undecoded(&undecoded) => return Ok(Next::Refuse),
        VcpuExit::Hlt | VcpuExit::Intr | VcpuExit::IrqWindowOpen => return Ok(Next::Enter),
        VcpuExit::Shutdown => return Ok(Next::End(Ending::TripleFault)),
        VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_SHUTDOWN, _) => {
            return Ok(Next::End(Ending::Poweroff));
        }
        VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_RESET, _) => return Ok(Next::End(Ending::Reset)),
        VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_CRASH, _) => {
            return Ok(Next::End(Ending::GuestPanic));
        }
        VcpuExit::SystemEvent(other, _) => format!("system event {other}"),
        VcpuExit::InternalError => internal_error(at.internal_error),
        VcpuExit::FailEntry(reason, _) => {
            format!("the processor cannot enter the guest (reason {reason:#x})")
        }
        other => match exits::serve(other, at.exit.access, &mut caller, &shared.ports) {
            None => return Ok(Next::Enter),
            Some(other) => format!("KVM returned an unknown exit ({other:?})"),
        },
    };
    let ip = at.registers.registers().map_or(0, |regs| regs.ip);
    Err(VcpuError::Stopped { vcpu, ip, what })
}

/// Describes an internal error of KVM. `number` is the `suberror` that KVM reports.
fn internal_error(number: Option<u32>) -> String {
    let why = match number {
        Some(1) => "an instruction that it cannot emulate",
        Some(2) => "simultaneous exceptions",
        Some(3) => "an exit during event delivery",
        Some(4) => "an unknown exit reason",
        _ => "an unknown error",
    };
    format!("KVM encountered {why} (internal error {})", number.unwrap_or_default())
}

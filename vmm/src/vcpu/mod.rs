//! A vCPU's thread: enters the guest and dispatches its exits, until the run ends.

mod gate;
mod run_page;

use std::io;
use std::sync::Arc;

use kvm_bindings::{KVM_SYSTEM_EVENT_CRASH, KVM_SYSTEM_EVENT_RESET, KVM_SYSTEM_EVENT_SHUTDOWN};
use kvm_ioctls::VcpuFd;
use vpmu::{ExitReason, Registers, Turn, VcpuSession, Vpmu};

use crate::arch::emulation::{Emulation, VcpuEmulation};
use crate::arch::exits;
use crate::arch::registers::{self, ExitRegisters};
use crate::arch::state::{self, Saver};
use crate::bus::{Bus, Caller};
use crate::devices::progress::Progress;
use crate::exit::{End, Ending};
use crate::signal::Threads;
pub(crate) use gate::Closed;
pub use gate::Gate;
pub(crate) use run_page::Exit;
pub use run_page::RunPage;

/// Errors of a vCPU.
#[derive(Debug, thiserror::Error)]
pub enum VcpuError {
    /// KVM's run call failed.
    #[error("vCPU {vcpu}: KVM cannot run the guest")]
    Run {
        /// The vCPU.
        vcpu: u32,
        /// KVM's reason.
        #[source]
        source: kvm_ioctls::Error,
    },
    /// The run page cannot be mapped.
    #[error("cannot map a vCPU's run page")]
    RunPage(#[source] io::Error),
    /// KVM met an instruction or state that it cannot emulate.
    #[error("vCPU {vcpu} at {ip:#x}: {what}; 'vmm check' shows this machine's abilities")]
    Stopped {
        /// The vCPU.
        vcpu: u32,
        /// The guest's instruction pointer; zero if KVM does not report it.
        ip: u64,
        /// The reason in KVM's terms.
        what: String,
    },
    /// The device rejects this vCPU.
    #[error("vCPU {vcpu}: the PMU device refuses it")]
    Attach {
        /// The vCPU.
        vcpu: u32,
        /// The device's reason.
        #[source]
        source: vpmu::Error,
    },
    /// The embedder's registers failed.
    #[error("vCPU {vcpu}: its emulated registers fail")]
    Emulation {
        /// The vCPU.
        vcpu: u32,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
    /// The thread panicked, which is a bug.
    #[error("vCPU {0}: its thread panicked")]
    Panicked(u32),
}

/// State shared by the vCPU threads.
#[derive(Debug)]
pub struct Shared {
    /// Devices by port, where the architecture has ports.
    pub ports: Bus,
    /// Devices by address.
    pub memory: Bus,
    /// The paravirtual PMU, unless disabled.
    pub vpmu: Option<Arc<Vpmu>>,
    /// The end of the run.
    pub end: Arc<End>,
    /// The clock of the boot.
    pub progress: Arc<Progress>,
    /// The vCPUs' threads.
    pub threads: Arc<Threads>,
    /// Registers that the embedder emulates.
    pub emulation: Option<Emulation>,
    /// Where vCPUs wait while the machine is saved.
    pub gate: Gate,
    /// How a vCPU is saved; `None`: nobody can ask for it.
    pub(crate) saver: Option<Saver>,
}

/// One vCPU, to be moved to its thread.
#[derive(Debug)]
pub struct Vcpu {
    index: u32,
    fd: VcpuFd,
    page: RunPage,
    /// The guest's time counter minus the host's.
    clock_offset: u64,
    can_sync: bool,
    synced: bool,
    shared: Arc<Shared>,
}

/// The action after an exit.
enum Next {
    Enter,
    End(Ending),
}

impl Vcpu {
    /// The vCPU behind `fd`, whose time counter is `clock_offset` ahead of the host's; `can_sync`:
    /// KVM can leave registers in the run page.
    #[must_use]
    pub fn new(
        index: u32,
        fd: VcpuFd,
        page: RunPage,
        clock_offset: u64,
        can_sync: bool,
        shared: Arc<Shared>,
    ) -> Self {
        Self {
            index,
            fd,
            page,
            clock_offset,
            can_sync,
            synced: false,
            shared,
        }
    }

    /// Runs the guest until the run ends, here or elsewhere. Announces every result.
    pub fn run(mut self) {
        let end = Arc::clone(&self.shared.end);
        let guard = AnnouncePanic(self.index, &end);
        if let Err(error) = self.enter_until_the_end() {
            end.announce(Err(error));
        }
        self.shared.gate.left();
        drop(guard);
    }

    fn enter_until_the_end(&mut self) -> Result<(), VcpuError> {
        let _kickable = self.page.kickable();
        let shared = Arc::clone(&self.shared);
        let _joined = shared.threads.join(self.index);
        let mut pmu = self.attach(shared.vpmu.as_deref())?;
        let vcpu = self.index;
        let failed = |source| VcpuError::Emulation { vcpu, source };
        let emulation = shared.emulation.as_ref();
        let mut emulation = emulation
            .map(|device| device.vcpu(self.index))
            .transpose()
            .map_err(failed)?;
        shared.progress.started();
        while !shared.end.reached() {
            self.choose_sync(pmu.as_ref());
            if shared.gate.is_closed() {
                // KVM finishes the last access, and comes back at once.
                self.page.set_immediate_exit();
            }
            if let Some(emulation) = &mut emulation {
                emulation.enter(&self.fd).map_err(failed)?;
            }
            if let Some(pmu) = &mut pmu {
                if pmu.resume() == Turn::Unfinished {
                    // Checks first whether the run has ended.
                    continue;
                }
                pmu.enter();
            }
            let exit = match self.fd.run().map(|_| ()) {
                Ok(()) => self.page.exit(),
                Err(error) => match error.errno() {
                    libc::EINTR => {
                        // Clear it before the device looks for overflows, so that none is missed in
                        // between.
                        self.page.clear_immediate_exit();
                        Exit::Signal
                    }
                    libc::EAGAIN => Exit::Again,
                    _ => {
                        self.left(pmu.as_mut());
                        return Err(VcpuError::Run {
                            vcpu: self.index,
                            source: error,
                        });
                    }
                },
            };
            let interrupted = matches!(exit, Exit::Signal);
            let mut registers = ExitRegisters::new(&self.fd, self.synced);
            if let Some(pmu) = &mut pmu {
                pmu.leave(&exit, &mut registers);
            }
            let mut caller = Caller {
                vcpu: self.index,
                registers: &mut registers,
                pmu: pmu.as_mut(),
            };
            let emulation = emulation.as_mut();
            match serve(exit, &mut self.page, &mut caller, emulation, &shared)? {
                Next::Enter => {}
                Next::End(ending) => {
                    shared.end.announce(Ok(ending));
                    shared.gate.left();
                }
            }
            if interrupted && let Some(saver) = &shared.saver {
                self.pass(saver);
            }
        }
        if log::log_enabled!(log::Level::Debug)
            && let Some(regs) = ExitRegisters::new(&self.fd, false).registers()
        {
            log::debug!("vCPU {} stops at {:#x}", self.index, regs.ip);
        }
        Ok(())
    }

    /// Waits while the machine is saved. KVM has nothing left to finish.
    fn pass(&self, saver: &Saver) {
        let gate = &self.shared.gate;
        if gate.pass(self.index, || saver.vcpu(&self.fd)) {
            state::paused(&self.fd);
        }
    }

    /// The vCPU's session with the PMU device, unless that is switched off.
    fn attach(&self, vpmu: Option<&Vpmu>) -> Result<Option<VcpuSession>, VcpuError> {
        let attached = vpmu.map(|vpmu| vpmu.attach(self.index, self.clock_offset));
        attached.transpose().map_err(|source| VcpuError::Attach {
            vcpu: self.index,
            source,
        })
    }

    /// KVM_RUN failed: report the exit anyway, or a flush would wait for it.
    fn left(&self, pmu: Option<&mut VcpuSession>) {
        if let Some(pmu) = pmu {
            let mut registers = ExitRegisters::new(&self.fd, false);
            pmu.leave(ExitReason::Other, &mut registers);
        }
    }

    /// Makes KVM leave the registers in the run page while records need them at every exit.
    fn choose_sync(&mut self, pmu: Option<&VcpuSession>) {
        let wanted = self.can_sync && pmu.is_some_and(VcpuSession::wants_registers);
        if wanted == self.synced {
            return;
        }
        registers::sync(&mut self.fd, wanted);
        self.synced = wanted;
    }
}

/// Announces a panic: otherwise the run would wait for the thread for ever.
struct AnnouncePanic<'a>(u32, &'a End);

impl Drop for AnnouncePanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.1.announce(Err(VcpuError::Panicked(self.0)));
        }
    }
}

fn serve(
    exit: Exit,
    page: &mut RunPage,
    caller: &mut Caller<'_>,
    emulation: Option<&mut VcpuEmulation>,
    shared: &Shared,
) -> Result<Next, VcpuError> {
    match exit {
        Exit::Arch(exit) => exits::serve(exit, page, caller, emulation, &shared.ports),
        Exit::Memory(access) => {
            if access.write {
                shared.memory.write(access.address, access.bytes(), caller);
            } else {
                let mut data = [0; 8];
                let data = data.get_mut(..access.len).unwrap_or_default();
                shared.memory.read(access.address, data);
                page.answer_memory(data);
            }
        }
        Exit::Shutdown => return Ok(Next::End(Ending::TripleFault)),
        Exit::System(kind) => {
            return match kind {
                KVM_SYSTEM_EVENT_SHUTDOWN => Ok(Next::End(Ending::Poweroff)),
                KVM_SYSTEM_EVENT_RESET => Ok(Next::End(Ending::Reset)),
                KVM_SYSTEM_EVENT_CRASH => Ok(Next::End(Ending::GuestPanic)),
                other => Err(stopped(caller, format!("system event {other}"))),
            };
        }
        Exit::Broken(what) => return Err(stopped(caller, what)),
        Exit::Halt | Exit::Signal | Exit::Again => {}
    }
    Ok(Next::Enter)
}

fn stopped(caller: &mut Caller<'_>, what: String) -> VcpuError {
    let ip = caller.registers.registers().map_or(0, |regs| regs.ip);
    let vcpu = caller.vcpu;
    VcpuError::Stopped { vcpu, ip, what }
}

//! One boot of the guest. Each boot has a new KVM VM with new vCPUs. The threads that run the vCPUs stay the same.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vm_memory::GuestMemoryMmap;
use vpmu_kvm::{Stats, syncs_registers};

use super::VmError;
use crate::arch::clock::GuestClock;
use crate::arch::cpus::{self, Controller, Cpus};
use crate::arch::platform;
use crate::arch::state::{CounterStarts, StateError, VcpuState, VmState};
use crate::confine::{ConfineError, Confinement, Unfiltered};
use crate::machine::Machine;
use crate::memory;
use crate::snapshot::{SnapshotError, State};
use crate::vcpu::{Shared, Vcpu};

/// A VM with vCPUs that have not run yet.
#[derive(Debug)]
pub(super) struct Boot {
    // Fields are dropped in this order.
    vcpus: Vec<VcpuFd>,
    /// The registers that each vCPU's thread restores. Empty in a machine that was not restored.
    counters: Vec<CounterStarts>,
    controller: Controller,
    pub(super) vm: Arc<VmFd>,
    pub(super) clock: GuestClock,
    can_sync: bool,
}

impl Boot {
    /// Creates a VM with `memories` and the vCPUs of `machine`. If `tracked` is true, KVM logs written pages. If
    /// `clock` is given, the guest's time continues from it.
    ///
    /// # Errors
    /// [`VmError`]: KVM refused a step.
    pub(super) fn new(
        kvm: &Kvm,
        machine: &Machine,
        (memories, tracked): (&[&GuestMemoryMmap], bool),
        clock: Option<&GuestClock>,
    ) -> Result<Self, VmError> {
        let vm = platform::create_vm(kvm, machine)?;
        memory::register(&vm, memories, 0, tracked)?;
        let Cpus { vcpus, controller } = cpus::create(kvm, &vm, machine)?;
        let clock = match clock {
            Some(clock) => clock.resume(kvm, &vm, &vcpus)?,
            None => GuestClock::new(kvm, &vm, &vcpus)?,
        };
        Ok(Self { vcpus, counters: Vec::new(), controller, vm: Arc::new(vm), clock, can_sync: syncs_registers(kvm) })
    }

    /// Restores `state` into the VM: vCPUs, interrupt controllers and clock.
    ///
    /// # Errors
    /// [`VmError::Snapshot`], [`VmError::Kvm`].
    pub(super) fn restore(&mut self, kvm: &Kvm, state: &State) -> Result<(), VmError> {
        let State { vm, vcpus, .. } = state;
        let restored = vm.restore(&self.vm, &self.controller, &self.vcpus, vcpus);
        restored.map_err(SnapshotError::State)?;
        self.counters = vcpus.iter().map(VcpuState::counter_starts).collect();
        self.clock = vm.clock(kvm, &self.vm, &self.vcpus, vcpus)?;
        Ok(())
    }

    /// Saves the state of the VM, except for the vCPUs. The vCPUs must be stopped.
    ///
    /// # Errors
    /// [`StateError`].
    pub(super) fn save(&self) -> Result<VmState, StateError> {
        VmState::save(&self.vm, &self.controller, &self.clock)
    }

    /// Makes the first vCPU the boot vCPU, which starts at `entry`.
    ///
    /// # Errors
    /// [`VmError::Cpus`].
    pub(super) fn enter_at(&self, entry: u64) -> Result<(), VmError> {
        match self.vcpus.first() {
            Some(first) => Ok(cpus::enter(first, entry)?),
            None => Ok(()),
        }
    }

    /// KVM's statistics of each vCPU, if this KVM has them.
    pub(super) fn stats(&self) -> Vec<Option<Stats>> {
        self.vcpus.iter().map(open_stats).collect()
    }

    /// Starts the vCPUs on `threads`.
    ///
    /// # Errors
    /// [`VmError::NoReason`], which is a bug. After an error, the caller must stop the vCPUs, too, because some may
    /// have been started.
    pub(super) fn start(&mut self, shared: &Arc<Shared>, threads: &mut Threads) -> Result<(), VmError> {
        let mut counters = self.counters.drain(..);
        for ((place, index), fd) in (0..).zip(0u32..).zip(self.vcpus.drain(..)) {
            let offset = self.clock.offset(place);
            let counters = counters.next().unwrap_or_default();
            let vcpu = Vcpu::new(index, (fd, counters), offset, self.can_sync, Arc::clone(shared));
            threads.run(vcpu)?;
        }
        Ok(())
    }
}

/// The threads for vCPUs. They are started only once, because confined threads cannot start other threads. If the guest
/// boots again, its new vCPUs run on the same threads.
#[derive(Debug)]
pub(super) struct Threads {
    seats: Vec<Seat>,
    /// Number of threads that currently run a vCPU. They are the first threads in `seats`.
    taken: usize,
}

/// A thread that runs one vCPU at a time.
#[derive(Debug)]
struct Seat {
    /// Sends the thread its next vCPU. `None` when the thread gets no more vCPUs.
    vcpus: Option<SyncSender<Vcpu>>,
    /// Receives a message when the thread's vCPU has ended.
    ended: Receiver<()>,
    thread: Option<JoinHandle<()>>,
}

impl Threads {
    /// Starts `count` confined threads. Each thread waits for a vCPU. Also returns the confinement for other threads.
    ///
    /// # Errors
    /// See [`Unfiltered::start_vcpus`].
    pub(super) fn start(count: u8, unfiltered: Unfiltered) -> Result<(Self, Confinement), ConfineError> {
        let mut seats = Vec::new();
        let mut bodies = Vec::new();
        for index in 0..count {
            let (vcpus, given) = sync_channel::<Vcpu>(1);
            let (tell, ended) = sync_channel(1);
            let body = move || {
                for vcpu in given {
                    vcpu.run();
                    if tell.send(()).is_err() {
                        break;
                    }
                }
            };
            bodies.push((format!("vcpu{index}"), body));
            seats.push(Seat { vcpus: Some(vcpus), ended, thread: None });
        }
        let (confinement, threads) = unfiltered.start_vcpus(bodies)?;
        for (seat, thread) in seats.iter_mut().zip(threads) {
            seat.thread = Some(thread);
        }
        Ok((Self { seats, taken: 0 }, confinement))
    }

    /// Runs `vcpu` on the next thread.
    ///
    /// # Errors
    /// [`VmError::NoReason`] if all threads have a vCPU or a thread has panicked, which is a bug.
    fn run(&mut self, vcpu: Vcpu) -> Result<(), VmError> {
        let seat = self.seats.get(self.taken).and_then(|seat| seat.vcpus.as_ref());
        let vcpus = seat.ok_or(VmError::NoReason)?;
        vcpus.send(vcpu).map_err(|_| VmError::NoReason)?;
        self.taken += 1;
        Ok(())
    }

    /// Kicks the vCPUs out of the guest, and waits until they have stopped. Call this after the end of the run has been
    /// announced.
    pub(super) fn stop(&mut self, threads: &vpmu_kvm::Threads) {
        let seats = self.seats.iter().take(self.taken);
        for (vcpu, _) in (0..).zip(seats.clone()) {
            // The kick fails if the vCPU has no thread yet. That vCPU checks for the end before it enters the guest.
            if let Err(error) = threads.kick(vcpu) {
                log::debug!("vCPU {vcpu} is not in the guest: {error}");
            }
        }
        for seat in seats {
            if seat.ended.recv().is_err() {
                log::debug!("a vCPU thread panicked and has reported it");
            }
        }
        self.taken = 0;
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        for seat in &mut self.seats {
            seat.vcpus = None;
            let joined = seat.thread.take().map(JoinHandle::join);
            if let Some(Err(_)) = joined {
                log::debug!("a vCPU thread panicked and has reported it");
            }
        }
    }
}

fn open_stats(vcpu: &VcpuFd) -> Option<Stats> {
    Stats::open(vcpu).inspect_err(|error| log::info!("this KVM has no statistics: {error}")).ok()
}

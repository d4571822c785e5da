//! One boot of the guest: a VM of KVM's and its vCPUs, new each time, and the threads that they run on.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use kvm_bindings::CpuId;
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::signal::Killable;

use super::VmError;
use crate::arch::{cpuid, regs};
use crate::confine::{ConfineError, Confinement, ThreadKind};
use crate::kvm;
use crate::memory;
use crate::msrs::{self, MsrDevice};
use crate::signal;
use crate::stats::Stats;
use crate::vcpu::{self, RunPage, Shared, Vcpu};

/// A VM and its vCPUs, which have not run yet.
#[derive(Debug)]
pub(super) struct Boot {
    // The order is that of the drop.
    vcpus: Vec<VcpuFd>,
    pub(super) vm: VmFd,
    /// The guest's TSC frequency in kHz.
    pub(super) tsc_khz: u32,
    can_sync: bool,
}

/// Guest TSC minus host TSC of each vCPU; `None` where this KVM does not tell.
pub(super) type TscOffsets = Vec<Option<u64>>;

impl Boot {
    /// A VM that reaches `memories`, with `count` vCPUs whose registers in `msrs` KVM does not answer.
    ///
    /// # Errors
    /// [`VmError`]: KVM refuses something.
    pub(super) fn new(
        kvm: &Kvm,
        count: u8,
        memories: &[&GuestMemoryMmap],
        msrs: Option<&dyn MsrDevice>,
    ) -> Result<Self, VmError> {
        let vm = kvm::create(kvm)?;
        if let Some(device) = msrs {
            msrs::trap(&vm, device)?;
        }
        memory::register(&vm, memories)?;
        let supported = kvm::supported_cpuid(kvm)?;
        let mut vcpus = Vec::with_capacity(usize::from(count));
        let mut tsc_khz = 0;
        for index in 0..count {
            let fd = vm
                .create_vcpu(u64::from(index))
                .map_err(kvm::KvmError::refused("create a vCPU"))?;
            tsc_khz = fd
                .get_tsc_khz()
                .map_err(kvm::KvmError::refused("tell the TSC frequency"))?;
            let cpu = cpuid::Cpu {
                index,
                count,
                tsc_khz,
                tsc_deadline: kvm.check_extension(Cap::TscDeadlineTimer),
            };
            let mut leaves = cpuid::leaves(&supported, &cpu).map_err(VmError::Cpuid)?;
            if let Some(device) = msrs {
                let mut entries = leaves.as_slice().to_vec();
                device.describe(&mut entries);
                leaves = CpuId::from_entries(&entries).map_err(VmError::Cpuid)?;
            }
            fd.set_cpuid2(&leaves)
                .map_err(kvm::KvmError::refused("take our CPUID leaves"))?;
            regs::prepare(&fd)?;
            vcpus.push(fd);
        }
        Ok(Self {
            vcpus,
            vm,
            tsc_khz,
            can_sync: kvm::syncs_registers(kvm),
        })
    }

    /// Makes the first vCPU the one that boots, at `entry`.
    ///
    /// # Errors
    /// [`VmError::Registers`].
    pub(super) fn enter_at(&self, entry: u64) -> Result<(), VmError> {
        match self.vcpus.first() {
            Some(first) => Ok(regs::enter(first, entry)?),
            None => Ok(()),
        }
    }

    /// KVM's statistics of each vCPU, where this KVM has some.
    pub(super) fn stats(&self) -> Vec<Option<Stats>> {
        self.vcpus.iter().map(open_stats).collect()
    }

    pub(super) fn tsc_offsets(&self) -> TscOffsets {
        let told = self.vcpus.iter().map(vcpu::tsc_offset);
        told.map(|offset| {
            offset
                .inspect_err(|error| log::debug!("no TSC offset: {error}"))
                .ok()
        })
        .collect()
    }

    /// The guest's time goes on from the boot that had `offsets`.
    pub(super) fn keep_time(&self, offsets: &TscOffsets) {
        for (vcpu, offset) in self.vcpus.iter().zip(offsets) {
            // A KVM that does not tell is one that times of records do not follow either.
            if let Some(offset) = offset
                && let Err(error) = vcpu::set_tsc_offset(vcpu, *offset)
            {
                log::warn!("the guest's time begins anew: KVM does not keep it: {error}");
            }
        }
    }

    /// Has the vCPUs run on `threads`.
    ///
    /// # Errors
    /// [`VmError::Vcpu`], [`VmError::NoReason`]; what has been started then is to be stopped all the
    /// same.
    pub(super) fn start(
        &mut self,
        shared: &Arc<Shared>,
        threads: &mut Threads,
    ) -> Result<(), VmError> {
        let size = self.vm.run_size();
        for (index, fd) in (0u32..).zip(self.vcpus.drain(..)) {
            let page = RunPage::map(&fd, size)?;
            let vcpu = Vcpu::new(index, fd, page, self.can_sync, Arc::clone(shared));
            threads.run(vcpu)?;
        }
        Ok(())
    }
}

/// The threads that vCPUs run on. They are made once: a guest that boots again has new vCPUs on the same
/// threads, as nobody may make a thread any more.
#[derive(Debug)]
pub(super) struct Threads {
    seats: Vec<Seat>,
    /// Of them, the first so many run a vCPU.
    taken: usize,
}

/// A thread for one vCPU at a time.
#[derive(Debug)]
struct Seat {
    /// `None` when no more vCPUs come.
    vcpus: Option<SyncSender<Vcpu>>,
    /// Receives when a vCPU has ended.
    ended: Receiver<()>,
    thread: Option<JoinHandle<()>>,
}

impl Threads {
    /// So many threads, confined, which wait for their vCPUs.
    ///
    /// # Errors
    /// As [`Confinement::spawn`].
    pub(super) fn new(count: u8, confinement: &Confinement) -> Result<Self, ConfineError> {
        let seats = (0..count).map(|index| {
            let (vcpus, given) = sync_channel::<Vcpu>(1);
            let (tell, ended) = sync_channel(1);
            let name = format!("vcpu{index}");
            let thread = confinement.spawn(ThreadKind::Vcpu, name, move || {
                for vcpu in given {
                    vcpu.run();
                    if tell.send(()).is_err() {
                        break;
                    }
                }
            })?;
            Ok(Seat {
                vcpus: Some(vcpus),
                ended,
                thread: Some(thread),
            })
        });
        Ok(Self {
            seats: seats.collect::<Result<_, ConfineError>>()?,
            taken: 0,
        })
    }

    /// Runs `vcpu` on the next thread.
    ///
    /// # Errors
    /// [`VmError::NoReason`]: there is none, a mistake of ours.
    fn run(&mut self, vcpu: Vcpu) -> Result<(), VmError> {
        let seat = self
            .seats
            .get(self.taken)
            .and_then(|seat| seat.vcpus.as_ref());
        let vcpus = seat.ok_or(VmError::NoReason)?;
        vcpus.send(vcpu).map_err(|_| VmError::NoReason)?;
        self.taken += 1;
        Ok(())
    }

    /// The end is announced: whoever is in the guest is called out of it, and no vCPU is left.
    pub(super) fn stop(&mut self) {
        let seats = self.seats.iter().take(self.taken);
        for seat in seats.clone() {
            let kicked = seat
                .thread
                .as_ref()
                .map(|it| it.kill(signal::kick_signal()));
            if let Some(Err(error)) = kicked {
                log::debug!("a vCPU thread is gone already: {error}");
            }
        }
        for seat in seats {
            if seat.ended.recv().is_err() {
                log::debug!("a vCPU thread panicked, and has said so");
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
                log::debug!("a vCPU thread panicked, and has said so");
            }
        }
    }
}

fn open_stats(vcpu: &VcpuFd) -> Option<Stats> {
    Stats::open(vcpu)
        .inspect_err(|error| log::info!("this KVM has no statistics: {error}"))
        .ok()
}

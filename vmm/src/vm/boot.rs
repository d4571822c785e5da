//! One boot of the guest: a VM of KVM's and its vCPUs, new each time, up to the end of its threads.

use std::sync::Arc;
use std::thread::{self, JoinHandle};

use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::signal::Killable;

use super::VmError;
use crate::arch::{cpuid, regs};
use crate::kvm;
use crate::memory;
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
    /// A VM that reaches `memories`, with `count` vCPUs.
    ///
    /// # Errors
    /// [`VmError`]: KVM refuses something.
    pub(super) fn new(
        kvm: &Kvm,
        count: u8,
        memories: &[&GuestMemoryMmap],
    ) -> Result<Self, VmError> {
        let vm = kvm::create(kvm)?;
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
            let leaves = cpuid::leaves(&supported, &cpu).map_err(VmError::Cpuid)?;
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

    /// Starts the vCPUs' threads.
    ///
    /// # Errors
    /// [`VmError::Vcpu`], [`VmError::Host`]; what has been started then is to be stopped all the same.
    pub(super) fn start(
        &mut self,
        shared: &Arc<Shared>,
        into: &mut Threads,
    ) -> Result<(), VmError> {
        let size = self.vm.run_size();
        for (index, fd) in (0u32..).zip(self.vcpus.drain(..)) {
            let page = RunPage::map(&fd, size)?;
            let vcpu = Vcpu::new(index, fd, page, self.can_sync, Arc::clone(shared));
            let thread = thread::Builder::new().name(format!("vcpu{index}"));
            let thread = thread
                .spawn(move || vcpu.run())
                .map_err(|source| VmError::Host("threads", source))?;
            into.0.push(thread);
        }
        Ok(())
    }
}

/// The threads of vCPUs that run.
#[derive(Debug, Default)]
pub(super) struct Threads(Vec<JoinHandle<()>>);

impl Threads {
    /// The end is announced: whoever is in the guest is called out of it.
    pub(super) fn stop(self) {
        for thread in &self.0 {
            if let Err(error) = thread.kill(signal::kick_signal()) {
                log::debug!("a vCPU thread is gone already: {error}");
            }
        }
        for thread in self.0 {
            if thread.join().is_err() {
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

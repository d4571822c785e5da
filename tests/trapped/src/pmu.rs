//! The emulated PMU: its registers, and its overflow interrupt.

use std::error::Error;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use kvm_bindings::kvm_cpuid_entry2;
use kvm_ioctls::VcpuFd;
use vm_memory::GuestMemoryMmap;
use vmm::arch::msrs::{MsrDevice, VcpuMsrs};

use crate::counter::Clock;
use crate::layout::{Layout, Register, WIDTH};
use crate::rdpmc;

const SELECT_INTERRUPT: u64 = 1 << 20;
const SELECT_ENABLE: u64 = 1 << 22;
/// Number of bits that each fixed counter has in the common control register. They select its modes and its interrupt.
const FIXED_BITS: usize = 4;
const FIXED_MODES: u64 = 3;
const FIXED_INTERRUPT: u64 = 1 << 3;
const OVERFLOW: u64 = 1 << WIDTH;
const VALUE: u64 = OVERFLOW - 1;

/// The local APIC's register for the performance counters' interrupt.
const APIC_LVTPC: usize = 0x340;
const LVT_MASKED: u32 = 1 << 16;
const LVT_MODE: u32 = 7 << 8;
const LVT_NMI: u32 = 4 << 8;

/// The guest memory that contains the kernel, or `None` after the kernel has been patched. The kernel is patched when
/// the guest first reads a register. This is early enough, because the guest's driver probes the registers before it
/// uses RDPMC.
type Unchanged = Arc<Mutex<Option<GuestMemoryMmap>>>;

/// The PMU of every vCPU of a machine.
#[derive(Debug)]
pub(crate) struct TrappedPmu {
    layout: Layout,
    unchanged: Unchanged,
}

impl TrappedPmu {
    pub(crate) fn new(layout: Layout) -> Self {
        Self { layout, unchanged: Unchanged::default() }
    }
}

/// Patches the kernel, unless it has already been patched.
fn change(unchanged: &Unchanged) -> io::Result<()> {
    let mut unchanged = unchanged.lock().unwrap_or_else(PoisonError::into_inner);
    match unchanged.take() {
        Some(memory) => rdpmc::replace(&memory).map_err(io::Error::other),
        None => Ok(()),
    }
}

impl MsrDevice for TrappedPmu {
    fn ranges(&self) -> Vec<Range<u32>> {
        self.layout.ranges()
    }

    fn describe(&self, leaves: &mut Vec<kvm_cpuid_entry2>) {
        self.layout.describe(leaves);
    }

    fn loaded(&self, memory: &GuestMemoryMmap) -> Result<(), Box<dyn Error + Send + Sync>> {
        let mut unchanged = self.unchanged.lock();
        let unchanged = unchanged.as_mut().map_err(|error| error.to_string())?;
        **unchanged = Some(memory.clone());
        Ok(())
    }

    fn vcpu(&self, _index: u32) -> io::Result<Box<dyn VcpuMsrs>> {
        let counters = (0..self.layout.counters()).map(|_| Counter::new());
        Ok(Box::new(VcpuPmu {
            layout: self.layout,
            unchanged: Arc::clone(&self.unchanged),
            counters: counters.collect::<io::Result<_>>()?,
            fixed_control: 0,
            control: 0,
            status: 0,
            interrupt: false,
            failed: None,
        }))
    }
}

#[derive(Debug)]
struct Counter {
    clock: Clock,
    select: u64,
    /// The counter's value at the time when the clock was at `since`.
    value: u64,
    since: u64,
    counting: bool,
}

impl Counter {
    fn new() -> io::Result<Self> {
        Ok(Self { clock: Clock::open()?, select: 0, value: 0, since: 0, counting: false })
    }

    /// Updates the count. Returns whether the counter has overflowed since the last update.
    fn update(&mut self) -> io::Result<bool> {
        if !self.counting {
            return Ok(false);
        }
        let announced = self.clock.overflowed();
        let now = self.clock.read()?;
        let mut value = self.value + (now - self.since);
        if announced {
            // The timer may be slightly ahead of the clock.
            value = value.max(OVERFLOW);
        }
        let overflowed = value >= OVERFLOW;
        if overflowed {
            // The overflow counts only once, even if the timer is late.
            self.clock.disarm()?;
        }
        self.since = now;
        self.value = value & VALUE;
        Ok(overflowed)
    }

    /// Sets the count and clears a pending overflow.
    fn set(&mut self, value: u64) -> io::Result<()> {
        self.value = value & VALUE;
        self.since = self.clock.read()?;
        if self.counting {
            self.clock.start(OVERFLOW - self.value)?;
        }
        Ok(())
    }

    /// Starts or stops the counter. Returns whether it has overflowed.
    fn count(&mut self, on: bool) -> io::Result<bool> {
        match (self.counting, on) {
            (false, true) => {
                self.since = self.clock.read()?;
                self.clock.start(OVERFLOW - self.value)?;
                self.counting = true;
                Ok(false)
            }
            (true, false) => {
                self.clock.stop()?;
                let overflowed = self.update()?;
                self.counting = false;
                Ok(overflowed)
            }
            _ => self.update(),
        }
    }
}

/// The PMU of a vCPU.
#[derive(Debug)]
struct VcpuPmu {
    layout: Layout,
    unchanged: Unchanged,
    counters: Vec<Counter>,
    fixed_control: u64,
    control: u64,
    status: u64,
    /// Whether an overflow interrupt is pending.
    interrupt: bool,
    /// An error from the host that occurred while a register was read or written.
    failed: Option<io::Error>,
}

impl VcpuPmu {
    /// Notes overflows.
    fn update(&mut self) -> io::Result<()> {
        self.each(|_, counter| counter.update())
    }

    /// Starts and stops counters according to the registers.
    fn apply(&mut self) -> io::Result<()> {
        let control = match self.layout.has_control() {
            true => self.control,
            false => u64::MAX,
        };
        let layout = self.layout;
        self.each(|index, counter| {
            let allowed = control & layout.bit(index) != 0;
            counter.count(allowed && counter.select & SELECT_ENABLE != 0)
        })
    }

    /// Calls `act` on each counter, and notes the overflows that `act` returns.
    fn each(&mut self, mut act: impl FnMut(usize, &mut Counter) -> io::Result<bool>) -> io::Result<()> {
        for (index, counter) in self.counters.iter_mut().enumerate() {
            if act(index, counter)? {
                self.status |= self.layout.bit(index);
                self.interrupt |= counter.select & SELECT_INTERRUPT != 0;
            }
        }
        Ok(())
    }

    fn get(&mut self, register: Register) -> io::Result<u64> {
        change(&self.unchanged)?;
        self.update()?;
        Ok(match register {
            Register::Select(index) => self.counters[index].select,
            Register::Counter(index) => self.counters[index].value,
            Register::FixedControl => self.fixed_control,
            Register::Control => self.control,
            Register::Status => self.status,
            Register::StatusClear => 0,
        })
    }

    fn set(&mut self, register: Register, value: u64) -> io::Result<()> {
        match register {
            Register::Select(index) => {
                self.counters[index].select = value;
                self.apply()
            }
            Register::Counter(index) => self.counters[index].set(value),
            Register::FixedControl => {
                self.fixed_control = value;
                let fixed = self.layout.fixed() as usize;
                let general = self.counters.len() - fixed;
                for (index, counter) in self.counters.iter_mut().skip(general).enumerate() {
                    let bits = value >> (FIXED_BITS * index);
                    let flag = |mask, flag| if bits & mask != 0 { flag } else { 0 };
                    counter.select = flag(FIXED_MODES, SELECT_ENABLE) | flag(FIXED_INTERRUPT, SELECT_INTERRUPT);
                }
                self.apply()
            }
            Register::Control => {
                self.control = value;
                self.apply()
            }
            // Read-only: `StatusClear` clears its bits.
            Register::Status => Ok(()),
            Register::StatusClear => {
                self.status &= !value;
                Ok(())
            }
        }
    }
}

impl VcpuMsrs for VcpuPmu {
    fn read(&mut self, register: u32) -> Option<u64> {
        let register = self.layout.find(register)?;
        match self.get(register) {
            Ok(value) => Some(value),
            Err(error) => {
                self.failed = Some(error);
                None
            }
        }
    }

    fn write(&mut self, register: u32, value: u64) -> bool {
        let Some(register) = self.layout.find(register) else {
            return false;
        };
        let written = self.set(register, value);
        self.failed = written.err().or_else(|| self.failed.take());
        true
    }

    fn enter(&mut self, vcpu: &VcpuFd) -> io::Result<()> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        self.update()?;
        if self.interrupt {
            self.interrupt = false;
            let mode = lvtpc(vcpu)?;
            if mode & LVT_MASKED == 0 && mode & LVT_MODE == LVT_NMI {
                vcpu.nmi()?;
            }
        }
        Ok(())
    }
}

/// Reads the local APIC's register for the interrupt.
fn lvtpc(vcpu: &VcpuFd) -> io::Result<u32> {
    let apic = vcpu.get_lapic()?;
    let bytes = apic.regs.iter().skip(APIC_LVTPC).take(4);
    Ok(bytes.rev().fold(0, |word, byte| word << 8 | u32::from(byte.to_ne_bytes()[0])))
}

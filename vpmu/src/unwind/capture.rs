//! The parts of the vCPU's state that a sample contains if its event requests them: callers, registers and stack, in
//! perf's format.

use vpmu_orc::OrcTable;

use super::frames::{CONTEXT_KERNEL, CONTEXT_USER, Chain, kernel_callers, share_stack, user_callers};
use super::orc::{Slide, orc_callers};
use super::paging::{AddressSpace, Rights};
use crate::arch::{self, CpuState, GENERAL_REGS, IP, SAVED_WORDS, SP};
use crate::machine::GuestRegs;
use crate::memory::View;
use crate::record::Regs;

/// perf's `PERF_SAMPLE_REGS_ABI_*`.
const ABI_32: u64 = 1;
const ABI_64: u64 = 2;

/// A vCPU's state at an exit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CpuContext {
    pub(crate) regs: GuestRegs,
    /// The vCPU's whole state; `None` if no event needs it, or the hypervisor does not provide it.
    pub(crate) cpu: Option<CpuState>,
}

/// Selects the parts of the vCPU's state that an event's samples contain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct CaptureSpec {
    /// Call chains.
    pub(crate) chain: bool,
    /// Omit callers in the kernel.
    pub(crate) exclude_kernel: bool,
    /// Omit callers in user mode.
    pub(crate) exclude_user: bool,
    /// Maximum number of addresses in the chain.
    pub(crate) max_stack: u32,
    /// Mask of the user-mode registers. Zero selects no registers.
    pub(crate) regs_user: u64,
    /// Mask of registers at the overflow.
    pub(crate) regs_intr: u64,
    /// Bytes of the user stack.
    pub(crate) stack_user: u32,
}

impl CaptureSpec {
    /// Whether the samples need more than [`GuestRegs`].
    pub(crate) fn wants_state(&self) -> bool {
        self.chain || self.regs_user != 0 || self.regs_intr != 0 || self.stack_user != 0
    }
}

/// Registers in a record's format.
#[derive(Debug, Default)]
struct Shown {
    /// `PERF_SAMPLE_REGS_ABI_*`; zero without registers.
    abi: u64,
    /// The registers in the mask.
    values: Vec<u64>,
}

impl Shown {
    fn clear(&mut self) {
        self.abi = 0;
        self.values.clear();
    }

    fn set(&mut self, code64: bool, general: &[u64; GENERAL_REGS], mask: u64) {
        self.abi = if code64 { ABI_64 } else { ABI_32 };
        let wanted = (0..).zip(general).filter(|(bit, _)| mask >> bit & 1 != 0);
        self.values.extend(wanted.map(|(_, value)| *value));
    }

    fn get(&self) -> Option<Regs<'_>> {
        (self.abi != 0).then_some(Regs { abi: self.abi, values: &self.values })
    }
}

/// The state of a program, either its current state or the state in which it entered the kernel.
#[derive(Debug, Clone, Copy)]
struct UserState {
    general: [u64; GENERAL_REGS],
    code64: bool,
}

/// The captured parts of one sample. The value is reused, so that a new sample needs no allocation.
#[derive(Debug, Default)]
pub(crate) struct SampleCapture {
    chain: Chain,
    regs_user: Shown,
    regs_intr: Shown,
    stack: Vec<u8>,
    has_stack: bool,
    slide: Slide,
}

impl SampleCapture {
    /// The call chain. Each `PERF_CONTEXT_*` value in the chain specifies the mode of the addresses that follow.
    pub(crate) fn chain(&self) -> &[u64] {
        self.chain.entries()
    }

    /// The user-mode registers; `None` if they are unknown, or if the task is a kernel thread.
    pub(crate) fn regs_user(&self) -> Option<Regs<'_>> {
        self.regs_user.get()
    }

    /// Registers at the overflow; `None` if the hypervisor does not provide them.
    pub(crate) fn regs_intr(&self) -> Option<Regs<'_>> {
        self.regs_intr.get()
    }

    /// The readable part of the user stack; `None` in the same cases as [`SampleCapture::regs_user`].
    pub(crate) fn stack(&self) -> Option<&[u8]> {
        self.has_stack.then_some(&self.stack)
    }

    /// Captures the guest's state at `place`. `user_regs` is the address at which the guest's kernel saved the
    /// user registers of the running task, or zero. `orc` has the tables of the guest's kernel, if it has no frame
    /// pointers.
    pub(crate) fn take(
        &mut self,
        memory: &View<'_>,
        place: &CpuContext,
        user_regs: u64,
        spec: &CaptureSpec,
        orc: Option<&OrcTable>,
    ) {
        let cpu = place.cpu.as_ref();
        self.regs_user.clear();
        self.regs_intr.clear();
        self.stack.clear();
        self.has_stack = false;
        self.chain.begin(if spec.chain { spec.max_stack } else { 0 });
        let mut space = cpu.and_then(|cpu| AddressSpace::new(memory, cpu));
        let user = match (cpu, &mut space) {
            (Some(cpu), _) if cpu.user => Some(UserState { general: cpu.general, code64: cpu.code64 }),
            (Some(cpu), Some(space)) => saved(space, cpu, user_regs),
            _ => None,
        };
        if spec.chain {
            self.callers(&mut space, place, user, user_regs, spec, orc);
        }
        if let Some(cpu) = cpu
            && spec.regs_intr != 0
        {
            self.regs_intr.set(cpu.code64, &cpu.general, spec.regs_intr);
        }
        let Some(user) = user else {
            return;
        };
        if spec.regs_user != 0 {
            self.regs_user.set(user.code64, &user.general, spec.regs_user);
        }
        if spec.stack_user != 0 {
            self.has_stack = true;
            self.stack.resize(spec.stack_user as usize, 0);
            let sp = user.general[SP];
            let filled = space.map_or(0, |mut space| space.read(sp, Rights::User, &mut self.stack));
            self.stack.truncate(filled);
        }
    }

    fn callers(
        &mut self,
        space: &mut Option<AddressSpace<'_>>,
        place: &CpuContext,
        mut user: Option<UserState>,
        user_regs: u64,
        spec: &CaptureSpec,
        orc: Option<&OrcTable>,
    ) {
        let chain = &mut self.chain;
        let regs = place.regs;
        if !regs.user && !spec.exclude_kernel {
            chain.mark(CONTEXT_KERNEL);
            chain.push(regs.ip);
            if let (Some(space), Some(cpu)) = (&mut *space, &place.cpu) {
                if let Some(table) = orc {
                    let entry = orc_callers(space, chain, cpu, table, &mut self.slide);
                    // An interrupt runs on a stack of its own, but the chain leads to the task's stack.
                    let entry = entry.filter(|&at| at == user_regs);
                    user = user.or_else(|| entry.and_then(|at| registers_at(space, at)));
                } else {
                    let end = share_stack(cpu.general[SP], user_regs).then_some(user_regs);
                    kernel_callers(space, chain, cpu, end);
                }
            }
        }
        if spec.exclude_user {
            return;
        }
        let ip = match user {
            _ if regs.user => regs.ip,
            Some(user) => user.general[IP],
            None => return,
        };
        chain.mark(CONTEXT_USER);
        chain.push(ip);
        if let (Some(space), Some(user)) = (space, user) {
            user_callers(space, chain, &user.general, user.code64);
        }
    }
}

/// Returns the registers with which the running task entered the kernel, if they are on the current kernel stack, above
/// the stack pointer. During a task switch, `user_regs` may already be the address of the next task's registers, while
/// the kernel still runs on the stack and in the address space of the previous task. A sample must not attribute one
/// task's registers to the other task.
fn saved(space: &mut AddressSpace<'_>, cpu: &CpuState, user_regs: u64) -> Option<UserState> {
    let sp = cpu.general[SP];
    let here = share_stack(sp, user_regs) && sp <= user_regs && user_regs.is_multiple_of(8);
    if !here {
        return None;
    }
    registers_at(space, user_regs)
}

/// Returns the registers of a program that the kernel saved at `address`.
fn registers_at(space: &mut AddressSpace<'_>, address: u64) -> Option<UserState> {
    let words: [[u8; 8]; SAVED_WORDS] = space.words(address, Rights::Kernel)?;
    let (general, code64) = arch::saved(words.map(u64::from_le_bytes))?;
    Some(UserState { general, code64 })
}

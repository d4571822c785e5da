//! Compiles the rules to filters for the kernel, and handles refused calls. A thread that makes a refused call gets
//! SIGSYS. The signal handler reports the call and ends the process. If the handler cannot run, the kernel ends the
//! process.

#![expect(unsafe_code, reason = "a signal handler reads its arguments, writes and exits")]

use std::cell::Cell;
use std::collections::BTreeMap;

use libc::{c_int, c_void, siginfo_t};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};
use vmm_sys_util::signal::register_signal_handler;
use vpmu::confine::Argument;

use super::rules::{self, Plan, Rule};
use super::{ConfineError, ThreadKind};
use crate::arch::calls;
use crate::exit::EXIT_REFUSED_CALL;
use crate::terminal;

/// A filter for each kind of thread.
#[derive(Debug)]
pub(super) struct Filters(BTreeMap<ThreadKind, BpfProgram>);

thread_local! {
    /// The kind of this thread. It is set just before the thread's filter is installed.
    static KIND: Cell<Option<ThreadKind>> = const { Cell::new(None) };
}

impl Filters {
    /// Makes a filter for every kind of thread, and installs the handlers that report refused calls and panics.
    pub(super) fn prepare(plan: &Plan) -> Result<Self, ConfineError> {
        report_refused_calls()?;
        report_panics();
        Self::compile(plan)
    }

    fn compile(plan: &Plan) -> Result<Self, ConfineError> {
        let filters = ThreadKind::ALL.into_iter().map(|kind| {
            let program = program(&rules::of(kind, plan));
            let thread = kind.name();
            let program = program.map_err(|source| ConfineError::Filter { thread, source })?;
            Ok((kind, program))
        });
        Ok(Self(filters.collect::<Result<_, _>>()?))
    }

    /// Installs the filter of `kind` on the calling thread.
    pub(super) fn install(&self, kind: ThreadKind) -> Result<(), ConfineError> {
        KIND.set(Some(kind));
        let none = BpfProgram::new();
        // Every kind of thread has a filter program, so `none` is never used. `apply_filter` would refuse `none`,
        // because it is empty.
        let program = self.0.get(&kind).unwrap_or(&none);
        seccompiler::apply_filter(program).map_err(ConfineError::Install)
    }
}

/// Compiles a list of rules to a BPF program for the kernel.
fn program(rules: &[Rule]) -> Result<BpfProgram, BackendError> {
    let mut chains: BTreeMap<i64, Option<Vec<SeccompRule>>> = BTreeMap::new();
    for rule in rules {
        let chain = chains.entry(rule.number).or_insert_with(|| Some(Vec::new()));
        if rule.arguments.is_empty() {
            // This rule allows any arguments, so it replaces all other rules for the call.
            *chain = None;
        } else if let Some(chain) = chain {
            let conditions = rule.arguments.iter().map(condition);
            let made = SeccompRule::new(conditions.collect::<Result<_, _>>()?)?;
            if !chain.contains(&made) {
                chain.push(made);
            }
        }
    }
    let chains = chains.into_iter().map(|(number, chain)| (number, chain.unwrap_or_default()));
    let filter = SeccompFilter::new(
        chains.collect(),
        SeccompAction::Trap,
        SeccompAction::Allow,
        std::env::consts::ARCH.try_into()?,
    )?;
    filter.try_into()
}

fn condition(argument: &Argument) -> Result<SeccompCondition, BackendError> {
    let Argument { index, mask, value } = *argument;
    let length = if mask > u64::from(u32::MAX) { SeccompCmpArgLen::Qword } else { SeccompCmpArgLen::Dword };
    SeccompCondition::new(index, length, SeccompCmpOp::MaskedEq(mask), value)
}

fn report_refused_calls() -> Result<(), ConfineError> {
    register_signal_handler(libc::SIGSYS, on_refused).map_err(ConfineError::Handler)
}

/// Reports panics without a backtrace, because printing a backtrace would open files.
fn report_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("unnamed");
        eprintln!("vmm: thread {name}: {panic}; for a backtrace, run with --no-seccomp");
    }));
}

/// Index of the field `si_syscall` in the `siginfo_t` of a SIGSYS, counted in `c_int`s. `libc` does not define
/// this field.
const SI_SYSCALL: usize = 6;

/// Reports the refused call and ends the process.
extern "C" fn on_refused(_signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let number = info.cast::<c_int>().wrapping_add(SI_SYSCALL);
    // SAFETY: the kernel passes the handler a pointer to a whole `siginfo_t`, and this word is inside it.
    let number = unsafe { number.read() };
    // SAFETY: the context comes from the kernel, and this handler has not returned.
    let second = unsafe { calls::second_argument(context) };
    terminal::restore();
    let mut line = Line::new();
    line.text("vmm: ");
    line.text(KIND.get().map_or("unknown", ThreadKind::name));
    line.text(" thread: system call ");
    line.number(u64::from(number.unsigned_abs()), 10);
    let name = usize::try_from(number).ok().and_then(syscalls::Sysno::new);
    if let Some(name) = name {
        line.text(" (");
        line.text(name.name());
        line.text(")");
    }
    line.text(", second argument 0x");
    line.number(second, 16);
    line.text(", is refused by its seccomp filter; please report this. --no-seccomp runs without filters\n");
    let bytes = line.bytes();
    // SAFETY: the kernel reads the bytes only during the call.
    unsafe { libc::write(libc::STDERR_FILENO, bytes.as_ptr().cast(), bytes.len()) };
    // SAFETY: the call ends the process immediately, and is allowed in a signal handler.
    unsafe { libc::_exit(EXIT_REFUSED_CALL.into()) }
}

/// A line of text in a fixed buffer. The signal handler must not allocate, because it may have interrupted the
/// allocator.
struct Line {
    bytes: [u8; 256],
    length: usize,
}

impl Line {
    fn new() -> Self {
        Self { bytes: [0; 256], length: 0 }
    }

    /// Appends as much of `text` as fits.
    fn text(&mut self, text: &str) {
        for byte in text.bytes() {
            if let Some(place) = self.bytes.get_mut(self.length) {
                *place = byte;
                self.length += 1;
            }
        }
    }

    fn number(&mut self, number: u64, base: u64) {
        if number >= base {
            self.number(number / base, base);
        }
        let digit = u32::try_from(number % base).ok();
        let base = u32::try_from(base).unwrap_or(10);
        let digit = digit.and_then(|digit| char::from_digit(digit, base));
        self.text(digit.unwrap_or('?').encode_utf8(&mut [0; 4]));
    }

    fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests;

//! The description of a system call for a filter. The host module describes its own calls, and
//! [`confine`](crate::confine) lists all of them.

use libc::{c_int, c_long};

/// The process that a filter is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// The process's id.
    pub id: u32,
    /// The ids of the vCPUs' threads. The device opens events on these threads, and on no others except the thread that
    /// probes the host's events.
    pub vcpus: Vec<u32>,
    /// The signal of overflows, as given to [`PerfSource::confined`](crate::host::PerfSource::confined). `None` for
    /// [`PerfSource::remote`](crate::host::PerfSource::remote), which must signal no thread.
    pub signal: Option<c_int>,
}

/// A required system call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// The call's number on this architecture.
    pub number: c_long,
    /// The call's name.
    pub name: &'static str,
    /// Conditions on the call's arguments. All of them must hold.
    pub arguments: Vec<Argument>,
    /// Why the thread makes the call.
    pub reason: &'static str,
}

/// A condition on an argument: `argument & mask == value`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Argument {
    /// Index of the argument, from 0.
    pub index: u8,
    /// The bits to compare. For an `int`, these are the low 32 bits.
    pub mask: u64,
    /// The value of these bits.
    pub value: u64,
}

impl Argument {
    /// Requires the `int` at `index` to be `value`.
    #[must_use]
    pub const fn int(index: u8, value: u32) -> Self {
        Self { index, mask: u32::MAX as u64, value: value as u64 }
    }

    /// Requires the `int` at `index` to have none of `bits`.
    #[must_use]
    pub const fn without(index: u8, bits: c_int) -> Self {
        Self { index, mask: bits.cast_unsigned() as u64, value: 0 }
    }

    /// Requires the pointer at `index` to be null.
    #[must_use]
    pub const fn null(index: u8) -> Self {
        Self { index, mask: u64::MAX, value: 0 }
    }
}

macro_rules! call {
    ($name:ident, $number:ident, [$($argument:expr),*], $reason:literal) => {
        Call {
            number: libc::$number,
            name: stringify!($name),
            arguments: vec![$($argument),*],
            reason: $reason,
        }
    };
}
pub(crate) use call;

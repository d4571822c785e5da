//! The running task, reported by the driver without an exit.

use zerocopy::little_endian::{U32, U64};

wire! {
    /// The running and previous tasks of a vCPU; the driver updates the page at each task switch,
    /// and the device reads it.
    pub struct TaskPage {
        /// Process id. `pid` and `tid` are one aligned 64-bit word, written and read as a whole.
        pub pid: U32,
        /// Thread id.
        pub tid: U32,
        /// Guest-virtual address of the `struct pt_regs` in which the guest's kernel saved the task's user
        /// registers; zero for a task without user registers.
        pub user_regs: U64,
        /// Number of switches written to `history`; incremented with release semantics after the
        /// entry is written.
        pub switches: U64,
        /// Zero.
        pub reserved: U64,
        /// The last switches: the entry of switch n, counted from 0, is n modulo [`TASK_HISTORY`].
        pub history: [TaskSwitch; TASK_HISTORY],
    }
}

/// Entries of [`TaskPage::history`].
pub const TASK_HISTORY: usize = 254;

wire! {
    /// One task switch: the task that started to run, and when.
    pub struct TaskSwitch {
        /// Process id.
        pub pid: U32,
        /// Thread id.
        pub tid: U32,
        /// Guest TSC at the switch.
        pub since: U64,
    }
}

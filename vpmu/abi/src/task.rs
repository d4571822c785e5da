//! The running task, reported by the driver without an exit.

use zerocopy::little_endian::{U32, U64};

wire! {
    /// The running and previous tasks of a vCPU; the driver updates the page at each task switch,
    /// and the device reads it.
    pub struct TaskPage {
        /// Process id; in one aligned 64-bit word with `tid`, written and read as one.
        pub pid: U32,
        /// Thread id.
        pub tid: U32,
        /// Guest-virtual address of the user registers that the guest's kernel saved for the task,
        /// the architecture's `struct pt_regs`; zero for a task without user registers.
        pub user_regs: U64,
        /// Number of switches written to `history`; stored after the entry with release semantics.
        pub switches: U64,
        /// Zero.
        pub reserved: U64,
        /// The last switches: switch number n (from 0) is entry n modulo [`TASK_HISTORY`].
        pub history: [TaskSwitch; TASK_HISTORY],
    }
}

/// Entries of [`TaskPage::history`].
pub const TASK_HISTORY: usize = 254;

wire! {
    /// A task started to run.
    pub struct TaskSwitch {
        /// Process id.
        pub pid: U32,
        /// Thread id.
        pub tid: U32,
        /// Guest TSC at the switch.
        pub since: U64,
    }
}

//! The memory of the guest, and the tasks that it runs on one vCPU.

use crate::memory::{Memory, View};
use crate::tasks::{Task, TaskHistory, Tasks};

/// The guest's RAM, and where in it the vCPU's task page is.
#[derive(Debug, Default)]
pub(super) struct Guest {
    /// The guest's RAM, as passed at activation.
    memory: Memory,
    tasks: Tasks,
}

impl Guest {
    /// Sets the guest's RAM when the device is activated, or drops it when the device is reset. The vCPU then has no
    /// task page.
    pub(super) fn set_memory(&mut self, memory: Memory) {
        *self = Self { memory, tasks: Tasks::default() };
    }

    /// Sets the vCPU's task page.
    pub(super) fn set_tasks(&mut self, tasks: Tasks) {
        self.tasks = tasks;
    }

    pub(super) fn tasks(&self) -> Tasks {
        self.tasks
    }

    /// The guest's RAM.
    pub(super) fn view(&self) -> View<'_> {
        self.memory.view()
    }

    /// The task that is running on the vCPU, according to the vCPU's task page.
    pub(super) fn running(&self) -> Task {
        self.tasks.running(&self.view())
    }

    /// The tasks that have run on the vCPU so far, as read from its task page.
    pub(super) fn history(&self) -> TaskHistory {
        self.tasks.history(&self.view())
    }

    /// The guest-virtual address of the running task's user registers. The guest can write any value, so check
    /// the address before use.
    pub(super) fn user_regs(&self) -> u64 {
        self.tasks.user_regs(&self.view())
    }
}

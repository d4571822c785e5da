//! Where an event counts, and for which task.

use crate::spec::Context;
use crate::tasks::Task;

/// An event's context, and the task that it follows.
#[derive(Debug)]
pub(crate) struct Schedule {
    pub(crate) context: Context,
    /// The task that was last scheduled in. An overflow found while this task is being switched out belongs to
    /// this task, although the task page already names the next one. `None` for an event of a vCPU.
    pub(crate) task: Option<Task>,
    /// The last vCPU that the event's task ran on. Records that are written after the task has left this vCPU still
    /// contain the vCPU's number.
    pub(super) last_vcpu: u32,
}

impl Schedule {
    pub(super) fn new(context: Context) -> Self {
        Self { context, task: None, last_vcpu: 0 }
    }

    /// The vCPU on which the event would count if it were enabled.
    pub(crate) fn on(&self) -> Option<u32> {
        match self.context {
            Context::Vcpu(vcpu) => Some(vcpu),
            Context::Task(vcpu) => vcpu,
        }
    }

    /// The vCPU in the event's records.
    pub(crate) fn recorded(&self) -> u32 {
        self.on().unwrap_or(self.last_vcpu)
    }

    /// Whether the event is a task event that is scheduled in on `vcpu`.
    pub(crate) fn is_in_on(&self, vcpu: u32) -> bool {
        self.context == Context::Task(Some(vcpu))
    }

    /// Schedules a task event in on `vcpu`, which runs `task`. Returns `false` and changes nothing if the event is
    /// scheduled in already, or is not a task event. The caller must start the event.
    pub(crate) fn schedule_in(&mut self, vcpu: u32, task: Task) -> bool {
        let is_out = self.context == Context::Task(None);
        if is_out {
            self.context = Context::Task(Some(vcpu));
            self.task = Some(task);
            self.last_vcpu = vcpu;
        }
        is_out
    }

    /// Schedules a task event out. The caller must stop the event.
    pub(crate) fn schedule_out(&mut self) {
        self.context = Context::Task(None);
    }
}

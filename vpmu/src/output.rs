//! Where overflows go: the rings, who runs on each vCPU, and the notices that are due. Knows
//! events by their facts alone.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use vm_memory::{GuestAddress, GuestMemoryMmap};

use crate::abi::{NOTICE_ERROR, NOTICE_WAKEUP, Notice};
use crate::event::Facts;
use crate::machine::GuestRegs;
use crate::record::{MISC_KERNEL, MISC_UNKNOWN, MISC_USER, Origin, Record, SAMPLE_IP, Sample};
use crate::ring::{Author, Face, Ring};
use crate::tasks::{Task, Tasks};

/// What is the same for every sample that one exit makes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moment {
    pub(crate) vcpu: u32,
    /// Guest nanoseconds.
    pub(crate) time: u64,
    pub(crate) regs: Option<GuestRegs>,
}

/// Rings and notices of one activation.
#[derive(Debug)]
pub(crate) struct Output {
    memory: Arc<GuestMemoryMmap>,
    rings: BTreeMap<u64, Ring>,
    tasks: Tasks,
    due: VecDeque<Notice>,
    /// Events whose wakeup is among `due`.
    waking: BTreeSet<u64>,
    record: Record,
    pub(crate) tally: Tally,
}

/// What became of samples since the activation.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tally {
    pub(crate) written: u64,
    pub(crate) lost: u64,
    pub(crate) wakeups: u64,
}

impl Output {
    pub(crate) fn new(memory: Arc<GuestMemoryMmap>, vcpus: usize) -> Self {
        Self {
            memory,
            rings: BTreeMap::new(),
            tasks: Tasks::new(vcpus),
            due: VecDeque::new(),
            waking: BTreeSet::new(),
            record: Record::default(),
            tally: Tally::default(),
        }
    }

    pub(crate) fn memory(&self) -> &Arc<GuestMemoryMmap> {
        &self.memory
    }

    /// `vcpu` is in range, the address checked.
    pub(crate) fn set_task_page(&mut self, vcpu: u32, page: Option<GuestAddress>) {
        self.tasks.set_page(vcpu, page);
    }

    pub(crate) fn has_ring(&self, owner: u64) -> bool {
        self.rings.contains_key(&owner)
    }

    /// Guest pages that rings hold.
    pub(crate) fn pages(&self) -> usize {
        self.rings.values().map(Ring::pages).sum()
    }

    pub(crate) fn add_ring(&mut self, owner: u64, ring: Ring) {
        self.rings.insert(owner, ring);
    }

    /// Takes a ring away; whether there was one.
    pub(crate) fn remove_ring(&mut self, owner: u64) -> bool {
        self.rings.remove(&owner).is_some()
    }

    /// Forgets what is due for an event that is gone.
    pub(crate) fn forget(&mut self, event: u64) {
        self.waking.remove(&event);
        self.due.retain(|notice| notice.event.get() != event);
    }

    /// Writes one overflow of an event to its ring, or counts it as lost. `task` is whose it
    /// is; `None`: of whoever runs on the vCPU.
    pub(crate) fn sample(
        &mut self,
        facts: &Facts,
        period: u64,
        task: Option<Task>,
        moment: &Moment,
    ) {
        // A record without the IP that was asked for would be a lie, and one from the mode that
        // is excluded a leak: the overflow came there, but the exit that found it came later.
        let tells = moment.regs.is_some_and(|regs| match regs.user {
            true => !facts.exclude_user,
            false => !facts.exclude_kernel,
        });
        if !tells && facts.sample_type & SAMPLE_IP != 0 {
            return self.lose(facts, 1);
        }
        let Task { pid, tid } = task.unwrap_or_else(|| self.running(moment.vcpu));
        let Some(ring) = self.rings.get_mut(&facts.owner) else {
            self.tally.lost += 1;
            return;
        };
        let origin = Origin {
            pid,
            tid,
            time: moment.time,
            id: facts.owner,
            stream_id: facts.id,
            vcpu: moment.vcpu,
        };
        let sample = Sample {
            misc: match moment.regs {
                Some(GuestRegs { user: true, .. }) => MISC_USER,
                Some(GuestRegs { user: false, .. }) => MISC_KERNEL,
                None => MISC_UNKNOWN,
            },
            ip: moment.regs.map_or(0, |regs| regs.ip),
            period,
            ..Sample::default()
        };
        let layout = facts.layout();
        let author = Author {
            layout: &layout,
            origin: &origin,
            wakeup: facts.wakeup,
        };
        let outcome = match self.record.sample(&layout, &origin, &sample) {
            Ok(record) => ring.write(&self.memory, record, &author),
            Err(_) => ring.lose(1),
        };
        if outcome.written {
            self.tally.written += 1;
        } else {
            self.tally.lost += 1;
        }
        if outcome.wake {
            self.wake(facts.owner);
        }
    }

    /// Counts overflows that no record can be made of.
    pub(crate) fn lose(&mut self, facts: &Facts, overflows: u64) {
        if overflows == 0 {
            return;
        }
        self.tally.lost = self.tally.lost.saturating_add(overflows);
        let ring = self.rings.get_mut(&facts.owner);
        if ring.is_some_and(|ring| ring.lose(overflows).wake) {
            self.wake(facts.owner);
        }
    }

    /// Writes the pending loss of an event's ring if it fits.
    pub(crate) fn flush(&mut self, facts: &Facts) {
        let origin = Origin {
            id: facts.owner,
            stream_id: facts.id,
            ..Origin::default()
        };
        let layout = facts.layout();
        let author = Author {
            layout: &layout,
            origin: &origin,
            wakeup: facts.wakeup,
        };
        let ring = self.rings.get_mut(&facts.owner);
        if ring.is_some_and(|ring| ring.flush(&self.memory, &author)) {
            self.wake(facts.owner);
        }
    }

    /// Shows an event's figures in its own metadata page, if it has one.
    pub(crate) fn show(&mut self, event: u64, face: &Face) {
        if let Some(ring) = self.rings.get_mut(&event) {
            ring.show(&self.memory, face);
        }
    }

    /// An event is in error.
    pub(crate) fn report_error(&mut self, event: u64) {
        self.due.push_back(Notice {
            kind: NOTICE_ERROR.into(),
            event: event.into(),
            ..Notice::default()
        });
    }

    /// The oldest notice that is due.
    pub(crate) fn next_notice(&self) -> Option<Notice> {
        self.due.front().copied()
    }

    /// It has been delivered.
    pub(crate) fn notice_delivered(&mut self) {
        if let Some(notice) = self.due.pop_front()
            && notice.kind.get() == NOTICE_WAKEUP
        {
            self.waking.remove(&notice.event.get());
        }
    }

    fn wake(&mut self, event: u64) {
        self.tally.wakeups += 1;
        if self.waking.insert(event) {
            self.due.push_back(Notice {
                kind: NOTICE_WAKEUP.into(),
                event: event.into(),
                ..Notice::default()
            });
        }
    }

    /// Who runs on `vcpu`, as its task page has it.
    pub(crate) fn running(&self, vcpu: u32) -> Task {
        self.tasks.running(&self.memory, vcpu)
    }
}

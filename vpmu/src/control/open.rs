//! Opening an event: what is asked for is checked against what there is, then it is made.

use zerocopy::FromBytes;

use crate::abi::{
    CONTEXT_TASK, ENGINE_ANY, ENGINE_BATCHED, ENGINE_EXIT, EXIT_ALL, KIND_EXIT_TRACE,
    KIND_HARDWARE, KIND_HOST_TRACE, KIND_HW_CACHE, KIND_RAW, KIND_SAMPLE_TRACE, KIND_SOFTWARE,
    MAX_STACK, OPEN_AUX_PAUSE, OPEN_AUX_RESUME, OPEN_AUX_START_PAUSED, OPEN_BACKWARD, OPEN_ENABLED,
    OPEN_EXCLUDE_CHAIN_KERNEL, OPEN_EXCLUDE_CHAIN_USER, OPEN_EXCLUDE_KERNEL, OPEN_EXCLUDE_USER,
    OPEN_FREQ, OPEN_INHERIT_STAT, OPEN_PAUSED, OPEN_PERSISTENT, OPEN_PINNED, OPEN_SAMPLE_ID_ALL,
    OPEN_WATERMARK, OpenRequest, READ_ALLOWED, SAMPLE_ALLOWED,
};
use crate::catalogue::{Catalogue, Entry};
use crate::errno::Errno;
use crate::event::{Context, Event, Facts, Host, is_trace, pace};
use crate::links::Role;
use crate::period::Period;
use crate::persistent::Persistence;
use crate::record::{
    Layout, SAMPLE_CALLCHAIN, SAMPLE_READ, SAMPLE_REGS_INTR, SAMPLE_REGS_USER, SAMPLE_STACK_USER,
    read_size,
};
use crate::ring::Wakeup;
use crate::settings::Engines;
use crate::state::State;

const OPEN_FLAGS: u32 = OPEN_ENABLED
    | OPEN_EXCLUDE_USER
    | OPEN_EXCLUDE_KERNEL
    | OPEN_WATERMARK
    | OPEN_FREQ
    | OPEN_SAMPLE_ID_ALL
    | OPEN_BACKWARD
    | OPEN_PINNED
    | OPEN_INHERIT_STAT
    | OPEN_EXCLUDE_CHAIN_KERNEL
    | OPEN_EXCLUDE_CHAIN_USER
    | OPEN_AUX_START_PAUSED
    | OPEN_AUX_PAUSE
    | OPEN_AUX_RESUME
    | OPEN_PAUSED
    | OPEN_PERSISTENT;

/// What an overflow does to the trace that leads the group.
const STEERING: [(u32, Role); 2] = [
    (OPEN_AUX_PAUSE, Role::Stopper),
    (OPEN_AUX_RESUME, Role::Starter),
];
const STEERS: u32 = OPEN_AUX_PAUSE | OPEN_AUX_RESUME;

/// Fields of a sample that only a vCPU that stands still can tell.
const NOT_BATCHED: u64 =
    SAMPLE_READ | SAMPLE_CALLCHAIN | SAMPLE_REGS_USER | SAMPLE_STACK_USER | SAMPLE_REGS_INTR;

/// Registers of x86-64 by perf's numbers: AX to SS, then R8 to R15; no DS, ES, FS, GS.
const REGISTERS: u64 = 0xff_0fff;
/// perf takes no larger stack.
const STACK_BOUND: u32 = 65_535;
/// Bytes of a group's counts, as many as perf allows: the other fields of a record need room too.
const LONGEST_READING: usize = 16 << 10;
/// perf takes no longer period.
const LONGEST_PERIOD: u64 = u64::MAX >> 1;

/// For whom an event is opened.
#[derive(Debug)]
pub(crate) enum Maker {
    /// For the guest, by its driver.
    Guest,
    /// For the operator: it is persistent as this.
    Operator(Persistence),
}

impl State {
    /// Opens an event for the guest: its engine and id.
    pub(super) fn open(
        &mut self,
        host: &Host<'_>,
        catalogue: &Catalogue,
        request: &[u8],
    ) -> Result<(u32, u64), Errno> {
        let (request, _) = OpenRequest::read_from_prefix(request).map_err(|_| Errno::EINVAL)?;
        self.open_for(host, catalogue, &request, Maker::Guest)
    }

    /// Opens an event for the guest or for the operator: its engine and id.
    pub(crate) fn open_for(
        &mut self,
        host: &Host<'_>,
        catalogue: &Catalogue,
        request: &OpenRequest,
        maker: Maker,
    ) -> Result<(u32, u64), Errno> {
        let highest = u64::from(self.settings.limits.max_sample_rate);
        check_fields(request, highest)?;
        let context = match request.context.get() {
            CONTEXT_TASK => Context::Task(None),
            vcpu if vcpu < self.settings.vcpus => Context::Vcpu(vcpu),
            _ => return Err(Errno::EINVAL),
        };
        let persistent = request.flags.get() & OPEN_PERSISTENT != 0;
        if persistent && (context == Context::Task(None) || request.parent.get() != 0) {
            return Err(Errno::EINVAL);
        }
        let owner = self.owner(request)?;
        let leader = self.leader(request, context)?;
        let entry = self.allowed(catalogue, request, &maker)?;
        let engine = self.engine(host, request)?;
        let flags = request.flags.get();
        let id = self.next_id;
        let operators = matches!(maker, Maker::Operator(_));
        if !operators {
            self.check_events()?;
        }
        let persistence = match maker {
            Maker::Guest if persistent => Some(self.persistence(id)?),
            Maker::Guest => None,
            Maker::Operator(persistence) => Some(persistence),
        };
        let facts = Facts {
            id,
            owner: owner.unwrap_or(id),
            kind: request.kind.get(),
            config: request.config.get(),
            flags,
            layout: layout(request),
            wakeup: wakeup(request),
            aux_watermark: request.aux_watermark.get(),
            max_stack: match request.max_stack.get() {
                0 => MAX_STACK,
                some => some,
            },
            engine,
            shortest_period: entry.shortest_period.unwrap_or(1),
        };
        let mut event = Event::new(facts, context, period(request));
        event.leader = leader;
        event.persistence = persistence;
        let vcpu = Self::first_vcpu(host, context);
        // The operator's come before their vCPU's thread: they begin with it.
        if !operators || host.vcpus[vcpu as usize].thread().is_some() {
            event.prepare(host, vcpu)?;
        }
        event.enabled = flags & OPEN_ENABLED != 0;
        self.next_id += 1;
        self.events.insert(id, event);
        for (flag, role) in STEERING {
            if let Some(leader) = leader.filter(|_| flags & flag != 0) {
                self.links.steer(id, leader, role);
            }
        }
        if let Err(error) = self.start(host, id) {
            self.events.remove(&id);
            self.links.forget(id);
            self.output.notices.forget(id);
            return Err(error);
        }
        self.metrics.events_opened += 1;
        Ok((engine, id))
    }

    /// Whether the operator lets the guest have one more event.
    fn check_events(&self) -> Result<(), Errno> {
        let guests = self.events.values().filter(|event| !event.is_operators());
        match guests.count() < self.settings.limits.max_events as usize {
            true => Ok(()),
            false => Err(Errno::ENOSPC),
        }
    }

    /// Whose ring it writes to, if it is a child.
    fn owner(&self, request: &OpenRequest) -> Result<Option<u64>, Errno> {
        let parent = match request.parent.get() {
            0 => return Ok(None),
            parent => self.events.get(&parent).ok_or(Errno::EINVAL)?,
        };
        if parent.is_operators() {
            return Err(Errno::EPERM);
        }
        // Which of the family would be read is not said.
        if request.sample_type.get() & SAMPLE_READ != 0 {
            return Err(Errno::EINVAL);
        }
        Ok(Some(parent.facts.owner))
    }

    /// Whose group it joins, if any.
    fn leader(&self, request: &OpenRequest, context: Context) -> Result<Option<u64>, Errno> {
        let id = match request.leader.get() {
            0 if request.flags.get() & STEERS != 0 => return Err(Errno::EINVAL),
            0 => return Ok(None),
            id => id,
        };
        let leader = self.events.get(&id).ok_or(Errno::EINVAL)?;
        if request.flags.get() & STEERS != 0 && !leader.facts.is_trace() {
            return Err(Errno::EINVAL);
        }
        let format = request.read_format.get();
        let pinned = request.flags.get() & OPEN_PINNED != 0;
        let persistent = request.flags.get() & OPEN_PERSISTENT != 0 || leader.persistence.is_some();
        if persistent || leader.leader.is_some() || !leader.context.is_like(context) || pinned {
            return Err(Errno::EINVAL);
        }
        let members = self.members(id);
        let size = members.len() + 2;
        let mut formats = members
            .iter()
            .copied()
            .chain([id])
            .filter_map(|id| self.events.get(&id))
            .map(|event| event.facts.layout.read_format)
            .chain([format]);
        if formats.any(|format| read_size(format, size) > LONGEST_READING) {
            return Err(Errno::E2BIG);
        }
        Ok(Some(id))
    }

    /// Whether what the host reports of guests decides on the engine.
    pub(crate) fn engine_asks(&self, request: &OpenRequest) -> bool {
        let may_batch = match request.engine.get() {
            // Whoever wants to know of each overflow wants to know now.
            ENGINE_ANY => wakeup(request) != Wakeup::Records(1),
            ENGINE_BATCHED => true,
            _ => false,
        };
        self.settings.engines == Engines::Auto
            && request.period.get() != 0
            && can_batch(request)
            && may_batch
    }

    /// What makes the samples.
    fn engine(&self, host: &Host<'_>, request: &OpenRequest) -> Result<u32, Errno> {
        if (request.kind.get(), request.config.get()) == (KIND_EXIT_TRACE, EXIT_ALL) {
            // The vCPU does not come by at most of them.
            return match request.engine.get() {
                ENGINE_EXIT => Err(Errno::EOPNOTSUPP),
                _ => Ok(ENGINE_BATCHED),
            };
        }
        let can_batch = can_batch(request);
        if request.period.get() == 0 && (can_batch || request.engine.get() != ENGINE_BATCHED) {
            return Ok(ENGINE_ANY);
        }
        let batched = match (self.settings.engines, request.engine.get()) {
            (Engines::Auto, _) if self.engine_asks(request) && host.guest_ips == Some(true) => true,
            (Engines::Batched, ENGINE_ANY) if can_batch => true,
            (Engines::Batched, ENGINE_BATCHED) if can_batch => true,
            (_, ENGINE_BATCHED) => return Err(Errno::EOPNOTSUPP),
            (Engines::Batched, _) if by_host(request) => return Err(Errno::EOPNOTSUPP),
            _ => false,
        };
        Ok(match batched {
            true => ENGINE_BATCHED,
            false => ENGINE_EXIT,
        })
    }

    /// The entry that is asked for, if it can be had as asked.
    fn allowed<'a>(
        &self,
        catalogue: &'a Catalogue,
        request: &OpenRequest,
        maker: &Maker,
    ) -> Result<&'a Entry, Errno> {
        // The operator's are there before any driver is.
        let operators = matches!(maker, Maker::Operator(_));
        let (has_rings, has_areas) = (operators || self.has_rings(), self.has_areas());
        let kind = request.kind.get();
        if matches!(kind, KIND_RAW | KIND_HOST_TRACE) {
            // A raw code can reach host counters that see more than this guest, and so do the
            // traces of host PMUs.
            return Err(Errno::EOPNOTSUPP);
        }
        let entry = catalogue
            .find(kind, request.config.get())
            .ok_or(Errno::ENOENT)?;
        let flags = request.flags.get();
        let excludes = flags & (OPEN_EXCLUDE_USER | OPEN_EXCLUDE_KERNEL) != 0;
        let period = request.period.get();
        let sampled = entry
            .shortest_period
            .is_some_and(|shortest| period >= shortest || flags & OPEN_FREQ != 0);
        if request.sample_type.get() & !SAMPLE_ALLOWED != 0
            || request.read_format.get() & !READ_ALLOWED != 0
            || excludes && !entry.excludes
            || period > 0 && !(sampled && has_rings)
            || flags & OPEN_AUX_START_PAUSED != 0 && entry.format.is_none()
            || entry.format.is_some() && !has_areas
        {
            return Err(Errno::EOPNOTSUPP);
        }
        if kind == KIND_SAMPLE_TRACE && period == 0 {
            return Err(Errno::EINVAL);
        }
        Ok(entry)
    }
}

/// Checks what makes no sense on any host; `highest` is the highest frequency.
fn check_fields(request: &OpenRequest, highest: u64) -> Result<(), Errno> {
    let flags = request.flags.get();
    if request.header.event.get() != 0
        || request.aux_watermark.get() != 0 && !is_trace(request.kind.get())
        || flags & !OPEN_FLAGS != 0
        || flags & STEERS == STEERS
        || request.engine.get() > ENGINE_BATCHED
    {
        return Err(Errno::EINVAL);
    }
    let period = request.period.get();
    let fits = match flags & OPEN_FREQ {
        0 => period <= LONGEST_PERIOD,
        _ => (1..=highest).contains(&period),
    };
    let has = |bit| request.sample_type.get() & bit != 0;
    let registers = |mask: u64| mask != 0 && mask & !REGISTERS == 0;
    let stack = request.stack_user.get();
    if !fits
        || has(SAMPLE_REGS_USER) && !registers(request.regs_user.get())
        || has(SAMPLE_REGS_INTR) && !registers(request.regs_intr.get())
        || has(SAMPLE_STACK_USER) && (stack >= STACK_BOUND || !stack.is_multiple_of(8))
    {
        return Err(Errno::EINVAL);
    }
    if has(SAMPLE_CALLCHAIN) && request.max_stack.get() > MAX_STACK {
        return Err(Errno::EOVERFLOW);
    }
    Ok(())
}

/// Whether the batched engine could make such samples: the host records where the guest was when,
/// and nothing that has to be read, or done, while the vCPU stands still.
fn can_batch(request: &OpenRequest) -> bool {
    by_host(request)
        && request.kind.get() != KIND_SAMPLE_TRACE
        && request.sample_type.get() & NOT_BATCHED == 0
        && request.flags.get() & STEERS == 0
}

/// Whether the host's counters count it.
fn by_host(request: &OpenRequest) -> bool {
    match request.kind.get() {
        KIND_HARDWARE | KIND_SOFTWARE | KIND_HW_CACHE => true,
        KIND_SAMPLE_TRACE => pace(request.config.get()).is_some(),
        _ => false,
    }
}

fn period(request: &OpenRequest) -> Option<Period> {
    match (request.period.get(), request.flags.get() & OPEN_FREQ) {
        (0, _) => None,
        (period, 0) => Some(Period::new(period)),
        (frequency, _) => Some(Period::frequency(frequency)),
    }
}

fn layout(request: &OpenRequest) -> Layout {
    Layout {
        sample_type: request.sample_type.get(),
        read_format: request.read_format.get(),
        regs_user: request.regs_user.get(),
        regs_intr: request.regs_intr.get(),
        stack_user: request.stack_user.get(),
        sample_id_all: request.flags.get() & OPEN_SAMPLE_ID_ALL != 0,
    }
}

fn wakeup(request: &OpenRequest) -> Wakeup {
    match request.wakeup.get() {
        0 => Wakeup::Page,
        bytes if request.flags.get() & OPEN_WATERMARK != 0 => Wakeup::Bytes(bytes),
        records => Wakeup::Records(records),
    }
}

//! Checks open requests against the catalogue, the operator's settings and the driver's features. Every
//! number here comes from the guest and is checked before use.

use crate::abi::{
    CONTEXT_TASK, ENGINE_ANY, ENGINE_BATCHED, ENGINE_EXIT, KIND_HOST_TRACE, MAX_STACK, OPEN_AUX_PAUSE, OPEN_AUX_RESUME,
    OPEN_AUX_START_PAUSED, OPEN_BACKWARD, OPEN_ENABLED, OPEN_EXCLUDE_CHAIN_KERNEL, OPEN_EXCLUDE_CHAIN_USER,
    OPEN_EXCLUDE_HOST, OPEN_EXCLUDE_KERNEL, OPEN_EXCLUDE_USER, OPEN_FREQ, OPEN_INHERIT_STAT, OPEN_PAUSED,
    OPEN_PERSISTENT, OPEN_PINNED, OPEN_SAMPLE_ID_ALL, OPEN_WATERMARK, OpenRequest, READ_ALLOWED, SAMPLE_ALLOWED,
};
use crate::arch::REGISTERS;
use crate::catalogue::{Catalogue, Entry};
use crate::errno::Errno;
use crate::kind::{Exits, HostEvent, Kind, is_trace};
use crate::links::Role;
use crate::period::{LONGEST, Period};
use crate::persistent::Persistence;
use crate::policy::Policy;
use crate::record::{MASKS, SAMPLE_CALLCHAIN, SAMPLE_REGS_INTR, SAMPLE_REGS_USER, SAMPLE_STACK_USER};
use crate::ring::Wakeup;
use crate::settings::{Engines, Settings};
use crate::spec::{Context, EventRequest, EventSpec};

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
    | OPEN_PERSISTENT
    | OPEN_EXCLUDE_HOST;

/// The flags of a group member whose overflows pause or resume the group's leader. The leader is a trace. A member that
/// pauses the trace is its stopper. A member that resumes the trace is its starter.
const STEERING: [(u32, Role); 2] = [(OPEN_AUX_PAUSE, Role::Stopper), (OPEN_AUX_RESUME, Role::Starter)];
pub(super) const STEERS: u32 = OPEN_AUX_PAUSE | OPEN_AUX_RESUME;

/// The user stack of a sample must have fewer bytes than this, as in perf.
const STACK_BOUND: u32 = 65_535;

/// The side that opens an event.
#[derive(Debug)]
pub(crate) enum Maker {
    /// The guest, through its driver.
    Guest,
    /// The operator, who opens a persistent event with this name.
    Operator(Persistence),
}

/// The catalogue, policy, settings and features against which open requests are checked.
#[derive(Debug, Clone, Copy)]
pub(super) struct Terms<'a> {
    pub(super) catalogue: &'a Catalogue,
    /// The operator's policy for the guest. `None` if the operator opens the event.
    pub(super) policy: Option<&'a Policy>,
    pub(super) settings: &'a Settings,
    /// Whether the event may have a ring.
    pub(super) has_rings: bool,
    /// Whether the event may have an AUX area.
    pub(super) has_areas: bool,
    /// Whether the host reports guest IPs. `None` if this is not known yet.
    pub(super) guest_ips: Option<bool>,
}

/// The checked properties of an open request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Opening {
    pub(super) kind: Kind,
    pub(super) engine: u32,
    pub(super) flags: u32,
    pub(super) shortest_period: u64,
    /// Whether the period is in nanoseconds.
    pub(super) by_clock: bool,
    /// Whether the event is persistent from the start.
    pub(super) persistent: bool,
}

impl Terms<'_> {
    /// Checks the fields whose validity does not depend on the host. Returns the context.
    ///
    /// # Errors
    /// As specified for `CONTROL_OPEN`.
    pub(super) fn check_context(&self, request: &OpenRequest) -> Result<Context, Errno> {
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
        Ok(context)
    }

    /// Checks that the host, the operator and the negotiated features allow the request.
    ///
    /// # Errors
    /// See [`Terms::check_context`].
    pub(super) fn check(&self, request: &OpenRequest) -> Result<Opening, Errno> {
        let (kind, entry) = self.allowed(request)?;
        let flags = request.flags.get();
        Ok(Opening {
            kind,
            engine: self.engine(kind, request)?,
            flags,
            shortest_period: entry.shortest_period.unwrap_or(1),
            by_clock: self.is_clock(kind, entry),
            persistent: flags & OPEN_PERSISTENT != 0,
        })
    }

    /// Returns whether the event counts nanoseconds. For a sample trace, checks the event that paces the trace instead.
    fn is_clock(&self, kind: Kind, entry: &Entry) -> bool {
        let pace = match kind {
            Kind::SampleTrace(pace) => pace.host_event(),
            _ => None,
        };
        match pace.map(HostEvent::wire) {
            Some((kind, config)) => self.catalogue.find(kind, config).is_some_and(Entry::is_clock),
            None => entry.is_clock(),
        }
    }

    /// The engine for the event's samples.
    fn engine(&self, kind: Kind, request: &OpenRequest) -> Result<u32, Errno> {
        if kind == Kind::ExitTrace(Exits::All) {
            // The host kernel handles most exits without returning to the VMM, so only the host kernel can record
            // all of them.
            return match request.engine.get() {
                ENGINE_EXIT => Err(Errno::EOPNOTSUPP),
                _ => Ok(ENGINE_BATCHED),
            };
        }
        let can_batch = can_batch(request);
        if request.period.get() == 0 && (can_batch || request.engine.get() != ENGINE_BATCHED) {
            return Ok(ENGINE_ANY);
        }
        let engines = self.settings.engines;
        let asks = needs_guest_ips(request, engines);
        let batched = match (engines, request.engine.get()) {
            (Engines::Auto, _) if asks && self.guest_ips == Some(true) => true,
            (Engines::Batched, ENGINE_ANY) if can_batch => true,
            (Engines::Batched, ENGINE_BATCHED) if can_batch => true,
            (_, ENGINE_BATCHED) => return Err(Errno::EOPNOTSUPP),
            (Engines::Batched, _) if by_host(request) => return Err(Errno::EOPNOTSUPP),
            _ => false,
        };
        Ok(if batched { ENGINE_BATCHED } else { ENGINE_EXIT })
    }

    /// Returns the catalogue entry for the request, if the policy allows the event and the device supports the
    /// requested options for this event.
    fn allowed(&self, request: &OpenRequest) -> Result<(Kind, &Entry), Errno> {
        let kind = request.kind.get();
        let config = request.config.get();
        // A trace from a host PMU reveals more than this guest's activity, so the device does not open such traces.
        if kind == KIND_HOST_TRACE {
            return Err(Errno::EOPNOTSUPP);
        }
        let parsed = Kind::parse(kind, config).ok_or(Errno::ENOENT)?;
        let allows = |policy: &Policy| policy.allows(kind, config);
        let known = self.catalogue.find(kind, config);
        let allowed = known.filter(|_| self.policy.is_none_or(allows));
        let entry = allowed.ok_or(Errno::ENOENT)?;
        let flags = request.flags.get();
        let excludes = flags & (OPEN_EXCLUDE_USER | OPEN_EXCLUDE_KERNEL) != 0;
        let period = request.period.get();
        let sampled = entry.shortest_period.is_some_and(|shortest| period >= shortest || flags & OPEN_FREQ != 0);
        if request.sample_type.get() & !SAMPLE_ALLOWED != 0
            || request.read_format.get() & !READ_ALLOWED != 0
            || excludes && !entry.excludes
            || period > 0 && !(sampled && self.has_rings)
            || period > 0 && self.settings.remote && request.sample_type.get() & MASKS.registers != 0
            || flags & OPEN_AUX_START_PAUSED != 0 && entry.format.is_none()
            || entry.format.is_some() && !self.has_areas
        {
            return Err(Errno::EOPNOTSUPP);
        }
        if matches!(parsed, Kind::SampleTrace(_)) && period == 0 {
            return Err(Errno::EINVAL);
        }
        Ok((parsed, entry))
    }
}

impl Opening {
    /// The spec of the new event `id`.
    pub(super) fn spec(&self, request: &OpenRequest, id: u64, owner: Option<u64>) -> EventSpec {
        let request = EventRequest { flags: self.flags, engine: self.engine, ..EventRequest::of(request) };
        self.spec_of(request, id, owner.unwrap_or(id))
    }

    /// The spec of an event that was opened with `request`.
    pub(super) fn spec_of(&self, request: EventRequest, id: u64, owner: u64) -> EventSpec {
        EventSpec {
            id,
            owner,
            kind: self.kind,
            request,
            shortest_period: self.shortest_period,
            by_clock: self.by_clock,
        }
    }

    /// The properties of an event that the host can no longer count, or that the policy now denies. The
    /// event enters the error state.
    pub(super) fn lost(kind: Kind, engine: u32, flags: u32) -> Self {
        Self { kind, engine, flags, shortest_period: 1, by_clock: false, persistent: flags & OPEN_PERSISTENT != 0 }
    }

    /// Returns the event's role for the trace that leads its group: starter, stopper or none.
    pub(super) fn steers(&self) -> impl Iterator<Item = Role> + use<> {
        let flags = self.flags;
        let wanted = STEERING.into_iter().filter(move |(flag, _)| flags & flag != 0);
        wanted.map(|(_, role)| role)
    }
}

/// Whether a request opens an event that pauses or resumes the trace that leads its group.
pub(super) fn steers(request: &OpenRequest) -> bool {
    request.flags.get() & STEERS != 0
}

/// Whether the choice of the engine depends on whether the host reports guest IPs.
pub(super) fn needs_guest_ips(request: &OpenRequest, engines: Engines) -> bool {
    let may_batch = match request.engine.get() {
        // A wakeup for each overflow requires the exit engine, which reports each overflow immediately.
        ENGINE_ANY => wakeup(request) != Wakeup::Records(1),
        ENGINE_BATCHED => true,
        _ => false,
    };
    engines == Engines::Auto && request.period.get() != 0 && can_batch(request) && may_batch
}

/// Checks the fields whose validity does not depend on the host. `highest` is the operator's maximum frequency.
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
        0 => period <= LONGEST,
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

/// Whether the batched engine supports the requested samples. For a batched sample, the host records only the time and
/// the guest's instruction pointer. The vCPU does not stop at the overflow, so the device cannot read anything else
/// from it at that moment, and cannot pause or resume a trace.
fn can_batch(request: &OpenRequest) -> bool {
    matches!(kind(request), Some(Kind::Host(_)))
        && request.sample_type.get() & MASKS.stopped == 0
        && request.flags.get() & STEERS == 0
}

/// Returns whether a host counter counts the event. For a sample trace, returns whether a host counter paces the trace.
fn by_host(request: &OpenRequest) -> bool {
    kind(request).is_some_and(|kind| kind.host_event().is_some())
}

fn kind(request: &OpenRequest) -> Option<Kind> {
    Kind::parse(request.kind.get(), request.config.get())
}

/// The period or the frequency of overflows. `None` for an event that only counts.
pub(super) fn period(request: &OpenRequest) -> Option<Period> {
    match (request.period.get(), request.flags.get() & OPEN_FREQ) {
        (0, _) => None,
        (period, 0) => Some(Period::new(period)),
        (frequency, _) => Some(Period::frequency(frequency)),
    }
}

/// The wakeup interval that a request asks for.
pub(super) fn wakeup(request: &OpenRequest) -> Wakeup {
    match request.wakeup.get() {
        0 => Wakeup::Page,
        bytes if request.flags.get() & OPEN_WATERMARK != 0 => Wakeup::Bytes(bytes),
        records => Wakeup::Records(records),
    }
}

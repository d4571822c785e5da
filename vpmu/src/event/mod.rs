//! One event: its specification, state, count and times. This module does not access queues. It accesses other events
//! only if they are in the event's group.

mod backing;
mod group;

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use self::backing::Backing;
pub(crate) use self::group::{Group, GroupEvent, LastCounts};
use crate::abi::{
    OPEN_AUX_START_PAUSED, OPEN_EXCLUDE_HOST, OPEN_PAUSED, OPEN_PINNED, STATE_ACTIVE, STATE_ERROR, STATE_INACTIVE,
    STATE_OFF, SYNC_RESUME, SYNC_START,
};
use crate::clock::Clock;
use crate::cpu::{Cpu, Lease};
use crate::kind::{Exits, Kind, is_hardware};
use crate::links::Effect;
use crate::period::SavedPeriod;
use crate::period::{Completed, Period};
use crate::ring::CountSnapshot;
use crate::saved::{Fault, saved};
use crate::settings::{CountMode, Engines};
use crate::sink::Output;
use crate::slots::{RunLimit, RunSlot};
use crate::source::{Engine, Overflows, Rate, Reading, Request, Sampling};
use crate::spec::{Context, EventSpec, Wakeups};
use crate::tasks::Task;
use crate::throttle::{RateLimit, Throttle, Verdict};
use crate::trace::SavedTrace;
use crate::trace::Trace;
use crate::vcpu::Hook;
use crate::work;

/// The vCPU on which an event is active, and the event's time and reading at the last update.
#[derive(Debug, Clone, Copy)]
struct Active {
    vcpu: u32,
    since: u64,
    base: Reading,
    /// Whether the event's own counter is stopped until the vCPU has room for it.
    waits: bool,
}

/// The owner of a persistent event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Persistent {
    Guest,
    /// Owned by the operator. The guest cannot change the event.
    Operator,
}

/// An open event. It belongs to the shard of the vCPU on which it is placed. A task event that is scheduled out stays
/// in its last shard.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) spec: Arc<EventSpec>,
    pub(crate) context: Context,
    /// The event's group. The event counts only while the group's leader is enabled.
    pub(crate) group: Option<Arc<Group>>,
    /// The event's own entry among the counts of the group.
    last_counts: Option<Arc<LastCounts>>,
    /// The task that was last scheduled in. An overflow found while this task is being switched out belongs to
    /// this task, although the task page already names the next one.
    pub(crate) task: Option<Task>,
    /// The last vCPU that the event's task ran on. Records that are written after the task has left this vCPU still
    /// contain the vCPU's number.
    pub(crate) last_vcpu: u32,
    enabled: bool,
    /// Number of overflows until the event is disabled. Zero means no limit.
    pub(crate) limit: u64,
    /// Overflows without a record.
    pub(crate) lost: u64,
    /// The owner, if the event is persistent.
    pub(crate) persistent: Option<Persistent>,
    pub(crate) output: Output,
    /// The events that this event's overflows start, stop or toggle, by id.
    pub(crate) effects: Vec<(u64, Effect)>,
    /// The state of a trace, which includes its number of bytes. `None` for other events.
    pub(crate) trace: Option<Trace>,
    /// Whether the event is paused. Until it is resumed, it neither counts nor writes. The pause does not change the
    /// event's state, and the event's times continue to advance.
    paused: bool,
    pub(crate) period: Option<Period>,
    throttle: Throttle,
    /// Whether overflows of the event's host counters are disabled until the throttle is lifted. If the event has a
    /// frequency, they are reduced to 1 Hz instead.
    silent: bool,
    failed: bool,
    /// Whether the host currently records the event's overflows for a later drain.
    batched: bool,
    backing: Backing,
    active: Option<Active>,
    /// The part of the vCPU's [`RunLimit`] that the event's own counter uses. An operator's event does not
    /// count towards that limit.
    slot: Option<RunSlot>,
    /// The number of the event's last wait for a [`RunSlot`]. Each wait on the vCPU has a different number.
    wait: u64,
    count: u64,
    enabled_ticks: u64,
    running_ticks: u64,
}

saved! {
    /// The state of an event at one moment.
    pub(crate) struct SavedLife {
        pub(crate) enabled: bool,
        pub(crate) paused: bool,
        pub(crate) failed: bool,
        /// Whether each of its samples causes a wakeup.
        pub(crate) prompt: bool,
        /// Whether its overflows make no records.
        pub(crate) throttled: bool,
        /// The task that was last scheduled in for the event, and the last vCPU that this task ran on.
        pub(crate) task: Option<Task>,
        pub(crate) last_vcpu: u32,
        pub(crate) limit: u64,
        pub(crate) lost: u64,
        pub(crate) period: Option<SavedPeriod>,
        pub(crate) trace: Option<SavedTrace>,
        pub(crate) count: u64,
        /// The unit is ticks of a TSC with the frequency [`SavedState::tsc_khz`].
        pub(crate) enabled_ticks: u64,
        pub(crate) running_ticks: u64,
    }
}

impl Event {
    pub(crate) fn new(spec: Arc<EventSpec>, wakeups: Wakeups, context: Context, period: Option<Period>) -> Self {
        let records = spec.kind == Kind::ExitTrace(Exits::All);
        Self {
            backing: Backing::new(&spec, period.is_some() || records),
            context,
            group: None,
            last_counts: None,
            task: None,
            last_vcpu: 0,
            enabled: false,
            limit: 0,
            lost: 0,
            persistent: None,
            output: Output::new(wakeups),
            effects: Vec::new(),
            trace: spec.is_trace().then(Trace::new),
            paused: spec.has(OPEN_PAUSED | OPEN_AUX_START_PAUSED),
            period,
            throttle: Throttle::default(),
            silent: false,
            failed: false,
            batched: spec.is_batched(),
            active: None,
            slot: None,
            wait: 0,
            count: 0,
            enabled_ticks: 0,
            running_ticks: 0,
            spec,
        }
    }

    /// Returns the event's state at its last update, for saving.
    pub(crate) fn save(&self) -> SavedLife {
        SavedLife {
            enabled: self.enabled,
            paused: self.paused,
            failed: self.failed,
            prompt: self.output.wakeups.prompt,
            throttled: self.throttle.is_closed(),
            task: self.task,
            last_vcpu: self.last_vcpu,
            limit: self.limit,
            lost: self.lost,
            period: self.period.map(Period::save),
            trace: self.trace.as_ref().map(Trace::save),
            count: self.count,
            enabled_ticks: self.enabled_ticks,
            running_ticks: self.running_ticks,
        }
    }

    /// Restores a saved event, which is not active yet. The caller must first convert the saved ticks to ticks of
    /// this device's TSC.
    ///
    /// # Errors
    /// The saved state is not valid.
    pub(crate) fn restore(
        spec: Arc<EventSpec>,
        mut wakeups: Wakeups,
        context: Context,
        saved: &SavedLife,
        engines: Engines,
    ) -> Result<Self, Fault> {
        let period = match &saved.period {
            Some(period) => Some(Period::restore(period).ok_or("its period is not valid")?),
            None => None,
        };
        let trace = match &saved.trace {
            Some(trace) => Some(Trace::restore(trace).ok_or("its trace is not valid")?),
            None => None,
        };
        if trace.is_some() != spec.is_trace() {
            return Err("its trace contradicts its kind");
        }
        if period.is_none() && (saved.limit > 0 || saved.throttled) {
            return Err("it has a limit or a throttle, but never overflows");
        }
        if saved.prompt && (period.is_none() || spec.is_trace()) {
            return Err("each of its samples causes a wakeup, but it makes no samples");
        }
        wakeups.prompt = saved.prompt;
        if saved.task.is_some() && matches!(context, Context::Vcpu(_)) {
            return Err("it has a task, but its context is a vCPU");
        }
        let event = Self::new(spec, wakeups, context, period);
        Ok(Self {
            batched: event.would_batch(saved.prompt, engines),
            trace,
            task: saved.task,
            last_vcpu: saved.last_vcpu,
            enabled: saved.enabled,
            limit: saved.limit,
            lost: saved.lost,
            paused: saved.paused,
            throttle: Throttle::restore(saved.throttled),
            failed: saved.failed,
            count: saved.count,
            enabled_ticks: saved.enabled_ticks,
            running_ticks: saved.running_ticks,
            ..event
        })
    }

    /// The vCPU on which the event currently counts.
    pub(crate) fn active_on(&self) -> Option<u32> {
        self.active.map(|active| active.vcpu)
    }

    /// The vCPU on which the event would count if it were enabled.
    pub(crate) fn placed_on(&self) -> Option<u32> {
        match self.context {
            Context::Vcpu(vcpu) => Some(vcpu),
            Context::Task(vcpu) => vcpu,
        }
    }

    /// Whether the event is a task event that is scheduled in on `vcpu`.
    pub(crate) fn runs_on(&self, vcpu: u32) -> bool {
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

    pub(crate) fn state(&self) -> i32 {
        match (self.failed, self.enabled, self.active) {
            (true, _, _) => STATE_ERROR,
            (_, false, _) => STATE_OFF,
            (_, _, None | Some(Active { waits: true, .. })) => STATE_INACTIVE,
            (_, _, Some(_)) => STATE_ACTIVE,
        }
    }

    pub(crate) fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// Enables or disables the event. If it leads a group, publishes the change to the group. Returns whether
    /// the event was enabled before.
    pub(crate) fn set_enabled(&mut self, enabled: bool) -> bool {
        let before = std::mem::replace(&mut self.enabled, enabled);
        self.publish_on();
        before
    }

    /// Counts an overflow towards the event's overflow limit, if it has one. Disables the event if the limit is reached,
    /// and returns whether it is.
    pub(crate) fn use_up_limit(&mut self) -> bool {
        let is_last = self.limit == 1;
        self.limit = self.limit.saturating_sub(1);
        if is_last {
            self.set_enabled(false);
        }
        is_last
    }

    /// Whether the event has no leader, or its leader is enabled and not in the error state.
    pub(crate) fn is_led_on(&self) -> bool {
        let led = self.group.as_ref().filter(|_| !self.leads());
        led.is_none_or(|group| group.is_on())
    }

    /// Whether the event leads its group.
    pub(crate) fn leads(&self) -> bool {
        let group = self.group.as_ref();
        group.is_some_and(|group| group.leader == self.spec.id)
    }

    /// Makes the event join `group`, or leave its current group if `group` is `None`.
    pub(crate) fn join(&mut self, group: Option<Arc<Group>>) {
        let events = group.iter().flat_map(|group| &group.events);
        let mut own = events.filter(|event| event.id == self.spec.id);
        self.last_counts = own.next().map(|event| Arc::clone(&event.counts));
        self.group = group;
        self.publish_on();
        self.publish_counts();
    }

    /// Whether the operator owns the event.
    pub(crate) fn is_operators(&self) -> bool {
        self.persistent == Some(Persistent::Operator)
    }

    /// Whether the metadata page of the event's own ring shows the event's count.
    pub(crate) fn is_shown(&self) -> bool {
        let sink = self.output.sink.as_ref();
        sink.is_some_and(|sink| sink.shows(self.spec.id))
    }

    /// The event's hooks while it is active.
    pub(crate) fn hooks(&self) -> impl Iterator<Item = Hook> + use<> {
        let goes = !self.paused;
        let samples = self.period.is_some() && goes;
        let exits = self.spec.kind.counted_exits().is_some() && goes;
        let traced = self.spec.traces_exits() && goes;
        let wants = |hook, wanted: bool| wanted.then_some(hook);
        let hooks = match &self.backing {
            Backing::GuestTime => [Some(Hook::GuestTime), None],
            Backing::Own(_) if self.is_batched() => [Some(Hook::Collecting), None],
            Backing::Own(_) => [wants(Hook::HostSamples, samples), None],
            Backing::Exits(_) => {
                [wants(Hook::Exits, samples || self.is_shown() && goes), wants(Hook::Registers, samples)]
            }
            Backing::Happened(_) => {
                [wants(Hook::Exits, exits), wants(Hook::Registers, samples || self.spec.excludes_any() && goes)]
            }
            Backing::Traced => [wants(Hook::Traced, traced), wants(Hook::Registers, traced)],
            Backing::Shared(_) | Backing::Tsc | Backing::AllExits | Backing::Halts => [None, None],
        };
        let throttled = wants(Hook::Throttled, self.throttle.is_closed());
        let wants_state = matches!(self.spec.kind, Kind::SampleTrace(_))
            || !self.spec.is_trace() && self.spec.capture().wants_state();
        let state = wants(Hook::State, samples && wants_state);
        hooks.into_iter().flatten().chain(throttled).chain(state)
    }

    /// Returns whether the event's vCPU must handle the event at exits, marks or drains. Returns false for an event
    /// that only counts and whose count can be read at any time.
    pub(crate) fn is_watched(&self) -> bool {
        match self.backing {
            Backing::Own(_) | Backing::Exits(_) | Backing::Happened(_) | Backing::Traced | Backing::GuestTime => true,
            Backing::Shared(_) | Backing::Tsc | Backing::AllExits | Backing::Halts => false,
        }
    }

    /// Whether the device itself increments the event's count.
    pub(crate) fn is_kept(&self) -> bool {
        matches!(self.backing, Backing::Exits(_) | Backing::Happened(_))
    }

    /// Whether the event only counts, is not in the error state, and has no sink. Such an event starts and stops
    /// without further work.
    pub(crate) fn is_plain(&self) -> bool {
        self.output.sink.is_none() && !self.failed && !self.is_watched()
    }

    /// Whether the event's samples or packets come from host counters.
    pub(crate) fn is_sampled_by_host(&self) -> bool {
        matches!(self.backing, Backing::Own(_))
    }

    /// Whether each of the event's samples causes an exit whose time counts against the limit on the vCPU's
    /// sampling time.
    pub(crate) fn takes_time(&self) -> bool {
        let samples = self.is_sampled_by_host() && self.period.is_some();
        samples && !self.is_batched() && !self.is_operators()
    }

    /// Whether the host records the event's overflows for a later drain.
    pub(crate) fn is_batched(&self) -> bool {
        self.batched
    }

    /// Returns whether the host records the event's overflows for a later drain if the event is prompt, or if it is
    /// not. `engines` is the operator's choice.
    pub(crate) fn would_batch(&self, prompt: bool, engines: Engines) -> bool {
        // An operator who chooses the batched engine does not want exits for samples.
        self.spec.is_batched() && (!prompt || engines == Engines::Batched)
    }

    /// Whether the host may hold overflows of the event that can be taken only while the event's vCPU is outside the
    /// guest: it is active, and uses the exit engine.
    pub(crate) fn may_hold(&self) -> bool {
        self.is_sampled_by_host() && !self.is_batched() && self.active.is_some()
    }

    /// Whether an overflow needs no more than its record: it starts and stops no other event, and lifts no throttle.
    pub(crate) fn is_quiet(&self) -> bool {
        self.effects.is_empty() && !self.is_throttled()
    }

    /// Begins a new stretch of a trace: its next packet follows a sync packet.
    pub(crate) fn sync(&mut self) {
        if let Some(trace) = &mut self.trace {
            trace.sync(SYNC_START);
        }
    }

    /// Whether the event is paused.
    pub(crate) fn is_paused(&self) -> bool {
        self.paused
    }

    /// Opens a host counter for the event on `cpu`, if the event needs one there and has none yet.
    ///
    /// # Errors
    /// The host's error, or `ESRCH` while the vCPU has no thread.
    pub(crate) fn prepare(&mut self, cpu: &mut Cpu) -> io::Result<()> {
        if self.backing.is_prepared(cpu.index) {
            return Ok(());
        }
        let request = self.request(cpu);
        let operators = self.is_operators();
        self.backing.prepare(cpu, &request, operators)
    }

    /// The request for the event's host counter.
    fn request(&self, cpu: &Cpu) -> Request {
        let asked = &self.spec.request;
        let (kind, config) = self.spec.kind.counter().unwrap_or((asked.kind, asked.config));
        let hardware = &cpu.backend.settings.hardware;
        let guest_only = hardware.count_mode == CountMode::Guest || self.period.is_some();
        Request {
            kind,
            config,
            sampling: self.period.map(|period| Sampling {
                rate: period.rate(),
                engine: match self.is_batched() {
                    true => Engine::Batched,
                    false => Engine::Exit,
                },
            }),
            exclude_user: self.spec.excludes(true),
            exclude_kernel: self.spec.excludes(false),
            exclude_host: is_hardware(kind) && (guest_only || self.spec.has(OPEN_EXCLUDE_HOST)),
            // The guest's `OPEN_PINNED` does not pin the host's counter, because a pinned counter would never yield to
            // the operator's counters. Only the operator's setting pins the counter. `Event::read` handles
            // `OPEN_PINNED`.
            pinned: is_hardware(kind) && hardware.pinned,
        }
    }

    /// Stops the event's own counter and updates count and times, so that the counter can be replaced
    /// ([`Event::change_engine`]). The event stays active.
    ///
    /// # Errors
    /// See [`Event::start`].
    pub(crate) fn stop_counter(&mut self, cpu: &mut Cpu) -> io::Result<()> {
        if !self.paused {
            self.run(cpu, false)?;
        }
        self.update(cpu)
    }

    /// Makes the batched engine or the exit engine take the event's samples from now on. Replaces the event's own
    /// counter, and begins a new period. The counter of an active event must be stopped ([`Event::stop_counter`]), and
    /// the caller must have taken its overflows.
    ///
    /// # Errors
    /// See [`Event::start`].
    pub(crate) fn change_engine(&mut self, cpu: &mut Cpu, batched: bool) -> io::Result<()> {
        work::charge(1);
        self.batched = batched;
        let request = self.request(cpu);
        self.backing.replace(cpu, &request)?;
        if self.silent {
            self.silence()?;
        }
        if let Some(active) = &mut self.active
            && let Some(open) = self.backing.counter(active.vcpu)
        {
            active.base = open.last;
        }
        match self.paused {
            true => Ok(()),
            false => self.run(cpu, true),
        }
    }

    /// Starts counting on `cpu`.
    ///
    /// # Errors
    /// The host's error. The caller must then call [`Event::fail`].
    pub(crate) fn start(&mut self, cpu: &mut Cpu) -> io::Result<()> {
        work::charge(1);
        self.prepare(cpu)?;
        let waits = !self.paused && !self.has_slot(cpu)?;
        let base = match self.backing.counter(cpu.index) {
            Some(open) => {
                if !self.paused && !waits {
                    cpu.hold_own();
                    open.start()?;
                }
                open.last
            }
            None => self.backing.read(cpu)?,
        };
        if let Some(period) = &mut self.period {
            period.resume();
        }
        self.active = Some(Active { vcpu: cpu.index, since: cpu.counting_tsc(), base, waits });
        Ok(())
    }

    /// Reserves a [`RunSlot`] on `cpu` for the event's own counter, if the counter needs one and has none yet.
    /// Returns whether the event may count there.
    ///
    /// # Errors
    /// `ENOSPC` if the vCPU's [`RunLimit`] is reached and the event is pinned.
    fn has_slot(&mut self, cpu: &Cpu) -> io::Result<bool> {
        if !self.backing.is_own() || self.is_operators() {
            return Ok(true);
        }
        if self.slot.is_none() {
            self.slot = cpu.take_slot(self.interrupts());
        }
        match self.slot.is_none() && self.spec.has(OPEN_PINNED) {
            true => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
            false => Ok(self.slot.is_some()),
        }
    }

    /// Frees the [`RunSlot`] of the event's counter, and ends any wait for a slot. The counter must be stopped.
    fn leave_slot(&mut self) {
        self.slot = None;
        if let Some(active) = &mut self.active {
            active.waits = false;
        }
    }

    /// Interrupts per second of the event's host counter. Zero if unknown.
    fn interrupts(&self) -> u64 {
        let rate = self.period.map(Period::rate);
        rate.map_or(0, |rate| self.spec.interrupts(rate))
    }

    /// Returns whether the event is active but its counter is stopped and waits for room.
    pub(crate) fn is_waiting(&self) -> bool {
        self.active.is_some_and(|active| active.waits)
    }

    /// Sets the number of the event's current wait.
    pub(crate) fn begin_wait(&mut self, number: u64) {
        self.wait = number;
    }

    /// Returns whether the wait with this number is the event's current wait for room.
    pub(crate) fn is_in_wait(&self, number: u64) -> bool {
        self.is_waiting() && self.wait == number
    }

    /// If the event's counter is waiting for a [`RunSlot`] and can now get one, starts the counter. Returns whether it
    /// is still waiting.
    ///
    /// # Errors
    /// See [`Event::start`].
    pub(crate) fn stop_waiting(&mut self, cpu: &mut Cpu) -> io::Result<bool> {
        if !self.is_waiting() {
            return Ok(false);
        }
        work::charge(1);
        if !self.has_slot(cpu)? {
            return Ok(true);
        }
        self.update(cpu)?;
        if let Some(active) = &mut self.active {
            active.waits = false;
        }
        self.run(cpu, true)?;
        Ok(false)
    }

    /// Updates count and times.
    ///
    /// # Errors
    /// See [`Event::start`].
    pub(crate) fn update(&mut self, cpu: &mut Cpu) -> io::Result<()> {
        work::charge(1);
        let Some(active) = self.active else {
            return Ok(());
        };
        let reading = self.read(cpu, &active)?;
        let now = cpu.counting_tsc();
        self.fold(&active, reading, now);
        self.active = Some(Active { since: now.max(active.since), base: reading, ..active });
        Ok(())
    }

    /// Stops counting.
    ///
    /// # Errors
    /// See [`Event::start`].
    pub(crate) fn stop(&mut self, cpu: &mut Cpu) -> io::Result<()> {
        work::charge(1);
        let Some(active) = self.active.take() else {
            return Ok(());
        };
        self.slot = None;
        if let Some(open) = self.backing.counter(active.vcpu).filter(|_| !active.waits) {
            cpu.hold_own();
            open.stop()?;
        }
        let reading = self.read(cpu, &active)?;
        self.fold(&active, reading, cpu.counting_tsc());
        Ok(())
    }

    /// Reads the current count and times of the event's backing.
    ///
    /// # Errors
    /// The host's error. `EIO` if the event is pinned but has been multiplexed since the last update.
    fn read(&mut self, cpu: &mut Cpu, active: &Active) -> io::Result<Reading> {
        if active.waits {
            return Ok(active.base);
        }
        let reading = self.backing.read(cpu)?;
        match self.spec.has(OPEN_PINNED) && !ran_throughout(active.base, reading) {
            // `OPEN_PINNED` does not pin the counter on the host, so the device itself checks whether the
            // counter was running all the time.
            true => Err(io::Error::from_raw_os_error(libc::EIO)),
            false => Ok(reading),
        }
    }

    /// Drops the counters of `vcpu`, whose thread has ended. The event must not be active there.
    pub(crate) fn forget_thread(&mut self, vcpu: u32) {
        self.backing.forget(vcpu);
    }

    /// Puts the event in the error state, which stops it permanently. Returns its leases of shared counters. The caller
    /// must release the leases.
    pub(crate) fn fail(&mut self) -> Vec<(u32, Lease)> {
        self.active = None;
        self.slot = None;
        self.failed = true;
        self.publish_on();
        self.backing.take_counters()
    }

    /// Closes the event's own counters. Returns its leases of shared counters. The caller must release the leases.
    pub(crate) fn take_counters(&mut self) -> Vec<(u32, Lease)> {
        self.backing.take_counters()
    }

    /// Pauses or resumes the event. A paused event does not count.
    ///
    /// # Errors
    /// See [`Event::start`].
    pub(crate) fn pause(&mut self, cpu: &mut Cpu, paused: bool) -> io::Result<()> {
        if self.paused == paused {
            return Ok(());
        }
        if paused {
            self.run(cpu, false)?;
        }
        self.update(cpu)?;
        self.paused = paused;
        if paused {
            self.leave_slot();
            return Ok(());
        }
        let waits = self.active.is_some() && !self.has_slot(cpu)?;
        if let Some(active) = &mut self.active {
            active.waits = waits;
        }
        self.period.iter_mut().for_each(Period::resume);
        if let Some(trace) = &mut self.trace {
            trace.sync(SYNC_RESUME);
        }
        self.run(cpu, true)
    }

    /// Starts or stops the event's own host counter, if the event is active and is not waiting for a [`RunSlot`].
    fn run(&mut self, cpu: &mut Cpu, on: bool) -> io::Result<()> {
        let vcpu = self.active_on().filter(|_| !self.is_waiting());
        match vcpu.and_then(|vcpu| self.backing.counter(vcpu)) {
            Some(open) => {
                cpu.hold_own();
                match on {
                    true => open.start(),
                    false => open.stop(),
                }
            }
            None => Ok(()),
        }
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed
    }

    /// Sets the count to zero. The times keep their values.
    ///
    /// # Errors
    /// See [`Event::start`].
    pub(crate) fn reset(&mut self, cpu: &mut Cpu) -> io::Result<()> {
        self.update(cpu)?;
        self.count = 0;
        if let Some(trace) = &mut self.trace {
            trace.reset();
        }
        Ok(())
    }

    /// Sets a new period, or a new frequency if the event was opened with a frequency.
    ///
    /// # Errors
    /// See [`Event::start`]. `ENOSPC` if the new rate would exceed the vCPU's limit on interrupts. In that case, the
    /// period does not change.
    pub(crate) fn set_period(&mut self, period: Period, limit: RunLimit) -> io::Result<()> {
        let (before, after) = (self.interrupts(), self.spec.interrupts(period.rate()));
        if let Some(slot) = &mut self.slot
            && !slot.change(limit, after)
        {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        let changed = self.change_period(period);
        if let Some(slot) = self.slot.as_mut().filter(|_| changed.is_err()) {
            slot.change(limit, before);
        }
        changed
    }

    fn change_period(&mut self, period: Period) -> io::Result<()> {
        // If overflows are disabled on the host, the host gets the new rate when the throttle is lifted.
        if !self.silent {
            self.backing.set_rate(period.rate())?;
        }
        self.period = Some(period);
        Ok(())
    }

    /// Counts one occurrence. Returns the resulting overflow, if any. `now` returns guest nanoseconds.
    pub(crate) fn count_one(&mut self, now: impl FnOnce() -> u64) -> Option<Completed> {
        work::charge(1);
        if let Backing::Happened(times) = &mut self.backing {
            *times += 1;
        }
        self.period.as_mut()?.grow(1, now)
    }

    /// Decides whether the device writes a record for an overflow at `time`. If it is the last record that the rate
    /// limit allows in a window of guest time, disables overflows on the host until the throttle is lifted, unless
    /// the event has a frequency.
    ///
    /// # Errors
    /// See [`Event::start`].
    pub(crate) fn admit(&mut self, limit: RateLimit, time: u64) -> (Verdict, io::Result<()>) {
        let verdict = self.throttle.admit(limit, time);
        // If the event has a frequency, the host adjusts the period to match it. The frequency does not exceed the rate
        // limit, so overflows can stay enabled.
        let silence = verdict == Verdict::Last && !self.period.is_some_and(Period::is_frequency);
        let silenced = match silence {
            true => self.silence(),
            false => Ok(()),
        };
        (verdict, silenced)
    }

    /// Drops overflows from `time` until the next window of guest time begins. Disables overflows on the host, unless
    /// the event has a frequency.
    ///
    /// # Errors
    /// See [`Event::start`].
    pub(crate) fn exhaust(&mut self, limit: RateLimit, time: u64) -> io::Result<()> {
        self.throttle.close(limit, time);
        match self.period.is_some_and(Period::is_frequency) {
            true => Ok(()),
            false => self.silence(),
        }
    }

    /// Like [`Event::exhaust`], but reduces the frequency of an event that has one. Call this for an event whose
    /// overflows took too much time.
    ///
    /// # Errors
    /// See [`Event::start`].
    pub(crate) fn rest(&mut self, limit: RateLimit, time: u64) -> io::Result<()> {
        self.throttle.close(limit, time);
        self.silence()
    }

    /// Disables overflows of the event's host counters until the throttle is lifted. If the event has a
    /// frequency, sets a frequency of 1 Hz on the host instead.
    fn silence(&mut self) -> io::Result<()> {
        self.silent = true;
        match self.period {
            Some(period) if period.is_frequency() => self.backing.set_rate(Rate::Frequency(1)),
            _ => self.backing.silence(),
        }
    }

    /// Admits an overflow at `time` that needs no work besides its record. This requires that the event has no overflow
    /// limit, does not start or stop other events, is not throttled, and does not become throttled. For any other
    /// overflow, returns `false` and changes nothing. The caller must then call [`Event::admit`].
    pub(crate) fn admit_plain(&mut self, limit: RateLimit, time: u64) -> bool {
        self.limit == 0 && self.effects.is_empty() && self.throttle.admit_within(limit, time)
    }

    /// Returns whether the event is throttled. The overflows of a throttled event leave no records.
    pub(crate) fn is_throttled(&self) -> bool {
        self.throttle.is_closed()
    }

    /// Lifts the throttle if its window has ended at `time`. Returns whether it was lifted.
    ///
    /// # Errors
    /// See [`Event::start`].
    pub(crate) fn unthrottle(&mut self, limit: RateLimit, time: u64) -> io::Result<bool> {
        if !self.throttle.unthrottle(limit, time) {
            return Ok(false);
        }
        match self.period.filter(|_| std::mem::take(&mut self.silent)) {
            Some(period) => self.backing.set_rate(period.rate()).map(|()| true),
            None => Ok(true),
        }
    }

    /// Takes the overflows of the event's host counter on `vcpu`.
    pub(crate) fn drain(&mut self, vcpu: u32) -> Overflows {
        work::charge(1);
        self.backing.drain(vcpu)
    }

    /// Count and times at the last update.
    pub(crate) fn counts(&self, clock: Clock) -> CountSnapshot {
        CountSnapshot {
            count: self.trace.as_ref().map_or(self.count, Trace::count),
            time_enabled: clock.nanoseconds(self.enabled_ticks),
            time_running: clock.nanoseconds(self.running_ticks),
            growing_since: self.active.map(|active| clock.nanoseconds(active.since)),
        }
    }

    /// Returns the number of overflows without a record. For a trace, returns the number of lost bytes.
    pub(crate) fn lost(&self) -> u64 {
        self.trace.as_ref().map_or(self.lost, Trace::lost)
    }

    fn fold(&mut self, active: &Active, reading: Reading, now: u64) {
        let ticks = now.saturating_sub(active.since);
        self.enabled_ticks = self.enabled_ticks.wrapping_add(ticks);
        if active.waits {
            return;
        }
        if !self.paused {
            self.count = self.count.wrapping_add(reading.value.wrapping_sub(active.base.value));
        }
        self.running_ticks = self.running_ticks.wrapping_add(share(
            ticks,
            reading.running.saturating_sub(active.base.running),
            reading.enabled.saturating_sub(active.base.enabled),
        ));
        self.publish_counts();
    }

    fn publish_on(&self) {
        if let Some(group) = self.group.as_ref().filter(|_| self.leads()) {
            let on = self.enabled && !self.failed;
            group.on.store(on, Ordering::Relaxed);
        }
    }

    /// Publishes the event's count and losses to readers of its group on other vCPUs.
    pub(crate) fn publish_counts(&self) {
        if let Some(counts) = &self.last_counts {
            let value = self.trace.as_ref().map_or(self.count, Trace::count);
            counts.set(value, self.lost());
        }
    }
}

/// Returns whether the host's counter ran all the time between two readings.
fn ran_throughout(before: Reading, now: Reading) -> bool {
    let ran = now.running.saturating_sub(before.running);
    ran >= now.enabled.saturating_sub(before.enabled)
}

/// Returns the part of `ticks` during which the host's counter ran: `ticks` times `running` / `enabled`. Returns all of
/// `ticks` if the counter always ran, or if the host measured no time.
fn share(ticks: u64, running: u64, enabled: u64) -> u64 {
    if running >= enabled {
        return ticks;
    }
    let share = u128::from(ticks) * u128::from(running) / u128::from(enabled);
    // The share fits into 64 bits, because it is less than `ticks`: `running` is less than `enabled`.
    u64::try_from(share).unwrap_or(ticks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_time_is_the_hosts_share_of_enabled_time() {
        assert_eq!(share(1000, 0, 0), 1000);
        assert_eq!(share(1000, 50, 50), 1000);
        assert_eq!(share(1000, 25, 100), 250);
        assert_eq!(share(1000, 0, 100), 0);
        assert_eq!(share(u64::MAX, u64::MAX - 1, u64::MAX), u64::MAX - 1);
    }
}

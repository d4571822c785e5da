//! How an event counts: what its count comes from, the times and counts so far, and the room for its own counter.

use std::io;

use super::SavedLife;
use super::backing::Backing;
use crate::abi::{OPEN_EXCLUDE_HOST, OPEN_PINNED};
use crate::cpu::{Cpu, Lease};
use crate::kind::{Exits, Kind, is_hardware};
use crate::settings::CountMode;
use crate::slots::{RunLimit, RunSlot};
use crate::source::{Engine, Overflows, Rate, Reading, Request, Sampling};
use crate::spec::EventSpec;
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

/// An order to an event's counter.
#[derive(Debug, Clone, Copy)]
pub(super) struct Order<'a> {
    pub(super) spec: &'a EventSpec,
    /// The rate of overflows. `None` if the event only counts.
    pub(super) rate: Option<Rate>,
    /// Whether the operator owns the event. Such an event needs no [`RunSlot`], because it does not count towards the
    /// vCPU's [`RunLimit`].
    pub(super) operators: bool,
}

/// The counting of one event.
#[derive(Debug)]
pub(crate) struct Counting {
    /// Has host counters only on vCPUs on which the event was prepared.
    backing: Backing,
    /// `Some` while the event is active. Its own counter on that vCPU then runs, unless it waits or is paused.
    active: Option<Active>,
    /// The part of the vCPU's [`RunLimit`] that the event's own counter uses. `None` unless the event is active.
    slot: Option<RunSlot>,
    /// The number of the event's last wait for a [`RunSlot`]. Each wait on the vCPU has a different number.
    wait: u64,
    /// Until the event is resumed, it neither counts nor writes. The pause does not change the event's state, and the
    /// event's times continue to advance.
    paused: bool,
    /// Whether the host currently records the event's overflows for a later drain.
    batched: bool,
    pub(super) count: u64,
    pub(super) enabled_ticks: u64,
    pub(super) running_ticks: u64,
}

impl Counting {
    pub(super) fn new(spec: &EventSpec, samples: bool, paused: bool) -> Self {
        let records = spec.kind == Kind::ExitTrace(Exits::All);
        Self {
            backing: Backing::new(spec, samples || records),
            active: None,
            slot: None,
            wait: 0,
            paused,
            batched: spec.is_batched(),
            count: 0,
            enabled_ticks: 0,
            running_ticks: 0,
        }
    }

    /// Restores the counts of an event that is not active yet.
    pub(super) fn restore(&mut self, saved: &SavedLife, batched: bool) {
        self.paused = saved.paused;
        self.batched = batched;
        self.count = saved.count;
        self.enabled_ticks = saved.enabled_ticks;
        self.running_ticks = saved.running_ticks;
    }

    pub(super) fn backing(&self) -> &Backing {
        &self.backing
    }

    pub(super) fn backing_mut(&mut self) -> &mut Backing {
        &mut self.backing
    }

    /// The vCPU on which the event currently counts.
    pub(super) fn active_on(&self) -> Option<u32> {
        self.active.map(|active| active.vcpu)
    }

    /// The guest's TSC at the last update of an active event.
    pub(super) fn since(&self) -> Option<u64> {
        self.active.map(|active| active.since)
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.paused
    }

    pub(super) fn is_batched(&self) -> bool {
        self.batched
    }

    /// Returns whether the event's vCPU must handle the event at exits, marks or drains. Returns false for an event
    /// that only counts and whose count can be read at any time.
    pub(super) fn is_watched(&self) -> bool {
        match self.backing {
            Backing::Own(_) | Backing::Exits(_) | Backing::Happened(_) | Backing::Traced | Backing::GuestTime => true,
            Backing::Shared(_) | Backing::Tsc | Backing::AllExits | Backing::Halts => false,
        }
    }

    /// Whether the device itself increments the event's count.
    pub(crate) fn is_kept(&self) -> bool {
        matches!(self.backing, Backing::Exits(_) | Backing::Happened(_))
    }

    // Waits.

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

    /// Reserves a [`RunSlot`] on `cpu` for the event's own counter, if the counter needs one and has none yet.
    /// Returns whether the event may count there.
    ///
    /// # Errors
    /// `ENOSPC` if the vCPU's [`RunLimit`] is reached and the event is pinned.
    fn has_slot(&mut self, cpu: &Cpu, order: &Order<'_>) -> io::Result<bool> {
        if !self.backing.is_own() || order.operators {
            return Ok(true);
        }
        if self.slot.is_none() {
            self.slot = cpu.take_slot(order.rate.map_or(0, |rate| order.spec.interrupts(rate)));
        }
        if self.slot.is_none() && order.spec.has(OPEN_PINNED) {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        Ok(self.slot.is_some())
    }

    /// If the event's counter is waiting for a [`RunSlot`] and can now get one, starts the counter. Returns whether it
    /// is still waiting.
    ///
    /// # Errors
    /// See [`Counting::start`].
    pub(super) fn stop_waiting(&mut self, cpu: &mut Cpu, order: &Order<'_>) -> io::Result<bool> {
        if !self.is_waiting() {
            return Ok(false);
        }
        work::charge(1);
        if !self.has_slot(cpu, order)? {
            return Ok(true);
        }
        self.update(cpu, order)?;
        self.set_waits(false);
        self.run(cpu, true)?;
        Ok(false)
    }

    fn set_waits(&mut self, waits: bool) {
        if let Some(active) = &mut self.active {
            active.waits = waits;
        }
    }

    /// Changes the rate of interrupts for which the counter has a slot, if it has one. Returns whether the new rate fits
    /// within `limit`.
    pub(super) fn change_rate(&mut self, limit: RunLimit, rate: u64) -> bool {
        self.slot.as_mut().is_none_or(|slot| slot.change(limit, rate))
    }

    // Counters.

    /// Opens a host counter for the event on `cpu`, if the event needs one there and has none yet.
    ///
    /// # Errors
    /// The host's error, or `ESRCH` while the vCPU has no thread.
    pub(super) fn prepare(&mut self, cpu: &mut Cpu, order: &Order<'_>) -> io::Result<()> {
        if self.backing.is_prepared(cpu.index) {
            return Ok(());
        }
        let request = self.request(cpu, order);
        self.backing.prepare(cpu, &request, order.operators)
    }

    /// The request for the event's host counter.
    fn request(&self, cpu: &Cpu, order: &Order<'_>) -> Request {
        let spec = order.spec;
        let asked = &spec.request;
        let (kind, config) = spec.kind.counter().unwrap_or((asked.kind, asked.config));
        let hardware = &cpu.backend.settings.hardware;
        let guest_only = hardware.count_mode == CountMode::Guest || order.rate.is_some();
        Request {
            kind,
            config,
            sampling: order
                .rate
                .map(|rate| Sampling { rate, engine: if self.batched { Engine::Batched } else { Engine::Exit } }),
            exclude_user: spec.excludes(true),
            exclude_kernel: spec.excludes(false),
            exclude_host: is_hardware(kind) && (guest_only || spec.has(OPEN_EXCLUDE_HOST)),
            // The guest's `OPEN_PINNED` does not pin the host's counter, because a pinned counter would never yield to
            // the operator's counters. Only the operator's setting pins the counter. `Counting::read` handles
            // `OPEN_PINNED`.
            pinned: is_hardware(kind) && hardware.pinned,
        }
    }

    /// Makes the batched engine or the exit engine take the event's samples from now on. Replaces the event's own
    /// counter, which must be stopped, and does not start it.
    ///
    /// # Errors
    /// See [`Counting::start`].
    pub(super) fn change_engine(&mut self, cpu: &mut Cpu, order: &Order<'_>, batched: bool) -> io::Result<()> {
        work::charge(1);
        self.batched = batched;
        let request = self.request(cpu, order);
        self.backing.replace(cpu, &request)
    }

    /// Starts the counter that [`Counting::change_engine`] opened, unless the event is paused.
    ///
    /// # Errors
    /// See [`Counting::start`].
    pub(super) fn start_replaced(&mut self, cpu: &mut Cpu) -> io::Result<()> {
        if let Some(active) = &mut self.active
            && let Some(open) = self.backing.counter(active.vcpu)
        {
            active.base = open.last;
        }
        if self.paused { Ok(()) } else { self.run(cpu, true) }
    }

    /// Stops the event's own counter and updates count and times, so that the counter can be replaced
    /// ([`Counting::change_engine`]). The event stays active.
    ///
    /// # Errors
    /// See [`Counting::start`].
    pub(super) fn stop_counter(&mut self, cpu: &mut Cpu, order: &Order<'_>) -> io::Result<()> {
        if !self.paused {
            self.run(cpu, false)?;
        }
        self.update(cpu, order)
    }

    /// Drops the counters of `vcpu`, whose thread has ended. The event must not be active there.
    pub(crate) fn forget_thread(&mut self, vcpu: u32) {
        self.backing.forget(vcpu);
    }

    /// Closes the event's own counters. Returns its leases of shared counters. The caller must release the leases.
    pub(crate) fn take_counters(&mut self) -> Vec<(u32, Lease)> {
        self.backing.take_counters()
    }

    /// Stops counting for good, without reading the count. Returns the leases of shared counters. The caller must
    /// release the leases.
    pub(super) fn abandon(&mut self) -> Vec<(u32, Lease)> {
        self.active = None;
        self.slot = None;
        self.take_counters()
    }

    /// Takes the overflows of the event's host counter on `vcpu`.
    pub(crate) fn drain(&mut self, vcpu: u32) -> Overflows {
        work::charge(1);
        self.backing.drain(vcpu)
    }

    // Counting.

    /// Starts counting on `cpu`.
    ///
    /// # Errors
    /// The host's error. The caller must then call [`Event::fail`](super::Event::fail).
    pub(super) fn start(&mut self, cpu: &mut Cpu, order: &Order<'_>) -> io::Result<()> {
        work::charge(1);
        self.prepare(cpu, order)?;
        let waits = !self.paused && !self.has_slot(cpu, order)?;
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
        self.active = Some(Active { vcpu: cpu.index, since: cpu.counting_tsc(), base, waits });
        Ok(())
    }

    /// Updates count and times.
    ///
    /// # Errors
    /// See [`Counting::start`].
    pub(super) fn update(&mut self, cpu: &mut Cpu, order: &Order<'_>) -> io::Result<()> {
        work::charge(1);
        let Some(active) = self.active else {
            return Ok(());
        };
        let reading = self.read(cpu, order, &active)?;
        let now = cpu.counting_tsc();
        self.fold(&active, reading, now);
        self.active = Some(Active { since: now.max(active.since), base: reading, ..active });
        Ok(())
    }

    /// Stops counting.
    ///
    /// # Errors
    /// See [`Counting::start`].
    pub(super) fn stop(&mut self, cpu: &mut Cpu, order: &Order<'_>) -> io::Result<()> {
        work::charge(1);
        let Some(active) = self.active.take() else {
            return Ok(());
        };
        self.slot = None;
        if let Some(open) = self.backing.counter(active.vcpu).filter(|_| !active.waits) {
            cpu.hold_own();
            open.stop()?;
        }
        let reading = self.read(cpu, order, &active)?;
        self.fold(&active, reading, cpu.counting_tsc());
        Ok(())
    }

    /// Pauses the event, or ends its pause. The event then counts only after [`Counting::run`].
    ///
    /// # Errors
    /// See [`Counting::start`].
    pub(super) fn pause(&mut self, cpu: &mut Cpu, order: &Order<'_>, paused: bool) -> io::Result<()> {
        if paused {
            self.run(cpu, false)?;
        }
        self.update(cpu, order)?;
        self.paused = paused;
        let waits = if paused {
            self.slot = None;
            false
        } else {
            self.active.is_some() && !self.has_slot(cpu, order)?
        };
        self.set_waits(waits);
        Ok(())
    }

    /// Starts or stops the event's own host counter, if the event is active and is not waiting for a [`RunSlot`].
    pub(super) fn run(&mut self, cpu: &mut Cpu, on: bool) -> io::Result<()> {
        let vcpu = self.active_on().filter(|_| !self.is_waiting());
        match vcpu.and_then(|vcpu| self.backing.counter(vcpu)) {
            Some(open) => {
                cpu.hold_own();
                if on { open.start() } else { open.stop() }
            }
            None => Ok(()),
        }
    }

    /// Reads the current count and times of the event's backing.
    ///
    /// # Errors
    /// The host's error. `EIO` if the event is pinned but has been multiplexed since the last update.
    fn read(&mut self, cpu: &mut Cpu, order: &Order<'_>, active: &Active) -> io::Result<Reading> {
        if active.waits {
            return Ok(active.base);
        }
        let reading = self.backing.read(cpu)?;
        if order.spec.has(OPEN_PINNED) && !ran_throughout(active.base, reading) {
            // `OPEN_PINNED` does not pin the counter on the host, so the device itself checks whether the
            // counter was running all the time.
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        Ok(reading)
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

//! Checks whether the host's samples of a vCPU's thread have guest addresses, by sampling a guest that runs a few
//! instructions.

pub mod events;
mod known;
mod samples;

use std::io;
use std::ops::AddAssign;
use std::path::Path;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use vpmu_perf::bindings::{PERF_COUNT_SW_CPU_CLOCK, PERF_SAMPLE_IP, PERF_TYPE_SOFTWARE, perf_event_attr};

use self::known::Known;
use crate::micro::{self, MicroError, Ring};

/// How long and how often to sample a guest's loop.
#[derive(Debug, Clone, Copy)]
pub struct Sampling {
    /// Duration of the first attempt. It doubles after each attempt with too few samples, because on a loaded machine
    /// the thread gets little CPU time.
    time: Duration,
    /// Maximum number of attempts.
    attempts: u32,
    /// Nanoseconds of the clock between samples.
    period: u64,
    /// Whether an attempt ends as soon as there are enough samples.
    ends_early: bool,
}

impl Sampling {
    /// For a report about the host, such as the report of `vmm check`. Samples up to four guests at 1 kHz.
    pub const THOROUGH: Self =
        Self { time: Duration::from_millis(200), attempts: 4, period: 1_000_000, ends_early: false };
    /// For a machine that is about to boot. Takes enough samples in a short time. Uses only one small guest, because it
    /// takes longer to create and destroy a guest than to sample it.
    pub const QUICK: Self = Self { time: Duration::from_secs(2), attempts: 1, period: 100_000, ends_early: true };
    /// For a process that has no other way to sample guests. Like [`Sampling::QUICK`], but takes samples less often: on a
    /// slow host, most samples in quick succession are of the host's work for them.
    pub const PATIENT: Self = Self { period: 1_000_000, ..Self::QUICK };
}

/// After each batch of this many samples, the guest's thread checks whether there are enough samples.
const BATCH: u32 = 10;

/// Numbers of samples of a guest's loop, by mode and address.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Samples {
    /// All samples.
    pub total: u32,
    /// Samples that the host labelled as guest kernel or guest user.
    pub guest: u32,
    /// Samples in `guest` whose instruction pointer is inside the guest's loop.
    pub in_loop: u32,
    /// Samples in `guest` that the host labelled as guest user.
    pub labelled_user: u32,
}

impl AddAssign for Samples {
    fn add_assign(&mut self, more: Self) {
        self.total += more.total;
        self.guest += more.guest;
        self.in_loop += more.in_loop;
        self.labelled_user += more.labelled_user;
    }
}

impl Samples {
    /// Fewer samples than this are inconclusive.
    const ENOUGH: u32 = 20;

    /// Returns whether sampling can end. It can end if there are enough samples of the guest. It can also end if there
    /// are many samples in total, but fewer than an eighth of them are of the guest.
    fn are_enough(&self) -> bool {
        self.guest >= Self::ENOUGH || self.total >= 8 * Self::ENOUGH
    }

    /// Returns whether the result also holds for other guests. A small but nonzero number of samples of the guest is
    /// inconclusive, because a busy host takes few samples of the guest, even if it labels them correctly.
    fn are_conclusive(&self) -> bool {
        self.are_enough() && (self.guest == 0 || self.guest >= Self::ENOUGH)
    }

    /// Returns whether host samples have guest instruction pointers. Returns `None` if there are too few samples.
    #[must_use]
    pub fn carry_guest_ips(&self) -> Option<bool> {
        (self.total >= Self::ENOUGH).then_some(self.in_loop > self.total / 2)
    }

    /// Returns whether the device can use the host's samples of a vCPU as guest samples. For this, the host must label
    /// enough samples as guest samples, and nearly all of these must have an address in the guest's loop. Up to three
    /// quarters of all samples may be host samples, because an emulated KVM does a lot of work on the host.
    #[must_use]
    pub fn name_places(&self) -> bool {
        self.guest >= Self::ENOUGH && self.guest >= self.total / 4 && self.in_loop >= self.guest - self.guest / 10
    }
}

/// Returns whether the host's samples of a vCPU thread have the guest's addresses and mode, both in kernel mode and in
/// user mode. Set [`KvmMachine::guest_ips`](crate::KvmMachine::guest_ips) to the result. Samples two small guests at
/// once. This takes tens of milliseconds, or up to seconds on a busy host. It uses three threads besides the caller's,
/// and the signal `SIGRTMIN + 9`.
#[must_use]
pub fn guest_ips() -> bool {
    conclusive_guest_ips(Sampling::QUICK).unwrap_or(false)
}

/// Like [`guest_ips`], but samples as `how` says, and returns `None` if a guest could not run or there were too few samples.
fn conclusive_guest_ips(how: Sampling) -> Option<bool> {
    let knows = |ring| {
        let samples = sample_guest(ring, how).ok()?;
        samples.are_conclusive().then(|| samples.name_places())
    };
    // Probe both modes concurrently, because the host's kernel mostly waits while it creates and destroys a guest.
    let rings = thread::scope(|scope| {
        let user = thread::Builder::new().spawn_scoped(scope, || knows(Ring::User));
        let kernel = knows(Ring::Kernel);
        [kernel, user.ok().and_then(|user| user.join().ok()?)]
    });
    let knows = match rings {
        [Some(true), Some(true)] => Some(true),
        // If the result for one mode is `false`, the answer is `false`, because the device needs guest addresses in
        // both modes.
        rings if rings.contains(&Some(false)) => Some(false),
        _ => None,
    };
    let text = knows.map_or("unknown, assuming false", |knows| if knows { "true" } else { "false" });
    log::info!("host samples contain guest addresses: {text}");
    knows
}

/// The answer of an earlier probe on this host, or a probe ([`guest_ips`]) that runs on its own thread while the
/// VMM prepares a guest.
#[derive(Debug)]
pub struct GuestIps(Answer);

#[derive(Debug)]
enum Answer {
    Known(bool),
    Asked(JoinHandle<Option<bool>>, Option<Known>),
}

impl GuestIps {
    /// Starts the probe, unless a file in `directory` has the answer of a probe that ran since the host booted and
    /// loaded KVM. The file is trusted only if root or the caller owns it and only its owner can write it. A missing
    /// directory is created when the answer is stored.
    ///
    /// # Errors
    /// The host cannot start another thread.
    pub fn begin(directory: Option<&Path>, how: Sampling) -> io::Result<Self> {
        let known = directory.and_then(Known::of_host);
        if let Some(answer) = known.as_ref().and_then(Known::answer) {
            log::info!("host samples contain guest addresses: {answer}, as probed earlier");
            return Ok(Self(Answer::Known(answer)));
        }
        let thread = thread::Builder::new().name("guest-ips".to_owned());
        let thread = thread.spawn(move || conclusive_guest_ips(how))?;
        Ok(Self(Answer::Asked(thread, known)))
    }

    /// Waits for the result. If the result is conclusive, stores it in the directory for the next guests on this host.
    #[must_use]
    pub fn answer(self) -> bool {
        let (thread, known) = match self.0 {
            Answer::Known(answer) => return answer,
            Answer::Asked(thread, known) => (thread, known),
        };
        let answer = thread.join().unwrap_or_else(|_| {
            log::error!("the probe of host samples panicked");
            None
        });
        if let Some((known, answer)) = known.zip(answer)
            && let Err(error) = known.keep(answer)
        {
            log::debug!("the result of the probe could not be stored: {error}");
        }
        answer.unwrap_or(false)
    }
}

/// Samples the CPU clock of a thread while its vCPU loops in `ring`. Ends when there are enough samples, or when the
/// attempts that `how` allows are used up.
///
/// # Errors
/// [`MicroError`]: the host cannot run a guest, or cannot sample the clock.
pub fn sample_guest(ring: Ring, how: Sampling) -> Result<Samples, MicroError> {
    let mut samples = Samples::default();
    for attempt in 0..how.attempts {
        samples += sample_once(ring, how.time * (1 << attempt), how)?;
        if samples.are_enough() {
            break;
        }
    }
    Ok(samples)
}

fn sample_once(ring: Ring, time: Duration, how: Sampling) -> Result<Samples, MicroError> {
    let start = move || {
        let mut attr = perf_event_attr {
            type_: PERF_TYPE_SOFTWARE,
            config: PERF_COUNT_SW_CPU_CLOCK.into(),
            sample_type: PERF_SAMPLE_IP.into(),
            ..Default::default()
        };
        attr.__bindgen_anon_1.sample_period = how.period;
        attr.__bindgen_anon_2.wakeup_events = BATCH;
        let event = events::Event::open(attr)?;
        if how.ends_early {
            event.announce(micro::signal())?;
        }
        let ring = event.ring()?;
        event.enable()?;
        Ok((event, ring))
    };
    let stopped = |(event, ring): &(events::Event, events::Ring)| {
        event.disable()?;
        Ok(samples::count(&ring.records(), micro::in_loop))
    };
    let done = move |observer: &(events::Event, events::Ring)| {
        let enough = |observer| {
            let enough = stopped(observer)?.are_enough();
            observer.0.enable().map(|()| enough)
        };
        // End the run on an error. `stopped` is called again after the run and then returns the error.
        how.ends_early && enough(observer).unwrap_or(true)
    };
    micro::spin(time, ring, start, done, move |observer| stopped(&observer))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_ips_are_known_by_the_share_of_samples_in_the_loop() {
        let of = |total, in_loop| Samples { total, in_loop, ..Samples::default() };
        assert_eq!(of(200, 199).carry_guest_ips(), Some(true));
        assert_eq!(of(200, 0).carry_guest_ips(), Some(false));
        assert_eq!(of(3, 3).carry_guest_ips(), None);
        let of_guest = |total, guest, in_loop| Samples { guest, ..of(total, in_loop) };
        assert!(of_guest(200, 190, 180).name_places());
        assert!(of_guest(700, 190, 180).name_places(), "a busy host");
        assert!(!of_guest(200, 190, 100).name_places());
        assert!(!of_guest(200, 0, 0).name_places());
        assert!(!of_guest(8, 8, 8).name_places());
        assert!(of_guest(190, 190, 0).are_enough() && of(200, 0).are_enough());
        assert!(!of(30, 0).are_enough());
        assert!(of(200, 0).are_conclusive() && of_guest(200, 20, 0).are_conclusive());
        assert!(!of(30, 0).are_conclusive() && !of_guest(200, 19, 0).are_conclusive());
    }
}

//! The abilities of `vmm serve` on this host, for guests of other VMMs.

use std::fs;

use rustix::thread::CapabilitySet;
use serde::Serialize;

use crate::probe::Check;

/// KVM's files about its VMs. The offsets of their TSCs are among them.
const KVM_FILES: &str = "/sys/kernel/debug/kvm";

/// The abilities of `vmm serve` if this user starts it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Serving {
    /// Whether it can count the threads of any user's VMM, which takes `CAP_PERFMON`.
    pub any_user: bool,
    /// Whether it can count the threads of this user's VMMs, in kernel mode, too.
    pub own_user: bool,
    /// Whether KVM tells the offset of a guest's TSC.
    pub guest_time: bool,
}

impl Serving {
    /// Asks the host. `perfmon` is true if counting the kernel mode of this user's threads takes `CAP_PERFMON`.
    pub(super) fn find(perfmon: bool) -> Self {
        let held = rustix::thread::capabilities(None);
        let any_user = held.is_ok_and(|held| held.effective.contains(CapabilitySet::PERFMON));
        Self { any_user, own_user: any_user || !perfmon, guest_time: fs::read_dir(KVM_FILES).is_ok() }
    }

    /// The lines of the table.
    pub(super) fn checks(&self) -> [Check; 2] {
        let guests = match (self.any_user, self.own_user) {
            (true, _) => ("of any user's VMM", "`vmm serve` counts the guests of every QEMU on this machine"),
            (false, true) => (
                "of this user's VMMs",
                "`vmm serve` counts the guests of your own QEMUs, without Landlock; run it as root for those of other users",
            ),
            (false, false) => {
                ("none", "`vmm serve` counts no guest: run it as root, or set kernel.perf_event_paranoid to 1")
            }
        };
        let times = match self.guest_time {
            true => ("the guest's", "records of `vmm serve` fit the guest's own"),
            false => (
                "the host's",
                "records of `vmm serve` have times that the guest cannot compare with its own: run it as root, with debugfs \
                 mounted at /sys/kernel/debug",
            ),
        };
        [Check::new("serve.guests", guests.0, guests.1), Check::new("serve.times", times.0, times.1)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_names_the_guests_that_can_be_counted() {
        let of = |any_user, own_user| {
            let [guests, _] = Serving { any_user, own_user, guest_time: true }.checks();
            (guests.value, guests.consequence)
        };
        assert_eq!(of(true, true).0, "of any user's VMM");
        assert!(of(false, true).1.contains("run it as root"));
        assert!(of(false, false).1.contains("perf_event_paranoid"));
    }
}

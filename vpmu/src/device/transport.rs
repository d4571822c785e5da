//! The device as its transport sees it: features, configuration space, queues, reset.

use virtio_queue::{Queue, QueueT};
use vm_memory::GuestMemoryMmap;
use zerocopy::IntoBytes;

use super::{Error, Vpmu};
use crate::abi::{
    COUNT_GUEST, Config, F_AUX, F_DOORBELL, F_RING, F_TASK_PAGE, F_WINDOW, QUEUE_CONTROL,
    QUEUE_EVENT, QUEUE_VCPU, VERSION,
};
use crate::catalogue::Catalogue;
use crate::event::Host;
use crate::state::State;

/// `VIRTIO_F_VERSION_1`.
const VERSION_1: u64 = 1 << 32;
/// Those offered whatever the VMM has.
const FEATURES: u64 = VERSION_1 | 1 << F_RING | 1 << F_TASK_PAGE | 1 << F_DOORBELL | 1 << F_AUX;

impl Vpmu {
    /// Feature bits offered, `VIRTIO_F_VERSION_1` included.
    #[must_use]
    pub fn features(&self) -> u64 {
        let window = self.locked().output.has_window();
        FEATURES | u64::from(window) << F_WINDOW
    }

    /// Number of virtqueues: control, event, one per vCPU.
    #[must_use]
    pub fn queue_count(&self) -> usize {
        usize::from(QUEUE_VCPU) + self.vcpus.len()
    }

    /// Reads configuration space; bytes beyond it are zero.
    pub fn read_config(&self, offset: u64, data: &mut [u8]) {
        let entries = self.catalogue().entries().len();
        let limits = &self.settings.limits;
        let config = Config {
            version: VERSION.into(),
            vcpus: self.settings.vcpus.into(),
            max_events: limits.max_events.into(),
            max_ring_pages: limits.max_ring_pages.into(),
            catalogue_len: u32::try_from(entries).unwrap_or(u32::MAX).into(),
            count_mode: COUNT_GUEST.into(),
            time_mult: self.clock.mult.into(),
            time_shift: self.clock.shift.into(),
            tsc_khz: self.settings.tsc_khz.into(),
            max_sample_rate: limits.max_sample_rate.into(),
            max_aux_pages: limits.max_aux_pages.into(),
            max_persistent: limits.max_persistent.into(),
            ..Config::default()
        };
        data.fill(0);
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        if let Some(rest) = config.as_bytes().get(offset..) {
            let len = rest.len().min(data.len());
            data[..len].copy_from_slice(&rest[..len]);
        }
    }

    /// The driver has set `DRIVER_OK`.
    ///
    /// # Errors
    /// [`Error`] for queues or features that cannot serve; the device stays inactive.
    pub fn activate(
        &self,
        memory: GuestMemoryMmap,
        features: u64,
        queues: Vec<Queue>,
    ) -> Result<(), Error> {
        self.reset();
        if features & VERSION_1 == 0 || features & !self.features() != 0 {
            return Err(Error::Features(features));
        }
        if queues.len() != self.queue_count() {
            return Err(Error::QueueCount {
                expected: self.queue_count(),
                given: queues.len(),
            });
        }
        for (index, queue) in queues.iter().enumerate() {
            let needed = index == usize::from(QUEUE_CONTROL);
            if (needed || queue.ready()) && !queue.is_valid(&memory) {
                return Err(Error::Queue(index));
            }
        }
        let activated = self.locked().activate(memory, features, queues);
        activated.map_err(Error::WindowOverlaps)
    }

    /// Forgets the driver and its memory, which is not touched afterwards, and closes every event but the
    /// persistent ones that need neither: those go on.
    pub fn reset(&self) {
        self.locked().reset(&self.host());
    }

    /// The driver notified `queue`. A vCPU queue is served on the thread of the vCPU that
    /// notified, `vcpu`, before that vCPU runs on; the other queues from any thread.
    pub fn notify(&self, queue: u16, vcpu: Option<u32>) {
        if queue == QUEUE_CONTROL {
            return self.serve_control();
        }
        self.serve(|state, host| match (queue, vcpu) {
            (QUEUE_EVENT, _) => ((), false),
            (queue, Some(by)) if self.vcpu(by).is_some() => {
                let of = u32::from(queue - QUEUE_VCPU);
                let Some(on) = self.vcpu(of) else {
                    return ((), false);
                };
                on.count_kick();
                ((), state.serve_commands(host, of, by))
            }
            _ => {
                log::warn!("queue {queue} was notified, but not by a vCPU of this device");
                ((), false)
            }
        });
    }

    fn serve_control(&self) {
        let catalogue = self.catalogue();
        let serve = |state: &mut State, host: &Host<'_>| {
            let served = state.serve_control(host, catalogue);
            (served.asks_guest_ips, served.interrupt)
        };
        if self.serve(serve) {
            self.ask_guest_ips();
            self.serve(serve);
        }
    }

    /// Asks the machine, if nobody has. It may try out a guest for it: were the lock held, every vCPU
    /// that needs the device would stand still as long.
    pub(super) fn ask_guest_ips(&self) {
        self.guest_ips
            .get_or_init(|| self.machine.reports_guest_ips());
    }

    /// Asked for late, when the machine has its vCPUs and can tell what it counts.
    pub(super) fn catalogue(&self) -> &Catalogue {
        self.catalogue
            .get_or_init(|| Catalogue::new(&*self.source, &*self.machine, self.settings.vcpus))
    }
}

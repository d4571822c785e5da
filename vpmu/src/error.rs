//! The errors of the whole device. The modules below the device return them too, so they stand below these modules.

use std::io;

use crate::abi::QUEUE_VCPU;
use crate::settings::LimitsError;

/// The number of vCPUs is limited by the number of a virtio device's queues.
pub(crate) const MAX_VCPUS: u32 = (u16::MAX - QUEUE_VCPU) as u32;

/// An error from creating a device, activating it or attaching a thread to it.
#[derive(Debug, thiserror::Error)]
#[expect(clippy::error_impl_error, reason = "users write `vpmu::Error`, like `std::io::Error`")]
pub enum Error {
    /// Too few or too many vCPUs.
    #[error("a PMU device has 1 to {MAX_VCPUS} vCPUs, not {0}")]
    Vcpus(u32),
    /// The TSC frequency is unknown, so the device cannot timestamp samples.
    #[error("the guest's TSC frequency is not known, so the device cannot timestamp samples")]
    TscFrequency,
    /// A limit is zero or cannot be enforced.
    #[error(transparent)]
    Limits(#[from] LimitsError),
    /// The driver accepted a feature that was not offered, or did not accept `VIRTIO_F_VERSION_1`.
    #[error("the driver negotiated features {0:#x}, which this device cannot serve")]
    Features(u64),
    /// The number of queues that the transport set up differs from the number of queues that the device has.
    #[error("the PMU device has {expected} queues, but the transport set up {given}")]
    QueueCount {
        /// [`Vpmu::queue_count`](crate::Vpmu::queue_count).
        expected: usize,
        /// The number of queues that the transport set up.
        given: usize,
    },
    /// The size or the rings of a queue are not valid, or the control queue is not ready.
    #[error("the driver did not set up queue {0}, or its size or rings are not valid")]
    Queue(usize),
    /// The window is not one region of whole pages.
    #[error("the window must be one region of whole pages that starts at a page boundary")]
    Window,
    /// A producer's name, text or format is not valid, or another producer has the name.
    #[error(
        "invalid AUX producer {0:?}: it needs a unique name of 1 to 39 bytes, a text of at most 127 bytes, and \
         a format of 128 or more"
    )]
    Producer(&'static str),
    /// The device already has AUX producers.
    #[error("the PMU device already has AUX producers: pass all of them in one call")]
    ProducersTwice,
    /// The device already has ORC tables.
    #[error("the PMU device already has ORC tables: pass those of the guest's kernel once")]
    OrcTwice,
    /// The window overlaps guest memory.
    #[error("the window overlaps guest memory")]
    WindowOverlaps,
    /// There is no such vCPU.
    #[error("the PMU device has no vCPU {0}")]
    NoVcpu(u32),
    /// The vCPU already has a session.
    #[error("a thread is already attached to vCPU {0}")]
    Attached(u32),
    /// The vCPU's thread must attach itself if the device is in the VMM, and must be named if it is not.
    #[error("a device in the VMM attaches its vCPUs with `attach`, a remote device with `attach_thread`")]
    Remote,
}

/// An error of [`Vpmu::flush`](crate::Vpmu::flush). The data of all events that did not fail has been published.
#[derive(Debug, thiserror::Error)]
pub enum FlushError {
    /// There is no event with this id.
    #[error("there is no event {0}")]
    NoEvent(u64),
    /// The host no longer counts the event. Its earlier records have been published.
    #[error("event {0} is in the error state")]
    Failed(u64),
    /// A vCPU may have pending samples, but cannot be made to leave the guest.
    #[error("vCPU {vcpu} cannot be made to leave the guest")]
    Inside {
        /// The index of the vCPU.
        vcpu: u32,
        /// The machine's error.
        #[source]
        source: io::Error,
    },
}

/// Why a device cannot be saved now.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// A vCPU is in its run call, or its exit has not been reported yet.
    #[error("vCPU {0} is in the guest")]
    Inside(u32),
    /// A vCPU notified a queue, and some of the commands have not been executed yet:
    /// [`VcpuSession::resume`](crate::VcpuSession::resume) returns [`Turn::Unfinished`](crate::Turn::Unfinished).
    #[error("vCPU {0} has pending commands")]
    Unserved(u32),
    /// An [`AuxWriter`](crate::AuxWriter) writes to the AUX area that was mapped through this event.
    #[error("a producer in the VMM is writing to the AUX area of event {0}")]
    Producing(u64),
}

/// Why a state cannot be restored. A failed restore leaves the device unchanged.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The device already has events, a driver or an attached vCPU thread.
    #[error("the device is in use")]
    InUse,
    /// The state has a format that this version of the crate cannot read.
    #[error("the state has format {0}, which this version cannot read")]
    Format(u32),
    /// The device and the state have different numbers of vCPUs.
    #[error("the state has {saved} vCPUs, but the device has {here}")]
    Vcpus {
        /// The state's number of vCPUs.
        saved: usize,
        /// The device's number of vCPUs.
        here: usize,
    },
    /// A device-wide value is invalid.
    #[error("the state's {0} is invalid")]
    Figure(&'static str),
    /// The transport's features contradict the saved features, or this device does not offer one of the saved features.
    #[error(
        "the saved features {saved:#x} contradict the transport's features {given:#x}, or include one that this device \
         does not offer"
    )]
    Features {
        /// The features in the state.
        saved: u64,
        /// The features that the transport passed now.
        given: u64,
    },
    /// The transport's queues or features are not valid, or the window overlaps guest memory.
    #[error("cannot restore the driver's state")]
    Driver(#[from] Error),
    /// An event is invalid.
    #[error("event {id}: {what}")]
    Event {
        /// Its id.
        id: u64,
        /// The fault.
        what: &'static str,
    },
    /// A ring or an AUX area is invalid.
    #[error("ring or area of event {id}: {what}")]
    Sink {
        /// The event for which the ring or area was mapped.
        id: u64,
        /// The fault.
        what: &'static str,
    },
    /// The sink of a family (an event and the events inherited from it) is invalid.
    #[error("family of event {owner}: {what}")]
    Family {
        /// The event from which the other events of the family are inherited.
        owner: u64,
        /// The fault.
        what: &'static str,
    },
    /// One event cannot start or stop the other.
    #[error("link of event {trigger} to event {target}: {what}")]
    Link {
        /// The event that overflows.
        trigger: u64,
        /// The event that it starts or stops.
        target: u64,
        /// The fault.
        what: &'static str,
    },
    /// A pending notice is invalid.
    #[error("notice of event {event}: {what}")]
    Notice {
        /// The event that it names.
        event: u64,
        /// The fault.
        what: &'static str,
    },
    /// The state of a vCPU is invalid.
    #[error("vCPU {vcpu}: {what}")]
    Vcpu {
        /// The index of the vCPU.
        vcpu: u32,
        /// The fault.
        what: &'static str,
    },
}

//! Errors of saving and restoring a device.

use crate::device::Error;

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

/// The fault in an invalid part of a [`SavedState`](crate::SavedState).
pub(crate) type Fault = &'static str;

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

//! Device id, feature bits, queues and configuration space.

use zerocopy::little_endian::{U16, U32, U64};

/// The virtio device id, until the virtio specification assigns one to this type of device.
pub const DEVICE_ID: u32 = 63;
/// The version of this interface, in [`Config::version`].
pub const VERSION: u32 = 4;

/// Feature bit: the device writes samples into rings in guest memory.
pub const F_RING: u32 = 0;
/// Feature bit: the device reads the running task from a page per vCPU
/// ([`TaskPage`](super::TaskPage)).
pub const F_TASK_PAGE: u32 = 1;
/// Feature bit: shared memory region [`SHM_DOORBELL`] exists.
pub const F_DOORBELL: u32 = 2;
/// Feature bit: the device writes traces into AUX areas in guest memory.
pub const F_AUX: u32 = 3;
/// Feature bit: shared memory region [`SHM_WINDOW`] exists.
pub const F_WINDOW: u32 = 4;
/// Feature bit: events can be made persistent and listed.
pub const F_PERSISTENT: u32 = 5;
/// Feature bit: events can start and stop each other.
pub const F_LINKS: u32 = 6;
/// Feature bit: events can be flushed.
pub const F_FLUSH: u32 = 7;
/// The device-specific feature bits are the bits below this one. [`Config::features`] repeats them.
pub const F_END: u32 = 24;

/// Virtqueue index of the control queue.
pub const QUEUE_CONTROL: u16 = 0;
/// Virtqueue index of the event queue (device to driver, [`Notice`](super::Notice)).
pub const QUEUE_EVENT: u16 = 1;
/// Virtqueue index of vCPU 0's queue; vCPU n has `QUEUE_VCPU + n`.
pub const QUEUE_VCPU: u16 = 2;

/// Shared memory region id of the doorbell page: a 32-bit write at offset 0 of the page makes a mark on the
/// vCPU that executes the write. The value written is the mark's value.
pub const SHM_DOORBELL: u8 = 0;
/// Shared memory region id of the window: the VMM's memory for rings that outlive a reset.
pub const SHM_WINDOW: u8 = 1;

wire! {
    /// The device's configuration space.
    pub struct Config {
        /// [`VERSION`].
        pub version: U32,
        /// Number of vCPUs, each with a vCPU queue.
        pub vcpus: U32,
        /// Maximum number of the guest's open events.
        pub max_events: U32,
        /// Maximum number of data pages of one ring, a power of two.
        pub max_ring_pages: U32,
        /// Number of entries in the catalogue.
        pub catalogue_len: U32,
        /// Whether counts of hardware events include the host's work for the vCPU: [`COUNT_GUEST`] or
        /// [`COUNT_VCPU`].
        pub count_mode: U32,
        /// Nanoseconds added to the scaled TSC; see [`Config::time_mult`].
        pub time_zero: U64,
        /// Record time = `time_zero + ((guest_tsc * time_mult) >> time_shift)` nanoseconds, with a
        /// 128-bit product.
        pub time_mult: U32,
        /// See [`Config::time_mult`].
        pub time_shift: U16,
        /// One of `REFUSED_*`: the reason why the catalogue has no hardware events. [`REFUSED_NOT`] if the
        /// catalogue has hardware events.
        pub refused_hardware: u8,
        /// The same as [`Config::refused_hardware`], for the host's software events.
        pub refused_software: u8,
        /// Guest TSC frequency in kHz.
        pub tsc_khz: U32,
        /// Maximum samples per second of one event, and the highest frequency that
        /// [`OPEN_FREQ`](super::OPEN_FREQ) accepts.
        pub max_sample_rate: U32,
        /// Maximum number of pages of one AUX area, a power of two.
        pub max_aux_pages: U32,
        /// Maximum number of the guest's persistent events.
        pub max_persistent: U32,
        /// The offered device-specific feature bits, repeated here because some transports hide them.
        pub features: U64,
    }
}

/// Reason for a refusal: none. The host did not refuse.
pub const REFUSED_NOT: u8 = 0;
/// Reason for a refusal: something else on the host uses the counters exclusively.
pub const REFUSED_IN_USE: u8 = 1;
/// Reason for a refusal: the VMM lacks a permission.
pub const REFUSED_PERMISSION: u8 = 2;
/// Reason for a refusal: the VMM has no free file descriptor.
pub const REFUSED_DESCRIPTORS: u8 = 3;
/// Reason for a refusal: the host has no such event, or no PMU.
pub const REFUSED_ABSENT: u8 = 4;
/// Reason for a refusal: the operator has disabled or denied events of this kind.
pub const REFUSED_POLICY: u8 = 5;
/// Reason for a refusal: any other error of the host.
pub const REFUSED_OTHER: u8 = 6;
/// Reason for a refusal: the VMM can run on CPUs with different core PMUs, or on CPUs without a core PMU.
pub const REFUSED_SEVERAL_PMUS: u8 = 7;
/// Reason for a refusal: the host's KVM supports mediated PMUs, and an open hardware event would prevent VMs
/// with a mediated PMU from starting.
pub const REFUSED_MEDIATED: u8 = 8;

/// [`Config::count_mode`]: hardware events count only while the guest runs.
pub const COUNT_GUEST: u32 = 0;
/// [`Config::count_mode`]: hardware events also count the host's work for the vCPU.
pub const COUNT_VCPU: u32 = 1;

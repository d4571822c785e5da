//! The Linux driver's interface for guest programs: arguments of the ioctls of `/dev/vpmu` and of event descriptors, in
//! the guest's byte order. `guest-driver/linux/vpmu_uapi.h` has the same definitions in C and documents each call;
//! kinds, catalogue flags and packets are the same as in the device interface.

/// Defines an argument struct of an ioctl. Its fields are laid out in order, without padding.
macro_rules! call {
    ($(#[$about:meta])* pub struct $name:ident { $($fields:tt)* }) => {
        $(#[$about])*
        #[derive(
            Debug,
            Clone,
            Copy,
            zerocopy::FromBytes,
            zerocopy::IntoBytes,
            zerocopy::Immutable,
            zerocopy::KnownLayout,
        )]
        #[repr(C)]
        pub struct $name { $($fields)* }

        impl Default for $name {
            /// All bytes zero.
            fn default() -> Self {
                zerocopy::FromZeros::new_zeroed()
            }
        }
    };
}

call! {
    /// Properties of the device, which [`IOC_INFO`] returns.
    pub struct Info {
        /// Version of the device interface: [`VERSION`](crate::VERSION).
        pub version: u32,
        /// Number of vCPUs that the device counts on.
        pub vcpus: u32,
        /// Maximum number of the guest's open events.
        pub max_events: u32,
        /// Maximum number of data pages of one ring.
        pub max_ring_pages: u32,
        /// Number of entries in the catalogue.
        pub catalogue_len: u32,
        /// One of `COUNT_*`.
        pub count_mode: u32,
        /// Record time = `time_zero + ((tsc * time_mult) >> time_shift)` nanoseconds.
        pub time_zero: u64,
        /// See `time_zero`.
        pub time_mult: u32,
        /// See `time_zero`.
        pub time_shift: u32,
        /// `perf_event_attr::type` of the PMU `vpmu`.
        pub pmu_type: u32,
        /// Frequency of the guest's TSC in kHz.
        pub tsc_khz: u32,
        /// Maximum samples per second of one event.
        pub max_sample_rate: u32,
        /// Maximum number of pages of one AUX area.
        pub max_aux_pages: u32,
        /// Maximum number of the guest's persistent events.
        pub max_persistent: u32,
        /// `perf_event_attr::type` of the PMU `persistent`.
        pub persistent_type: u32,
    }
}

call! {
    /// What [`IOC_EVENT`] returns.
    pub struct EventState {
        /// The event's id on the device, which the records that the host writes contain.
        pub id: u64,
        /// The engine of its samples, one of `ENGINE_*`.
        pub engine: u32,
        /// Zero.
        pub reserved: u32,
    }
}

/// Bytes of [`PersistentEntry::attr`]: the size of `perf_event_attr` in Linux 6.1.
pub const ATTR_SIZE: usize = 128;

call! {
    /// The argument of [`IOC_DETACH`].
    pub struct Detach {
        /// Output: the event's id. To open the event again, pass the id in `perf_event_attr::config`.
        pub id: u64,
        /// The name, padded with zeros. If all bytes are zero, the event keeps its name; an event without a
        /// name gets the name `event` followed by its id.
        pub name: [u8; crate::PERSISTENT_NAME],
    }
}

call! {
    /// The argument of [`IOC_PERSISTENT`].
    pub struct Persistent {
        /// List only events with a higher id.
        pub after: u64,
        /// Maximum number of events to list.
        pub count: u32,
        /// Zero.
        pub reserved: u32,
        /// Address of an array of `count` [`PersistentEntry`].
        pub entries: u64,
    }
}

call! {
    /// The current state of a persistent event.
    pub struct PersistentEntry {
        /// The event's id. To open the event again, pass the id in `perf_event_attr::config`.
        pub id: u64,
        /// The event's name in sysfs, padded with zeros.
        pub name: [u8; crate::PERSISTENT_NAME],
        /// The CPU on which to open the event again; all ones while the CPU is unknown.
        pub cpu: u32,
        /// Pages of the event's ring, including the metadata page; zero if the event has no ring.
        pub pages: u32,
        /// One of `ENGINE_*`.
        pub engine: u32,
        /// `PERSISTENT_*`.
        pub flags: u32,
        /// The event's `perf_event_attr`. Its `disabled` and `sample_period` have their current values.
        pub attr: [u8; ATTR_SIZE],
    }
}

/// [`PersistentEntry::flags`]: the event's ring outlives a reset of the guest.
pub const PERSISTENT_WINDOW: u32 = 1 << 1;
/// [`PersistentEntry::flags`]: the event's ring overwrites its oldest records; programs map it
/// read-only.
pub const PERSISTENT_OVERWRITE: u32 = 1 << 2;

call! {
    /// The argument of [`IOC_WAKEUP`].
    pub struct Wakeup {
        /// The wakeup interval in `unit`: 1 to 2^32 - 1. The call starts a new interval.
        pub every: u64,
        /// One of `WAKEUP_*`.
        pub unit: u32,
        /// Zero.
        pub reserved: u32,
    }
}

call! {
    /// The argument of [`IOC_PERF`]: a call for an event.
    pub struct Perf {
        /// The descriptor of an event of this device's PMUs, from perf_event_open(2).
        pub fd: i32,
        /// The call: [`IOC_EVENT`], [`IOC_FLUSH`], [`IOC_DETACH`], [`IOC_ATTACH`], [`IOC_SET_STARTER`] or
        /// [`IOC_SET_STOPPER`].
        pub call: u32,
        /// The argument of the ioctl that `call` names: zero, an address, or the file descriptor of a target.
        pub arg: u64,
    }
}

call! {
    /// The argument of [`IOC_CATALOGUE`].
    pub struct Catalogue {
        /// First entry to read.
        pub first: u32,
        /// Maximum number of entries to read.
        pub count: u32,
        /// Address of an array of `count` [`CatalogueEntry`].
        pub entries: u64,
    }
}

call! {
    /// One event that the host can count; see [`crate::CatalogueEntry`].
    pub struct CatalogueEntry {
        /// One of `KIND_*`.
        pub kind: u32,
        /// `CATALOGUE_*`.
        pub flags: u32,
        /// The event within the kind.
        pub config: u64,
        /// The name for `vperf -e`.
        pub name: [u8; 40],
        /// Unit of the count.
        pub unit: [u8; 16],
        /// Source of the count.
        pub source: [u8; 56],
        /// Description of the counted events.
        pub counts: [u8; 128],
    }
}

/// Lowest bit of the event kind in `perf_event_attr::config` of the PMU `vpmu`; the bits below it select the
/// event within the kind.
pub const CONFIG_KIND_SHIFT: u32 = 48;
/// `perf_event_attr::config1` of the PMU `vpmu`: the event opens paused and does not count until its starter
/// overflows.
pub const CONFIG1_ENABLE_ON_STARTER: u64 = 1 << 0;
/// Lowest bit of the sampling engine in `perf_event_attr::config1` of the PMU `vpmu`.
pub const CONFIG1_ENGINE_SHIFT: u32 = 1;
/// The bits of the sampling engine.
pub const CONFIG1_ENGINE: u64 = 3 << CONFIG1_ENGINE_SHIFT;
/// `perf_event_attr::config1` of the PMU `vpmu`: the host writes the event's records to a ring; see [`IOC_RING`].
pub const CONFIG1_RING: u64 = 1 << 3;
/// `perf_event_attr::config1` of the PMU `vpmu`: the event is persistent, as after [`IOC_DETACH`].
pub const CONFIG1_PERSISTENT: u64 = 1 << 4;
/// `perf_event_attr::config1` of the PMU `vpmu`: the trace is paused until a member of its group resumes it.
pub const CONFIG1_AUX_START_PAUSED: u64 = 1 << 5;
/// `perf_event_attr::config1` of the PMU `vpmu`: an overflow pauses the trace that leads the group.
pub const CONFIG1_AUX_PAUSE: u64 = 1 << 6;
/// `perf_event_attr::config1` of the PMU `vpmu`: an overflow resumes the trace that leads the group.
pub const CONFIG1_AUX_RESUME: u64 = 1 << 7;

/// The type of the driver's ioctls.
pub const IOC_MAGIC: u32 = 0xb6;

const READ: u32 = 2;
const WRITE: u32 = 1;

/// The kernel's `_IOC`, as on x86 and arm64.
const fn ioc(direction: u32, number: u32, size: usize) -> u32 {
    assert!(size < 1 << 14);
    #[expect(clippy::cast_possible_truncation, reason = "asserted above")]
    let size = size as u32;
    direction << 30 | size << 16 | IOC_MAGIC << 8 | number
}

/// Writes an [`Info`] that describes the device.
pub const IOC_INFO: u32 = ioc(READ, 0, size_of::<Info>());
/// The argument is the descriptor of an event; returns the descriptor of the event's ring.
pub const IOC_RING: u32 = ioc(0, 1, 0);
/// The argument is a [`Catalogue`]; returns the number of entries written.
pub const IOC_CATALOGUE: u32 = ioc(WRITE, 2, size_of::<Catalogue>());
/// Places a mark on the caller's CPU; the argument is the mark's value.
pub const IOC_MARK: u32 = ioc(0, 3, 0);
/// By [`IOC_PERF`]: writes an [`EventState`].
pub const IOC_EVENT: u32 = ioc(READ, 4, size_of::<EventState>());
/// The argument is a [`Persistent`]; returns the number of entries written.
pub const IOC_PERSISTENT: u32 = ioc(WRITE, 5, size_of::<Persistent>());
/// By [`IOC_PERF`], or on a ring: flushes the event and those that inherit it. On the device: flushes every persistent
/// event.
pub const IOC_FLUSH: u32 = ioc(0, 6, 0);
/// By [`IOC_PERF`]: makes the event persistent. The argument is a [`Detach`], in which the call returns the event's id.
pub const IOC_DETACH: u32 = ioc(READ | WRITE, 7, size_of::<Detach>());
/// By [`IOC_PERF`]: makes the event non-persistent. The event then ends when its last file descriptor is closed and its
/// ring is no longer mapped.
pub const IOC_ATTACH: u32 = ioc(0, 8, 0);
/// By [`IOC_PERF`]: makes overflows of the event start another event, the target. The argument is the target's
/// file descriptor.
pub const IOC_SET_STARTER: u32 = ioc(0, 9, 0);
/// By [`IOC_PERF`]: makes overflows of the event stop another event, the target. The argument is the target's file
/// descriptor.
pub const IOC_SET_STOPPER: u32 = ioc(0, 10, 0);
/// On the device: the argument is a [`Perf`].
pub const IOC_PERF: u32 = ioc(WRITE, 11, size_of::<Perf>());
/// On a ring: takes a [`Wakeup`].
pub const IOC_WAKEUP: u32 = ioc(WRITE, 12, size_of::<Wakeup>());
